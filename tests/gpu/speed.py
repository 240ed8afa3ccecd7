"""Steps that measure, alone on the machine: the 30B-A3B shape against stock, experts on the card and in RAM."""
import json
import re
import statistics

from host import Missing

REPEATS = 3  # of the alternating pair
INNER_REPEATS = 5  # of each test within one process


def bench(machine, side, *more, limit=90, cores=None, model=None):
    """One llama-bench process. Returns tokens per second by test ("pp2048", "tg128"), one figure per repetition. `cores`: so many only."""
    alone = ["taskset", "-c", f"0-{cores - 1}"] if cores else []
    arguments = [*alone, machine.stock_folder / "llama-bench", "-m", model or machine.big_model(), "-t", cores or machine.threads, "-ngl", 99,
                 "-dev", side.device, "-o", "jsonl", *more]
    done = machine.run(arguments, machine.environment(side, alone=True), limit, "speed")
    tests = {}
    for line in done.output.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            name = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
            tests[name] = row["samples_ts"]
    return done, tests


def spread(values):
    return f"{min(values):.3f}..{max(values):.3f}"


def against_stock(machine, results):
    """Experts on the card for both: stock and plugin in turns, the median of the pairs' ratios."""
    tests = {"pp2048": 0.99, "pp512": 0.99, "tg128": 0.97}
    if machine.dry:
        tests = {"pp64": 0.0, "tg16": 0.0}
    prompts = ",".join(name[2:] for name in tests if name.startswith("pp"))
    tokens = next(name[2:] for name in tests if name.startswith("tg"))
    arguments = ["-p", prompts, "-n", tokens, "-ub", 2048, "-r", INNER_REPEATS]
    rates = {"stock": {}, "plugin": {}}
    for _ in range(REPEATS):
        for name, side in (("stock", machine.stock), ("plugin", machine.quiet_on_device)):
            done, found = bench(machine, side, *arguments)
            if not done.ok() or set(found) != set(tests):
                results.add("speed", f"{name}, experts on the card", False, done.reason(), "runs")
                return
            for test, samples in found.items():
                # The first repetition still warms caches and clocks.
                rates[name].setdefault(test, []).append(statistics.median(samples[1:]))
    for test, bar in tests.items():
        stock, ours = rates["stock"][test], rates["plugin"][test]
        ratios = [b / a for a, b in zip(stock, ours)]
        ratio = statistics.median(ratios)
        results.add("speed", f"{test}, experts on the card", ratio >= bar,
                    f"{ratio:.3f} of stock ({spread(ratios)}); {statistics.median(ours):.1f} against {statistics.median(stock):.1f} t/s",
                    f">= {bar:.2f}", ratio=ratio, ratios=ratios, stock=stock, plugin=ours)


def experts_in_ram(machine, results):
    """Experts in RAM, read by zero copy once registered. Prompts come first: registering ends meanwhile."""
    tests = ["-p", "64", "-n", "16"] if machine.dry else ["-p", "2048,512", "-n", "64"]
    # Verbose, because llama-bench hides the plugin's lines otherwise; it prints nothing for each token.
    done, found = bench(machine, machine.ours, *tests, "-ub", 2048, "-r", 4, "-v", limit=120)
    if not done.ok():
        results.add("ram", "experts in RAM", False, done.reason(), "runs")
        return
    pinned = re.findall(r"ggml-moe: (\S+: .*experts pinned.*|.*experts are copied when used.*)", done.log)
    replayed, captured, parts = (done.counter(name) for name in ("graphs_replayed", "graphs_captured", "segments"))
    results.add("ram", "registered memory", None, pinned[-1] if pinned else "no line about pinning", lines=pinned)
    results.add("ram", "graphs over the whole run", None, f"{parts} parts, {captured} captured, {replayed} replayed", summary=done.summaries())
    for test, samples in found.items():
        steady = statistics.median(samples[1:])
        passed = steady >= 30 if test.startswith("tg") and not machine.dry else None
        results.add("ram", f"{test}, experts in RAM, plain path", passed,
                    f"{steady:.1f} t/s (repetitions {', '.join(f'{sample:.1f}' for sample in samples)})",
                    "" if passed is None else ">= 30 t/s", samples=samples)


def stock_cpu_experts(machine, results):
    """For reference: stock with every expert on the CPU."""
    tests = ["-p", "64", "-n", "16"] if machine.dry else ["-p", "2048", "-n", "64"]
    done, found = bench(machine, machine.stock, *tests, "-ub", 2048, "-r", 3, "-ncmoe", 48, limit=90)
    if not done.ok():
        raise Missing(done.reason())
    for test, samples in found.items():
        results.add("ncmoe", f"{test}, stock -ncmoe 48", None, f"{statistics.median(samples):.1f} t/s", samples=samples)
