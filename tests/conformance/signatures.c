/*
 * Compiles only where ggml's own declarations and ours agree in type. Nothing here runs.
 *
 * Three files are made by abi_conformance.rs from ggml-headers. declarations.inc: our typedefs word by word (C11 lets a
 * typedef stand twice only if both mean the same), and our structs under the name mirror_TAG, so that both can be seen at
 * once. functions.inc: ABI_FUNCTION(NAME) for each fn_NAME that the layout has. list.inc: what is compared, out of lists/.
 */
#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "ggml-cpu/vec.h"
#include "ggml-impl.h"

struct ggml_backend_graph_optimize_params; /* older releases do not know it */

#ifdef IMPORTS
#define GGML_MOE_API3_GGML_ABI_H /* it must see the real declarations */
#include "ggml-imports.h"
#endif

#include "declarations.inc"

#define ABI_CONST(name)
#define ABI_TYPEDEF(name)
#define ABI_ENUM(tag)
#define ABI_STRUCT(tag)
#define ABI_FIELD(tag, member)                                                                                         \
    _Static_assert(__builtin_types_compatible_p(__typeof__(((struct tag *) 0)->member),                                \
                                                __typeof__(((struct mirror_##tag *) 0)->member)),                      \
                   #tag "." #member " has another type upstream");
#define ABI_FUNCTION(name) fn_##name upstream_##name = name;

#include "functions.inc"
#include "list.inc"
