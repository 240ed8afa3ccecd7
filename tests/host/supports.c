/*
 * Which operations the device takes over which memory. llama.cpp places every weight by these answers, so a wrong one moves
 * experts to the wrong memory or makes the host abort on a tensor that nobody can run.
 */
#include "host.h"

static ggml_backend_dev_t dev;
static ggml_backend_buffer_type_t plain;
static ggml_backend_buffer_type_t expert;

/* A tensor in a buffer; the buffer stays until the process ends. */
static struct ggml_tensor * in_buffer(struct ggml_tensor * tensor, ggml_backend_buffer_t buffer) {
    tensor->buffer = buffer;
    return tensor;
}

static bool supports(struct ggml_tensor * op) {
    return ggml_backend_dev_supports_op(dev, op);
}

/* MUL_MAT_ID as the loader asks it: 2 experts a token, 512 tokens, activations in no buffer. */
static struct ggml_tensor * mul_mat_id(struct ggml_context * ctx, struct ggml_tensor * weight) {
    struct ggml_tensor * b = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, weight->ne[0], 2, 512);
    return ggml_mul_mat_id(ctx, weight, b, ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 2, 512));
}

/* The loader's probe: a buffer of size 0, which has neither a context nor a base. */
static void probes(struct ggml_context * ctx) {
    ggml_backend_buffer_t none = ggml_backend_buft_alloc_buffer(plain, 0);
    ggml_backend_buffer_t none_expert = ggml_backend_buft_alloc_buffer(expert, 0);
    CHECK(none != NULL && none->context == NULL, "a probe buffer");

    const enum ggml_type types[] = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_MXFP4 };
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        const char * name = ggml_type_name(types[i]);
        struct ggml_tensor * w = in_buffer(ggml_new_tensor_3d(ctx, types[i], 256, 64, 8), none);
        CHECK(!supports(mul_mat_id(ctx, w)), "%s experts must be refused in the default buffer", name);
        CHECK(supports(mul_mat_id(ctx, in_buffer(w, none_expert))), "%s experts must be taken in the expert buffer", name);
        struct ggml_tensor * dense = in_buffer(ggml_new_tensor_2d(ctx, types[i], 256, 64), none);
        struct ggml_tensor * product = ggml_mul_mat(ctx, dense, ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 256, 512));
        CHECK(supports(product), "dense %s weights belong in the default buffer", name);
    }

    /* Sidecars of experts are probed with the op of their experts, but they are one number an expert. */
    struct ggml_tensor * scale = in_buffer(ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 8), none);
    CHECK(supports(mul_mat_id(ctx, scale)), "a 1-D sidecar stays in the default buffer");
    struct ggml_tensor * bias = in_buffer(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 64, 8), none);
    struct ggml_tensor * a = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 64, 2, 512);
    CHECK(supports(ggml_add_id(ctx, a, bias, ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 2, 512))), "expert biases");

    /* What lies in the default buffer already must run here whatever it is: nobody else could run it. */
    struct ggml_context * placed = new_context(1);
    struct ggml_tensor * w = ggml_new_tensor_3d(placed, GGML_TYPE_Q8_0, 256, 64, 8);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(placed, plain);
    CHECK(buffer != NULL, "no buffer");
    for (int usage = GGML_BACKEND_BUFFER_USAGE_ANY; usage <= GGML_BACKEND_BUFFER_USAGE_COMPUTE; usage++) {
        ggml_backend_buffer_set_usage(buffer, (enum ggml_backend_buffer_usage) usage);
        CHECK(supports(mul_mat_id(ctx, w)), "MUL_MAT_ID in a default buffer of usage %d", usage);
    }
    ggml_backend_buffer_free(buffer);
    ggml_free(placed);
    ggml_backend_buffer_free(none);
    ggml_backend_buffer_free(none_expert);
}

/* Operations over a tensor in the expert buffer, as the scheduler asks them after loading. */
static void over_experts(struct ggml_context * ctx, struct ggml_tensor * w, const char * what) {
    CHECK(supports(mul_mat_id(ctx, w)), "MUL_MAT_ID over %s", what);

    CHECK(supports(ggml_reshape_2d(ctx, w, w->ne[0], w->ne[1] * w->ne[2])), "RESHAPE over %s", what);
    CHECK(supports(ggml_view_1d(ctx, w, 256, 0)), "VIEW over %s", what);
    CHECK(supports(ggml_permute(ctx, w, 0, 2, 1, 3)), "PERMUTE over %s", what);
    CHECK(supports(ggml_transpose(ctx, w)), "TRANSPOSE over %s", what);
    CHECK(supports(w), "NONE over %s", what);

    struct ggml_tensor * rows = ggml_new_tensor_3d(ctx, GGML_TYPE_I32, 4, w->ne[2], 1);
    struct ggml_tensor * same = ggml_new_tensor(ctx, GGML_TYPE_F32, 4, w->ne);
    CHECK(!supports(ggml_get_rows(ctx, w, rows)), "GET_ROWS over %s", what);
    CHECK(!supports(ggml_cpy(ctx, w, same)), "CPY from %s", what);
    CHECK(!supports(ggml_cpy(ctx, same, w)), "CPY into %s", what);
    CHECK(!supports(ggml_mul_mat(ctx, w, ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 256, 4, w->ne[2]))), "MUL_MAT over %s", what);
    if (w->type == GGML_TYPE_F32) {
        CHECK(!supports(ggml_add(ctx, same, w)), "ADD over %s", what);
        CHECK(!supports(ggml_mul(ctx, w, same)), "MUL over %s", what);
        CHECK(!supports(ggml_repeat_4d(ctx, w, 256, w->ne[1], w->ne[2], 2)), "REPEAT over %s", what);
        CHECK(!supports(ggml_cont(ctx, ggml_transpose(ctx, w))), "CONT over %s", what);
        CHECK(!supports(ggml_scale(ctx, w, 2.0f)), "SCALE over %s", what);
    }
}

void case_supports(void) {
    ggml_backend_reg_t reg = load_plugin();
    dev = device_number(reg, 0);
    plain = ggml_backend_dev_buffer_type(dev);
    expert = expert_buffer_type(reg, dev);
    struct ggml_context * ctx = new_context(256);
    probes(ctx);

    const enum ggml_type types[] = { GGML_TYPE_F32, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K };
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        struct ggml_context * weights = new_context(4);
        struct ggml_tensor * w = ggml_new_tensor_3d(weights, types[i], 256, 64, 8);
        struct ggml_tensor * bound = ggml_view_3d(weights, w, 256, 64, 4, w->nb[1], w->nb[2], 0);
        ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(weights, expert);
        CHECK(buffer != NULL, "no expert buffer");
        over_experts(ctx, w, "an expert tensor");
        over_experts(ctx, bound, "a placed view of an expert tensor");
        /* A view made by the graph has no buffer of its own, only the tensor that it looks into. */
        over_experts(ctx, ggml_view_3d(ctx, w, 256, 64, 2, w->nb[1], w->nb[2], 2 * w->nb[2]), "a view in a graph");
        ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        over_experts(ctx, w, "an expert tensor in a buffer of weights");
        ggml_backend_buffer_free(buffer);
        ggml_free(weights);
    }

    /* Plain operations over nothing in particular go where the inner device can run them. */
    struct ggml_tensor * x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 256, 4);
    CHECK(supports(ggml_add(ctx, x, x)), "ADD");
    CHECK(supports(ggml_soft_max(ctx, x)), "SOFT_MAX");
    CHECK(supports(ggml_argsort(ctx, x, GGML_SORT_ORDER_ASC)), "ARGSORT");
    ggml_free(ctx);
}
