// Prints every type of ggml that has a size: number, name, values and bytes of a block. Built by tests/model.rs.
#include "ggml.h"

#include <stdio.h>

int main(void) {
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const enum ggml_type type = (enum ggml_type) i;
        if (ggml_type_size(type) > 0) {
            printf("%d %s %lld %zu\n", i, ggml_type_name(type), (long long) ggml_blck_size(type), ggml_type_size(type));
        }
    }
    return 0;
}
