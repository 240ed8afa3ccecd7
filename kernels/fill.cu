// Fills ranges of device memory with one byte value: the zero pads behind quantized tensors, fresh key/value pages, and
// poison in the debug modes.
#include "common.cuh"

// The most ranges of one launch. The ranges travel by value in the launch's parameters (at most 4 KiB), so a launch needs no
// memory of its own, nothing has to outlive it, and a captured graph keeps its own copy.
#define MOE_FILL_RANGES 64

struct moe_range {
    moe_u64 address; // first byte, a device address; any alignment
    moe_u64 bytes;   // may be 0
};

struct moe_ranges {
    moe_range range[MOE_FILL_RANGES];
};

// Launch: grid (x, n_ranges), block (t): block y fills range y, its x blocks share the bytes. Any x >= 1 and any t from 1 to 256 give the
//   same result; t = 256 and x = min(ceil(bytes of the longest range / 64 KiB), 1024) use the card well.
// Arguments: `ranges`, the first n_ranges entries are used; n_ranges <= MOE_FILL_RANGES and <= gridDim.y; value: the byte,
//   in the low 8 bits (the others are ignored).
// Bounds: writes exactly [address, address + bytes) of each range, and reads nothing but its parameters. 16-byte stores
//   inside, single bytes before the first and behind the last 16-byte boundary.
// Aliasing: ranges may overlap, since all write the same value. Every byte of a range must be mapped and writable.
extern "C" __global__ void __launch_bounds__(256)
moe_k_fill(const __grid_constant__ moe_ranges ranges, moe_u32 n_ranges, moe_u32 value) {
    if (blockIdx.y >= n_ranges || blockIdx.y >= MOE_FILL_RANGES) {
        return;
    }
    const moe_u64 address = ranges.range[blockIdx.y].address;
    const moe_u64 bytes = ranges.range[blockIdx.y].bytes;

    // [address, head) bytes, [head, head + 16 * blocks) aligned, then bytes again. A short range may be all head.
    const moe_u64 to_boundary = (16 - (address & 15)) & 15;
    const moe_u64 head = to_boundary < bytes ? to_boundary : bytes;
    const moe_u64 blocks = (bytes - head) / 16;
    const moe_u64 tail = bytes - head - 16 * blocks;

    const moe_u32 word = (value & 0xff) * 0x01010101u;
    const uint4 block = make_uint4(word, word, word, word);
    uint4 * const aligned = (uint4 *) (address + head);
    for (moe_u64 i = moe_thread(); i < blocks; i += moe_threads()) {
        aligned[i] = block;
    }

    moe_u8 * const first = (moe_u8 *) address;
    moe_u8 * const last = (moe_u8 *) (address + head + 16 * blocks);
    for (moe_u64 i = moe_thread(); i < head + tail; i += moe_threads()) {
        *(i < head ? first + i : last + (i - head)) = (moe_u8) value;
    }
}
