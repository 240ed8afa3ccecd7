/*
 * Preloaded into a program that loads libggml-cuda: counts what it really does with CUDA graphs and prints one line of JSON to
 * standard error when the program ends. The plugin's own counters are checked against it.
 *
 * libggml-cuda imports these functions from the CUDA runtime dynamically, so a definition in a preloaded library comes first.
 * The runtime itself is loaded later, as a dependency of that library and outside the program's global scope, so the real
 * functions are looked up in it by name, not as the "next" ones.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>

static atomic_ullong launches, instantiations, captures, updates;

static void * real(const char * name) {
    static const char * const runtimes[] = { "libcudart.so.13", "libcudart.so.12" };
    for (size_t i = 0; i < sizeof(runtimes) / sizeof(runtimes[0]); i++) {
        void * runtime = dlopen(runtimes[i], RTLD_LAZY | RTLD_NOLOAD);
        void * found = runtime != NULL ? dlsym(runtime, name) : NULL;
        if (found != NULL) {
            return found;
        }
    }
    fprintf(stderr, "count-graphs: no %s in a loaded CUDA runtime\n", name);
    return NULL;
}

/* cudaErrorSymbolNotFound */
#define MISSING 500
#define FORWARD(name, type, ...)                                                                                       \
    static _Atomic(type) function;                                                                                     \
    type call = atomic_load(&function);                                                                                \
    if (call == NULL) {                                                                                                \
        call = (type) real(name);                                                                                      \
        atomic_store(&function, call);                                                                                 \
    }                                                                                                                  \
    return call != NULL ? call(__VA_ARGS__) : MISSING

typedef int (*launch_t)(void * exec, void * stream);
int cudaGraphLaunch(void * exec, void * stream) {
    atomic_fetch_add(&launches, 1);
    FORWARD("cudaGraphLaunch", launch_t, exec, stream);
}

typedef int (*instantiate_t)(void ** exec, void * graph, unsigned long long flags);
int cudaGraphInstantiate(void ** exec, void * graph, unsigned long long flags) {
    atomic_fetch_add(&instantiations, 1);
    FORWARD("cudaGraphInstantiate", instantiate_t, exec, graph, flags);
}

typedef int (*begin_t)(void * stream, int mode);
int cudaStreamBeginCapture(void * stream, int mode) {
    atomic_fetch_add(&captures, 1);
    FORWARD("cudaStreamBeginCapture", begin_t, stream, mode);
}

typedef int (*update_t)(void * exec, void * graph, void * info);
int cudaGraphExecUpdate(void * exec, void * graph, void * info) {
    atomic_fetch_add(&updates, 1);
    FORWARD("cudaGraphExecUpdate", update_t, exec, graph, info);
}

__attribute__((destructor)) static void print_counts(void) {
    fprintf(stderr, "count-graphs: {\"launches\":%llu,\"captures\":%llu,\"instantiations\":%llu,\"updates\":%llu}\n",
            atomic_load(&launches), atomic_load(&captures), atomic_load(&instantiations), atomic_load(&updates));
}
