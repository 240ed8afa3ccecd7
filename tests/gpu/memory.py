"""Steps for memory that the cache gives back: to a process that takes the card's memory, to a draft model, and within a budget."""
import re
import select
import subprocess
import time

from host import FIXTURE, Missing
from server import PROMPTS, Server

LEFT_MIB = 64  # what the other process leaves free, less than vram-reserve-mb


def told(server, word):
    """The plugin's lines about the size of its cache that hold a word."""
    text = server.log_path.read_text(errors="replace")
    return [line.split("ggml-moe: ", 1)[1] for line in text.splitlines() if "ggml-moe: " in line and "cache" in line and word in line]


def answer(server, tokens):
    return server.complete(PROMPTS[1], n_predict=tokens, ignore_eos=True)["tokens"]


def wait_for(server, word, limit):
    """Asks until a line says so: the plugin looks at what is free when graphs run, and grows when memory stayed free for seconds."""
    end = time.monotonic() + min(limit, server.machine.left())
    while not told(server, word) and time.monotonic() < end:
        answer(server, 64)
    return told(server, word)


def hold(machine):
    holder = machine.start(["python3", machine.gpu_tests / "hold_vram.py", LEFT_MIB], machine.environment(),
                           stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    ready, _, _ = select.select([holder.stdout], [], [], 30)
    line = holder.stdout.readline().decode().strip() if ready else ""
    if not line:
        machine.stop(holder)
        raise Missing("the card's memory was not taken, see hold_vram.py")
    return holder, line


def foreign(machine, results):
    """Another process takes all of the card's memory but 64 MiB while a server with cache=auto is idle, and gives it back later."""
    model = FIXTURE if machine.dry else machine.big_model()
    side = machine.ours.with_keys("cache=auto;vram-budget-mb=64;vram-reserve-mb=1" if machine.dry else "cache=auto")
    with Server(machine, side, "memory", "-c", 2048, "-np", 1, model=model, patience=120) as server:
        first = answer(server, 160)
        # A card on which a quarter holds everything has nothing to grow to.
        grown = wait_for(server, "grows", 10) or wait_for(server, "(100%)", 1)
        results.add("memory", "it takes what is free after 64 tokens, or holds everything", bool(grown), grown[-1] if grown else "no line says so", "grows, or all")
        if not machine.dry:
            holder, line = hold(machine)
            try:
                second = answer(server, 160)
                shrunk = wait_for(server, "shrinks", 10)
                same = sum(a == b for a, b in zip(first, second))
                results.add("memory", f"another process took the rest: {line}", bool(shrunk) and len(second) == len(first),
                            f"{shrunk[-1] if shrunk else 'no line says so'}; {same} of {len(first)} tokens as before", "shrinks, answers")
            finally:
                machine.stop(holder)
            back = wait_for(server, "stayed free", 30)
            results.add("memory", "that process ended", bool(back), back[-1] if back else "no line says so", "grows back")
        end = server.end()
    results.add("memory", "the server ends", end.ok(), end.how(), "exit status 0", summary=end.summaries())


def budget(machine, results):
    """A draft model beside its target within a budget that does not hold all experts: everything of ours keeps to it."""
    mib = 42
    side = machine.ours.with_keys(f"cache=auto;vram-budget-mb={mib};vram-reserve-mb=1")
    more = ["-c", 1024, "-np", 1, "-ub", 64, "-md", FIXTURE, "--spec-draft-n-max", 4, "--spec-type", "draft-simple"]
    with Server(machine, side, "budget", *more) as server:
        tokens = answer(server, 160)
        end = server.end()
    sums = [sum(map(int, re.findall(r"(\d+) MiB", line.split(": ", 1)[1])))
            for line in end.plugin_lines() if "memory of" in line]
    # A card's memory comes in pieces of 2 MiB, so that a small budget may hold no cache at all; then a line says so.
    said = sums or [line for line in end.plugin_lines() if "no cache" in line]
    results.add("budget", f"draft model within {mib} MiB", end.ok() and len(tokens) == 160 and bool(said) and max(sums, default=0) <= mib,
                f"{len(tokens)} tokens, {sums} MiB in all, {end.how()}", f"<= {mib} MiB, answers")
