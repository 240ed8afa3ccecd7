#!/usr/bin/env bash
# Runs `ggml-moe bench` on the machine with the GPU: the generated 30B-A3B shape at 20, 45, 70 and 100% of the experts, stock and plugin
# in turns. `make gpu-pack` has made .gpu/; bench.json, bench.svg and bench-runs.jsonl lie in $OUT. GPU_BENCH adds flags.
#   bench.sh            with the archive of stock llama.cpp in .gpu/
#   bench.sh --dry-run  with the stock build of `make stock`, on a small model over the CPU
exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" --only bench "$@"
