/* Memory: what goes into a buffer comes out of it, by every way that the host has, and paddings are zero. */
#include "host.h"

static const enum ggml_type TYPES[] = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_I32, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K };
#define N_TYPES ((int) (sizeof(TYPES) / sizeof(TYPES[0])))

/* One tensor of each type in one buffer. */
struct store {
    struct ggml_context * ctx;
    ggml_backend_buffer_t buffer;
    ggml_backend_t backend; /* in case_copies: one of the buffer's device */
    struct ggml_tensor * tensor[N_TYPES];
};

static struct store make_store(ggml_backend_buffer_type_t buft) {
    struct store store = { .ctx = new_context(N_TYPES) };
    for (int i = 0; i < N_TYPES; i++) {
        store.tensor[i] = ggml_new_tensor_3d(store.ctx, TYPES[i], 256, 6, 3);
        ggml_format_name(store.tensor[i], "blk.%d.ffn_up_exps.weight", i);
    }
    store.buffer = ggml_backend_alloc_ctx_tensors_from_buft(store.ctx, buft);
    CHECK(store.buffer != NULL, "no %s buffer", ggml_backend_buft_name(buft));
    CHECK(ggml_backend_buffer_get_type(store.buffer) == buft, "the buffer has another type");
    return store;
}

static void free_store(struct store * store) {
    ggml_backend_buffer_free(store->buffer);
    ggml_free(store->ctx);
}

static void expect(const struct ggml_tensor * tensor, const void * wanted, const char * after) {
    const size_t size = ggml_nbytes(tensor);
    uint8_t * got = get_memory(size);
    memset(got, 0x5a, size);
    ggml_backend_tensor_get(tensor, got, 0, size);
    CHECK(memcmp(got, wanted, size) == 0, "%s after %s", ggml_type_name(tensor->type), after);
    free(got);
}

static void round_trips(struct ggml_tensor * t, uint32_t seed) {
    const size_t size = ggml_nbytes(t);
    const size_t row = t->nb[1];
    uint8_t * data = get_memory(size);
    uint8_t * model = get_memory(size); /* what the tensor must hold */
    fill(data, size, seed);

    ggml_backend_tensor_set(t, data, 0, size);
    memcpy(model, data, size);
    expect(t, model, "a whole set");

    fill(data, size, seed + 1);
    ggml_backend_tensor_set(t, data, row + 2, row);
    memcpy(model + row + 2, data, row);
    expect(t, model, "a set in the middle");
    ggml_backend_tensor_set(t, data, size - 1, 1);
    model[size - 1] = data[0];
    expect(t, model, "a set of the last byte");

    ggml_backend_tensor_memset(t, 0xc3, row, 2 * row);
    memset(model + row, 0xc3, 2 * row);
    expect(t, model, "a memset");

#if HOST_HAS_ROWS
    /* Two columns of bytes: 5 pieces of 8 bytes, one a row, packed in the host's memory with a stride of 11. */
    ggml_backend_tensor_set_2d(t, data, 4, 8, 5, row, 11);
    for (int i = 0; i < 5; i++) {
        memcpy(model + 4 + i * row, data + i * 11, 8);
    }
    expect(t, model, "a 2-D set");
    uint8_t piece[5 * 11];
    memset(piece, 0, sizeof(piece));
    ggml_backend_tensor_get_2d(t, piece, 4, 8, 5, row, 11);
    for (int i = 0; i < 5; i++) {
        CHECK(memcmp(piece + i * 11, data + i * 11, 8) == 0, "a 2-D get, piece %d", i);
    }
#endif
    uint8_t part[16];
    ggml_backend_tensor_get(t, part, row, sizeof(part));
    CHECK(memcmp(part, model + row, sizeof(part)) == 0, "a get in the middle");
    free(data);
    free(model);
}

/* What the inner device wants behind a quantized tensor, and `pad` bytes more, lies there and is zero: kernels read it. */
static void check_pads(const struct store * store, size_t pad) {
    ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(store->buffer);
    ggml_backend_buffer_type_t inner = ggml_backend_dev_buffer_type(inner_device());
    /* A tensor of experts may move by that much, to show pages of the model's file. */
    const size_t room = strstr(ggml_backend_buft_name(buft), "Experts") ? 3 * 4096 : 0;
    for (int i = 0; i < N_TYPES; i++) {
        const struct ggml_tensor * t = store->tensor[i];
        const size_t size = ggml_nbytes(t);
        const size_t padded = ggml_backend_buft_get_alloc_size(buft, t);
        const size_t wanted = ggml_backend_buft_get_alloc_size(inner, t) + (ggml_is_quantized(t->type) ? pad : 0) + room;
        CHECK(padded == wanted, "%s: %zu bytes, not %zu, for %zu", ggml_type_name(t->type), padded, wanted, size);
        /* Even FAKE0's memory is the process's own, so the bytes can be looked at. */
        for (size_t at = size; at < padded; at++) {
            CHECK(((const uint8_t *) t->data)[at] == 0, "%s: padding byte %zu is not zero", ggml_type_name(t->type), at - size);
        }
    }
}

static void check_type(ggml_backend_buffer_type_t buft, size_t pad) {
    struct store store = make_store(buft);
    const size_t alignment = ggml_backend_buft_get_alignment(buft);
    for (int i = 0; i < N_TYPES; i++) {
        CHECK((uintptr_t) store.tensor[i]->data % alignment == 0, "tensor %d is not aligned", i);
    }
    check_pads(&store, pad);
    for (int i = 0; i < N_TYPES; i++) {
        round_trips(store.tensor[i], 100 + i);
    }
    check_pads(&store, pad); /* no write went past its tensor */

    ggml_backend_buffer_clear(store.buffer, 0x77);
    for (int i = 0; i < N_TYPES; i++) {
        const size_t size = ggml_nbytes(store.tensor[i]);
        uint8_t * wanted = get_memory(size);
        memset(wanted, 0x77, size);
        expect(store.tensor[i], wanted, "a clear");
        free(wanted);
    }
    ggml_backend_buffer_clear(store.buffer, 0);
    check_pads(&store, pad);

    /* A reset forgets what the buffer knew of its tensors; they may be set up again. */
    ggml_backend_buffer_reset(store.buffer);
    for (int i = 0; i < N_TYPES; i++) {
        CHECK(ggml_backend_buffer_init_tensor(store.buffer, store.tensor[i]) == GGML_STATUS_SUCCESS, "init after reset");
        round_trips(store.tensor[i], 200 + i);
    }
    ggml_backend_buffer_set_usage(store.buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    CHECK(ggml_backend_buffer_get_usage(store.buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS, "usage");
    free_store(&store);

    /* More than any machine has. */
    const int errors = log_count("ggml-moe: ", "failed");
    CHECK(ggml_backend_buft_alloc_buffer(buft, (size_t) 1 << 60) == NULL, "an exbibyte was allocated");
    CHECK(log_count("ggml-moe: ", "failed") == errors + 1, "not one line about a failed allocation");
}

void case_buffers(void) {
    ggml_backend_reg_t reg = load_plugin();
    ggml_backend_dev_t dev = device_number(reg, 0);
    const char * pad = getenv("MOE_HOST_PAD"); /* the same number as debug-pad */
    check_type(ggml_backend_dev_buffer_type(dev), pad != NULL ? strtoul(pad, NULL, 10) : 0);
    check_type(expert_buffer_type(reg, dev), 0);
}

/* One copy each way between two stores, blocking and through their backends. */
static void copy_all(const struct store * from, const struct store * to, uint32_t seed) {
    for (int i = 0; i < N_TYPES; i++) {
        struct ggml_tensor * a = from->tensor[i];
        struct ggml_tensor * b = to->tensor[i];
        const size_t size = ggml_nbytes(a);
        uint8_t * data = get_memory(size);
        uint8_t * got = get_memory(size);
        fill(data, size, seed);
        ggml_backend_tensor_set(a, data, 0, size);
        ggml_backend_tensor_copy(a, b);
        expect(b, data, "a copy");

        fill(data, size, seed + 1);
        ggml_backend_tensor_set_async(from->backend, a, data, 0, size);
        ggml_backend_tensor_copy_async(from->backend, to->backend, a, b);
        ggml_backend_tensor_get_async(to->backend, b, got, 0, size);
        ggml_backend_synchronize(to->backend);
        CHECK(memcmp(got, data, size) == 0, "an asynchronous set, copy and get of %s", ggml_type_name(a->type));

#if HOST_HAS_ROWS
        fill(data, size, seed + 2);
        ggml_backend_tensor_set_2d_async(from->backend, a, data, 4, 8, 3, a->nb[1], 11);
        ggml_backend_synchronize(from->backend);
        ggml_backend_tensor_get_2d_async(from->backend, a, got, 4, 8, 3, a->nb[1], 11);
        ggml_backend_synchronize(from->backend);
        for (int k = 0; k < 3; k++) {
            CHECK(memcmp(got + 11 * k, data + 11 * k, 8) == 0, "an asynchronous 2-D set and get");
        }
#endif
        free(got);
        free(data);
    }
}

void case_copies(void) {
    ggml_backend_reg_t reg = load_plugin();
    struct store stores[8];
    int n = 0;
    for (size_t i = 0; i < ggml_backend_reg_dev_count(reg); i++) {
        ggml_backend_dev_t dev = device_number(reg, i);
        ggml_backend_t backend = ggml_backend_dev_init(dev, NULL);
        CHECK(backend != NULL, "no backend");
        for (int k = 0; k < 3; k++) {
            stores[n] = make_store(k < 2 ? ggml_backend_dev_buffer_type(dev) : expert_buffer_type(reg, dev));
            stores[n++].backend = backend;
        }
    }
    stores[n] = make_store(ggml_backend_dev_buffer_type(cpu_device()));
    stores[n++].backend = ggml_backend_dev_init(cpu_device(), NULL);

    for (int from = 0; from < n; from++) {
        for (int to = 0; to < n; to++) {
            if (from != to) {
                copy_all(&stores[from], &stores[to], 1000 + 100 * from + 10 * to);
            }
        }
    }

    /* A view has no buffer of its own: reads and writes through it land in the tensor that it looks into. */
    struct ggml_context * ctx = new_context(2);
    struct ggml_tensor * t = stores[0].tensor[0];
    struct ggml_tensor * view = ggml_view_2d(ctx, t, 256, 2, t->nb[1], 3 * t->nb[1]);
    CHECK(ggml_backend_view_init(view) == GGML_STATUS_SUCCESS, "a view");
    float row[256], got[256];
    fill(row, sizeof(row), 77);
    ggml_backend_tensor_set(view, row, 0, sizeof(row));
    ggml_backend_tensor_get(t, got, 3 * t->nb[1], sizeof(got));
    CHECK(memcmp(row, got, sizeof(row)) == 0, "a set through a view");
    ggml_free(ctx);

    for (int i = 0; i < n; i++) {
        if (i + 1 == n || stores[i].backend != stores[i + 1].backend) {
            ggml_backend_free(stores[i].backend);
        }
        free_store(&stores[i]);
    }
}
