//! Pinned host memory that takes small uploads, so that the host's memory is free again at once and nobody waits for the device.
//!
//! A ring: pieces are taken one behind the other; when the end is reached the stream is waited for and the ring starts over. Inputs of a
//! token are a few KiB, so that is once in some hundred tokens.

use core::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::result;

use super::super::{DriverError, Rows};
use super::context::Context;
use super::failed;
use super::stream::Stream;

/// Size of the ring.
const RING_BYTES: usize = 4 << 20;
/// The largest upload that is taken; copying more costs the host more than waiting does.
const LARGEST: usize = 1 << 20;
/// Pieces start at multiples of this.
const ALIGNMENT: usize = 256;

/// The ring.
#[derive(Debug)]
pub(super) struct Staging {
    context: Arc<Context>,
    start: *mut c_void,
    used: usize,
}

// SAFETY: the memory is owned and reached by whoever holds `&mut self` or through copies that the stream orders.
unsafe impl Send for Staging {}

impl Staging {
    /// Allocates the ring.
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, DriverError> {
        context.enter()?;
        // SAFETY: a size and no flags; freed once.
        let start = unsafe { result::malloc_host(RING_BYTES, 0) }.map_err(failed("cuMemHostAlloc"))?;
        Ok(Self { context: Arc::clone(context), start, used: 0 })
    }

    /// Takes rows, packed one behind the other; `None` if they are too large. What is returned stays as it is until `stream` has run what
    /// is queued on it next.
    ///
    /// # Safety
    /// Every row of the source is readable.
    pub(super) unsafe fn take(
        &mut self,
        stream: &Stream,
        source: *const c_void,
        rows: Rows,
    ) -> Result<Option<*const c_void>, DriverError> {
        let bytes = rows.size.saturating_mul(rows.count);
        if bytes > LARGEST {
            return Ok(None);
        }
        if self.used + bytes > RING_BYTES {
            stream.synchronize()?;
            self.used = 0;
        }
        let piece = self.start.wrapping_byte_add(self.used);
        for row in 0..rows.count {
            let from = source.wrapping_byte_add(row * rows.host_stride).cast::<u8>();
            let to = piece.wrapping_byte_add(row * rows.size).cast::<u8>();
            // SAFETY: the source is the caller's; the target lies in the ring, behind everything that the stream may still read.
            unsafe { core::ptr::copy_nonoverlapping(from, to, rows.size) };
        }
        self.used = (self.used + bytes).next_multiple_of(ALIGNMENT).min(RING_BYTES);
        Ok(Some(piece.cast_const()))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: allocated in `new`, freed once; freeing waits for copies that read it.
            let _ = unsafe { result::free_host(self.start) };
        }
    }
}
