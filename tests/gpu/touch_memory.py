#!/usr/bin/env python3
"""touch_memory.py GIB: writes that much memory once and gives it back. A virtual machine whose memory grows with use is then
large enough before anything is measured, and the plugin sees what is really there. Needs numpy."""
import sys
import threading

import numpy as np

THREADS = 8


def main():
    block = np.empty(int(float(sys.argv[1]) * (1 << 30)), np.uint8)
    size = -(-len(block) // THREADS)
    pieces = [block[i * size:(i + 1) * size] for i in range(THREADS)]
    # One byte in each page is enough to have it backed.
    threads = [threading.Thread(target=lambda piece=piece: piece[::4096].fill(1)) for piece in pieces]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


main()
