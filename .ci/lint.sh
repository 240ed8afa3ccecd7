#!/usr/bin/env bash
# Checks that need no test run. All of them run, also after a failure; the last line names what failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=${CARGO_TARGET_DIR:-target}
tools=${GGML_MOE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ggml-moe}/tools
deny_version=0.20.2
failed=()

check() { # title, command...
  echo "== $1"
  local start=$SECONDS
  "${@:2}" || { failed+=("$1"); echo "lint: $1 failed" >&2; }
  echo "== $1: $((SECONDS - start)) s"
}

# The fuzz targets and the model of the thread team are workspaces of their own.
formatted() {
  cargo fmt --check && cargo fmt --check --manifest-path tests/fuzz/Cargo.toml && cargo fmt --check --manifest-path tests/loom/Cargo.toml
}

documentation() { RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --quiet; }

# Licences, banned crates and sources. Not the advisory list: it lives on a host that a build machine need not reach.
dependencies() {
  if [ "$("$tools/bin/cargo-deny" --version 2> /dev/null)" != "cargo-deny $deny_version" ]; then
    echo "lint: building cargo-deny $deny_version (once)" >&2
    cargo install --quiet --locked --force --root "$tools" --version "$deny_version" cargo-deny
  fi
  # It reads the sources of every crate of the lock file, also of those that only other platforms build.
  cargo fetch --quiet --locked
  "$tools/bin/cargo-deny" --offline --locked check bans licenses sources
}

bindings() { .ci/setup.sh gen && tests/gen/bindings.sh --check; }

kernels() { tests/gen/kernels.sh --check; }

keys_page() { diff -u docs/keys.md <("$target/release/ggml-moe" keys --markdown); }

scripts() { local script; for script in .ci/* tests/*.sh tests/*/*.sh; do bash -n "$script" || return 1; done; }

check "format" formatted
check "clippy" cargo clippy --locked --all-targets --quiet -- -D warnings
check "documentation" documentation
check "dependencies" dependencies
check "bindings" bindings
check "kernels" kernels
check "docs/keys.md" keys_page
check "scripts" scripts

if [ ${#failed[@]} -gt 0 ]; then
  printf 'lint: FAILED:'
  printf ' %s;' "${failed[@]}"
  echo
  exit 1
fi
echo "lint: ok"
