#include "moe.h"

#include <math.h>

static struct ggml_tensor * named(struct ggml_tensor * tensor, int layer, const char * name) {
    return ggml_format_name(tensor, "blk.%d.%s", layer, name);
}

/* How many rows of a tensor are made; the others are the same in turn. Quantizing all of them would take longer than everything
 * else. A prime, so that no two experts have the same row at the same place. */
#define DISTINCT_ROWS 61

/* Weights of the size that keeps activations near 1, in the tensor's own format. */
static void make_weights(struct ggml_tensor * t, uint32_t seed) {
    const int64_t rows = ggml_nrows(t), distinct = rows < DISTINCT_ROWS ? rows : DISTINCT_ROWS;
    const int64_t n = distinct * t->ne[0];
    uint32_t * noise = get_memory(n * sizeof(uint32_t));
    float * values = get_memory(n * sizeof(float));
    fill(noise, n * sizeof(uint32_t), seed);
    const float scale = 2.0f / sqrtf((float) t->ne[0]);
    for (int64_t i = 0; i < n; i++) {
        values[i] = scale * ((float) (noise[i] >> 8) / (float) (1 << 23) - 1.0f);
    }
    const size_t written = ggml_quantize_chunk(t->type, values, t->data, 0, distinct, t->ne[0], NULL);
    CHECK(written == distinct * t->nb[1], "%zu bytes of %s", written, t->name);
    for (int64_t i = distinct; i < rows; i++) {
        memcpy((char *) t->data + i * t->nb[1], (char *) t->data + i % distinct * t->nb[1], t->nb[1]);
    }
    free(values);
    free(noise);
}

static void declare(struct moe_model * model, enum ggml_type type, int l) {
    struct moe_layer * w = &model->layer[l];
    struct ggml_context * dense = model->ctx[2 * l] = new_context(16);
    struct ggml_context * expert = model->ctx[2 * l + 1] = new_context(16);
    w->norm = named(ggml_new_tensor_1d(dense, GGML_TYPE_F32, MOE_EMBD), l, "ffn_norm.weight");
    w->router = named(ggml_new_tensor_2d(dense, GGML_TYPE_F32, MOE_EMBD, MOE_EXPERTS), l, "ffn_gate_inp.weight");
    if (l % 2 == 0) {
        w->shared_gate = named(ggml_new_tensor_2d(dense, type, MOE_EMBD, MOE_FF), l, "ffn_gate_shexp.weight");
        w->shared_up = named(ggml_new_tensor_2d(dense, type, MOE_EMBD, MOE_FF), l, "ffn_up_shexp.weight");
        w->shared_down = named(ggml_new_tensor_2d(dense, type, MOE_FF, MOE_EMBD), l, "ffn_down_shexp.weight");
        w->gate = named(ggml_new_tensor_3d(expert, type, MOE_EMBD, MOE_FF, MOE_EXPERTS), l, "ffn_gate_exps.weight");
        w->up = named(ggml_new_tensor_3d(expert, type, MOE_EMBD, MOE_FF, MOE_EXPERTS), l, "ffn_up_exps.weight");
    } else {
        struct ggml_tensor * bias = ggml_new_tensor_2d(dense, GGML_TYPE_F32, 2 * MOE_FF, MOE_EXPERTS);
        struct ggml_tensor * both = ggml_new_tensor_3d(expert, type, MOE_EMBD, 2 * MOE_FF, MOE_EXPERTS);
        w->gate_up_bias = named(bias, l, "ffn_gate_up_exps.bias");
        w->down_bias = named(ggml_new_tensor_2d(dense, GGML_TYPE_F32, MOE_EMBD, MOE_EXPERTS), l, "ffn_down_exps.bias");
        w->gate_up = named(both, l, "ffn_gate_up_exps.weight");
    }
    w->down = named(ggml_new_tensor_3d(expert, type, MOE_FF, MOE_EMBD, MOE_EXPERTS), l, "ffn_down_exps.weight");
}

/* Allocates what was declared. */
static bool place_model(struct moe_model * model, enum ggml_type type, const struct moe_place place[MOE_LAYERS]) {
    memset(model, 0, sizeof(*model));
    for (int l = 0; l < MOE_LAYERS; l++) {
        declare(model, type, l);
    }
    for (int i = 0; i < 2 * MOE_LAYERS; i++) {
        const struct moe_place * at = &place[i / 2];
        model->buffer[i] = ggml_backend_alloc_ctx_tensors_from_buft(model->ctx[i], i % 2 == 0 ? at->dense : at->expert);
        if (model->buffer[i] == NULL) {
            moe_model_free(model);
            return false;
        }
        ggml_backend_buffer_set_usage(model->buffer[i], GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }
    return true;
}

/* The model in the stock CPU's memory, made once for each type and kept. */
static const struct moe_model * cpu_model(enum ggml_type type) {
    static struct moe_model models[GGML_TYPE_COUNT];
    struct moe_model * model = &models[type];
    if (model->ctx[0] == NULL) {
        ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(cpu_device());
        struct moe_place place[MOE_LAYERS];
        moe_place_all(place, buft, buft);
        CHECK(place_model(model, type, place), "the reference model");
        for (int i = 0; i < 2 * MOE_LAYERS; i++) {
            uint32_t seed = 1 + 100 * i;
            struct ggml_tensor * t = ggml_get_first_tensor(model->ctx[i]);
            for (; t != NULL; t = ggml_get_next_tensor(model->ctx[i], t)) {
                make_weights(t, seed++);
            }
        }
    }
    return model;
}

bool moe_model_try(struct moe_model * model, enum ggml_type type, const struct moe_place place[MOE_LAYERS]) {
    if (!place_model(model, type, place)) {
        return false;
    }
    const struct moe_model * from = cpu_model(type);
    for (int i = 0; i < 2 * MOE_LAYERS; i++) {
        struct ggml_tensor * t = ggml_get_first_tensor(model->ctx[i]);
        struct ggml_tensor * s = ggml_get_first_tensor(from->ctx[i]);
        for (; t != NULL; t = ggml_get_next_tensor(model->ctx[i], t), s = ggml_get_next_tensor(from->ctx[i], s)) {
            ggml_backend_tensor_set(t, s->data, 0, ggml_nbytes(t));
        }
    }
    return true;
}

void moe_model_free(struct moe_model * model) {
    for (int i = 0; i < 2 * MOE_LAYERS; i++) {
        ggml_backend_buffer_free(model->buffer[i]);
        ggml_free(model->ctx[i]);
    }
}

void moe_place_all(struct moe_place place[MOE_LAYERS], ggml_backend_buffer_type_t dense, ggml_backend_buffer_type_t expert) {
    for (int l = 0; l < MOE_LAYERS; l++) {
        place[l] = (struct moe_place) { dense, expert };
    }
}

/* One layer: norm, routing, routed experts with the shared expert's first half between theirs (where the CUDA backend moves
 * it), weighted sum, residual. */
static struct ggml_tensor * build_layer(const struct moe_graph * g, const struct moe_layer * w, struct ggml_tensor * x,
                                        int n_used) {
    struct ggml_context * ctx = g->ctx;
    struct ggml_tensor * cur = ggml_mul(ctx, ggml_rms_norm(ctx, x, 1e-5f), w->norm);
    struct ggml_tensor * probs = ggml_soft_max(ctx, ggml_mul_mat(ctx, w->router, cur));
    /* A view whose rows are as far apart as all the experts are many. */
    struct ggml_tensor * sorted = ggml_argsort(ctx, probs, GGML_SORT_ORDER_DESC);
    struct ggml_tensor * ids = ggml_view_2d(ctx, sorted, n_used, g->n_tokens, sorted->nb[1], 0);
    struct ggml_tensor * weights = ggml_get_rows(ctx, ggml_reshape_3d(ctx, probs, 1, MOE_EXPERTS, g->n_tokens), ids);
    ggml_build_forward_expand(g->graph, weights);

    struct ggml_tensor * rows = ggml_reshape_3d(ctx, cur, MOE_EMBD, 1, g->n_tokens);
    struct ggml_tensor * gate, * up;
    if (w->gate_up != NULL) {
        struct ggml_tensor * both = ggml_mul_mat_id(ctx, w->gate_up, rows, ids);
        both = ggml_add_id(ctx, both, w->gate_up_bias, ids);
        gate = ggml_view_3d(ctx, both, MOE_FF, n_used, g->n_tokens, both->nb[1], both->nb[2], 0);
        up = ggml_view_3d(ctx, both, MOE_FF, n_used, g->n_tokens, both->nb[1], both->nb[2], MOE_FF * both->nb[0]);
    } else {
        up = ggml_mul_mat_id(ctx, w->up, rows, ids);
        gate = ggml_mul_mat_id(ctx, w->gate, rows, ids);
    }
    struct ggml_tensor * active = ggml_swiglu_split(ctx, gate, up);
    ggml_build_forward_expand(g->graph, active);

    struct ggml_tensor * shared = NULL;
    if (w->shared_gate != NULL) {
        shared = ggml_swiglu_split(ctx, ggml_mul_mat(ctx, w->shared_gate, cur), ggml_mul_mat(ctx, w->shared_up, cur));
        ggml_build_forward_expand(g->graph, shared);
    }

    struct ggml_tensor * routed = ggml_mul_mat_id(ctx, w->down, active, ids);
    if (w->down_bias != NULL) {
        routed = ggml_add_id(ctx, routed, w->down_bias, ids);
    }
    routed = ggml_mul(ctx, routed, weights);
    ggml_build_forward_expand(g->graph, routed);
    struct ggml_tensor * sum = NULL;
    for (int i = 0; i < n_used; i++) {
        struct ggml_tensor * one = ggml_view_2d(ctx, routed, MOE_EMBD, g->n_tokens, routed->nb[2], i * routed->nb[1]);
        sum = sum == NULL ? one : ggml_add(ctx, sum, one);
    }
    if (shared != NULL) {
        sum = ggml_add(ctx, sum, ggml_mul_mat(ctx, w->shared_down, shared));
    }
    return ggml_add(ctx, sum, x);
}

struct moe_graph moe_graph_new(const struct moe_model * model, int n_tokens, int n_used) {
    struct moe_graph g = { .ctx = new_context(512), .n_tokens = n_tokens };
    g.graph = ggml_new_graph(g.ctx);
    g.input = ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, MOE_EMBD, n_tokens);
    ggml_set_name(g.input, "input");
    ggml_set_input(g.input);
    struct ggml_tensor * x = g.input;
    for (int l = 0; l < MOE_LAYERS; l++) {
        x = build_layer(&g, &model->layer[l], x, n_used);
    }
    g.output = x;
    ggml_set_name(g.output, "output");
    ggml_set_output(g.output);
    ggml_build_forward_expand(g.graph, g.output);
    return g;
}

void moe_graph_free(struct moe_graph * graph) {
    ggml_free(graph->ctx);
}

void moe_input(const struct moe_graph * graph, uint32_t seed) {
    const int64_t n = ggml_nelements(graph->input);
    uint32_t * noise = get_memory(n * sizeof(uint32_t));
    float * values = get_memory(n * sizeof(float));
    fill(noise, n * sizeof(uint32_t), 7777 + seed);
    for (int64_t i = 0; i < n; i++) {
        values[i] = (float) (noise[i] >> 8) / (float) (1 << 23) - 1.0f;
    }
    ggml_backend_tensor_set(graph->input, values, 0, n * sizeof(float));
    free(values);
    free(noise);
}

float * moe_output(const struct moe_graph * graph) {
    float * values = get_memory(ggml_nbytes(graph->output));
    ggml_backend_tensor_get(graph->output, values, 0, ggml_nbytes(graph->output));
    return values;
}

float * moe_run(ggml_backend_t backend, ggml_backend_buffer_type_t compute, const struct moe_model * model, int n_tokens,
                int n_used, uint32_t seed, enum ggml_status * status) {
    struct moe_graph graph = moe_graph_new(model, n_tokens, n_used);
    ggml_gallocr_t allocator = ggml_gallocr_new(compute);
    float * output = NULL;
    *status = GGML_STATUS_ALLOC_FAILED;
    if (ggml_gallocr_alloc_graph(allocator, graph.graph)) {
        moe_input(&graph, seed);
        *status = ggml_backend_graph_compute(backend, graph.graph);
        output = *status == GGML_STATUS_SUCCESS ? moe_output(&graph) : NULL;
    }
    ggml_gallocr_free(allocator);
    moe_graph_free(&graph);
    return output;
}

float * moe_reference(enum ggml_type type, int n_tokens, int n_used, int n_threads, uint32_t seed) {
    ggml_backend_t cpu = ggml_backend_dev_init(cpu_device(), NULL);
    set_threads(cpu, n_threads);
    enum ggml_status status;
    float * output = moe_run(cpu, ggml_backend_dev_buffer_type(cpu_device()), cpu_model(type), n_tokens, n_used, seed, &status);
    CHECK(output != NULL, "the reference run ended with %d", status);
    ggml_backend_free(cpu);

    float largest = 0.0f;
    for (int i = 0; i < MOE_EMBD * n_tokens; i++) {
        CHECK(isfinite(output[i]), "the reference holds %f", output[i]);
        largest = fmaxf(largest, fabsf(output[i]));
    }
    CHECK(largest > 0.1f && largest < 1e4f, "the reference's largest value is %f", largest);
    return output;
}

void moe_same(const float * got, const float * wanted, int n_tokens, const char * what) {
    for (int i = 0; i < MOE_EMBD * n_tokens; i++) {
        CHECK(memcmp(&got[i], &wanted[i], sizeof(float)) == 0, "%s: value %d of %d is %.9g, not %.9g", what, i,
              MOE_EMBD * n_tokens, got[i], wanted[i]);
    }
}
