#!/usr/bin/env bash
# Runs everything that needs a GPU, in one call of at most nine minutes, on a machine that has only bash, python3 with numpy,
# and a driver: the pack of `make gpu-pack` brings the rest. Prints one table at the end; writes gpu.json and gpu.log to $OUT.
#
#   run.sh [--list] [--only STEP[,STEP]] [--limit SECONDS]
#   run.sh --dry-run ...    on a machine without a GPU: the same steps over the CPU and the stock build of `make stock`
#
# .gpu/ must hold the pack and one archive (*.tar.xz) of stock llama.cpp built with CUDA; README.md says how to make it.
# Exit status 0 when something passed and nothing failed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export GPU_PACK=${GPU_PACK:-$root/.gpu}
export GPU_WORK=${GPU_WORK:-${TMPDIR:-/tmp}/ggml-moe-gpu}
export OUT=${OUT:-$GPU_PACK/out}
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export GPU_STOCK=$GPU_WORK/stock

dry=0
for argument in "$@"; do
  case $argument in
    --list | -h | --help) exec python3 "$root/tests/gpu/main.py" "$@" ;;
    --dry-run) dry=1 ;;
  esac
done

mkdir -p "$GPU_WORK" "$OUT"
if [ ! -f "$GPU_PACK/pack.json" ]; then
  echo "gpu: no pack in $GPU_PACK; run 'make gpu-pack' on the machine that builds" >&2
  exit 1
fi
rm -rf "$GPU_WORK/logs"

unpack_stock() {
  local archive=("$GPU_PACK"/*.tar.xz)
  if [ ! -f "${archive[0]}" ] || [ ${#archive[@]} != 1 ]; then
    echo "gpu: $GPU_PACK must hold exactly one *.tar.xz with stock llama.cpp; see tests/gpu/README.md" >&2
    exit 1
  fi
  GPU_STOCK_NAME=$(basename "${archive[0]}" .tar.xz)
  GPU_STOCK_SHA256=$(sha256sum "${archive[0]}" | cut -d' ' -f1)
  export GPU_STOCK_NAME GPU_STOCK_SHA256
  if [ "$(cat "$GPU_STOCK/.unpacked" 2> /dev/null)" != "$GPU_STOCK_SHA256" ]; then
    rm -rf "$GPU_STOCK"
    mkdir -p "$GPU_STOCK"
    tar -xJf "${archive[0]}" -C "$GPU_STOCK"
    echo "$GPU_STOCK_SHA256" > "$GPU_STOCK/.unpacked"
  fi
  # The programs may lie in a folder of the archive.
  local server
  server=$(find "$GPU_STOCK" -name llama-server -type f -print -quit)
  [ -n "$server" ] || { echo "gpu: ${archive[0]} holds no llama-server" >&2; exit 1; }
  GPU_STOCK=$(dirname "$server")
}

# The CUDA runtime that libggml-cuda needs: the system's, else a toolkit's, else the one that came with Python's packages.
find_runtime() {
  local missing folder
  missing=$(ldd "$GPU_STOCK/libggml-cuda.so" | awk '/not found/ { print $1 }')
  [ -n "$missing" ] || return 0
  while read -r folder; do
    LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$folder
  done < <(find /usr/local /opt \( -name 'libcudart.so.*' -o -name 'libcublas.so.*' -o -name libcuda.so.1 \) ! -path '*/stubs/*' -printf '%h\n' \
    2> /dev/null | sort -u)
  missing=$(ldd "$GPU_STOCK/libggml-cuda.so" | awk '/not found/ { print $1 }')
  [ -z "$missing" ] || echo "gpu: libggml-cuda.so misses ${missing//$'\n'/ }" >&2
}

export LD_LIBRARY_PATH
if [ "$dry" = 1 ]; then
  GPU_STOCK=$("$root/tests/stock/stock.sh" path)
  LD_LIBRARY_PATH=$GPU_STOCK${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export GPU_STOCK_NAME="dry run: the CPU build of make stock"
else
  unpack_stock
  LD_LIBRARY_PATH=$GPU_STOCK${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  find_runtime
fi

status=0
python3 "$root/tests/gpu/main.py" "$@" || status=$?
exit "$status"
