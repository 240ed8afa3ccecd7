/*
 * What every case of the C host uses: checks, the captured log, and the plugin's objects.
 *
 * The host is built against ggml's own headers and linked to the stock libraries, as llama.cpp is, so it sees the plugin
 * exactly as llama.cpp does. One process runs one case; tests/abi_host.rs starts it.
 */
#ifndef GGML_MOE_TESTS_HOST_H
#define GGML_MOE_TESTS_HOST_H

#include "ggml-alloc.h"
#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "ggml.h"

/* What releases differ in; tests/layouts.rs sets these for hosts other than the main one. */
#ifndef HOST_HAS_LISTS
#define HOST_HAS_LISTS 1 /* buffer types allocate lists of tensors */
#endif
#ifndef HOST_HAS_ROWS
#define HOST_HAS_ROWS 1 /* copies of rows, ids of graphs, the capability mmap_support */
#endif
#ifndef HOST_HAS_PARAMS
#define HOST_HAS_PARAMS 1 /* graph_optimize takes parameters */
#endif
/* Random graphs use operations and functions that releases of 2025 lack. */
#define HOST_HAS_RANDOM HOST_HAS_ROWS

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Ends the process with a message when the condition does not hold. */
#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: CHECK(%s) failed: ", __FILE__, __LINE__, #condition);                              \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fputc('\n', stderr);                                                                                       \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* How many captured lines of the host's log hold both texts (b may be NULL). */
int log_count(const char * a, const char * b);
/* The last captured line that holds the text, or NULL. Valid until the next log_forget. */
const char * log_last(const char * text);
/* Forgets what was captured. */
void log_forget(void);

/* A number behind "name": in a line of JSON; ends the process if it is not there. */
long long json_number(const char * line, const char * name);

/* Loads the plugin; its first device is in the second. Both end the process if there is none. */
ggml_backend_reg_t load_plugin(void);
ggml_backend_dev_t device_number(ggml_backend_reg_t reg, size_t index);
/* The plugin's path, as given to the host. */
const char * plugin_path(void);
/* The device's second buffer type, for experts, found the way llama.cpp finds it. */
ggml_backend_buffer_type_t expert_buffer_type(ggml_backend_reg_t reg, ggml_backend_dev_t dev);
/* The stock CPU backend's device. */
ggml_backend_dev_t cpu_device(void);
/* Registers the stand-in for a GPU, FAKE0 (fake.c), as a device of the backend with that name. */
void register_fake(const char * name);
/* The device that the plugin stands in front of: FAKE0 where it is registered, else the stock CPU. */
ggml_backend_dev_t inner_device(void);
/* Sets the thread count of any backend through its reg's proc, as llama.cpp does; MOE_HOST_THREADS is the most that it sets. */
void set_threads(ggml_backend_t backend, int n_threads);

/* A context that holds tensors without data. */
struct ggml_context * new_context(size_t tensors);
/* Bytes that look random but are the same in every run. */
void fill(void * data, size_t size, uint32_t seed);
/* Memory for a test; never NULL. */
void * get_memory(size_t size);

/* The cases, one file per topic. */
void case_load(void);          /* load.c */
void case_load_again(void);    /* load.c */
void case_device(void);        /* device.c */
void case_two_devices(void);   /* device.c */
void case_supports(void);      /* supports.c */
void case_buffers(void);       /* buffers.c */
void case_lent(void);          /* lent.c */
void case_copies(void);        /* buffers.c */
void case_graphs(void);        /* graphs.c */
void case_abort(void);         /* graphs.c */
void case_scheduler(void);     /* graphs.c */
void case_threads(void);       /* graphs.c */
void case_split(void);         /* graphs.c */
void case_pass_through(void);  /* graphs.c */
void case_random(const char * seeds);    /* random.c */
void case_null(void);          /* faults.c */
void case_foreign(void);       /* faults.c */
void case_bounds(void);        /* faults.c */
void case_slots(void);         /* faults.c */
void case_panic(const char * slot);      /* faults.c */
void case_fail_device(const char * n);   /* memory.c */
void case_fail_host(const char * n);     /* memory.c */

#endif
