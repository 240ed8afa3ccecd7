"""Steps that compare what the plugin computes with what stock computes on the same card."""
import json
import os
import re
import sys

from host import EVAL_TEXT, FIXTURE, Missing


MEMCHECK = ["--tool", "memcheck", "--leak-check", "no", "--error-exitcode", "99", "--print-limit", "20"]


def driver(machine, results):
    """The driver suite of the library's unit tests, on the real card."""
    tests = machine.pack / "driver-tests"
    if machine.dry:
        raise Missing("needs a GPU")
    done = machine.run([tests, "cuda::", "--ignored", "--test-threads=1"], machine.environment(), 60, "driver")
    counts = re.search(r"test result: \w+\. (\d+) passed; (\d+) failed", done.log)
    passed, failed = map(int, counts.groups()) if counts else (0, 0)
    names = re.findall(r"^test (\S+) \.\.\. FAILED", done.log, re.M)
    if done.ok() and passed == 0:
        raise Missing("the pack holds no test of the driver suite for CUDA")
    figure = f"{passed} passed, {failed} failed {' '.join(names)}".strip() if counts else done.reason()
    results.add("driver", "driver suite on the card", done.ok() and failed == 0, figure, "all pass", seconds=done.seconds)


def kernels(machine, results):
    """The committed PTX on the card, every byte against numpy: as it is, and under compute-sanitizer."""
    if machine.dry:
        raise Missing("needs a GPU")
    env = machine.environment()
    del env["LD_PRELOAD"]
    for name, before in (("as it is", []), ("under memcheck", [machine.find_tool("compute-sanitizer"), *MEMCHECK])):
        done = machine.run([*before, sys.executable, machine.gpu_tests / "check_kernels.py"], env, 60, "kernels")
        counts = re.search(r"kernels: (\d+) cases, (\d+) wrong", done.log)
        results.add("kernels", name, done.ok() and counts is not None,
                    f"{counts[1]} cases, {counts[2]} wrong, {done.how()}" if counts else done.reason(), "none wrong")


def figures(done):
    """What llama-perplexity printed: a figure for each chunk, then the final one with its error."""
    chunks = re.search(r"^\[1\].*$", done.log, re.M)
    last = re.search(r"Final estimate: (.*)$", done.log, re.M)
    return [*chunks[0].rstrip(",").split(","), last[1]] if done.ok() and chunks and last else None


def perplexity_run(machine, side, ubatch, chunks, tag="perplexity", limit=60, before=()):
    arguments = machine.tool("llama-perplexity", side, FIXTURE, "-f", EVAL_TEXT, "-c", 512, "--chunks", chunks, "-ub", ubatch)
    env = machine.environment(side)
    if before:
        del env["LD_PRELOAD"]  # the tool around the program preloads libraries of its own
    return machine.run([*before, *arguments], env, limit, tag)


def compare_figures(results, step, check, done, stock, **values):
    ours = figures(done)
    equal = ours is not None and ours == stock
    figure = ours[-1] if ours else done.reason()
    if ours and not equal:
        differing = sum(a != b for a, b in zip(ours, stock))
        figure = f"{ours[-1]} against {stock[-1]}, {differing} of {len(stock)} figures differ"
    results.add(step, check, equal, figure, "equal to stock, four decimals", **values)


def perplexity(machine, results):
    """tiny-docs-moe, plain path and experts on the device, against stock on the inner device, every chunk's figure."""
    for ubatch in (512, 64):
        chunks = 4 if machine.dry else 16
        reference = perplexity_run(machine, machine.stock, ubatch, chunks)
        stock = figures(reference)
        if stock is None:
            results.add("perplexity", f"stock, ub {ubatch}", False, reference.reason(), "runs")
            continue
        for name, side in (("plain path", machine.ours), ("experts on the device", machine.ours_on_device)):
            done = perplexity_run(machine, side, ubatch, chunks)
            compare_figures(results, "perplexity", f"{name}, ub {ubatch}", done, stock, seconds=done.seconds,
                            reference=stock[-1], summary=done.summaries())
            if name == "plain path" and done.ok():
                ran = done.counter("blocks") or 0
                left = done.counter("unrecognised")
                refused = [line for line in done.plugin_lines() if "settings: " in line]
                if refused:
                    results.add("perplexity", "keys", False, refused[0].split("ggml-moe: ", 1)[1], "every key is known")
                results.add("perplexity", f"MoE blocks, ub {ubatch}", ran > 0 and left == 0,
                            f"{ran} run, {left} products in no block", "some run, none left")


# Operation, parameters (a regular expression of test-backend-ops), and the fewest cases that must have run on MoE0.
OPERATIONS = [
    ("MUL_MAT_ID", r"n_mats=(4|8),n_used=(2|4),b=[01],m=(64|512),n=(1|4|16|17|32),", 60),
    ("MUL_MAT", r"m=16,n=(1|4|9|16),k=(256|1024),bs=\[(1,1|2,3|3,2)\]", 300),
    ("ADD_ID", ".", 30),
    ("GET_ROWS", r"m=(5|8),", 200),  # without the two cases of 80,000 rows
    ("SET_ROWS", ".", 150),
    ("CPY", ".", 240),
    ("FLASH_ATTN_EXT", r"hsk=(64|128|576),.*kv=(113|512),nb=(1|32),.*max_bias=0.0.*type_K=(f16|q8_0),", 100),
]


def operations_run(machine, side, device, name, parameters):
    jobs = 2 if machine.dry else 8
    arguments = [machine.stock_folder / "test-backend-ops", "test", "-b", device, "-o", name, "-p", parameters, "-j", jobs]
    return machine.run(arguments, machine.environment(side), 150 if machine.dry else 40, f"ops-{name}")


def operations(machine, results):
    """Stock test-backend-ops on our device: each case against ggml's reference code on the CPU."""
    for name, parameters, at_least in OPERATIONS:
        done = operations_run(machine, machine.ours, "MoE0", name, parameters)
        counts = re.findall(r"(\d+)/(\d+) tests passed", done.output)
        passed, total = map(int, counts[0]) if counts else (0, 0)
        good = done.ok() and passed == total >= at_least
        figure = f"{passed} of {total} cases, {done.seconds:.0f} s" if counts else done.reason()
        if not good and counts and not machine.dry:
            # A case that stock fails too on this card is not ours; the log names the cases of both.
            stock = re.findall(r"(\d+)/(\d+) tests passed", operations_run(machine, None, machine.inner, name, parameters).output)
            figure += f"; stock on {machine.inner}: {' of '.join(stock[0]) if stock else 'did not finish'}"
        results.add("ops", name, good, figure, f"all of at least {at_least}", seconds=done.seconds)


def sanitizer(machine, results):
    """compute-sanitizer memcheck over one chunk, both places of the experts; GPU_SANITIZE=sliced runs the rows with that word only."""
    tool = machine.find_tool("compute-sanitizer")
    before, wanted = [tool, *MEMCHECK], os.environ.get("GPU_SANITIZE", "")
    for name, side, tokens in (("plain path", machine.ours, 64), ("experts on the device", machine.ours_on_device, 64),
                               ("cache, single tokens", machine.ours.with_keys("cache=6"), 1),
                               ("cache, streamed passes", machine.ours.with_keys("cache=6;stream-min-tokens=9"), 64),
                               ("cache, sliced passes", machine.ours.with_keys("cache=6;stream-min-tokens=9;slice-tokens=32"), 64),
                               ("cache, fetched passes", machine.ours.with_keys("cache=6;stream-min-tokens=1000;middle-passes=fetch"), 16)):
        if wanted not in name:
            continue
        done = perplexity_run(machine, side, tokens, 1, tag="sanitizer", limit=110, before=before)
        if "Device not supported" in done.log:
            raise Missing("compute-sanitizer does not support this device here")
        count = re.search(r"ERROR SUMMARY: (\d+) error", done.log)
        clean = done.ok() and count is not None and int(count[1]) == 0
        figure = f"{count[1]} errors, {done.seconds:.0f} s" if count else done.reason()
        # The summary may be lost here, because nothing waits for the log.
        passes = {word: done.counter(f"{word}_blocks") for word in ("streamed", "sliced", "fetched")}
        figure += "".join(f", {blocks} blocks {word}" for word, blocks in passes.items() if blocks)
        if done.summaries() and any(word in name and not blocks for word, blocks in passes.items()):
            clean, figure = False, f"{figure}; no such block ran"
        if count and not clean:
            stock = perplexity_run(machine, machine.stock, 64, 1, tag="sanitizer-stock", limit=60, before=before)
            stock_count = re.search(r"ERROR SUMMARY: (\d+) error", stock.log)
            first = re.search(r"={9} (.*(?:Invalid|error|Error).*)", done.log)
            figure += f"; stock: {stock_count[1] if stock_count else stock.reason()}; first: {first[1] if first else '-'}"
        results.add("sanitizer", name, clean, figure, "0 errors", seconds=done.seconds)


def graph_counts(machine, side, tokens):
    """Real launches and captures of CUDA graphs (from the preloaded counter) and the plugin's own, for one decode run."""
    arguments = [machine.stock_folder / "llama-bench", "-m", FIXTURE, "-t", 4, "-ngl", 99, "-dev", side.device,
                 "-p", 0, "-n", tokens, "-r", 1, "-v"]
    done = machine.run(arguments, machine.environment(side, preload=["count_graphs.so"]), 60, "graphs")
    line = re.search(r"count-graphs: (\{.*\})", done.log)
    if not done.ok() or line is None:
        raise RuntimeError(f"{side.name}, {tokens} tokens: {done.reason()}")
    counts = json.loads(line[1])
    counts.update({name: done.counter(name) for name in ("graphs_captured", "graphs_replayed", "graphs_reset", "segments")})
    return counts


def graphs(machine, results):
    """CUDA graphs in steady decode: the difference of a long and a short run, so that loading and warm-up cancel."""
    short, long = 32, 288
    sides = [("stock", machine.stock), ("plain path", machine.ours), ("experts on the device", machine.ours_on_device)]
    if machine.dry:
        graph_counts(machine, machine.ours, short)
        raise Missing("needs a GPU")
    for name, side in sides:
        first, second = graph_counts(machine, side, short), graph_counts(machine, side, long)
        steady = {key: second[key] - first[key] for key in second if second[key] is not None and first[key] is not None}
        replays = steady["launches"] - steady["captures"]
        parts = steady.get("segments", long - short)  # stock: one graph a token
        share = replays / parts if parts else 0.0
        what = "graphs" if name == "stock" else "segments"
        results.add("graphs", f"replay share, {name}", None if name == "stock" else share > 0.95,
                    f"{100 * share:.1f}% ({replays} of {parts} {what}, {steady['captures']} captures)", "" if name == "stock" else "> 95%",
                    short=first, long=second, steady=steady)
        if name == "stock":
            continue
        told = steady.get("graphs_replayed")
        if told is None:
            results.skip("graphs", f"telemetry, {name}", "the summary has no graphs_replayed")
            continue
        # The plugin foresees what the inner backend will do; it may be off while a graph warms up, not in between.
        close = abs(told - replays) <= 0.02 * max(replays, 1) and replays > 0
        results.add("graphs", f"telemetry against real counts, {name}", close,
                    f"told {told} replayed, {steady.get('graphs_captured')} captured; real {replays}, {steady['captures']}", "within 2%")
