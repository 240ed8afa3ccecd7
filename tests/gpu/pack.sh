#!/usr/bin/env bash
# Builds what tests/gpu/run.sh needs on a machine with a GPU into the git-ignored folder .gpu/, below 20 MB: the library, the
# command, the driver suite, the C host that loads and unloads, and what is preloaded. `make gpu-pack` has built the stock programs before.
# The scripts, the fixture and the held-out text travel with the checkout. An archive of stock llama.cpp in .gpu/ stays there.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
target=${CARGO_TARGET_DIR:-target}
pack=$root/.gpu
limit_kib=20000

stock=$(tests/stock/stock.sh path)
headers=$(tests/stock/stock.sh source)/ggml/include
mkdir -p "$pack"
find "$pack" -mindepth 1 -maxdepth 1 ! -name '*.tar.xz' ! -name out -exec rm -rf {} +

echo "gpu-pack: building the library and its tests" >&2
cargo build --release --locked --quiet
cp "$target/release/libggml_moe.so" "$pack/libggml-moe.so"
cp "$target/release/ggml-moe" "$pack/ggml-moe"
# Cargo names the test program in its JSON messages.
tests=$(cargo test --release --locked --lib --no-run --quiet --message-format=json \
  | python3 -c '
import json, sys
found = [message["executable"] for message in map(json.loads, sys.stdin)
         if message.get("reason") == "compiler-artifact" and message.get("profile", {}).get("test") and message.get("executable")]
print(found[-1])')
cp "$tests" "$pack/driver-tests"
strip --strip-unneeded "$pack/libggml-moe.so"
strip "$pack/driver-tests" "$pack/ggml-moe"

compile() { # output, source, flags...
  cc -std=c11 -O2 -Wall -Wextra -Werror -o "$pack/$1" "$2" -I "$headers" "${@:3}"
}
compile reload tests/gpu/reload.c -L "$stock" -lggml -lggml-base -lm
compile count_graphs.so tests/gpu/count_graphs.c -shared -fPIC
compile slow_link.so tests/gpu/slow_link.c -shared -fPIC -pthread
compile flush_log.so tests/support/flush_log.c -shared -fPIC

modified=$([ -z "$(git status --porcelain --untracked-files=no)" ] && echo false || echo true)
cat > "$pack/pack.json" <<END
{
 "commit": "$(git rev-parse HEAD)",
 "modified": $modified,
 "version": "$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)",
 "rustc": "$(rustc --version)",
 "library_sha256": "$(sha256sum "$pack/libggml-moe.so" | cut -d' ' -f1)"
}
END

size=$(find "$pack" -type f ! -name '*.tar.xz' ! -path "$pack/out/*" -printf '%k\n' | awk '{ total += $1 } END { print total + 0 }')
[ "$size" -le "$limit_kib" ] || { echo "gpu-pack: $size KiB, more than $limit_kib" >&2; exit 1; }
ls "$pack"/*.tar.xz > /dev/null 2>&1 || echo "gpu-pack: add an archive of stock llama.cpp with CUDA to .gpu/ (tests/gpu/README.md)" >&2
echo "gpu-pack: .gpu, $size KiB; run: bash tests/gpu/run.sh"
