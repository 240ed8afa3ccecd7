//! Calls into the host that may throw: see exceptions.cpp, which makes them.
//!
//! Owns: the calls that stock llama.cpp survives when a backend throws, and graphs.
//! Invariants: no exception passes a Rust frame; one that was thrown becomes a failure and a line.
//! Threads: any. Does not: cover copies and waiting; an exception in one ends the process, as it does without the plugin.

use core::ffi::{CStr, c_char, c_int, c_void};

use super::gen_api3 as api3;
use super::host::host;
use crate::telemetry::log;

unsafe extern "C" {
    fn ggml_moe_dev_init(function: *const c_void, device: *mut c_void, what: *mut c_char, room: usize) -> *mut c_void;
    fn ggml_moe_alloc_buffer(
        function: *const c_void,
        type_: *mut c_void,
        size: usize,
        what: *mut c_char,
        room: usize,
    ) -> *mut c_void;
    fn ggml_moe_graph_compute(
        function: *const c_void,
        backend: *mut c_void,
        graph: *mut c_void,
        failed: c_int,
        what: *mut c_char,
        room: usize,
    ) -> c_int;
}

/// What an exception said.
struct What([c_char; 256]);

impl What {
    fn new() -> Self {
        Self([0; 256])
    }

    fn room(&self) -> usize {
        self.0.len()
    }

    /// Tells what was thrown, if anything was.
    fn tell(&self, during: &str) {
        // SAFETY: the text was zero before, and what was written to it ends with a zero.
        let text = unsafe { CStr::from_ptr(self.0.as_ptr()) };
        if !text.is_empty() {
            log::error(&format!("the inner backend threw an exception {during}: {}", text.to_string_lossy()));
        }
    }
}

/// `ggml_backend_dev_init`; null if it fails or throws.
///
/// # Safety
/// A valid device.
pub(super) unsafe fn dev_init(device: *mut api3::ggml_backend_device) -> *mut api3::ggml_backend {
    let mut what = What::new();
    let function = host().api.ggml_backend_dev_init as *const c_void;
    // SAFETY: the host's function of this type; the text has the room that is named.
    let backend = unsafe { ggml_moe_dev_init(function, device.cast(), what.0.as_mut_ptr(), what.room()) };
    what.tell("when it was opened");
    backend.cast()
}

/// `ggml_backend_buft_alloc_buffer`; null if it fails or throws.
///
/// # Safety
/// A valid buffer type.
pub(super) unsafe fn alloc_buffer(
    type_: *mut api3::ggml_backend_buffer_type,
    size: usize,
) -> *mut api3::ggml_backend_buffer {
    let mut what = What::new();
    let function = host().api.ggml_backend_buft_alloc_buffer as *const c_void;
    // SAFETY: as in `dev_init`.
    let buffer = unsafe { ggml_moe_alloc_buffer(function, type_.cast(), size, what.0.as_mut_ptr(), what.room()) };
    what.tell("when it was asked for memory");
    buffer.cast()
}

/// `ggml_backend_graph_compute_async`; `GGML_STATUS_FAILED` if it throws.
///
/// # Safety
/// A valid backend and a valid graph.
pub(super) unsafe fn graph_compute(
    backend: *mut api3::ggml_backend,
    graph: *mut api3::ggml_cgraph,
) -> api3::ggml_status {
    let mut what = What::new();
    let function = host().api.ggml_backend_graph_compute_async as *const c_void;
    let text = what.0.as_mut_ptr();
    let room = what.room();
    // SAFETY: as in `dev_init`.
    let status =
        unsafe { ggml_moe_graph_compute(function, backend.cast(), graph.cast(), api3::GGML_STATUS_FAILED, text, room) };
    what.tell("when it ran a graph");
    status
}
