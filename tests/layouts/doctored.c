/*
 * Preloaded into a host of the tests: makes its ggml look like one with another layout. What the host computes stays as it is.
 *
 * GGML_MOE_DOCTOR names what differs. Calls between ggml's libraries go through the same names, so that the host itself sees the
 * other object, too. Does not: change anything if the variable is not set.
 */
#define _GNU_SOURCE
#include "ggml-backend-impl.h"
#include "ggml.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static bool differs(const char * what) {
    const char * chosen = getenv("GGML_MOE_DOCTOR");
    return chosen != NULL && strcmp(chosen, what) == 0;
}

typedef void * (*lookup)(void * handle, const char * name);

/* dlsym itself is replaced below, so it is found by its version. */
static lookup real_dlsym(void) {
    return (lookup) dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
}

#define REAL(name) ((__typeof__(&name)) real_dlsym()(RTLD_NEXT, #name))

/* A function that the plugin needs is not exported. */
void * dlsym(void * restrict handle, const char * restrict name) {
    return differs("function") && strcmp(name, "ggml_graph_add_node") == 0 ? NULL : real_dlsym()(handle, name);
}

/* An optional slot is set where the host leaves it empty; it gives what an empty one means. */
static size_t no_limit(ggml_backend_buffer_type_t buft) {
    (void) buft;
    return SIZE_MAX;
}

ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type(void) {
    static struct ggml_backend_buffer_type doctored;
    ggml_backend_buffer_type_t real = REAL(ggml_backend_cpu_buffer_type)();
    if (!differs("slot")) {
        return real;
    }
    struct ggml_backend_buffer_type copy = *real;
    copy.iface.get_max_size = no_limit;
    doctored = copy;
    return &doctored;
}

/* Tensors are larger. */
size_t ggml_tensor_overhead(void) {
    return REAL(ggml_tensor_overhead)() + (differs("tensor") ? 16 : 0);
}

/* An op has another name. */
const char * ggml_op_name(enum ggml_op op) {
    return differs("op") && op == GGML_OP_MUL_MAT_ID ? "MUL_MAT_IDS" : REAL(ggml_op_name)(op);
}

/* Backends have another api version: the host has looked at it when it took the backend, and does not look again. */
ggml_backend_reg_t ggml_backend_reg_get(size_t index) {
    ggml_backend_reg_t reg = REAL(ggml_backend_reg_get)(index);
    if (differs("version")) {
        reg->api_version = 99;
    }
    return reg;
}

/* Graphs have another size than the one in their struct. */
int ggml_graph_size(struct ggml_cgraph * cgraph) {
    return REAL(ggml_graph_size)(cgraph) + (differs("graph") ? 1 : 0);
}
