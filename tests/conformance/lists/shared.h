/* What api 3 declares and every known layout has the same. */

ABI_CONST(GGML_MAX_DIMS) ABI_CONST(GGML_MAX_SRC) ABI_CONST(GGML_MAX_OP_PARAMS) ABI_CONST(GGML_MAX_NAME)

ABI_TYPEDEF(ggml_backend_buffer_type_t) ABI_TYPEDEF(ggml_backend_buffer_t) ABI_TYPEDEF(ggml_backend_event_t)
ABI_TYPEDEF(ggml_backend_t) ABI_TYPEDEF(ggml_backend_graph_plan_t) ABI_TYPEDEF(ggml_backend_reg_t)
ABI_TYPEDEF(ggml_backend_dev_t) ABI_TYPEDEF(ggml_guid) ABI_TYPEDEF(ggml_guid_t) ABI_TYPEDEF(ggml_bitset_t)
ABI_TYPEDEF(ggml_abort_callback) ABI_TYPEDEF(ggml_backend_set_n_threads_t)
ABI_TYPEDEF(ggml_backend_dev_get_extra_bufts_t) ABI_TYPEDEF(ggml_backend_set_abort_callback_t)
ABI_TYPEDEF(ggml_backend_get_features_t)

ABI_ENUM(ggml_status)
ABI_CONST(GGML_STATUS_ALLOC_FAILED) ABI_CONST(GGML_STATUS_FAILED) ABI_CONST(GGML_STATUS_SUCCESS)
ABI_CONST(GGML_STATUS_ABORTED)

ABI_ENUM(ggml_log_level)
ABI_CONST(GGML_LOG_LEVEL_NONE) ABI_CONST(GGML_LOG_LEVEL_DEBUG) ABI_CONST(GGML_LOG_LEVEL_INFO)
ABI_CONST(GGML_LOG_LEVEL_WARN) ABI_CONST(GGML_LOG_LEVEL_ERROR) ABI_CONST(GGML_LOG_LEVEL_CONT)

ABI_ENUM(ggml_type)
ABI_CONST(GGML_TYPE_F32) ABI_CONST(GGML_TYPE_F16) ABI_CONST(GGML_TYPE_Q4_0) ABI_CONST(GGML_TYPE_Q4_1)
ABI_CONST(GGML_TYPE_Q5_0) ABI_CONST(GGML_TYPE_Q5_1) ABI_CONST(GGML_TYPE_Q8_0) ABI_CONST(GGML_TYPE_Q8_1)
ABI_CONST(GGML_TYPE_Q2_K) ABI_CONST(GGML_TYPE_Q3_K) ABI_CONST(GGML_TYPE_Q4_K) ABI_CONST(GGML_TYPE_Q5_K)
ABI_CONST(GGML_TYPE_Q6_K) ABI_CONST(GGML_TYPE_Q8_K) ABI_CONST(GGML_TYPE_IQ2_XXS) ABI_CONST(GGML_TYPE_IQ2_XS)
ABI_CONST(GGML_TYPE_IQ3_XXS) ABI_CONST(GGML_TYPE_IQ1_S) ABI_CONST(GGML_TYPE_IQ4_NL) ABI_CONST(GGML_TYPE_IQ3_S)
ABI_CONST(GGML_TYPE_IQ2_S) ABI_CONST(GGML_TYPE_IQ4_XS) ABI_CONST(GGML_TYPE_I8) ABI_CONST(GGML_TYPE_I16)
ABI_CONST(GGML_TYPE_I32) ABI_CONST(GGML_TYPE_I64) ABI_CONST(GGML_TYPE_F64) ABI_CONST(GGML_TYPE_IQ1_M)
ABI_CONST(GGML_TYPE_BF16) ABI_CONST(GGML_TYPE_TQ1_0) ABI_CONST(GGML_TYPE_TQ2_0) ABI_CONST(GGML_TYPE_MXFP4)
ABI_CONST(GGML_TYPE_NVFP4)

ABI_ENUM(ggml_op)

ABI_ENUM(ggml_tensor_flag)
ABI_CONST(GGML_TENSOR_FLAG_INPUT) ABI_CONST(GGML_TENSOR_FLAG_OUTPUT) ABI_CONST(GGML_TENSOR_FLAG_PARAM)
ABI_CONST(GGML_TENSOR_FLAG_LOSS) ABI_CONST(GGML_TENSOR_FLAG_COMPUTE)

ABI_ENUM(ggml_backend_buffer_usage)
ABI_CONST(GGML_BACKEND_BUFFER_USAGE_ANY) ABI_CONST(GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
ABI_CONST(GGML_BACKEND_BUFFER_USAGE_COMPUTE)

ABI_ENUM(ggml_backend_dev_type)
ABI_CONST(GGML_BACKEND_DEVICE_TYPE_CPU) ABI_CONST(GGML_BACKEND_DEVICE_TYPE_GPU) ABI_CONST(GGML_BACKEND_DEVICE_TYPE_IGPU)
ABI_CONST(GGML_BACKEND_DEVICE_TYPE_ACCEL)

ABI_ENUM(ggml_cgraph_eval_order)
ABI_CONST(GGML_CGRAPH_EVAL_ORDER_LEFT_TO_RIGHT) ABI_CONST(GGML_CGRAPH_EVAL_ORDER_RIGHT_TO_LEFT)
ABI_CONST(GGML_CGRAPH_EVAL_ORDER_COUNT)

ABI_STRUCT(ggml_tensor)
ABI_FIELD(ggml_tensor, type) ABI_FIELD(ggml_tensor, buffer) ABI_FIELD(ggml_tensor, ne) ABI_FIELD(ggml_tensor, nb)
ABI_FIELD(ggml_tensor, op) ABI_FIELD(ggml_tensor, op_params) ABI_FIELD(ggml_tensor, flags) ABI_FIELD(ggml_tensor, src)
ABI_FIELD(ggml_tensor, view_src) ABI_FIELD(ggml_tensor, view_offs) ABI_FIELD(ggml_tensor, data)
ABI_FIELD(ggml_tensor, name) ABI_FIELD(ggml_tensor, extra) ABI_FIELD(ggml_tensor, padding)

ABI_STRUCT(ggml_hash_set)
ABI_FIELD(ggml_hash_set, size) ABI_FIELD(ggml_hash_set, used) ABI_FIELD(ggml_hash_set, keys)

ABI_FIELD(ggml_cgraph, size) ABI_FIELD(ggml_cgraph, n_nodes) ABI_FIELD(ggml_cgraph, n_leafs)
ABI_FIELD(ggml_cgraph, nodes) ABI_FIELD(ggml_cgraph, grads) ABI_FIELD(ggml_cgraph, grad_accs)
ABI_FIELD(ggml_cgraph, leafs) ABI_FIELD(ggml_cgraph, use_counts) ABI_FIELD(ggml_cgraph, visited_hash_set)
ABI_FIELD(ggml_cgraph, order)

ABI_STRUCT(ggml_init_params)
ABI_FIELD(ggml_init_params, mem_size) ABI_FIELD(ggml_init_params, mem_buffer) ABI_FIELD(ggml_init_params, no_alloc)

ABI_STRUCT(ggml_backend_event)
ABI_FIELD(ggml_backend_event, device) ABI_FIELD(ggml_backend_event, context)

ABI_FIELD(ggml_backend_dev_caps, async) ABI_FIELD(ggml_backend_dev_caps, host_buffer)
ABI_FIELD(ggml_backend_dev_caps, buffer_from_host_ptr) ABI_FIELD(ggml_backend_dev_caps, events)

ABI_STRUCT(ggml_backend_dev_props)
ABI_FIELD(ggml_backend_dev_props, name) ABI_FIELD(ggml_backend_dev_props, description)
ABI_FIELD(ggml_backend_dev_props, memory_free) ABI_FIELD(ggml_backend_dev_props, memory_total)
ABI_FIELD(ggml_backend_dev_props, type) ABI_FIELD(ggml_backend_dev_props, device_id)

ABI_STRUCT(ggml_backend_device_i)
ABI_FIELD(ggml_backend_device_i, get_name) ABI_FIELD(ggml_backend_device_i, get_description)
ABI_FIELD(ggml_backend_device_i, get_memory) ABI_FIELD(ggml_backend_device_i, get_type)
ABI_FIELD(ggml_backend_device_i, get_props) ABI_FIELD(ggml_backend_device_i, init_backend)
ABI_FIELD(ggml_backend_device_i, get_buffer_type) ABI_FIELD(ggml_backend_device_i, get_host_buffer_type)
ABI_FIELD(ggml_backend_device_i, buffer_from_host_ptr) ABI_FIELD(ggml_backend_device_i, supports_op)
ABI_FIELD(ggml_backend_device_i, supports_buft) ABI_FIELD(ggml_backend_device_i, offload_op)
ABI_FIELD(ggml_backend_device_i, event_new) ABI_FIELD(ggml_backend_device_i, event_free)
ABI_FIELD(ggml_backend_device_i, event_synchronize)

ABI_STRUCT(ggml_backend_device)
ABI_FIELD(ggml_backend_device, iface) ABI_FIELD(ggml_backend_device, reg) ABI_FIELD(ggml_backend_device, context)

ABI_STRUCT(ggml_backend_reg_i)
ABI_FIELD(ggml_backend_reg_i, get_name) ABI_FIELD(ggml_backend_reg_i, get_device_count)
ABI_FIELD(ggml_backend_reg_i, get_device) ABI_FIELD(ggml_backend_reg_i, get_proc_address)

ABI_STRUCT(ggml_backend_reg)
ABI_FIELD(ggml_backend_reg, api_version) ABI_FIELD(ggml_backend_reg, iface) ABI_FIELD(ggml_backend_reg, context)

ABI_STRUCT(ggml_backend_feature)
ABI_FIELD(ggml_backend_feature, name) ABI_FIELD(ggml_backend_feature, value)

ABI_TYPEDEF(ggml_from_float_t) ABI_TYPEDEF(ggml_vec_dot_t)
ABI_STRUCT(ggml_type_traits_cpu)
ABI_FIELD(ggml_type_traits_cpu, from_float) ABI_FIELD(ggml_type_traits_cpu, vec_dot)
ABI_FIELD(ggml_type_traits_cpu, vec_dot_type) ABI_FIELD(ggml_type_traits_cpu, nrows)
