//! Memory of the inner device, below ggml: one contract, several drivers.
//!
//! Owns: the [`Driver`] contract and the choice of a driver for an inner device ([`open`]).
//! Drivers share one set of notions: `cuda` (driver API; memory in our own reservations of address space), `generic` (ggml's
//! own functions; any device), `late` (the same with delays, a test key), `slow` (in front of another, for benchmarks), `bounce` (in front of CUDA's: copies from memory that is not pinned) and `fake` (in
//! process, for tests: deterministic, faults on demand, work done as late as allowed). `pages` emulates mapping where the device's memory is
//! the host's.
//! Invariants: see the contract. Threads: any; each driver orders its own work.
//! Does not: know tensors, experts or graphs.
// UNSAFETY: the contract passes raw host memory; callers vouch for it.
#![expect(unsafe_code, reason = "the contract passes raw host memory; callers vouch for it")]

mod bounce;
mod clock;
pub(crate) mod cuda;
#[cfg(test)]
pub(crate) mod fake;
mod generic;
mod late;
mod pages;
mod slow;
mod sparse;
#[cfg(test)]
mod suite;

use std::fmt;
use std::sync::atomic::AtomicU64;

use crate::abi::inner::{self, Passport};
use crate::config::CudaFault;
use crate::experts::HostRange;
use crate::graph::Ranges;

pub(crate) use clock::Clock;
use clock::HostClock;

/// Work on the memory of one device.
///
/// The contract:
/// - [`Driver::allocate`] gives memory of unspecified content that stays at its address until the object is dropped. Dropping waits for
///   the driver's own work and, if [`Driver::waits_for_uses`], for what [`Driver::note_use`] told of.
/// - Copies and fills run in the order in which they were asked for, relative to each other. They may run later, but have run when
///   [`Driver::synchronize`] returns. They are not ordered against the inner backend's stream: the caller synchronizes that first.
/// - Host memory passed to a copy stays valid until [`Driver::synchronize`] returns, but for [`Driver::upload_taking`].
/// - [`Driver::reserve`] gives addresses; memory comes behind them, and goes, with [`Elastic::resize`]. What comes is of unspecified
///   content; what stays keeps its content and its address. What goes is waited for as in a drop.
/// - [`Driver::sparse`] gives memory that comes and goes behind any part of its addresses, with the same promises ([`Sparse`]).
/// - Every range lies in the memory it names; the caller has checked that.
/// - An error means that the operation did not take place and that the driver is usable; a device that is lost makes every later call
///   fail.
pub(crate) trait Driver: Send + Sync + fmt::Debug {
    /// What the log calls it.
    fn name(&self) -> &'static str;

    /// Memory of `bytes` bytes, at least one.
    fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>, DriverError>;

    /// Addresses for `bytes` bytes, at least one, with no memory behind them yet.
    fn reserve(&self, bytes: usize) -> Result<Box<dyn Elastic>, DriverError>;

    /// Memory of `bytes` bytes, at least one, all of it there at first. Refused as [`DriverError::Unsupported`] where memory has one size.
    fn sparse(&self, bytes: usize) -> Result<Box<dyn Sparse>, DriverError>;

    /// Sets bytes.
    fn fill(&self, target: Place<'_>, value: u8, bytes: usize) -> Result<(), DriverError>;

    /// Copies rows from the host.
    ///
    /// # Safety
    /// Every row of the source is readable until [`Driver::synchronize`] returns.
    unsafe fn upload(&self, target: Place<'_>, source: *const core::ffi::c_void, rows: Rows)
    -> Result<(), DriverError>;

    /// Copies rows from the host and takes the bytes at once: the source may be reused when this returns. The copy itself may run later;
    /// [`Driver::order_before`] puts it before the work of an inner stream.
    ///
    /// # Safety
    /// Every row of the source is readable.
    unsafe fn upload_taking(
        &self,
        target: Place<'_>,
        source: *const core::ffi::c_void,
        rows: Rows,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller's contract, and the source is not needed after `synchronize`.
        unsafe { self.upload(target, source, rows) }?;
        self.synchronize()
    }

    /// Whether [`Driver::upload`] is fast from any memory, and takes memory that is registered in part.
    fn takes_plain_memory(&self) -> bool {
        false
    }

    /// Whether memory of the host is pinned, no matter by whom: a copy from it is as fast as the link.
    fn is_pinned(&self, _source: *const core::ffi::c_void, _bytes: usize) -> bool {
        false
    }

    /// Orders what was taken so far before what is queued on the inner stream from now on; other uploads and copies have their marks. `seen` belongs to that stream; it starts at
    /// zero and spares the work when there is nothing new.
    fn order_before(&self, _inner: &inner::Backend, _seen: &AtomicU64) -> Result<(), DriverError> {
        Ok(())
    }

    /// The place behind everything that the inner stream was given so far.
    fn point(&self, inner: &inner::Backend) -> Result<Point, DriverError> {
        inner.synchronize();
        Ok(Point::default())
    }

    /// Orders what is asked for from now on behind a point that this driver gave.
    fn follow(&self, _point: &Point) -> Result<(), DriverError> {
        Ok(())
    }

    /// The inner stream was given work that may use memory of this driver: memory that is dropped later waits for it.
    fn note_use(&self, _inner: &inner::Backend) -> Result<(), DriverError> {
        Ok(())
    }

    /// Whether memory that goes waits for what [`Driver::note_use`] told of. If not, the inner streams are to be idle when it goes.
    fn waits_for_uses(&self) -> bool {
        false
    }

    /// The inner stream is idle and ends: it is waited for no more.
    fn forget(&self, _inner: &inner::Backend) {}

    /// Copies rows to the host.
    ///
    /// # Safety
    /// Every row of the target is writable, and not otherwise used, until [`Driver::synchronize`] returns.
    unsafe fn download(&self, target: *mut core::ffi::c_void, source: Place<'_>, rows: Rows)
    -> Result<(), DriverError>;

    /// Copies between two memories of drivers of this kind; `Ok(false)` if the driver cannot, for example between two devices.
    fn copy(&self, target: Place<'_>, source: Place<'_>, bytes: usize) -> Result<bool, DriverError>;

    /// Copies between memories of drivers of this kind, many at once; `Ok(false)` if the driver cannot do all of them, then some may have been
    /// done. The list runs behind everything asked for before. Uploads that are asked for next may run beside it; what is asked for from the
    /// next other operation on, a mark for example, is ordered behind it. So until then nothing may be uploaded to a range of the list, and no
    /// target may overlap another range of it.
    fn copy_list(&self, copies: &[ListedCopy<'_>]) -> Result<bool, DriverError> {
        for copy in copies {
            if !self.copy(copy.target, copy.source, copy.bytes)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// A clock for one pass.
    fn clock(&self) -> Result<Box<dyn Clock>, DriverError> {
        Ok(Box::new(HostClock::default()))
    }

    /// Marks the place behind everything asked for so far.
    fn mark(&self) -> Result<Box<dyn Mark>, DriverError>;

    /// Waits for everything asked for so far.
    fn synchronize(&self) -> Result<(), DriverError>;

    /// Waits for everything asked for so far and for what [`Driver::note_use`] told of: nobody uses memory of this driver any more.
    fn settle(&self) -> Result<(), DriverError> {
        self.synchronize()
    }

    /// Whether the device's kernels read any memory of the host at its own address.
    fn reads_host_memory(&self) -> bool {
        false
    }

    /// Whether [`Driver::register`] can work here: the device then reads RAM in place, and copies from registered memory fastest.
    fn pins(&self) -> bool {
        false
    }

    /// Makes host memory readable by the device's kernels at its own address, until the object is dropped.
    ///
    /// # Safety
    /// The range stays mapped until the object is dropped.
    unsafe fn register(&self, range: HostRange<'_>) -> Result<Box<dyn Registration>, DriverError>;
}

/// Memory of a device.
pub(crate) trait Memory: Send + Sync + fmt::Debug {
    /// Address of the first byte, in the device's own terms.
    fn base(&self) -> usize;

    /// Size in bytes.
    fn bytes(&self) -> usize;

    /// A buffer object of the inner backend that its code accepts for this memory.
    fn passport(&self) -> Passport;

    /// Whether a range lies in it.
    fn contains(&self, address: usize, bytes: usize) -> bool {
        let end = address.checked_sub(self.base()).and_then(|offset| offset.checked_add(bytes));
        end.is_some_and(|end| end <= self.bytes())
    }
}

/// Memory whose size changes while its address stays. Its `bytes` are those that have memory behind them, from the base on.
pub(crate) trait Elastic: Memory {
    /// Bytes of addresses.
    fn reserved(&self) -> usize;

    /// The pieces in which memory comes and goes: the size is a multiple of this, or all that was reserved.
    fn unit(&self) -> usize;

    /// Puts memory behind at least the first `bytes` bytes and takes the pieces away that lie wholly behind them. On failure nothing
    /// has changed.
    fn resize(&mut self, bytes: usize) -> Result<(), DriverError>;
}

/// Memory behind any part of a range of addresses that stays. Its `bytes` are all of its addresses. Ranges are offsets, whole units.
pub(crate) trait Sparse: Memory {
    /// The pieces in which memory comes and goes, in bytes.
    fn unit(&self) -> usize;

    /// Puts memory behind these ranges, of unspecified content where there was none. On failure nothing has changed.
    fn map(&self, ranges: &Ranges) -> Result<(), DriverError>;

    /// Takes memory away outside of these ranges, as much as can be had; what is in them keeps its content. What goes is waited for as in a drop. On
    /// failure content may be lost.
    fn keep_only(&self, ranges: &Ranges) -> Result<(), DriverError>;

    /// Bytes with memory behind them: at least those that were asked for.
    fn mapped_bytes(&self) -> usize;
}

/// The size that an elastic memory has after it was resized to `bytes`.
pub(crate) fn elastic_size(bytes: usize, unit: usize, reserved: usize) -> usize {
    bytes.checked_next_multiple_of(unit.max(1)).unwrap_or(usize::MAX).min(reserved)
}

/// A place in an inner stream's work, for the driver that gave it. Without anything in it it was reached when it was given.
#[derive(Debug, Default)]
pub(crate) struct Point(Option<Box<dyn std::any::Any + Send + Sync>>);

/// A place in a driver's work.
pub(crate) trait Mark: Send + Sync + fmt::Debug {
    /// Whether all work in front of it is done. Never waits.
    fn is_reached(&self) -> Result<bool, DriverError>;

    /// Orders what the inner stream is given from now on behind the mark.
    fn hold(&self, _inner: &inner::Backend) -> Result<(), DriverError> {
        while !self.is_reached()? {
            std::thread::yield_now();
        }
        Ok(())
    }
}

/// A place that was reached when it was made.
#[derive(Debug)]
pub(crate) struct Reached;

impl Mark for Reached {
    fn is_reached(&self) -> Result<bool, DriverError> {
        Ok(true)
    }
}

/// Registered host memory; dropping it takes the registration back.
pub(crate) trait Registration: Send + Sync + fmt::Debug {}

/// An address in a memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    /// The memory.
    pub(crate) memory: &'a dyn Memory,
    /// The address, in the device's own terms.
    pub(crate) address: usize,
}

/// One copy of a list.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ListedCopy<'a> {
    pub(crate) target: Place<'a>,
    pub(crate) source: Place<'a>,
    pub(crate) bytes: usize,
}

/// Rows of a copy; a plain copy is one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    /// Bytes of a row.
    pub(crate) size: usize,
    /// Rows.
    pub(crate) count: usize,
    /// Bytes from row to row on the device.
    pub(crate) stride: usize,
    /// Bytes from row to row on the host.
    pub(crate) host_stride: usize,
}

impl Rows {
    /// One row.
    pub(crate) fn one(size: usize) -> Self {
        Self { size, count: 1, stride: size, host_stride: size }
    }

    /// Bytes from the first to behind the last on the device; saturates.
    pub(crate) fn extent(&self) -> usize {
        self.count.saturating_sub(1).saturating_mul(self.stride).saturating_add(self.size)
    }

    /// Whether there is nothing to copy.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0 || self.size == 0
    }
}

/// The pieces in which expert bytes are copied.
const PIECE_BYTES: usize = 1 << 20;

/// Copies expert bytes to a device and waits for it.
///
/// The bytes are taken piece by piece, so that the device's driver never sees the memory that they come from: it may be in the middle of
/// being registered, and drivers refuse a copy from memory that is registered in part.
pub(crate) fn upload_ranges(driver: &dyn Driver, copies: &[(Place<'_>, HostRange<'_>)]) -> Result<(), DriverError> {
    for (target, source) in copies {
        if driver.takes_plain_memory() {
            // SAFETY: a range is readable for its length, and is waited for below.
            let taken = unsafe { driver.upload(*target, source.as_ptr(), Rows::one(source.bytes())) };
            if taken.is_ok() {
                continue;
            }
        }
        let mut done = 0;
        while done < source.bytes() {
            let piece = PIECE_BYTES.min(source.bytes() - done);
            let place = Place { address: target.address + done, ..*target };
            // SAFETY: a range is readable for its length, of which `done + piece` is no more.
            unsafe { driver.upload_taking(place, source.as_ptr().wrapping_byte_add(done), Rows::one(piece)) }?;
            done += piece;
        }
    }
    driver.synchronize()
}

/// Something that a correct caller cannot foresee.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DriverError {
    /// No memory of the asked size.
    #[error("out of memory")]
    OutOfMemory,
    /// This driver or device has no such thing.
    #[error("not supported: {0}")]
    Unsupported(&'static str),
    /// The device or its driver refused.
    #[error("{what} failed: {why}")]
    Failed {
        /// What was tried.
        what: &'static str,
        /// The driver's word for it.
        why: String,
    },
}

/// How a driver is opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// What CUDA is made to look like (tests only).
    pub(crate) fault: Option<CudaFault>,
    /// Seed of copies that are late on purpose (tests only).
    pub(crate) late: Option<u32>,
    /// How slow the link is made to look, in 10^9 bytes per second (benchmarks only).
    pub(crate) link_gbs: Option<f32>,
    /// Whether memory counts as registered where no driver registers it and none is needed (tests only).
    pub(crate) pins: bool,
}

/// The driver for an inner device, with a link that looks as slow as asked for, and what there is to tell about it.
pub(crate) fn open(
    device: &inner::Device,
    buffer_type: inner::BufferType,
    options: Options,
) -> (Box<dyn Driver>, Vec<String>) {
    let (driver, reason) = open_at_full_speed(device, buffer_type, options);
    let mut lines: Vec<String> =
        reason.into_iter().map(|reason| format!("memory goes through {}: {reason}", driver.name())).collect();
    let driver = match options.link_gbs {
        None => driver,
        Some(gbs) => {
            let (driver, line) = slow::slow_down(driver, gbs);
            lines.push(line);
            driver
        }
    };
    // Over a late device for the tests.
    let bounces = driver.pins() || options.late.is_some();
    (if bounces { bounce::over(driver) } else { driver }, lines)
}

/// What the link moves from pinned memory, in bytes per microsecond; `None` if there is no memory to measure it with.
pub(crate) fn link_rate(driver: &dyn Driver) -> Option<f32> {
    #[expect(clippy::cast_possible_truncation, reason = "a rate; three digits are enough")]
    slow::measured_gbs(driver).map(|gbs| (gbs * 1e3) as f32)
}

fn open_at_full_speed(
    device: &inner::Device,
    buffer_type: inner::BufferType,
    Options { fault, late, pins, .. }: Options,
) -> (Box<dyn Driver>, Option<String>) {
    let provider = device.provider();
    let is_cpu = provider == "CPU";
    let generic = || -> Box<dyn Driver> {
        match late.and_then(|seed| late::Late::new(buffer_type, is_cpu, pins, seed)) {
            Some(late) => Box::new(late),
            None => Box::new(generic::Generic::new(buffer_type, is_cpu, pins)),
        }
    };
    if provider != "CUDA" {
        return (generic(), None);
    }
    match cuda::Cuda::open(device, buffer_type, fault) {
        Ok(driver) => (Box::new(driver), None),
        Err(reason) => (generic(), Some(reason)),
    }
}
