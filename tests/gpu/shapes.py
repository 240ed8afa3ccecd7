"""Steps for other shapes than the 30B-A3B model, and for long use: the cache with models like gpt-oss and DeepSeek, and endurance."""
import json
import pathlib
import re
import statistics
import sys

from correctness import figures
from host import EVAL_TEXT, FIXTURE, Missing
from speed import bench

SHARE = 0.30
# Architecture, MiB of its experts, layers with experts, the simulated routing of its shape, and a small version for a dry run.
SHAPES = [
    ("gpt-oss", 12909, 8, "gpt-oss", "--layers 4 --embd 256 --ff 128 --heads 4 --kv 2 --hd 64 --vocab 1024"),
    ("deepseek2", 13824, 8, None, "--layers 3 --embd 256 --ff 256 --heads 4 --hd 32 --rope 32 --q-rank 64 --kv-rank 64 --dense-ff 256 --vocab 1024"),
]


def write_model(machine, architecture, small):
    folder = machine.work if machine.dry else pathlib.Path("/dev/shm")
    path = folder / f"ggml-moe-gpu-{architecture}.gguf"
    arguments = [sys.executable, machine.gpu_tests / "synth_moe.py", path, "--arch", architecture, *(small.split() if machine.dry else [])]
    done = machine.run(arguments, machine.environment(), 120, "shapes")
    if not done.ok():
        path.unlink(missing_ok=True)
        raise Missing(f"the model was not written: {done.reason()}")
    return path, done.seconds


def same_text(machine, results, architecture, model, keys):
    """One token per call: random weights say nothing of language, but both sides must say the same nothing."""
    def run(side, *more):
        arguments = machine.tool("llama-perplexity", side, model, "-f", EVAL_TEXT, "-c", 64, "-b", 1, "-ub", 1, "--chunks", 2, *more)
        return machine.run(arguments, machine.environment(side), 90, "shapes")
    # Stock with all experts on the card, where they fit, and with all on the CPU: random weights make much of how sums are rounded.
    stock, ours = run(machine.stock), run(machine.ours.with_keys(keys))
    wanted, found, other = figures(stock), figures(ours), figures(run(machine.stock, "--cpu-moe"))
    if wanted is None or found is None or other is None:
        results.add("shapes", f"like {architecture}, text", False, (stock if wanted is None else ours).reason(), "runs")
        return
    number = lambda line: float(re.search(r"[\d.]+", line.split("]")[-1])[0])
    most = lambda one: max(abs(number(a) / number(b) - 1) for a, b in zip(one[:-1], wanted[:-1]))
    off, spread = most(found), most(other)
    hits, misses = ours.counter("hits"), ours.counter("misses")
    results.add("shapes", f"like {architecture}, text", off <= max(0.005, 2 * spread) and hits > 0 and misses > 0,
                f"{found[-1]} against {wanted[-1]}: off by {100 * off:.2f}%, stock between card and CPU by {100 * spread:.2f}%; "
                f"{hits} hits, {misses} misses", "twice stock's")


def other_shapes(machine, results):
    """Models like gpt-oss and DeepSeek at 30% of the experts: text against stock, decoding against stock's best placement."""
    for architecture, mib, layers, preset, small in SHAPES:
        model, seconds = write_model(machine, architecture, small)
        try:
            results.add("shapes", f"like {architecture}, written", None, f"{model.stat().st_size >> 20} MiB in {seconds:.0f} s")
            keys = f"cache={8 if machine.dry else int(mib * SHARE)}"
            same_text(machine, results, architecture, model, keys)
            on_cpu = round(layers * (1 - SHARE)) + (architecture == "deepseek2")  # -ncmoe counts the dense layer, too
            _, stock = bench(machine, machine.stock, "-p", 0, "-n", 8 if machine.dry else 64, "-r", 3, "-ncmoe", on_cpu, model=model)
            side = machine.ours.with_keys(keys + (f";replay={preset}" if preset else ""))
            done, ours = bench(machine, side, "-p", 0, "-n", 16 if machine.dry else 192, "-r", 3, "-v", model=model)
            if not done.ok() or not ours or not stock:
                results.add("shapes", f"like {architecture}, decoding", False, done.reason(), "runs")
                continue
            rate, base = (statistics.median(next(iter(side.values()))[1:]) for side in (ours, stock))
            hits, misses = done.counter("hits"), done.counter("misses")
            results.add("shapes", f"like {architecture}, decoding", None,
                        f"{rate / base:.2f} of stock -ncmoe {on_cpu}: {rate:.1f} against {base:.1f} t/s; {100 * hits / max(hits + misses, 1):.1f}% hits")
        finally:
            model.unlink(missing_ok=True)


def endurance(machine, results):
    """20,000 tokens of one server, prompts of 1 to 128 tokens, two at a time, closed connections: memory stays, no token waits."""
    side = machine.ours.with_keys("cache=6")
    server = [machine.stock_folder / "llama-server", "-m", FIXTURE, "-nr", "-t", 2, "-ngl", 99, "--device", side.device, "-c", 1024, "-np", 2,
              "--cache-ram", 0, "--offline"]
    log = machine.logs / "endurance-server.log"
    arguments = [sys.executable, machine.gpu_tests.parent / "endurance/endurance.py", "--tokens", 500 if machine.dry else 20000,
                 "--growth-mib", 64, "--log", log, "--", *server]
    done = machine.run(arguments, machine.environment(side), 280, "endurance")
    line = next((line for line in done.output.splitlines() if line.startswith("endurance: {")), None)
    if line is None:
        results.add("endurance", "a server", False, done.reason(), "runs")
        return
    report = json.loads(line.split(" ", 1)[1])
    rss, vram = report["rss_anon_mib"], report["vram_mib"]
    results.add("endurance", "a server", done.ok(),
                f"{report['tokens']} tokens in {report['seconds']} s, {report['closed']} of {report['requests']} closed; RssAnon {rss[0]} to {rss[-1]} "
                f"MiB, card {vram[0]} to {vram[-1]} MiB; longest gap {report['longest_gap_s']} s; {report['faults']}", "flat", report=report)
