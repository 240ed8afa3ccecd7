#!/usr/bin/env bash
# Runs the tests and ends with what failed, a line each (also in $target/failed-tests.txt), and one plain line, "N passed, N failed":
#   test.sh              everything that CI runs
#   test.sh operations   all of stock test-backend-ops on our device, many random graphs, and the gates that take long
# `make` has built the stock programs before, and for `operations` the release library.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=${CARGO_TARGET_DIR:-target}
passed=0 failed=0
folder=$(mktemp -d)
log=$folder/log
failures=$target/failed-tests.txt
mkdir -p "$target"
: > "$failures"
builder=
trap '[ -z "$builder" ] || kill -- "-$builder" 2> /dev/null || true; rm -rf "$folder"' EXIT
# Tests of stock hosts that measure time or memory, or keep the processors busy on purpose: they run one at a time, all others three at a time,
# because hosts start, sleep and wait for each other much of the time.
alone=(compared:: cancelled_loads:: endurance:: interrupts:: learned::fixed_runs load_time:: storage:: telemetry::)

# What failed in a step, a line each: the test, where it panicked, and how its message begins. A step that ended badly without a failed test
# shows its last words.
tell_failures() { # title
  awk -v title="$1" '
    function tell() { if (name != "") { print title ": " name ": " substr(text, 1, 400); told++ } name = "" }
    /^---- .* stdout ----$/ { tell(); name = $2; text = ""; inside = 0; next }
    /^test result: / || /^failures:$/ { tell() }
    name != "" && / panicked at / { inside = 1; sub(/.* panicked at /, "") }
    name != "" && /^(note: |stack backtrace:)/ { inside = 0 }
    name != "" && /^Error: / { inside = 1 }
    name != "" && inside && length(text) < 400 { text = text $0 " " }
    / \(signal: / { killed = $0 }
    { before = last; last = $0 }
    END { tell(); if (!told) print title ": ended badly: " substr(killed != "" ? killed : before " / " last, 1, 400) }' "$log" >> "$failures"
}

# A step that prints the results of Rust's test programs: their counts are added. One that ends badly without a failed test
# (it did not compile, it crashed) counts as one failure; one that says it was skipped counts as nothing.
counted() { # title, command...
  echo "== $1"
  local start=$SECONDS status=0 step_passed step_failed
  "${@:2}" 2>&1 | tee "$log" || status=$?
  read -r step_passed step_failed < <(sed -n 's/^test result: .* \([0-9]*\) passed; \([0-9]*\) failed;.*/\1 \2/p' "$log" \
    | awk '{ p += $1; f += $2 } END { print p + 0, f + 0 }')
  [ "$status" = 0 ] || [ "$step_failed" != 0 ] || step_failed=1
  [ "$step_failed" = 0 ] || tell_failures "$1"
  passed=$((passed + step_passed)) failed=$((failed + step_failed))
  echo "== $1: $step_passed passed, $step_failed failed, $((SECONDS - start)) s"
}

rust_tests() { counted "$1" cargo test --locked --no-fail-fast "${@:2}"; } # title, cargo arguments...

# A step that passes or fails as a whole.
whole() { # title, command...
  echo "== $1"
  local start=$SECONDS result=passed
  if "${@:2}"; then passed=$((passed + 1)); else failed=$((failed + 1)) result=FAILED; echo "$1: failed" >> "$failures"; fi
  echo "== $1: $result, $((SECONDS - start)) s"
}

# The release library, and beside it everything else that is compiled: most of the time a compiler keeps one processor busy. What does not
# compile here is told by the step that needs it.
build_everything() {
  local start=$SECONDS status=0
  echo "== builds"
  set -m # a process group of its own
  { cargo test --locked --lib --bins --tests --no-run || true
    for step in asan.sh loom/run.sh fuzz/run.sh; do "tests/$step" --build || true; done; } > "$folder/builds" 2>&1 &
  builder=$!
  set +m
  make --no-print-directory build || status=$?
  wait "$builder" || true
  builder=
  cat "$folder/builds"
  echo "== builds: $((SECONDS - start)) s"
  return "$status"
}

all_operations() {
  GGML_BACKEND_PATH=$(realpath "$target/release/libggml-moe.so") GGML_MOE=inner=CPU \
    "$(tests/stock/stock.sh path)/test-backend-ops" test -b MoE0 -j 2
}

case ${1:-all} in
  all)
    build_everything
    # The driver suite over ggml's own functions needs the stock libraries; the one over CUDA needs a GPU (tests/gpu).
    GGML_MOE_STOCK=$(tests/stock/stock.sh path)
    export GGML_MOE_STOCK
    rust_tests "unit tests" --lib --bins -- --include-ignored --skip suite::cuda --skip cuda::survey
    rust_tests "documentation tests" --doc
    # Each file of tests/ is a program.
    for file in tests/*.rs; do
      name=$(basename "$file" .rs)
      [ "$name" = hosts ] || rust_tests "$name" --test "$name"
    done
    mapfile -t others < <(printf -- '--skip\n%s\n' "${alone[@]}")
    rust_tests "stock hosts" --test hosts -- --test-threads=3 "${others[@]}"
    rust_tests "stock hosts, one at a time" --test hosts -- --test-threads=1 "${alone[@]}"
    counted "address sanitizer" tests/asan.sh
    counted "model of the thread team" tests/loom/run.sh
    # 12 seconds for each of the six targets.
    counted "fuzz targets" tests/fuzz/run.sh 12
    whole "demo" tests/demo/demo.sh "$target/release/libggml-moe.so"
    ;;
  operations)
    whole "all operations" all_operations
    rust_tests "all of the text, and endurance" --test hosts -- --ignored --nocapture --test-threads=1
    GGML_MOE_RANDOM_GRAPHS=10000 rust_tests "random graphs" --test abi_host random_graphs
    ;;
  *) sed -n '2,4p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
sed 's/^/failed: /' "$failures"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
