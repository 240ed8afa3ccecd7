//! Buffers of ours that carry the inner buffer's context.
//!
//! Some backends (Vulkan) cast the context of every tensor's buffer to a type of their own. Over these, a buffer of ours carries the
//! context of the inner buffer whose memory it is, and is told by the address of its C object instead.
//! Owns: the table from C objects to handles.
//! Invariants: an entry lives from the making of the C object to its `free_buffer`, so an address in the table is always that of a
//! buffer of ours; the handle in an entry is valid as long as the entry.
//! Threads: any; the lock is held for the look-up only. Does not: free what an entry leads to.

use core::ffi::c_void;
use std::collections::HashMap;
use std::sync::LazyLock;

use parking_lot::RwLock;

use super::super::gen_api3 as api3;

/// A handle, as an address: the table gives it back as it was.
#[derive(Clone, Copy)]
struct Context(*mut c_void);

// SAFETY: the pointer is only kept; what it leads to is `Sync` (the contract of `handle::Kind`).
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

static TABLE: LazyLock<RwLock<HashMap<usize, Context>>> = LazyLock::new(RwLock::default);

/// Remembers that this C object is ours and leads to this handle.
pub(super) fn insert(buffer: *mut api3::ggml_backend_buffer, context: *mut c_void) {
    TABLE.write().insert(buffer.addr(), Context(context));
}

/// The handle of a C object, if it is in the table.
pub(super) fn find(buffer: *mut api3::ggml_backend_buffer) -> Option<*mut c_void> {
    TABLE.read().get(&buffer.addr()).map(|context| context.0)
}

/// Forgets a C object; its handle, if it was in the table.
pub(super) fn remove(buffer: *mut api3::ggml_backend_buffer) -> Option<*mut c_void> {
    TABLE.write().remove(&buffer.addr()).map(|context| context.0)
}
