"""The thread team beside the machine's memory: GB/s of weights, by type, threads, missed experts and tokens."""
import json
import os

from host import Missing

BAR = 0.75  # of the read bandwidth at the most threads, Q4_K, a token that misses four experts of a layer


def counts(most):
    """1, 2, 4 and so on, up to the most."""
    return [count for count in (1, 2, 4, 8, 12, 16) if count < most] + [most]


def table(figures, threads):
    """One line for each type and count of threads: GB/s by misses, for one token and for four."""
    columns = [(tokens, misses) for tokens in (1, 4) for misses in (1, 2, 4, 8)]
    lines = ["type    threads   memory" + "".join(f"  {tokens}x{misses:<4}" for tokens, misses in columns) + "  (tokens x misses, GB/s)"]
    for kind in dict.fromkeys(row["what"] for row in figures if row["what"] != "memory"):
        for count in threads:
            found = {(row["tokens"], row["misses"]): row["gbs"] for row in figures if row["what"] == kind and row["threads"] == count}
            memory = next((row["gbs"] for row in figures if row["what"] == "memory" and row["threads"] == count), 0)
            cells = "".join(f"  {found.get(column, 0):6.1f}" for column in columns)
            lines.append(f"{kind:7} {count:7}   {memory:6.1f}{cells}")
    return lines


def against_memory(machine, results):
    """GB/s of weights that the thread team reads, beside what the memory gives: five types, 1 to 16 threads, 1 to 8 misses."""
    threads = counts(machine.threads)
    # MiB, milliseconds for each figure. The memory must be larger than all caches.
    size, milliseconds = (256, 60) if machine.dry else (6144, 200)
    env = machine.environment(alone=True)
    del env["LD_PRELOAD"]
    env["GGML_MOE_STOCK"] = str(machine.stock_folder)
    env["GGML_MOE_TEAM_SPEED"] = " ".join(map(str, [size, milliseconds, *threads]))
    done = machine.run([machine.pack / "driver-tests", "cpu::speed", "--ignored", "--nocapture", "--test-threads=1"], env, 150, "team")
    figures = [json.loads(line[6:]) for line in done.log.splitlines() if line.startswith("team: {")]
    if not done.ok() or not figures:
        results.add("team", "thread team", False, done.reason(), "runs")
        return
    for line in table(figures, threads):
        print(f"  {line}", flush=True)
    most = threads[-1]
    memory = next(row["gbs"] for row in figures if row["what"] == "memory" and row["threads"] == most)
    if memory <= 0:
        raise Missing("no figure of the memory")
    for kind in dict.fromkeys(row["what"] for row in figures if row["what"] != "memory"):
        rows = {(row["tokens"], row["misses"]): row["gbs"] for row in figures if row["what"] == kind and row["threads"] == most}
        shares = ", ".join(f"{rows[1, misses] / memory:.2f}" for misses in (1, 2, 4, 8))
        share = rows[1, 4] / memory
        bar = kind == "q4_K" and not machine.dry and most >= 16
        results.add("team", f"{kind}, {most} of {os.cpu_count()} threads", share >= BAR if bar else None,
                    f"{rows[1, 4]:.1f} of {memory:.1f} GB/s; share with 1, 2, 4, 8 misses {shares}", f">= {BAR}" if bar else "", figures=figures)
