/* The C host: runs one case by name against a plugin. Usage: moe-host STOCK_FOLDER PLUGIN CASE [ARGUMENT] */
#include "host.h"

#include <pthread.h>

static const char * plugin;

/* The log, captured as far as llama.cpp's programs show it by default: warnings and errors. */

#define LOG_LINES 4096
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static char * log_lines[LOG_LINES];
static int log_used;
static char log_partial[8192];

static void log_piece(enum ggml_log_level level, const char * text, void * user_data) {
    static bool shown; /* of the piece before, which a CONT piece continues */
    (void) user_data;
    pthread_mutex_lock(&log_lock);
    fputs(text, stderr);
    shown = level == GGML_LOG_LEVEL_CONT ? shown : level >= GGML_LOG_LEVEL_WARN;
    if (!shown) {
        pthread_mutex_unlock(&log_lock);
        return;
    }
    strncat(log_partial, text, sizeof(log_partial) - strlen(log_partial) - 1);
    char * end;
    while ((end = strchr(log_partial, '\n')) != NULL) {
        *end = '\0';
        if (log_used < LOG_LINES) {
            log_lines[log_used++] = strdup(log_partial);
        }
        memmove(log_partial, end + 1, strlen(end + 1) + 1);
    }
    pthread_mutex_unlock(&log_lock);
}

int log_count(const char * a, const char * b) {
    int count = 0;
    pthread_mutex_lock(&log_lock);
    for (int i = 0; i < log_used; i++) {
        count += strstr(log_lines[i], a) != NULL && (b == NULL || strstr(log_lines[i], b) != NULL);
    }
    pthread_mutex_unlock(&log_lock);
    return count;
}

const char * log_last(const char * text) {
    const char * found = NULL;
    pthread_mutex_lock(&log_lock);
    for (int i = 0; i < log_used; i++) {
        found = strstr(log_lines[i], text) != NULL ? log_lines[i] : found;
    }
    pthread_mutex_unlock(&log_lock);
    return found;
}

void log_forget(void) {
    pthread_mutex_lock(&log_lock);
    for (int i = 0; i < log_used; i++) {
        free(log_lines[i]);
    }
    log_used = 0;
    pthread_mutex_unlock(&log_lock);
}

long long json_number(const char * line, const char * name) {
    char key[64];
    snprintf(key, sizeof(key), "\"%s\":", name);
    const char * at = strstr(line, key);
    CHECK(at != NULL, "no %s in %s", key, line);
    return strtoll(at + strlen(key), NULL, 10);
}

/* The plugin's objects. */

const char * plugin_path(void) {
    return plugin;
}

ggml_backend_reg_t load_plugin(void) {
    ggml_backend_reg_t reg = ggml_backend_load(plugin);
    CHECK(reg != NULL, "ggml_backend_load(%s) gave NULL", plugin);
    return reg;
}

ggml_backend_dev_t device_number(ggml_backend_reg_t reg, size_t index) {
    CHECK(ggml_backend_reg_dev_count(reg) > index, "the plugin has %zu devices", ggml_backend_reg_dev_count(reg));
    ggml_backend_dev_t dev = ggml_backend_reg_dev_get(reg, index);
    CHECK(dev != NULL, "device %zu is NULL", index);
    return dev;
}

ggml_backend_buffer_type_t expert_buffer_type(ggml_backend_reg_t reg, ggml_backend_dev_t dev) {
    ggml_backend_dev_get_extra_bufts_t get =
        (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts");
    CHECK(get != NULL, "the plugin offers no extra buffer types");
    ggml_backend_buffer_type_t * list = get(dev);
    CHECK(list != NULL && list[0] != NULL && list[1] == NULL, "one extra buffer type is expected");
    return list[0];
}

ggml_backend_dev_t cpu_device(void) {
    ggml_backend_dev_t dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    CHECK(dev != NULL && strcmp(ggml_backend_dev_name(dev), "CPU") == 0, "the stock CPU backend is not loaded");
    return dev;
}

ggml_backend_dev_t inner_device(void) {
    ggml_backend_dev_t fake = ggml_backend_dev_by_name("FAKE0");
    return fake != NULL ? fake : cpu_device();
}

void set_threads(ggml_backend_t backend, int n_threads) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    ggml_backend_set_n_threads_t set =
        (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    CHECK(set != NULL, "%s offers no ggml_backend_set_n_threads", ggml_backend_reg_name(reg));
    const char * most = getenv("MOE_HOST_THREADS");
    set(backend, most != NULL && atoi(most) < n_threads ? atoi(most) : n_threads);
}

/* Small things. */

struct ggml_context * new_context(size_t tensors) {
    struct ggml_init_params params = { ggml_tensor_overhead() * tensors + ggml_graph_overhead(), NULL, true };
    struct ggml_context * ctx = ggml_init(params);
    CHECK(ctx != NULL, "ggml_init");
    return ctx;
}

void fill(void * data, size_t size, uint32_t seed) {
    uint8_t * bytes = data;
    uint32_t state = seed * 2654435761u + 1;
    for (size_t i = 0; i < size; i++) {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        bytes[i] = (uint8_t) (state >> 11);
    }
}

void * get_memory(size_t size) {
    void * memory = malloc(size > 0 ? size : 1);
    CHECK(memory != NULL, "malloc of %zu bytes", size);
    return memory;
}

static const struct {
    const char * name;
    void (*run)(void);
    void (*run_with)(const char * argument);
} cases[] = {
    { "load", case_load, NULL },
    { "load-again", case_load_again, NULL },
    { "device", case_device, NULL },
    { "two-devices", case_two_devices, NULL },
    { "supports", case_supports, NULL },
    { "buffers", case_buffers, NULL },
    { "lent", case_lent, NULL },
    { "copies", case_copies, NULL },
    { "graphs", case_graphs, NULL },
    { "abort", case_abort, NULL },
    { "scheduler", case_scheduler, NULL },
    { "threads", case_threads, NULL },
    { "split", case_split, NULL },
    { "pass-through", case_pass_through, NULL },
#if HOST_HAS_RANDOM
    { "random", NULL, case_random },
#endif
    { "null", case_null, NULL },
    { "foreign", case_foreign, NULL },
    { "bounds", case_bounds, NULL },
    { "slots", case_slots, NULL },
    { "panic", NULL, case_panic },
    { "fail-device", NULL, case_fail_device },
    { "fail-host", NULL, case_fail_host },
};

int main(int argc, char ** argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: moe-host STOCK_FOLDER PLUGIN CASE [ARGUMENT]\n");
        return 2;
    }
    plugin = argv[2];
    ggml_log_set(log_piece, NULL);
    ggml_backend_load_all_from_path(argv[1]);
    cpu_device();
    if (getenv("MOE_HOST_FAKE") != NULL) {
        register_fake(getenv("MOE_HOST_FAKE"));
    }
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        if (strcmp(cases[i].name, argv[3]) == 0 && (cases[i].run != NULL) == (argc == 4)) {
            if (argc == 4) {
                cases[i].run();
            } else {
                cases[i].run_with(argv[4]);
            }
            log_forget();
            printf("ok: %s\n", argv[3]);
            return 0;
        }
    }
    fprintf(stderr, "moe-host: no such case: %s\n", argv[3]);
    return 2;
}
