/* Every item of ggml-headers/api2/ggml-abi.h but what is in api2-types.h. */

ABI_CONST(GGML_BACKEND_API_VERSION)

ABI_TYPEDEF(ggml_backend_buffer_type_t) ABI_TYPEDEF(ggml_backend_buffer_t) ABI_TYPEDEF(ggml_backend_event_t)
ABI_TYPEDEF(ggml_backend_t) ABI_TYPEDEF(ggml_backend_graph_plan_t) ABI_TYPEDEF(ggml_backend_dev_t)
ABI_TYPEDEF(ggml_guid) ABI_TYPEDEF(ggml_guid_t)

ABI_ENUM(ggml_status)
ABI_CONST(GGML_STATUS_ALLOC_FAILED) ABI_CONST(GGML_STATUS_FAILED) ABI_CONST(GGML_STATUS_SUCCESS)
ABI_CONST(GGML_STATUS_ABORTED)

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
