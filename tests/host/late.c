/*
 * A stand-in for a GPU that is late: copies and graphs are taken at once and run afterwards, in order, on a thread of the stream, after
 * delays that look random. It computes with the stock CPU backend, so that results can be asked to be equal.
 *
 * It is part of the C host, and by itself a library to be preloaded into any host. Either way it registers the device LATE0 before
 * `main`, where the environment asks for it:
 *   MOE_HOST_LATE   the backend's name, by which the plugin tells what it may do with it (see fake.c)
 *   MOE_HOST_SEED   seed of the delays
 *   MOE_HOST_KEEP   keep pointers to the weights and ids of expert products until a graph has run, as the Vulkan backend does; otherwise all
 *                   is copied when a graph is taken, as the CUDA backend does
 *   MOE_HOST_REACH  its memory is the host's, as that of integrated GPUs: the plugin lets its kernels write to host memory
 *   MOE_HOST_PINNED it has a host buffer type, whose memory is committed when it is given out, as pinned memory is
 *   MOE_HOST_FINITE end the process when a product of experts is not a number
 *
 * What makes early or missing waits show: memory of hosts is read and written when a copy runs and not before; synchronous copies are
 * ordered behind nothing, as CUDA's; memory is full of NaN when it is given out and when it is taken back.
 */
#define _GNU_SOURCE
#include "late_stream.h"

#define DEVICE "LATE0"

static struct ggml_backend_device late_device;
static struct ggml_backend_buffer_type late_buffer_type;

static ggml_backend_dev_t find_cpu(void) {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

/* Freeing memory waits for the device, as cudaFree does. */
static void wait_for_all(void) {
    for (int i = 0; i < MAX_STREAMS; i++) {
        pthread_mutex_lock(&streams_lock);
        struct stream * stream = streams[i];
        if (stream != NULL) {
            wait_for(stream, asked(stream));
        }
        pthread_mutex_unlock(&streams_lock);
    }
}

static const char * backend_name(ggml_backend_t backend) {
    (void) backend;
    return DEVICE;
}

static void synchronize(ggml_backend_t backend) {
    struct stream * stream = backend->context;
    wait_for(stream, asked(stream));
}

static void backend_free(ggml_backend_t backend) {
    struct stream * stream = backend->context;
    synchronize(backend);
    add_stream(NULL, stream);
    pthread_mutex_lock(&stream->lock);
    stream->ends = true;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    ggml_backend_free(stream->cpu);
    free(stream);
    free(backend);
}

static uint64_t ask_copy(struct stream * stream, void * target, const void * source, size_t size) {
    struct job * job = new_job(COPY);
    job->target = target;
    job->source = source;
    job->size = size;
    return ask(stream, job);
}

static void ask_wait(struct stream * stream, struct stream * other, uint64_t until) {
    struct job * job = new_job(WAIT);
    job->other = other;
    job->until = until;
    ask(stream, job);
}

static void set_tensor_async(ggml_backend_t backend, struct ggml_tensor * t, const void * data, size_t offset, size_t size) {
    ask_copy(backend->context, (uint8_t *) t->data + offset, data, size);
}

static void get_tensor_async(ggml_backend_t backend, const struct ggml_tensor * t, void * data, size_t offset, size_t size) {
    ask_copy(backend->context, data, (const uint8_t *) t->data + offset, size);
}

static bool is_own(const struct ggml_tensor * t) {
    const ggml_backend_buffer_t buffer = t->view_src != NULL ? t->view_src->buffer : t->buffer;
    return buffer != NULL && buffer->buft == &late_buffer_type;
}

static bool copy_tensor_async(ggml_backend_t from, ggml_backend_t to, const struct ggml_tensor * src, struct ggml_tensor * dst) {
    if (from->iface.free != backend_free || to->iface.free != backend_free || !is_own(src) || !is_own(dst)) {
        return false;
    }
    const uint64_t number = ask_copy(from->context, dst->data, src->data, ggml_nbytes(dst));
    if (from != to) {
        ask_wait(to->context, from->context, number);
    }
    return true;
}

static enum ggml_status graph_compute(ggml_backend_t backend, struct ggml_cgraph * graph) {
    struct job * job = new_job(GRAPH);
    take_graph(job, graph);
    ask(backend->context, job);
    return GGML_STATUS_SUCCESS;
}

/* Events: a place in a stream. */

struct place {
    struct stream * stream;
    uint64_t number;
};

static void event_record(ggml_backend_t backend, ggml_backend_event_t event) {
    *(struct place *) event->context = (struct place) { backend->context, asked(backend->context) };
}

static void event_wait(ggml_backend_t backend, ggml_backend_event_t event) {
    const struct place * place = event->context;
    if (place->stream != NULL && place->stream != backend->context) {
        ask_wait(backend->context, place->stream, place->number);
    }
}

static ggml_backend_event_t event_new(ggml_backend_dev_t dev) {
    ggml_backend_event_t event = get_bytes(sizeof(*event));
    *event = (struct ggml_backend_event) { dev, get_bytes(sizeof(struct place)) };
    return event;
}

static void event_free(ggml_backend_dev_t dev, ggml_backend_event_t event) {
    (void) dev;
    free(event->context);
    free(event);
}

static void event_synchronize(ggml_backend_dev_t dev, ggml_backend_event_t event) {
    (void) dev;
    const struct place * place = event->context;
    if (place->stream != NULL) {
        wait_for(place->stream, place->number);
    }
}

/* Device memory. Copies here run at once, whatever the streams do meanwhile. */

static const char * buffer_type_name(ggml_backend_buffer_type_t buft) {
    (void) buft;
    return DEVICE;
}

static bool is_host(ggml_backend_buffer_type_t buft) {
    (void) buft;
    return getenv("MOE_HOST_REACH") != NULL;
}

static size_t alignment(ggml_backend_buffer_type_t buft) {
    (void) buft;
    return 128;
}

static void free_buffer(ggml_backend_buffer_t buffer) {
    wait_for_all();
    memset(buffer->context, 0xff, buffer->size);
    free(buffer->context);
}

static void * get_base(ggml_backend_buffer_t buffer) {
    return buffer->context;
}

static void memset_tensor(ggml_backend_buffer_t buffer, struct ggml_tensor * t, uint8_t value, size_t offset, size_t size) {
    (void) buffer;
    memset((uint8_t *) t->data + offset, value, size);
}

static void set_tensor(ggml_backend_buffer_t buffer, struct ggml_tensor * t, const void * data, size_t offset, size_t size) {
    (void) buffer;
    memcpy((uint8_t *) t->data + offset, data, size);
}

static void get_tensor(ggml_backend_buffer_t buffer, const struct ggml_tensor * t, void * data, size_t offset, size_t size) {
    (void) buffer;
    memcpy(data, (const uint8_t *) t->data + offset, size);
}

static bool copy_tensor(ggml_backend_buffer_t buffer, const struct ggml_tensor * src, struct ggml_tensor * dst) {
    (void) buffer;
    if (!is_own(src)) {
        return false;
    }
    memmove(dst->data, src->data, ggml_nbytes(dst));
    return true;
}

static void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    memset(buffer->context, value, buffer->size);
}

static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    uint8_t * memory = size > ((size_t) 1 << 40) ? NULL : aligned_alloc(128, GGML_PAD(size, 128) + 128);
    if (memory == NULL) {
        return NULL;
    }
    memset(memory, 0xff, GGML_PAD(size, 128) + 128); /* NaN in every float format */
    const struct ggml_backend_buffer_i iface = {
        .free_buffer = free_buffer, .get_base = get_base, .memset_tensor = memset_tensor, .set_tensor = set_tensor,
        .get_tensor = get_tensor, .cpy_tensor = copy_tensor, .clear = clear,
    };
    return ggml_backend_buffer_init(buft, iface, memory, size);
}

static const char * pinned_name(ggml_backend_buffer_type_t buft) {
    (void) buft;
    return DEVICE "_Host";
}

static bool yes(ggml_backend_buffer_type_t buft) {
    (void) buft;
    return true;
}

static ggml_backend_buffer_t pinned_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    if (buffer != NULL) {
        memset(ggml_backend_buffer_get_base(buffer), 0, size);
        buffer->buft = buft;
    }
    return buffer;
}

static size_t pinned_alignment(ggml_backend_buffer_type_t buft) {
    (void) buft;
    return ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type());
}

static struct ggml_backend_buffer_type pinned_type = {
    .device = &late_device,
    .iface = { .get_name = pinned_name, .alloc_buffer = pinned_alloc, .get_alignment = pinned_alignment, .is_host = yes },
};

/* The device and its reg. */

static ggml_backend_buffer_type_t device_host_type(ggml_backend_dev_t dev) {
    (void) dev;
    return getenv("MOE_HOST_PINNED") != NULL ? &pinned_type : NULL;
}

static const char * device_name(ggml_backend_dev_t dev) {
    (void) dev;
    return DEVICE;
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
    props->name = props->description = device_name(dev);
    device_memory(dev, &props->memory_free, &props->memory_total);
    props->type = device_type(dev);
    props->device_id = "0000:1a:00.0";
    props->caps = (struct ggml_backend_dev_caps) { .async = true, .events = true };
}

static ggml_backend_t device_init(ggml_backend_dev_t dev, const char * params) {
    static ggml_guid guid = { 0x1a, 0x7e };
    static uint64_t opened;
    (void) params;
    struct stream * stream = get_bytes(sizeof(*stream));
    ggml_backend_t backend = get_bytes(sizeof(*backend));
    stream->cpu = ggml_backend_dev_init(find_cpu(), NULL);
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    const char * seed = getenv("MOE_HOST_SEED");
    const uint64_t number = __atomic_add_fetch(&opened, 1, __ATOMIC_RELAXED);
    stream->random = (strtoull(seed != NULL ? seed : "1", NULL, 10) * 64 + number) * 0x9e3779b97f4a7c15u | 1;
    add_stream(stream, NULL);
    if (pthread_create(&stream->thread, NULL, run_stream, stream) != 0) {
        REPORT("no thread");
    }
    *backend = (struct ggml_backend) {
        .guid = &guid, .device = dev, .context = stream,
        .iface = {
            .get_name = backend_name, .free = backend_free, .set_tensor_async = set_tensor_async,
            .get_tensor_async = get_tensor_async, .cpy_tensor_async = copy_tensor_async, .synchronize = synchronize,
            .graph_compute = graph_compute, .event_record = event_record, .event_wait = event_wait,
        },
    };
    return backend;
}

static ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t dev) {
    (void) dev;
    return &late_buffer_type;
}

static bool supports_op(ggml_backend_dev_t dev, const struct ggml_tensor * op) {
    (void) dev;
    return ggml_backend_dev_supports_op(find_cpu(), op);
}

static bool supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    (void) dev;
    return buft == &late_buffer_type;
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
    return index == 0 ? &late_device : NULL;
}

static void set_n_threads(ggml_backend_t backend, int n_threads) {
    synchronize(backend);
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(find_cpu());
    ggml_backend_set_n_threads_t set = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    set(((struct stream *) backend->context)->cpu, n_threads);
}

static void * reg_proc(ggml_backend_reg_t reg, const char * name) {
    (void) reg;
    return strcmp(name, "ggml_backend_set_n_threads") == 0 ? (void *) set_n_threads : NULL;
}

__attribute__((constructor)) static void register_late(void) {
    static struct ggml_backend_reg reg = {
        .api_version = GGML_BACKEND_API_VERSION,
        .iface = { reg_name, reg_device_count, reg_device, reg_proc },
    };
    reg.context = getenv("MOE_HOST_LATE");
    if (reg.context == NULL) {
        return;
    }
    late_buffer_type = (struct ggml_backend_buffer_type) {
        .device = &late_device,
        .iface = { .get_name = buffer_type_name, .alloc_buffer = alloc_buffer, .get_alignment = alignment, .is_host = is_host },
    };
    late_device = (struct ggml_backend_device) {
        .reg = &reg,
        .iface = {
            .get_name = device_name, .get_description = device_name, .get_memory = device_memory,
            .get_type = device_type, .get_props = device_props, .init_backend = device_init,
            .get_buffer_type = device_buffer_type, .get_host_buffer_type = device_host_type, .supports_op = supports_op, .supports_buft = supports_buft,
            .event_new = event_new, .event_free = event_free, .event_synchronize = event_synchronize,
        },
    };
    ggml_backend_register(&reg);
}
