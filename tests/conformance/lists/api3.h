/* What api 3 has otherwise than the older layouts, which list their own. */

ABI_CONST(GGML_BACKEND_API_VERSION)

ABI_STRUCT(ggml_backend_buffer_type_i)
ABI_FIELD(ggml_backend_buffer_type_i, get_name) ABI_FIELD(ggml_backend_buffer_type_i, alloc_buffer)
ABI_FIELD(ggml_backend_buffer_type_i, alloc_buffer_n) ABI_FIELD(ggml_backend_buffer_type_i, get_alignment)
ABI_FIELD(ggml_backend_buffer_type_i, get_max_size) ABI_FIELD(ggml_backend_buffer_type_i, get_alloc_size)
ABI_FIELD(ggml_backend_buffer_type_i, get_alloc_size_n) ABI_FIELD(ggml_backend_buffer_type_i, is_host)

ABI_STRUCT(ggml_backend_buffer_type)
ABI_FIELD(ggml_backend_buffer_type, iface) ABI_FIELD(ggml_backend_buffer_type, device)
ABI_FIELD(ggml_backend_buffer_type, context)

ABI_STRUCT(ggml_backend_graph_optimize_params)
ABI_FIELD(ggml_backend_graph_optimize_params, add_alloc_dep) ABI_FIELD(ggml_backend_graph_optimize_params, user_data)

ABI_STRUCT(ggml_backend_i)
ABI_FIELD(ggml_backend_i, get_name) ABI_FIELD(ggml_backend_i, free) ABI_FIELD(ggml_backend_i, set_tensor_async)
ABI_FIELD(ggml_backend_i, get_tensor_async) ABI_FIELD(ggml_backend_i, set_tensor_2d_async)
ABI_FIELD(ggml_backend_i, get_tensor_2d_async) ABI_FIELD(ggml_backend_i, cpy_tensor_async)
ABI_FIELD(ggml_backend_i, synchronize) ABI_FIELD(ggml_backend_i, graph_plan_create)
ABI_FIELD(ggml_backend_i, graph_plan_free) ABI_FIELD(ggml_backend_i, graph_plan_update)
ABI_FIELD(ggml_backend_i, graph_plan_compute) ABI_FIELD(ggml_backend_i, graph_compute)
ABI_FIELD(ggml_backend_i, event_record) ABI_FIELD(ggml_backend_i, event_wait) ABI_FIELD(ggml_backend_i, graph_optimize)

ABI_STRUCT(ggml_backend)
ABI_FIELD(ggml_backend, guid) ABI_FIELD(ggml_backend, iface) ABI_FIELD(ggml_backend, device)
ABI_FIELD(ggml_backend, context)
