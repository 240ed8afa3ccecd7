/* A small mixture-of-experts model with the node order of llama.cpp, and ways to run it. */
#ifndef GGML_MOE_TESTS_MOE_H
#define GGML_MOE_TESTS_MOE_H

#include "host.h"

#define MOE_LAYERS   2
#define MOE_EMBD     256
#define MOE_FF       512
#define MOE_EXPERTS  8
#define MOE_USED     2

/* Where one layer's weights lie. */
struct moe_place {
    ggml_backend_buffer_type_t dense;
    ggml_backend_buffer_type_t expert;
};

struct moe_layer {
    struct ggml_tensor * norm;
    struct ggml_tensor * router;
    struct ggml_tensor * shared_gate, * shared_up, * shared_down; /* layer 0: a shared expert */
    struct ggml_tensor * gate_up_bias, * down_bias;               /* layer 1: biases */
    struct ggml_tensor * gate, * up;                              /* layer 0: two tensors */
    struct ggml_tensor * gate_up;                                 /* layer 1: one tensor */
    struct ggml_tensor * down;
};

struct moe_model {
    struct ggml_context * ctx[2 * MOE_LAYERS];
    ggml_backend_buffer_t buffer[2 * MOE_LAYERS];
    struct moe_layer layer[MOE_LAYERS];
};

struct moe_graph {
    struct ggml_context * ctx;
    struct ggml_cgraph * graph;
    struct ggml_tensor * input;
    struct ggml_tensor * output;
    int n_tokens;
};

/* The same weights for the same type wherever they lie. False, with nothing left behind, if memory could not be had. */
bool moe_model_try(struct moe_model * model, enum ggml_type type, const struct moe_place place[MOE_LAYERS]);
void moe_model_free(struct moe_model * model);

/* The places of a device's layers, all in the same two buffer types. */
void moe_place_all(struct moe_place place[MOE_LAYERS], ggml_backend_buffer_type_t dense, ggml_backend_buffer_type_t expert);

struct moe_graph moe_graph_new(const struct moe_model * model, int n_tokens, int n_used);
void moe_graph_free(struct moe_graph * graph);

/* Sets the input (the same for the same seed) and reads the output, which the caller frees. */
void moe_input(const struct moe_graph * graph, uint32_t seed);
float * moe_output(const struct moe_graph * graph);

/* Runs a graph on one backend, everything in one buffer of that type. The output, or NULL with the status if that failed. */
float * moe_run(ggml_backend_t backend, ggml_backend_buffer_type_t compute, const struct moe_model * model, int n_tokens,
                int n_used, uint32_t seed, enum ggml_status * status);

/* What the stock CPU backend computes. */
float * moe_reference(enum ggml_type type, int n_tokens, int n_used, int n_threads, uint32_t seed);

/* Ends the process unless both outputs are the same bit for bit. */
void moe_same(const float * got, const float * wanted, int n_tokens, const char * what);

#endif
