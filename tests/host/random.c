/*
 * Random small graphs: through the plugin, cut into parts, each gives what it gives on the stock CPU backend as a whole, bit for
 * bit, in every result that the host may read.
 *
 *   random FIRST+COUNT   the graphs of these seeds
 *   random SEED/STEPS    one graph, cut down to its first steps, and its nodes
 *
 * A difference is reported with the fewest steps that still show it; a crash with its seed.
 */
#include "random.h"

#if HOST_HAS_RANDOM

#include <math.h>
#include <signal.h>
#include <unistd.h>

#define MAX_STEPS 24
#define RUNS      3 /* of each graph, with other inputs */

/* One of the two that are compared: the plugin's device or the stock CPU, each with a scheduler for the graphs that need one. */
struct side {
    struct pool pool;
    ggml_backend_buffer_type_t compute, experts;
    ggml_backend_t backends[2];
    int n_backends;
    ggml_backend_sched_t sched;
};

/* What the host reads of one run: all results, one behind the other. */
struct results {
    uint8_t * bytes;
    size_t size;
};

static volatile uint64_t current_seed;

static void crashed(int number) {
    char text[] = "random: crashed at seed                     \n";
    uint64_t seed = current_seed;
    for (int i = 43; seed > 0 || i == 43; i--) {
        text[i] = (char) ('0' + seed % 10);
        seed /= 10;
    }
    if (write(STDERR_FILENO, text, sizeof(text) - 1) < 0) {
        _exit(3);
    }
    signal(number, SIG_DFL);
    raise(number);
}

static void side_new(struct side * side, ggml_backend_dev_t dev, ggml_backend_buffer_type_t experts) {
    memset(side, 0, sizeof(*side));
    side->compute = ggml_backend_dev_buffer_type(dev);
    side->experts = experts;
    pool_new(&side->pool, side->compute, experts);
    side->backends[side->n_backends++] = ggml_backend_dev_init(dev, NULL);
    if (dev != cpu_device()) {
        side->backends[side->n_backends++] = ggml_backend_dev_init(cpu_device(), NULL);
    }
    side->sched = ggml_backend_sched_new(side->backends, NULL, side->n_backends, 1024, false, true);
}

static void side_free(struct side * side) {
    ggml_backend_sched_free(side->sched);
    for (int i = 0; i < side->n_backends; i++) {
        ggml_backend_free(side->backends[i]);
    }
    pool_free(&side->pool);
}

/* Sets every input; the same for the same seed and run. */
static void set_inputs(const struct random_graph * g, uint64_t seed) {
    for (int i = 0; i < g->n_inputs; i++) {
        struct ggml_tensor * t = g->inputs[i].tensor;
        const int limit = g->inputs[i].limit;
        if (t->buffer == NULL) {
            continue; /* nothing reads it */
        }
        const int64_t n = ggml_nelements(t);
        uint8_t * data = get_memory(ggml_nbytes(t));
        int64_t row = limit > 0 ? below(&seed, limit) : 0;
        for (int64_t k = 0; k < n; k++) {
            if (t->type == GGML_TYPE_F32) {
                ((float *) data)[k] = (float) (draw(&seed) >> 8) / (float) (1 << 23) - 1.0f;
            } else if (t->type == GGML_TYPE_I32) {
                ((int32_t *) data)[k] = below(&seed, limit);
            } else { /* rows to write: no row twice */
                ((int64_t *) data)[k] = row++ % limit;
            }
        }
        ggml_backend_tensor_set(t, data, 0, ggml_nbytes(t));
        free(data);
    }
}

static struct results read_results(const struct random_graph * g) {
    struct results r = { NULL, 0 };
    for (int i = 0; i < ggml_graph_n_nodes(g->graph); i++) {
        struct ggml_tensor * t = ggml_graph_node(g->graph, i);
        if (t->flags & GGML_TENSOR_FLAG_OUTPUT) {
            r.bytes = realloc(r.bytes, r.size + ggml_nbytes(t));
            CHECK(r.bytes != NULL, "realloc");
            ggml_backend_tensor_get(t, r.bytes + r.size, 0, ggml_nbytes(t));
            r.size += ggml_nbytes(t);
        }
    }
    return r;
}

/* Cuts the graph anywhere. */
static bool observe(struct ggml_tensor * t, bool ask, void * user_data) {
    uint64_t state = *(const uint64_t *) user_data + (uint64_t) t->ne[0] + 31 * t->op + (uint64_t) t->nb[2];
    return ask ? below(&state, 4) == 0 : true;
}

static bool run_graph(const struct side * side, uint64_t seed, int steps, bool show, struct results results[RUNS]) {
    uint64_t state = seed ^ 0xabcdef;
    const bool scheduled = below(&state, 2) == 0, observed = below(&state, 4) == 0, known = below(&state, 2) == 0;
    const int n_threads = below(&state, 8) == 0 ? 2 : 1;
    struct random_graph g = random_graph_new(&side->pool, seed, steps, scheduled);
    if (show) {
        for (int i = 0; i < ggml_graph_n_nodes(g.graph); i++) {
            struct ggml_tensor * t = ggml_graph_node(g.graph, i);
            fprintf(stderr, "%3d %p %-12s [%d %d %d]%s%s", i, (void *) t, ggml_op_desc(t), (int) t->ne[0], (int) t->ne[1], (int) t->ne[2],
                t->flags & GGML_TENSOR_FLAG_COMPUTE ? "" : " not computed", t->flags & GGML_TENSOR_FLAG_OUTPUT ? " output" : "");
            for (int k = 0; k < GGML_MAX_SRC && t->src[k] != NULL; k++) {
                fprintf(stderr, " %p:%s", (void *) t->src[k], ggml_type_name(t->src[k]->type));
            }
            fprintf(stderr, t->view_src != NULL ? " in %p+%zu\n" : "\n", (void *) t->view_src, t->view_offs);
        }
    }
    for (int i = 0; i < side->n_backends; i++) {
        set_threads(side->backends[i], n_threads);
    }
    ggml_gallocr_t allocator = NULL;
    bool ok;
    if (scheduled) {
        ggml_backend_sched_reset(side->sched);
        ggml_backend_sched_set_eval_callback(side->sched, observed ? observe : NULL, &seed);
        ok = ggml_backend_sched_alloc_graph(side->sched, g.graph);
    } else {
        allocator = ggml_gallocr_new(side->compute);
        g.graph->uid = known ? ggml_graph_next_uid() : 0;
        ok = ggml_gallocr_alloc_graph(allocator, g.graph);
    }
    memset(results, 0, RUNS * sizeof(results[0]));
    for (int run = 0; ok && run < RUNS; run++) {
        set_inputs(&g, seed + 1000003 * run);
        const enum ggml_status status = scheduled ? ggml_backend_sched_graph_compute(side->sched, g.graph)
                                                  : ggml_backend_graph_compute(side->backends[0], g.graph);
        ok = status == GGML_STATUS_SUCCESS;
        if (ok) {
            results[run] = read_results(&g);
        }
    }
    ggml_backend_sched_synchronize(side->sched);
    ggml_gallocr_free(allocator);
    random_graph_free(&g);
    return ok;
}

static void free_results(struct results results[RUNS]) {
    for (int run = 0; run < RUNS; run++) {
        free(results[run].bytes);
    }
}

/* What the graphs of one process were like. */
static struct {
    long long graphs, results, odd;
} told;

/* NULL, or what differs. */
static const char * compare(struct side * ours, const struct side * stock, uint64_t seed, int steps, bool show) {
    struct results got[RUNS], wanted[RUNS];
    static char text[160];
    const char * fault = NULL;
    current_seed = seed;
    log_forget();
    if (getenv("MOE_HOST_RELOAD") != NULL) { /* a model of its own for each graph, as a cache of experts has it */
        pool_free(&ours->pool);
        pool_new(&ours->pool, ours->compute, ours->experts);
    }
    const bool ran_wanted = run_graph(stock, seed, steps, show, wanted), ran_got = run_graph(ours, seed, steps, false, got);
    if (!ran_wanted || !ran_got) {
        snprintf(text, sizeof(text), "%s failed", !ran_wanted ? "the CPU backend itself" : "the plugin");
        fault = text;
    }
    for (int run = 0; run < RUNS && fault == NULL; run++) {
        CHECK(got[run].size == wanted[run].size && got[run].size > 0, "other results");
        for (size_t i = 0; i + sizeof(float) <= got[run].size; i += sizeof(float)) {
            float value;
            memcpy(&value, wanted[run].bytes + i, sizeof(value));
            told.results++;
            told.odd += !isfinite(value);
        }
        if (memcmp(got[run].bytes, wanted[run].bytes, got[run].size) != 0) {
            size_t at = 0;
            while (got[run].bytes[at] == wanted[run].bytes[at]) {
                at++;
            }
            snprintf(text, sizeof(text), "run %d differs at byte %zu of %zu", run, at, got[run].size);
            fault = text;
        }
    }
    told.graphs++;
    free_results(got);
    free_results(wanted);
    return fault;
}

void case_random(const char * argument) {
    char * end;
    const uint64_t first = strtoull(argument, &end, 10);
    const bool one = *end == '/';
    CHECK(one || *end == '+', "usage: random FIRST+COUNT, or SEED/STEPS");
    const uint64_t count = strtoull(end + 1, &end, 10);
#ifndef __SANITIZE_ADDRESS__
    signal(SIGSEGV, crashed);
#endif
    signal(SIGABRT, crashed);

    ggml_backend_reg_t reg = load_plugin();
    ggml_backend_dev_t dev = device_number(reg, 0);
    struct side ours, stock;
    side_new(&ours, dev, expert_buffer_type(reg, dev));
    side_new(&stock, cpu_device(), ggml_backend_dev_buffer_type(cpu_device()));
    int failed = 0;
    if (one) {
        const char * fault = compare(&ours, &stock, first, (int) count, true);
        failed = fault != NULL;
        fprintf(stderr, "random: %s: %s\n", argument, failed ? fault : "equal");
    }
    for (uint64_t seed = first; !one && seed < first + count; seed++) {
        const char * fault = compare(&ours, &stock, seed, MAX_STEPS, false);
        int steps = MAX_STEPS;
        if (fault == NULL) {
            continue;
        }
        failed++;
        for (int fewer = 1; fewer < MAX_STEPS && steps == MAX_STEPS; fewer++) {
            const char * same = compare(&ours, &stock, seed, fewer, false);
            if (same != NULL) {
                steps = fewer;
                fault = same;
            }
        }
        fprintf(stderr, "random: seed %llu: %s; to see it alone: random %llu/%d\n", (unsigned long long) seed, fault, (unsigned long long) seed, steps);
        if (failed == 10) {
            break;
        }
    }
    /* A comparison of infinities, or of nothing, would show little. */
    CHECK(one || told.odd * 100 <= told.results, "%lld of %lld results are not finite", told.odd, told.results);
    side_free(&ours);
    side_free(&stock);
    const char * line = log_last("ggml-moe: summary ");
    CHECK(line != NULL, "no summary line");
    CHECK(one || count < 20 || (json_number(line, "blocks") > 0 && json_number(line, "unrecognised") > 0), "blocks or products are missing: %s", line);
    printf("%lld graphs, %lld results; %s\n", told.graphs, told.results, line);
    CHECK(failed == 0, "%d of %lld graphs differ", failed, told.graphs);
}

#endif /* HOST_HAS_RANDOM */
