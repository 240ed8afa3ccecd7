#!/usr/bin/env bash
# Starts a stock llama-server with the plugin on the bundled model, asks it for a completion over HTTP, and shows the answer,
# the speed and which device held and ran what: demo.sh PLUGIN. `make demo` builds what it needs before.
#
# LLAMA_BIN names another folder of llama.cpp programs (a CUDA build); DEMO_MODEL another MoE model.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
plugin=$(realpath "$1")
bin=${LLAMA_BIN:-$("$here/../stock/stock.sh" path server)}
model=${DEMO_MODEL:-$here/../fixtures/tiny-docs-moe.Q4_K_M.gguf}
work=$(mktemp -d)
log=$work/server.log
server=

fail() {
  echo "demo: FAILED: $1" >&2
  if [ -s "$log" ]; then
    echo "demo: the end of the server's log:" >&2
    tail -n 25 "$log" >&2
  fi
  exit 1
}
clean_up() {
  if [ -n "$server" ]; then kill -KILL "$server" 2> /dev/null || true; fi
  rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

# The first CUDA card that the host knows is the inner device; without one, ggml's CPU backend is.
"$bin/llama-server" --list-devices > "$work/devices" 2>&1 || { log=$work/devices; fail "llama-server does not start"; }
inner=$(sed -n 's/^  \(CUDA[0-9][0-9]*\): .*/\1/p' "$work/devices" | head -n 1)
inner=${inner:-CPU}
# Not one of the ports that the system gives to connections, which could take it before the server does.
port=$(python3 -c 'import random, socket
while True:
    port = random.randrange(12000, 32000)
    try: socket.socket().bind(("127.0.0.1", port))
    except OSError: continue
    print(port); break')

echo "demo: stock llama-server, device MoE0 in front of $inner, $(basename "$model")"
GGML_BACKEND_PATH=$plugin GGML_MOE="inner=$inner;log=debug" "$bin/llama-server" -m "$model" --device MoE0 -ngl 99 \
  -c 2048 -np 1 --host 127.0.0.1 --port "$port" --offline -lv 4 --sleep-idle-seconds 1 > "$log" 2>&1 &
server=$!

python3 "$here/ask.py" "$port" "$server" "A list comprehension is a" > "$work/answer" 2> "$work/error" \
  || fail "$(tail -n 1 "$work/error")"
sed 's/^/demo: /' "$work/answer"

# An idle server lets go of its context, and the plugin then prints its summary. At the end of the process it would print it
# too, but llama.cpp's tools do not wait for their last lines.
summary=
for _ in $(seq 100); do
  summary=$(sed -n "/\"graphs\":0,/d; s/.*ggml-moe: summary //p" "$log" | tail -n 1)
  [ -z "$summary" ] || break
  sleep 0.1
done
[ -n "$summary" ] || fail "the plugin printed no summary"

# The server misses an interrupt that comes while it falls asleep (its main thread checks before it waits), so it is given time to
# settle, and one request to wake it should it have missed it all the same.
sleep 1
kill -INT "$server"
for _ in $(seq 100); do
  kill -0 "$server" 2> /dev/null || break
  sleep 0.1
done
if kill -0 "$server" 2> /dev/null; then
  timeout 10 python3 "$here/ask.py" "$port" "$server" "a" > /dev/null 2>&1 || true
fi
status=0
wait "$server" || status=$?
server=
[ "$status" = 0 ] || fail "llama-server ended with status $status"

# What lay where, in the host's words, and what ran where, in ours.
sed -n 's/.* \(load_tensors\|llama_kv_cache\|sched_reserve\): *\([A-Za-z0-9_]* \(model\|KV\|compute\) buffer size = .*\)/demo: memory: \2/p' "$log" \
  | sed 's/  */ /g' | sort -u
python3 -c '
import json, sys
s = json.loads(sys.argv[1])
print("demo: device: {device} in front of {inner} ran {graphs} graphs: {blocks} MoE blocks, {nodes} nodes".format(**s))
sys.exit(0 if s["blocks"] > 0 else 1)' "$summary" || fail "no MoE block ran on MoE0: $summary"
echo "demo: ok"
