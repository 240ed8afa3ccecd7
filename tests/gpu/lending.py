"""Steps for memory that compute buffers take for long passes and give back: results, and the cache's size after each prompt."""
import re

import correctness
from host import EVAL_TEXT, FIXTURE
from server import Server

ROUNDS = 6


def told(text, pattern):
    """What a pattern finds in the plugin's lines, in order."""
    lines = (line for line in text.splitlines() if "ggml-moe: " in line)
    return [tuple(map(int, found.groups())) for found in (re.search(pattern, line) for line in lines) if found]


def equal(machine, results):
    """tiny-docs-moe with a cache: perplexity with memory on demand, with all of it there, and without lending."""
    for ubatch in (512, 2048):
        runs = {}
        for keys in ("lend=off", "lend=on", "lend=on;debug-map-all=on"):
            side = machine.ours.with_keys(f"cache=6;fixed=1;{keys}")
            runs[keys] = correctness.perplexity_run(machine, side, ubatch, 4, tag="lending")
        reference = correctness.figures(runs["lend=off"])
        if reference is None:
            results.add("lending", f"without lending, ub {ubatch}", False, runs["lend=off"].reason(), "runs")
            continue
        for keys in ("lend=on", "lend=on;debug-map-all=on"):
            done = runs[keys]
            ours, came = correctness.figures(done), done.counter("lent_bytes") or 0
            results.add("lending", f"{keys}, ub {ubatch}", ours == reference and came > 0,
                        f"{ours[-1] if ours else done.reason()}, {came >> 10} KiB came", "as without lending", seconds=done.seconds)


def server(machine, results):
    """Long prompts in turns with decoding: nothing fails, and every prompt leaves the cache the size that it had before."""
    if machine.dry:
        model, ubatch, characters, context, keys = FIXTURE, 512, 3000, 3072, "cache=auto;vram-budget-mb=29;vram-reserve-mb=1"
    else:
        model, ubatch, characters, context, keys = machine.big_model(), 12288, 30000, 32768, "cache=auto"
    text = EVAL_TEXT.read_text()
    prompt = (text * (characters // len(text) + 1))[:characters]
    more = ["-c", context, "-np", 1, "-b", ubatch, "-ub", ubatch]
    with Server(machine, machine.ours.with_keys(keys), "lending", *more, model=model, patience=120) as running:
        ask = lambda prompt, count: running.post("/completion", {
            "prompt": prompt, "n_predict": count, "temperature": 0, "seed": 1, "cache_prompt": False, "ignore_eos": True,
            "return_tokens": True})
        ask("A list is", 100)
        answers = [ask(prompt, 96) for _ in range(ROUNDS)]
        end = running.end()
    tokens = [answer["tokens"] for answer in answers]
    came = told(end.log, r"(\d+) KiB of compute memory came \((\d+) of (\d+) KiB\)")
    went = told(end.log, r"(\d+) KiB of compute memory went back \((\d+) of (\d+) KiB\)")
    again = told(end.log, r"the cache has (\d+) of (\d+) KiB again")
    speeds = [f"{answer['timings']['prompt_per_second']:.0f}/{answer['timings']['predicted_per_second']:.1f}" for answer in answers]
    results.add("lending", f"{ROUNDS} prompts of {answers[0]['timings']['prompt_n']} tokens, ub {ubatch}", end.ok() and len(tokens) == ROUNDS,
                f"tokens/s prompt/decode {' '.join(speeds)}; {sum(t == tokens[-1] for t in tokens)} equal answers", "answers", summary=end.summaries())
    results.add("lending", "memory that stays while decoding", bool(went) and len(went) >= ROUNDS - 1,
                f"{went[-1][1] >> 10} of {went[-1][2] >> 10} MiB; came {max(c[0] for c in came) >> 10} MiB" if went and came else "nothing went back",
                "goes back each time")
    steady = again[1:]
    shrinks = len(told(end.log, r"the cache shrinks from (\d+) .*are needed for"))
    results.add("lending", "the cache after each prompt", shrinks == 0 or len(steady) >= ROUNDS - 2 and len(set(steady)) == 1,
                f"{[f'{have >> 10} of {want >> 10} MiB' for have, want in again]}, {shrinks} times smaller", "the same")
