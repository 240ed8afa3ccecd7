// Calls into the host that may throw a C++ exception, and what a Rust caller gets instead.
//
// ggml's functions are C, but backends behind them are C++ and some throw (Vulkan's when a device is lost). llama.cpp catches that where it
// loads; through Rust frames an exception must not pass. So these calls are made from here, with no Rust frame in between.
#include <cstddef>
#include <cstdio>
#include <exception>

namespace {

void describe(char * what, size_t room, const char * text) {
    std::snprintf(what, room, "%s", text);
}

template <typename Result, typename Call> Result caught(Result failure, char * what, size_t room, Call call) noexcept {
    try {
        return call();
    } catch (const std::exception & error) {
        describe(what, room, error.what());
    } catch (...) {
        describe(what, room, "an exception without a message");
    }
    return failure;
}

} // namespace

extern "C" void * ggml_moe_dev_init(void * (*function)(void *, const char *), void * device, char * what, size_t room) {
    return caught<void *>(nullptr, what, room, [=] { return function(device, nullptr); });
}

extern "C" void * ggml_moe_alloc_buffer(void * (*function)(void *, size_t), void * type, size_t size, char * what, size_t room) {
    return caught<void *>(nullptr, what, room, [=] { return function(type, size); });
}

extern "C" int ggml_moe_graph_compute(int (*function)(void *, void *), void * backend, void * graph, int failed, char * what,
                                      size_t room) {
    return caught<int>(failed, what, room, [=] { return function(backend, graph); });
}

extern "C" int ggml_moe_fill_mask(void (*function)(const void *, void *, const void *, bool), const void * cache, void * mask,
                                  const void * tokens, int causal, char * what, size_t room) {
    return caught<int>(0, what, room, [=] {
        function(cache, mask, tokens, causal != 0);
        return 1;
    });
}
