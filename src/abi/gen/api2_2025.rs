//! ggml's binary interface, layout "api2-2025", as seen from Rust: made by tests/gen/bindings.sh (bindgen 0.73.2)
//! from ggml-headers/api2-2025/. Do not edit; `bindings.sh --check` fails on any difference.

pub const GGML_BACKEND_API_VERSION: u32 = 2;
#[repr(C)]
#[derive(Debug)]
pub struct ggml_tensor {
    _unused: [u8; 0],
}
#[repr(C)]
#[derive(Debug)]
pub struct ggml_cgraph {
    _unused: [u8; 0],
}
pub const GGML_STATUS_ALLOC_FAILED: ggml_status = -2;
pub const GGML_STATUS_FAILED: ggml_status = -1;
pub const GGML_STATUS_SUCCESS: ggml_status = 0;
pub const GGML_STATUS_ABORTED: ggml_status = 1;
pub type ggml_status = ::core::ffi::c_int;
pub const GGML_BACKEND_BUFFER_USAGE_ANY: ggml_backend_buffer_usage = 0;
pub const GGML_BACKEND_BUFFER_USAGE_WEIGHTS: ggml_backend_buffer_usage = 1;
pub const GGML_BACKEND_BUFFER_USAGE_COMPUTE: ggml_backend_buffer_usage = 2;
pub type ggml_backend_buffer_usage = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug)]
pub struct ggml_backend_buffer_type {
    _unused: [u8; 0],
}
pub type ggml_backend_buffer_type_t = *mut ggml_backend_buffer_type;
pub type ggml_backend_buffer_t = *mut ggml_backend_buffer;
#[repr(C)]
#[derive(Debug)]
pub struct ggml_backend_event {
    _unused: [u8; 0],
}
pub type ggml_backend_event_t = *mut ggml_backend_event;
pub type ggml_backend_t = *mut ggml_backend;
pub type ggml_backend_graph_plan_t = *mut ::core::ffi::c_void;
#[repr(C)]
#[derive(Debug)]
pub struct ggml_backend_device {
    _unused: [u8; 0],
}
pub type ggml_backend_dev_t = *mut ggml_backend_device;
pub type ggml_guid = [u8; 16usize];
pub type ggml_guid_t = *mut ggml_guid;
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
    pub graph_optimize: ::core::option::Option<unsafe extern "C" fn(backend: ggml_backend_t, cgraph: *mut ggml_cgraph)>,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ggml_backend {
    pub guid: ggml_guid_t,
    pub iface: ggml_backend_i,
    pub device: ggml_backend_dev_t,
    pub context: *mut ::core::ffi::c_void,
}
