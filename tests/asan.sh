#!/usr/bin/env bash
# Runs the C host's cases (tests/abi_host.rs) under AddressSanitizer, leaks included: plugin and host instrumented, the
# stock ggml libraries as they are. Needs a nightly Rust toolchain for the flag; without one it says so and counts as
# skipped.
#
#   asan.sh [test name]   all cases, or those whose test name holds the word
#   asan.sh --build       only builds what they need
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
target=x86_64-unknown-linux-gnu

runtime() { compgen -G "$(rustc +nightly --print target-libdir --target "$target" 2> /dev/null)/librustc*_rt.asan.a" > /dev/null; }
if ! runtime; then
  echo "asan: skipped (no nightly Rust toolchain with the AddressSanitizer runtime)"
  exit 0
fi
if ! echo 'int main(void) { return 0; }' | "${CC:-cc}" -fsanitize=address -x c - -o /dev/null 2> /dev/null; then
  echo "asan: skipped (the C compiler has no AddressSanitizer runtime)"
  exit 0
fi

# One runtime serves both: a Rust library links none (the executable brings it), so the C compiler's is used.
# GGML_MOE_SANITIZE tells the build script to leave the runtime's symbols open.
library_dir=${CARGO_TARGET_DIR:-$root/target}/asan
echo "asan: building the plugin with nightly" >&2
GGML_MOE_SANITIZE=1 RUSTFLAGS="-Zsanitizer=address -Cforce-frame-pointers=yes" CARGO_TARGET_DIR=$library_dir \
  cargo +nightly build --quiet --lib --target "$target"

[ "${1:-}" != --build ] || exit 0

export GGML_MOE_LIBRARY=$library_dir/$target/debug/libggml_moe.so
# Each takes ten times as long here.
export GGML_MOE_RANDOM_GRAPHS=${GGML_MOE_RANDOM_GRAPHS:-50}
export GGML_MOE_HOST_CFLAGS="-fsanitize=address -fno-omit-frame-pointer"
# Allocations that are too large must give NULL, as without the sanitizer.
export ASAN_OPTIONS=allocator_may_return_null=1:detect_leaks=1:strict_string_checks=1:check_initialization_order=1
export LSAN_OPTIONS=suppressions=$root/tests/host/lsan.supp:print_suppressions=0
exec cargo test --test abi_host -- "$@"
