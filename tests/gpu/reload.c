/*
 * Loads and unloads the plugin many times, as a host that swaps models does, and shows that nothing is left behind.
 * Usage: reload BACKENDS_FOLDER PLUGIN INNER_DEVICE ROUNDS GROWTH_LIMIT_MIB
 *
 * Each round: load, open a backend on the plugin's first device, allocate 64 MiB, run a small graph, check its result, free,
 * unload. Prints one line of JSON; fails when the inner device's free memory shrank by more than the limit.
 */
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <dirent.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB (1024.0 * 1024.0)
#define SIDE 256

/* The first rounds open the CUDA context, load kernels and create handles that the inner backend keeps: they are no leak. */
#define WARM_UP 5

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "reload: " __VA_ARGS__);                                                                   \
            fputc('\n', stderr);                                                                                       \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static double free_mib(ggml_backend_dev_t dev) {
    size_t free_bytes = 0, total = 0;
    ggml_backend_dev_memory(dev, &free_bytes, &total);
    return (double) free_bytes / MIB;
}

/* Entries of a folder of /proc/self: threads or open files. */
static int count_entries(const char * path) {
    DIR * folder = opendir(path);
    int count = 0;
    while (folder != NULL && readdir(folder) != NULL) {
        count++;
    }
    if (folder != NULL) {
        closedir(folder);
    }
    return count - 2;
}

/* d = a * b + b with a = I and b[i] = i: every element is 2 * i, exactly. */
static void run_graph(ggml_backend_t backend, ggml_backend_buffer_t buffer, int round) {
    static float identity[SIDE * SIDE], numbers[SIDE * SIDE], result[SIDE * SIDE];
    struct ggml_init_params params = { ggml_tensor_overhead() * 8 + ggml_graph_overhead(), NULL, true };
    struct ggml_context * ctx = ggml_init(params);
    CHECK(ctx != NULL, "ggml_init");
    struct ggml_tensor * a = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, SIDE, SIDE);
    struct ggml_tensor * b = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, SIDE, SIDE);
    struct ggml_tensor * d = ggml_add(ctx, ggml_mul_mat(ctx, a, b), b);
    struct ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, d);
    struct ggml_tallocr place = ggml_tallocr_new(buffer);
    struct ggml_tensor * all[] = { a, b, d->src[0], d };
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        CHECK(ggml_tallocr_alloc(&place, all[i]) == GGML_STATUS_SUCCESS, "a tensor has no place in 64 MiB");
    }
    for (int i = 0; i < SIDE * SIDE; i++) {
        identity[i] = i % (SIDE + 1) == 0 ? 1.0f : 0.0f;
        numbers[i] = (float) (i % 1000);
    }
    ggml_backend_tensor_set(a, identity, 0, sizeof(identity));
    ggml_backend_tensor_set(b, numbers, 0, sizeof(numbers));
    /* Three times, so that a backend that captures graphs captures and replays this one. */
    for (int i = 0; i < 3; i++) {
        CHECK(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS, "round %d: the graph failed", round);
    }
    ggml_backend_tensor_get(d, result, 0, sizeof(result));
    for (int i = 0; i < SIDE * SIDE; i++) {
        CHECK(fabsf(result[i] - 2 * numbers[i]) <= 0.01f * numbers[i], "round %d: [%d] is %g, not %g", round, i,
              (double) result[i], (double) (2 * numbers[i]));
    }
    ggml_free(ctx);
}

static void one_round(const char * plugin, int round) {
    ggml_backend_reg_t reg = ggml_backend_load(plugin);
    CHECK(reg != NULL && ggml_backend_reg_dev_count(reg) > 0, "round %d: the plugin does not load", round);
    ggml_backend_t backend = ggml_backend_dev_init(ggml_backend_reg_dev_get(reg, 0), NULL);
    CHECK(backend != NULL, "round %d: no backend", round);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_buffer(backend, (size_t) (64 * MIB));
    CHECK(buffer != NULL, "round %d: no buffer of 64 MiB", round);
    ggml_backend_buffer_clear(buffer, 0xff);
    run_graph(backend, buffer, round);
    ggml_backend_buffer_free(buffer);
    ggml_backend_free(backend);
    ggml_backend_unload(reg);
}

int main(int argc, char ** argv) {
    CHECK(argc == 6, "usage: reload BACKENDS_FOLDER PLUGIN INNER_DEVICE ROUNDS GROWTH_LIMIT_MIB");
    ggml_backend_load_all_from_path(argv[1]);
    ggml_backend_dev_t inner = ggml_backend_dev_by_name(argv[3]);
    CHECK(inner != NULL, "no device %s", argv[3]);
    const int rounds = atoi(argv[4]);
    CHECK(rounds > WARM_UP, "at least %d rounds", WARM_UP + 1);

    const double at_start = free_mib(inner);
    double before = 0;
    int threads = 0, files = 0;
    for (int round = 0; round < rounds; round++) {
        if (round == WARM_UP) {
            before = free_mib(inner);
            threads = count_entries("/proc/self/task");
            files = count_entries("/proc/self/fd");
        }
        one_round(argv[2], round);
    }
    const double after = free_mib(inner);
    threads = count_entries("/proc/self/task") - threads;
    files = count_entries("/proc/self/fd") - files;
    const bool grew = before - after > atof(argv[5]);
    printf("reload: {\"rounds\":%d,\"free_mib_at_start\":%.1f,\"free_mib_before\":%.1f,\"free_mib_after\":%.1f,"
           "\"growth_mib\":%.1f,\"threads_left\":%d,\"files_left\":%d}\n",
           rounds, at_start, before, after, before - after, threads, files);
    return grew || threads > 0 || files > 0;
}
