/*
 * Prints the size, place or value of every item of list.inc, one "kind name numbers" line each.
 * Built by abi_conformance.rs, which makes list.inc out of lists/: with -DREAL against ggml's own headers, and against ours.
 */
#ifdef REAL
#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#else
#include "ggml-abi.h"
#endif

#include <stdio.h>
#include <stdlib.h>

#ifdef REAL
/* The inline functions of ggml-impl.h refer to it; the program links no ggml. */
void ggml_abort(const char * file, int line, const char * fmt, ...) {
    (void) file, (void) line, (void) fmt;
    abort();
}
#endif

#define ABI_CONST(name)        printf("const %s %lld\n", #name, (long long) (name));
#define ABI_TYPEDEF(name)      printf("type %s %zu\n", #name, sizeof(name));
#define ABI_ENUM(tag)          printf("type %s %zu\n", #tag, sizeof(enum tag));
#define ABI_STRUCT(tag)        printf("struct %s %zu align %zu\n", #tag, sizeof(struct tag), _Alignof(struct tag));
#define ABI_FIELD(tag, member) printf("field %s.%s at %zu size %zu\n", #tag, #member, offsetof(struct tag, member), \
                                      sizeof(((struct tag *) 0)->member));

int main(void) {
#include "list.inc"
    return 0;
}
