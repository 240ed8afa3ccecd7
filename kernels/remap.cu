// Turns the router's expert numbers into block numbers of an arena, on the device.
#include "common.cuh"

// For every token t < n_tokens and slot s < n_used, with id = ids[s * id_stride + t * row_stride]:
//   out[t * n_used + s] = table[id]   if 0 <= id < n_expert and table[id] >= 0
//                       = miss + s    otherwise
// The miss numbers of one token differ by slot, because ggml's large-batch MUL_MAT_ID allows an expert once per token.
//
// Launch: one-dimensional, any grid, a block of at most 256; t = 256 and ceil(n_used * n_tokens / 256) blocks use the card well.
// Shapes and units: all strides count ints. `ids` may be a view of rows longer than n_used (the top of an argsort: id_stride 1,
//   row_stride n_expert). `out` is contiguous, n_used * n_tokens ints. `table` holds n_expert ints: a block number, or any
//   negative number where the expert has no block. miss >= 0, and miss + n_used must not overflow.
// Bounds: reads only the ids named above and table[0 .. n_expert), whatever the ids hold; n_expert <= 0 makes every pair a miss.
// Aliasing: `out` overlaps neither `ids` nor `table`. All three are 4-byte aligned.
extern "C" __global__ void __launch_bounds__(256)
moe_k_remap_ids(const int * __restrict__ ids, int * __restrict__ out, const int * __restrict__ table, moe_u32 n_used,
                moe_u32 n_tokens, moe_u32 id_stride, moe_u32 row_stride, int n_expert, int miss) {
    const moe_u64 pairs = (moe_u64) n_used * n_tokens;
    for (moe_u64 i = moe_thread(); i < pairs; i += moe_threads()) {
        const moe_u64 token = i / n_used;
        const moe_u32 slot = (moe_u32) (i - token * n_used);
        const int id = ids[(moe_u64) slot * id_stride + token * row_stride];
        const int block = id >= 0 && id < n_expert ? table[id] : -1;
        out[i] = block >= 0 ? block : miss + (int) slot;
    }
}
