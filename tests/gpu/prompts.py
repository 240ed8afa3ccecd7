"""Steps for the speed of prompts: against stock at the same device memory, over slow links, and short prompts.

The same memory: a budget is what stock takes with passes of 512 tokens (dense weights, context, computing) and the share of the experts. Ours
keeps to it by vram-budget-mb, whatever its passes are. For stock, what a larger micro-batch takes for computing more than one of 512 is
taken from its experts: -ncmoe is larger by so many layers. Ours is preloaded, as users have it; a row tells what the same is when the host opens it. Stock's experts lie in pinned memory (-lm none, as it advises itself) where
nothing else is said.
"""
import json
import math
import os
import re
import statistics
import sys

from host import Side

EXPERTS_MIB, LAYERS = 15552, 48  # of the 30B-A3B shape
LAYER_MIB = EXPERTS_MIB / LAYERS
LONG = 12288


class Sizes:
    """What is asked for, on the card and in a dry run."""

    def __init__(self, dry):
        self.dry = dry
        self.long = 128 if dry else LONG
        self.prompts = [32, 128] if dry else [512, 2048, 4096, LONG]
        self.passes = [32, 128] if dry else [2048, 4096, 8192, LONG]
        self.stock_passes = [32, 128] if dry else [LONG, 4096, 512, 2048]
        self.vram_passes = [32, 128] if dry else [2048, 4096]
        self.default = 32 if dry else 512

    def cache_mib(self, share):
        return 4 if self.dry else int(EXPERTS_MIB * share * 1.005)


def measure(machine, side, prompts, passes, *more, repeats=3, limit=150, preload=(), variables=None):
    """One llama-bench process for all prompts and passes. Returns it and tokens per second by (prompt, pass), one for each repetition."""
    listed = lambda numbers: ",".join(map(str, numbers))
    defaults = () if passes is None else ("-ub", listed(passes), "-b", max([*passes, 2048]))
    arguments = [machine.stock_folder / "llama-bench", "-m", machine.big_model(), "-t", machine.threads, "-ngl", 99, "-dev", side.device, "-o", "jsonl",
                 "-v", "-n", 0, "-p", listed(prompts), "-r", repeats, *defaults, *more]
    env = {**machine.environment(side, preload=preload, alone=True), **(variables or {})}
    done = machine.run(arguments, env, limit, "prompts")
    found = {}
    for line in done.output.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            found[row["n_prompt"], row["n_ubatch"]] = row["samples_ts"]
    return done, found


def rate(samples):
    """The first repetition still warms caches and clocks."""
    return statistics.median(samples[1:] or samples)


def best(found, prompt):
    """The fastest pass for a prompt: its speed and the pass."""
    return max(((rate(samples), passes) for (size, passes), samples in found.items() if size == prompt), default=(0.0, 0))


def computing(log, device):
    """MiB for computing by micro-batch, of the longest context; and MiB of weights and of the longest context."""
    by_pass, weights, context, passes = {}, 0.0, 0.0, None
    for line in log.splitlines():
        if found := re.search(r"n_ubatch\s+= (\d+)", line):
            passes = int(found[1])
        elif found := re.search(rf"\s{device} (model|KV|compute) buffer size =\s+([\d.]+) MiB", line):
            mib = float(found[2])
            if found[1] == "model":
                weights = max(weights, mib)
            elif found[1] == "KV":
                context = max(context, mib)
            else:
                by_pass[passes] = max(by_pass.get(passes, 0.0), mib)
    return by_pass, weights, context


class Vram:
    """Stock with everything on the card: its speed, and the memory that it takes beside experts."""

    def __init__(self, machine, sizes):
        self.done, self.found = measure(machine, machine.stock, sizes.prompts, sizes.vram_passes, repeats=3)
        by_pass, weights, context = computing(self.done.log, machine.inner if machine.dry else machine.stock.device)
        self.rate, self.best_pass = best(self.found, sizes.long)
        self.beside_mib = max(weights - (0 if machine.dry else EXPERTS_MIB), 0) + context
        points = sorted(by_pass.items())
        # What computing takes is a sum of what each token of a pass takes and of the rest.
        (first, low), (last, high) = (points[0], points[-1]) if points else ((0, 0.0), (1, 0.0))
        self.slope = (high - low) / (last - first) if last > first else 0.0
        self.rest = low - self.slope * first

    def computing_mib(self, passes):
        return self.rest + self.slope * passes


def in_vram(machine, sizes):
    if "vram" not in machine.found:
        machine.found["vram"] = Vram(machine, sizes)
    return machine.found["vram"]


def stock_layers(vram, share, passes):
    """-ncmoe so that stock with these passes takes what it takes with passes of 512 and the share of the experts."""
    more = max(vram.computing_mib(passes) - vram.computing_mib(512), 0.0)
    return LAYERS - max(round(LAYERS * share) - math.ceil(more / LAYER_MIB - 0.05), 0)


def our_side(machine, sizes, vram, share, *keys):
    cache = sizes.cache_mib(share)
    budget = 64 if machine.dry else math.ceil(vram.beside_mib + vram.computing_mib(512) + cache)
    return machine.ours.preload().with_keys(";".join([f"cache={cache}", f"vram-budget-mb={budget}", "vram-reserve-mb=0", *keys])), budget


def link_gbs(machine):
    """What a copy of pinned memory moves, in 10^9 bytes per second."""
    if machine.dry:
        return 10.0
    if "link" not in machine.found:
        done = machine.run([sys.executable, machine.gpu_tests / "link.py"], machine.environment(), 30, "link")
        found = re.search(r"link: ([\d.]+) GB/s", done.output)
        machine.found["link"] = float(found[1]) if found else float("nan")
    return machine.found["link"]


def bound(vram, share, link, tokens):
    """Tokens per second if only the experts that are not held went over the link, once, all of it behind computing."""
    return tokens / max((1 - share) * EXPERTS_MIB * (1 << 20) / 1e9 / link, tokens / vram.rate)


def ratio_row(results, step, name, ours, other, bar, what, machine, **values):
    if not other:
        results.add(step, name, False, f"no figure of {what}", f">= {bar}")
        return
    results.add(step, name, None if machine.dry else ours / other >= bar, f"{ours / other:.2f} of {what}: {ours:.0f} against {other:.0f} t/s",
                f">= {bar:.2f}", ratio=ours / other, **values)


def streamed(done):
    """What the plugin's counters say of passes."""
    names = ("blocks", "streamed_blocks", "fetched_blocks", "hits", "misses", "upload_bytes")
    return {name: value for name in names if (value := done.counter(name)) is not None}


def kept(found):
    return {f"pp{prompt}/{passes}": samples for (prompt, passes), samples in found.items()}


def stock_best(machine, results, sizes, vram, share, prompts, passes):
    """Stock's speed by (prompt, pass) at the same memory, pinned experts, a process for each pass because -ncmoe differs."""
    found, placed = {}, {}
    for size in passes:
        layers = 1 if machine.dry else stock_layers(vram, share, size)
        done, one = measure(machine, machine.stock, prompts, [size], "-lm", "none", "-ncmoe", layers, repeats=2)
        if not done.ok():
            results.add("prompts", f"stock, {100 * share:.0f}%, -ub {size} -ncmoe {layers}", None, done.reason())
            continue
        by_pass, weights, context = computing(done.log, machine.stock.device)
        placed[size] = {"ncmoe": layers, "mib": round(weights + context + by_pass.get(size, 0.0))}
        found.update(one)
    return found, placed


def prompts(machine, results):
    """Prompts of 512 to 12,288 tokens at 45% and 20% of the experts: against stock's best at the same memory, its defaults, everything in VRAM."""
    sizes = Sizes(machine.dry)
    print("  prompts: about 330 s, 240 of them at 45%; GPU_SHARES=45 or 20 asks for one", flush=True)
    vram, long = in_vram(machine, sizes), sizes.long
    if not vram.done.ok() or not vram.rate:
        results.add("prompts", "stock, everything in VRAM", False, vram.done.reason(), "runs")
        return
    results.add("prompts", "stock, everything in VRAM", None,
                ", ".join(f"pp{prompt} {best(vram.found, prompt)[0]:.0f}" for prompt in sizes.prompts)
                + f" t/s; computing takes {vram.computing_mib(512):.0f} MiB at -ub 512, {vram.computing_mib(LONG):.0f} at {LONG}", samples=kept(vram.found))
    shares = os.environ.get("GPU_SHARES", "45,20").split(",")
    for share, passes, others in ((0.45, sizes.passes, sizes.stock_passes), (0.20, sizes.passes[:3], sizes.stock_passes[1:2])):
        if f"{100 * share:.0f}" not in shares:
            continue
        percent = f"{100 * share:.0f}%"
        side, budget = our_side(machine, sizes, vram, share)
        done, ours = measure(machine, side, sizes.prompts, passes)
        mine, chosen = best(ours, long)
        if not done.ok() or not mine:
            results.add("prompts", f"ours, {percent}", False, done.reason(), "runs")
            continue
        counts = streamed(done)
        results.add("prompts", f"ours, {percent}, budget {budget} MiB", counts.get("blocks", 0) > 0,
                    "; ".join(f"pp{prompt} " + ", ".join(f"{rate(ours[prompt, size]):.0f}" for size in passes if (prompt, size) in ours)
                              for prompt in sizes.prompts) + f" t/s at -ub {passes}; {counts}", "MoE blocks", samples=kept(ours),
                    lines=[line for line in done.plugin_lines() if "cache" in line or "the mask of" in line][:9])
        if share > 0.4:
            opened = Side(side.name, side.device, side.keys)
            _, found = measure(machine, opened, [long], passes[1::2], repeats=2)
            for size in passes[1::2]:
                ratio_row(results, "prompts", f"pp{long}, {percent}, -ub {size}, preloaded", rate(ours[long, size]), rate(found.get((long, size), [0.0])),
                          0.98, "the same opened by GGML_BACKEND_PATH", machine, samples=kept(found))
        if share < 0.4:
            limit = bound(vram, share, link_gbs(machine), long)
            wanted = min(0.8 * vram.rate, 0.9 * limit)
            results.add("prompts", f"pp{long}, {percent}", None if machine.dry else mine >= wanted,
                        f"{mine:.0f} t/s at -ub {chosen}; everything in VRAM {vram.rate:.0f}, bound {limit:.0f} (link {link_gbs(machine):.1f} GB/s)",
                        f">= {wanted:.0f}: least of 0.8 of VRAM and 0.9 of the bound")
        else:
            ratio_row(results, "prompts", f"pp{long}, {percent}, -ub {chosen}", mine, vram.rate, 0.85, f"everything in VRAM -ub {vram.best_pass}", machine)
        stock, placed = stock_best(machine, results, sizes, vram, share, sizes.prompts, others)
        for prompt in sizes.prompts:
            theirs, size = best(stock, prompt)
            bar = 1.2 if prompt == long and share > 0.4 else 1.0
            ratio_row(results, "prompts", f"pp{prompt}, {percent}, stock's best", best(ours, prompt)[0], theirs, bar,
                      f"stock -lm none -ub {size} -ncmoe {placed.get(size, {}).get('ncmoe')}", machine, samples=kept(stock), placed=placed)
        if share > 0.4:
            layers = 1 if machine.dry else LAYERS - round(LAYERS * share)
            for cpu, bar in ((layers, 2.3), (LAYERS, 3.5)):
                # Passes of 512 are as fast in a sixth of the prompt, and that one is not handicapped by a long context.
                some = max(long // 6, sizes.default)
                _, default = measure(machine, machine.stock, [some], None, "-ncmoe", cpu, repeats=1)
                theirs, _ = best(default, some)
                ratio_row(results, "prompts", f"pp{long}, {percent}, stock's default passes", mine, theirs, bar, f"stock -ncmoe {cpu}", machine,
                          samples=kept(default))


def slow(machine, results):
    """A link of 13 and 6 GB/s for both sides, 45% of the experts, 12,288 tokens: stock's default passes, its best, and the bound. GPU_LINKS=6 asks for one."""
    sizes, share = Sizes(machine.dry), 0.45
    vram, long = in_vram(machine, sizes), sizes.long
    large = sizes.stock_passes[:2]
    for gbs in map(int, os.environ.get("GPU_LINKS", "13,6").split(",")):
        shim = {"preload": ["slow_link.so"], "variables": {"SLOW_LINK_GBS": str(gbs)}}
        path = machine.out / f"slow-{gbs}.jsonl"
        path.unlink(missing_ok=True)
        side, _ = our_side(machine, sizes, vram, share, f"link-gbs={gbs}", f"timeline={path}", *(["stream-min-tokens=9"] if machine.dry else []))
        done, ours = measure(machine, side, [long], sizes.passes[-2:], repeats=2, limit=120)
        told = re.search(r"runs [\d.]+ times: ([\d.]+) GB/s", done.log)
        found, theirs_gbs = {}, None
        for size in [*large, sizes.default]:
            layers = 1 if machine.dry else stock_layers(vram, share, size)
            # Stock with passes of 512 moves the experts once for each, so a third of the prompt is as fast as all of it.
            prompt, repeats, more = (long, 2, ()) if size != sizes.default else (max(long // 3, size), 1, ("--no-warmup",))
            one, rates = measure(machine, machine.stock, [prompt], [size], "-lm", "none", "-ncmoe", layers, *more, repeats=repeats, limit=120, **shim)
            lines = [json.loads(line) for line in re.findall(r"slow-link: (\{.*\})", one.log)]
            theirs_gbs = lines[-1]["now_gbs"] if lines else theirs_gbs
            found.update({size: rate(samples) for samples in rates.values()})
        mine, chosen = best(ours, long)
        ours_gbs = float(told[1]) if told else None
        same = ours_gbs and theirs_gbs and abs(ours_gbs / theirs_gbs - 1) <= 0.05
        results.add("slow-prompts", f"{gbs} GB/s: the same link", None if machine.dry else bool(same),
                    f"64 MiB move at {ours_gbs} GB/s for ours, {theirs_gbs} for stock", "within 5%, else void")
        if not mine or (not same and not machine.dry):
            results.add("slow-prompts", f"{gbs} GB/s", False, done.reason() if not mine else "void: the links differ", "runs")
            continue
        ratio_row(results, "slow-prompts", f"{gbs} GB/s, stock's default passes", mine, found.get(sizes.default), 8.0, "stock -ub 512", machine)
        fastest = max(found.items(), key=lambda pair: pair[1], default=(0, 0.0))
        ratio_row(results, "slow-prompts", f"{gbs} GB/s, stock's best", mine, fastest[1], 1.5, f"stock -ub {fastest[0]}", machine, found=found)
        limit = bound(vram, share, theirs_gbs or gbs, long)
        ratio_row(results, "slow-prompts", f"{gbs} GB/s, bound", mine, limit, 0.8, f"the bound (ours at -ub {chosen})", machine)
        within(results, f"{gbs} GB/s, within the pass", path, ours_gbs or gbs, long, ours.get((long, long), []), done)


def within(results, name, path, gbs, tokens, samples, done):
    """What of a prompt that is one pass is the pass, what that could be with what it brought, and what the host does in front of it."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    last = next((line for line in reversed(lines) if line["tokens"] == tokens), None)
    if last is None or not samples:
        results.add("slow-prompts", name, None, "no pass was written")
        return
    told = next((line.split("the mask of ")[1] for line in done.plugin_lines() if "the mask of " in line), "llama.cpp alone fills the mask")
    span, copy, compute = (last[f"{part}_us"] / 1000 for part in ("span", "copy", "compute"))
    link, whole = last["ram_bytes"] / gbs / 1e6, 1000 * tokens / samples[-1]
    results.add("slow-prompts", name, None,
                f"{max(link, compute) / span:.2f} of its own bound: {span:.0f} ms; copy {copy:.0f} for {last['ram_bytes'] / 1e6:.0f} MB, {link:.0f} at "
                f"{gbs} GB/s; compute {compute:.0f}; the whole prompt {whole:.0f}, so {whole - span:.0f} outside of it (the host's mask and inputs); {told}",
                span_ms=span, copy_ms=copy, compute_ms=compute, whole_ms=whole, ram_bytes=last["ram_bytes"])


SHORT = [9, 12, 16, 24, 31, 32, 48, 64, 128, 256]
# What stock may do with experts in RAM: pinned, mapped as by default, pinned and always computed by the CPU.
PLACES = [("-lm", "none"), (), ("-lm", "none", "-nopo", 1)]


def short(machine, results):
    """Prompts of 9 to 256 tokens at 45% and 20% of the experts: never slower than stock's best of three ways to hold experts in RAM."""
    sizes = Sizes(machine.dry)
    lengths = SHORT[:4] if machine.dry else SHORT
    for share in (0.45, 0.20):
        layers = 1 if machine.dry else LAYERS - round(LAYERS * share)
        side = machine.ours.with_keys(f"cache={sizes.cache_mib(share)}")
        done, ours = measure(machine, side, lengths, [512], repeats=6, limit=120)
        if not done.ok() or not ours:
            results.add("short-prompts", f"ours, {100 * share:.0f}%", False, done.reason(), "runs")
            continue
        fastest = {}
        for place in PLACES:
            other, found = measure(machine, machine.stock, lengths, [512], *place, "-ncmoe", layers, repeats=3)
            for (prompt, _), samples in found.items():
                fastest[prompt] = max(fastest.get(prompt, (0.0, "")), (rate(samples), " ".join(map(str, place))))
        counts = streamed(done)
        for prompt in lengths:
            theirs, place = fastest.get(prompt, (0.0, ""))
            samples = ours.get((prompt, 512), [0.0])
            ratio_row(results, "short-prompts", f"pp{prompt}, {100 * share:.0f}%", statistics.median(samples[3:] or samples), theirs, 1.0,
                      f"stock -ncmoe {layers} {place}", machine, samples=samples, counts=counts)
