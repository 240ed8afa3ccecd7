/* The buffer types of ggml-headers/api2/ggml-abi.h, which the layout of 2025 has the same. */

ABI_STRUCT(ggml_backend_buffer_type_i)
ABI_FIELD(ggml_backend_buffer_type_i, get_name) ABI_FIELD(ggml_backend_buffer_type_i, alloc_buffer)
ABI_FIELD(ggml_backend_buffer_type_i, get_alignment) ABI_FIELD(ggml_backend_buffer_type_i, get_max_size)
ABI_FIELD(ggml_backend_buffer_type_i, get_alloc_size) ABI_FIELD(ggml_backend_buffer_type_i, is_host)

ABI_STRUCT(ggml_backend_buffer_type)
ABI_FIELD(ggml_backend_buffer_type, iface) ABI_FIELD(ggml_backend_buffer_type, device)
ABI_FIELD(ggml_backend_buffer_type, context)
