#!/usr/bin/env bash
# Measures the thread team alone, where no GPU is needed: GB/s of weights beside the memory's own. `make gpu-pack` has made .gpu/.
#   team.sh            with the archive of stock llama.cpp in .gpu/, all processors up to 16
#   team.sh --dry-run  with the stock build of `make stock`, briefly
exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" --only team "$@"
