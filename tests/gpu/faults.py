"""Steps that break something on purpose, and the step that loads and unloads the plugin many times."""
import json
import re
import select
import subprocess

from correctness import compare_figures, figures, perplexity_run
from host import Missing

# The key that causes the fault, and what a line of the plugin must say so that a user knows what happened.
KEY_FAULTS = [
    ("no CUDA driver", "debug-cuda=absent", r"libcuda|CUDA|driver"),
    ("CUDA driver too old", "debug-cuda=old", r"too old|old|version"),
    ("no virtual memory", "debug-cuda=no-vmm", r"VMM|virtual memory"),
    ("pinning refused", "debug-fail-alloc=pin:1", r"\bpin|regist|memlock"),
]


def missing_pieces(machine, results):
    """Each fault: one clear line, the host alive, and still stock's figures."""
    chunks = 4
    reference = perplexity_run(machine, machine.stock, 512, chunks, tag="faults")
    stock = figures(reference)
    if stock is None:
        raise Missing(f"stock does not run: {reference.reason()}")
    # What the plugin says anyway is no answer to a fault.
    usual = {without_numbers(line) for line in perplexity_run(machine, machine.ours, 512, chunks, tag="faults").plugin_lines()}
    for name, key, words in KEY_FAULTS:
        if machine.dry and key.startswith("debug-cuda"):
            results.skip("faults", name, "needs a GPU")
            continue
        done = perplexity_run(machine, machine.ours.with_keys(key), 512, chunks, tag="faults")
        lines = done.plugin_lines()
        if any("settings: " in line and key.split("=")[0] in line for line in lines):
            results.skip("faults", name, f"the plugin does not know {key}")
            continue
        said = [line for line in lines if without_numbers(line) not in usual and re.search(words, line, re.I)]
        results.add("faults", f"{name}: line", bool(said), said[0].split("ggml-moe: ", 1)[1][:100] if said else "no line says so",
                    "a line names the cause", lines=said)
        compare_figures(results, "faults", f"{name}: host", done, stock, signalled=done.signalled())


def without_numbers(line):
    return re.sub(r"\d+", "N", line.split("ggml-moe: ", 1)[1])


def exhausted(machine, results):
    """Another process holds all of the card's memory but 1 GiB: a model that needs more ends with a message, not a signal."""
    if machine.dry:
        raise Missing("needs a GPU")
    holder = machine.start(["python3", machine.gpu_tests / "hold_vram.py", 1024], machine.environment(),
                           stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        ready, _, _ = select.select([holder.stdout], [], [], 30)
        line = holder.stdout.readline().decode().strip() if ready else ""
        if not line:
            raise Missing("the card's memory was not taken, see hold_vram.py")
        big = ["-f", machine.work / "short.txt", "-c", 512, "--chunks", 1]
        for name, side in (("experts on the device", machine.ours_on_device), ("plain path", machine.ours)):
            arguments = machine.tool("llama-perplexity", side, machine.big_model(), *big)
            done = machine.run(arguments, machine.environment(side), 60, "exhausted")
            said = [text for text in done.log.splitlines() if re.search(r"alloc|memory|VRAM", text, re.I)
                    and re.search(r"fail|unable|out of|not enough|cannot", text, re.I)]
            good = not done.signalled() and done.status != 0 and bool(said)
            results.add("exhausted", f"30B-A3B, {name}, {line}", good,
                        f"{done.how()}: {said[0].strip()[:90] if said else 'no line about memory'}", "a message, no signal")
        small = perplexity_run(machine, machine.ours, 512, 1, tag="exhausted")
        results.add("exhausted", f"fixture, {line}", not small.signalled(), small.reason() if not small.ok() else "runs", "no signal")
    finally:
        machine.stop(holder)


def reload(machine, results):
    """Loads and unloads of the plugin: the card's free memory, threads and open files stay as they are."""
    rounds = 20 if machine.dry else 200
    arguments = [machine.pack / "reload", machine.stock_folder, machine.plugin, machine.inner, rounds, 4]
    env = machine.environment()
    env["GGML_MOE"] = f"inner={machine.inner}"
    done = machine.run(arguments, env, 90, "reload")
    line = re.search(r"reload: (\{.*\})", done.log)
    if line is None:
        results.add("reload", f"{rounds} loads and unloads", False, done.reason(), "growth <= 4 MiB")
        return
    left = json.loads(line[1])
    results.add("reload", f"{rounds} loads and unloads", done.ok(),
                f"free {left['free_mib_before']:.0f} -> {left['free_mib_after']:.0f} MiB, {left['threads_left']} threads, "
                f"{left['files_left']} files left, {done.seconds:.0f} s", "growth <= 4 MiB, none left", **left)
