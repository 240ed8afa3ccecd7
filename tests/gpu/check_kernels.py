#!/usr/bin/env python3
"""Runs the committed PTX on GPU 0 and compares every byte with numpy: many shapes, alignments and launches, bad ids included.

Each array is an allocation of its own and exactly as large as the kernel may touch, so that compute-sanitizer around this
program finds any access outside. Prints "kernels: N cases, N wrong". Needs numpy and the driver.
"""
import ctypes
import pathlib
import sys

import numpy as np

PTX = pathlib.Path(__file__).resolve().parents[2] / "kernels/ptx"
RANGES = 64  # MOE_FILL_RANGES
COPIES = 128  # MOE_GATHER_COPIES
cuda = ctypes.CDLL("libcuda.so.1")


def call(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    if status != 0:
        sys.exit(f"kernels: {name}: CUDA error {status}")


class Array:
    """Device memory with the contents of a numpy array."""

    def __init__(self, data):
        self.shape, self.dtype, self.bytes = data.shape, data.dtype, data.nbytes
        self.pointer = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(self.pointer), ctypes.c_size_t(self.bytes))
        data = np.ascontiguousarray(data)
        call("cuMemcpyHtoD_v2", self.pointer, data.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(self.bytes))

    def read_and_free(self):
        data = np.empty(self.shape, self.dtype)
        call("cuMemcpyDtoH_v2", data.ctypes.data_as(ctypes.c_void_p), self.pointer, ctypes.c_size_t(self.bytes))
        call("cuMemFree_v2", self.pointer)
        return data


def kernel(file, name):
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), (PTX / file).read_bytes() + b"\0")
    call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    return function


def launch(function, grid, threads, *values):
    pointers = (ctypes.c_void_p * len(values))(*[ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values])
    call("cuLaunchKernel", function, grid[0], grid[1], 1, threads, 1, 1, 0, None, pointers, None)
    call("cuCtxSynchronize")


def check_fill(rng, function, size, count, blocks, threads):
    before = rng.integers(0, 256, size, np.uint8)
    target = Array(before)
    value, expected = int(rng.integers(0, 256)), before.copy()
    ranges = (ctypes.c_uint64 * (2 * RANGES))()
    for i in range(count):
        start, end = sorted(int(edge) for edge in rng.integers(0, size + 1, 2))
        if i == 0:
            start, end = size - min(size, 5), size  # up to the very end
        elif i % 3 == 0:
            end = min(size, start + i % 40)  # shorter than a block of 16, or empty
        ranges[2 * i], ranges[2 * i + 1] = target.pointer.value + start, end - start
        expected[start:end] = value
    # The entries behind the count must not be used; the upper bits of the value must not matter.
    for i in range(count, RANGES):
        ranges[2 * i], ranges[2 * i + 1] = 16, 1 << 20
    launch(function, (blocks, count), threads, ranges, ctypes.c_uint32(count), ctypes.c_uint32(value | 0xABCD00))
    return np.array_equal(target.read_and_free(), expected)


def check_gather(rng, function, count, blocks, threads):
    """Copies between odd addresses of two memories; what lies between the targets must stay."""
    size = 1 << 20
    data, expected = rng.integers(0, 256, size, np.uint8), np.full(size, 0x5A, np.uint8)
    source, target = Array(data), Array(expected)
    copies = (ctypes.c_uint64 * (3 * COPIES))()
    part = size // count
    for i in range(count):
        length = int(rng.integers(0, part - 40)) if i % 4 else i % 40
        to, at = i * part + int(rng.integers(0, 33)), int(rng.integers(0, size - length + 1))
        copies[3 * i], copies[3 * i + 1], copies[3 * i + 2] = target.pointer.value + to, source.pointer.value + at, length
        expected[to:to + length] = data[at:at + length]
    # The entries behind the count must not be used.
    for i in range(count, COPIES):
        copies[3 * i], copies[3 * i + 1], copies[3 * i + 2] = 16, 32, 1 << 20
    launch(function, (blocks, count), threads, copies, ctypes.c_uint32(count))
    source.read_and_free()
    return np.array_equal(target.read_and_free(), expected)


def main():
    rng = np.random.default_rng(20260101)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    fill = kernel("fill.ptx", "moe_k_fill")
    results = []
    for size in (1, 15, 16, 17, 255, 4096, 1_000_003):
        for count in (1, 2, 63, RANGES):
            for blocks, threads in ((1, 1), (3, 32), (40, 256)):
                results.append(check_fill(rng, fill, size, count, blocks, threads))
    gather = kernel("gather.ptx", "moe_k_gather")
    for count in (1, 3, 64, COPIES):
        for blocks, threads in ((1, 1), (3, 32), (16, 256)):
            results.append(check_gather(rng, gather, count, blocks, threads))
    print(f"kernels: {len(results)} cases, {results.count(False)} wrong")
    sys.exit(results.count(False) > 0)


main()
