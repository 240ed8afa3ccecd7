"""Steps for the expert cache: what it computes against stock, and decoding at several shares of the experts against stock's flags."""
import re
import statistics

from correctness import figures
from host import EVAL_TEXT, FIXTURE
from speed import bench, spread

EXPERTS_MIB = 15552  # of the 30B-A3B shape
# Share of the experts on the card, and the layers whose experts stock keeps on the CPU for that.
SHARES = [(0.20, 38, 2.0), (0.45, 26, 2.3), (0.70, 14, 1.8), (1.0, 0, 0.85)]


def quality(machine, results):
    """One token per call with part of the experts on the card, against stock on the card: chunk by chunk."""
    def run(side):
        arguments = machine.tool("llama-perplexity", side, FIXTURE, "-f", EVAL_TEXT, "-c", 128, "-b", 1, "-ub", 1, "--chunks", 12)
        return machine.run(arguments, machine.environment(side), 90, "quality")
    stock = run(machine.stock)
    wanted = figures(stock)
    if wanted is None:
        results.add("quality", "stock", False, stock.reason(), "runs")
        return
    for mib in (4, 6, 9, 16):
        done = run(machine.ours.with_keys(f"cache={mib}"))
        found = figures(done)
        if found is None:
            results.add("quality", f"cache of {mib} MiB", False, done.reason(), "runs")
            continue
        numbers = [[float(re.search(r"[\d.]+$", chunk)[0]) for chunk in side[:-1]] for side in (found, wanted)]
        off = max(abs(a / b - 1) for a, b in zip(*numbers))
        hits, misses = done.counter("hits"), done.counter("misses")
        results.add("quality", f"cache of {mib} MiB", off <= 0.002 and hits > 0,
                    f"{found[-1]} against {wanted[-1]}; chunks off by {100 * off:.3f}% at most; {hits} hits, {misses} misses", "<= 0.2%")


def decode(machine, results):
    """Decoding with part of the experts on the card and simulated routing, against stock's best placement for the same memory."""
    tokens = 32 if machine.dry else 192
    for share, layers, bar in SHARES:
        mib = max(int(EXPERTS_MIB * share * 1.005), 1) if not machine.dry else 8
        _, stock = bench(machine, machine.stock, "-p", 0, "-n", 64 if not machine.dry else 8, "-r", 3, "-ncmoe", layers)
        side = machine.ours.with_keys(f"cache={mib};replay=qwen3-30b")
        done, ours = bench(machine, side, "-p", 0, "-n", tokens, "-r", 4, "-v", limit=120)
        if not done.ok() or not ours or not stock:
            results.add("decode", f"{100 * share:.0f}% of the experts", False, done.reason(), "runs")
            continue
        (name, theirs), mine = next(iter(stock.items())), next(iter(ours.values()))
        rate, base = statistics.median(mine[2:]), statistics.median(theirs[1:])
        hits, misses = done.counter("hits"), done.counter("misses")
        lines = [line.split("ggml-moe: ", 1)[1] for line in done.plugin_lines() if "cache" in line]
        results.add("decode", f"{100 * share:.0f}% of the experts", rate / base >= bar,
                    f"{rate / base:.2f} of stock -ncmoe {layers}: {rate:.1f} against {base:.1f} t/s ({spread([value / base for value in mine])}); "
                    f"{100 * hits / max(hits + misses, 1):.1f}% hits, {done.counter('cpu_bytes') >> 20} MiB by the CPU, "
                    f"{done.counter('upload_bytes') >> 20} MiB loaded; {lines[:1]}", f">= {bar:.2f}", samples=mine, stock=theirs)
