/* What api 3 declares and the layouts from 2026-04-09 on have the same. */

ABI_CONST(GGML_TYPE_Q1_0) ABI_CONST(GGML_TYPE_Q2_0) ABI_CONST(GGML_BACKEND_DEVICE_TYPE_META)

ABI_STRUCT(ggml_cgraph)
ABI_FIELD(ggml_cgraph, uid)

ABI_STRUCT(ggml_backend_buffer_i)
ABI_FIELD(ggml_backend_buffer_i, free_buffer) ABI_FIELD(ggml_backend_buffer_i, get_base)
ABI_FIELD(ggml_backend_buffer_i, init_tensor) ABI_FIELD(ggml_backend_buffer_i, memset_tensor)
ABI_FIELD(ggml_backend_buffer_i, set_tensor) ABI_FIELD(ggml_backend_buffer_i, get_tensor)
ABI_FIELD(ggml_backend_buffer_i, set_tensor_2d) ABI_FIELD(ggml_backend_buffer_i, get_tensor_2d)
ABI_FIELD(ggml_backend_buffer_i, cpy_tensor) ABI_FIELD(ggml_backend_buffer_i, clear)
ABI_FIELD(ggml_backend_buffer_i, reset)

ABI_STRUCT(ggml_backend_buffer)
ABI_FIELD(ggml_backend_buffer, iface) ABI_FIELD(ggml_backend_buffer, buft) ABI_FIELD(ggml_backend_buffer, context)
ABI_FIELD(ggml_backend_buffer, size) ABI_FIELD(ggml_backend_buffer, usage)

ABI_STRUCT(ggml_backend_dev_caps)
ABI_FIELD(ggml_backend_dev_caps, mmap_support)

ABI_FIELD(ggml_backend_dev_props, caps)
