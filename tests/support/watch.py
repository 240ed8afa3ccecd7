#!/usr/bin/env python3
"""Runs a program and writes down what memory and reads it took, as JSON.

usage: watch.py REPORT [--drop FILE] [--limit MIB] -- PROGRAM ARGUMENTS
--drop: the pages of this file are dropped from the page cache first. --limit: the program runs in a control group of its own with this much
memory, page cache included; exit code 77 where no such group can be made.
The report: peak_own_kib (RssAnon and RssShmem together, looked at every few milliseconds), major_faults, read_bytes, seconds.
"""
import json
import os
import subprocess
import sys
import threading
import time

NO_GROUP = 77
GROUPS = [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup/unified", "memory.max"), ("/sys/fs/cgroup", "memory.max")]


def drop(path):
    file = os.open(path, os.O_RDONLY)
    os.fdatasync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def group(mib):
    """A control group with a limit: its folder, or None."""
    for root, limit in GROUPS:
        path = f"{root}/ggml-moe-test-{os.getpid()}"
        # A folder that is no hierarchy of groups takes one without the file of the limit in it.
        if not os.path.exists(f"{root}/cgroup.procs"):
            continue
        try:
            os.mkdir(path)
        except OSError:
            continue
        try:
            if not os.path.exists(f"{path}/{limit}"):
                raise OSError(f"no {limit}")
            with open(f"{path}/{limit}", "w") as file:
                file.write(str(mib << 20))
            return path
        except OSError:
            os.rmdir(path)
    return None


def watch(pid, peak, ended):
    while not ended.is_set():
        try:
            with open(f"/proc/{pid}/status") as file:
                fields = dict(line.split(":", 1) for line in file)
        except (OSError, ValueError):
            return
        own = sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem") if name in fields)
        peak[0] = max(peak[0], own)
        ended.wait(0.004)


def main():
    split = sys.argv.index("--")
    report, options, program = sys.argv[1], sys.argv[2:split], sys.argv[split + 1:]
    options = dict(zip(options[::2], options[1::2]))
    folder = None
    if "--limit" in options:
        folder = group(int(options["--limit"]))
        if folder is None:
            return NO_GROUP
    try:
        if "--drop" in options:
            drop(options["--drop"])

        def enter():
            if folder:
                with open(f"{folder}/cgroup.procs", "w") as file:
                    file.write("0")

        began = time.monotonic()
        child = subprocess.Popen(program, preexec_fn=enter)
        peak, ended = [0], threading.Event()
        watcher = threading.Thread(target=watch, args=(child.pid, peak, ended))
        watcher.start()
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.monotonic() - began
        ended.set()
        watcher.join()
    finally:
        if folder:
            os.rmdir(folder)
    with open(report, "w") as file:
        json.dump({"peak_own_kib": peak[0], "major_faults": usage.ru_majflt, "read_bytes": usage.ru_inblock * 512, "seconds": seconds}, file)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
