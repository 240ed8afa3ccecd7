/* Random small graphs with experts: what a graph is made of, and how it is built. */
#ifndef GGML_MOE_TESTS_RANDOM_H
#define GGML_MOE_TESTS_RANDOM_H

#include "host.h"

#define WIDE       64 /* values of a token */
#define NARROW     32 /* values between the products of a block */
#define N_COUNTS   3  /* of experts */
#define N_KINDS    4  /* types of weights */
#define MAX_INPUTS 64

enum expert_shape { EXPERT_UP, EXPERT_GATE, EXPERT_BOTH, EXPERT_DOWN, N_SHAPES };

extern const int expert_counts[N_COUNTS];

/* The same weights for every pool, wherever they lie. */
struct pool {
    struct ggml_context * ctx[2]; /* dense, experts */
    ggml_backend_buffer_t buffer[2];
    struct ggml_tensor * expert[N_KINDS][N_COUNTS][N_SHAPES];
    struct ggml_tensor * router[N_COUNTS];
    struct ggml_tensor * bias[N_COUNTS][2]; /* WIDE, NARROW */
    struct ggml_tensor * dense[2];          /* WIDE to WIDE, NARROW to WIDE */
    struct ggml_tensor * norm;
};

void pool_new(struct pool * pool, ggml_backend_buffer_type_t dense, ggml_backend_buffer_type_t expert);
void pool_free(struct pool * pool);

struct random_input {
    struct ggml_tensor * tensor;
    int limit; /* integers are below it */
};

struct random_graph {
    struct ggml_context * ctx;
    struct ggml_cgraph * graph;
    struct random_input inputs[MAX_INPUTS];
    int n_inputs;
    int n_tokens;
};

/* The graph of a seed, of at most so many steps: a graph of fewer steps is the beginning of one with more. `scheduled` allows nodes
 * that only a scheduler can place. */
struct random_graph random_graph_new(const struct pool * pool, uint64_t seed, int steps, bool scheduled);
void random_graph_free(struct random_graph * graph);

/* Numbers that look random: the same for the same state. */
uint32_t draw(uint64_t * state);
static inline int below(uint64_t * state, int n) {
    return (int) (draw(state) % (uint32_t) n);
}

#endif
