// Preloaded into every host under test. llama.cpp's tools print through a thread of their own and do not wait for it when they
// end, so that the last lines, which are the results, are lost now and then. This waits for them.
#define _GNU_SOURCE
#include <dlfcn.h>

__attribute__((destructor)) static void flush_log(void) {
    // The C++ names of common_log_main() and common_log_flush(common_log *); absent in a program without that logger.
    void * (*log_main)(void) = (void * (*)(void)) dlsym(RTLD_DEFAULT, "_Z15common_log_mainv");
    void (*log_flush)(void *) = (void (*)(void *)) dlsym(RTLD_DEFAULT, "_Z16common_log_flushP10common_log");
    if (log_main && log_flush) {
        log_flush(log_main());
    }
}
