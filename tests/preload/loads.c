// Loads a model by each of llama.cpp's functions for files, as a program linked to it does (LINKED), or as one that opens the library
// while it runs.
//
//   loads MODEL [LIBRARY]
#define _GNU_SOURCE
#include "ggml-backend.h"
#include "llama.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef LINKED
#define FIND(name) name
#else
#define FIND(name) ((__typeof__(&name)) dlsym(library, #name))
#endif

int main(int argc, char ** argv) {
    if (argc < 2) {
        return 2;
    }
#ifndef LINKED
    void * library = argc < 3 ? NULL : dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        return 3;
    }
#endif
    FIND(ggml_backend_load_all_from_path)(BACKENDS);
    struct llama_model_params params = FIND(llama_model_default_params)();
    const char * files[] = {argv[1]};
    FILE * file = fopen(argv[1], "rb");
    // The last is a function of old that calls the first within the library.
    struct llama_model * models[] = {
        FIND(llama_model_load_from_file)(argv[1], params),
        FIND(llama_model_load_from_splits)(files, 1, params),
        FIND(llama_model_load_from_file_ptr)(file, params),
        FIND(llama_load_model_from_file)(argv[1], params),
    };
    for (int i = 0; i < 4; i++) {
        printf("load %d: %s\n", i, models[i] == NULL ? "failed" : "ok");
        if (models[i] != NULL) {
            struct llama_context_params context = FIND(llama_context_default_params)();
            context.n_ctx = 512;
            struct llama_context * made = FIND(llama_init_from_model)(models[i], context);
            printf("context %d: %u %u\n", i, FIND(llama_n_batch)(made), FIND(llama_n_ubatch)(made));
            FIND(llama_free)(made);
            FIND(llama_model_free)(models[i]);
        }
    }
    fclose(file);
    return 0;
}
