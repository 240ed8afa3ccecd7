// A small host over stock libllama for what no stock tool does:
//   model_host logits THREADS DEVICES MODEL OUT [TOKENS]   write the logits of a prompt and of a few single tokens after it
//   model_host operands THREADS DEVICES MODEL OUT TOKENS   write what the last product of each block has read, of a prompt
//   model_host cancel MODE DEVICES MODEL          load and give up at one place after another; print what the process holds before
//                                                 and after: KiB of memory, open files, threads, MiB reported free by each device
//   model_host each DEVICES LIST LOGS             run each model of the file LIST (a path a line) in a process of its own, whose
//                                                 output goes to LOGS/NUMBER; print how each ended: NUMBER exit STATUS, or
//                                                 NUMBER signal SIGNAL; a model that runs leaves a line "logits HASH"
//   model_host pair THREADS DEVICES MODEL OUT     write logits of a model before, while and after a second one lies beside it
//   model_host load MODE DEVICES MODEL            print the microseconds that loading takes, of processor time and of
//                                                 wall time (MODE: none or mmap)
// DEVICES: names separated by commas, or "cpu". Weights are never repacked, as with -nr.
#define _DEFAULT_SOURCE
#include "ggml-backend.h"
#include "llama.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PROMPT = 40, STEPS = 4, MAX_DEVICES = 8, CANCELS = 24, LIMIT_SECONDS = 60 };

// The progress callback of a load that is to be given up.
static bool goes_on(float progress, void * limit) {
    return progress <= *(const float *) limit;
}

static enum llama_load_mode load_mode(const char * name) {
    return strcmp(name, "mmap") == 0 ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
}

// Loads a model; gives up when the progress passes the limit, if there is one.
static struct llama_model * load(const char * path, const char * names, enum llama_load_mode mode, float * limit) {
    ggml_backend_dev_t devices[MAX_DEVICES + 1] = { NULL };
    char copy[256];
    snprintf(copy, sizeof(copy), "%s", names);
    int count = 0;
    for (char * name = strtok(copy, ","); name != NULL && strcmp(names, "cpu") != 0; name = strtok(NULL, ",")) {
        if (count == MAX_DEVICES || (devices[count++] = ggml_backend_dev_by_name(name)) == NULL) {
            fprintf(stderr, "no device %s\n", name);
            return NULL;
        }
    }
    struct llama_model_params params = llama_model_default_params();
    params.devices = devices;
    params.n_gpu_layers = 99;
    params.use_extra_bufts = false; // the CPU's own, repacked weights; a device's expert buffer type does not depend on it
    params.load_mode = mode;
    if (limit != NULL) {
        params.progress_callback = goes_on;
        params.progress_callback_user_data = limit;
    }
    return llama_model_load_from_file(path, params);
}

// Decodes tokens and appends the logits of each of them to the file; false on failure.
static int decode(struct llama_context * context, int vocabulary, int first, int count, FILE * out) {
    struct llama_batch batch = llama_batch_init(count, 0, 1);
    for (int i = 0; i < count; i++) {
        batch.token[i] = (llama_token) ((first + i) * 37 % vocabulary);
        batch.pos[i] = first + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    batch.n_tokens = count;
    int ok = llama_decode(context, batch) == 0;
    for (int i = 0; ok && i < count; i++) {
        const float * row = llama_get_logits_ith(context, i);
        ok = row != NULL && fwrite(row, sizeof(float), (size_t) vocabulary, out) == (size_t) vocabulary;
    }
    llama_batch_free(batch);
    return ok;
}

static int logits(int threads, const char * devices, const char * path, const char * out_path, int prompt) {
    struct llama_model * model = load(path, devices, LLAMA_LOAD_MODE_NONE, NULL);
    if (model == NULL) {
        return 0;
    }
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = 256;
    params.n_threads = threads;
    params.n_threads_batch = threads;
    struct llama_context * context = llama_init_from_model(model, params);
    FILE * out = fopen(out_path, "wb");
    int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    int ok = context != NULL && out != NULL && decode(context, vocabulary, 0, prompt, out);
    for (int step = 0; ok && step < STEPS; step++) {
        ok = decode(context, vocabulary, prompt + step, 1, out);
    }
    ok = out != NULL && fclose(out) == 0 && ok;
    if (context != NULL) {
        llama_free(context);
    }
    llama_model_free(model);
    return ok;
}

// Stops the graph behind each last product of a block and writes what that product has read.
static bool write_operand(struct ggml_tensor * node, bool ask, void * out) {
    if (ask) {
        return strncmp(node->name, "ffn_moe_down", 12) == 0;
    }
    size_t bytes = ggml_nbytes(node->src[1]);
    void * data = malloc(bytes);
    ggml_backend_tensor_get(node->src[1], data, 0, bytes);
    bool ok = fwrite(data, 1, bytes, out) == bytes;
    free(data);
    return ok;
}

static int operands(int threads, const char * devices, const char * path, const char * out_path, int prompt) {
    struct llama_model * model = load(path, devices, LLAMA_LOAD_MODE_NONE, NULL);
    FILE * out = fopen(out_path, "wb");
    if (model == NULL || out == NULL) {
        return 0;
    }
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = 1024;
    params.n_ubatch = 1024;
    params.n_threads = threads;
    params.n_threads_batch = threads;
    params.cb_eval = write_operand;
    params.cb_eval_user_data = out;
    struct llama_context * context = llama_init_from_model(model, params);
    struct llama_batch batch = llama_batch_init(prompt, 0, 1);
    for (int i = 0; i < prompt; i++) {
        batch.token[i] = 20 + i * 37 % 400;
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = i == prompt - 1;
    }
    batch.n_tokens = prompt;
    int ok = context != NULL && llama_decode(context, batch) == 0;
    llama_batch_free(batch);
    ok = fclose(out) == 0 && ok;
    if (context != NULL) {
        llama_free(context);
    }
    llama_model_free(model);
    return ok;
}

static struct llama_context * context_of(struct llama_model * model, int threads, int size) {
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = (uint32_t) size;
    params.n_threads = threads;
    params.n_threads_batch = threads;
    return model == NULL ? NULL : llama_init_from_model(model, params);
}

// A prompt, then single tokens with a pause after each.
static int talk(struct llama_context * context, int vocabulary, int tokens, int pause_ms, FILE * out) {
    llama_memory_clear(llama_get_memory(context), true);
    int ok = decode(context, vocabulary, 0, PROMPT, out);
    for (int i = 0; ok && i < tokens; i++) {
        ok = decode(context, vocabulary, PROMPT + i, 1, out);
        usleep((useconds_t) pause_ms * 1000);
    }
    return ok;
}

// A draft model: loaded when the first one has answered, in the same memory. Its context goes first, then the model.
static int pair(int threads, const char * devices, const char * path, const char * out_path) {
    struct llama_model * models[2] = { load(path, devices, LLAMA_LOAD_MODE_NONE, NULL), NULL };
    struct llama_context * first = context_of(models[0], threads, 256);
    FILE * out = fopen(out_path, "wb");
    if (first == NULL || out == NULL) {
        return 0;
    }
    int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(models[0]));
    // The size of the cache is looked at ten times a second: once at least after the 64th token.
    int ok = talk(first, vocabulary, 100, 4, out);
    models[1] = load(path, devices, LLAMA_LOAD_MODE_NONE, NULL);
    struct llama_context * second = context_of(models[1], threads, 2048);
    for (int turn = 0; ok && turn < 2; turn++) {
        ok = second != NULL && talk(second, vocabulary, 20, 0, out) && talk(first, vocabulary, 60, 2, out);
    }
    llama_free(second);
    ok = ok && talk(first, vocabulary, 95, 36, out);
    llama_model_free(models[1]);
    ok = ok && talk(first, vocabulary, 100, 1, out);
    llama_free(first);
    llama_model_free(models[0]);
    return fclose(out) == 0 && ok;
}

// One model of many, on one thread, in a process that does nothing else.
static int one(const char * devices, const char * path) {
    char * bytes = NULL;
    size_t size = 0;
    FILE * out = open_memstream(&bytes, &size);
    struct llama_model * model = load(path, devices, LLAMA_LOAD_MODE_NONE, NULL);
    if (model == NULL || out == NULL) {
        return 0;
    }
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = 64;
    params.n_threads = params.n_threads_batch = 1;
    struct llama_context * context = llama_init_from_model(model, params);
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    if (context == NULL || !decode(context, vocabulary, 0, 6, out) || !decode(context, vocabulary, 6, 1, out)) {
        return 0;
    }
    llama_free(context);
    llama_model_free(model);
    fclose(out);
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < size; i++) {
        hash = (hash ^ (unsigned char) bytes[i]) * 1099511628211u;
    }
    free(bytes);
    printf("logits %016llx\n", (unsigned long long) hash);
    return 1;
}

static int each(const char * devices, const char * list_path, const char * logs) {
    // Read whole before the first fork: a child that exits would move the file's position, which both share.
    static char paths[1 << 18];
    FILE * list = fopen(list_path, "r");
    if (list == NULL || fread(paths, 1, sizeof(paths) - 1, list) == 0 || fclose(list) != 0) {
        return 0;
    }
    char * rest = NULL;
    int number = 0;
    for (char * path = strtok_r(paths, "\n", &rest); path != NULL; path = strtok_r(NULL, "\n", &rest), number++) {
        fflush(stdout);
        const pid_t child = fork();
        if (child == 0) {
            char log[4096];
            snprintf(log, sizeof(log), "%s/%d", logs, number);
            const int file = open(log, O_CREAT | O_WRONLY | O_APPEND, 0600);
            const struct rlimit memory = { (rlim_t) 16 << 30, (rlim_t) 16 << 30 }, core = { 0, 0 };
            if (file < 0 || dup2(file, 1) < 0 || dup2(file, 2) < 0 || setrlimit(RLIMIT_AS, &memory) != 0 ||
                setrlimit(RLIMIT_CORE, &core) != 0) {
                _exit(99);
            }
            alarm(LIMIT_SECONDS);
            exit(one(devices, path) ? 0 : 1);
        }
        int status = 0;
        if (child < 0 || waitpid(child, &status, 0) != child) {
            return 0;
        }
        const int how = WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status);
        printf("%d %s %d\n", number, WIFEXITED(status) ? "exit" : "signal", how);
    }
    return 1;
}

static long long microseconds(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * 1000000LL + time.tv_nsec / 1000;
}

// Touches as much memory as the model takes and lets go of it. A hypervisor hands out memory as it is first touched and takes
// back what is free for long, large pages first: without this, that is most of what a load measures in a virtual machine.
static void warm_memory(const char * path) {
    struct stat info;
    if (stat(path, &info) != 0 || info.st_size == 0) {
        return;
    }
    void * memory = mmap(NULL, (size_t) info.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory != MAP_FAILED) {
        madvise(memory, (size_t) info.st_size, MADV_HUGEPAGE);
        memset(memory, 1, (size_t) info.st_size);
        munmap(memory, (size_t) info.st_size);
    }
}

static int load_time(const char * mode, const char * devices, const char * path) {
    warm_memory(path);
    long long work = microseconds(CLOCK_PROCESS_CPUTIME_ID), wall = microseconds(CLOCK_MONOTONIC);
    struct llama_model * model = load(path, devices, load_mode(mode), NULL);
    work = microseconds(CLOCK_PROCESS_CPUTIME_ID) - work;
    wall = microseconds(CLOCK_MONOTONIC) - wall;
    if (model == NULL) {
        return 0;
    }
    printf("%lld %lld\n", work, wall);
    llama_model_free(model);
    return 1;
}

static int count_entries(const char * path) {
    DIR * folder = opendir(path);
    int count = 0;
    while (folder != NULL && readdir(folder) != NULL) {
        count++;
    }
    if (folder != NULL) {
        closedir(folder);
    }
    return count;
}

// One line of what the process holds.
static void print_holdings(void) {
    long pages = 0;
    FILE * file = fopen("/proc/self/statm", "r");
    if (file == NULL || fscanf(file, "%*d %ld", &pages) != 1) {
        pages = 0;
    }
    if (file != NULL) {
        fclose(file);
    }
    printf("%ld %d %d", pages * (sysconf(_SC_PAGESIZE) / 1024), count_entries("/proc/self/fd"), count_entries("/proc/self/task"));
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        size_t free_bytes = 0, total_bytes = 0;
        ggml_backend_dev_memory(ggml_backend_dev_get(i), &free_bytes, &total_bytes);
        printf(" %zu", free_bytes >> 20);
    }
    printf("\n");
}

static int cancel(const char * mode, const char * devices, const char * path) {
    // What is made once and kept by host and devices is there after one load.
    struct llama_model * model = load(path, devices, load_mode(mode), NULL);
    int ok = model != NULL;
    llama_model_free(model);
    print_holdings();
    for (int i = 0; ok && i < CANCELS; i++) {
        float limit = (float) i / CANCELS;
        model = load(path, devices, load_mode(mode), &limit);
        ok = model == NULL;
        llama_model_free(model);
    }
    print_holdings();
    model = load(path, devices, load_mode(mode), NULL);
    ok = ok && model != NULL;
    llama_model_free(model);
    return ok;
}

int main(int argc, char ** argv) {
    ggml_backend_load_all_from_path(BACKENDS); // given by the compiler's command line: this program lies elsewhere
    llama_backend_init();
    int ok = 0;
    if (argc == 5 && strcmp(argv[1], "load") == 0) {
        ok = load_time(argv[2], argv[3], argv[4]);
    } else if (argc == 5 && strcmp(argv[1], "cancel") == 0) {
        ok = cancel(argv[2], argv[3], argv[4]);
    } else if ((argc == 6 || argc == 7) && strcmp(argv[1], "logits") == 0) {
        ok = logits(atoi(argv[2]), argv[3], argv[4], argv[5], argc == 7 ? atoi(argv[6]) : PROMPT);
    } else if (argc == 7 && strcmp(argv[1], "operands") == 0) {
        ok = operands(atoi(argv[2]), argv[3], argv[4], argv[5], atoi(argv[6]));
    } else if (argc == 6 && strcmp(argv[1], "pair") == 0) {
        ok = pair(atoi(argv[2]), argv[3], argv[4], argv[5]);
    } else if (argc == 5 && strcmp(argv[1], "each") == 0) {
        ok = each(argv[2], argv[3], argv[4]);
    } else {
        fprintf(stderr, "usage: see the head of model_host.c\n");
    }
    llama_backend_free();
    return ok ? 0 : 1;
}
