// Preloaded: ggml's CPU backend throws when it is opened (MOE_THROW=open) or asked for memory (MOE_THROW=memory), as ggml's Vulkan backend does
// when its device is lost.
#include "ggml-backend.h"

#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <stdexcept>

static bool wanted(const char * name) {
    const char * value = std::getenv("MOE_THROW");
    return value != nullptr && std::strcmp(value, name) == 0;
}

extern "C" ggml_backend_t ggml_backend_dev_init(ggml_backend_dev_t device, const char * params) {
    if (wanted("open") && std::strcmp(ggml_backend_dev_name(device), "CPU") == 0) {
        throw std::runtime_error("the device was lost");
    }
    return reinterpret_cast<decltype(&ggml_backend_dev_init)>(dlsym(RTLD_NEXT, "ggml_backend_dev_init"))(device, params);
}

extern "C" ggml_backend_buffer_t ggml_backend_buft_alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    // The first large one is that of the layers: small ones are the plugin's probe and what the host keeps for itself.
    if (wanted("memory") && size > 1000000 && std::strncmp(ggml_backend_buft_name(type), "CPU", 3) == 0) {
        throw std::runtime_error("the device was lost");
    }
    return reinterpret_cast<decltype(&ggml_backend_buft_alloc_buffer)>(dlsym(RTLD_NEXT, "ggml_backend_buft_alloc_buffer"))(type, size);
}
