"""Steps with llama-server: several slots, saved slots, and a draft model as a second context in the same process."""
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

from host import EVAL_TEXT, FIXTURE, Finished, Missing

PROMPTS = [
    "The function returns",
    "## What is ownership?\n\nOwnership is a set of rules that",
    "import os\nfor name in os.listdir('.'):\n    print(",
    "A list is a mutable sequence. A tuple is",
]
N_PREDICT = 32


class Server:
    """A running llama-server; used as a context, it is stopped at the end. Without a side it has no arguments but those given, and no plugin."""

    def __init__(self, machine, side, tag, *more, model=FIXTURE, patience=40, alone=False, preload=(), variables=None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.machine, self.tag, self.patience = machine, tag, patience
        program = machine.tool("llama-server", side, model) if side else [machine.stock_folder / "llama-server", "-m", model]
        self.arguments = [*program, "--host", "127.0.0.1", "--port", self.port, "--offline", *more]
        self.log_path = machine.logs / (f"{tag}-{side.device}.log" if side else f"{tag}.log")
        self.log_file = open(self.log_path, "ab")
        self.offset = self.log_file.tell()
        environment = {**machine.environment(side, preload=preload, alone=alone), **(variables or {})}
        self.process = machine.start(self.arguments, environment, stdin=subprocess.DEVNULL, stdout=self.log_file, stderr=subprocess.STDOUT)
        self.begin = time.monotonic()

    def __enter__(self):
        limit = time.monotonic() + min(self.patience, self.machine.left())
        while time.monotonic() < limit and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return self
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"the server did not start: {self.end().reason()}")

    def __exit__(self, kind, value, trace):
        self.end()

    def end(self):
        """Interrupts the server as Ctrl-C does, and returns what it left."""
        timed_out = False
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                timed_out = True
        self.machine.stop(self.process)
        self.log_file.close()
        with open(self.log_path, "rb") as log:
            log.seek(self.offset)
            text = log.read().decode(errors="replace")
        return Finished([str(a) for a in self.arguments], self.process.returncode, text, "",
                        time.monotonic() - self.begin, timed_out)

    def post(self, path, body):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=min(40, max(self.machine.left(), 1))) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: HTTP {error.code}: {error.read().decode(errors='replace')[:200]}") from error
        except OSError as error:
            raise RuntimeError(f"{path}: {error}; server: {self.process.poll()}") from error

    def arrivals(self, prompt, **more):
        """Times in seconds from the request at which each token of the answer arrived, and the last message. A token whose text is no whole
        character comes with the next one: its time lies between its neighbours'."""
        body = {"prompt": prompt, "temperature": 0, "seed": 1, "stream": True, "ignore_eos": True, "timings_per_token": True, **more}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
        times, last, begin = [], {}, time.perf_counter()
        with urllib.request.urlopen(request, timeout=min(120, max(self.machine.left(), 1))) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                now, last = time.perf_counter() - begin, json.loads(line[6:])
                missing = last.get("timings", {}).get("predicted_n", 0) - len(times)
                before = times[-1] if times else now
                times += [before + (now - before) * (number + 1) / missing for number in range(missing)]
        return times, last

    def complete(self, prompt, **more):
        return self.post("/completion", {"prompt": prompt, "n_predict": N_PREDICT, "temperature": 0, "seed": 1,
                                         "return_tokens": True, "cache_prompt": False, **more})


def shared_prompts():
    """Four prompts with one long beginning."""
    beginning = EVAL_TEXT.read_text(encoding="utf-8")[:700]
    return [f"{beginning}\n\n{prompt}" for prompt in PROMPTS]


def at_once(server, prompts):
    """One request per prompt, all at the same time."""
    answers = [None] * len(prompts)

    def ask(i):
        answers[i] = server.complete(prompts[i], cache_prompt=True)["tokens"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def log_probabilities(answer):
    return [candidate["logprob"] for position in answer.get("completion_probabilities", [])
            for candidate in position["top_logprobs"]]


def save_and_go_on(server, folder, name):
    """Generates in slot 0, saves it, restores it into slot 1 and goes on there."""
    prompt = shared_prompts()[0]
    server.complete(prompt, id_slot=0, cache_prompt=True)
    saved = server.post("/slots/0?action=save", {"filename": name})["n_saved"]
    server.post("/slots/0?action=erase", {})
    restored = server.post("/slots/1?action=restore", {"filename": name})["n_restored"]
    answer = server.complete(prompt, id_slot=1, cache_prompt=True)
    reused = answer.get("timings", {}).get("cache_n", 0)
    return {"saved": saved, "restored": restored, "reused": reused, "next": answer["tokens"],
            "bytes": (folder / name).read_bytes()}


def serve(machine, side, folder, other=None):
    """Everything that one server with four slots is asked. `other` names a slot that the other side saved in this folder."""
    found = {}
    with Server(machine, side, "server", "-c", 4096, "-np", 4, "--slot-save-path", f"{folder}/") as server:
        alone = [server.complete(prompt, n_probs=5) for prompt in PROMPTS]
        found["alone"] = [answer["tokens"] for answer in alone]
        found["probabilities"] = [value for answer in alone for value in log_probabilities(answer)]
        # One request with four prompts: they enter the four slots in one step, so each pass holds the same tokens on every run.
        batch = server.complete(shared_prompts(), cache_prompt=True)
        found["batch"] = [answer["tokens"] for answer in sorted(batch, key=lambda answer: answer["index"])]
        found["at_once"] = at_once(server, shared_prompts())
        found["slot"] = save_and_go_on(server, folder, f"{side.device}.bin")
        if other:
            found["other_restored"] = server.post("/slots/2?action=restore", {"filename": other})["n_restored"]
            found["other_next"] = server.complete(shared_prompts()[0], id_slot=2, cache_prompt=True)["tokens"]
        found["end"] = server.end()
    return found


def same(ours, stock):
    return sum(a == b for a, b in zip(ours, stock, strict=True))


def slots(machine, results):
    """llama-server with four slots, greedy, against stock: alone, in one batch, at once; slots saved and restored over HTTP."""
    folder = machine.work / "slots"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    stock = serve(machine, machine.stock, folder)
    ours = serve(machine, machine.ours, folder, other=f"{machine.stock.device}.bin")
    count = len(PROMPTS)
    greatest = max((abs(a - b) for a, b in zip(ours["probabilities"], stock["probabilities"], strict=True)), default=0.0)
    equal = same(ours["alone"], stock["alone"])
    results.add("server", "each request alone", equal == count,
                f"{equal} of {count} equal to stock, log-probabilities off by {greatest:.1e} at most", "all tokens equal")
    equal = same(ours["batch"], stock["batch"])
    results.add("server", "4 prompts in one step, shared prefix", equal == count, f"{equal} of {count} equal to stock", "all tokens equal")
    # Which tokens share a pass depends on arrival here, and that changes rounding, in stock as well.
    answered = all(len(tokens) == N_PREDICT for tokens in ours["at_once"])
    results.add("server", "4 requests at once, -np 4", answered,
                f"{same(ours['at_once'], stock['at_once'])} of {count} equal to stock's, stock to its own batch: "
                f"{same(stock['at_once'], stock['batch'])}", "all answered (texts reported)")
    mine, theirs = ours["slot"], stock["slot"]
    good = mine["restored"] == mine["saved"] == theirs["saved"] and mine["next"] == theirs["next"] and mine["reused"] > 0
    results.add("server", "save, erase, restore, go on", good,
                f"{mine['restored']} of {mine['saved']} cells restored, {mine['reused']} reused, next tokens "
                f"{'equal' if mine['next'] == theirs['next'] else 'differ'}, files {'equal' if mine['bytes'] == theirs['bytes'] else 'differ'}",
                "restored, tokens equal")
    results.add("server", "a slot that stock saved", ours["other_next"] == theirs["next"],
                f"{ours['other_restored']} cells restored, next tokens {'equal' if ours['other_next'] == theirs['next'] else 'differ'}",
                "tokens equal")
    end = ours["end"]
    results.add("server", "the server ends", end.ok(), end.how(), "exit status 0", summary=end.summaries())


def draft(machine, results):
    """Two contexts of two models in one process: the fixture as target and as draft of speculative decoding."""
    more = ["-c", 1024, "-np", 1, "-md", FIXTURE, "--spec-draft-n-max", 4, "--spec-type", "draft-simple"]
    found = []
    for side in (machine.stock, machine.ours):
        with Server(machine, side, "draft", *more) as server:
            answer = server.complete(PROMPTS[1])
            found.append((answer["tokens"], answer["timings"].get("draft_n", 0), server.end()))
    (stock, _, _), (ours, drafted, end) = found
    backends = len(end.summaries())
    if end.ok() and not backends:
        raise Missing("the server printed no summary")
    results.add("contexts", "draft model beside its target", ours == stock and drafted > 0 and backends >= 2 and end.ok(),
                f"tokens {'equal' if ours == stock else 'differ'}, {drafted} drafted, {backends} backends of ours, {end.how()}",
                "equal to stock, two backends")
