"""What every step uses: the machine, the two sides of a comparison, processes with a time limit, and the results."""
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "tests/fixtures/tiny-docs-moe.Q4_K_M.gguf"
EVAL_TEXT = ROOT / "tests/fixtures/eval.txt"


class Side:
    """Which device runs the model, with which keys of the plugin, and whether that is preloaded or opened by the host."""

    def __init__(self, name, device, keys=None, preloaded=False):
        self.name, self.device, self.keys, self.preloaded = name, device, keys, preloaded

    def with_keys(self, keys):
        """The same with other keys; one that is there already is replaced."""
        names = {pair.split("=")[0] for pair in keys.split(";")}
        kept = [pair for pair in self.keys.split(";") if pair.split("=")[0] not in names]
        return Side(f"{self.name} {keys}", self.device, ";".join([*kept, keys]), self.preloaded)

    def preload(self):
        """The same, preloaded: the device is named all the same, so nothing is planned, but what only the preload can do is done."""
        return Side(f"{self.name}, preloaded", self.device, self.keys, True)


class Finished:
    """A process that ended: its status, what it printed, how long it took."""

    def __init__(self, arguments, status, output, errors, seconds, timed_out):
        self.arguments, self.status, self.output, self.errors = arguments, status, output, errors
        self.seconds, self.timed_out = seconds, timed_out
        self.log = output + errors

    def ok(self):
        return self.status == 0 and not self.timed_out

    def how(self):
        """How it ended, in words."""
        if self.timed_out:
            return f"stopped after {self.seconds:.0f} s"
        if self.status < 0:
            return f"killed by {signal.Signals(-self.status).name}"
        return f"exit status {self.status}"

    def signalled(self):
        return self.timed_out or self.status < 0 or self.status > 128

    def plugin_lines(self):
        return [line for line in self.log.splitlines() if "ggml-moe: " in line and "ggml-moe: summary " not in line]

    def reason(self):
        """The last line that says what went wrong, for a report."""
        bad = [line for line in self.log.splitlines() if re.search(r"error|fail|abort|assert|ggml-moe: ", line, re.I)]
        return f"{self.how()}: {bad[-1].strip()[:200]}" if bad else self.how()

    def summaries(self):
        """The plugin's own counters, one dictionary for each backend that was freed."""
        return [json.loads(line.split("ggml-moe: summary ", 1)[1]) for line in self.log.splitlines()
                if "ggml-moe: summary {" in line]

    def counter(self, name):
        """A counter summed over all backends, or None where the plugin does not report it."""
        values = [summary[name] for summary in self.summaries() if name in summary]
        return sum(values) if values else None


class Missing(Exception):
    """A step cannot run here; the text says why."""


class Machine:
    """Paths, devices, the deadline, and every process that a step starts."""

    def __init__(self, dry, limit):
        self.dry = dry
        self.started = time.monotonic()
        self.deadline = self.started + limit
        self.group_deadline = self.deadline
        self.pack = pathlib.Path(os.environ["GPU_PACK"])
        self.stock_folder = pathlib.Path(os.environ["GPU_STOCK"])
        self.work = pathlib.Path(os.environ["GPU_WORK"])
        self.logs = self.work / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.plugin = self.pack / "libggml-moe.so"
        self.inner = "CPU" if dry else "CUDA0"
        self.threads = min(os.cpu_count() or 1, 16)
        self.stock = Side("stock", "none" if dry else "CUDA0")
        # For measuring: nothing is told while it runs.
        self.quiet_on_device = Side("plugin", "MoE0", f"inner={self.inner};debug-experts=device")
        self.ours = Side("plugin", "MoE0", f"inner={self.inner};log=debug;pin-budget-mb=24576;cache=off")
        self.ours_on_device = Side("plugin, experts on the device", "MoE0", f"{self.ours.keys};debug-experts=device")
        self.gpu_tests = ROOT / "tests/gpu"
        self.out = pathlib.Path(os.environ["OUT"])
        self.log_lock = threading.Lock()
        self.running = set()
        self.seconds = {}
        self.model_path = self.model = self.memory = None
        self.found = {}  # what one step measured and another needs, too
        self.started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    def describe(self, card):
        """What the report says about the card, the processor and the host program."""
        self.card = card
        cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
        self.cpu = cpu[1] if cpu else os.uname().machine
        archive = os.environ.get("GPU_STOCK_NAME", "")
        self.host_build = {"build": archive, "sha256": os.environ.get("GPU_STOCK_SHA256", "")}

    def big_model(self):
        """The generated model of the 30B-A3B shape, once it is written and the machine's memory has grown."""
        for process, what in ((self.model, "the model was not written"), (self.memory, "memory was not touched")):
            if process is None:
                continue
            try:
                status = process.wait(max(min(self.left(), 120), 1))
            except subprocess.TimeoutExpired:
                raise Missing(f"{what} in time") from None
            self.running.discard(process)
            if status != 0 and process is self.model:
                raise Missing(f"{what}: see the log")
        return self.model_path

    def find_tool(self, name):
        """A program of the CUDA toolkit."""
        for folder in [*os.environ["PATH"].split(":"), "/usr/local/cuda/bin", *map(str, pathlib.Path("/usr/local").glob("cuda*/bin"))]:
            if os.access(f"{folder}/{name}", os.X_OK):
                return f"{folder}/{name}"
        raise Missing(f"no {name} on this machine")

    def left(self):
        return min(self.deadline, self.group_deadline) - time.monotonic()

    def environment(self, side=None, preload=(), alone=False):
        """Nothing of the caller's ggml or llama.cpp settings gets in. `alone`: the process has the machine for itself."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("GGML_", "LLAMA_", "OMP_"))}
        if not alone:
            # Several busy OpenMP teams spin against each other; waiting threads that sleep give the same results.
            env["OMP_WAIT_POLICY"] = "passive"
        # llama.cpp's tools do not wait for their own log at exit; this library does.
        env["LD_PRELOAD"] = " ".join(str(self.pack / name) for name in (*preload, "flush_log.so"))
        if side is not None and side.keys is not None:
            if side.preloaded:
                env["LD_PRELOAD"] = f"{self.plugin} {env['LD_PRELOAD']}"
            else:
                env["GGML_BACKEND_PATH"] = str(self.plugin)
            # What one run learned must not change the next one.
            env["GGML_MOE"] = side.keys if "state-file" in side.keys else f"{side.keys};state-file=off"
        return env

    def start(self, arguments, env, **streams):
        # A group of its own, so that what a program started ends with it; but no new session: the caller can end us all.
        process = subprocess.Popen([str(a) for a in arguments], env=env, process_group=0, cwd=self.work, **streams)
        self.running.add(process)
        return process

    def stop(self, process):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.running.discard(process)

    def stop_all(self):
        for process in list(self.running):
            self.stop(process)

    def run(self, arguments, env, limit, tag):
        """Runs a program to its end, at most `limit` seconds and never past the deadline; its output is logged whole."""
        limit = min(limit, self.left())
        if limit < 2:
            raise Missing("out of time")
        begin = time.monotonic()
        process = self.start(arguments, env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        timed_out = False
        try:
            output, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            timed_out = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
        self.running.discard(process)
        done = Finished([str(a) for a in arguments], process.returncode, output.decode(errors="replace"),
                        errors.decode(errors="replace"), time.monotonic() - begin, timed_out)
        self.keep_log(tag, f"$ GGML_MOE={env.get('GGML_MOE', '')} {' '.join(done.arguments)}\n{done.log}\n= {done.how()}, {done.seconds:.1f} s\n")
        return done

    def keep_log(self, tag, text):
        with self.log_lock, open(self.logs / f"{tag}.log", "a", encoding="utf-8") as log:
            log.write(text)

    def tool(self, name, side, model, *more):
        """A stock program with what every comparison needs: the model, no repacking, the side's device."""
        return [self.stock_folder / name, "-m", model, "-nr", "-t", min(self.threads, 4), "-ngl", 99, "--device", side.device, *more]


class Results:
    """Rows of the table, in the order in which they came."""

    def __init__(self):
        self.rows = []
        self.lock = threading.Lock()

    def add(self, step, check, passed, figure, bar="", **values):
        """passed: True, False, or None for a figure without a bar."""
        result = {True: "pass", False: "FAIL", None: "report"}[passed]
        with self.lock:
            self.rows.append({"step": step, "check": check, "result": result, "figure": figure, "bar": bar, "values": values})
            print(f"  {result:7} {step}: {check}: {figure}{f' (bar: {bar})' if bar else ''}", flush=True)

    def skip(self, step, check, reason):
        with self.lock:
            self.rows.append({"step": step, "check": check, "result": "skipped", "figure": reason, "bar": "", "values": {}})
            print(f"  skipped {step}: {check}: {reason}", flush=True)

    def table(self, steps):
        """All rows, in the order of the steps, whatever the order in which they ended."""
        head = ["step", "result", "check", "figure", "bar"]
        ordered = sorted(self.rows, key=lambda row: steps.index(row["step"]))
        rows = [[str(row[name]).replace("\n", " ")[:110] for name in head] for row in ordered]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(4)] + [0]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [head, *rows])

    def count(self, result):
        return sum(row["result"] == result for row in self.rows)
