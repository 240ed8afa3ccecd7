"""Steps for what long passes are and leave behind: their timeline, decoding after them, many sizes in one process, and their results."""
import json
import random
import re
import statistics
import threading

from correctness import figures
from host import EVAL_TEXT, FIXTURE
from prompts import Sizes, in_vram, measure, our_side
from server import Server
from shapes import write_model

OVERLAP = 85.0
AFTER = 256  # tokens after a prompt from which on decoding must be as fast as without one


def overlap(machine, results):
    """Copy and compute of passes of 4,096 and 12,288 tokens at 45% of the experts: how much of the shorter one runs beside the other."""
    sizes = Sizes(machine.dry)
    vram = in_vram(machine, sizes)
    path = machine.out / "timeline.jsonl"
    path.unlink(missing_ok=True)
    side, _ = our_side(machine, sizes, vram, 0.45, f"timeline={path}", *(["stream-min-tokens=9"] if machine.dry else []))
    done, found = measure(machine, side, [sizes.long], [sizes.passes[1], sizes.long], repeats=2, limit=90)
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not done.ok() or not lines:
        results.add("overlap", "a timeline", False, done.reason() if not done.ok() else "no pass was written", "passes")
        return
    for tokens in sorted({line["tokens"] for line in lines}):
        passes = [line for line in lines if line["tokens"] == tokens]
        last = passes[-1]
        share = last["overlap_percent"]
        span = lambda name: last[f"{name}_us"] / 1000
        link = f", {last['ram_bytes'] / max(last['copy_us'], 1) / 1000:.1f} GB/s over the link while copying" if last["copy_us"] else ""
        # The last pass of a process is long past warming; a bar holds for the long ones.
        bar = not machine.dry and tokens >= 4096
        results.add("overlap", f"pass of {tokens} tokens", share is not None and share >= OVERLAP if bar else None,
                    f"{share}% of the shorter; copy {span('copy'):.1f}, compute {span('compute'):.1f}, both {span('both'):.1f}, idle {span('idle'):.1f} of "
                    f"{span('span'):.1f} ms; {last['unit']}, {last['buffers']} buffers{link}; {len(passes)} passes", f">= {OVERLAP:.0f}%" if bar else "")
    drawn = machine.run([machine.pack / "ggml-moe", "bench", "--draw-timeline", path, "--chart", machine.out / "timeline.svg"],
                        machine.environment(), 20, "overlap")
    results.add("overlap", "drawn", drawn.ok(), drawn.output.strip()[-120:] or drawn.reason(), "exit status 0")
    machine.found["overlap"] = found


def random_prompt(rng, count):
    """Tokens below the first special one of the generated model; the small one of a dry run has as many."""
    return [rng.randrange(256, 700) for _ in range(count)]


def speeds(times, begin, end):
    """Tokens per second between two tokens."""
    end = min(end, len(times) - 1)
    return (end - begin) / (times[end] - times[begin])


def after_prompt(machine, results):
    """Decoding from token 256 on after a prompt of 12,000 tokens, against decoding without one: short context, and the same long context."""
    sizes, rng = Sizes(machine.dry), random.Random(5)
    vram = in_vram(machine, sizes)
    length, tokens, begin = (200, 60, 20) if machine.dry else (12000, 640, AFTER)
    keys = [] if machine.dry else ["replay=qwen3-30b"]
    ours, _ = our_side(machine, sizes, vram, 0.45, *keys)
    found = {}
    for name, side in (("ours", ours), ("stock", machine.stock)):
        flags = ["-c", 512 if machine.dry else 16384, "-np", 1, "-b", 4096, "-ub", 4096, "-t", machine.threads, "--cache-ram", 0]
        with Server(machine, side, "after", *flags, model=machine.big_model(), patience=120, alone=True) as server:
            server.arrivals(random_prompt(rng, 16), n_predict=tokens, cache_prompt=False)  # warms up and fills the cache
            without, _ = server.arrivals(random_prompt(rng, 16), n_predict=tokens, cache_prompt=False)
            prompt = random_prompt(rng, length)
            after, last = server.arrivals(prompt, n_predict=tokens, return_tokens=True, cache_prompt=True)
            # The same depth without a pass: the slot still holds the prompt.
            again, held = server.arrivals(prompt, n_predict=tokens, cache_prompt=True)
        found[name] = {"without": without, "after": after, "again": again, "prompt_per_second": last.get("timings", {}).get("prompt_per_second"),
                       "prompt_again": held.get("timings", {}).get("prompt_n")}
    rates = {name: {what: speeds(one[what], begin, tokens) for what in ("without", "after", "again")} for name, one in found.items()}
    mine, theirs = rates["ours"], rates["stock"]
    depth = theirs["after"] / theirs["without"]
    ratio, literal = mine["after"] / mine["again"], mine["after"] / mine["without"]
    good = None if machine.dry else ratio >= 0.95
    first = speeds(found["ours"]["after"], 1, min(32, tokens - 1))
    results.add("after-prompt", f"from token {begin} after {length} tokens, same context without a pass", good,
                f"{ratio:.3f}: {mine['after']:.1f} against {mine['again']:.1f} t/s; the first 31 tokens {first:.1f}", ">= 0.95")
    results.add("after-prompt", "the same against a short context, by what stock in VRAM loses", None if machine.dry else literal / depth >= 0.95,
                f"{literal:.3f} against stock's {depth:.3f}: {mine['after']:.1f} of {mine['without']:.1f} t/s, stock {theirs['after']:.1f} of "
                f"{theirs['without']:.1f}", ">= 0.95 of it", arrivals_ms={name: [round(1000 * time, 2) for time in found["ours"][name]]
                                                                             for name in ("without", "after", "again")})


SWEEP = [*range(1, 41), *range(44, 101, 4), 94, *range(110, 601, 35), 600]


def sweep(machine, results):
    """One server within the memory of 45% and a reserve of 384 MiB: 30,000 tokens first, prompts of 1 to 600, 94, two at once, and one size ten times."""
    sizes, rng = Sizes(machine.dry), random.Random(6)
    vram = in_vram(machine, sizes)
    first, steady = (400, 200) if machine.dry else (30000, 4096)
    side, budget = our_side(machine, sizes, vram, 0.45)
    side = side.with_keys(f"cache=auto;vram-reserve-mb={8 if machine.dry else 384};vram-budget-mb={budget + (0 if machine.dry else 4096 + 384)}")
    flags = ["-c", 2048 if machine.dry else 65536, "-np", 2, "-b", 4096, "-ub", 4096, "-t", machine.threads, "--cache-ram", 0]
    lengths = SWEEP[::8] if machine.dry else SWEEP
    wrong, run = [], []
    with Server(machine, side, "sweep", *flags, model=machine.big_model(), patience=120, alone=True) as server:
        def ask(count, tokens=4):
            found = server.complete(random_prompt(rng, count), n_predict=tokens, ignore_eos=True)
            if len(found["tokens"]) != tokens:
                wrong.append(f"{count} tokens: {len(found['tokens'])} came")
            return found["timings"]["prompt_per_second"]

        ask(first)
        for count in lengths:
            ask(count)
        both = [threading.Thread(target=ask, args=(count, 16)) for count in (94, steady, 94, 600 if not machine.dry else 300)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        for _ in range(12):
            run.append(ask(steady))
        end = server.end()
    results.add("sweep", f"{first} tokens first, {len(lengths)} sizes, two at once", end.ok() and not wrong,
                f"{end.how()}; {wrong[:2] or 'all answered'}; {end.counter('streamed_blocks')} blocks streamed, {end.counter('fetched_blocks')} fetched, "
                f"{end.counter('blocks')} in all", "answers, exit status 0")
    spread = lambda speeds: (max(speeds) - min(speeds)) / statistics.median(speeds)
    words = lambda speeds: f"{100 * spread(speeds):.1f}% between the slowest and the fastest of {statistics.median(speeds):.0f} t/s"
    run = run[2:]
    # What the machine itself does to such a loop: the same prompts by stock with everything in VRAM.
    with Server(machine, machine.stock, "sweep", *flags, model=machine.big_model(), patience=120, alone=True) as server:
        theirs = [ask(steady) for _ in range(12)][2:]
    results.add("sweep", f"pp{steady}, ten times, reserve of 384 MiB", None if machine.dry else spread(run) < 0.05,
                f"{words(run)}; stock with everything in VRAM {words(theirs)}", "< 5%", runs=run, stock=theirs)


def numbers(found):
    """The perplexities of all chunks; the last entry is the final estimate with its error."""
    return [float(re.search(r"[\d.]+", line.split("]")[-1])[0]) for line in found[:-1]]


def text_run(machine, side, model, tag, passes, chunks, *more, limit=90):
    arguments = machine.tool("llama-perplexity", side, model, "-f", EVAL_TEXT, "-c", 512, "-b", passes, "-ub", passes, "--chunks", chunks, *more)
    return machine.run(arguments, machine.environment(side), limit, tag)


def quality(machine, results):
    """Perplexity with passes of 512, 2,048 and 8,192 tokens: equal to stock's with stream-min-tokens=9, within 0.2% with defaults."""
    for passes in (512, 2048) if machine.dry else (512, 2048, 8192):
        chunks = 4 if machine.dry else 32
        stock = text_run(machine, machine.stock, FIXTURE, "prompt-quality", passes, chunks)
        wanted = figures(stock)
        if wanted is None:
            results.add("prompt-quality", f"stock, -ub {passes}", False, stock.reason(), "runs")
            continue
        for name, keys, exact in (("stream-min-tokens=9", "cache=6;stream-min-tokens=9", True), ("defaults", "cache=6", False),
                                  ("slices of 128", "cache=6;stream-min-tokens=9;slice-tokens=128", False)):
            done = text_run(machine, machine.ours.with_keys(keys), FIXTURE, "prompt-quality", passes, chunks)
            found = figures(done)
            if found is None:
                results.add("prompt-quality", f"-ub {passes}, {name}", False, done.reason(), "runs")
                continue
            off = max(abs(mine / theirs - 1) for mine, theirs in zip(numbers(found), numbers(wanted)))
            # Slices round as micro-batches of their length do: chunks differ by less than stock's own between its micro-batches (1.7%, measured),
            # and all together by what counts.
            whole = abs(float(re.search(r"[\d.]+", found[-1])[0]) / float(re.search(r"[\d.]+", wanted[-1])[0]) - 1)
            near = whole <= 0.002 and off <= 0.017 if "slice" in keys else off <= 0.002
            blocks = done.counter("sliced_blocks" if "slice" in keys else "streamed_blocks") or 0
            results.add("prompt-quality", f"-ub {passes}, {name}", (found == wanted if exact else near) and (blocks > 0 or name == "defaults"),
                        f"{found[-1]} against {wanted[-1]}; a chunk off by {100 * off:.4f}% at most, all by {100 * whole:.4f}; {blocks} blocks {'in slices' if 'slice' in keys else 'streamed'}, {done.counter('fetched_blocks')} fetched",
                        "equal to four decimals" if exact else "<= 0.2%", summary=done.summaries())


SMALL_GLM = "--embd 256 --ff 256 --heads 4 --hd 32 --rope 32 --q-rank 64 --kv-rank 64 --dense-ff 256 --vocab 1024"


def glm_layer(machine, results):
    """Two layers of 288 experts of 8.3 MB under a budget of 8 GiB: text in passes of 512 and 4,096 tokens, and greedy tokens, as stock's."""
    model, seconds = write_model(machine, "glm53-layer", SMALL_GLM)
    budget = 96 if machine.dry else 8192
    side = machine.ours.with_keys(f"cache=auto;vram-budget-mb={budget};vram-reserve-mb=0;stream-min-tokens=9")
    try:
        results.add("glm-layer", "written", None, f"{model.stat().st_size >> 20} MiB in {seconds:.0f} s")
        for passes, chunks in ((512, 4),) if machine.dry else ((512, 4), (4096, 8)):
            runs = {name: text_run(machine, one, model, "glm-layer", passes, chunks, *more)
                    for name, one, more in (("stock", machine.stock, ["-ncmoe", 3]), ("other", machine.stock, []), ("ours", side, []))}
            found = {name: figures(run) for name, run in runs.items()}
            if None in found.values():
                bad = next(name for name, one in found.items() if one is None)
                results.add("glm-layer", f"-ub {passes}, {bad}", False, runs[bad].reason(), "runs")
                continue
            wanted = numbers(found["stock"])
            off, spread = (max(abs(a / b - 1) for a, b in zip(numbers(found[name]), wanted)) for name in ("ours", "other"))
            done = runs["ours"]
            sums = [sum(map(int, re.findall(r"(\d+) MiB", line.split(": ", 1)[1]))) for line in done.plugin_lines() if "memory of" in line]
            results.add("glm-layer", f"text, -ub {passes}", off <= max(2e-4, 2 * spread) and max(sums, default=0) <= budget and (done.counter("blocks") or 0) > 0,
                        f"{found['ours'][-1]} against {found['stock'][-1]}: off by {100 * off:.4f}%, stock between card and RAM by {100 * spread:.4f}%; "
                        f"memory {sums} MiB; {done.counter('streamed_blocks')} blocks streamed, {done.counter('fetched_blocks')} fetched, "
                        f"{done.counter('blocks')} in all", f"0.02% or twice stock's, <= {budget} MiB",
                        lines=[line.split("ggml-moe: ", 1)[1] for line in done.plugin_lines()][:12])
    finally:
        model.unlink(missing_ok=True)
