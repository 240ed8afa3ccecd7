/* Every function that the host can call in the plugin, as a table: how to call it, and how its failure looks. */
#ifndef GGML_MOE_TESTS_SLOTS_H
#define GGML_MOE_TESTS_SLOTS_H

#include "host.h"

/* The objects that a call uses. The tables of slots are always there; any handle or operand may be NULL. */
struct world {
    struct ggml_backend_reg_i reg_i;
    struct ggml_backend_device_i device_i;
    struct ggml_backend_buffer_type_i buffer_type_i;
    struct ggml_backend_buffer_i buffer_i;
    struct ggml_backend_i backend_i;
    ggml_backend_dev_get_extra_bufts_t get_extra_bufts;
    ggml_backend_set_n_threads_t set_n_threads;
    ggml_backend_set_abort_callback_t set_abort_callback;
    ggml_backend_get_features_t get_features;

    bool ours;    /* the handles are the plugin's, not NULL and not another backend's */
    bool experts; /* buffer and buffer type are those for experts */
    ggml_backend_reg_t reg;
    ggml_backend_dev_t device;
    ggml_backend_buffer_type_t buffer_type;
    ggml_backend_buffer_t buffer;
    ggml_backend_t backend;
    ggml_backend_event_t event;

    /* Operands. */
    struct ggml_context * ctx;   /* holds the tensors and the graph */
    const char * text;           /* a name; NULL also stands for an operand that this struct has no place for */
    struct ggml_tensor * tensor; /* in the buffer, 64 floats */
    struct ggml_tensor * other;  /* the same, beside it */
    void * data;                 /* room for both */
    struct ggml_cgraph * graph;  /* other = tensor + tensor */
    struct ggml_backend_graph_optimize_params * optimize;
};

/* What a call gave. */
struct outcome {
    enum { GAVE_NOTHING, GAVE_POINTER, GAVE_BOOL, GAVE_STATUS, GAVE_NAME, GAVE_SIZE, GAVE_COUNT, GAVE_TYPE } kind;
    union {
        const void * pointer;
        bool boolean;
        enum ggml_status status;
        const char * name;
        size_t size;
        int type;
    } as;
};

struct slot {
    const char * name;                          /* as the plugin names it: object.slot */
    bool (*present)(const struct world * w);    /* whether the plugin fills it */
    struct outcome (*call)(struct world * w);
    bool poisons;                               /* a failure leaves data or order in doubt, so graphs fail from then on */
    bool has_operands;                          /* takes more than its own handle */
};

extern const struct slot SLOTS[];
extern const size_t N_SLOTS;

const struct slot * find_slot(const char * name);

/* Ends the process unless the outcome is what the kind of slot gives when it fails. */
void check_failure(const char * slot, struct outcome outcome);

#endif
