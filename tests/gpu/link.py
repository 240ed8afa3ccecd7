#!/usr/bin/env python3
"""Prints what a copy of 64 MiB of pinned memory to GPU 0 moves, the best of eight: "link: N GB/s" (10^9 bytes). Needs the driver only."""
import ctypes
import sys
import time

BYTES = 64 << 20
cuda = ctypes.CDLL("libcuda.so.1")


def call(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    if status != 0:
        sys.exit(f"link: {name}: CUDA error {status}")


def main():
    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    pinned, target = ctypes.c_void_p(), ctypes.c_uint64()
    call("cuMemHostAlloc", ctypes.byref(pinned), ctypes.c_size_t(BYTES), 0)
    ctypes.memset(pinned, 1, BYTES)
    call("cuMemAlloc_v2", ctypes.byref(target), ctypes.c_size_t(BYTES))
    best = float("inf")
    for _ in range(8):
        begin = time.perf_counter()
        call("cuMemcpyHtoDAsync_v2", target, pinned, ctypes.c_size_t(BYTES), None)
        call("cuCtxSynchronize")
        best = min(best, time.perf_counter() - begin)
    print(f"link: {BYTES / best / 1e9:.2f} GB/s")


main()
