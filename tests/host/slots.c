#include "slots.h"

#define N_BYTES (64 * sizeof(float))

#define NOTHING(call)       ((call), (struct outcome) { .kind = GAVE_NOTHING })
#define POINTER(call)       ((struct outcome) { GAVE_POINTER, { .pointer = (const void *) (call) } })
#define BOOL(call)          ((struct outcome) { GAVE_BOOL, { .boolean = (call) } })
#define STATUS(call)        ((struct outcome) { GAVE_STATUS, { .status = (call) } })
#define NAME(call)          ((struct outcome) { GAVE_NAME, { .name = (call) } })
#define SIZE(call)          ((struct outcome) { GAVE_SIZE, { .size = (call) } })
#define COUNT(call)         ((struct outcome) { GAVE_COUNT, { .size = (call) } })
#define TYPE(call)          ((struct outcome) { GAVE_TYPE, { .type = (int) (call) } })

/* One function and one presence test for each slot of a table. */
#define SLOT(object, slot, result)                                                                                     \
    static bool object##_has_##slot(const struct world * w) { return w->object##_i.slot != NULL; }                     \
    static struct outcome object##_##slot(struct world * w) { return result; }

SLOT(reg, get_name, NAME(w->reg_i.get_name(w->reg)))
SLOT(reg, get_device_count, COUNT(w->reg_i.get_device_count(w->reg)))
SLOT(reg, get_device, POINTER(w->reg_i.get_device(w->reg, 0)))
SLOT(reg, get_proc_address, POINTER(w->reg_i.get_proc_address(w->reg, w->text)))

SLOT(device, get_name, NAME(w->device_i.get_name(w->device)))
SLOT(device, get_description, NAME(w->device_i.get_description(w->device)))
SLOT(device, get_type, TYPE(w->device_i.get_type(w->device)))
SLOT(device, init_backend, POINTER(w->device_i.init_backend(w->device, NULL)))
SLOT(device, get_host_buffer_type, POINTER(w->device_i.get_host_buffer_type(w->device)))
SLOT(device, buffer_from_host_ptr, POINTER(w->device_i.buffer_from_host_ptr(w->device, w->data, N_BYTES, N_BYTES)))
SLOT(device, supports_op, BOOL(w->device_i.supports_op(w->device, w->tensor)))
SLOT(device, supports_buft, BOOL(w->device_i.supports_buft(w->device, w->text != NULL ? w->buffer_type : NULL)))
SLOT(device, offload_op, BOOL(w->device_i.offload_op(w->device, w->tensor)))
SLOT(device, event_new, POINTER(w->device_i.event_new(w->device)))
SLOT(device, event_free, NOTHING(w->device_i.event_free(w->device, w->event)))
SLOT(device, event_synchronize, NOTHING(w->device_i.event_synchronize(w->device, w->event)))

/* The host asserts that a device has a buffer type, so this slot keeps its answer even when its body fails. */
static bool device_has_get_buffer_type(const struct world * w) {
    return w->device_i.get_buffer_type != NULL;
}

static struct outcome device_get_buffer_type(struct world * w) {
    CHECK((w->device_i.get_buffer_type(w->device) != NULL) == w->ours, "get_buffer_type");
    return (struct outcome) { .kind = GAVE_NOTHING };
}

static bool device_has_get_memory(const struct world * w) {
    return w->device_i.get_memory != NULL;
}

static struct outcome device_get_memory(struct world * w) {
    size_t free_bytes = 1, total_bytes = 0; /* not possible: a host that passes them uninitialised must get numbers */
    w->device_i.get_memory(w->device, &free_bytes, &total_bytes);
    CHECK(free_bytes <= total_bytes, "get_memory left its outputs as they were");
    w->device_i.get_memory(w->device, NULL, NULL);
    return (struct outcome) { .kind = GAVE_NOTHING };
}

static bool device_has_get_props(const struct world * w) {
    return w->device_i.get_props != NULL;
}

static struct outcome device_get_props(struct world * w) {
    struct ggml_backend_dev_props props;
    memset(&props, 0, sizeof(props)); /* as ggml_backend_dev_get_props does */
    w->device_i.get_props(w->device, w->text != NULL ? &props : NULL);
    CHECK(!props.caps.async && !props.caps.events && !props.caps.buffer_from_host_ptr, "a failed get_props promises something");
#if HOST_HAS_ROWS
    CHECK(!props.caps.mmap_support, "a failed get_props promises mapping");
#endif
    return (struct outcome) { .kind = GAVE_NOTHING };
}

SLOT(buffer_type, get_name, NAME(w->buffer_type_i.get_name(w->buffer_type)))
SLOT(buffer_type, alloc_buffer, POINTER(w->buffer_type_i.alloc_buffer(w->buffer_type, 4096)))
#if HOST_HAS_LISTS
SLOT(buffer_type, alloc_buffer_n, POINTER(w->buffer_type_i.alloc_buffer_n(w->buffer_type, w->tensor ? &w->tensor : NULL, 1)))
#endif
SLOT(buffer_type, get_alignment, SIZE(w->buffer_type_i.get_alignment(w->buffer_type)))
SLOT(buffer_type, get_max_size, SIZE(w->buffer_type_i.get_max_size(w->buffer_type)))

/* A wrong answer would let host code read device memory, or keep it from the experts: kept as well. */
static bool buffer_type_has_is_host(const struct world * w) {
    return w->buffer_type_i.is_host != NULL;
}

static struct outcome buffer_type_is_host(struct world * w) {
    CHECK(w->buffer_type_i.is_host(w->buffer_type) == (w->ours && w->experts), "is_host");
    return (struct outcome) { .kind = GAVE_NOTHING };
}

static bool buffer_type_has_get_alloc_size(const struct world * w) {
    return w->buffer_type_i.get_alloc_size != NULL;
}

static struct outcome buffer_type_get_alloc_size(struct world * w) {
    const size_t size = w->buffer_type_i.get_alloc_size(w->buffer_type, w->tensor);
    CHECK(w->tensor == NULL || size >= N_BYTES, "get_alloc_size says %zu for %zu bytes", size, N_BYTES);
    return (struct outcome) { .kind = GAVE_NOTHING };
}

#if HOST_HAS_LISTS
static bool buffer_type_has_get_alloc_size_n(const struct world * w) {
    return w->buffer_type_i.get_alloc_size_n != NULL;
}

static struct outcome buffer_type_get_alloc_size_n(struct world * w) {
    struct ggml_tensor * none[] = { NULL };
    w->buffer_type_i.get_alloc_size_n(w->buffer_type, w->tensor != NULL ? &w->tensor : NULL, 1);
    w->buffer_type_i.get_alloc_size_n(w->buffer_type, w->tensor != NULL ? &w->tensor : none, 1);
    return (struct outcome) { .kind = GAVE_NOTHING };
}
#endif

/* The host asserts that a buffer has a base: kept as well. */
static bool buffer_has_get_base(const struct world * w) {
    return w->buffer_i.get_base != NULL;
}

static struct outcome buffer_get_base(struct world * w) {
    CHECK((w->buffer_i.get_base(w->buffer) != NULL) == w->ours, "get_base");
    return (struct outcome) { .kind = GAVE_NOTHING };
}

SLOT(buffer, free_buffer, NOTHING(w->buffer_i.free_buffer(w->buffer)))
SLOT(buffer, init_tensor, STATUS(w->buffer_i.init_tensor(w->buffer, w->tensor)))
SLOT(buffer, memset_tensor, NOTHING(w->buffer_i.memset_tensor(w->buffer, w->tensor, 1, 0, N_BYTES)))
SLOT(buffer, set_tensor, NOTHING(w->buffer_i.set_tensor(w->buffer, w->tensor, w->data, 0, N_BYTES)))
SLOT(buffer, get_tensor, NOTHING(w->buffer_i.get_tensor(w->buffer, w->tensor, w->data, 0, N_BYTES)))
#if HOST_HAS_ROWS
SLOT(buffer, set_tensor_2d, NOTHING(w->buffer_i.set_tensor_2d(w->buffer, w->tensor, w->data, 0, 8, 4, 16, 16)))
SLOT(buffer, get_tensor_2d, NOTHING(w->buffer_i.get_tensor_2d(w->buffer, w->tensor, w->data, 0, 8, 4, 16, 16)))
#endif
SLOT(buffer, cpy_tensor, BOOL(w->buffer_i.cpy_tensor(w->buffer, w->tensor, w->other)))
SLOT(buffer, clear, NOTHING(w->buffer_i.clear(w->buffer, 0)))
SLOT(buffer, reset, NOTHING(w->buffer_i.reset(w->buffer)))

SLOT(backend, get_name, NAME(w->backend_i.get_name(w->backend)))
SLOT(backend, free, NOTHING(w->backend_i.free(w->backend)))
SLOT(backend, set_tensor_async, NOTHING(w->backend_i.set_tensor_async(w->backend, w->tensor, w->data, 0, N_BYTES)))
SLOT(backend, get_tensor_async, NOTHING(w->backend_i.get_tensor_async(w->backend, w->tensor, w->data, 0, N_BYTES)))
#if HOST_HAS_ROWS
SLOT(backend, set_tensor_2d_async, NOTHING(w->backend_i.set_tensor_2d_async(w->backend, w->tensor, w->data, 0, 8, 4, 16, 16)))
SLOT(backend, get_tensor_2d_async, NOTHING(w->backend_i.get_tensor_2d_async(w->backend, w->tensor, w->data, 0, 8, 4, 16, 16)))
#endif
SLOT(backend, cpy_tensor_async, BOOL(w->backend_i.cpy_tensor_async(w->backend, w->backend, w->tensor, w->other)))
SLOT(backend, synchronize, NOTHING(w->backend_i.synchronize(w->backend)))
SLOT(backend, graph_compute, STATUS(w->backend_i.graph_compute(w->backend, w->graph)))
SLOT(backend, event_record, NOTHING(w->backend_i.event_record(w->backend, w->event)))
SLOT(backend, event_wait, NOTHING(w->backend_i.event_wait(w->backend, w->event)))
#if HOST_HAS_PARAMS
SLOT(backend, graph_optimize, NOTHING(w->backend_i.graph_optimize(w->backend, w->graph, w->optimize)))
#else
SLOT(backend, graph_optimize, NOTHING(w->backend_i.graph_optimize(w->backend, w->graph)))
#endif

/* Functions that llama.cpp asks a reg for by name. */
#define PROC(proc, result)                                                                                             \
    static bool has_##proc(const struct world * w) { return w->proc != NULL; }                                         \
    static struct outcome proc_##proc(struct world * w) { return result; }

static bool no_abort(void * data) {
    (void) data;
    return false;
}

PROC(get_extra_bufts, POINTER(w->get_extra_bufts(w->device)))
PROC(set_n_threads, NOTHING(w->set_n_threads(w->backend, 2)))
PROC(set_abort_callback, NOTHING(w->set_abort_callback(w->backend, w->text != NULL ? no_abort : NULL, NULL)))
/* The list is the same for every reg, so nothing is asked of the handle. */
PROC(get_features, w->ours ? POINTER(w->get_features(w->reg)) : NOTHING(w->get_features(w->reg)))

#define OF(object, slot, poisons, operands) { #object "." #slot, object##_has_##slot, object##_##slot, poisons, operands }
/* A slot that this host's layout has no place for. */
#define ABSENT(object, slot)                { #object "." #slot, absent, NULL, false, false }
#define OF_PROC(proc, operands)             { "proc." #proc, has_##proc, proc_##proc, false, operands }

#if !HOST_HAS_LISTS || !HOST_HAS_ROWS
static bool absent(const struct world * w) {
    (void) w;
    return false;
}
#endif

const struct slot SLOTS[] = {
    OF(reg, get_name, false, false),
    OF(reg, get_device_count, false, false),
    OF(reg, get_device, false, false),
    OF(reg, get_proc_address, false, true),
    OF(device, get_name, false, false),
    OF(device, get_description, false, false),
    OF(device, get_memory, false, false),
    OF(device, get_type, false, false),
    OF(device, get_props, false, true),
    OF(device, init_backend, false, false),
    OF(device, get_buffer_type, false, false),
    OF(device, get_host_buffer_type, false, false),
    OF(device, buffer_from_host_ptr, false, true),
    OF(device, supports_op, false, true),
    OF(device, supports_buft, false, true),
    OF(device, offload_op, false, true),
    OF(device, event_new, false, false),
    OF(device, event_free, false, true),
    OF(device, event_synchronize, true, true),
    OF(buffer_type, get_name, false, false),
    OF(buffer_type, alloc_buffer, false, false),
#if HOST_HAS_LISTS
    OF(buffer_type, alloc_buffer_n, false, true),
#else
    ABSENT(buffer_type, alloc_buffer_n),
#endif
    OF(buffer_type, get_alignment, false, false),
    OF(buffer_type, get_max_size, false, false),
    OF(buffer_type, get_alloc_size, false, true),
#if HOST_HAS_LISTS
    OF(buffer_type, get_alloc_size_n, false, true),
#else
    ABSENT(buffer_type, get_alloc_size_n),
#endif
    OF(buffer_type, is_host, false, false),
    OF(buffer, free_buffer, false, false),
    OF(buffer, get_base, false, false),
    OF(buffer, init_tensor, false, true),
    OF(buffer, memset_tensor, true, true),
    OF(buffer, set_tensor, true, true),
    OF(buffer, get_tensor, true, true),
#if HOST_HAS_ROWS
    OF(buffer, set_tensor_2d, true, true),
#else
    ABSENT(buffer, set_tensor_2d),
#endif
#if HOST_HAS_ROWS
    OF(buffer, get_tensor_2d, true, true),
#else
    ABSENT(buffer, get_tensor_2d),
#endif
    OF(buffer, cpy_tensor, false, true),
    OF(buffer, clear, true, false),
    OF(buffer, reset, true, false),
    OF(backend, get_name, false, false),
    OF(backend, free, false, false),
    OF(backend, set_tensor_async, true, true),
    OF(backend, get_tensor_async, true, true),
#if HOST_HAS_ROWS
    OF(backend, set_tensor_2d_async, true, true),
#else
    ABSENT(backend, set_tensor_2d_async),
#endif
#if HOST_HAS_ROWS
    OF(backend, get_tensor_2d_async, true, true),
#else
    ABSENT(backend, get_tensor_2d_async),
#endif
    OF(backend, cpy_tensor_async, false, true),
    OF(backend, synchronize, true, false),
    OF(backend, graph_compute, false, true),
    OF(backend, event_record, true, true),
    OF(backend, event_wait, true, true),
    OF(backend, graph_optimize, true, true),
    OF_PROC(get_extra_bufts, false),
    OF_PROC(set_n_threads, false),
    OF_PROC(set_abort_callback, true),
    OF_PROC(get_features, false),
};
const size_t N_SLOTS = sizeof(SLOTS) / sizeof(SLOTS[0]);

const struct slot * find_slot(const char * name) {
    for (size_t i = 0; i < N_SLOTS; i++) {
        if (strcmp(SLOTS[i].name, name) == 0) {
            return &SLOTS[i];
        }
    }
    return NULL;
}

void check_failure(const char * slot, struct outcome outcome) {
    switch (outcome.kind) {
        case GAVE_NOTHING:
            break;
        case GAVE_POINTER:
            CHECK(outcome.as.pointer == NULL, "%s gave a pointer", slot);
            break;
        case GAVE_BOOL:
            CHECK(!outcome.as.boolean, "%s gave true", slot);
            break;
        case GAVE_STATUS:
            CHECK(outcome.as.status == GGML_STATUS_FAILED, "%s gave status %d", slot, outcome.as.status);
            break;
        case GAVE_NAME:
            CHECK(outcome.as.name != NULL && outcome.as.name[0] != '\0', "%s gave no name", slot);
            break;
        case GAVE_SIZE: /* upstream's default: an alignment that divides, a size that does not limit */
            CHECK(outcome.as.size > 0, "%s gave 0", slot);
            break;
        case GAVE_COUNT:
            CHECK(outcome.as.size == 0, "%s gave %zu", slot, outcome.as.size);
            break;
        case GAVE_TYPE:
            CHECK(outcome.as.type >= 0 && outcome.as.type <= GGML_BACKEND_DEVICE_TYPE_ACCEL, "%s gave %d", slot, outcome.as.type);
            break;
    }
}
