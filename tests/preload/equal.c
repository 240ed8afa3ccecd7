// Batches of every kind, computed by a context whose batches the preloaded library may cut, and read by every way to its outputs.
//
//   equal MODEL
//
// Says which case begins, so that lines of the log can be told apart, and ends with 1 where something is not as in a stock host.
#include "ggml-backend.h"
#include "llama.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 400, SHORT_OF = 256, EQUAL = 200 };

static int failures = 0;
static int n_vocab = 0;

static void begin(const char * name) {
    fflush(stdout);
    fprintf(stderr, "\ncase %s\n", name);
}

static void check(int good, const char * what) {
    if (!good) {
        fprintf(stderr, "\nwrong: %s\n", what);
        failures++;
    }
}

static struct llama_context_params params_of(uint32_t n_batch, uint32_t n_ubatch, int sequences) {
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = 1024;
    params.n_batch = n_batch;
    params.n_ubatch = n_ubatch;
    params.n_seq_max = (uint32_t) sequences;
    params.n_outputs_max_per_seq = 0;
    params.kv_unified = true;
    params.n_threads = params.n_threads_batch = 2;
    return params;
}

static struct llama_context * make_with(struct llama_model * model, struct llama_context_params params) {
    struct llama_context * context = llama_init_from_model(model, params);
    if (context == NULL) {
        fprintf(stderr, "no context\n");
        exit(2);
    }
    return context;
}

static struct llama_context * make(struct llama_model * model, uint32_t n_batch, uint32_t n_ubatch, int sequences) {
    return make_with(model, params_of(n_batch, n_ubatch, sequences));
}

static llama_token token(int at) {
    return (20 + (at * 37 + at * at % 13) % 400) % n_vocab;
}

static struct llama_batch_ext * fill(struct llama_context * context, int tokens, llama_pos first) {
    struct llama_batch_ext * batch = llama_batch_ext_init(context);
    for (int at = 0; at < tokens; at++) {
        llama_pos position = first + at;
        check(llama_batch_ext_add_token(batch, 0, token(at)) == at, "an index");
        check(llama_batch_ext_set_pos(batch, at, &position), "a position");
    }
    llama_batch_ext_set_output_logits(batch, tokens - 1, true);
    return batch;
}

static int process(struct llama_context * context, struct llama_batch_ext * batch) {
    int result = llama_process(context, LLAMA_PROCESS_TYPE_DECODE, batch);
    llama_batch_ext_free(batch);
    return result;
}

static llama_pos last_position(struct llama_context * context) {
    return llama_memory_seq_pos_max(llama_get_memory(context), 0);
}

static void clear(struct llama_context * context) {
    llama_memory_clear(llama_get_memory(context), true);
}

// The warm-up of a program, by which it becomes known that experts of the context run on our device.
static struct llama_context * warm(struct llama_context * context) {
    check(process(context, fill(context, 2, 0)) == 0, "a warm-up");
    clear(context);
    return context;
}

static int same(const float * one, const float * other) {
    return one != NULL && other != NULL && memcmp(one, other, sizeof(float) * (size_t) n_vocab) == 0;
}

static void equal(struct llama_model * model) {
    begin("equal");
    struct llama_context * context = warm(make(model, 512, SHORT_OF, 1));
    check(process(context, fill(context, TOKENS, 0)) == 0, "a prompt");
    begin("stock");
    struct llama_context * stock = make(model, TOKENS, EQUAL, 1);
    check(process(stock, fill(stock, TOKENS, 0)) == 0, "a prompt in equal passes");
    begin("read");
    const float * expected = llama_get_logits_ith(stock, TOKENS - 1);
    for (int again = 0; again < 2; again++) {
        check(same(llama_get_logits_ith(context, TOKENS - 1), expected), "logits by index");
        check(same(llama_get_logits_ith(context, -1), expected), "logits from the end");
        check(same(llama_get_logits(context), expected), "all logits");
    }
    check(llama_get_sampled_token_ith(context, TOKENS - 1) == LLAMA_TOKEN_NULL, "nothing was sampled");
    check(llama_get_sampled_probs_count_ith(context, TOKENS - 1) == 0, "no probabilities");
    struct llama_sampler * greedy = llama_sampler_init_greedy();
    llama_token chosen = llama_sampler_sample(greedy, context, TOKENS - 1);
    check(chosen == llama_sampler_sample(greedy, stock, TOKENS - 1), "the token that is chosen");
    // What is computed next has indices of its own, by either function.
    llama_sampler_free(greedy);
    check(process(context, fill(context, 1, TOKENS)) == 0 && process(stock, fill(stock, 1, TOKENS)) == 0, "a token");
    check(same(llama_get_logits_ith(context, 0), llama_get_logits_ith(stock, 0)), "logits of the next token");
    clear(context);
    check(process(context, fill(context, TOKENS, 0)) == 0, "the prompt again");
    clear(context);
    llama_token one = token(5);
    check(llama_decode(context, llama_batch_get_one(&one, 1)) == 0, "a token by the other function");
    check(llama_get_logits_ith(context, 0) != NULL, "its logits");

    begin("no-room");
    clear(context);
    check(process(context, fill(context, TOKENS, 0)) == 0 && process(context, fill(context, TOKENS, TOKENS)) == 0, "two prompts");
    begin("refused");
    check(process(context, fill(context, TOKENS, 2 * TOKENS)) == 1, "there is no room");
    check(last_position(context) == 2 * TOKENS - 1, "nothing of it is there");
    llama_free(context);
    llama_free(stock);
}

// Batches that are left alone.
static void untouched(struct llama_model * model) {
    struct llama_context * context = warm(make(model, 512, SHORT_OF, 2));
    begin("middle");
    struct llama_batch_ext * batch = fill(context, TOKENS, 0);
    llama_batch_ext_set_output_logits(batch, 10, true);
    check(process(context, batch) == 0, "an output in the middle");
    check(llama_get_logits_ith(context, 10) != NULL && llama_get_logits_ith(context, TOKENS - 1) != NULL, "both outputs");
    clear(context);
    begin("tail");
    batch = fill(context, TOKENS, 0);
    llama_batch_ext_set_output_embd(batch, EQUAL, true);
    llama_batch_ext_set_output_logits(batch, 10, true);
    llama_batch_ext_set_output_logits(batch, 10, false);
    check(process(context, batch) == 0, "two outputs in the last part");
    const float * first = llama_get_logits_ith(context, EQUAL);
    const float * last = llama_get_logits_ith(context, TOKENS - 1);
    check(first == llama_get_logits(context) && last == first + n_vocab, "both, in order");
    clear(context);
    begin("hole");
    batch = fill(context, TOKENS, 0);
    llama_pos position = 5000;
    llama_batch_ext_set_pos(batch, 300, &position);
    check(process(context, batch) == -1 && last_position(context) == -1, "positions with a hole");
    begin("sequences");
    batch = llama_batch_ext_init(context);
    for (int at = 0; at < TOKENS; at++) {
        position = at / 2;
        llama_batch_ext_add_token(batch, at % 2, token(at));
        llama_batch_ext_set_pos(batch, at, &position);
    }
    llama_batch_ext_set_output_logits(batch, TOKENS - 1, true);
    check(process(context, batch) == 0 && llama_get_logits_ith(context, TOKENS - 1) != NULL, "two sequences");
    clear(context);
    begin("shared");
    batch = fill(context, TOKENS, 0);
    llama_batch_ext_add_seq(batch, 0, 1);
    check(process(context, batch) == 0, "a token of two sequences");
    clear(context);
    begin("refilled");
    batch = fill(context, 3, 0);
    check(llama_batch_ext_add_token(batch, 7, 1) == -3, "a sequence that there is not");
    llama_batch_ext_clear(batch);
    for (int at = 0; at < TOKENS; at++) {
        position = at;
        llama_batch_ext_add_token(batch, 1, token(at));
        llama_batch_ext_set_pos(batch, at, &position);
    }
    check(process(context, batch) == 0, "a batch that was cleared");
    clear(context);
    begin("embeddings");
    llama_set_embeddings(context, true);
    check(process(context, fill(context, TOKENS, 0)) == 0, "a prompt of embeddings");
    check(llama_get_embeddings_ith(context, 10) != NULL, "each token has one");
    llama_free(context);
}

static bool watched(struct ggml_tensor * tensor, bool ask, void * data) {
    (void) tensor, (void) data;
    return !ask;
}

// Contexts of which more is read than outputs, from their beginning.
static void special(struct llama_model * model) {
    for (int kind = 0; kind < 3; kind++) {
        struct llama_context_params params = params_of(512, SHORT_OF, 1);
        params.embeddings = kind < 2;
        params.pooling_type = kind == 1 ? LLAMA_POOLING_TYPE_MEAN : LLAMA_POOLING_TYPE_NONE;
        params.cb_eval = kind == 2 ? watched : NULL;
        struct llama_context * context = warm(make_with(model, params));
        begin(kind == 0 ? "token-embeddings" : kind == 1 ? "pooled" : "watched");
        check(process(context, fill(context, TOKENS, 0)) == 0, "a prompt");
        if (kind == 0) {
            check(llama_get_embeddings_ith(context, 10) != NULL, "each token has an embedding");
        } else if (kind == 1) {
            check(llama_get_embeddings_seq(context, 0) != NULL, "the sequence has one");
        }
        llama_free(context);
    }
}

static int calls = 0;
static int most = -1;

static bool ended(void * data) {
    (void) data;
    calls++;
    return most >= 0 && calls > most;
}

static void aborted(struct llama_model * model) {
    struct llama_context * context = warm(make(model, 512, SHORT_OF, 1));
    llama_set_abort_callback(context, ended, NULL);
    begin("counted");
    calls = 0;
    check(process(context, fill(context, TOKENS, 0)) == 0, "counted");
    int all = calls;
    clear(context);
    begin("aborted");
    calls = 0;
    most = all * 3 / 4;
    check(process(context, fill(context, TOKENS, 0)) == 2, "aborted in the second part");
    check(last_position(context) == EQUAL - 1, "the first part is there");
    most = -1;
    llama_free(context);
}

int main(int argc, char ** argv) {
    if (argc < 2) {
        return 2;
    }
    ggml_backend_load_all_from_path(BACKENDS);
    struct llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (model == NULL) {
        return 2;
    }
    n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = 4096;
    struct llama_context * context = llama_init_from_model(model, params);
    if (context == NULL) {
        return 2;
    }
    printf("lengths: %u %u\n", llama_n_batch(context), llama_n_ubatch(context));
    llama_free(context);
    equal(model);
    untouched(model);
    special(model);
    aborted(model);
    begin("end");
    llama_model_free(model);
    return failures > 0;
}
