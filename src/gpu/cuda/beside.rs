//! A second stream, for lists of copies on the device: they run beside copies over the link.
//!
//! Owns: the stream, and the events that order it against the first one.
//! Invariants: a list runs behind everything that was queued on the first stream before it; `join` orders what is queued there later behind
//! every list. Its priority is the highest, because a list is short and the link's copies wait for its end.
//! Threads: any. The lock is held while work is queued, never while the device is waited for. Does not: know what is copied.

use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys;
use parking_lot::Mutex;

use super::super::DriverError;
use super::context::Context;
use super::failed;
use super::launch::{COPIES, Copy, Kernels};
use super::stream::Event;

/// The second stream.
#[derive(Debug)]
pub(super) struct Beside {
    context: Arc<Context>,
    stream: sys::CUstream,
    /// The end of the first stream when a list began.
    fork: Event,
    /// The end of the lists.
    end: Event,
    /// Whether there are lists that the first stream is not ordered behind.
    open: Mutex<bool>,
}

// SAFETY: a stream handle may be used from any thread with its context current; the driver serialises the calls.
unsafe impl Send for Beside {}
// SAFETY: as above.
unsafe impl Sync for Beside {}

impl Beside {
    /// A new stream in the current context.
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, DriverError> {
        let (fork, end) = (Event::new(context)?, Event::new(context)?);
        let (mut lowest, mut highest) = (0, 0);
        // SAFETY: two places to write to.
        let asked = unsafe { sys::cuCtxGetStreamPriorityRange(&raw mut lowest, &raw mut highest) }.result();
        asked.map_err(failed("cuCtxGetStreamPriorityRange"))?;
        let stream = result::stream::create_with_priority(result::stream::StreamKind::NonBlocking, highest)
            .map_err(failed("cuStreamCreateWithPriority"))?;
        Ok(Self { context: Arc::clone(context), stream, fork, end, open: Mutex::new(false) })
    }

    /// Queues copies behind what `first` was given so far.
    ///
    /// # Safety
    /// As for [`Kernels::gather`]; `first` belongs to the current context.
    pub(super) unsafe fn copy(
        &self,
        first: sys::CUstream,
        kernels: &Kernels,
        copies: &[Copy],
    ) -> Result<(), DriverError> {
        let mut open = self.open.lock();
        // SAFETY: the caller's contract.
        unsafe { self.fork.record_on(first) }?;
        // SAFETY: both belong to the current context.
        unsafe { self.fork.hold_on(self.stream) }?;
        *open = true;
        for copies in copies.chunks(COPIES) {
            // SAFETY: the caller's contract.
            unsafe { kernels.gather(self.stream, copies) }?;
        }
        Ok(())
    }

    /// Orders what `first` is given from now on behind all lists. The context is current.
    pub(super) fn join(&self, first: sys::CUstream) -> Result<(), DriverError> {
        let mut open = self.open.lock();
        if *open {
            // SAFETY: both belong to the current context.
            unsafe { self.end.record_on(self.stream) }?;
            // SAFETY: the caller's stream belongs to the current context.
            unsafe { self.end.hold_on(first) }?;
            *open = false;
        }
        Ok(())
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made in `new`, destroyed once; queued work still runs to its end.
            let _ = unsafe { result::stream::destroy(self.stream) };
        }
    }
}
