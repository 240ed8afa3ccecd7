// What every kernel file shares. Compiled by NVRTC, so nothing here includes a header of the toolkit or of libc.
#pragma once

typedef unsigned char moe_u8;
typedef unsigned int moe_u32;
typedef unsigned long long moe_u64;

// This thread's place in a one-dimensional grid, and the grid's size: for loops in which each thread takes every
// `moe_threads()`-th element, so that any launch shape gives the same result. Both fit 63 bits for every legal launch.
static __device__ __forceinline__ moe_u64 moe_thread() { return (moe_u64) blockIdx.x * blockDim.x + threadIdx.x; }
static __device__ __forceinline__ moe_u64 moe_threads() { return (moe_u64) gridDim.x * blockDim.x; }
