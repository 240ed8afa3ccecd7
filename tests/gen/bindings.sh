#!/usr/bin/env bash
# Makes the Rust view of ggml's binary interface: src/abi/gen/<layout>.rs from ggml-headers/<layout>/.
#
#   bindings.sh           write the files
#   bindings.sh --check   write to a temporary folder and fail, with a diff, where the committed files differ
#
# The tool's version is pinned because it decides every line of the output. It is built once into
# ${GGML_MOE_CACHE:-${XDG_CACHE_HOME:-~/.cache}/ggml-moe}/tools.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
tools=${GGML_MOE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ggml-moe}/tools
version=0.73.2
layouts=(api3 api2 api2-2025)
bindgen=$tools/bin/bindgen

case ${1:-} in
  '') out=$root/src/abi/gen ;;
  --check) out=$(mktemp -d); trap 'rm -rf "$out"' EXIT ;;
  *) sed -n '2,5p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac

# bindgen reads C through libclang; any version that knows C11 gives the same output for these headers.
have_libclang() { compgen -G '/usr/lib/llvm-*/lib/libclang*.so*' > /dev/null || [ -n "${LIBCLANG_PATH:-}" ]; }
if ! have_libclang; then
  [ "$(id -u)" = 0 ] || { echo "bindings: libclang is missing; install Debian's libclang-dev" >&2; exit 1; }
  echo "bindings: installing libclang-dev" >&2
  { apt-get update && apt-get install -y --no-install-recommends libclang-dev; } > /dev/null
fi
if [ "$("$bindgen" --version 2> /dev/null)" != "bindgen $version" ]; then
  echo "bindings: building bindgen $version (once)" >&2
  cargo install --quiet --locked --force --root "$tools" --version "$version" bindgen-cli
fi

# Structs that hold pointers get no Default, since that would take unsafe code; the tables of slots do (every slot NULL).
no_default='ggml_(backend_)?(tensor|hash_set|cgraph|init_params|feature|event|dev_props|buffer|buffer_type|device|reg|graph_optimize_params|type_traits_cpu)'

generate() { # layout
  # Only the newest layout declares functions and what all have in common; of the others, the structs that differ.
  local header=$root/ggml-headers/$1/ggml-imports.h items='(fn_)?(ggml|GGML)_.*'
  [ -f "$header" ] || header=$root/ggml-headers/$1/ggml-abi.h items='ggml_backend(_buffer)?(_type)?(_i)?|GGML_BACKEND_API_VERSION'
  "$bindgen" "$header" \
    --allowlist-item "$items" \
    --default-enum-style consts --no-prepend-enum-name --no-layout-tests --disable-header-comment \
    --with-derive-default --no-default "$no_default" --no-default ggml_backend \
    --use-core --rust-target 1.85 --rust-edition 2024 \
    --formatter rustfmt --rustfmt-configuration-file "$root/rustfmt.toml" \
    --raw-line "//! ggml's binary interface, layout \"$1\", as seen from Rust: made by tests/gen/bindings.sh (bindgen $version)" \
    --raw-line "//! from ggml-headers/$1/. Do not edit; \`bindings.sh --check\` fails on any difference." \
    -- -std=c11
}

status=0
for layout in "${layouts[@]}"; do
  file=${layout//-/_}.rs
  generate "$layout" > "$out/$file"
  if [ "$out" != "$root/src/abi/gen" ]; then
    diff -u --label "src/abi/gen/$file (committed)" --label "src/abi/gen/$file (from the headers)" \
      "$root/src/abi/gen/$file" "$out/$file" || status=1
  fi
done
[ "$status" = 0 ] || echo "bindings: the committed bindings are not what the headers give; run tests/gen/bindings.sh" >&2
exit "$status"
