#!/usr/bin/env bash
# Makes sure that the tools for a task are there: setup.sh rust|stock|matrix|gen|all. Silent when nothing is missing.
# Missing Debian packages are installed when this runs as root; a Rust toolchain is only checked for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The command that shows whether a package is there, and the package.
stock_tools=(g++:g++ make:make cmake:cmake ninja:ninja-build python3:python3)
packages=()
want() { # command:package...
  local pair
  for pair in "$@"; do
    command -v "${pair%%:*}" > /dev/null || packages+=("${pair#*:}")
  done
}

want_rust() {
  want cc:gcc c++:g++
  if ! command -v cargo > /dev/null; then
    echo "setup: cargo is missing; install Rust $(wanted_rust) or later, for example with https://rustup.rs" >&2
    exit 1
  fi
  local have
  have=$(rustc --version | cut -d' ' -f2)
  if [ "$(printf '%s\n' "$(wanted_rust)" "${have%%-*}" | sort -V | head -n 1)" != "$(wanted_rust)" ]; then
    echo "setup: rustc $have is too old; this crate needs $(wanted_rust) (rustup update)" >&2
    exit 1
  fi
}

wanted_rust() { sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml; }

want_stock() {
  want "${stock_tools[@]}"
  # Debian splits pip from Python.
  python3 -m pip --version > /dev/null 2>&1 || packages+=(python3-pip)
}

# One host of the layout matrix is a package of npm, and one runs on Mesa's software driver for Vulkan.
want_matrix() {
  want_stock
  want npm:npm
  compgen -G '/usr/share/vulkan/icd.d/lvp_icd*' > /dev/null || compgen -G '/etc/vulkan/icd.d/lvp_icd*' > /dev/null \
    || packages+=(mesa-vulkan-drivers)
}

# Not libclang-cpp, which comes with other packages and is of no use to bindgen.
want_gen() {
  [ -n "${LIBCLANG_PATH:-}" ] || compgen -G '/usr/lib/llvm-*/lib/libclang.so*' > /dev/null \
    || compgen -G '/usr/lib/llvm-*/lib/libclang-[0-9]*.so*' > /dev/null || packages+=(libclang-dev)
}

case ${1:-} in
  rust) want_rust ;;
  stock) want_stock ;;
  matrix) want_matrix ;;
  gen) want_gen ;;
  all) want_rust; want_matrix; want_gen ;;
  *) sed -n '2,3p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac

if [ ${#packages[@]} -gt 0 ]; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "setup: missing; install them and try again: ${packages[*]}" >&2
    exit 1
  fi
  echo "setup: installing ${packages[*]}" >&2
  export DEBIAN_FRONTEND=noninteractive
  log=$(mktemp)
  { apt-get update && apt-get install -y --no-install-recommends "${packages[@]}"; } > "$log" 2>&1 \
    || { tail -n 20 "$log" >&2; echo "setup: apt-get failed" >&2; exit 1; }
  rm -f "$log"
fi
