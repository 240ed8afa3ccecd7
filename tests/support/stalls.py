#!/usr/bin/env python3
"""Stalls the programs that a test program started, as a busy machine does: one after the other is stopped for a while and goes on.

usage: stalls.py PID [--seed N] [--share 0.3] [--longest 2]
PID is the test program, which is not stopped itself; it ends when that ends. share: the part of the time in which one of them stands still;
longest: in seconds.
"""
import argparse
import os
import random
import signal
import time


def started_by(pid):
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                for child in map(int, file.read().split()):
                    found += [child, *started_by(child)]
    except OSError:
        pass  # gone meanwhile
    return found


def send(pid, number):
    try:
        os.kill(pid, number)
    except OSError:
        pass  # gone meanwhile


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pid", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--longest", type=float, default=2)
    a = parser.parse_args()
    rng = random.Random(a.seed)
    while runs(a.pid):
        programs = started_by(a.pid)
        if not programs:
            time.sleep(0.02)
            continue
        program, seconds = rng.choice(programs), min(rng.expovariate(4), a.longest)
        send(program, signal.SIGSTOP)
        time.sleep(seconds)
        send(program, signal.SIGCONT)
        time.sleep(seconds * (1 - a.share) / a.share)


main()
