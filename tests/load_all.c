// Loads ggml's backends before main. Stock test programs that take a device by name look it up before anything has loaded the
// backends of a GGML_BACKEND_DL build; with this file's library in LD_PRELOAD they find all of them, the plugin included.
#define _POSIX_C_SOURCE 200809L
#include "ggml-backend.h"

#include <stdlib.h>

__attribute__((constructor)) static void load_all(void) {
    unsetenv("LD_PRELOAD"); // not in what the program starts: ggml's abort handler starts a debugger
    ggml_backend_load_all();
}
