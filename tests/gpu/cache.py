"""Steps for the expert cache: what it computes against stock, and decoding at several shares of the experts against stock's flags."""
import math
import re
import statistics

from correctness import figures
from host import EVAL_TEXT, FIXTURE
from speed import bench, spread

EXPERTS_MIB = 15552  # of the 30B-A3B shape
# Share of the experts on the card, and the layers whose experts stock keeps on the CPU for that.
SHARES = [(0.20, 38, 2.0), (0.45, 26, 2.3), (0.70, 14, 1.8), (1.0, 0, 0.85)]


def chunks(found):
    """The log-likelihood of each chunk per token, from the perplexities of all chunks up to each."""
    sums = [0.0] + [(number + 1) * math.log(float(re.search(r"[\d.]+$", chunk)[0])) for number, chunk in enumerate(found[:-1])]
    return [later - earlier for earlier, later in zip(sums, sums[1:])]


def quality(machine, results):
    """One token per call with part of the experts on the card, against stock on the card: every chunk of the text, in pairs."""
    def run(side):
        arguments = machine.tool("llama-perplexity", side, FIXTURE, "-f", EVAL_TEXT, "-c", 128, "-b", 1, "-ub", 1, "-t", 1)
        return machine.run(arguments + (["--chunks", 4] if machine.dry else []), machine.environment(side), 120, "quality")
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
        off = [100 * (mine - theirs) for mine, theirs in zip(chunks(found), chunks(wanted))]
        mean, error = statistics.mean(off), statistics.stdev(off) / math.sqrt(len(off)) if len(off) > 1 else 0.0
        hits, misses = done.counter("hits"), done.counter("misses")
        results.add("quality", f"cache of {mib} MiB", abs(mean) <= 0.2 and abs(mean) <= 2 * error + 1e-9 and hits > 0,
                    f"{mean:+.3f}% (standard error {error:.3f}%, {len(off)} chunks); {found[-1]} against {wanted[-1]}; "
                    f"{100 * hits / max(hits + misses, 1):.0f}% hits", "<= 0.2% and 2 standard errors")


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
        results.add("decode", f"{100 * share:.0f}% of the experts", hits > 0 if machine.dry else rate / base >= bar,
                    f"{rate / base:.2f} of stock -ncmoe {layers}: {rate:.1f} against {base:.1f} t/s ({spread([value / base for value in mine])}); "
                    f"{100 * hits / max(hits + misses, 1):.1f}% hits, {done.counter('cpu_bytes') >> 20} MiB by the CPU, "
                    f"{done.counter('upload_bytes') >> 20} MiB loaded; {lines[:1]}", "hits" if machine.dry else f">= {bar:.2f}", samples=mine, stock=theirs)


# What is different, the layers whose experts stock keeps on the CPU, the share of the card, keys, cores, arguments of llama-bench, bar.
DECODE, FOUR = ("-p", 0, "-n"), ("-n", 0, "-b", 4, "-ub", 4, "-p")
CONDITIONS = [
    ("uniform routing, 20%", 38, 0.20, "replay=uniform", None, DECODE, 1.0),
    ("link of 13 GB/s, 20%", 38, 0.20, "replay=qwen3-30b;link-gbs=13", None, DECODE, 1.5),
    ("link of 13 GB/s, 45%", 26, 0.45, "replay=qwen3-30b;link-gbs=13", None, DECODE, 1.5),
    ("link of 6 GB/s, 20%", 38, 0.20, "replay=qwen3-30b;link-gbs=6", None, DECODE, 1.5),
    ("link of 6 GB/s, 45%", 26, 0.45, "replay=qwen3-30b;link-gbs=6", None, DECODE, 1.5),
    ("6 cores, 20%", 38, 0.20, "replay=qwen3-30b", 6, DECODE, 1.5),
    ("6 cores, 45%", 26, 0.45, "replay=qwen3-30b", 6, DECODE, 1.5),
    ("4 tokens a pass, 20%", 38, 0.20, "replay=qwen3-30b", None, FOUR, 1.0),
    ("4 tokens a pass, 45%", 26, 0.45, "replay=qwen3-30b", None, FOUR, 1.0),
    ("4 tokens a pass, 70%", 14, 0.70, "replay=qwen3-30b", None, FOUR, 1.0),
    ("stock mode, 20%", 38, 0.20, "replay=qwen3-30b;policy=layers", None, DECODE, 0.97),
    ("stock mode, 45%", 26, 0.45, "replay=qwen3-30b;policy=layers", None, DECODE, 0.97),
    ("stock mode, 70%", 14, 0.70, "replay=qwen3-30b;policy=layers", None, DECODE, 0.97),
]


def conditions(machine, results):
    """Decoding under harder conditions: routing without any locality, slow links, few cores, four tokens a pass, whole layers."""
    known = {}
    for what, layers, share, keys, cores, test, bar in CONDITIONS:
        count = 8 if machine.dry else 96
        place = (layers, cores, test)
        if place not in known:
            _, known[place] = bench(machine, machine.stock, *test, count // 2 if machine.dry or test == DECODE else 64, "-r", 3, "-ncmoe", layers,
                                    cores=cores)
        stock = known[place]
        mib = max(int(EXPERTS_MIB * share * 1.005), 1) if not machine.dry else 8
        done, ours = bench(machine, machine.ours.with_keys(f"cache={mib};{keys}"), *test, count, "-r", 5, "-v", limit=120, cores=cores)
        if not done.ok() or not ours or not stock:
            results.add("conditions", what, False, done.reason(), "runs")
            continue
        theirs, mine = next(iter(stock.values())), next(iter(ours.values()))
        rate, base = statistics.median(mine[2:]), statistics.median(theirs[1:])
        hits, misses = done.counter("hits"), done.counter("misses")
        results.add("conditions", what, hits + misses > 0 if machine.dry else rate / base >= bar,
                    f"{rate / base:.2f} of stock -ncmoe {layers}: {rate:.1f} against {base:.1f} t/s ({spread([value / base for value in mine])}); "
                    f"{100 * hits / max(hits + misses, 1):.1f}% hits, {done.counter('upload_bytes') >> 20} MiB loaded", "used" if machine.dry else f">= {bar:.2f}",
                    samples=mine, stock=theirs)


def prompt(machine, results):
    """Prompts in passes of 2,048 tokens with part of the experts on the card, against stock's placement with the same passes and with its own."""
    sizes = "64,128" if machine.dry else "64,512,2048,8192"
    small = "64" if machine.dry else "2048"
    for share, layers, bar in [(0.20, 38, 1.0), (0.45, 26, 1.2)]:
        mib = max(int(EXPERTS_MIB * share * 1.005), 1) if not machine.dry else 8
        keys = f"cache={mib};replay=qwen3-30b"
        _, stock = bench(machine, machine.stock, "-p", sizes, "-n", 0, "-r", 2, "-ub", 2048, "-b", 2048, "-ncmoe", layers)
        _, default = bench(machine, machine.stock, "-p", small, "-n", 0, "-r", 2, "-ncmoe", layers)
        # Single tokens first, so that the cache is full.
        done, ours = bench(machine, machine.ours.with_keys(keys), "-p", sizes, "-n", 0, "-r", 3, "-ub", 2048, "-b", 2048, "-v", limit=120)
        if not done.ok() or not ours or not stock:
            results.add("prompt", f"{100 * share:.0f}% of the experts", False, done.reason(), "runs")
            continue
        for test, theirs in stock.items():
            rate, base = statistics.median(ours[test][1:]), statistics.median(theirs[-1:])
            other = f"; stock's own passes {statistics.median(default[test][-1:]):.0f}" if test in default else ""
            results.add("prompt", f"{test}, {100 * share:.0f}% of the experts", None if machine.dry else rate / base >= bar,
                        f"{rate / base:.2f} of stock -ncmoe {layers} -ub 2048: {rate:.0f} against {base:.0f} t/s{other}; "
                        f"{done.counter('streamed_blocks')} blocks streamed", f">= {bar:.2f}", samples=ours[test], stock=theirs)
