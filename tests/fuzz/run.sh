#!/usr/bin/env bash
# Fuzzes everything in src/ that reads bytes from outside, a target on each processor:
#
#   run.sh SECONDS [TARGET...]   so many seconds each target
#   run.sh --build               only builds the targets
#
# Needs a nightly Rust toolchain, clang or g++, and the crate libfuzzer-sys; without them it says so and counts as skipped.
# New inputs go to the target folder; one that breaks a rule stays there and is named. It belongs into tests/fuzz/corpus/ with its fix.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root/tests/fuzz"
seconds=${1:?usage: run.sh SECONDS [TARGET...], or run.sh --build}
shift
targets=("$@")
[ $# -gt 0 ] || targets=(settings request memory names ids gguf arguments state)
host=x86_64-unknown-linux-gnu

if ! compgen -G "$(rustc +nightly --print target-libdir --target "$host" 2> /dev/null)/librustc*_rt.asan.a" > /dev/null; then
  echo "fuzz: skipped (no nightly Rust toolchain with the AddressSanitizer runtime)"
  exit 0
fi

# The only step that may need a network, once: crates that the plugin itself does not use.
refusal=$(cargo +nightly fetch --quiet --locked 2>&1) || true
if [[ $refusal == *"lock file"* ]]; then
  echo "fuzz: tests/fuzz/Cargo.lock does not fit the plugin's dependencies; run 'cargo update -w' in tests/fuzz" >&2
  exit 1
fi
if [ -n "$refusal" ]; then
  echo "fuzz: skipped (the crates of tests/fuzz/Cargo.lock cannot be fetched)"
  exit 0
fi

out=${CARGO_TARGET_DIR:-$root/target}/fuzz
mkdir -p "$out"
echo "fuzz: building with nightly" >&2
coverage="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters"
coverage+=" -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing"
GGML_MOE_SANITIZE=1 RUSTFLAGS="$coverage -Zsanitizer=address -Ccodegen-units=1" CARGO_TARGET_DIR=$out \
  cargo +nightly build --quiet --locked --release --bins --target "$host"

[ "$seconds" != --build ] || exit 0

fuzz() { # target
  mkdir -p "$out/corpus/$1" "$out/artifacts/$1"
  "$out/$host/release/$1" -max_total_time="$seconds" -timeout=60 -rss_limit_mb=1024 -max_len=1024 -use_value_profile=1 \
    -artifact_prefix="$out/artifacts/$1/" "$out/corpus/$1" "corpus/$1" > "$out/$1.log" 2>&1 || echo "exit status $?" >> "$out/$1.failed"
}

for target in "${targets[@]}"; do
  rm -f "$out/$target.failed"
  # One starts where another ends.
  [ "$(jobs -rp | wc -l)" -lt "$(nproc)" ] || wait -n
  fuzz "$target" &
done
wait
passed=0 failed=0
for target in "${targets[@]}"; do
  if [ ! -e "$out/$target.failed" ] && line=$(grep '^Done ' "$out/$target.log"); then
    passed=$((passed + 1))
    echo "fuzz: $target: $(sed -n 's/^Done \([0-9]*\) runs in \([0-9]*\).*/\1 inputs in \2 s/p' <<< "$line")"
  else
    tail -n 30 "$out/$target.log"
    # In the words of Rust's test programs, so that .ci/test.sh tells what failed: the rule that was broken, and the input that broke it.
    echo "---- fuzz::$target stdout ----"
    grep -m 1 -A 3 ' panicked at ' "$out/$target.log" || true
    echo "Error: $(grep -hE '^(SUMMARY|Base64):|ERROR: ' "$out/$target.log" "$out/$target.failed" | tr '\n' ' ' || true)"
    echo "fuzz: $target: FAILED"
    failed=$((failed + 1))
  fi
done
# So that .ci/test.sh counts it with Rust's test programs.
echo "test result: $([ "$failed" = 0 ] && echo ok || echo FAILED). $passed passed; $failed failed;"
[ "$failed" = 0 ]
