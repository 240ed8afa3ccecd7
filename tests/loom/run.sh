#!/usr/bin/env bash
# Runs the model of the thread team under loom; with --build, only builds it. Without loom's crates (no network, nothing cached) it says so
# and counts as skipped.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root/tests/loom"
if ! cargo fetch --quiet --locked; then
  echo "loom: skipped (the crates of tests/loom/Cargo.lock cannot be fetched)"
  exit 0
fi
only_build=()
[ "${1:-}" != --build ] || only_build=(--no-run)
# Two preemptions show what more of them would, in seconds instead of hours.
RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=${LOOM_MAX_PREEMPTIONS:-2} CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target}/loom \
  cargo test --quiet --locked --release --lib "${only_build[@]}"
