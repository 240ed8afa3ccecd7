/*
 * A program with two ggml libraries, both loaded locally: two FIRST SECOND PLUGIN. The second loads the plugin, which must refuse, because
 * it cannot tell whom it belongs to.
 */
#include <dlfcn.h>
#include <stdio.h>

static void * library(const char * folder, const char * name) {
    char path[4096];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    void * handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        fprintf(stderr, "two: %s\n", dlerror());
    }
    return handle;
}

int main(int argc, char ** argv) {
    if (argc != 4 || library(argv[1], "libggml.so") == NULL) {
        return 2;
    }
    void * second = library(argv[2], "libggml.so");
    if (second == NULL) {
        return 2;
    }
    /* POSIX lets a pointer to an object become one to a function; ISO C does not say how. */
    void * (*load)(const char * path);
    *(void **) &load = dlsym(second, "ggml_backend_load");
    return load == NULL ? 2 : load(argv[3]) == NULL ? 0 : 1;
}
