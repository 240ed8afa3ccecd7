// Stands before llama.cpp's function for default parameters and answers as a release with other ones would.
#define _GNU_SOURCE
#include "llama.h"

#include <dlfcn.h>

struct llama_model_params llama_model_default_params(void) {
    __typeof__(&llama_model_default_params) real = (__typeof__(real)) dlsym(RTLD_NEXT, "llama_model_default_params");
    struct llama_model_params params = real();
    params.n_gpu_layers = 77;
    return params;
}
