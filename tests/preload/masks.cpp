// Stands between the plugin and llama_kv_cache::set_input_kq_mask: for parts of a pass it writes something else (MASK_FAULT=wrong), throws
// (MASK_FAULT=throw), or throws only for parts of some size, which come after the check (MASK_FAULT=late). Counts calls in one line each.
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "llama-batch.h"

using fill_t = void (*)(const void *, ggml_tensor *, const llama_ubatch *, bool);

// What src/abi/llama/mask.rs takes for granted.
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
static_assert(sizeof(llama_ubatch) == 120 && offsetof(llama_ubatch, n_tokens) == 4 && offsetof(llama_ubatch, n_pos) == 20);
static_assert(offsetof(llama_ubatch, token) == 24 && offsetof(llama_ubatch, pos) == 40 && offsetof(llama_ubatch, n_seq_id) == 48);
static_assert(offsetof(llama_ubatch, seq_id) == 56 && offsetof(llama_ubatch, data) == 104);

static const char NAME[] = "_ZNK14llama_kv_cache17set_input_kq_maskEP11ggml_tensorPK12llama_ubatchb";

extern "C" void fill(const void * cache, ggml_tensor * mask, const llama_ubatch * batch, bool causal)
    __asm__("_ZNK14llama_kv_cache17set_input_kq_maskEP11ggml_tensorPK12llama_ubatchb");

extern "C" void fill(const void * cache, ggml_tensor * mask, const llama_ubatch * batch, bool causal) {
    static const fill_t real = reinterpret_cast<fill_t>(dlsym(RTLD_NEXT, NAME));
    // The plugin takes the token ids out of what it makes; the host's batches have them.
    const uint32_t tokens = batch->n_tokens;
    const bool part = batch->token == nullptr;
    const char * fault = std::getenv("MASK_FAULT");
    std::fprintf(stderr, "mask: %s of %u tokens\n", part ? "a part" : "all", tokens);
    if (part && fault != nullptr) {
        if (std::strcmp(fault, "throw") == 0 || (std::strcmp(fault, "late") == 0 && tokens > 32)) {
            throw std::runtime_error("a part");
        }
        if (std::strcmp(fault, "wrong") == 0) {
            std::memset(mask->data, 0, ggml_nbytes(mask));
            return;
        }
    }
    real(cache, mask, batch, causal);
}
