/*
 * The functions of ggml that the plugin looks up by name at run time, layout "api 3" (llama.cpp b11434, ggml 0.26.0).
 *
 * The plugin never links ggml, so each function is a pointer type here: fn_NAME is the type of NAME.
 * tests/abi_conformance.rs compiles an assignment of each real function to its type.
 */
#ifndef GGML_MOE_API3_GGML_IMPORTS_H
#define GGML_MOE_API3_GGML_IMPORTS_H

#include "ggml-abi.h"

/* Registry: what the host has loaded before us. */
typedef size_t (*fn_ggml_backend_reg_count)(void);
typedef ggml_backend_reg_t (*fn_ggml_backend_reg_get)(size_t index);
typedef size_t (*fn_ggml_backend_dev_count)(void);
typedef ggml_backend_dev_t (*fn_ggml_backend_dev_get)(size_t index);

typedef const char * (*fn_ggml_backend_reg_name)(ggml_backend_reg_t reg);
typedef void * (*fn_ggml_backend_reg_get_proc_address)(ggml_backend_reg_t reg, const char * name);

/* Devices. */
typedef const char * (*fn_ggml_backend_dev_name)(ggml_backend_dev_t device);
typedef const char * (*fn_ggml_backend_dev_description)(ggml_backend_dev_t device);
typedef void (*fn_ggml_backend_dev_memory)(ggml_backend_dev_t device, size_t * free, size_t * total);
typedef enum ggml_backend_dev_type (*fn_ggml_backend_dev_type)(ggml_backend_dev_t device);
typedef void (*fn_ggml_backend_dev_get_props)(ggml_backend_dev_t device, struct ggml_backend_dev_props * props);
typedef ggml_backend_reg_t (*fn_ggml_backend_dev_backend_reg)(ggml_backend_dev_t device);
typedef ggml_backend_t (*fn_ggml_backend_dev_init)(ggml_backend_dev_t device, const char * params);
typedef ggml_backend_buffer_type_t (*fn_ggml_backend_dev_buffer_type)(ggml_backend_dev_t device);
typedef ggml_backend_buffer_type_t (*fn_ggml_backend_dev_host_buffer_type)(ggml_backend_dev_t device);
typedef bool (*fn_ggml_backend_dev_supports_buft)(ggml_backend_dev_t device, ggml_backend_buffer_type_t buft);
typedef bool (*fn_ggml_backend_dev_supports_op)(ggml_backend_dev_t device, const struct ggml_tensor * op);

/* Buffer types. */
typedef ggml_backend_buffer_t (*fn_ggml_backend_buft_alloc_buffer)(ggml_backend_buffer_type_t buft, size_t size);
typedef ggml_backend_dev_t (*fn_ggml_backend_buft_get_device)(ggml_backend_buffer_type_t buft);
typedef size_t (*fn_ggml_backend_buft_get_alignment)(ggml_backend_buffer_type_t buft);
typedef bool (*fn_ggml_backend_buft_is_host)(ggml_backend_buffer_type_t buft);
typedef size_t (*fn_ggml_backend_buft_get_max_size)(ggml_backend_buffer_type_t buft);
typedef size_t (*fn_ggml_backend_buft_get_alloc_size)(ggml_backend_buffer_type_t buft, const struct ggml_tensor * tensor);
typedef ggml_backend_buffer_type_t (*fn_ggml_backend_cpu_buffer_type)(void);

/* Buffers. */
typedef ggml_backend_buffer_t (*fn_ggml_backend_buffer_init)(ggml_backend_buffer_type_t buft,
                                                             struct ggml_backend_buffer_i iface, void * context, size_t size);
typedef void (*fn_ggml_backend_buffer_free)(ggml_backend_buffer_t buffer);
typedef void * (*fn_ggml_backend_buffer_get_base)(ggml_backend_buffer_t buffer);
typedef size_t (*fn_ggml_backend_buffer_get_size)(ggml_backend_buffer_t buffer);
typedef enum ggml_backend_buffer_usage (*fn_ggml_backend_buffer_get_usage)(ggml_backend_buffer_t buffer);
typedef ggml_backend_buffer_type_t (*fn_ggml_backend_buffer_get_type)(ggml_backend_buffer_t buffer);

/* Tensor data, through the buffer that the tensor names. The two for rows are not there in layout "api 2 of 2025". */
typedef void (*fn_ggml_backend_tensor_set)(struct ggml_tensor * tensor, const void * data, size_t offset, size_t size);
typedef void (*fn_ggml_backend_tensor_get)(const struct ggml_tensor * tensor, void * data, size_t offset, size_t size);
typedef void (*fn_ggml_backend_tensor_memset)(struct ggml_tensor * tensor, uint8_t value, size_t offset, size_t size);
typedef void (*fn_ggml_backend_tensor_set_2d)(struct ggml_tensor * tensor, const void * data, size_t offset, size_t size,
                                              size_t n_copies, size_t stride_tensor, size_t stride_data);
typedef void (*fn_ggml_backend_tensor_get_2d)(const struct ggml_tensor * tensor, void * data, size_t offset, size_t size,
                                              size_t n_copies, size_t stride_tensor, size_t stride_data);
typedef void (*fn_ggml_backend_tensor_set_async)(ggml_backend_t backend, struct ggml_tensor * tensor, const void * data,
                                                 size_t offset, size_t size);
typedef void (*fn_ggml_backend_tensor_get_async)(ggml_backend_t backend, const struct ggml_tensor * tensor, void * data,
                                                 size_t offset, size_t size);
typedef bool (*fn_ggml_backend_buffer_copy_tensor)(const struct ggml_tensor * src, struct ggml_tensor * dst);

/* Backends and events. */
typedef void (*fn_ggml_backend_free)(ggml_backend_t backend);
typedef void (*fn_ggml_backend_synchronize)(ggml_backend_t backend);
typedef enum ggml_status (*fn_ggml_backend_graph_compute_async)(ggml_backend_t backend, struct ggml_cgraph * cgraph);
typedef ggml_backend_event_t (*fn_ggml_backend_event_new)(ggml_backend_dev_t device);
typedef void (*fn_ggml_backend_event_free)(ggml_backend_event_t event);
typedef void (*fn_ggml_backend_event_record)(ggml_backend_event_t event, ggml_backend_t backend);
typedef void (*fn_ggml_backend_event_synchronize)(ggml_backend_event_t event);
typedef void (*fn_ggml_backend_event_wait)(ggml_backend_t backend, ggml_backend_event_t event);

/* Types and tensors. */
typedef const char * (*fn_ggml_op_name)(enum ggml_op op);
typedef const char * (*fn_ggml_op_desc)(const struct ggml_tensor * t);
typedef bool (*fn_ggml_is_contiguous)(const struct ggml_tensor * tensor);
typedef const char * (*fn_ggml_type_name)(enum ggml_type type);
typedef size_t (*fn_ggml_row_size)(enum ggml_type type, int64_t ne);
typedef bool (*fn_ggml_is_quantized)(enum ggml_type type);
typedef size_t (*fn_ggml_nbytes)(const struct ggml_tensor * tensor);
typedef size_t (*fn_ggml_tensor_overhead)(void);
typedef const char * (*fn_ggml_get_name)(const struct ggml_tensor * tensor);
typedef struct ggml_tensor * (*fn_ggml_set_name)(struct ggml_tensor * tensor, const char * name);
typedef void (*fn_ggml_set_input)(struct ggml_tensor * tensor);

/* Contexts and graphs: the layout check and the fallback without private structs. */
typedef struct ggml_context * (*fn_ggml_init)(struct ggml_init_params params);
typedef void (*fn_ggml_free)(struct ggml_context * ctx);
typedef struct ggml_tensor * (*fn_ggml_new_tensor_3d)(struct ggml_context * ctx, enum ggml_type type, int64_t ne0,
                                                      int64_t ne1, int64_t ne2);
typedef struct ggml_tensor * (*fn_ggml_view_1d)(struct ggml_context * ctx, struct ggml_tensor * a, int64_t ne0, size_t offset);
typedef struct ggml_tensor * (*fn_ggml_add)(struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b);
typedef size_t (*fn_ggml_graph_overhead_custom)(size_t size, bool grads);
typedef struct ggml_cgraph * (*fn_ggml_new_graph_custom)(struct ggml_context * ctx, size_t size, bool grads);
typedef int (*fn_ggml_graph_size)(struct ggml_cgraph * cgraph);
typedef int (*fn_ggml_graph_n_nodes)(struct ggml_cgraph * cgraph);
typedef struct ggml_tensor * (*fn_ggml_graph_node)(struct ggml_cgraph * cgraph, int i);
typedef struct ggml_tensor ** (*fn_ggml_graph_nodes)(struct ggml_cgraph * cgraph);
typedef void (*fn_ggml_graph_add_node)(struct ggml_cgraph * cgraph, struct ggml_tensor * tensor);
typedef void (*fn_ggml_build_forward_expand)(struct ggml_cgraph * cgraph, struct ggml_tensor * tensor);

/* Log. Private to ggml but exported: the only way to reach the callback that the host installed. */
typedef void (*fn_ggml_log_internal)(enum ggml_log_level level, const char * format, ...);

/* The CPU backend, in a library of its own. The last two are private to it but exported, as the tables ggml_table_gelu_f16 and
   ggml_table_gelu_quick_f16 are, which are looked up as data. */
typedef int64_t (*fn_ggml_blck_size)(enum ggml_type type);
typedef void (*fn_ggml_cpu_init)(void);
typedef const struct ggml_type_traits_cpu * (*fn_ggml_get_type_traits_cpu)(enum ggml_type type);
typedef void (*fn_ggml_cpu_fp16_to_fp32)(const uint16_t * x, float * y, int64_t n);
typedef void (*fn_ggml_vec_silu_f32)(const int n, float * y, const float * x);
typedef void (*fn_ggml_vec_swiglu_f32)(const int n, float * y, const float * x, const float * g);

#endif
