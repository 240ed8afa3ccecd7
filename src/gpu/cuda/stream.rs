//! Copies and fills, on one stream of our own. It is non-blocking: not ordered against ggml's streams nor the legacy default stream. Lists of copies
//! on the device run beside it (`beside`), until something but an upload is asked for.

use core::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys;

use super::super::{DriverError, Mark, Rows};
use super::beside::Beside;
use super::context::Context;
use super::failed;
use super::launch::{Copy, Kernels};
use crate::abi::inner;

/// A stream and the kernels that run on it.
#[derive(Debug)]
pub(super) struct Stream {
    beside: Beside,
    kernels: Kernels,
    context: Arc<Context>,
    stream: sys::CUstream,
}

// SAFETY: a stream handle may be used from any thread with its context current; the driver serialises the calls.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream, and our kernels loaded.
    pub(super) fn new(context: Arc<Context>) -> Result<Self, DriverError> {
        context.enter()?;
        let kernels = Kernels::load()?;
        let beside = Beside::new(&context)?;
        let stream =
            result::stream::create(result::stream::StreamKind::NonBlocking).map_err(failed("cuStreamCreate"))?;
        Ok(Self { beside, kernels, context, stream })
    }

    /// Orders what is queued from now on behind the lists of copies.
    fn join(&self) -> Result<(), DriverError> {
        self.beside.join(self.stream)
    }

    /// Copies on the device, beside what is uploaded next.
    ///
    /// # Safety
    /// All ranges are device memory; no target overlaps another range, nor one that is uploaded to before the next mark.
    pub(super) unsafe fn copy_list(&self, copies: &[Copy]) -> Result<(), DriverError> {
        self.context.enter()?;
        // SAFETY: the caller's contract; both streams belong to the current context.
        unsafe { self.beside.copy(self.stream, &self.kernels, copies) }
    }

    /// Sets bytes.
    ///
    /// # Safety
    /// The range is device memory.
    pub(super) unsafe fn fill(&self, address: usize, value: u8, bytes: usize) -> Result<(), DriverError> {
        if bytes == 0 {
            return Ok(());
        }
        self.context.enter()?;
        self.join()?;
        // SAFETY: the caller's contract; the stream belongs to the current context.
        unsafe { self.kernels.fill(self.stream, address as u64, bytes as u64, value) }
    }

    /// Copies rows from the host.
    ///
    /// # Safety
    /// The target rows are device memory; the source rows are readable until [`Stream::synchronize`] returns.
    pub(super) unsafe fn upload(&self, address: usize, source: *const c_void, rows: Rows) -> Result<(), DriverError> {
        if rows.is_empty() {
            return Ok(());
        }
        self.context.enter()?;
        if rows.count == 1 {
            // SAFETY: the caller's contract.
            return unsafe { sys::cuMemcpyHtoDAsync_v2(address as u64, source, rows.size, self.stream) }
                .result()
                .map_err(failed("cuMemcpyHtoDAsync"));
        }
        let mut copy = two_dimensional(rows);
        copy.srcMemoryType = sys::CUmemorytype::CU_MEMORYTYPE_HOST;
        copy.srcHost = source;
        copy.srcPitch = rows.host_stride;
        copy.dstMemoryType = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        copy.dstDevice = address as u64;
        copy.dstPitch = rows.stride;
        // SAFETY: the caller's contract.
        unsafe { self.copy_rows(&copy) }
    }

    /// Copies rows to the host.
    ///
    /// # Safety
    /// The source rows are device memory; the target rows are writable until [`Stream::synchronize`] returns.
    pub(super) unsafe fn download(&self, target: *mut c_void, address: usize, rows: Rows) -> Result<(), DriverError> {
        if rows.is_empty() {
            return Ok(());
        }
        self.context.enter()?;
        self.join()?;
        if rows.count == 1 {
            // SAFETY: the caller's contract.
            return unsafe { sys::cuMemcpyDtoHAsync_v2(target, address as u64, rows.size, self.stream) }
                .result()
                .map_err(failed("cuMemcpyDtoHAsync"));
        }
        let mut copy = two_dimensional(rows);
        copy.srcMemoryType = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        copy.srcDevice = address as u64;
        copy.srcPitch = rows.stride;
        copy.dstMemoryType = sys::CUmemorytype::CU_MEMORYTYPE_HOST;
        copy.dstHost = target;
        copy.dstPitch = rows.host_stride;
        // SAFETY: the caller's contract.
        unsafe { self.copy_rows(&copy) }
    }

    /// # Safety
    /// Every row of the copy is accessible.
    unsafe fn copy_rows(&self, copy: &sys::CUDA_MEMCPY2D) -> Result<(), DriverError> {
        // SAFETY: a valid description by the caller's contract.
        unsafe { sys::cuMemcpy2DAsync_v2(core::ptr::from_ref(copy), self.stream) }
            .result()
            .map_err(failed("cuMemcpy2DAsync"))
    }

    /// Copies on the device.
    ///
    /// # Safety
    /// Both ranges are device memory.
    pub(super) unsafe fn copy(&self, target: usize, source: usize, bytes: usize) -> Result<(), DriverError> {
        self.context.enter()?;
        self.join()?;
        // SAFETY: the caller's contract.
        unsafe { sys::cuMemcpyAsync(target as u64, source as u64, bytes, self.stream) }
            .result()
            .map_err(failed("cuMemcpyAsync"))
    }

    /// Orders what is queued from now on behind an event.
    pub(super) fn wait(&self, event: &Event) -> Result<(), DriverError> {
        self.context.enter()?;
        // SAFETY: a stream and an event of the current context.
        unsafe { event.hold_on(self.stream) }
    }

    /// Waits for everything on this stream.
    pub(super) fn synchronize(&self) -> Result<(), DriverError> {
        self.context.enter()?;
        self.join()?;
        // SAFETY: a stream of the current context.
        unsafe { result::stream::synchronize(self.stream) }.map_err(failed("cuStreamSynchronize"))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made in `new`, destroyed once; queued work still runs to its end.
            let _ = unsafe { result::stream::destroy(self.stream) };
        }
    }
}

/// An event, of the kind that ggml's CUDA events carry.
#[derive(Debug)]
pub(super) struct Event {
    context: Arc<Context>,
    event: sys::CUevent,
}

// SAFETY: an event handle may be used from any thread with its context current.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// A new event, without timing.
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, DriverError> {
        Self::with(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// A new event that takes the time when it is reached.
    pub(super) fn timed(context: &Arc<Context>) -> Result<Self, DriverError> {
        Self::with(context, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with(context: &Arc<Context>, flags: sys::CUevent_flags) -> Result<Self, DriverError> {
        context.enter()?;
        let event = result::event::create(flags).map_err(failed("cuEventCreate"))?;
        Ok(Self { context: Arc::clone(context), event })
    }

    /// Marks the present end of a stream, lists of copies beside it included.
    pub(super) fn record(&self, stream: &Stream) -> Result<(), DriverError> {
        self.context.enter()?;
        stream.join()?;
        // SAFETY: a stream of the current context.
        unsafe { self.record_on(stream.stream) }
    }

    /// Marks the present end of a stream.
    ///
    /// # Safety
    /// A stream of this event's context, which is current.
    pub(super) unsafe fn record_on(&self, stream: sys::CUstream) -> Result<(), DriverError> {
        // SAFETY: an event of the current context; the rest is the caller's contract.
        unsafe { result::event::record(self.event, stream) }.map_err(failed("cuEventRecord"))
    }

    /// Orders what is queued on a stream from now on behind the mark.
    ///
    /// # Safety
    /// As for [`Event::record_on`].
    pub(super) unsafe fn hold_on(&self, stream: sys::CUstream) -> Result<(), DriverError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: an event of the current context; the rest is the caller's contract.
        unsafe { result::stream::wait_event(stream, self.event, flags) }.map_err(failed("cuStreamWaitEvent"))
    }

    /// Microseconds from another mark to this one; both were reached and take the time.
    pub(super) fn us_after(&self, earlier: &Self) -> Result<f64, DriverError> {
        self.context.enter()?;
        // SAFETY: two events of the current context.
        let ms = unsafe { result::event::elapsed(earlier.event, self.event) }.map_err(failed("cuEventElapsedTime"))?;
        Ok(f64::from(ms) * 1000.0)
    }

    /// Waits for the mark.
    pub(super) fn synchronize(&self) -> Result<(), DriverError> {
        self.context.enter()?;
        // SAFETY: an event of the current context; one that was never recorded is waited for no time.
        unsafe { result::event::synchronize(self.event) }.map_err(failed("cuEventSynchronize"))
    }

    /// Whether what was queued in front of the mark is done.
    pub(super) fn is_reached(&self) -> Result<bool, DriverError> {
        self.context.enter()?;
        // SAFETY: an event of the current context.
        match unsafe { result::event::query(self.event) } {
            Ok(()) => Ok(true),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(error) => Err(failed("cuEventQuery")(error)),
        }
    }

    /// The handle.
    pub(super) fn as_ptr(&self) -> *mut c_void {
        self.event.cast()
    }
}

impl Mark for Event {
    fn is_reached(&self) -> Result<bool, DriverError> {
        Event::is_reached(self)
    }

    fn hold(&self, inner: &inner::Backend) -> Result<(), DriverError> {
        if !inner.has_events() {
            return self.synchronize();
        }
        // SAFETY: ggml's CUDA events carry a CUevent, and this is one of the same device's primary context.
        unsafe { inner.wait_foreign(self.as_ptr()) };
        Ok(())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made in `new`, destroyed once; the driver keeps what streams still wait for.
            let _ = unsafe { result::event::destroy(self.event) };
        }
    }
}

/// A copy of rows between two places that the caller fills in.
fn two_dimensional(rows: Rows) -> sys::CUDA_MEMCPY2D {
    sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        srcHost: core::ptr::null(),
        srcDevice: 0,
        srcArray: core::ptr::null_mut(),
        srcPitch: 0,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: core::ptr::null_mut(),
        dstDevice: 0,
        dstArray: core::ptr::null_mut(),
        dstPitch: 0,
        WidthInBytes: rows.size,
        Height: rows.count,
    }
}
