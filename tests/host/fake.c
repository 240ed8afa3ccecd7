/*
 * A stand-in for a GPU backend, registered before the plugin is loaded (inner=FAKE0). MOE_HOST_FAKE is the backend's name: by
 * it the plugin tells backends that compute in any memory of their device from those that insist on buffers of their own.
 * It computes with the stock CPU backend, but it has what the CPU backend lacks (asynchronous copies, events, graph_optimize,
 * padded sizes), and it is as strict as the CUDA backend is: it refuses memory and buffers that are not its own, trusts the
 * ids of graphs, and starts from memory full of garbage.
 */
#include "host.h"

#include <pthread.h>

#define DEVICE "FAKE0"
#define ROW_PADDING 512

static struct ggml_backend_device fake_device;
static struct ggml_backend_buffer_type fake_buffer_type;

/* Device memory: who owns an address. */

#define MAX_RANGES 256
static pthread_mutex_t range_lock = PTHREAD_MUTEX_INITIALIZER;
static struct { uint8_t * base; size_t size; } ranges[MAX_RANGES];

static void track(uint8_t * base, size_t size, bool add) {
    pthread_mutex_lock(&range_lock);
    int i = 0;
    while (i < MAX_RANGES && ranges[i].base != (add ? NULL : base)) {
        i++;
    }
    CHECK(i < MAX_RANGES, "too many buffers, or a buffer freed twice");
    ranges[i].base = add ? base : NULL;
    ranges[i].size = size;
    pthread_mutex_unlock(&range_lock);
}

static bool on_device(const void * data, size_t size) {
    const uint8_t * at = data;
    bool found = false;
    pthread_mutex_lock(&range_lock);
    for (int i = 0; i < MAX_RANGES; i++) {
        found = found || (ranges[i].base != NULL && at >= ranges[i].base && at + size <= ranges[i].base + ranges[i].size);
    }
    pthread_mutex_unlock(&range_lock);
    return found;
}

static const char * buffer_type_name(ggml_backend_buffer_type_t buft) {
    (void) buft;
    return DEVICE;
}

static size_t alignment(ggml_backend_buffer_type_t buft) {
    (void) buft;
    return 128;
}

/* Kernels read whole steps of 512 values, so the last row is followed by a padding. */
static size_t alloc_size(ggml_backend_buffer_type_t buft, const struct ggml_tensor * t) {
    CHECK(buft == &fake_buffer_type, "get_alloc_size of another buffer type");
    const int64_t rest = t->ne[0] % ROW_PADDING;
    return ggml_nbytes(t) + (ggml_is_quantized(t->type) && rest != 0 ? ggml_row_size(t->type, ROW_PADDING - rest) : 0);
}

static void free_buffer(ggml_backend_buffer_t buffer) {
    track(buffer->context, 0, false);
    free(buffer->context);
}

static void * get_base(ggml_backend_buffer_t buffer) {
    return buffer->context;
}

static void check_access(ggml_backend_buffer_t buffer, const struct ggml_tensor * t, size_t offset, size_t size) {
    CHECK(buffer->buft == &fake_buffer_type, "a buffer of another type");
    CHECK(on_device((const uint8_t *) t->data + offset, size), "an access to memory that is not the device's");
}

static enum ggml_status init_tensor(ggml_backend_buffer_t buffer, struct ggml_tensor * t) {
    check_access(buffer, t, 0, ggml_nbytes(t));
    if (t->view_src == NULL && ggml_is_quantized(t->type) && buffer->usage != GGML_BACKEND_BUFFER_USAGE_COMPUTE) {
        memset((uint8_t *) t->data + ggml_nbytes(t), 0, alloc_size(buffer->buft, t) - ggml_nbytes(t));
    }
    return GGML_STATUS_SUCCESS;
}

static void memset_tensor(ggml_backend_buffer_t buffer, struct ggml_tensor * t, uint8_t value, size_t offset, size_t size) {
    check_access(buffer, t, offset, size);
    memset((uint8_t *) t->data + offset, value, size);
}

static void set_tensor(ggml_backend_buffer_t buffer, struct ggml_tensor * t, const void * data, size_t offset, size_t size) {
    check_access(buffer, t, offset, size);
    memcpy((uint8_t *) t->data + offset, data, size);
}

static void get_tensor(ggml_backend_buffer_t buffer, const struct ggml_tensor * t, void * data, size_t offset, size_t size) {
    check_access(buffer, t, offset, size);
    memcpy(data, (const uint8_t *) t->data + offset, size);
}

static bool is_own(ggml_backend_buffer_t buffer) {
    return buffer != NULL && buffer->iface.free_buffer == free_buffer;
}

static bool copy_tensor(ggml_backend_buffer_t buffer, const struct ggml_tensor * src, struct ggml_tensor * dst) {
    check_access(buffer, dst, 0, ggml_nbytes(dst));
    if (!is_own(src->view_src != NULL ? src->view_src->buffer : src->buffer)) {
        return false;
    }
    CHECK(on_device(src->data, ggml_nbytes(src)), "a copy from memory that is not the device's");
    memmove(dst->data, src->data, ggml_nbytes(dst));
    return true;
}

static void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    memset(buffer->context, value, buffer->size);
}

static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    if (size > ((size_t) 1 << 40)) {
        return NULL;
    }
    /* Room before and behind, so that no two buffers touch. */
    uint8_t * memory = aligned_alloc(128, GGML_PAD(size, 128) + 128);
    if (memory == NULL) {
        return NULL;
    }
    memset(memory, 0xff, size); /* NaN in every float format */
    track(memory, size, true);
    const struct ggml_backend_buffer_i iface = {
        .free_buffer = free_buffer, .get_base = get_base, .init_tensor = init_tensor, .memset_tensor = memset_tensor,
        .set_tensor = set_tensor, .get_tensor = get_tensor, .cpy_tensor = copy_tensor, .clear = clear,
    };
    return ggml_backend_buffer_init(buft, iface, memory, size);
}

/* Streams. */

struct replay {
    const struct ggml_tensor * first;
    uint64_t uid, hash;
    int n_nodes;
};

struct stream {
    ggml_backend_t cpu;
    struct replay replays[64];
    int n_replays;
};

static const char * backend_name(ggml_backend_t backend) {
    (void) backend;
    return DEVICE;
}

static void backend_free(ggml_backend_t backend) {
    struct stream * stream = backend->context;
    ggml_backend_free(stream->cpu);
    free(stream);
    free(backend);
}

/* As the CUDA backend: the buffer that the tensor names must be one of its own type. */
static void check_async(const struct ggml_tensor * t, size_t offset, size_t size) {
    check_access(t->view_src != NULL ? t->view_src->buffer : t->buffer, t, offset, size);
}

static void set_tensor_async(ggml_backend_t backend, struct ggml_tensor * t, const void * data, size_t offset,
                             size_t size) {
    (void) backend;
    check_async(t, offset, size);
    memcpy((uint8_t *) t->data + offset, data, size);
}

static void get_tensor_async(ggml_backend_t backend, const struct ggml_tensor * t, void * data, size_t offset,
                             size_t size) {
    (void) backend;
    check_async(t, offset, size);
    memcpy(data, (const uint8_t *) t->data + offset, size);
}

static bool copy_tensor_async(ggml_backend_t from, ggml_backend_t to, const struct ggml_tensor * src,
                              struct ggml_tensor * dst) {
    if (from->iface.free != backend_free || to->iface.free != backend_free || !is_own(src->buffer) ||
        !is_own(dst->buffer)) {
        return false;
    }
    check_async(src, 0, ggml_nbytes(src));
    check_async(dst, 0, ggml_nbytes(dst));
    memmove(dst->data, src->data, ggml_nbytes(dst));
    return true;
}

static void synchronize(ggml_backend_t backend) {
    (void) backend;
}

static uint64_t mix(uint64_t hash, const void * data, size_t size) {
    for (size_t i = 0; i < size; i++) {
        hash = (hash ^ ((const uint8_t *) data)[i]) * 1099511628211u;
    }
    return hash;
}

/* Every byte that a recorded graph would have baked in. */
static uint64_t hash_graph(const struct ggml_cgraph * graph) {
    uint64_t hash = 14695981039346656037u;
    for (int i = 0; i < graph->n_nodes; i++) {
        const struct ggml_tensor * t = graph->nodes[i];
        hash = mix(mix(mix(hash, &t, sizeof(t)), &t->op, sizeof(t->op)), t->op_params, sizeof(t->op_params));
        for (int k = -1; k < GGML_MAX_SRC; k++) {
            const struct ggml_tensor * s = k < 0 ? t : t->src[k];
            if (s != NULL) {
                hash = mix(mix(mix(hash, &s->data, sizeof(s->data)), s->ne, sizeof(s->ne)), s->nb, sizeof(s->nb));
            }
        }
    }
    return hash;
}

/* The CUDA backend compares nothing when the id of a graph with the same first node is the one that it has recorded. */
static void check_replay(struct stream * stream, const struct ggml_cgraph * graph) {
    const uint64_t hash = hash_graph(graph);
#if HOST_HAS_ROWS
    const uint64_t uid = graph->uid;
#else
    const uint64_t uid = 0;
#endif
    struct replay * replay = NULL;
    for (int i = 0; i < stream->n_replays; i++) {
        replay = stream->replays[i].first == graph->nodes[0] ? &stream->replays[i] : replay;
    }
    if (replay == NULL) {
        replay = &stream->replays[stream->n_replays < 64 ? stream->n_replays++ : 0];
    } else if (uid != 0 && uid == replay->uid) {
        CHECK(graph->n_nodes == replay->n_nodes, "one id for graphs of %d and %d nodes", replay->n_nodes, graph->n_nodes);
        CHECK(hash == replay->hash, "one id for two graphs that differ");
    }
    *replay = (struct replay) { graph->nodes[0], uid, hash, graph->n_nodes };
}

static void check_operand(const struct ggml_tensor * node, const struct ggml_tensor * t) {
    CHECK(t->buffer != NULL || (t->view_src != NULL && t->view_src->buffer != NULL), "%s has no buffer", t->name);
    CHECK(on_device(t->data, ggml_nbytes(t)), "%s of %s %s lies outside the device", t->name, ggml_op_name(node->op),
          node->name);
    const bool is_weight = t->view_src == NULL && t->op == GGML_OP_NONE && ggml_is_quantized(t->type);
    if (is_weight && t->buffer->usage != GGML_BACKEND_BUFFER_USAGE_COMPUTE) {
        const size_t size = ggml_nbytes(t), padded = alloc_size(&fake_buffer_type, t);
        CHECK(on_device(t->data, padded), "the padding of %s lies outside the device", t->name);
        for (size_t i = size; i < padded; i++) {
            CHECK(((const uint8_t *) t->data)[i] == 0, "the padding of %s is not zero", t->name);
        }
    }
}

static enum ggml_status graph_compute(ggml_backend_t backend, struct ggml_cgraph * graph) {
    struct stream * stream = backend->context;
    CHECK(graph->n_nodes > 0, "an empty graph");
    for (int i = 0; i < graph->n_nodes; i++) {
        const struct ggml_tensor * node = graph->nodes[i];
        if (node->op == GGML_OP_NONE || node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE ||
            node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
            continue;
        }
        check_operand(node, node);
        for (int k = 0; k < GGML_MAX_SRC; k++) {
            if (node->src[k] != NULL) {
                check_operand(node, node->src[k]);
            }
        }
    }
    check_replay(stream, graph);
    return ggml_backend_graph_compute(stream->cpu, graph);
}

static void event_record(ggml_backend_t backend, ggml_backend_event_t event) {
    (void) backend;
    CHECK(event->context == &fake_device, "an event of another backend");
}

/* Asks for the longest life of the first result, as the CUDA backend does for operands of fused kernels. */
#if HOST_HAS_PARAMS
static void graph_optimize(ggml_backend_t backend, struct ggml_cgraph * graph,
                           struct ggml_backend_graph_optimize_params * params) {
    (void) backend;
    if (params != NULL && params->add_alloc_dep != NULL && graph->n_nodes > 1) {
        params->add_alloc_dep(params->user_data, graph->nodes[0], graph->nodes[graph->n_nodes - 1]);
    }
}
#else
static void graph_optimize(ggml_backend_t backend, struct ggml_cgraph * graph) {
    (void) backend, (void) graph;
}
#endif

/* The device and its reg. */

static const char * device_name(ggml_backend_dev_t dev) {
    (void) dev;
    return DEVICE;
}

static const char * device_description(ggml_backend_dev_t dev) {
    (void) dev;
    return "a GPU for tests";
}

static void device_memory(ggml_backend_dev_t dev, size_t * free_bytes, size_t * total_bytes) {
    (void) dev;
    *free_bytes = (size_t) 8 << 30;
    *total_bytes = (size_t) 16 << 30;
}

static enum ggml_backend_dev_type device_type(ggml_backend_dev_t dev) {
    (void) dev;
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

static void device_props(ggml_backend_dev_t dev, struct ggml_backend_dev_props * props) {
    props->name = device_name(dev);
    props->description = device_description(dev);
    device_memory(dev, &props->memory_free, &props->memory_total);
    props->type = device_type(dev);
    props->device_id = "0000:0f:00.0";
    props->caps = (struct ggml_backend_dev_caps) { .async = true, .events = true };
}

static ggml_backend_t device_init(ggml_backend_dev_t dev, const char * params) {
    static ggml_guid guid = { 0xfa, 0x4e };
    (void) params;
    struct stream * stream = calloc(1, sizeof(*stream));
    ggml_backend_t backend = calloc(1, sizeof(*backend));
    CHECK(stream != NULL && backend != NULL, "calloc");
    stream->cpu = ggml_backend_dev_init(cpu_device(), NULL);
    *backend = (struct ggml_backend) {
        .guid = &guid, .device = dev, .context = stream,
        .iface = {
            .get_name = backend_name, .free = backend_free, .set_tensor_async = set_tensor_async,
            .get_tensor_async = get_tensor_async, .cpy_tensor_async = copy_tensor_async, .synchronize = synchronize,
            .graph_compute = graph_compute, .event_record = event_record, .event_wait = event_record,
            .graph_optimize = graph_optimize,
        },
    };
    return backend;
}

static ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t dev) {
    (void) dev;
    return &fake_buffer_type;
}

static bool supports_op(ggml_backend_dev_t dev, const struct ggml_tensor * op) {
    (void) dev;
    return ggml_backend_dev_supports_op(cpu_device(), op);
}

static bool supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    (void) dev;
    return buft == &fake_buffer_type;
}

static ggml_backend_event_t event_new(ggml_backend_dev_t dev) {
    ggml_backend_event_t event = get_memory(sizeof(*event));
    *event = (struct ggml_backend_event) { dev, &fake_device };
    return event;
}

static void event_free(ggml_backend_dev_t dev, ggml_backend_event_t event) {
    (void) dev;
    free(event);
}

static void event_synchronize(ggml_backend_dev_t dev, ggml_backend_event_t event) {
    (void) dev;
    CHECK(event->context == &fake_device, "an event of another backend");
}

static const char * reg_name(ggml_backend_reg_t reg) {
    return reg->context;
}

static size_t reg_device_count(ggml_backend_reg_t reg) {
    (void) reg;
    return 1;
}

static ggml_backend_dev_t reg_device(ggml_backend_reg_t reg, size_t index) {
    (void) reg;
    return index == 0 ? &fake_device : NULL;
}

static void set_n_threads(ggml_backend_t backend, int n_threads) {
    CHECK(backend->iface.free == backend_free, "set_n_threads of another backend");
    set_threads(((struct stream *) backend->context)->cpu, n_threads);
}

static void * reg_proc(ggml_backend_reg_t reg, const char * name) {
    (void) reg;
    return strcmp(name, "ggml_backend_set_n_threads") == 0 ? (void *) set_n_threads : NULL;
}

void register_fake(const char * name) {
    static struct ggml_backend_reg reg = {
        .api_version = GGML_BACKEND_API_VERSION,
        .iface = { reg_name, reg_device_count, reg_device, reg_proc },
    };
    reg.context = (void *) name;
    fake_buffer_type = (struct ggml_backend_buffer_type) {
        .device = &fake_device,
        .iface = {
            .get_name = buffer_type_name, .alloc_buffer = alloc_buffer, .get_alignment = alignment,
            .get_alloc_size = alloc_size,
        },
    };
    fake_device = (struct ggml_backend_device) {
        .reg = &reg,
        .iface = {
            .get_name = device_name, .get_description = device_description, .get_memory = device_memory,
            .get_type = device_type, .get_props = device_props, .init_backend = device_init,
            .get_buffer_type = device_buffer_type, .supports_op = supports_op, .supports_buft = supports_buft,
            .event_new = event_new, .event_free = event_free, .event_synchronize = event_synchronize,
        },
    };
    ggml_backend_register(&reg);
}
