//! The driver for CUDA devices: the CUDA driver API through cudarc, loaded at run time.
//!
//! Owns: the primary context that it retains, two streams of its own, memory in reservations of address space.
//! Files: `context` (which device, what it can), `memory` (reservations, physical memory, registered host memory), `sparse` (memory behind any
//! part of a reservation), `stream` (copies and fills; events), `beside` (a second stream for lists of copies), `clock` (times, by events),
//! `staging` (pinned host memory that takes small uploads), `launch` (own kernels; the only place that launches one), `survey` (what the driver
//! says of all cards, for the command).
//! Invariants: cudarc panics when libcuda is absent, so its presence and version are asked first. The context is the primary one, which
//! ggml's runtime calls use too; it is made current on the calling thread before each call and left so, as the runtime leaves it.
//! Threads: any; a stream orders the work of all of them.
//! Does not: touch the inner backend's stream.

mod beside;
mod clock;
mod context;
mod launch;
mod memory;
mod sparse;
mod staging;
mod stream;
pub(crate) mod survey;

use core::ffi::c_void;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::{Clock, Driver, DriverError, Elastic, ListedCopy, Mark, Memory, Place, Point, Registration, Rows, Sparse};
use crate::abi::inner::{self, Passport};
use crate::config::CudaFault;
use crate::experts::HostRange;

use context::Context;
use memory::{Registered, Reservation};
use sparse::SparseReservation;
use staging::Staging;
use stream::{Event, Stream};

/// The driver of one CUDA device.
#[derive(Debug)]
pub(crate) struct Cuda {
    // Dropped before the stream that reads it, and that before the context that both belong to.
    staging: Mutex<Staging>,
    uploads: AtomicU64,
    mark: Event,
    uses: Arc<Uses>,
    stream: Arc<Stream>,
    context: Arc<Context>,
    passport: Passport,
}

/// Marks of the last work that each inner stream was given.
#[derive(Debug, Default)]
struct Uses {
    events: Mutex<HashMap<usize, Arc<Event>>>,
}

/// Who may still use a memory: our stream, and the inner streams.
///
/// They are waited for one by one. Waiting for the whole context would be shorter, but it is forbidden while any thread captures a CUDA
/// graph, and breaks that capture.
#[derive(Debug)]
struct Users {
    uses: Arc<Uses>,
    stream: Arc<Stream>,
}

impl Users {
    /// Waits until nobody uses the memory any more.
    fn wait(&self) -> Result<(), DriverError> {
        self.stream.synchronize()?;
        // Nobody is kept from queueing work while this waits.
        let events: Vec<Arc<Event>> = self.uses.events.lock().values().cloned().collect();
        events.iter().try_for_each(|event| event.synchronize())
    }
}

impl Cuda {
    /// The driver for an inner device of ggml's CUDA backend; Err says in one line why there is none.
    pub(super) fn open(
        device: &inner::Device,
        buffer_type: inner::BufferType,
        fault: Option<CudaFault>,
    ) -> Result<Self, String> {
        let id = device.id().ok_or("the CUDA device tells no PCI id")?;
        let context = Context::open(&id, fault)?;
        let passport = buffer_type.passport().ok_or("ggml gave no buffer object")?;
        Self::over(context, passport).map_err(|error| error.to_string())
    }

    fn over(context: Context, passport: Passport) -> Result<Self, DriverError> {
        let context = Arc::new(context);
        let stream = Arc::new(Stream::new(Arc::clone(&context))?);
        let staging = Mutex::new(Staging::new(&context)?);
        let mark = Event::new(&context)?;
        Ok(Self { staging, uploads: AtomicU64::new(0), mark, uses: Arc::default(), stream, context, passport })
    }

    fn users(&self) -> Users {
        Users { uses: Arc::clone(&self.uses), stream: Arc::clone(&self.stream) }
    }
}

/// The driver of the first CUDA device, without ggml: for the driver suite on a machine with a GPU.
#[cfg(test)]
pub(super) fn for_tests() -> Box<dyn Driver> {
    let context = Context::open_first().expect("a CUDA device");
    Box::new(Cuda::over(context, Passport::none()).expect("a stream"))
}

impl Driver for Cuda {
    fn name(&self) -> &'static str {
        "CUDA driver API"
    }

    fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>, DriverError> {
        Ok(Box::new(Reservation::new(&self.context, bytes, self.passport, self.users())?))
    }

    fn reserve(&self, bytes: usize) -> Result<Box<dyn Elastic>, DriverError> {
        Ok(Box::new(Reservation::elastic(&self.context, bytes, self.passport, self.users())?))
    }

    fn sparse(&self, bytes: usize) -> Result<Box<dyn Sparse>, DriverError> {
        Ok(Box::new(SparseReservation::new(&self.context, bytes, self.passport, self.users())?))
    }

    fn fill(&self, target: Place<'_>, value: u8, bytes: usize) -> Result<(), DriverError> {
        // SAFETY: the contract says that the range lies in a memory of this driver.
        unsafe { self.stream.fill(target.address, value, bytes) }
    }

    unsafe fn upload(&self, target: Place<'_>, source: *const c_void, rows: Rows) -> Result<(), DriverError> {
        // SAFETY: the range lies in a memory of this driver, the source is the caller's.
        unsafe { self.stream.upload(target.address, source, rows) }
    }

    unsafe fn upload_taking(&self, target: Place<'_>, source: *const c_void, rows: Rows) -> Result<(), DriverError> {
        let mut staging = self.staging.lock();
        // SAFETY: every row of the source is readable.
        let taken = unsafe { staging.take(&self.stream, source, rows) }?;
        let Some(taken) = taken else {
            drop(staging);
            // SAFETY: too large to be worth taking: the caller waits instead.
            unsafe { self.upload(target, source, rows) }?;
            return self.synchronize();
        };
        let packed = Rows { host_stride: rows.size, ..rows };
        // SAFETY: the target is the caller's; the staging keeps what it took until the stream is past it.
        unsafe { self.stream.upload(target.address, taken, packed) }?;
        self.uploads.fetch_add(1, Ordering::Release);
        Ok(())
    }

    fn is_pinned(&self, source: *const c_void, bytes: usize) -> bool {
        let end = source.wrapping_byte_add(bytes.saturating_sub(1));
        [source, end].into_iter().all(|address| memory::is_pinned(&self.context, address))
    }

    fn order_before(&self, inner: &inner::Backend, seen: &AtomicU64) -> Result<(), DriverError> {
        let uploads = self.uploads.load(Ordering::Acquire);
        if seen.load(Ordering::Relaxed) == uploads {
            return Ok(());
        }
        if inner.has_events() {
            self.mark.record(&self.stream)?;
            // SAFETY: ggml's CUDA events carry a CUevent, and this is one of the same device's primary context. Another thread may record
            // it again before the wait is queued; the wait is then for more, never for less.
            unsafe { inner.wait_foreign(self.mark.as_ptr()) };
        } else {
            self.synchronize()?;
        }
        seen.store(uploads, Ordering::Relaxed);
        Ok(())
    }

    fn point(&self, inner: &inner::Backend) -> Result<Point, DriverError> {
        if !inner.has_events() {
            inner.synchronize();
            return Ok(Point::default());
        }
        // One of its own for each time: other threads order other streams meanwhile. The driver keeps it for as long as it is waited for.
        let event = Event::new(&self.context)?;
        // SAFETY: ggml's CUDA events carry a CUevent, and this is one of the same device's primary context.
        unsafe { inner.record_foreign(event.as_ptr()) };
        Ok(Point(Some(Box::new(event))))
    }

    fn follow(&self, point: &Point) -> Result<(), DriverError> {
        match point.0.as_ref().and_then(|event| event.downcast_ref::<Event>()) {
            Some(event) => self.stream.wait(event),
            None => Ok(()),
        }
    }

    fn note_use(&self, inner: &inner::Backend) -> Result<(), DriverError> {
        if !inner.has_events() {
            inner.synchronize(); // nothing can mark the place, so nothing is left to wait for
            return Ok(());
        }
        let known = self.uses.events.lock().get(&inner.key()).cloned();
        let event = match known {
            Some(event) => event,
            None => {
                let event = Arc::new(Event::new(&self.context)?);
                self.uses.events.lock().insert(inner.key(), Arc::clone(&event));
                event
            }
        };
        // SAFETY: ggml's CUDA events carry a CUevent, and this is one of the same device's primary context.
        unsafe { inner.record_foreign(event.as_ptr()) };
        Ok(())
    }

    fn waits_for_uses(&self) -> bool {
        true
    }

    fn forget(&self, inner: &inner::Backend) {
        self.uses.events.lock().remove(&inner.key());
    }

    unsafe fn download(&self, target: *mut c_void, source: Place<'_>, rows: Rows) -> Result<(), DriverError> {
        // SAFETY: the range lies in a memory of this driver, the target is the caller's.
        unsafe { self.stream.download(target, source.address, rows) }
    }

    fn copy(&self, target: Place<'_>, source: Place<'_>, bytes: usize) -> Result<bool, DriverError> {
        if source.memory.passport() != target.memory.passport() {
            return Ok(false); // memory of another device is mapped for that device only
        }
        // SAFETY: both ranges lie in memories of this driver.
        unsafe { self.stream.copy(target.address, source.address, bytes) }.map(|()| true)
    }

    fn copy_list(&self, copies: &[ListedCopy<'_>]) -> Result<bool, DriverError> {
        if copies.iter().any(|copy| copy.source.memory.passport() != copy.target.memory.passport()) {
            return Ok(false);
        }
        let address = |place: Place<'_>| place.address as u64;
        let listed = |copy: &ListedCopy<'_>| launch::Copy {
            target: address(copy.target),
            source: address(copy.source),
            bytes: copy.bytes as u64,
        };
        let copies: Vec<launch::Copy> = copies.iter().map(listed).filter(|copy| copy.bytes > 0).collect();
        if !copies.is_empty() {
            // SAFETY: all ranges lie in memories of this driver; the caller's contract for what overlaps.
            unsafe { self.stream.copy_list(&copies) }?;
        }
        Ok(true)
    }

    fn clock(&self) -> Result<Box<dyn Clock>, DriverError> {
        Ok(Box::new(clock::EventClock::new(&self.context, &self.stream)))
    }

    fn mark(&self) -> Result<Box<dyn Mark>, DriverError> {
        let event = Event::new(&self.context)?;
        event.record(&self.stream)?;
        Ok(Box::new(event))
    }

    fn synchronize(&self) -> Result<(), DriverError> {
        self.stream.synchronize()
    }

    fn settle(&self) -> Result<(), DriverError> {
        self.users().wait()
    }

    fn pins(&self) -> bool {
        true
    }

    unsafe fn register(&self, range: HostRange<'_>) -> Result<Box<dyn Registration>, DriverError> {
        // SAFETY: the caller keeps the range mapped until the registration is dropped.
        let registered = unsafe { Registered::new(&self.context, range) }?;
        Ok(Box::new(registered))
    }
}

/// Names a failed call.
fn failed(what: &'static str) -> impl Fn(cudarc::driver::DriverError) -> DriverError {
    move |error| {
        if error.0 == cudarc::driver::sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return DriverError::OutOfMemory;
        }
        let why = match error.error_name() {
            Ok(name) => name.to_string_lossy().into_owned(),
            Err(_) => format!("{:?}", error.0),
        };
        DriverError::Failed { what, why }
    }
}
