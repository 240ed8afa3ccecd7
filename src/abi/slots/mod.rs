//! The functions that the host calls, one file per object, slots in upstream's order.
//!
//! Owns: the C objects that the host sees (they carry a vtable of the host's layout and a tagged handle).
//! Invariants: every function goes through the boundary (but `slot_names`, which only hands out constants); it turns handles into references and calls safe code, no more.
//! Regs, devices and buffer types live as long as the process, by ggml's design.
//! Threads: any thread of the host.

pub(crate) mod backend;
mod borrowed;
pub(crate) mod buffer;
mod buffer_type;
mod device;
mod event;
mod procs;
pub(crate) mod reg;

use core::ffi::c_void;

use super::handle::{self, Kind, NotOurs};
use super::layout::{ObjectShape, Words, field};

/// Stores a slot function where the layout has a place for it.
macro_rules! put {
    ($words:expr, $shape:expr, $slot:expr, $function:expr) => {
        if let Some(offset) = $slot {
            $words.set($shape.iface + offset, ($function as *const core::ffi::c_void).expose_provenance());
        }
    };
}
pub(super) use put;

/// The object behind a C object of the host, through its context pointer.
///
/// # Safety
/// `object` is null or an object of the host with this shape, alive during `'a`.
unsafe fn behind<'a, T: Kind>(object: *mut c_void, shape: &ObjectShape) -> Result<&'a T, NotOurs> {
    let context = if object.is_null() {
        object
    } else {
        // SAFETY: the context lies inside an object of this shape.
        unsafe { field(object, shape.context) }
    };
    // SAFETY: an object that the host passes to our slot carries our handle, or none (a buffer of no bytes).
    unsafe { handle::get(context) }
}

/// Copies a finished object over the zeroed memory whose address others already hold.
///
/// # Safety
/// `target` was leaked from [`Words`] of the same size and nobody reads it yet.
unsafe fn publish(target: *mut c_void, words: &Words, bytes: usize) {
    // SAFETY: both are at least `bytes` long and distinct.
    unsafe { core::ptr::copy_nonoverlapping(words.as_ptr().cast::<u8>(), target.cast::<u8>(), bytes) };
}
