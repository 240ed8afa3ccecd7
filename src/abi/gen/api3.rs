//! ggml's binary interface, layout "api3", as seen from Rust: made by tests/gen/bindings.sh (bindgen 0.73.2)
//! from ggml-headers/api3/. Do not edit; `bindings.sh --check` fails on any difference.

pub const GGML_BACKEND_API_VERSION: u32 = 3;
pub const GGML_MAX_DIMS: u32 = 4;
pub const GGML_MAX_SRC: u32 = 10;
pub const GGML_MAX_OP_PARAMS: u32 = 64;
pub const GGML_MAX_NAME: u32 = 64;
#[repr(C)]
#[derive(Debug)]
pub struct ggml_context {
    _unused: [u8; 0],
}
pub type ggml_backend_buffer_type_t = *mut ggml_backend_buffer_type;
pub type ggml_backend_buffer_t = *mut ggml_backend_buffer;
pub type ggml_backend_event_t = *mut ggml_backend_event;
pub type ggml_backend_t = *mut ggml_backend;
pub type ggml_backend_graph_plan_t = *mut ::core::ffi::c_void;
pub type ggml_backend_reg_t = *mut ggml_backend_reg;
pub type ggml_backend_dev_t = *mut ggml_backend_device;
pub type ggml_guid = [u8; 16usize];
pub type ggml_guid_t = *mut ggml_guid;
pub const GGML_STATUS_ALLOC_FAILED: ggml_status = -2;
pub const GGML_STATUS_FAILED: ggml_status = -1;
pub const GGML_STATUS_SUCCESS: ggml_status = 0;
pub const GGML_STATUS_ABORTED: ggml_status = 1;
pub type ggml_status = ::core::ffi::c_int;
pub const GGML_LOG_LEVEL_NONE: ggml_log_level = 0;
pub const GGML_LOG_LEVEL_DEBUG: ggml_log_level = 1;
pub const GGML_LOG_LEVEL_INFO: ggml_log_level = 2;
pub const GGML_LOG_LEVEL_WARN: ggml_log_level = 3;
pub const GGML_LOG_LEVEL_ERROR: ggml_log_level = 4;
pub const GGML_LOG_LEVEL_CONT: ggml_log_level = 5;
pub type ggml_log_level = ::core::ffi::c_uint;
pub const GGML_TYPE_F32: ggml_type = 0;
pub const GGML_TYPE_F16: ggml_type = 1;
pub const GGML_TYPE_Q4_0: ggml_type = 2;
pub const GGML_TYPE_Q4_1: ggml_type = 3;
pub const GGML_TYPE_Q5_0: ggml_type = 6;
pub const GGML_TYPE_Q5_1: ggml_type = 7;
pub const GGML_TYPE_Q8_0: ggml_type = 8;
pub const GGML_TYPE_Q8_1: ggml_type = 9;
pub const GGML_TYPE_Q2_K: ggml_type = 10;
pub const GGML_TYPE_Q3_K: ggml_type = 11;
pub const GGML_TYPE_Q4_K: ggml_type = 12;
pub const GGML_TYPE_Q5_K: ggml_type = 13;
pub const GGML_TYPE_Q6_K: ggml_type = 14;
pub const GGML_TYPE_Q8_K: ggml_type = 15;
pub const GGML_TYPE_IQ2_XXS: ggml_type = 16;
pub const GGML_TYPE_IQ2_XS: ggml_type = 17;
pub const GGML_TYPE_IQ3_XXS: ggml_type = 18;
pub const GGML_TYPE_IQ1_S: ggml_type = 19;
pub const GGML_TYPE_IQ4_NL: ggml_type = 20;
pub const GGML_TYPE_IQ3_S: ggml_type = 21;
pub const GGML_TYPE_IQ2_S: ggml_type = 22;
pub const GGML_TYPE_IQ4_XS: ggml_type = 23;
pub const GGML_TYPE_I8: ggml_type = 24;
pub const GGML_TYPE_I16: ggml_type = 25;
pub const GGML_TYPE_I32: ggml_type = 26;
pub const GGML_TYPE_I64: ggml_type = 27;
pub const GGML_TYPE_F64: ggml_type = 28;
pub const GGML_TYPE_IQ1_M: ggml_type = 29;
pub const GGML_TYPE_BF16: ggml_type = 30;
pub const GGML_TYPE_TQ1_0: ggml_type = 34;
pub const GGML_TYPE_TQ2_0: ggml_type = 35;
pub const GGML_TYPE_MXFP4: ggml_type = 39;
pub const GGML_TYPE_NVFP4: ggml_type = 40;
pub const GGML_TYPE_Q1_0: ggml_type = 41;
pub const GGML_TYPE_Q2_0: ggml_type = 42;
pub const GGML_TYPE_COUNT: ggml_type = 43;
pub type ggml_type = ::core::ffi::c_uint;
pub const GGML_OP_NONE: ggml_op = 0;
pub const GGML_OP_DUP: ggml_op = 1;
pub const GGML_OP_ADD: ggml_op = 2;
pub const GGML_OP_ADD_ID: ggml_op = 3;
pub const GGML_OP_ADD1: ggml_op = 4;
pub const GGML_OP_ACC: ggml_op = 5;
pub const GGML_OP_SUB: ggml_op = 6;
pub const GGML_OP_MUL: ggml_op = 7;
pub const GGML_OP_DIV: ggml_op = 8;
pub const GGML_OP_SQR: ggml_op = 9;
pub const GGML_OP_SQRT: ggml_op = 10;
pub const GGML_OP_LOG: ggml_op = 11;
pub const GGML_OP_SIN: ggml_op = 12;
pub const GGML_OP_COS: ggml_op = 13;
pub const GGML_OP_SUM: ggml_op = 14;
pub const GGML_OP_SUM_ROWS: ggml_op = 15;
pub const GGML_OP_CUMSUM: ggml_op = 16;
pub const GGML_OP_MEAN: ggml_op = 17;
pub const GGML_OP_ARGMAX: ggml_op = 18;
pub const GGML_OP_COUNT_EQUAL: ggml_op = 19;
pub const GGML_OP_REPEAT: ggml_op = 20;
pub const GGML_OP_REPEAT_BACK: ggml_op = 21;
pub const GGML_OP_CONCAT: ggml_op = 22;
pub const GGML_OP_SILU_BACK: ggml_op = 23;
pub const GGML_OP_NORM: ggml_op = 24;
pub const GGML_OP_RMS_NORM: ggml_op = 25;
pub const GGML_OP_RMS_NORM_BACK: ggml_op = 26;
pub const GGML_OP_GROUP_NORM: ggml_op = 27;
pub const GGML_OP_L2_NORM: ggml_op = 28;
pub const GGML_OP_MUL_MAT: ggml_op = 29;
pub const GGML_OP_MUL_MAT_ID: ggml_op = 30;
pub const GGML_OP_OUT_PROD: ggml_op = 31;
pub const GGML_OP_SCALE: ggml_op = 32;
pub const GGML_OP_SET: ggml_op = 33;
pub const GGML_OP_CPY: ggml_op = 34;
pub const GGML_OP_CONT: ggml_op = 35;
pub const GGML_OP_RESHAPE: ggml_op = 36;
pub const GGML_OP_VIEW: ggml_op = 37;
pub const GGML_OP_PERMUTE: ggml_op = 38;
pub const GGML_OP_TRANSPOSE: ggml_op = 39;
pub const GGML_OP_GET_ROWS: ggml_op = 40;
pub const GGML_OP_GET_ROWS_BACK: ggml_op = 41;
pub const GGML_OP_SET_ROWS: ggml_op = 42;
pub const GGML_OP_DIAG: ggml_op = 43;
pub const GGML_OP_DIAG_MASK_INF: ggml_op = 44;
pub const GGML_OP_DIAG_MASK_ZERO: ggml_op = 45;
pub const GGML_OP_SOFT_MAX: ggml_op = 46;
pub const GGML_OP_SOFT_MAX_BACK: ggml_op = 47;
pub const GGML_OP_ROPE: ggml_op = 48;
pub const GGML_OP_ROPE_BACK: ggml_op = 49;
pub const GGML_OP_CLAMP: ggml_op = 50;
pub const GGML_OP_CONV_TRANSPOSE_1D: ggml_op = 51;
pub const GGML_OP_IM2COL: ggml_op = 52;
pub const GGML_OP_IM2COL_BACK: ggml_op = 53;
pub const GGML_OP_IM2COL_3D: ggml_op = 54;
pub const GGML_OP_COL2IM_1D: ggml_op = 55;
pub const GGML_OP_CONV_2D: ggml_op = 56;
pub const GGML_OP_CONV_3D: ggml_op = 57;
pub const GGML_OP_CONV_2D_DW: ggml_op = 58;
pub const GGML_OP_CONV_TRANSPOSE_2D: ggml_op = 59;
pub const GGML_OP_POOL_1D: ggml_op = 60;
pub const GGML_OP_POOL_2D: ggml_op = 61;
pub const GGML_OP_POOL_2D_BACK: ggml_op = 62;
pub const GGML_OP_UPSCALE: ggml_op = 63;
pub const GGML_OP_PAD: ggml_op = 64;
pub const GGML_OP_PAD_REFLECT_1D: ggml_op = 65;
pub const GGML_OP_ROLL: ggml_op = 66;
pub const GGML_OP_ARANGE: ggml_op = 67;
pub const GGML_OP_TIMESTEP_EMBEDDING: ggml_op = 68;
pub const GGML_OP_ARGSORT: ggml_op = 69;
pub const GGML_OP_TOP_K: ggml_op = 70;
pub const GGML_OP_LEAKY_RELU: ggml_op = 71;
pub const GGML_OP_TRI: ggml_op = 72;
pub const GGML_OP_FILL: ggml_op = 73;
pub const GGML_OP_FLASH_ATTN_EXT: ggml_op = 74;
pub const GGML_OP_FLASH_ATTN_BACK: ggml_op = 75;
pub const GGML_OP_SSM_CONV: ggml_op = 76;
pub const GGML_OP_SSM_SCAN: ggml_op = 77;
pub const GGML_OP_WIN_PART: ggml_op = 78;
pub const GGML_OP_WIN_UNPART: ggml_op = 79;
pub const GGML_OP_GET_REL_POS: ggml_op = 80;
pub const GGML_OP_ADD_REL_POS: ggml_op = 81;
pub const GGML_OP_RWKV_WKV6: ggml_op = 82;
pub const GGML_OP_GATED_LINEAR_ATTN: ggml_op = 83;
pub const GGML_OP_RWKV_WKV7: ggml_op = 84;
pub const GGML_OP_SOLVE_TRI: ggml_op = 85;
pub const GGML_OP_GATED_DELTA_NET: ggml_op = 86;
pub const GGML_OP_LIGHTNING_INDEXER: ggml_op = 87;
pub const GGML_OP_DSV4_HC_COMB: ggml_op = 88;
pub const GGML_OP_DSV4_HC_PRE: ggml_op = 89;
pub const GGML_OP_DSV4_HC_POST: ggml_op = 90;
pub const GGML_OP_UNARY: ggml_op = 91;
pub const GGML_OP_MAP_CUSTOM1: ggml_op = 92;
pub const GGML_OP_MAP_CUSTOM2: ggml_op = 93;
pub const GGML_OP_MAP_CUSTOM3: ggml_op = 94;
pub const GGML_OP_CUSTOM: ggml_op = 95;
pub const GGML_OP_CROSS_ENTROPY_LOSS: ggml_op = 96;
pub const GGML_OP_CROSS_ENTROPY_LOSS_BACK: ggml_op = 97;
pub const GGML_OP_OPT_STEP_ADAMW: ggml_op = 98;
pub const GGML_OP_OPT_STEP_SGD: ggml_op = 99;
pub const GGML_OP_GLU: ggml_op = 100;
pub const GGML_OP_COUNT: ggml_op = 101;
pub type ggml_op = ::core::ffi::c_uint;
pub const GGML_TENSOR_FLAG_INPUT: ggml_tensor_flag = 1;
pub const GGML_TENSOR_FLAG_OUTPUT: ggml_tensor_flag = 2;
pub const GGML_TENSOR_FLAG_PARAM: ggml_tensor_flag = 4;
pub const GGML_TENSOR_FLAG_LOSS: ggml_tensor_flag = 8;
pub const GGML_TENSOR_FLAG_COMPUTE: ggml_tensor_flag = 16;
pub type ggml_tensor_flag = ::core::ffi::c_uint;
pub const GGML_BACKEND_BUFFER_USAGE_ANY: ggml_backend_buffer_usage = 0;
pub const GGML_BACKEND_BUFFER_USAGE_WEIGHTS: ggml_backend_buffer_usage = 1;
pub const GGML_BACKEND_BUFFER_USAGE_COMPUTE: ggml_backend_buffer_usage = 2;
pub type ggml_backend_buffer_usage = ::core::ffi::c_uint;
pub const GGML_BACKEND_DEVICE_TYPE_CPU: ggml_backend_dev_type = 0;
pub const GGML_BACKEND_DEVICE_TYPE_GPU: ggml_backend_dev_type = 1;
pub const GGML_BACKEND_DEVICE_TYPE_IGPU: ggml_backend_dev_type = 2;
pub const GGML_BACKEND_DEVICE_TYPE_ACCEL: ggml_backend_dev_type = 3;
pub const GGML_BACKEND_DEVICE_TYPE_META: ggml_backend_dev_type = 4;
pub type ggml_backend_dev_type = ::core::ffi::c_uint;
pub const GGML_CGRAPH_EVAL_ORDER_LEFT_TO_RIGHT: ggml_cgraph_eval_order = 0;
pub const GGML_CGRAPH_EVAL_ORDER_RIGHT_TO_LEFT: ggml_cgraph_eval_order = 1;
pub const GGML_CGRAPH_EVAL_ORDER_COUNT: ggml_cgraph_eval_order = 2;
pub type ggml_cgraph_eval_order = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ggml_tensor {
    pub type_: ggml_type,
    pub buffer: *mut ggml_backend_buffer,
    pub ne: [i64; 4usize],
    pub nb: [usize; 4usize],
    pub op: ggml_op,
    pub op_params: [i32; 16usize],
    pub flags: i32,
    pub src: [*mut ggml_tensor; 10usize],
    pub view_src: *mut ggml_tensor,
    pub view_offs: usize,
    pub data: *mut ::core::ffi::c_void,
    pub name: [::core::ffi::c_char; 64usize],
    pub extra: *mut ::core::ffi::c_void,
    pub padding: [::core::ffi::c_char; 8usize],
}
pub type ggml_bitset_t = u32;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ggml_hash_set {
    pub size: usize,
    pub used: *mut ggml_bitset_t,
    pub keys: *mut *mut ggml_tensor,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ggml_cgraph {
    pub size: ::core::ffi::c_int,
    pub n_nodes: ::core::ffi::c_int,
    pub n_leafs: ::core::ffi::c_int,
    pub nodes: *mut *mut ggml_tensor,
    pub grads: *mut *mut ggml_tensor,
    pub grad_accs: *mut *mut ggml_tensor,
    pub leafs: *mut *mut ggml_tensor,
    pub use_counts: *mut i32,
    pub visited_hash_set: ggml_hash_set,
    pub order: ggml_cgraph_eval_order,
    pub uid: u64,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ggml_init_params {
    pub mem_size: usize,
    pub mem_buffer: *mut ::core::ffi::c_void,
    pub no_alloc: bool,
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct ggml_backend_buffer_type_i {
    pub get_name:
        ::core::option::Option<unsafe extern "C" fn(buft: ggml_backend_buffer_type_t) -> *const ::core::ffi::c_char>,
    pub alloc_buffer: ::core::option::Option<
        unsafe extern "C" fn(buft: ggml_backend_buffer_type_t, size: usize) -> ggml_backend_buffer_t,
    >,
    pub alloc_buffer_n: ::core::option::Option<
        unsafe extern "C" fn(
            buft: ggml_backend_buffer_type_t,
            tensors: *mut *mut ggml_tensor,
            n_tensors: ::core::ffi::c_int,
        ) -> ggml_backend_buffer_t,
    >,
    pub get_alignment: ::core::option::Option<unsafe extern "C" fn(buft: ggml_backend_buffer_type_t) -> usize>,
    pub get_max_size: ::core::option::Option<unsafe extern "C" fn(buft: ggml_backend_buffer_type_t) -> usize>,
    pub get_alloc_size: ::core::option::Option<
        unsafe extern "C" fn(buft: ggml_backend_buffer_type_t, tensor: *const ggml_tensor) -> usize,
    >,
    pub get_alloc_size_n: ::core::option::Option<
        unsafe extern "C" fn(
            buft: ggml_backend_buffer_type_t,
            tensors: *mut *mut ggml_tensor,
            n_tensors: ::core::ffi::c_int,
        ) -> usize,
    >,
    pub is_host: ::core::option::Option<unsafe extern "C" fn(buft: ggml_backend_buffer_type_t) -> bool>,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ggml_backend_buffer_type {
    pub iface: ggml_backend_buffer_type_i,
    pub device: ggml_backend_dev_t,
    pub context: *mut ::core::ffi::c_void,
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct ggml_backend_buffer_i {
    pub free_buffer: ::core::option::Option<unsafe extern "C" fn(buffer: ggml_backend_buffer_t)>,
    pub get_base:
        ::core::option::Option<unsafe extern "C" fn(buffer: ggml_backend_buffer_t) -> *mut ::core::ffi::c_void>,
    pub init_tensor: ::core::option::Option<
        unsafe extern "C" fn(buffer: ggml_backend_buffer_t, tensor: *mut ggml_tensor) -> ggml_status,
    >,
    pub memset_tensor: ::core::option::Option<
        unsafe extern "C" fn(
            buffer: ggml_backend_buffer_t,
            tensor: *mut ggml_tensor,
            value: u8,
            offset: usize,
            size: usize,
        ),
    >,
    pub set_tensor: ::core::option::Option<
        unsafe extern "C" fn(
            buffer: ggml_backend_buffer_t,
            tensor: *mut ggml_tensor,
            data: *const ::core::ffi::c_void,
            offset: usize,
            size: usize,
        ),
    >,
    pub get_tensor: ::core::option::Option<
        unsafe extern "C" fn(
            buffer: ggml_backend_buffer_t,
            tensor: *const ggml_tensor,
            data: *mut ::core::ffi::c_void,
            offset: usize,
            size: usize,
        ),
    >,
    pub set_tensor_2d: ::core::option::Option<
        unsafe extern "C" fn(
            buffer: ggml_backend_buffer_t,
            tensor: *mut ggml_tensor,
            data: *const ::core::ffi::c_void,
            offset: usize,
            size: usize,
            n_copies: usize,
            stride_tensor: usize,
            stride_data: usize,
        ),
    >,
    pub get_tensor_2d: ::core::option::Option<
        unsafe extern "C" fn(
            buffer: ggml_backend_buffer_t,
            tensor: *const ggml_tensor,
            data: *mut ::core::ffi::c_void,
            offset: usize,
            size: usize,
            n_copies: usize,
            stride_tensor: usize,
            stride_data: usize,
        ),
    >,
    pub cpy_tensor: ::core::option::Option<
        unsafe extern "C" fn(buffer: ggml_backend_buffer_t, src: *const ggml_tensor, dst: *mut ggml_tensor) -> bool,
    >,
    pub clear: ::core::option::Option<unsafe extern "C" fn(buffer: ggml_backend_buffer_t, value: u8)>,
    pub reset: ::core::option::Option<unsafe extern "C" fn(buffer: ggml_backend_buffer_t)>,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ggml_backend_buffer {
    pub iface: ggml_backend_buffer_i,
    pub buft: ggml_backend_buffer_type_t,
    pub context: *mut ::core::ffi::c_void,
    pub size: usize,
    pub usage: ggml_backend_buffer_usage,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ggml_backend_graph_optimize_params {
    pub add_alloc_dep: ::core::option::Option<
        unsafe extern "C" fn(user_data: *mut ::core::ffi::c_void, tensor: *mut ggml_tensor, until: *mut ggml_tensor),
    >,
    pub user_data: *mut ::core::ffi::c_void,
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct ggml_backend_i {
    pub get_name: ::core::option::Option<unsafe extern "C" fn(backend: ggml_backend_t) -> *const ::core::ffi::c_char>,
    pub free: ::core::option::Option<unsafe extern "C" fn(backend: ggml_backend_t)>,
    pub set_tensor_async: ::core::option::Option<
        unsafe extern "C" fn(
            backend: ggml_backend_t,
            tensor: *mut ggml_tensor,
            data: *const ::core::ffi::c_void,
            offset: usize,
            size: usize,
        ),
    >,
    pub get_tensor_async: ::core::option::Option<
        unsafe extern "C" fn(
            backend: ggml_backend_t,
            tensor: *const ggml_tensor,
            data: *mut ::core::ffi::c_void,
            offset: usize,
            size: usize,
        ),
    >,
    pub set_tensor_2d_async: ::core::option::Option<
        unsafe extern "C" fn(
            backend: ggml_backend_t,
            tensor: *mut ggml_tensor,
            data: *const ::core::ffi::c_void,
            offset: usize,
            size: usize,
            n_copies: usize,
            stride_tensor: usize,
            stride_data: usize,
        ),
    >,
    pub get_tensor_2d_async: ::core::option::Option<
        unsafe extern "C" fn(
            backend: ggml_backend_t,
            tensor: *const ggml_tensor,
            data: *mut ::core::ffi::c_void,
            offset: usize,
            size: usize,
            n_copies: usize,
            stride_tensor: usize,
            stride_data: usize,
        ),
    >,
    pub cpy_tensor_async: ::core::option::Option<
        unsafe extern "C" fn(
            backend_src: ggml_backend_t,
            backend_dst: ggml_backend_t,
            src: *const ggml_tensor,
            dst: *mut ggml_tensor,
        ) -> bool,
    >,
    pub synchronize: ::core::option::Option<unsafe extern "C" fn(backend: ggml_backend_t)>,
    pub graph_plan_create: ::core::option::Option<
        unsafe extern "C" fn(backend: ggml_backend_t, cgraph: *const ggml_cgraph) -> ggml_backend_graph_plan_t,
    >,
    pub graph_plan_free:
        ::core::option::Option<unsafe extern "C" fn(backend: ggml_backend_t, plan: ggml_backend_graph_plan_t)>,
    pub graph_plan_update: ::core::option::Option<
        unsafe extern "C" fn(backend: ggml_backend_t, plan: ggml_backend_graph_plan_t, cgraph: *const ggml_cgraph),
    >,
    pub graph_plan_compute: ::core::option::Option<
        unsafe extern "C" fn(backend: ggml_backend_t, plan: ggml_backend_graph_plan_t) -> ggml_status,
    >,
    pub graph_compute:
        ::core::option::Option<unsafe extern "C" fn(backend: ggml_backend_t, cgraph: *mut ggml_cgraph) -> ggml_status>,
    pub event_record:
        ::core::option::Option<unsafe extern "C" fn(backend: ggml_backend_t, event: ggml_backend_event_t)>,
    pub event_wait: ::core::option::Option<unsafe extern "C" fn(backend: ggml_backend_t, event: ggml_backend_event_t)>,
    pub graph_optimize: ::core::option::Option<
        unsafe extern "C" fn(
            backend: ggml_backend_t,
            cgraph: *mut ggml_cgraph,
            params: *mut ggml_backend_graph_optimize_params,
        ),
    >,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ggml_backend {
    pub guid: ggml_guid_t,
    pub iface: ggml_backend_i,
    pub device: ggml_backend_dev_t,
    pub context: *mut ::core::ffi::c_void,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ggml_backend_event {
    pub device: *mut ggml_backend_device,
    pub context: *mut ::core::ffi::c_void,
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct ggml_backend_dev_caps {
    pub async_: bool,
    pub host_buffer: bool,
    pub buffer_from_host_ptr: bool,
    pub events: bool,
    pub mmap_support: bool,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ggml_backend_dev_props {
    pub name: *const ::core::ffi::c_char,
    pub description: *const ::core::ffi::c_char,
    pub memory_free: usize,
    pub memory_total: usize,
    pub type_: ggml_backend_dev_type,
    pub device_id: *const ::core::ffi::c_char,
    pub caps: ggml_backend_dev_caps,
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct ggml_backend_device_i {
    pub get_name: ::core::option::Option<unsafe extern "C" fn(dev: ggml_backend_dev_t) -> *const ::core::ffi::c_char>,
    pub get_description:
        ::core::option::Option<unsafe extern "C" fn(dev: ggml_backend_dev_t) -> *const ::core::ffi::c_char>,
    pub get_memory:
        ::core::option::Option<unsafe extern "C" fn(dev: ggml_backend_dev_t, free: *mut usize, total: *mut usize)>,
    pub get_type: ::core::option::Option<unsafe extern "C" fn(dev: ggml_backend_dev_t) -> ggml_backend_dev_type>,
    pub get_props:
        ::core::option::Option<unsafe extern "C" fn(dev: ggml_backend_dev_t, props: *mut ggml_backend_dev_props)>,
    pub init_backend: ::core::option::Option<
        unsafe extern "C" fn(dev: ggml_backend_dev_t, params: *const ::core::ffi::c_char) -> ggml_backend_t,
    >,
    pub get_buffer_type:
        ::core::option::Option<unsafe extern "C" fn(dev: ggml_backend_dev_t) -> ggml_backend_buffer_type_t>,
    pub get_host_buffer_type:
        ::core::option::Option<unsafe extern "C" fn(dev: ggml_backend_dev_t) -> ggml_backend_buffer_type_t>,
    pub buffer_from_host_ptr: ::core::option::Option<
        unsafe extern "C" fn(
            dev: ggml_backend_dev_t,
            ptr: *mut ::core::ffi::c_void,
            size: usize,
            max_tensor_size: usize,
        ) -> ggml_backend_buffer_t,
    >,
    pub supports_op:
        ::core::option::Option<unsafe extern "C" fn(dev: ggml_backend_dev_t, op: *const ggml_tensor) -> bool>,
    pub supports_buft:
        ::core::option::Option<unsafe extern "C" fn(dev: ggml_backend_dev_t, buft: ggml_backend_buffer_type_t) -> bool>,
    pub offload_op:
        ::core::option::Option<unsafe extern "C" fn(dev: ggml_backend_dev_t, op: *const ggml_tensor) -> bool>,
    pub event_new: ::core::option::Option<unsafe extern "C" fn(dev: ggml_backend_dev_t) -> ggml_backend_event_t>,
    pub event_free: ::core::option::Option<unsafe extern "C" fn(dev: ggml_backend_dev_t, event: ggml_backend_event_t)>,
    pub event_synchronize:
        ::core::option::Option<unsafe extern "C" fn(dev: ggml_backend_dev_t, event: ggml_backend_event_t)>,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ggml_backend_device {
    pub iface: ggml_backend_device_i,
    pub reg: ggml_backend_reg_t,
    pub context: *mut ::core::ffi::c_void,
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct ggml_backend_reg_i {
    pub get_name: ::core::option::Option<unsafe extern "C" fn(reg: ggml_backend_reg_t) -> *const ::core::ffi::c_char>,
    pub get_device_count: ::core::option::Option<unsafe extern "C" fn(reg: ggml_backend_reg_t) -> usize>,
    pub get_device:
        ::core::option::Option<unsafe extern "C" fn(reg: ggml_backend_reg_t, index: usize) -> ggml_backend_dev_t>,
    pub get_proc_address: ::core::option::Option<
        unsafe extern "C" fn(reg: ggml_backend_reg_t, name: *const ::core::ffi::c_char) -> *mut ::core::ffi::c_void,
    >,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ggml_backend_reg {
    pub api_version: ::core::ffi::c_int,
    pub iface: ggml_backend_reg_i,
    pub context: *mut ::core::ffi::c_void,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ggml_backend_feature {
    pub name: *const ::core::ffi::c_char,
    pub value: *const ::core::ffi::c_char,
}
pub type ggml_abort_callback = ::core::option::Option<unsafe extern "C" fn(data: *mut ::core::ffi::c_void) -> bool>;
pub type ggml_backend_set_n_threads_t =
    ::core::option::Option<unsafe extern "C" fn(backend: ggml_backend_t, n_threads: ::core::ffi::c_int)>;
pub type ggml_backend_dev_get_extra_bufts_t =
    ::core::option::Option<unsafe extern "C" fn(device: ggml_backend_dev_t) -> *mut ggml_backend_buffer_type_t>;
pub type ggml_backend_set_abort_callback_t = ::core::option::Option<
    unsafe extern "C" fn(
        backend: ggml_backend_t,
        abort_callback: ggml_abort_callback,
        abort_callback_data: *mut ::core::ffi::c_void,
    ),
>;
pub type ggml_backend_get_features_t =
    ::core::option::Option<unsafe extern "C" fn(reg: ggml_backend_reg_t) -> *mut ggml_backend_feature>;
pub type ggml_from_float_t =
    ::core::option::Option<unsafe extern "C" fn(x: *const f32, y: *mut ::core::ffi::c_void, k: i64)>;
pub type ggml_vec_dot_t = ::core::option::Option<
    unsafe extern "C" fn(
        n: ::core::ffi::c_int,
        s: *mut f32,
        bs: usize,
        x: *const ::core::ffi::c_void,
        bx: usize,
        y: *const ::core::ffi::c_void,
        by: usize,
        nrc: ::core::ffi::c_int,
    ),
>;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ggml_type_traits_cpu {
    pub from_float: ggml_from_float_t,
    pub vec_dot: ggml_vec_dot_t,
    pub vec_dot_type: ggml_type,
    pub nrows: i64,
}
pub type fn_ggml_backend_reg_count = ::core::option::Option<unsafe extern "C" fn() -> usize>;
pub type fn_ggml_backend_reg_get = ::core::option::Option<unsafe extern "C" fn(index: usize) -> ggml_backend_reg_t>;
pub type fn_ggml_backend_dev_count = ::core::option::Option<unsafe extern "C" fn() -> usize>;
pub type fn_ggml_backend_dev_get = ::core::option::Option<unsafe extern "C" fn(index: usize) -> ggml_backend_dev_t>;
pub type fn_ggml_backend_reg_name =
    ::core::option::Option<unsafe extern "C" fn(reg: ggml_backend_reg_t) -> *const ::core::ffi::c_char>;
pub type fn_ggml_backend_reg_get_proc_address = ::core::option::Option<
    unsafe extern "C" fn(reg: ggml_backend_reg_t, name: *const ::core::ffi::c_char) -> *mut ::core::ffi::c_void,
>;
pub type fn_ggml_backend_dev_name =
    ::core::option::Option<unsafe extern "C" fn(device: ggml_backend_dev_t) -> *const ::core::ffi::c_char>;
pub type fn_ggml_backend_dev_description =
    ::core::option::Option<unsafe extern "C" fn(device: ggml_backend_dev_t) -> *const ::core::ffi::c_char>;
pub type fn_ggml_backend_dev_memory =
    ::core::option::Option<unsafe extern "C" fn(device: ggml_backend_dev_t, free: *mut usize, total: *mut usize)>;
pub type fn_ggml_backend_dev_type =
    ::core::option::Option<unsafe extern "C" fn(device: ggml_backend_dev_t) -> ggml_backend_dev_type>;
pub type fn_ggml_backend_dev_get_props =
    ::core::option::Option<unsafe extern "C" fn(device: ggml_backend_dev_t, props: *mut ggml_backend_dev_props)>;
pub type fn_ggml_backend_dev_backend_reg =
    ::core::option::Option<unsafe extern "C" fn(device: ggml_backend_dev_t) -> ggml_backend_reg_t>;
pub type fn_ggml_backend_dev_init = ::core::option::Option<
    unsafe extern "C" fn(device: ggml_backend_dev_t, params: *const ::core::ffi::c_char) -> ggml_backend_t,
>;
pub type fn_ggml_backend_dev_buffer_type =
    ::core::option::Option<unsafe extern "C" fn(device: ggml_backend_dev_t) -> ggml_backend_buffer_type_t>;
pub type fn_ggml_backend_dev_host_buffer_type =
    ::core::option::Option<unsafe extern "C" fn(device: ggml_backend_dev_t) -> ggml_backend_buffer_type_t>;
pub type fn_ggml_backend_dev_supports_buft =
    ::core::option::Option<unsafe extern "C" fn(device: ggml_backend_dev_t, buft: ggml_backend_buffer_type_t) -> bool>;
pub type fn_ggml_backend_dev_supports_op =
    ::core::option::Option<unsafe extern "C" fn(device: ggml_backend_dev_t, op: *const ggml_tensor) -> bool>;
pub type fn_ggml_backend_buft_alloc_buffer = ::core::option::Option<
    unsafe extern "C" fn(buft: ggml_backend_buffer_type_t, size: usize) -> ggml_backend_buffer_t,
>;
pub type fn_ggml_backend_buft_get_device =
    ::core::option::Option<unsafe extern "C" fn(buft: ggml_backend_buffer_type_t) -> ggml_backend_dev_t>;
pub type fn_ggml_backend_buft_get_alignment =
    ::core::option::Option<unsafe extern "C" fn(buft: ggml_backend_buffer_type_t) -> usize>;
pub type fn_ggml_backend_buft_is_host =
    ::core::option::Option<unsafe extern "C" fn(buft: ggml_backend_buffer_type_t) -> bool>;
pub type fn_ggml_backend_buft_get_max_size =
    ::core::option::Option<unsafe extern "C" fn(buft: ggml_backend_buffer_type_t) -> usize>;
pub type fn_ggml_backend_buft_get_alloc_size =
    ::core::option::Option<unsafe extern "C" fn(buft: ggml_backend_buffer_type_t, tensor: *const ggml_tensor) -> usize>;
pub type fn_ggml_backend_cpu_buffer_type = ::core::option::Option<unsafe extern "C" fn() -> ggml_backend_buffer_type_t>;
pub type fn_ggml_backend_buffer_init = ::core::option::Option<
    unsafe extern "C" fn(
        buft: ggml_backend_buffer_type_t,
        iface: ggml_backend_buffer_i,
        context: *mut ::core::ffi::c_void,
        size: usize,
    ) -> ggml_backend_buffer_t,
>;
pub type fn_ggml_backend_buffer_free = ::core::option::Option<unsafe extern "C" fn(buffer: ggml_backend_buffer_t)>;
pub type fn_ggml_backend_buffer_get_base =
    ::core::option::Option<unsafe extern "C" fn(buffer: ggml_backend_buffer_t) -> *mut ::core::ffi::c_void>;
pub type fn_ggml_backend_buffer_get_size =
    ::core::option::Option<unsafe extern "C" fn(buffer: ggml_backend_buffer_t) -> usize>;
pub type fn_ggml_backend_buffer_get_usage =
    ::core::option::Option<unsafe extern "C" fn(buffer: ggml_backend_buffer_t) -> ggml_backend_buffer_usage>;
pub type fn_ggml_backend_buffer_get_type =
    ::core::option::Option<unsafe extern "C" fn(buffer: ggml_backend_buffer_t) -> ggml_backend_buffer_type_t>;
pub type fn_ggml_backend_tensor_set = ::core::option::Option<
    unsafe extern "C" fn(tensor: *mut ggml_tensor, data: *const ::core::ffi::c_void, offset: usize, size: usize),
>;
pub type fn_ggml_backend_tensor_get = ::core::option::Option<
    unsafe extern "C" fn(tensor: *const ggml_tensor, data: *mut ::core::ffi::c_void, offset: usize, size: usize),
>;
pub type fn_ggml_backend_tensor_memset =
    ::core::option::Option<unsafe extern "C" fn(tensor: *mut ggml_tensor, value: u8, offset: usize, size: usize)>;
pub type fn_ggml_backend_tensor_set_2d = ::core::option::Option<
    unsafe extern "C" fn(
        tensor: *mut ggml_tensor,
        data: *const ::core::ffi::c_void,
        offset: usize,
        size: usize,
        n_copies: usize,
        stride_tensor: usize,
        stride_data: usize,
    ),
>;
pub type fn_ggml_backend_tensor_get_2d = ::core::option::Option<
    unsafe extern "C" fn(
        tensor: *const ggml_tensor,
        data: *mut ::core::ffi::c_void,
        offset: usize,
        size: usize,
        n_copies: usize,
        stride_tensor: usize,
        stride_data: usize,
    ),
>;
pub type fn_ggml_backend_tensor_set_async = ::core::option::Option<
    unsafe extern "C" fn(
        backend: ggml_backend_t,
        tensor: *mut ggml_tensor,
        data: *const ::core::ffi::c_void,
        offset: usize,
        size: usize,
    ),
>;
pub type fn_ggml_backend_tensor_get_async = ::core::option::Option<
    unsafe extern "C" fn(
        backend: ggml_backend_t,
        tensor: *const ggml_tensor,
        data: *mut ::core::ffi::c_void,
        offset: usize,
        size: usize,
    ),
>;
pub type fn_ggml_backend_buffer_copy_tensor =
    ::core::option::Option<unsafe extern "C" fn(src: *const ggml_tensor, dst: *mut ggml_tensor) -> bool>;
pub type fn_ggml_backend_free = ::core::option::Option<unsafe extern "C" fn(backend: ggml_backend_t)>;
pub type fn_ggml_backend_synchronize = ::core::option::Option<unsafe extern "C" fn(backend: ggml_backend_t)>;
pub type fn_ggml_backend_graph_compute_async =
    ::core::option::Option<unsafe extern "C" fn(backend: ggml_backend_t, cgraph: *mut ggml_cgraph) -> ggml_status>;
pub type fn_ggml_backend_event_new =
    ::core::option::Option<unsafe extern "C" fn(device: ggml_backend_dev_t) -> ggml_backend_event_t>;
pub type fn_ggml_backend_event_free = ::core::option::Option<unsafe extern "C" fn(event: ggml_backend_event_t)>;
pub type fn_ggml_backend_event_record =
    ::core::option::Option<unsafe extern "C" fn(event: ggml_backend_event_t, backend: ggml_backend_t)>;
pub type fn_ggml_backend_event_synchronize = ::core::option::Option<unsafe extern "C" fn(event: ggml_backend_event_t)>;
pub type fn_ggml_backend_event_wait =
    ::core::option::Option<unsafe extern "C" fn(backend: ggml_backend_t, event: ggml_backend_event_t)>;
pub type fn_ggml_op_name = ::core::option::Option<unsafe extern "C" fn(op: ggml_op) -> *const ::core::ffi::c_char>;
pub type fn_ggml_op_desc =
    ::core::option::Option<unsafe extern "C" fn(t: *const ggml_tensor) -> *const ::core::ffi::c_char>;
pub type fn_ggml_is_contiguous = ::core::option::Option<unsafe extern "C" fn(tensor: *const ggml_tensor) -> bool>;
pub type fn_ggml_type_name =
    ::core::option::Option<unsafe extern "C" fn(type_: ggml_type) -> *const ::core::ffi::c_char>;
pub type fn_ggml_row_size = ::core::option::Option<unsafe extern "C" fn(type_: ggml_type, ne: i64) -> usize>;
pub type fn_ggml_is_quantized = ::core::option::Option<unsafe extern "C" fn(type_: ggml_type) -> bool>;
pub type fn_ggml_nbytes = ::core::option::Option<unsafe extern "C" fn(tensor: *const ggml_tensor) -> usize>;
pub type fn_ggml_tensor_overhead = ::core::option::Option<unsafe extern "C" fn() -> usize>;
pub type fn_ggml_get_name =
    ::core::option::Option<unsafe extern "C" fn(tensor: *const ggml_tensor) -> *const ::core::ffi::c_char>;
pub type fn_ggml_set_name = ::core::option::Option<
    unsafe extern "C" fn(tensor: *mut ggml_tensor, name: *const ::core::ffi::c_char) -> *mut ggml_tensor,
>;
pub type fn_ggml_set_input = ::core::option::Option<unsafe extern "C" fn(tensor: *mut ggml_tensor)>;
pub type fn_ggml_init = ::core::option::Option<unsafe extern "C" fn(params: ggml_init_params) -> *mut ggml_context>;
pub type fn_ggml_free = ::core::option::Option<unsafe extern "C" fn(ctx: *mut ggml_context)>;
pub type fn_ggml_new_tensor_3d = ::core::option::Option<
    unsafe extern "C" fn(ctx: *mut ggml_context, type_: ggml_type, ne0: i64, ne1: i64, ne2: i64) -> *mut ggml_tensor,
>;
pub type fn_ggml_view_1d = ::core::option::Option<
    unsafe extern "C" fn(ctx: *mut ggml_context, a: *mut ggml_tensor, ne0: i64, offset: usize) -> *mut ggml_tensor,
>;
pub type fn_ggml_add = ::core::option::Option<
    unsafe extern "C" fn(ctx: *mut ggml_context, a: *mut ggml_tensor, b: *mut ggml_tensor) -> *mut ggml_tensor,
>;
pub type fn_ggml_graph_overhead_custom =
    ::core::option::Option<unsafe extern "C" fn(size: usize, grads: bool) -> usize>;
pub type fn_ggml_new_graph_custom =
    ::core::option::Option<unsafe extern "C" fn(ctx: *mut ggml_context, size: usize, grads: bool) -> *mut ggml_cgraph>;
pub type fn_ggml_graph_size =
    ::core::option::Option<unsafe extern "C" fn(cgraph: *mut ggml_cgraph) -> ::core::ffi::c_int>;
pub type fn_ggml_graph_n_nodes =
    ::core::option::Option<unsafe extern "C" fn(cgraph: *mut ggml_cgraph) -> ::core::ffi::c_int>;
pub type fn_ggml_graph_node =
    ::core::option::Option<unsafe extern "C" fn(cgraph: *mut ggml_cgraph, i: ::core::ffi::c_int) -> *mut ggml_tensor>;
pub type fn_ggml_graph_nodes =
    ::core::option::Option<unsafe extern "C" fn(cgraph: *mut ggml_cgraph) -> *mut *mut ggml_tensor>;
pub type fn_ggml_graph_add_node =
    ::core::option::Option<unsafe extern "C" fn(cgraph: *mut ggml_cgraph, tensor: *mut ggml_tensor)>;
pub type fn_ggml_build_forward_expand =
    ::core::option::Option<unsafe extern "C" fn(cgraph: *mut ggml_cgraph, tensor: *mut ggml_tensor)>;
pub type fn_ggml_log_internal =
    ::core::option::Option<unsafe extern "C" fn(level: ggml_log_level, format: *const ::core::ffi::c_char, ...)>;
pub type fn_ggml_blck_size = ::core::option::Option<unsafe extern "C" fn(type_: ggml_type) -> i64>;
pub type fn_ggml_cpu_init = ::core::option::Option<unsafe extern "C" fn()>;
pub type fn_ggml_get_type_traits_cpu =
    ::core::option::Option<unsafe extern "C" fn(type_: ggml_type) -> *const ggml_type_traits_cpu>;
pub type fn_ggml_cpu_fp16_to_fp32 = ::core::option::Option<unsafe extern "C" fn(x: *const u16, y: *mut f32, n: i64)>;
pub type fn_ggml_vec_silu_f32 =
    ::core::option::Option<unsafe extern "C" fn(n: ::core::ffi::c_int, y: *mut f32, x: *const f32)>;
pub type fn_ggml_vec_swiglu_f32 =
    ::core::option::Option<unsafe extern "C" fn(n: ::core::ffi::c_int, y: *mut f32, x: *const f32, g: *const f32)>;
