/*
 * The streams of the late device (late.c): a queue of copies and graphs, and a thread that runs them in order after delays that look random.
 *
 * A graph is copied when it is taken, nodes and what they point to; MOE_HOST_KEEP says what is kept by pointer all the same.
 */
#ifndef GGML_MOE_TESTS_LATE_STREAM_H
#define GGML_MOE_TESTS_LATE_STREAM_H

#include "host.h"

#include <math.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define MAX_STREAMS 64

/* Ends the process from any thread. */
#define REPORT(...)                                                                                                    \
    do {                                                                                                               \
        fprintf(stderr, "late: " __VA_ARGS__);                                                                         \
        fputc('\n', stderr);                                                                                           \
        _exit(3);                                                                                                      \
    } while (0)

enum kind { COPY, GRAPH, WAIT };

struct stream;

struct job {
    enum kind kind;
    struct job * next;
    /* COPY */
    void * target;
    const void * source;
    size_t size;
    /* GRAPH: pointers to copies of the nodes, what they read as far as it was copied, and a hash of what was not */
    struct ggml_context * context;
    struct ggml_cgraph * graph;
    struct ggml_tensor * copies;
    uint64_t hash;
    /* WAIT */
    struct stream * other;
    uint64_t until;
};

struct stream {
    ggml_backend_t cpu;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct job * first, * last;
    uint64_t asked, done;
    uint64_t random;
    bool ends;
};

static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream * streams[MAX_STREAMS];

/* Zeroed memory; never NULL. Not the C host's function: this file may be a library by itself. */
static void * get_bytes(size_t size) {
    void * memory = calloc(1, size + 1);
    if (memory == NULL) {
        REPORT("no memory");
    }
    return memory;
}

/* Time. */

static uint64_t next_random(struct stream * stream) {
    stream->random ^= stream->random << 13;
    stream->random ^= stream->random >> 7;
    stream->random ^= stream->random << 17;
    return stream->random;
}

/* Most jobs run soon, some after those that ask for them have gone on by a good piece. */
static void be_late(struct stream * stream) {
    const uint64_t number = next_random(stream) >> 16;
    const long most_us = number % 8 < 4 ? 0 : number % 8 < 7 ? 60 : 600;
    if (most_us > 0) {
        const struct timespec time = { 0, (long) (number / 8 % (uint64_t) most_us) * 1000 };
        nanosleep(&time, NULL);
    }
}

/* Graphs. */

static bool computes(const struct ggml_tensor * node) {
#if HOST_HAS_ROWS
    if ((node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
        return false;
    }
#endif
    return node->op != GGML_OP_NONE && node->op != GGML_OP_VIEW && node->op != GGML_OP_RESHAPE &&
           node->op != GGML_OP_PERMUTE && node->op != GGML_OP_TRANSPOSE;
}

static uint64_t mix(uint64_t hash, const void * data, size_t size) {
    for (size_t i = 0; i < size; i++) {
        hash = (hash ^ ((const uint8_t *) data)[i]) * 1099511628211u;
    }
    return hash;
}

/* What a graph reads of the tensors that its nodes point to. */
static uint64_t hash_sources(const struct ggml_cgraph * graph) {
    uint64_t hash = 14695981039346656037u;
    for (int i = 0; i < graph->n_nodes; i++) {
        for (int k = 0; k < GGML_MAX_SRC && computes(graph->nodes[i]); k++) {
            const struct ggml_tensor * t = graph->nodes[i]->src[k];
            if (t != NULL) {
                hash = mix(mix(mix(mix(hash, &t->data, sizeof(t->data)), t->ne, sizeof(t->ne)), t->nb, sizeof(t->nb)), &t->type,
                           sizeof(t->type));
            }
        }
    }
    return hash;
}

static struct ggml_tensor * copy_of(struct ggml_hash_set * set, struct ggml_tensor * copies, struct ggml_tensor * t) {
    return t == NULL ? NULL : &copies[ggml_hash_find(set, t)];
}

/* An operand that the plugin may have put into the node for a while: the host's own operands of this kind are weights, which stay. */
static bool is_kept(const struct ggml_tensor * node, const struct ggml_tensor * source) {
    return getenv("MOE_HOST_KEEP") != NULL && (node->op == GGML_OP_MUL_MAT_ID || node->op == GGML_OP_ADD_ID) &&
           source->op == GGML_OP_NONE && source->view_src == NULL;
}

/* Copies the nodes, and what they point to unless that is kept. */
static void take_graph(struct job * job, const struct ggml_cgraph * graph) {
    const size_t count = (size_t) graph->n_nodes;
    const struct ggml_init_params params = { ggml_graph_overhead_custom(count, false) + 1024, NULL, true };
    job->context = ggml_init(params);
    job->graph = ggml_new_graph_custom(job->context, count, false);
    job->graph->n_nodes = graph->n_nodes;
    struct ggml_hash_set set = ggml_hash_set_new(count * 24 + 16);
    for (size_t i = 0; i < count; i++) {
        for (int k = -1; k < GGML_MAX_SRC; k++) {
            struct ggml_tensor * t = k < 0 ? graph->nodes[i] : graph->nodes[i]->src[k];
            if (t != NULL) {
                ggml_hash_find_or_insert(&set, t);
                if (t->view_src != NULL) {
                    ggml_hash_find_or_insert(&set, t->view_src);
                }
            }
        }
    }
    job->copies = get_bytes(set.size * sizeof(*job->copies));
    for (size_t i = 0; i < set.size; i++) {
        if (ggml_bitset_get(set.used, i)) {
            job->copies[i] = *set.keys[i];
            memset(job->copies[i].src, 0, sizeof(job->copies[i].src));
            /* A view of a view points to the first, which views nothing. */
            job->copies[i].view_src = copy_of(&set, job->copies, set.keys[i]->view_src);
        }
    }
    for (size_t i = 0; i < count; i++) {
        struct ggml_tensor * node = copy_of(&set, job->copies, graph->nodes[i]);
        for (int k = 0; k < GGML_MAX_SRC; k++) {
            struct ggml_tensor * source = graph->nodes[i]->src[k];
            node->src[k] = source != NULL && is_kept(node, source) ? source : copy_of(&set, job->copies, source);
        }
        job->graph->nodes[i] = node;
    }
    job->hash = hash_sources(job->graph);
    ggml_hash_set_free(&set);
}

/* A slot that is poisoned, and that a product has read, shows here. */
static void check_products(const struct ggml_cgraph * graph) {
    for (int i = 0; i < graph->n_nodes; i++) {
        const struct ggml_tensor * node = graph->nodes[i];
        if (node->op == GGML_OP_MUL_MAT_ID && computes(node) && node->type == GGML_TYPE_F32 && ggml_is_contiguous(node)) {
            for (int64_t k = 0; k < ggml_nelements(node); k++) {
                if (isnan(((const float *) node->data)[k])) {
                    REPORT("%s, a product of experts, has a value that is not a number: poisoned memory was read", node->name);
                }
            }
        }
    }
}

/* Streams. */

static void wait_for(struct stream * stream, uint64_t number) {
    pthread_mutex_lock(&stream->lock);
    while (stream->done < number) {
        pthread_cond_wait(&stream->changed, &stream->lock);
    }
    pthread_mutex_unlock(&stream->lock);
}

static void run_job(struct stream * stream, struct job * job) {
    be_late(stream);
    switch (job->kind) {
        case COPY:
            memmove(job->target, job->source, job->size);
            break;
        case WAIT:
            wait_for(job->other, job->until);
            break;
        case GRAPH:
            if (hash_sources(job->graph) != job->hash) {
                REPORT("what a graph reads was changed or freed before it ran");
            }
            if (ggml_backend_graph_compute(stream->cpu, job->graph) != GGML_STATUS_SUCCESS) {
                REPORT("a graph failed");
            }
            if (getenv("MOE_HOST_FINITE") != NULL) {
                check_products(job->graph);
            }
            if (hash_sources(job->graph) != job->hash) {
                REPORT("what a graph reads was changed or freed while it ran");
            }
            free(job->copies);
            ggml_free(job->context);
            break;
    }
    free(job);
}

static void * run_stream(void * context) {
    struct stream * stream = context;
    prctl(PR_SET_TIMERSLACK, 1);
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        struct job * job = stream->first;
        if (job == NULL) {
            if (stream->ends) {
                break;
            }
            pthread_cond_wait(&stream->changed, &stream->lock);
            continue;
        }
        stream->first = job->next;
        pthread_mutex_unlock(&stream->lock);
        run_job(stream, job);
        pthread_mutex_lock(&stream->lock);
        stream->done++;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

static struct job * new_job(enum kind kind) {
    struct job * job = get_bytes(sizeof(*job));
    job->kind = kind;
    return job;
}

/* Queues a job; returns its number. */
static uint64_t ask(struct stream * stream, struct job * job) {
    pthread_mutex_lock(&stream->lock);
    if (stream->first == NULL) {
        stream->first = job;
    } else {
        stream->last->next = job;
    }
    stream->last = job;
    const uint64_t number = ++stream->asked;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return number;
}

static uint64_t asked(struct stream * stream) {
    pthread_mutex_lock(&stream->lock);
    const uint64_t number = stream->asked;
    pthread_mutex_unlock(&stream->lock);
    return number;
}

static void add_stream(struct stream * stream, const struct stream * place) {
    pthread_mutex_lock(&streams_lock);
    int i = 0;
    while (i < MAX_STREAMS && streams[i] != place) {
        i++;
    }
    if (i == MAX_STREAMS) {
        REPORT("too many streams");
    }
    streams[i] = stream;
    pthread_mutex_unlock(&streams_lock);
}

#endif
