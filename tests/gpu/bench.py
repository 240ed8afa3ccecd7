"""The command `ggml-moe bench` on the 30B-A3B shape: what docs/measurements.md quotes. Runs only when it is named (bench.sh)."""
import json
import os

BARS = {20: 2.0, 45: 2.3, 70: 1.8, 100: 0.85}  # of decoding, by share of the experts in percent
# More or other flags: GPU_BENCH="-p 512,2048 -ub 2048 --search" bash tests/gpu/bench.sh
FLAGS = "--share 20,45,70,100 -p 0 -n 128 --repeats 3 --replay qwen3-30b"
DRY_FLAGS = "--share 50 -p 16 -n 8 --repeats 1 --samples 2 --skip 1"


def command(machine, results):
    """ggml-moe bench: stock and plugin in turns at the same device memory, for four shares of the experts."""
    report = machine.out / "bench.json"
    report.unlink(missing_ok=True)
    model = machine.big_model()
    flags = (DRY_FLAGS if machine.dry else FLAGS).split() + os.environ.get("GPU_BENCH", "").split()
    arguments = [machine.pack / "ggml-moe", "bench", "-m", model, "--host-dir", machine.stock_folder, "--plugin", machine.plugin,
                 "--inner", machine.inner, "-t", machine.threads, "--timeout", 120, "--runs", machine.out / "bench-runs.jsonl",
                 "--json", report, "--chart", machine.out / "bench.svg", *flags]
    done = machine.run(arguments, machine.environment(alone=True), machine.left() - 5, "bench")
    print(done.output, flush=True)
    if not report.exists():
        results.add("bench", "ggml-moe bench", False, done.reason(), "runs")
        return
    found = json.loads(report.read_text())
    for case in found["cases"]:
        share = round(100 * case["share"])
        for phase in case["phases"]:
            for test in phase["tests"]:
                name = f"{test['name']}, {share}% of the experts"
                if phase["void"] or test["ratio"] is None:
                    results.add("bench", name, False, f"void: {phase['void']}", "")
                    continue
                ratio, low, high = test["ratio"]
                bar = None if machine.dry or phase["phase"] != "decode" else BARS.get(share)
                hits = "" if phase["phase"] != "decode" or phase["hit_percent"] is None else f"; {phase['hit_percent']:.1f}% hits"
                results.add("bench", name, None if bar is None else ratio >= bar,
                            f"{ratio:.2f} ({low:.2f}..{high:.2f}) of stock {phase['stock_arguments']}: {test['ours'][0]:.1f} against "
                            f"{test['stock'][0]:.1f} t/s{hits}", "" if bar is None else f">= {bar:.2f}", samples=test["samples"])
    if machine.dry:
        results.add("bench", "the command", done.ok(), done.how(), "exit status 0")
