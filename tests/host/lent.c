/* A compute buffer whose memory comes and goes: it is written and read by every way that the host has, before any graph. */
#include "host.h"

#define PARTS 64
#define PART_BYTES ((size_t) 64 << 10)

/* A buffer that holds PARTS tensors and is called a compute buffer, as ggml's graph allocator does it. */
static ggml_backend_buffer_t make_compute_buffer(ggml_backend_dev_t dev, struct ggml_context * ctx, struct ggml_tensor ** part) {
    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(dev);
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(buft, PARTS * PART_BYTES);
    CHECK(buffer != NULL, "no buffer");
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_COMPUTE);
    char * base = ggml_backend_buffer_get_base(buffer);
    for (int i = 0; i < PARTS; i++) {
        part[i] = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, (int64_t) PART_BYTES);
        CHECK(ggml_backend_tensor_alloc(buffer, part[i], base + i * PART_BYTES) == GGML_STATUS_SUCCESS, "part %d", i);
    }
    return buffer;
}

static void holds(const struct ggml_tensor * t, uint8_t * data, uint32_t seed) {
    uint8_t * got = get_memory(PART_BYTES);
    fill(data, PART_BYTES, seed);
    ggml_backend_tensor_get(t, got, 0, PART_BYTES);
    CHECK(memcmp(got, data, PART_BYTES) == 0, "what was written with seed %u", seed);
    free(got);
}

void case_lent(void) {
    ggml_backend_dev_t dev = device_number(load_plugin(), 0);
    struct ggml_context * ctx = new_context(3 * PARTS);
    struct ggml_tensor * part[PARTS], * other[PARTS], * early[PARTS];
    ggml_backend_buffer_t buffer = make_compute_buffer(dev, ctx, part);
    ggml_backend_buffer_t second = make_compute_buffer(dev, ctx, other);
    uint8_t * data = get_memory(PART_BYTES);

    fill(data, PART_BYTES, 1);
    ggml_backend_tensor_set(part[3], data, 0, PART_BYTES);
    holds(part[3], data, 1);
    ggml_backend_tensor_memset(part[5], 0x11, 100, 200);
    ggml_backend_tensor_copy(part[3], other[60]);
    holds(other[60], data, 1);
    ggml_backend_tensor_copy(part[3], part[7]);
    holds(part[7], data, 1);
#if HOST_HAS_ROWS
    fill(data, PART_BYTES, 2);
    ggml_backend_tensor_set_2d(part[9], data, 0, 16, 1024, 64, 16);
    uint8_t rows[16 * 1024];
    ggml_backend_tensor_get_2d(part[9], rows, 0, 16, 1024, 64, 16);
    CHECK(memcmp(rows, data, sizeof(rows)) == 0, "rows");
#endif
    holds(part[3], data, 1);

    /* Used before it is called so: it stays whole, and everything can be read. */
    ggml_backend_buffer_t whole = ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(dev), PARTS * PART_BYTES);
    ggml_backend_buffer_clear(whole, 0x22);
    ggml_backend_buffer_set_usage(whole, GGML_BACKEND_BUFFER_USAGE_COMPUTE);
    early[0] = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, (int64_t) PART_BYTES);
    ggml_backend_tensor_alloc(whole, early[0], (char *) ggml_backend_buffer_get_base(whole) + 5 * PART_BYTES);
    ggml_backend_tensor_get(early[0], data, 0, PART_BYTES);
    CHECK(data[0] == 0x22 && data[PART_BYTES - 1] == 0x22, "a buffer that was written first");
    CHECK(log_count("ggml-moe: ", "of a compute buffer are read") == 0, "something was refused");

    /* Nobody wrote this: a fault of the host or of ours, never silent. */
    memset(data, 0x5a, PART_BYTES);
    ggml_backend_tensor_get(part[40], data, 0, PART_BYTES);
    CHECK(data[0] == 0 && data[PART_BYTES - 1] == 0, "zeros");
    CHECK(log_count("ggml-moe: ", "of a compute buffer are read") == 1, "not one line about a read of nothing");

    ggml_backend_buffer_free(whole);
    ggml_backend_buffer_free(second);
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    free(data);
}
