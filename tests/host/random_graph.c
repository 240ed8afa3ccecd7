/*
 * Builds random graphs. Every step makes a few tensors out of what the steps before made; a tensor gets into the graph at once or
 * later, so that blocks are interleaved with each other and with foreign nodes. Values stay bounded, and nothing is read before
 * it was written.
 */
#include "random.h"

#if HOST_HAS_RANDOM

#include <math.h>

const int expert_counts[N_COUNTS] = { 1, 5, 8 };
static const enum ggml_type kinds[N_KINDS] = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q4_0, GGML_TYPE_Q8_0 };

#define MAX_VALUES   160
#define MAX_ROUTINGS 24
#define MAX_PENDING  16

/* Which experts each token uses. `probs` has a row of all experts for each token. */
struct routing {
    struct ggml_tensor * ids, * probs;
    int count; /* index of the number of experts */
    int used;
};

/* Values of tokens ([width, tokens]), or of pairs of token and expert ([width, used, tokens]) with these ids. */
struct value {
    struct ggml_tensor * tensor;
    const struct routing * routing; /* NULL: of tokens */
};

struct builder {
    uint64_t state;
    const struct pool * pool;
    struct random_graph * g;
    struct ggml_context * ctx;
    bool scheduled;
    int n_tokens;
    struct value values[MAX_VALUES];
    int n_values;
    struct routing routings[MAX_ROUTINGS];
    int n_routings;
    struct ggml_tensor * pending[MAX_PENDING];
    int n_pending;
};

uint32_t draw(uint64_t * state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (uint32_t) ((z ^ (z >> 31)) >> 32);
}

static int pick(struct builder * b, int n) {
    return below(&b->state, n);
}

static bool chance(struct builder * b, int percent) {
    return pick(b, 100) < percent;
}

/* The pool. */

static void weights(struct ggml_tensor * t, uint64_t seed) {
    const int64_t n = ggml_nelements(t);
    float * values = get_memory(n * sizeof(float));
    uint8_t * bytes = get_memory(ggml_nbytes(t));
    const float scale = 2.0f / sqrtf((float) t->ne[0]);
    for (int64_t i = 0; i < n; i++) {
        values[i] = scale * ((float) (draw(&seed) >> 8) / (float) (1 << 23) - 1.0f);
    }
    const size_t written = ggml_quantize_chunk(t->type, values, bytes, 0, n / t->ne[0], t->ne[0], NULL);
    CHECK(written == ggml_nbytes(t), "%zu bytes of weights", written);
    ggml_backend_tensor_set(t, bytes, 0, written);
    free(bytes);
    free(values);
}

void pool_new(struct pool * pool, ggml_backend_buffer_type_t dense, ggml_backend_buffer_type_t expert) {
    for (int i = 0; i < 2; i++) {
        pool->ctx[i] = new_context(128);
    }
    for (int c = 0; c < N_COUNTS; c++) {
        const int experts = expert_counts[c];
        for (int k = 0; k < N_KINDS; k++) {
            for (int s = 0; s < N_SHAPES; s++) {
                const int in = s == EXPERT_DOWN ? NARROW : WIDE, out = s == EXPERT_UP || s == EXPERT_GATE ? NARROW : WIDE;
                pool->expert[k][c][s] = ggml_new_tensor_3d(pool->ctx[1], kinds[k], in, out, experts);
                ggml_format_name(pool->expert[k][c][s], "blk.%d.ffn_%d_exps.weight", c * N_KINDS + k, s);
            }
        }
        pool->router[c] = ggml_new_tensor_2d(pool->ctx[0], GGML_TYPE_F32, WIDE, experts);
        pool->bias[c][0] = ggml_new_tensor_2d(pool->ctx[0], GGML_TYPE_F32, WIDE, experts);
        pool->bias[c][1] = ggml_new_tensor_2d(pool->ctx[0], GGML_TYPE_F32, NARROW, experts);
    }
    pool->dense[0] = ggml_new_tensor_2d(pool->ctx[0], GGML_TYPE_Q8_0, WIDE, WIDE);
    pool->dense[1] = ggml_new_tensor_2d(pool->ctx[0], GGML_TYPE_F32, NARROW, WIDE);
    pool->norm = ggml_new_tensor_1d(pool->ctx[0], GGML_TYPE_F32, WIDE);
    uint64_t seed = 1;
    for (int i = 0; i < 2; i++) {
        pool->buffer[i] = ggml_backend_alloc_ctx_tensors_from_buft(pool->ctx[i], i == 0 ? dense : expert);
        CHECK(pool->buffer[i] != NULL, "no memory for the weights");
        ggml_backend_buffer_set_usage(pool->buffer[i], GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        for (struct ggml_tensor * t = ggml_get_first_tensor(pool->ctx[i]); t != NULL; t = ggml_get_next_tensor(pool->ctx[i], t)) {
            weights(t, seed += 1000);
        }
    }
}

void pool_free(struct pool * pool) {
    for (int i = 0; i < 2; i++) {
        ggml_backend_buffer_free(pool->buffer[i]);
        ggml_free(pool->ctx[i]);
    }
}

/* Bookkeeping. */

static struct ggml_tensor * input(struct builder * b, enum ggml_type type, int n0, int n1, int n2, int limit) {
    struct ggml_tensor * t = ggml_new_tensor_3d(b->ctx, type, n0, n1, n2);
    CHECK(b->g->n_inputs < MAX_INPUTS, "too many inputs");
    ggml_format_name(t, "input %d", b->g->n_inputs);
    ggml_set_input(t);
    b->g->inputs[b->g->n_inputs++] = (struct random_input) { t, limit };
    return t;
}

static void expand(struct builder * b, int at) {
    ggml_build_forward_expand(b->g->graph, b->pending[at]);
    b->pending[at] = b->pending[--b->n_pending];
}

/* Gets into the graph now, or some steps later. */
static void enter(struct builder * b, struct ggml_tensor * t) {
    if (b->n_pending == MAX_PENDING) {
        expand(b, pick(b, MAX_PENDING));
    }
    b->pending[b->n_pending++] = t;
    while (b->n_pending > 0 && chance(b, 40)) {
        expand(b, pick(b, b->n_pending));
    }
}

static struct ggml_tensor * keep(struct builder * b, struct ggml_tensor * t, const struct routing * routing) {
    const int at = b->n_values < MAX_VALUES ? b->n_values++ : pick(b, MAX_VALUES);
    b->values[at] = (struct value) { t, routing };
    enter(b, t);
    return t;
}

/* A value of tokens, or of pairs; the latest ones more often. NULL if there is none that fits. */
static struct value * any(struct builder * b, bool pairs, int width, const struct routing * routing) {
    struct value * found = NULL;
    for (int i = 0, seen = 0; i < b->n_values; i++) {
        struct value * v = &b->values[i];
        const bool fits = (v->routing != NULL) == pairs && (width == 0 || v->tensor->ne[0] == width) &&
                          (routing == NULL || v->routing == routing);
        if (fits && (seen++ == 0 || chance(b, 35))) {
            found = v;
        }
    }
    return found;
}

static struct ggml_tensor * tokens(struct builder * b) {
    return any(b, false, WIDE, NULL)->tensor; /* the first step makes one */
}

static struct ggml_tensor * solid(struct builder * b, struct ggml_tensor * t) {
    return ggml_is_contiguous(t) ? t : ggml_cont(b->ctx, t);
}

/* Of all the experts of a token. */
static struct ggml_tensor * sum(struct builder * b, struct ggml_tensor * pairs) {
    struct ggml_tensor * total = NULL;
    for (int i = 0; i < pairs->ne[1]; i++) {
        struct ggml_tensor * one = ggml_view_2d(b->ctx, pairs, pairs->ne[0], b->n_tokens, pairs->nb[2], i * pairs->nb[1]);
        total = total == NULL ? one : ggml_add(b->ctx, total, one);
    }
    return pairs->ne[0] == WIDE ? total : ggml_mul_mat(b->ctx, b->pool->dense[1], total);
}

/* Routing. */

static struct routing * add_routing(struct builder * b, struct ggml_tensor * ids, struct ggml_tensor * probs, int count) {
    if (b->n_routings == MAX_ROUTINGS) {
        return &b->routings[MAX_ROUTINGS - 1]; /* what there is has to do */
    }
    b->routings[b->n_routings] = (struct routing) { ids, probs, count, (int) ids->ne[0] };
    if (chance(b, 50)) {
        enter(b, ids);
    }
    return &b->routings[b->n_routings++];
}

static const struct routing * new_routing(struct builder * b) {
    struct ggml_context * ctx = b->ctx;
    const int T = b->n_tokens, count = pick(b, N_COUNTS), E = expert_counts[count], used = 1 + pick(b, E < 4 ? E : 4);
    struct ggml_tensor * probs = ggml_soft_max(ctx, ggml_mul_mat(ctx, b->pool->router[count], solid(b, tokens(b))));
    struct ggml_tensor * ids, * base, * sorted;
    switch (pick(b, 9)) {
        case 0:
        case 1:
            ids = ggml_argsort_top_k(ctx, probs, used);
            break;
        case 2:
            ids = ggml_top_k(ctx, probs, used);
            break;
        case 3: /* not the first ones, and perhaps a copy of them */
            sorted = ggml_argsort(ctx, probs, GGML_SORT_ORDER_ASC);
            ids = ggml_view_2d(ctx, sorted, used, T, sorted->nb[1], pick(b, E - used + 1) * sizeof(int32_t));
            ids = chance(b, 50) ? ids : ggml_cont(ctx, ids);
            break;
        case 4: /* given by the host, a view of a view */
            base = input(b, GGML_TYPE_I32, used + 2, T, 1, E);
            ids = ggml_view_2d(ctx, base, used + 1, T, base->nb[1], sizeof(int32_t));
            ids = ggml_view_2d(ctx, ids, used, T, base->nb[1], pick(b, 2) * sizeof(int32_t));
            break;
        case 5: /* looked up in a table */
            base = input(b, GGML_TYPE_I32, used, 11, 1, E);
            ids = ggml_get_rows(ctx, base, ggml_reshape_1d(ctx, input(b, GGML_TYPE_I32, T, 1, 1, 11), T));
            break;
        case 6: /* computed as floats */
            base = ggml_cont(ctx, ggml_view_2d(ctx, probs, used, T, probs->nb[1], 0));
            ids = ggml_cast(ctx, ggml_clamp(ctx, ggml_scale(ctx, base, (float) E), 0.0f, (float) (E - 1)), GGML_TYPE_I32);
            break;
        case 7: /* one token's ids lie far apart */
            ids = ggml_transpose(ctx, ggml_reshape_2d(ctx, input(b, GGML_TYPE_I32, T, used, 1, E), T, used));
            break;
        default: /* two views that begin at the same place and take other steps */
            base = input(b, GGML_TYPE_I32, 2, used, T, E);
            ids = ggml_view_3d(ctx, base, 1, used, T, base->nb[1], base->nb[2], 0);
            ids = ggml_permute(ctx, ids, 2, 0, 1, 3);
            add_routing(b, ids, probs, count);
            base = ggml_view_2d(ctx, base, used, T, base->nb[2], 0);
            base = ggml_mul_mat_id(ctx, b->pool->expert[0][count][EXPERT_UP], ggml_reshape_3d(ctx, solid(b, tokens(b)), WIDE, 1, T), base);
            keep(b, sum(b, ggml_mul_mat_id(ctx, b->pool->expert[1][count][EXPERT_DOWN], base, ids)), NULL); /* both in one block */
            ids = base->src[2];
            break;
    }
    return add_routing(b, ids, probs, count);
}

static const struct ggml_tensor * owner(const struct ggml_tensor * t) {
    return t->view_src != NULL ? t->view_src : t;
}

static const struct routing * some_routing(struct builder * b) {
    return b->n_routings == 0 || chance(b, 10) ? new_routing(b) : &b->routings[b->n_routings - 1 - pick(b, b->n_routings < 3 ? b->n_routings : 3)];
}

/* Other ids are written over the ones that a routing has; some read them by the old name, some by the new. */
static void write_ids(struct builder * b) {
    const struct routing * to = some_routing(b), * from = NULL;
    if (b->scheduled && owner(to->ids)->op == GGML_OP_NONE) {
        return; /* given by the host: a scheduler lays them on another device */
    }
    for (int i = 0; i < b->n_routings; i++) {
        const struct routing * r = &b->routings[i];
        /* A copy within one tensor would depend on its threads. */
        from = owner(r->ids) != owner(to->ids) && r->used == to->used && r->count == to->count ? r : from;
    }
    struct ggml_tensor * ids = from != NULL ? from->ids : input(b, GGML_TYPE_I32, to->used, b->n_tokens, 1, expert_counts[to->count]);
    struct ggml_tensor * written = ggml_cpy(b->ctx, ids, to->ids);
    ggml_build_forward_expand(b->g->graph, written);
    if (chance(b, 50)) {
        const bool in_rows = written->nb[0] == sizeof(int32_t) && chance(b, 50);
        add_routing(b, !in_rows ? written : ggml_view_2d(b->ctx, written, to->used, b->n_tokens, written->nb[1], 0), to->probs, to->count);
    }
}

/* Products and blocks. */

static struct ggml_tensor * weight(struct builder * b, const struct routing * r, enum expert_shape shape, int kind) {
    return b->pool->expert[kind][r->count][shape];
}

/* A weight seen through a view: fewer rows, or experts whose rows are not next to each other. */
static struct ggml_tensor * odd_weight(struct builder * b, const struct routing * r, int kind) {
    struct ggml_tensor * w = weight(b, r, EXPERT_BOTH, kind);
    if (chance(b, 50) && expert_counts[r->count] == NARROW / 4) {
        struct ggml_tensor * part = ggml_view_3d(b->ctx, w, WIDE, NARROW / 4, w->ne[2], w->nb[1], w->nb[2], w->nb[1]);
        w = ggml_permute(b->ctx, part, 0, 2, 1, 3); /* as many experts as rows */
        struct ggml_tensor * x = ggml_mul_mat_id(b->ctx, w, ggml_reshape_3d(b->ctx, solid(b, tokens(b)), WIDE, 1, b->n_tokens), r->ids);
        ggml_set_output(x);
        enter(b, x);
    }
    w = weight(b, r, EXPERT_BOTH, kind);
    return ggml_view_3d(b->ctx, w, WIDE, NARROW, w->ne[2], w->nb[1], w->nb[2], pick(b, 2) * NARROW * w->nb[1]);
}

static struct ggml_tensor * product(struct builder * b, const struct routing * r, struct ggml_tensor * w) {
    const struct value * pairs = chance(b, 50) ? any(b, true, (int) w->ne[0], r) : NULL;
    struct ggml_tensor * x = pairs != NULL ? pairs->tensor : NULL;
    if (x == NULL && w->ne[0] == WIDE) {
        x = ggml_reshape_3d(b->ctx, solid(b, tokens(b)), WIDE, 1, b->n_tokens);
    } else if (x == NULL) {
        pairs = any(b, true, NARROW, r);
        x = pairs != NULL ? pairs->tensor : ggml_mul_mat_id(b->ctx, weight(b, r, EXPERT_UP, pick(b, N_KINDS)),
            ggml_reshape_3d(b->ctx, solid(b, tokens(b)), WIDE, 1, b->n_tokens), r->ids);
    }
    return ggml_mul_mat_id(b->ctx, w, x, r->ids);
}

static struct ggml_tensor * pair_weights(struct builder * b, const struct routing * r) {
    const int E = expert_counts[r->count];
    return ggml_get_rows(b->ctx, ggml_reshape_3d(b->ctx, r->probs, 1, E, b->n_tokens), r->ids);
}

/* A block as models have it, its parts entering the graph now or later. */
static void whole_block(struct builder * b) {
    struct ggml_context * ctx = b->ctx;
    const struct routing * r = some_routing(b);
    const int kind = pick(b, N_KINDS);
    const enum ggml_glu_op glu[] = { GGML_GLU_OP_REGLU, GGML_GLU_OP_GEGLU, GGML_GLU_OP_SWIGLU };
    const bool shared = chance(b, 50); /* others may read what lies between the products, as no model does */
    struct ggml_tensor * x = tokens(b), * rows = ggml_reshape_3d(ctx, solid(b, x), WIDE, 1, b->n_tokens), * gate, * up;
    if (chance(b, 40)) {
        struct ggml_tensor * both = ggml_mul_mat_id(ctx, weight(b, r, EXPERT_BOTH, kind), rows, r->ids);
        both = chance(b, 50) ? ggml_add_id(ctx, both, b->pool->bias[r->count][0], r->ids) : both;
        gate = ggml_view_3d(ctx, both, NARROW, r->used, b->n_tokens, both->nb[1], both->nb[2], 0);
        up = ggml_view_3d(ctx, both, NARROW, r->used, b->n_tokens, both->nb[1], both->nb[2], NARROW * both->nb[0]);
    } else {
        up = ggml_mul_mat_id(ctx, weight(b, r, EXPERT_UP, kind), rows, r->ids);
        up = shared ? keep(b, up, r) : up;
        gate = ggml_mul_mat_id(ctx, weight(b, r, EXPERT_GATE, pick(b, N_KINDS)), rows, r->ids);
        gate = shared ? keep(b, gate, r) : gate;
    }
    struct ggml_tensor * active = !shared || chance(b, 50) ? ggml_glu_split(ctx, gate, up, glu[shared ? 2 : pick(b, 3)])
                                                           : ggml_mul(ctx, ggml_sigmoid(ctx, solid(b, gate)), up);
    active = shared ? keep(b, ggml_clamp(ctx, active, -4.0f, 4.0f), r) : active;
    if (chance(b, 30)) {
        keep(b, ggml_mul_mat(ctx, b->pool->dense[0], x), NULL); /* as the shared expert */
    }
    struct ggml_tensor * down = ggml_mul_mat_id(ctx, weight(b, r, EXPERT_DOWN, kind), active, r->ids);
    down = shared ? down : ggml_clamp(ctx, down, -4.0f, 4.0f);
    down = chance(b, 30) ? ggml_add_id(ctx, down, b->pool->bias[r->count][0], r->ids) : down;
    down = keep(b, ggml_mul(ctx, down, pair_weights(b, r)), r);
    keep(b, ggml_add(ctx, sum(b, down), x), NULL);
}

/* Small steps. */

static struct ggml_tensor * change(struct builder * b, struct ggml_tensor * t) {
    struct ggml_context * ctx = b->ctx;
    switch (pick(b, 10)) {
        case 0: return ggml_silu(ctx, solid(b, t));
        case 1: return ggml_silu_inplace(ctx, solid(b, t));
        case 2: return ggml_scale_inplace(ctx, solid(b, t), 0.75f);
        case 3: return ggml_clamp(ctx, solid(b, t), -1.0f, 2.0f);
        case 4: return ggml_tanh(ctx, solid(b, t));
        case 5: return ggml_add_inplace(ctx, t, ggml_scale(ctx, solid(b, t), 0.25f));
        case 6: return ggml_clamp(ctx, ggml_sqr(ctx, solid(b, t)), 0.0f, 4.0f);
        case 7: return ggml_cont(ctx, ggml_permute(ctx, ggml_cont(ctx, ggml_permute(ctx, t, 0, 2, 1, 3)), 0, 2, 1, 3));
        case 8: return ggml_rms_norm(ctx, solid(b, t), 1e-5f);
        default: return ggml_cast(ctx, ggml_cast(ctx, t, GGML_TYPE_F16), GGML_TYPE_F32);
    }
}

static void change_pairs(struct builder * b, const struct value * v) {
    struct ggml_context * ctx = b->ctx;
    struct ggml_tensor * t = v->tensor;
    const struct routing * r = v->routing;
    const int width = (int) t->ne[0];
    const struct value * other = any(b, true, width, r);
    switch (pick(b, 8)) {
        case 0: t = ggml_add_id(ctx, solid(b, t), b->pool->bias[r->count][width == WIDE ? 0 : 1], r->ids); break;
        case 1: t = ggml_mul(ctx, t, pair_weights(b, r)); break;
        case 2: t = ggml_geglu_split(ctx, solid(b, t), solid(b, other->tensor)); break;
        case 3: t = chance(b, 50) ? ggml_add(ctx, t, other->tensor) : ggml_add_inplace(ctx, t, ggml_scale(ctx, solid(b, other->tensor), 0.5f)); break;
        case 4: t = ggml_clamp(ctx, ggml_sub(ctx, t, other->tensor), -4.0f, 4.0f); break;
        case 5: /* one half, seen through a view */
            t = width == WIDE ? ggml_view_3d(ctx, t, NARROW, r->used, b->n_tokens, t->nb[1], t->nb[2], pick(b, 2) * NARROW * t->nb[0])
                              : ggml_pad(ctx, solid(b, t), NARROW, 0, 0, 0);
            break;
        case 6: { /* a foreign node writes into it */
            struct ggml_tensor * from = tokens(b);
            from = ggml_scale(ctx, ggml_cont(ctx, ggml_view_2d(ctx, from, width, b->n_tokens, from->nb[1], 0)), 0.5f);
            enter(b, ggml_cpy(ctx, from, ggml_view_2d(ctx, t, width, b->n_tokens, t->nb[2], pick(b, r->used) * t->nb[1])));
            return;
        }
        default: t = change(b, t); break;
    }
    keep(b, t, r);
}

static void change_tokens(struct builder * b) {
    struct ggml_context * ctx = b->ctx;
    struct ggml_tensor * t = tokens(b);
    switch (pick(b, 7)) {
        case 0: t = ggml_mul(ctx, ggml_rms_norm(ctx, solid(b, t), 1e-5f), b->pool->norm); break;
        case 1: t = ggml_mul_mat(ctx, b->pool->dense[0], solid(b, t)); break;
        case 2: t = ggml_add(ctx, solid(b, t), solid(b, tokens(b))); break;
        case 3: { /* rows of a cache */
            struct ggml_tensor * cache = ggml_reshape_2d(ctx, input(b, GGML_TYPE_F32, WIDE, b->n_tokens + 3, 1, 0), WIDE, b->n_tokens + 3);
            cache = b->scheduled ? ggml_scale(ctx, cache, 0.5f) : cache; /* a scheduler lays the host's tensors on another device */
            struct ggml_tensor * rows = ggml_reshape_1d(ctx, input(b, GGML_TYPE_I64, b->n_tokens, 1, 1, b->n_tokens + 3), b->n_tokens);
            cache = ggml_set_rows(ctx, cache, solid(b, t), rows);
            t = ggml_view_2d(ctx, cache, WIDE, b->n_tokens, cache->nb[1], pick(b, 4) * cache->nb[1]);
            break;
        }
        case 4: { /* two ways, of which the graph computes one */
            struct ggml_tensor * ways[] = { ggml_scale(ctx, solid(b, t), 0.5f), ggml_silu(ctx, solid(b, t)) };
            const struct value * v = any(b, true, WIDE, NULL);
            if (v != NULL) {
                ways[0] = sum(b, ggml_mul(ctx, product(b, v->routing, weight(b, v->routing, EXPERT_BOTH, pick(b, N_KINDS))), pair_weights(b, v->routing)));
            }
            t = ggml_build_forward_select(b->g->graph, ways, 2, pick(b, 2));
            break;
        }
        case 5:
            if (b->scheduled) { /* reads one expert as a dense weight: the scheduler puts it on the CPU */
                struct ggml_tensor * w = b->pool->expert[pick(b, N_KINDS)][2][EXPERT_BOTH];
                w = ggml_view_2d(ctx, w, WIDE, WIDE, w->nb[1], pick(b, (int) w->ne[2]) * w->nb[2]);
                /* Of a tensor that nothing changes: the scheduler copies it to the CPU once, not again after a change in place. */
                t = ggml_scale(ctx, ggml_mul_mat(ctx, w, ggml_scale(ctx, solid(b, t), 0.75f)), 0.5f);
                break;
            } /* fall through */
        default: t = change(b, t); break;
    }
    keep(b, t, NULL);
}

static void step(struct builder * b) {
    const int what = pick(b, 100);
    const struct value * v;
    if (what < 8) {
        new_routing(b);
    } else if (what < 22) {
        whole_block(b);
    } else if (what < 42) {
        const struct routing * r = some_routing(b);
        const int kind = pick(b, N_KINDS);
        keep(b, product(b, r, chance(b, 20) ? odd_weight(b, r, kind) : weight(b, r, (enum expert_shape) pick(b, N_SHAPES), kind)), r);
    } else if (what < 46) {
        write_ids(b);
    } else if (what < 72 && (v = any(b, true, 0, NULL)) != NULL) {
        change_pairs(b, v);
    } else if (what < 80 && (v = any(b, true, 0, NULL)) != NULL) {
        keep(b, sum(b, chance(b, 50) ? v->tensor : ggml_mul(b->ctx, v->tensor, pair_weights(b, v->routing))), NULL);
    } else if (what < 88 && b->n_values > 0) {
        struct ggml_tensor * t = b->values[pick(b, b->n_values)].tensor;
        t = t->view_src != NULL ? t->view_src : t;
        if (t->op != GGML_OP_NONE) {
            ggml_set_output(t);
            ggml_build_forward_expand(b->g->graph, t);
        }
    } else {
        change_tokens(b);
    }
}

struct random_graph random_graph_new(const struct pool * pool, uint64_t seed, int steps, bool scheduled) {
    static const int batches[] = { 1, 1, 1, 2, 3, 5, 9, 17, 40 };
    struct random_graph g = { .ctx = new_context(4096) };
    struct builder * b = get_memory(sizeof(*b));
    *b = (struct builder) { .state = seed, .pool = pool, .g = &g, .ctx = g.ctx, .scheduled = scheduled };
    g.graph = ggml_new_graph(g.ctx);
    g.n_tokens = b->n_tokens = batches[pick(b, (int) (sizeof(batches) / sizeof(batches[0])))];
    keep(b, ggml_scale(g.ctx, ggml_reshape_2d(g.ctx, input(b, GGML_TYPE_F32, WIDE, b->n_tokens, 1, 0), WIDE, b->n_tokens), 1.5f), NULL);
    for (int i = 0; i < steps && g.n_inputs < MAX_INPUTS - 4 && ggml_graph_n_nodes(g.graph) < 400; i++) {
        step(b);
    }
    /* What was made last is read by the host. */
    for (int i = b->n_values - 1; i >= 0 && i >= b->n_values - 2; i--) {
        struct ggml_tensor * last = ggml_cont(g.ctx, b->values[i].tensor);
        ggml_set_output(last);
        ggml_build_forward_expand(g.graph, last);
    }
    while (b->n_pending > 0) {
        expand(b, pick(b, b->n_pending));
    }
    free(b);
    return g;
}

void random_graph_free(struct random_graph * graph) {
    ggml_free(graph->ctx);
}

#endif /* HOST_HAS_RANDOM */
