// Copies ranges of device memory, many in one launch: experts from the slots of the cache to their places in staging.
#include "common.cuh"

// The most copies of one launch. They travel by value in the launch's parameters (at most 4 KiB), so a launch needs no memory of its own.
#define MOE_GATHER_COPIES 128

struct moe_copy {
    moe_u64 target; // first byte, a device address; any alignment
    moe_u64 source; // first byte, a device address; any alignment
    moe_u64 bytes;  // may be 0
};

struct moe_copies {
    moe_copy copy[MOE_GATHER_COPIES];
};

// Writes blocks of 16 bytes, this thread's share of them; four are loaded before the first is stored, so that loads wait together.
template <typename Load>
static __device__ __forceinline__ void moe_write(uint4 * to, moe_u64 blocks, Load load) {
    const moe_u64 step = moe_threads();
    moe_u64 i = moe_thread();
    for (; i + 3 * step < blocks; i += 4 * step) {
        const uint4 a = load(i), b = load(i + step), c = load(i + 2 * step), d = load(i + 3 * step);
        to[i] = a;
        to[i + step] = b;
        to[i + 2 * step] = c;
        to[i + 3 * step] = d;
    }
    for (; i < blocks; i += step) {
        to[i] = load(i);
    }
}

// Launch: grid (x, n_copies), block (t): block y does copy y, its x blocks share the bytes. Any x >= 1 and any t from 1 to 256 give the
//   same result; t = 256 and x = min(ceil(bytes of the longest copy / 64 KiB), 16) use the card well and leave room on it.
// Arguments: `copies`, the first n_copies entries are used; n_copies <= MOE_GATHER_COPIES and <= gridDim.y.
// Bounds: writes exactly [target, target + bytes) of each copy. Reads its parameters and the aligned 16-byte or 4-byte words that hold a
//   byte of [source, source + bytes).
// Aliasing: no range that is written may overlap another range, written or read. Every byte of both ranges must be mapped.
extern "C" __global__ void __launch_bounds__(256)
moe_k_gather(const __grid_constant__ moe_copies copies, moe_u32 n_copies) {
    if (blockIdx.y >= n_copies || blockIdx.y >= MOE_GATHER_COPIES) {
        return;
    }
    const moe_u64 target = copies.copy[blockIdx.y].target;
    const moe_u64 source = copies.copy[blockIdx.y].source;
    const moe_u64 bytes = copies.copy[blockIdx.y].bytes;

    // The target as [target, head) bytes, then whole blocks of 16, then bytes again. A short range may be all head.
    const moe_u64 to_boundary = (16 - (target & 15)) & 15;
    const moe_u64 head = to_boundary < bytes ? to_boundary : bytes;
    const moe_u64 blocks = (bytes - head) / 16;
    const moe_u64 tail = bytes - head - 16 * blocks;

    uint4 * const to = (uint4 *) (target + head);
    const moe_u64 from = source + head;
    if ((from & 15) == 0) {
        const uint4 * const aligned = (const uint4 *) from;
        moe_write(to, blocks, [=](moe_u64 i) { return aligned[i]; });
    } else {
        // Each block lies in four words, or in five of which the last holds at least one byte of it.
        const moe_u32 * const words = (const moe_u32 *) (from & ~3ull);
        const moe_u32 shift = 8 * (moe_u32) (from & 3);
        const moe_u64 last = shift == 0 ? 3 : 4;
        moe_write(to, blocks, [=](moe_u64 i) {
            const moe_u32 * const w = words + 4 * i;
            const moe_u32 a = w[0], b = w[1], c = w[2], d = w[3], e = w[last];
            return make_uint4(__funnelshift_r(a, b, shift), __funnelshift_r(b, c, shift), __funnelshift_r(c, d, shift),
                              __funnelshift_r(d, e, shift));
        });
    }

    for (moe_u64 i = moe_thread(); i < head + tail; i += moe_threads()) {
        const moe_u64 at = i < head ? i : 16 * blocks + i;
        *(moe_u8 *) (target + at) = *(const moe_u8 *) (source + at);
    }
}
