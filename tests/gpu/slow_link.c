/*
 * Preloaded into a program that loads libggml-cuda: the link to the device looks as slow as SLOW_LINK_GBS says (10^9 bytes per second).
 * It is what the plugin's key link-gbs does to the plugin's own copies, for stock: each copy from the host of at least 64 KiB runs several times
 * one behind the other, the last time only for the fraction that is left.
 *
 * One line of JSON is printed when the first such copy comes, and one at the end: what a copy of 64 MiB of pinned memory moved
 * before and with the repetitions, and how many copies were slowed down. Without a line nothing was.
 *
 * How the real functions are found: see count_graphs.c.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define LEAST_BYTES ((size_t) 64 << 10)
#define PROBE_BYTES ((size_t) 64 << 20)
#define MISSING 500 /* cudaErrorSymbolNotFound */
enum { HOST_TO_DEVICE = 1 };
#define STREAM_PER_THREAD ((void *) 2)

typedef int (*copy_t)(void *, const void *, size_t, int, void *);
typedef int (*copy_2d_t)(void *, size_t, const void *, size_t, size_t, size_t, int, void *);
typedef int (*allocate_t)(void **, size_t);
typedef int (*free_t)(void *);

static copy_t    real_copy;
static copy_2d_t real_copy_2d;
static double    times = 1.0, probe_gbs, now_gbs, wanted_gbs;
static atomic_ullong copies, bytes;
static pthread_once_t found = PTHREAD_ONCE_INIT, probed = PTHREAD_ONCE_INIT;

static void * real(const char * name) {
    static const char * const runtimes[] = { "libcudart.so.13", "libcudart.so.12" };
    for (size_t i = 0; i < sizeof(runtimes) / sizeof(runtimes[0]); i++) {
        void * runtime = dlopen(runtimes[i], RTLD_LAZY | RTLD_NOLOAD);
        void * symbol  = runtime != NULL ? dlsym(runtime, name) : NULL;
        if (symbol != NULL) {
            return symbol;
        }
    }
    fprintf(stderr, "slow-link: no %s in a loaded CUDA runtime\n", name);
    return NULL;
}

static void find(void) {
    real_copy    = (copy_t) real("cudaMemcpyAsync");
    real_copy_2d = (copy_2d_t) real("cudaMemcpy2DAsync");
}

/* What a copy repeats: whole times, and a part of the last one. */
static size_t part_of(size_t all) {
    return (size_t) ((double) all * (times - (double) (unsigned) times));
}

static int copy_slowly(void * target, const void * source, size_t size, void * stream) {
    int status = real_copy(target, source, size, HOST_TO_DEVICE, stream);
    for (unsigned more = 1; status == 0 && more < (unsigned) times; more++) {
        status = real_copy(target, source, size, HOST_TO_DEVICE, stream);
    }
    size_t part = part_of(size);
    return status == 0 && part > 0 ? real_copy(target, source, part, HOST_TO_DEVICE, stream) : status;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double) now.tv_sec + (double) now.tv_nsec / 1e9;
}

static double best_gbs(void * device, void * host, free_t wait) {
    double best = 1e9;
    for (int i = 0; i < 4; i++) {
        double began = seconds();
        if (copy_slowly(device, host, PROBE_BYTES, STREAM_PER_THREAD) != 0 || wait(STREAM_PER_THREAD) != 0) {
            return 0.0;
        }
        double took = seconds() - began;
        best = took < best ? took : best;
    }
    return (double) PROBE_BYTES / best / 1e9;
}

static void print_line(const char * when) {
    fprintf(stderr, "slow-link: {\"when\":\"%s\",\"wanted_gbs\":%.2f,\"probe_gbs\":%.2f,\"times\":%.3f,\"now_gbs\":%.2f,\"copies\":%llu,\"bytes\":%llu}\n",
            when, wanted_gbs, probe_gbs, times, now_gbs, atomic_load(&copies), atomic_load(&bytes));
}

static void probe(void) {
    const char * text = getenv("SLOW_LINK_GBS");
    wanted_gbs = text != NULL ? atof(text) : 0.0;
    allocate_t allocate = (allocate_t) real("cudaMalloc"), allocate_host = (allocate_t) real("cudaMallocHost");
    free_t release = (free_t) real("cudaFree"), release_host = (free_t) real("cudaFreeHost"), wait = (free_t) real("cudaStreamSynchronize");
    void * device = NULL, * host = NULL;
    if (wanted_gbs > 0.0 && allocate && allocate_host && release && release_host && wait && allocate(&device, PROBE_BYTES) == 0) {
        if (allocate_host(&host, PROBE_BYTES) == 0) {
            probe_gbs = best_gbs(device, host, wait);
            times     = probe_gbs > wanted_gbs ? probe_gbs / wanted_gbs : 1.0;
            now_gbs   = best_gbs(device, host, wait);
            release_host(host);
        }
        release(device);
    }
    print_line("begin");
}

int cudaMemcpyAsync(void * target, const void * source, size_t size, int kind, void * stream) {
    pthread_once(&found, find);
    if (real_copy == NULL) {
        return MISSING;
    }
    if (kind != HOST_TO_DEVICE || size < LEAST_BYTES) {
        return real_copy(target, source, size, kind, stream);
    }
    pthread_once(&probed, probe);
    atomic_fetch_add(&copies, 1);
    atomic_fetch_add(&bytes, size);
    return copy_slowly(target, source, size, stream);
}

int cudaMemcpy2DAsync(void * target, size_t target_pitch, const void * source, size_t source_pitch, size_t width, size_t height, int kind,
                      void * stream) {
    pthread_once(&found, find);
    if (real_copy_2d == NULL) {
        return MISSING;
    }
    int status = real_copy_2d(target, target_pitch, source, source_pitch, width, height, kind, stream);
    if (status != 0 || kind != HOST_TO_DEVICE || width * height < LEAST_BYTES) {
        return status;
    }
    pthread_once(&probed, probe);
    atomic_fetch_add(&copies, 1);
    atomic_fetch_add(&bytes, width * height);
    for (unsigned more = 1; status == 0 && more < (unsigned) times; more++) {
        status = real_copy_2d(target, target_pitch, source, source_pitch, width, height, kind, stream);
    }
    size_t rows = part_of(height);
    return status == 0 && rows > 0 ? real_copy_2d(target, target_pitch, source, source_pitch, width, rows, kind, stream) : status;
}

__attribute__((destructor)) static void print_end(void) {
    if (atomic_load(&copies) > 0) {
        print_line("end");
    }
}
