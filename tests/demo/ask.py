"""Asks a llama-server for a completion: ask.py PORT PID PROMPT. Waits until it is ready, as long as process PID lives."""

import json
import os
import sys
import time
import urllib.error
import urllib.request

port, pid, prompt = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
base = f"http://127.0.0.1:{port}"
# Nothing on this machine is behind a proxy.
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def wait_ready(seconds):
    """Returns when /health answers; ends the program when the server is gone or too slow."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
            opener.open(f"{base}/health", timeout=5).read()
            return
        except ProcessLookupError:
            sys.exit("llama-server ended before it was ready")
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    sys.exit(f"llama-server was not ready within {seconds} s")


wait_ready(600)
body = {"prompt": prompt, "n_predict": 48, "temperature": 0, "seed": 1}
request = urllib.request.Request(f"{base}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
try:
    answer = json.load(opener.open(request, timeout=600))
except (urllib.error.URLError, OSError, ValueError) as error:
    sys.exit(f"no answer to /completion: {error}")
if not answer.get("content", "").strip():
    sys.exit(f"an empty answer: {answer}")
timings = answer["timings"]
print("prompt:", prompt)
for line in answer["content"].strip().splitlines():
    print("answer:", line)
print(f"speed:  prompt {timings['prompt_per_second']:.1f} tokens/s, generation {timings['predicted_per_second']:.1f} tokens/s")
