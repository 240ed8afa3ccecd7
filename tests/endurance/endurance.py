#!/usr/bin/env python3
"""Many requests to one llama-server: prompts of 1 to 128 tokens in a sweep, two at a time, some given up in the middle.

The server's environment (the plugin, its keys) is the caller's. Ends with one line of JSON, and with status 1 when memory grew, a token
took too long, too few tokens came, or the server did not end well:

  endurance.py --tokens 20000 -- llama-server -m MODEL --device MoE0 -ngl 99 -c 4096 -np 2

Counts generated tokens. Memory is what the server alone has: anonymous pages, and what nvidia-smi says of the card where there is one. The first
quarter of the run is its warm-up.
"""
import argparse
import http.client
import json
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time

LONGEST_PROMPT = 128


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--growth-mib", type=float, default=24, help="what RssAnon may grow after the warm-up")
    parser.add_argument("--vram-growth-mib", type=float, default=8)
    parser.add_argument("--gap-s", type=float, default=20, help="the longest time without a token of a request that runs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", help="the server's output; a temporary file otherwise")
    parser.add_argument("server", nargs="+")
    return parser.parse_args()


def hold_port():
    """A free port below those that Linux gives to connections, and the local socket by which other tests see that it is taken."""
    for _ in range(20000):
        port = random.randrange(12000, 32000)
        held = socket.socket(socket.AF_UNIX)
        try:
            held.bind(f"\0ggml-moe-test-port-{port}")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
            return port, held
        except OSError:
            held.close()
    sys.exit("endurance: no port is free")


class Run:
    def __init__(self, a, port):
        self.a, self.port = a, port
        self.lock = threading.Lock()
        self.rng = random.Random(a.seed)
        self.requests = self.closed = self.tokens = self.prompt_tokens = 0
        self.gap, self.faults = 0.0, []

    def next(self):
        """Length of the next prompt, tokens to ask for, and after how many of them to hang up (None: never)."""
        with self.lock:
            if self.tokens >= self.a.tokens or self.faults:
                return None
            number = self.requests
            self.requests += 1
            # A sweep up and down, so that long and short ones also meet in the two slots.
            step = number % (2 * LONGEST_PROMPT)
            length = step + 1 if step < LONGEST_PROMPT else 2 * LONGEST_PROMPT - step
            wanted = self.rng.randint(4, 48)
            hang_up = self.rng.randint(0, wanted // 2) if number % 7 == 3 else None
            prompt = [self.rng.randint(300, 700) for _ in range(length)]
            return prompt, wanted, hang_up

    def request(self, prompt, wanted, hang_up):
        body = {"prompt": prompt, "n_predict": wanted, "stream": True, "temperature": 1.0, "seed": len(prompt), "ignore_eos": True,
                "cache_prompt": len(prompt) % 2 == 0}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.a.gap_s)
        got, last = 0, time.monotonic()
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise OSError(f"status {answer.status}: {answer.read(200)}")
            for line in answer:
                if not line.startswith(b"data:"):
                    continue
                now = time.monotonic()
                with self.lock:
                    self.gap = max(self.gap, now - last)
                last = now
                got += 1
                if hang_up is not None and got > hang_up:
                    break
        finally:
            connection.close()
        with self.lock:
            self.tokens += got
            self.prompt_tokens += len(prompt)
            self.closed += hang_up is not None

    def work(self):
        while (asked := self.next()) is not None:
            try:
                self.request(*asked)
            except (OSError, http.client.HTTPException) as error:
                with self.lock:
                    self.faults.append(f"a prompt of {len(asked[0])} tokens: {error!r}")


def rss_anon_mib(pid):
    found = re.search(r"RssAnon:\s*(\d+)", pathlib.Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def vram_mib():
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20)
    except OSError:
        return None
    return sum(float(line) for line in done.stdout.split()) if done.returncode == 0 and done.stdout.strip() else None


def wait_ready(process, port):
    for _ in range(3000):
        if process.poll() is not None:
            return False
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return True
        except OSError:
            pass
        time.sleep(0.1)
    return False


def watch(run, workers, process):
    """Memory in each tenth of the run: the most of RssAnon and of the card."""
    has_card = vram_mib() is not None
    tenths, start = {}, time.monotonic()
    while any(worker.is_alive() for worker in workers) and process.poll() is None:
        tenth = min(10 * run.tokens // run.a.tokens, 9)
        rss, vram = tenths.get(tenth, (0.0, 0.0))
        tenths[tenth] = max(rss, rss_anon_mib(process.pid)), max(vram, (vram_mib() or 0.0) if has_card else 0.0)
        time.sleep(0.25)
    return [tenths[tenth] for tenth in sorted(tenths)], time.monotonic() - start


def main():
    a = arguments()
    port, held = hold_port()  # held until the end
    log = open(a.log, "w+") if a.log else None
    process = subprocess.Popen([*a.server, "--host", "127.0.0.1", "--port", str(port)], stdout=log or subprocess.DEVNULL, stderr=subprocess.STDOUT)
    run = Run(a, port)
    try:
        if not wait_ready(process, port):
            sys.exit("endurance: the server did not start")
        workers = [threading.Thread(target=run.work, daemon=True) for _ in range(2)]
        for worker in workers:
            worker.start()
        tenths, seconds = watch(run, workers, process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            status = process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            status = "killed: it did not end within 60 s"
    warm = max(len(tenths) // 4, 1)
    growth = [max(most[i] for most in tenths[warm:] or tenths) - max(most[i] for most in tenths[:warm]) for i in (0, 1)]
    checks = [
        (not run.faults, f"requests failed: {run.faults[:3]}"),
        (run.tokens >= a.tokens, f"only {run.tokens} tokens"),
        (run.closed > 0, "no connection was closed in the middle"),
        (growth[0] <= a.growth_mib, f"RssAnon grew by {growth[0]:.1f} MiB"),
        (growth[1] <= a.vram_growth_mib, f"the card's memory grew by {growth[1]:.1f} MiB"),
        (run.gap <= a.gap_s, f"{run.gap:.1f} s without a token"),
        (status == 0, f"the server ended with {status}"),
    ]
    report = {"tokens": run.tokens, "prompt_tokens": run.prompt_tokens, "requests": run.requests, "closed": run.closed,
              "seconds": round(seconds, 1), "longest_gap_s": round(run.gap, 3), "rss_anon_mib": [round(most[0], 1) for most in tenths],
              "vram_mib": [round(most[1]) for most in tenths], "faults": [text for good, text in checks if not good]}
    print("endurance: " + json.dumps(report))
    sys.exit(bool(report["faults"]))


main()
