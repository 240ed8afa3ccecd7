/* Graphs with experts: through the plugin they give what the stock CPU backend gives, bit for bit. */
#include "moe.h"

#include <pthread.h>

static const enum ggml_type TYPES[] = { GGML_TYPE_F32, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K };
#define N_TYPES ((int) (sizeof(TYPES) / sizeof(TYPES[0])))

/* Batches of decoding and of prompts, and a warm-up that uses every expert. */
static const struct { int n_tokens, n_used; } BATCHES[] = {
    { 1, MOE_EXPERTS }, { 1, MOE_USED }, { 3, MOE_USED }, { 40, MOE_USED }, { 1, 1 },
};
#define N_BATCHES ((int) (sizeof(BATCHES) / sizeof(BATCHES[0])))

static struct moe_model model_on(ggml_backend_reg_t reg, ggml_backend_dev_t dev, enum ggml_type type) {
    struct moe_place place[MOE_LAYERS];
    moe_place_all(place, ggml_backend_dev_buffer_type(dev), expert_buffer_type(reg, dev));
    struct moe_model model;
    CHECK(moe_model_try(&model, type, place), "no memory for the model");
    return model;
}

/* What the plugin says of a backend when it is freed (log=debug). */
static void check_summary(const char * device, int graphs) {
    const char * line = log_last("ggml-moe: summary ");
    CHECK(line != NULL, "no summary line");
    CHECK(strstr(line, device) != NULL, "another device: %s", line);
    CHECK(json_number(line, "graphs") == graphs, "not %d graphs: %s", graphs, line);
    CHECK(json_number(line, "blocks_max") == MOE_LAYERS, "not every MoE layer was recognised: %s", line);
    CHECK(json_number(line, "blocks") == (long long) graphs * MOE_LAYERS, "blocks: %s", line);
    CHECK(json_number(line, "unrecognised") == 0, "unrecognised experts: %s", line);
    CHECK(json_number(line, "expert_bytes") > 0, "no expert was copied: %s", line);
}

/* graph_compute, called as a program without a scheduler calls it. */
void case_graphs(void) {
    ggml_backend_reg_t reg = load_plugin();
    ggml_backend_dev_t dev = device_number(reg, 0);
    for (int i = 0; i < N_TYPES; i++) {
        struct moe_model model = model_on(reg, dev, TYPES[i]);
        for (int n_threads = 1; n_threads <= 2; n_threads++) {
            ggml_backend_t moe = ggml_backend_dev_init(dev, NULL);
            CHECK(moe != NULL, "no backend");
            set_threads(moe, n_threads);
            for (int k = 0; k < N_BATCHES; k++) {
                const int n_tokens = BATCHES[k].n_tokens, n_used = BATCHES[k].n_used;
                enum ggml_status status;
                float * wanted = moe_reference(TYPES[i], n_tokens, n_used, n_threads, k);
                float * got = moe_run(moe, ggml_backend_dev_buffer_type(dev), &model, n_tokens, n_used, k, &status);
                CHECK(got != NULL, "graph_compute ended with %d", status);
                moe_same(got, wanted, n_tokens, ggml_type_name(TYPES[i]));
                free(got);
                free(wanted);
            }
            ggml_backend_free(moe);
            check_summary("\"MoE0\"", N_BATCHES);
        }
        moe_model_free(&model);
    }
}

static bool abort_now(void * data) {
    return *(const bool *) data;
}

/* The host's abort callback reaches the inner backend, and an aborted backend can go on. */
void case_abort(void) {
    ggml_backend_reg_t reg = load_plugin();
    ggml_backend_dev_t dev = device_number(reg, 0);
    struct moe_model model = model_on(reg, dev, GGML_TYPE_F32);
    ggml_backend_t moe = ggml_backend_dev_init(dev, NULL);
    ggml_backend_set_abort_callback_t set =
        (ggml_backend_set_abort_callback_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_abort_callback");
    CHECK(moe != NULL && set != NULL, "no backend, or no abort callback");
    set_threads(moe, 2);
    bool stop = true;
    set(moe, abort_now, &stop);
    enum ggml_status status;
    float * got = moe_run(moe, ggml_backend_dev_buffer_type(dev), &model, 3, MOE_USED, 1, &status);
    CHECK(got == NULL && status == GGML_STATUS_ABORTED, "status %d", status);
    stop = false;
    float * wanted = moe_reference(GGML_TYPE_F32, 3, MOE_USED, 2, 1);
    got = moe_run(moe, ggml_backend_dev_buffer_type(dev), &model, 3, MOE_USED, 1, &status);
    CHECK(got != NULL, "status %d after an abort", status);
    moe_same(got, wanted, 3, "after an abort");
    free(got);
    free(wanted);
    ggml_backend_free(moe);
    moe_model_free(&model);
}

static bool observe_all(struct ggml_tensor * t, bool ask, void * user_data) {
    (void) t;
    *(int *) user_data += ask ? 0 : 1;
    return true;
}

static bool observe_some(struct ggml_tensor * t, bool ask, void * user_data) {
    /* Cuts the graph in the middle of blocks. */
    const bool wanted = t->op == GGML_OP_GLU || t->op == GGML_OP_ADD_ID;
    *(int *) user_data += ask ? 0 : 1;
    return ask ? wanted : true;
}

/* Runs the model through a scheduler; the same graph three times, as llama.cpp reuses it. */
static void schedule(ggml_backend_t * backends, int n_backends, const struct moe_model * model, enum ggml_type type,
                     int n_tokens, ggml_backend_sched_eval_callback callback) {
    ggml_backend_sched_t sched = ggml_backend_sched_new(backends, NULL, n_backends, GGML_DEFAULT_GRAPH_SIZE, false, true);
    /* Measuring rewrites the sources of the graph that is measured, so it gets one of its own. */
    struct moe_graph graph = moe_graph_new(model, n_tokens, MOE_USED);
    CHECK(ggml_backend_sched_reserve(sched, graph.graph), "reserve");
    ggml_backend_sched_reset(sched);
    moe_graph_free(&graph);
    graph = moe_graph_new(model, n_tokens, MOE_USED);
    int observed = 0;
    if (callback != NULL) {
        ggml_backend_sched_set_eval_callback(sched, callback, &observed);
    }
    CHECK(ggml_backend_sched_alloc_graph(sched, graph.graph), "alloc_graph");
    for (int i = 0; i < ggml_graph_n_nodes(graph.graph); i++) {
        struct ggml_tensor * node = ggml_graph_node(graph.graph, i);
        ggml_backend_t on = ggml_backend_sched_get_tensor_backend(sched, node);
        CHECK(on != backends[n_backends - 1], "%s (%s) runs on the CPU backend", node->name, ggml_op_name(node->op));
    }
    for (uint32_t seed = 0; seed < 3; seed++) {
        moe_input(&graph, seed);
        CHECK(ggml_backend_sched_graph_compute(sched, graph.graph) == GGML_STATUS_SUCCESS, "compute");
        float * got = moe_output(&graph);
        float * wanted = moe_reference(type, n_tokens, MOE_USED, 2, seed);
        moe_same(got, wanted, n_tokens, ggml_type_name(type));
        free(wanted);
        free(got);
    }
    CHECK((callback != NULL) == (observed > 0), "%d nodes observed", observed);
    moe_graph_free(&graph);
    ggml_backend_sched_free(sched);
}

void case_scheduler(void) {
    ggml_backend_reg_t reg = load_plugin();
    ggml_backend_dev_t dev = device_number(reg, 0);
    ggml_backend_t backends[] = { ggml_backend_dev_init(dev, NULL), ggml_backend_dev_init(cpu_device(), NULL) };
    CHECK(backends[0] != NULL && backends[1] != NULL, "no backends");
    set_threads(backends[0], 2);
    set_threads(backends[1], 2);
    for (int i = 0; i < N_TYPES; i++) {
        struct moe_model model = model_on(reg, dev, TYPES[i]);
        schedule(backends, 2, &model, TYPES[i], 1, NULL);
        schedule(backends, 2, &model, TYPES[i], 9, NULL);
        schedule(backends, 2, &model, TYPES[i], 1, observe_all);
        schedule(backends, 2, &model, TYPES[i], 9, observe_some);
        moe_model_free(&model);
    }
    ggml_backend_free(backends[0]);
    ggml_backend_free(backends[1]);
}

/* inner=CPU,CPU: one layer on each device. */
void case_split(void) {
    ggml_backend_reg_t reg = load_plugin();
    ggml_backend_t backends[MOE_LAYERS + 1];
    struct moe_place place[MOE_LAYERS];
    for (int l = 0; l < MOE_LAYERS; l++) {
        ggml_backend_dev_t dev = device_number(reg, l);
        backends[l] = ggml_backend_dev_init(dev, NULL);
        place[l] = (struct moe_place) { ggml_backend_dev_buffer_type(dev), expert_buffer_type(reg, dev) };
    }
    backends[MOE_LAYERS] = ggml_backend_dev_init(cpu_device(), NULL);
    for (int l = 0; l <= MOE_LAYERS; l++) {
        set_threads(backends[l], 2);
    }
    for (int i = 0; i < N_TYPES; i++) {
        struct moe_model model;
        CHECK(moe_model_try(&model, TYPES[i], place), "no memory for the model");
        schedule(backends, MOE_LAYERS + 1, &model, TYPES[i], 1, NULL);
        schedule(backends, MOE_LAYERS + 1, &model, TYPES[i], 9, NULL);
        moe_model_free(&model);
    }
    for (int l = 0; l <= MOE_LAYERS; l++) {
        ggml_backend_free(backends[l]);
        if (l < MOE_LAYERS) {
            const char * line = log_last("ggml-moe: summary ");
            CHECK(line != NULL && json_number(line, "blocks") > 0, "device %d ran no block", l);
        }
    }
}

/* Where the plugin cannot stand in front of a device, it says so once and hands everything on as it is, experts included. */
void case_pass_through(void) {
    ggml_backend_reg_t reg = load_plugin();
    ggml_backend_dev_t dev = device_number(reg, 0);
    ggml_backend_dev_get_extra_bufts_t extra =
        (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts");
    ggml_backend_buffer_type_t * list = extra != NULL ? extra(dev) : NULL;
    CHECK(list == NULL || list[0] == NULL, "a device that passes through needs no expert buffers");

    ggml_backend_t backends[] = { ggml_backend_dev_init(dev, NULL), ggml_backend_dev_init(cpu_device(), NULL) };
    CHECK(backends[0] != NULL, "no backend");
    set_threads(backends[0], 2);
    set_threads(backends[1], 2);
    struct moe_place place[MOE_LAYERS];
    moe_place_all(place, ggml_backend_dev_buffer_type(dev), ggml_backend_dev_buffer_type(dev));
    struct moe_model model;
    CHECK(moe_model_try(&model, GGML_TYPE_Q8_0, place), "no memory for the model");
    schedule(backends, 2, &model, GGML_TYPE_Q8_0, 3, NULL);
    moe_model_free(&model);
    ggml_backend_free(backends[0]);
    ggml_backend_free(backends[1]);
    char line[80];
    snprintf(line, sizeof(line), "ggml-moe: MoE0 passes everything through to %s: ", ggml_backend_dev_name(inner_device()));
    CHECK(log_count(line, NULL) == 1, "it must be said once: %s", line);
}

struct worker {
    ggml_backend_dev_t dev;
    const struct moe_model * model;
    const float * wanted;
    int n_tokens;
};

#define RUNS 200

static void * work(void * argument) {
    const struct worker * w = argument;
    ggml_backend_t backend = NULL;
    for (int i = 0; i < RUNS; i++) {
        if (i % 50 == 0) { /* backends come and go while the other thread computes */
            ggml_backend_free(backend);
            backend = ggml_backend_dev_init(w->dev, NULL);
            CHECK(backend != NULL, "no backend");
            set_threads(backend, 1);
        }
        enum ggml_status status;
        float * got = moe_run(backend, ggml_backend_dev_buffer_type(w->dev), w->model, w->n_tokens, MOE_USED, 5, &status);
        CHECK(got != NULL, "run %d ended with %d", i, status);
        moe_same(got, w->wanted, w->n_tokens, "a thread");
        free(got);
    }
    ggml_backend_free(backend);
    return NULL;
}

/* Two threads over one model, a backend each. */
void case_threads(void) {
    ggml_backend_reg_t reg = load_plugin();
    struct moe_model model = model_on(reg, device_number(reg, 0), GGML_TYPE_Q4_K);
    struct worker workers[2];
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        const int n_tokens = 1 + 2 * i;
        const float * wanted = moe_reference(GGML_TYPE_Q4_K, n_tokens, MOE_USED, 1, 5);
        workers[i] = (struct worker) { device_number(reg, 0), &model, wanted, n_tokens };
    }
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0, "pthread_create");
    }
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        free((void *) workers[i].wanted);
    }
    moe_model_free(&model);
}
