"""Runs the steps, prints one table and writes gpu.json. Started by run.sh, which prepares the folders."""
import argparse
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import traceback

import bench
import cache
import correctness
import faults
import host
import lending
import memory
import passes
import prompts
import server
import shapes
import speed
import team
import using

# Name, function, group. Groups run one after the other, correctness first. The steps of "beside" run at the same time: none
# of them measures time or free memory. "alone" steps want the card for themselves, in this order; "named" ones do, too, and run only
# when --only names them.
STEPS = [
    ("driver", correctness.driver, "first"),
    ("kernels", correctness.kernels, "beside"),
    ("perplexity", correctness.perplexity, "beside"),
    ("ops", correctness.operations, "beside"),
    ("server", server.slots, "beside"),
    ("contexts", server.draft, "beside"),
    ("quality", cache.quality, "beside"),
    ("prompt-quality", passes.quality, "beside"),
    ("budget", memory.budget, "beside"),
    ("lend-equal", lending.equal, "beside"),
    ("graphs", correctness.graphs, "beside"),
    ("sanitizer", correctness.sanitizer, "beside"),
    ("faults", faults.missing_pieces, "beside"),
    ("reload", faults.reload, "alone"),
    ("team", team.against_memory, "alone"),
    ("speed", speed.against_stock, "alone"),
    ("ram", speed.experts_in_ram, "alone"),
    ("decode", cache.decode, "alone"),
    ("conditions", cache.conditions, "alone"),
    ("prompt", cache.prompt, "alone"),
    ("memory", memory.foreign, "alone"),
    ("lending", lending.server, "alone"),
    ("exhausted", faults.exhausted, "alone"),
    ("ncmoe", speed.stock_cpu_experts, "alone"),
    ("shapes", shapes.other_shapes, "alone"),
    ("endurance", shapes.endurance, "alone"),
    ("prompts", prompts.prompts, "named"),
    ("overlap", passes.overlap, "named"),
    ("short-prompts", prompts.short, "named"),
    ("slow-prompts", prompts.slow, "named"),
    ("after-prompt", passes.after_prompt, "named"),
    ("sweep", passes.sweep, "named"),
    ("glm-layer", passes.glm_layer, "named"),
    ("bench", bench.command, "named"),
    ("fits", using.fits, "beside"),
    ("preload", using.preload, "named"),
    ("in-file", using.in_file, "named"),
]
NEEDS_MODEL = {"speed", "ram", "decode", "conditions", "prompt", "memory", "lending", "exhausted", "ncmoe", "bench",
               "prompts", "overlap", "short-prompts", "slow-prompts", "after-prompt", "sweep", "preload"}
BESIDE_SECONDS = 240  # the most that the steps beside each other get together, so that what is measured has its time
RAM_GIB = 26  # touched ahead of measuring: the plugin's copy of the experts and its pinned staging


def parse():
    parser = argparse.ArgumentParser(prog="run.sh", description="Everything that needs a GPU, in one call.")
    parser.add_argument("--list", action="store_true", help="print the steps and end")
    parser.add_argument("--only", default="", metavar="STEP[,STEP]", help="run these steps and no others")
    parser.add_argument("--limit", type=float, default=535, metavar="SECONDS", help="stop starting work after this long (%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="on a machine without a GPU: the plugin over the CPU, a small model, no bars on speed")
    arguments = parser.parse_args()
    wanted = [name for name in arguments.only.split(",") if name]
    unknown = [name for name in wanted if name not in [step[0] for step in STEPS]]
    if unknown:
        parser.error(f"no step {', '.join(unknown)}; --list prints them")
    return arguments, [step for step in STEPS if step[0] in wanted or not wanted and step[2] != "named"]


def one_step(machine, results, step):
    name, function, _ = step
    begin = time.monotonic()
    try:
        if machine.left() < 5:
            raise host.Missing("out of time")
        function(machine, results)
    except host.Missing as reason:
        results.skip(name, function.__doc__.split(":")[0].split(".")[0], str(reason))
    except Exception as error:
        machine.keep_log(name, traceback.format_exc())
        results.add(name, "the step itself", False, f"{type(error).__name__}: {error}", "no error")
    machine.seconds[name] = round(time.monotonic() - begin, 1)
    write(machine, results)


def run_together(machine, results, steps):
    threads = [threading.Thread(target=one_step, args=(machine, results, step), daemon=True) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def output_of(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def card():
    names = ["name", "memory.total", "driver_version", "compute_cap", "pcie.link.gen.current", "pcie.link.width.current",
             "clocks.max.sm", "persistence_mode"]
    line = output_of("nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader")
    return dict(zip(names, [value.strip() for value in line.splitlines()[0].split(",")])) if line else {}


def built(machine):
    """What the pack says of the library, if it says it of this one."""
    told = json.loads((machine.pack / "pack.json").read_text())
    digest = hashlib.sha256((machine.pack / "libggml-moe.so").read_bytes()).hexdigest()
    return told if told["library_sha256"] == digest else {"commit": "unknown: another library than the pack's", "library_sha256": digest}


def write(machine, results):
    """After every step, so that a run that is cut off leaves what it found."""
    report = {
        "started": machine.started_at, "seconds": round(time.monotonic() - machine.started, 1), "step_seconds": machine.seconds,
        "plugin": built(machine), "host": machine.host_build, "card": machine.card,
        "machine": {"processors": os.cpu_count(), "cpu": machine.cpu, "kernel": os.uname().release.split("-")[0], "dry_run": machine.dry},
        "settings": {"keys": machine.ours.keys, "keys_experts_on_device": machine.ours_on_device.keys,
                     "keys_speed": machine.quiet_on_device.keys, "threads": machine.threads,
                     "repeats": speed.REPEATS, "repetitions": speed.INNER_REPEATS},
        "rows": results.rows,
    }
    with machine.log_lock:
        (machine.out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
        with open(machine.out / "gpu.log", "wb") as whole:
            for path in sorted(machine.logs.glob("*.log")):
                whole.write(f"==== {path.stem}\n".encode())
                data = path.read_bytes()
                # The beginning and the end of each log, within what may come back from a machine that only lends itself.
                whole.write(data if len(data) <= 600_000 else data[:200_000] + b"\n[...]\n" + data[-400_000:])


def prepare(machine, steps):
    """Starts what takes time and nobody's attention: the large model, and memory that the machine has to grow."""
    (machine.work / "short.txt").write_text(host.EVAL_TEXT.read_text(encoding="utf-8")[:6000])
    if not NEEDS_MODEL & {step[0] for step in steps}:
        return
    folder = machine.work if machine.dry else pathlib.Path("/dev/shm")
    machine.model_path = folder / "ggml-moe-gpu-test.gguf"
    shape = "--layers 2 --embd 512 --ff 256 --experts 16 --used 4 --heads 8 --kv 2 --hd 64 --vocab 2048 --ctx 4096".split() if machine.dry else []
    log = open(machine.logs / "model.log", "ab")
    machine.model = machine.start([sys.executable, machine.gpu_tests / "synth_moe.py", machine.model_path, *shape],
                                  machine.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    if not machine.dry:
        machine.memory = machine.start([sys.executable, machine.gpu_tests / "touch_memory.py", RAM_GIB], machine.environment(),
                                       stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def main():
    arguments, steps = parse()
    if arguments.list:
        for name, function, group in STEPS:
            print(f"{name:14} {group:7} {' '.join(function.__doc__.split())}")
        return 0
    machine = host.Machine(arguments.dry_run, arguments.limit)
    results = host.Results()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        machine.describe(card())
        prepare(machine, steps)
        print(f"gpu: {machine.card.get('name', 'no card')}, {os.cpu_count()} processors, {machine.left():.0f} s", flush=True)
        run_together(machine, results, [step for step in steps if step[2] == "first"])
        machine.group_deadline = time.monotonic() + BESIDE_SECONDS * (2 if machine.dry else 1)
        run_together(machine, results, [step for step in steps if step[2] == "beside"])
        machine.group_deadline = machine.deadline
        for step in steps:
            if step[2] in ("alone", "named"):
                one_step(machine, results, step)
    finally:
        machine.stop_all()
        write(machine, results)
        if machine.model_path is not None:
            machine.model_path.unlink(missing_ok=True)
    print(f"\n{results.table([step[0] for step in STEPS])}\n")
    print(f"gpu: {results.count('pass')} passed, {results.count('FAIL')} failed, {results.count('skipped')} skipped, "
          f"{results.count('report')} reported, {time.monotonic() - machine.started:.0f} s")
    return 1 if results.count("FAIL") or not results.count("pass") else 0


sys.exit(main())
