"""Steps for the plugin as users start it: preloaded, without flags, on a card that another program has left little of; and models in their file.

Stock without flags fits the model to the card by itself; its best placement is what the planner finds for it, with its experts in pinned memory.
"""
import json
import random
import select
import shlex
import statistics
import subprocess
import sys

from correctness import figures
from host import EVAL_TEXT, FIXTURE, ROOT, Missing
from passes import random_prompt
from server import Server

CARD_MIB = 10240  # what the other program leaves of the card
WITHIN = 0.2  # how far a prediction may be off
PLUGIN = ["libggml-moe.so"]


class SmallCard:
    """A card of which another program holds all but CARD_MIB; in a dry run nothing is held."""

    def __init__(self, machine):
        self.machine, self.holder = machine, None

    def __enter__(self):
        if self.machine.dry:
            return "no card"
        self.holder = self.machine.start([sys.executable, self.machine.gpu_tests / "hold_vram.py", CARD_MIB], self.machine.environment(),
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        ready, _, _ = select.select([self.holder.stdout], [], [], 60)
        line = self.holder.stdout.readline().decode().strip() if ready else ""
        if not line:
            self.machine.stop(self.holder)
            raise Missing("the card's memory was not taken, see hold_vram.py")
        return line

    def __exit__(self, kind, value, trace):
        if self.holder is not None:
            self.machine.stop(self.holder)


def keys_of(machine, budget=22):
    """Keys that a run here needs beside what a user gives: on a card its routing and its log; in a dry run a budget that the model does not fit."""
    return f"inner=CPU;vram-budget-mb={budget};vram-reserve-mb=1;log=debug" if machine.dry else "log=debug;replay=qwen3-30b"


def plan(machine, model, context, prompt, answer, flags):
    """What `ggml-moe plan` says of a server with these flags: the plan, and stock's arguments."""
    command = [machine.pack / "ggml-moe", "plan", "-m", model, "-c", context, "--host-dir", machine.stock_folder, "--prompt", prompt, "--answer", answer]
    keys = [word for pair in keys_of(machine).split(";") for word in ("--moe", pair)]
    environment = {**machine.environment(), "LLAMA_CACHE": str(machine.work)}
    done = machine.run([*command, "--measure", "--json", *keys, "--", *flags], environment, 60, "using")
    if not done.ok():
        raise Missing(f"no plan: {done.reason()}")
    told = json.loads(done.output)
    stock = machine.run([*command, "--args", "stock", *keys, "--", *flags], environment, 60, "using")
    return told, shlex.split(stock.output) if stock.ok() else None


def serve(machine, name, model, sizes, flags, settings=None):
    """Speeds of a server: prompts and decoding, apart, each twice after one of each to warm up; and what it left."""
    context, prompt, answer = sizes
    rng = random.Random(7)
    variables = {"GGML_MOE": f"{settings};state-file=off"} if settings else {}
    variables["LLAMA_CACHE"] = str(machine.work)  # where the plan keeps what it measured
    arguments = ["-c", context, "-np", 1, "--cache-ram", 0, *flags]
    prompts, decodes, tokens = [], [], []
    with Server(machine, None, f"using-{name}", *arguments, model=model, patience=150, alone=True,
                preload=PLUGIN if settings else [], variables=variables) as server:
        # What comes first only is not measured: pages of the host's inputs, clocks, the cache.
        for length in (prompt, 16):
            server.complete(random_prompt(rng, length), n_predict=answer if length == 16 else 8, ignore_eos=True)
        for _ in range(2):
            found = server.complete(random_prompt(rng, prompt), n_predict=8, ignore_eos=True)
            prompts.append(found["timings"]["prompt_per_second"])
            found = server.complete(random_prompt(rng, 16), n_predict=answer, ignore_eos=True)
            decodes.append(found["timings"]["predicted_per_second"])
            tokens.append(len(found["tokens"]))
        end = server.end()
    if set(tokens) != {answer}:
        raise RuntimeError(f"{name}: {tokens} tokens came, not {answer}")
    return {"prompt": statistics.median(prompts), "decode": statistics.median(decodes), "prompts": prompts, "decodes": decodes}, end


def preload(machine, results):
    """Preloaded without flags on a card with 10 GiB free, against llama.cpp without flags and its best placement; what the plan had said of both."""
    model = machine.big_model()
    sizes = (1024, 300, 48) if machine.dry else (16384, 12000, 320)
    with SmallCard(machine) as free:
        told, arguments = plan(machine, model, sizes[0], sizes[1], sizes[2], ["-np", 1])
        results.add("preload", f"plan, {free}", None if machine.dry else told["mode"] == "cache", f"{told['mode']}, -ub {told['batch']}, expected hits "
                    f"{told['expected_hits']}", "cache", plan=told)
        ours, end = serve(machine, "ours", model, sizes, [], keys_of(machine))
        lines = [line.split("ggml-moe: ", 1)[1] for line in end.plugin_lines()]
        results.add("preload", "the preloaded server", end.ok() and (end.counter("hits") or 0) > 0, f"{end.how()}; {end.counter('hits')} hits, "
                    f"{end.counter('misses')} misses, {end.counter('streamed_blocks')} blocks streamed", "hits, exit status 0", lines=lines[:40])
        others = {}
        for name, flags in (("without flags", []), ("best placement", arguments)):
            if flags is None:
                results.add("preload", f"stock, {name}", None, "the planner finds none")
                continue
            # The planner's arguments name the context, too.
            flags = without(flags, "-c") if flags else flags
            try:
                others[name], _ = serve(machine, f"stock-{name.split()[0]}", model, sizes, flags if not machine.dry else [*flags, "-ngl", 0])
            except RuntimeError as error:
                results.add("preload", f"stock, {name}", None, str(error)[:200])
        for what in ("prompt", "decode"):
            for name, theirs in others.items():
                results.add("preload", f"{what}, stock {name}", None if machine.dry else ours[what] >= theirs[what],
                            f"{ours[what] / theirs[what]:.2f} of {theirs[what]:.1f} t/s ({span(ours[f'{what}s'])} against {span(theirs[f'{what}s'])})", ">= 1",
                            ours=ours, stock=theirs, flags=arguments if name == "best placement" else [])
            off_by(machine, results, f"{what}, ours", told[what], ours[what])
            if "best placement" in others and told["stock"]:
                off_by(machine, results, f"{what}, stock's best", told["stock"][what], others["best placement"][what])
        equal_passes(machine, results, model)


def span(samples):
    return f"{min(samples):.1f}..{max(samples):.1f}"


def without(flags, name):
    """Arguments without one flag and its value."""
    kept, skip = [], False
    for flag in flags:
        if skip or flag == name:
            skip = flag == name
        else:
            kept.append(flag)
    return kept


def off_by(machine, results, what, predicted, measured):
    if not predicted:
        results.add("preload", f"predicted: {what}", None, "nothing was predicted")
        return
    rate = predicted["tokens_per_second"]
    results.add("preload", f"predicted: {what}", None if machine.dry else abs(rate / measured - 1) <= WITHIN,
                f"{100 * (rate / measured - 1):+.0f}%: {rate:.1f} for {measured:.1f} t/s, bound by {predicted['bound']}", f"within {100 * WITHIN:.0f}%",
                predicted=predicted, measured=measured)


def equal_passes(machine, results, model):
    """A prompt that leaves a short rest, in passes of equal length and as the host cuts it."""
    prompt, passes = (320, 192) if machine.dry else (5000, 4096)
    rates = {}
    for choice in ("on", "off", "on", "off"):
        path = machine.out / f"equal-{choice}.jsonl"
        path.unlink(missing_ok=True)
        keys = f"{keys_of(machine, budget=15)};equal-passes={choice};timeline={path};stream-min-tokens=9;state-file=off"
        environment = {**machine.environment(preload=PLUGIN, alone=True), "GGML_MOE": keys}
        command = [machine.stock_folder / "llama-bench", "-m", model, "-t", machine.threads, "-p", prompt, "-n", 0, "-b", 2 * passes, "-ub", passes, "-r", 3, "-o",
                   "jsonl"]
        done = machine.run(command, environment, 90, "using")
        row = next((json.loads(line) for line in done.output.splitlines() if line.startswith("{")), None)
        lengths = [json.loads(line)["tokens"] for line in path.read_text().splitlines()] if path.exists() else []
        if row is None or not lengths:
            results.add("preload", f"equal-passes={choice}", False, done.reason() if row is None else "no pass was written", "runs")
            return
        rates.setdefault(choice, []).append((statistics.median(row["samples_ts"][1:]), sorted(set(lengths[-4:]))))
    on, off = (statistics.median(rate for rate, _ in rates[choice]) for choice in ("on", "off"))
    lengths = {choice: rates[choice][0][1] for choice in rates}
    # The last four: the first batch of a context shows that it is helped. Lengths are rounded to tiles of 32 tokens.
    equal = {choice: max(found) - min(found) < 64 for choice, found in lengths.items()}
    good = equal["on"] and not equal["off"] and (machine.dry or on >= off)
    results.add("preload", f"pp{prompt} at -ub {passes} in equal passes", good,
                f"{on / off:.2f} of {off:.0f} t/s; passes of {lengths['on']} and {lengths['off']}", "as long as each other, >= 1", rates=rates)


def fits(machine, results):
    """Preloaded, a model that fits the card, and flags of the user's own: stock's figures to the last, and a line that says why."""
    text = ["-f", EVAL_TEXT, "-c", 512, "-b", 512, "--chunks", 8, "-t", min(machine.threads, 4)]
    keys = "inner=CPU;log=info;state-file=off" if machine.dry else "log=info;state-file=off"
    for name, flags, word in (("a model that fits", [], "fits"), ("-ncmoe 3", ["-ncmoe", 3], "-ncmoe"), ("-ngl 3", ["-ngl", 3], "-ngl")):
        command = [machine.stock_folder / "llama-perplexity", "-m", FIXTURE, "-nr", *text, *flags]
        wanted = figures(machine.run(command, machine.environment(), 60, "fits"))
        done = machine.run(command, {**machine.environment(preload=PLUGIN), "GGML_MOE": keys}, 60, "fits")
        found, told = figures(done), [line.split("ggml-moe: ", 1)[1] for line in done.plugin_lines()]
        results.add("fits", f"preloaded, {name}", wanted is not None and found == wanted and any(word in line for line in told),
                    f"{(found or [done.reason()])[-1]}; {told[-1] if told else 'no line'}", "stock's figures, and a reason", lines=told[:12])


def in_file(machine, results):
    """A model of 16 GiB under a memory limit of 8 GiB, mapped: seconds, bytes read and major faults against stock's mapping, dropped page cache."""
    small = "--layers 2 --embd 512 --ff 256 --experts 16 --used 4 --heads 8 --kv 2 --hd 64 --vocab 2048 --ctx 4096".split() if machine.dry else []
    limit, model = (24 if machine.dry else 8192), machine.work / "in-file.gguf"
    done = machine.run([sys.executable, machine.gpu_tests / "synth_moe.py", model, *small], machine.environment(), 240, "in-file")
    if not done.ok():
        raise Missing(f"the model was not written to a disk: {done.reason()}")
    try:
        # Stock reads a GiB through page faults for each token: 8 s, measured.
        tests = ["-p", 64, "-n", 8] if machine.dry else ["-p", 256, "-n", 4]
        layers = 2 if machine.dry else 48
        ours = machine.ours.with_keys(f"cache={4 if machine.dry else 4096};experts-from=file")
        found = {"stock": [], "ours": []}
        for turn in range(2):
            for name, side, more in (("stock", machine.stock, ["-ncmoe", layers]), ("ours", ours, [])):
                report = machine.work / f"in-file-{name}.json"
                command = [sys.executable, ROOT / "tests/support/watch.py", report, "--drop", model, "--limit", limit, "--",
                           machine.stock_folder / "llama-bench", "-m", model, "-t", machine.threads, "-ngl", 99, "-dev", side.device, "-lm", "mmap", "-o", "jsonl",
                           "-r", 1, "--no-warmup", "-v", *tests, *more]
                run = machine.run(command, machine.environment(side, alone=True), 150, "in-file")
                if run.status == 77:
                    raise Missing("no control group with a memory limit can be made here")
                if not run.ok():
                    results.add("in-file", name, False, run.reason(), "runs")
                    return
                rates = [json.loads(line)["avg_ts"] for line in run.output.splitlines() if line.startswith("{")]
                found[name].append({**json.loads(report.read_text()), "rates": rates, "blocks": run.counter("blocks")})
        least = {name: min(one["seconds"] for one in all_of) for name, all_of in found.items()}
        read = {name: min(one["read_bytes"] for one in all_of) >> 20 for name, all_of in found.items()}
        ran = all(one["blocks"] for one in found["ours"])
        results.add("in-file", f"16 GiB under {limit} MiB", ran and (None if machine.dry else least["ours"] <= 1.05 * least["stock"]),
                    f"{least['ours']:.1f} s against {least['stock']:.1f}; read {read['ours']} MiB against {read['stock']}; "
                    f"t/s {found['ours'][-1]['rates']} against {found['stock'][-1]['rates']}", "not slower", runs=found)
    finally:
        model.unlink(missing_ok=True)
