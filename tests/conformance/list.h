/*
 * Every item of ggml-headers/api3/ggml-abi.h, for the conformance test. No include guard: it is included with the macros
 * defined in different ways. The test fails when the bindings hold an item that is not listed here.
 */

/* Macros. */
ABI_CONST(GGML_BACKEND_API_VERSION) ABI_CONST(GGML_MAX_DIMS) ABI_CONST(GGML_MAX_SRC) ABI_CONST(GGML_MAX_OP_PARAMS)
ABI_CONST(GGML_MAX_NAME)

/* Typedefs. */
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
ABI_CONST(GGML_TYPE_NVFP4) ABI_CONST(GGML_TYPE_Q1_0) ABI_CONST(GGML_TYPE_Q2_0) ABI_CONST(GGML_TYPE_COUNT)

ABI_ENUM(ggml_op)
ABI_CONST(GGML_OP_NONE) ABI_CONST(GGML_OP_DUP) ABI_CONST(GGML_OP_ADD) ABI_CONST(GGML_OP_ADD_ID)
ABI_CONST(GGML_OP_ADD1) ABI_CONST(GGML_OP_ACC) ABI_CONST(GGML_OP_SUB) ABI_CONST(GGML_OP_MUL) ABI_CONST(GGML_OP_DIV)
ABI_CONST(GGML_OP_SQR) ABI_CONST(GGML_OP_SQRT) ABI_CONST(GGML_OP_LOG) ABI_CONST(GGML_OP_SIN) ABI_CONST(GGML_OP_COS)
ABI_CONST(GGML_OP_SUM) ABI_CONST(GGML_OP_SUM_ROWS) ABI_CONST(GGML_OP_CUMSUM) ABI_CONST(GGML_OP_MEAN)
ABI_CONST(GGML_OP_ARGMAX) ABI_CONST(GGML_OP_COUNT_EQUAL) ABI_CONST(GGML_OP_REPEAT) ABI_CONST(GGML_OP_REPEAT_BACK)
ABI_CONST(GGML_OP_CONCAT) ABI_CONST(GGML_OP_SILU_BACK) ABI_CONST(GGML_OP_NORM) ABI_CONST(GGML_OP_RMS_NORM)
ABI_CONST(GGML_OP_RMS_NORM_BACK) ABI_CONST(GGML_OP_GROUP_NORM) ABI_CONST(GGML_OP_L2_NORM) ABI_CONST(GGML_OP_MUL_MAT)
ABI_CONST(GGML_OP_MUL_MAT_ID) ABI_CONST(GGML_OP_OUT_PROD) ABI_CONST(GGML_OP_SCALE) ABI_CONST(GGML_OP_SET)
ABI_CONST(GGML_OP_CPY) ABI_CONST(GGML_OP_CONT) ABI_CONST(GGML_OP_RESHAPE) ABI_CONST(GGML_OP_VIEW)
ABI_CONST(GGML_OP_PERMUTE) ABI_CONST(GGML_OP_TRANSPOSE) ABI_CONST(GGML_OP_GET_ROWS) ABI_CONST(GGML_OP_GET_ROWS_BACK)
ABI_CONST(GGML_OP_SET_ROWS) ABI_CONST(GGML_OP_DIAG) ABI_CONST(GGML_OP_DIAG_MASK_INF) ABI_CONST(GGML_OP_DIAG_MASK_ZERO)
ABI_CONST(GGML_OP_SOFT_MAX) ABI_CONST(GGML_OP_SOFT_MAX_BACK) ABI_CONST(GGML_OP_ROPE) ABI_CONST(GGML_OP_ROPE_BACK)
ABI_CONST(GGML_OP_CLAMP) ABI_CONST(GGML_OP_CONV_TRANSPOSE_1D) ABI_CONST(GGML_OP_IM2COL) ABI_CONST(GGML_OP_IM2COL_BACK)
ABI_CONST(GGML_OP_IM2COL_3D) ABI_CONST(GGML_OP_COL2IM_1D) ABI_CONST(GGML_OP_CONV_2D) ABI_CONST(GGML_OP_CONV_3D)
ABI_CONST(GGML_OP_CONV_2D_DW) ABI_CONST(GGML_OP_CONV_TRANSPOSE_2D) ABI_CONST(GGML_OP_POOL_1D)
ABI_CONST(GGML_OP_POOL_2D) ABI_CONST(GGML_OP_POOL_2D_BACK) ABI_CONST(GGML_OP_UPSCALE) ABI_CONST(GGML_OP_PAD)
ABI_CONST(GGML_OP_PAD_REFLECT_1D) ABI_CONST(GGML_OP_ROLL) ABI_CONST(GGML_OP_ARANGE)
ABI_CONST(GGML_OP_TIMESTEP_EMBEDDING) ABI_CONST(GGML_OP_ARGSORT) ABI_CONST(GGML_OP_TOP_K)
ABI_CONST(GGML_OP_LEAKY_RELU) ABI_CONST(GGML_OP_TRI) ABI_CONST(GGML_OP_FILL) ABI_CONST(GGML_OP_FLASH_ATTN_EXT)
ABI_CONST(GGML_OP_FLASH_ATTN_BACK) ABI_CONST(GGML_OP_SSM_CONV) ABI_CONST(GGML_OP_SSM_SCAN) ABI_CONST(GGML_OP_WIN_PART)
ABI_CONST(GGML_OP_WIN_UNPART) ABI_CONST(GGML_OP_GET_REL_POS) ABI_CONST(GGML_OP_ADD_REL_POS)
ABI_CONST(GGML_OP_RWKV_WKV6) ABI_CONST(GGML_OP_GATED_LINEAR_ATTN) ABI_CONST(GGML_OP_RWKV_WKV7)
ABI_CONST(GGML_OP_SOLVE_TRI) ABI_CONST(GGML_OP_GATED_DELTA_NET) ABI_CONST(GGML_OP_LIGHTNING_INDEXER)
ABI_CONST(GGML_OP_DSV4_HC_COMB) ABI_CONST(GGML_OP_DSV4_HC_PRE) ABI_CONST(GGML_OP_DSV4_HC_POST)
ABI_CONST(GGML_OP_UNARY) ABI_CONST(GGML_OP_MAP_CUSTOM1) ABI_CONST(GGML_OP_MAP_CUSTOM2) ABI_CONST(GGML_OP_MAP_CUSTOM3)
ABI_CONST(GGML_OP_CUSTOM) ABI_CONST(GGML_OP_CROSS_ENTROPY_LOSS) ABI_CONST(GGML_OP_CROSS_ENTROPY_LOSS_BACK)
ABI_CONST(GGML_OP_OPT_STEP_ADAMW) ABI_CONST(GGML_OP_OPT_STEP_SGD) ABI_CONST(GGML_OP_GLU) ABI_CONST(GGML_OP_COUNT)

ABI_ENUM(ggml_tensor_flag)
ABI_CONST(GGML_TENSOR_FLAG_INPUT) ABI_CONST(GGML_TENSOR_FLAG_OUTPUT) ABI_CONST(GGML_TENSOR_FLAG_PARAM)
ABI_CONST(GGML_TENSOR_FLAG_LOSS) ABI_CONST(GGML_TENSOR_FLAG_COMPUTE)

ABI_ENUM(ggml_backend_buffer_usage)
ABI_CONST(GGML_BACKEND_BUFFER_USAGE_ANY) ABI_CONST(GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
ABI_CONST(GGML_BACKEND_BUFFER_USAGE_COMPUTE)

ABI_ENUM(ggml_backend_dev_type)
ABI_CONST(GGML_BACKEND_DEVICE_TYPE_CPU) ABI_CONST(GGML_BACKEND_DEVICE_TYPE_GPU)
ABI_CONST(GGML_BACKEND_DEVICE_TYPE_IGPU) ABI_CONST(GGML_BACKEND_DEVICE_TYPE_ACCEL)
ABI_CONST(GGML_BACKEND_DEVICE_TYPE_META)

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

ABI_STRUCT(ggml_cgraph)
ABI_FIELD(ggml_cgraph, size) ABI_FIELD(ggml_cgraph, n_nodes) ABI_FIELD(ggml_cgraph, n_leafs)
ABI_FIELD(ggml_cgraph, nodes) ABI_FIELD(ggml_cgraph, grads) ABI_FIELD(ggml_cgraph, grad_accs)
ABI_FIELD(ggml_cgraph, leafs) ABI_FIELD(ggml_cgraph, use_counts) ABI_FIELD(ggml_cgraph, visited_hash_set)
ABI_FIELD(ggml_cgraph, order) ABI_FIELD(ggml_cgraph, uid)

ABI_STRUCT(ggml_init_params)
ABI_FIELD(ggml_init_params, mem_size) ABI_FIELD(ggml_init_params, mem_buffer) ABI_FIELD(ggml_init_params, no_alloc)

ABI_STRUCT(ggml_backend_buffer_type_i)
ABI_FIELD(ggml_backend_buffer_type_i, get_name) ABI_FIELD(ggml_backend_buffer_type_i, alloc_buffer)
ABI_FIELD(ggml_backend_buffer_type_i, alloc_buffer_n) ABI_FIELD(ggml_backend_buffer_type_i, get_alignment)
ABI_FIELD(ggml_backend_buffer_type_i, get_max_size) ABI_FIELD(ggml_backend_buffer_type_i, get_alloc_size)
ABI_FIELD(ggml_backend_buffer_type_i, get_alloc_size_n) ABI_FIELD(ggml_backend_buffer_type_i, is_host)

ABI_STRUCT(ggml_backend_buffer_type)
ABI_FIELD(ggml_backend_buffer_type, iface) ABI_FIELD(ggml_backend_buffer_type, device)
ABI_FIELD(ggml_backend_buffer_type, context)

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

ABI_STRUCT(ggml_backend_graph_optimize_params)
ABI_FIELD(ggml_backend_graph_optimize_params, add_alloc_dep) ABI_FIELD(ggml_backend_graph_optimize_params, user_data)

ABI_STRUCT(ggml_backend_i)
ABI_FIELD(ggml_backend_i, get_name) ABI_FIELD(ggml_backend_i, free) ABI_FIELD(ggml_backend_i, set_tensor_async)
ABI_FIELD(ggml_backend_i, get_tensor_async) ABI_FIELD(ggml_backend_i, set_tensor_2d_async)
ABI_FIELD(ggml_backend_i, get_tensor_2d_async) ABI_FIELD(ggml_backend_i, cpy_tensor_async)
ABI_FIELD(ggml_backend_i, synchronize) ABI_FIELD(ggml_backend_i, graph_plan_create)
ABI_FIELD(ggml_backend_i, graph_plan_free) ABI_FIELD(ggml_backend_i, graph_plan_update)
ABI_FIELD(ggml_backend_i, graph_plan_compute) ABI_FIELD(ggml_backend_i, graph_compute)
ABI_FIELD(ggml_backend_i, event_record) ABI_FIELD(ggml_backend_i, event_wait)
ABI_FIELD(ggml_backend_i, graph_optimize)

ABI_STRUCT(ggml_backend)
ABI_FIELD(ggml_backend, guid) ABI_FIELD(ggml_backend, iface) ABI_FIELD(ggml_backend, device)
ABI_FIELD(ggml_backend, context)

ABI_STRUCT(ggml_backend_event)
ABI_FIELD(ggml_backend_event, device) ABI_FIELD(ggml_backend_event, context)

ABI_STRUCT(ggml_backend_dev_caps)
ABI_FIELD(ggml_backend_dev_caps, async) ABI_FIELD(ggml_backend_dev_caps, host_buffer)
ABI_FIELD(ggml_backend_dev_caps, buffer_from_host_ptr) ABI_FIELD(ggml_backend_dev_caps, events)
ABI_FIELD(ggml_backend_dev_caps, mmap_support)

ABI_STRUCT(ggml_backend_dev_props)
ABI_FIELD(ggml_backend_dev_props, name) ABI_FIELD(ggml_backend_dev_props, description)
ABI_FIELD(ggml_backend_dev_props, memory_free) ABI_FIELD(ggml_backend_dev_props, memory_total)
ABI_FIELD(ggml_backend_dev_props, type) ABI_FIELD(ggml_backend_dev_props, device_id)
ABI_FIELD(ggml_backend_dev_props, caps)

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
