#!/usr/bin/env python3
"""hold_vram.py MIB: takes all memory of GPU 0 but MIB mebibytes, prints what is free, and holds it until standard input ends.

Plain allocations through the driver, in pieces that shrink, so that nothing but the driver itself has to be installed.
"""
import ctypes
import sys

MIB = 1 << 20


def main():
    leave = int(sys.argv[1]) * MIB
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name, *arguments):
        status = getattr(cuda, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name}: CUDA error {status}")

    device, context, free, total = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)

    def free_bytes():
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    piece = 8 << 30
    while piece >= 2 * MIB:
        pointer = ctypes.c_uint64()
        if free_bytes() < leave + piece or cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(piece)) != 0:
            piece //= 2
    print(f"free {free_bytes() // MIB} MiB", flush=True)
    sys.stdin.read()


main()
