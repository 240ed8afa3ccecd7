//! A driver whose link to the device looks slower than it is, for benchmarks (`link-gbs`).
//!
//! Owns: the driver that it stands in front of, and how often it copies.
//! Invariants: bytes arrive as without it; copies from the host of at least [`LEAST_BYTES`] run `times` times one behind the other, the last
//! one only for the fraction that is left. Everything else is handed on.
//! Threads: any, as the driver behind it. Does not: slow down copies back to the host, or what kernels read in place (the caller turns that
//! off).
// UNSAFETY: the contract passes raw host memory on.
#![expect(unsafe_code, reason = "the contract passes raw host memory on")]

use core::ffi::c_void;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use super::{Clock, Driver, DriverError, Elastic, ListedCopy, Mark, Memory, Place, Point, Registration, Rows, Sparse};
use crate::abi::inner;
use crate::experts::{HostMemory, HostRange};

/// Smaller copies are operands and ids, not weights.
const LEAST_BYTES: usize = 64 << 10;
/// Size of the copy that measures the link.
const PROBE_BYTES: usize = 64 << 20;
/// Below this a measurement says nothing.
const LEAST_PROBE_BYTES: usize = 4 << 20;

/// A driver that copies several times.
#[derive(Debug)]
pub(crate) struct Slow {
    driver: Box<dyn Driver>,
    times: f64,
}

/// Puts a slow link of `gbs` * 10^9 bytes per second in front of a driver; also says what was measured and done.
pub(super) fn slow_down(driver: Box<dyn Driver>, gbs: f32) -> (Box<dyn Driver>, String) {
    let wanted = f64::from(gbs);
    match measured_gbs(&*driver) {
        None => (driver, format!("LINK-GBS={gbs} IS IGNORED: no memory to measure the link with")),
        Some(measured) if measured <= wanted => {
            (driver, format!("LINK-GBS={gbs} CHANGES NO COPY: the link moves {measured:.1} GB/s"))
        }
        Some(measured) => {
            let times = measured / wanted;
            let slow = Slow { driver, times };
            let now = measured_gbs(&slow).unwrap_or(wanted);
            let line = format!(
                "THE LINK IS SLOWED DOWN (link-gbs={gbs}): it moves {measured:.1} GB/s; each copy of {} KiB or more runs {times:.2} times: \
                 {now:.1} GB/s; experts are not read in place",
                LEAST_BYTES >> 10
            );
            (Box::new(slow), line)
        }
    }
}

/// What the link moves, in 10^9 bytes per second: the best of a few large copies from pinned memory, or from plain memory where there is
/// none.
pub(super) fn measured_gbs(driver: &dyn Driver) -> Option<f64> {
    let mut bytes = PROBE_BYTES;
    let memory = loop {
        match driver.allocate(bytes) {
            Ok(memory) => break memory,
            Err(_) if bytes / 2 >= LEAST_PROBE_BYTES => bytes /= 2,
            Err(_) => return None,
        }
    };
    let host = HostMemory::map(bytes).ok()?;
    host.fill(host.address(), 1, bytes).ok()?;
    let range = host.range(host.address(), bytes)?;
    // SAFETY: the registration is dropped before the memory, at the end of this function at the latest.
    let registration = unsafe { driver.register(range) }.ok(); // without it the copy is slower
    let mut best = f64::INFINITY;
    for _ in 0..4 {
        let began = Instant::now();
        let target = Place { memory: &*memory, address: memory.base() };
        // SAFETY: the range is readable, and the copy is waited for.
        unsafe { driver.upload(target, range.as_ptr(), Rows::one(bytes)) }.ok()?;
        driver.synchronize().ok()?;
        best = best.min(began.elapsed().as_secs_f64());
    }
    drop(registration);
    let gbs = bytes as f64 / best / 1e9;
    (gbs.is_finite() && gbs > 0.0).then_some(gbs)
}

impl Slow {
    /// The copies that follow the first one.
    fn repeats(&self, rows: Rows) -> impl Iterator<Item = Rows> + use<> {
        let times = if rows.size.saturating_mul(rows.count) < LEAST_BYTES { 1.0 } else { self.times };
        let (whole, rest) = (times.floor().max(1.0), times.fract());
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a part of a size; rounding is harmless"
        )]
        let part = |all: usize| (all as f64 * rest) as usize;
        let last = if rows.count == 1 { Rows::one(part(rows.size)) } else { Rows { count: part(rows.count), ..rows } };
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small whole number")]
        let more = whole as usize - 1;
        std::iter::repeat_n(rows, more).chain(std::iter::once(last).filter(|rows| !rows.is_empty()))
    }
}

impl Driver for Slow {
    fn name(&self) -> &'static str {
        self.driver.name()
    }

    fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>, DriverError> {
        self.driver.allocate(bytes)
    }

    fn reserve(&self, bytes: usize) -> Result<Box<dyn Elastic>, DriverError> {
        self.driver.reserve(bytes)
    }

    fn sparse(&self, bytes: usize) -> Result<Box<dyn Sparse>, DriverError> {
        self.driver.sparse(bytes)
    }

    fn fill(&self, target: Place<'_>, value: u8, bytes: usize) -> Result<(), DriverError> {
        self.driver.fill(target, value, bytes)
    }

    unsafe fn upload(&self, target: Place<'_>, source: *const c_void, rows: Rows) -> Result<(), DriverError> {
        // SAFETY: the caller's contract.
        unsafe { self.driver.upload(target, source, rows) }?;
        for again in self.repeats(rows) {
            // SAFETY: a part of the rows that the caller vouches for.
            unsafe { self.driver.upload(target, source, again) }?;
        }
        Ok(())
    }

    unsafe fn upload_taking(&self, target: Place<'_>, source: *const c_void, rows: Rows) -> Result<(), DriverError> {
        // SAFETY: the caller's contract.
        unsafe { self.driver.upload_taking(target, source, rows) }?;
        for again in self.repeats(rows) {
            // SAFETY: a part of the rows that the caller vouches for.
            unsafe { self.driver.upload_taking(target, source, again) }?;
        }
        Ok(())
    }

    fn is_pinned(&self, source: *const c_void, bytes: usize) -> bool {
        self.driver.is_pinned(source, bytes)
    }

    fn order_before(&self, inner: &inner::Backend, seen: &AtomicU64) -> Result<(), DriverError> {
        self.driver.order_before(inner, seen)
    }

    fn point(&self, inner: &inner::Backend) -> Result<Point, DriverError> {
        self.driver.point(inner)
    }

    fn follow(&self, point: &Point) -> Result<(), DriverError> {
        self.driver.follow(point)
    }

    fn waits_for_uses(&self) -> bool {
        self.driver.waits_for_uses()
    }

    fn note_use(&self, inner: &inner::Backend) -> Result<(), DriverError> {
        self.driver.note_use(inner)
    }

    fn forget(&self, inner: &inner::Backend) {
        self.driver.forget(inner);
    }

    unsafe fn download(&self, target: *mut c_void, source: Place<'_>, rows: Rows) -> Result<(), DriverError> {
        // SAFETY: the caller's contract.
        unsafe { self.driver.download(target, source, rows) }
    }

    fn copy(&self, target: Place<'_>, source: Place<'_>, bytes: usize) -> Result<bool, DriverError> {
        self.driver.copy(target, source, bytes)
    }

    fn copy_list(&self, copies: &[ListedCopy<'_>]) -> Result<bool, DriverError> {
        self.driver.copy_list(copies)
    }

    fn clock(&self) -> Result<Box<dyn Clock>, DriverError> {
        self.driver.clock()
    }

    fn mark(&self) -> Result<Box<dyn Mark>, DriverError> {
        self.driver.mark()
    }

    fn synchronize(&self) -> Result<(), DriverError> {
        self.driver.synchronize()
    }

    fn settle(&self) -> Result<(), DriverError> {
        self.driver.settle()
    }

    fn pins(&self) -> bool {
        self.driver.pins()
    }

    unsafe fn register(&self, range: HostRange<'_>) -> Result<Box<dyn Registration>, DriverError> {
        // SAFETY: the caller's contract.
        unsafe { self.driver.register(range) }
    }
}

/// A slow link over the fake driver, for the driver suite.
#[cfg(test)]
pub(super) fn over_fake() -> Box<dyn Driver> {
    Box::new(Slow { driver: Box::new(super::fake::Fake::default()), times: 2.5 })
}

#[cfg(test)]
mod tests {
    use super::super::fake::Fake;
    use super::*;

    fn slow(times: f64) -> Slow {
        Slow { driver: Box::new(Fake::default()), times }
    }

    #[test]
    fn copies_run_as_often_as_the_speed_asks() {
        let moved = |times: f64, rows: Rows| {
            let more: usize = slow(times).repeats(rows).map(|rows| rows.size * rows.count).sum();
            (rows.size * rows.count + more) as f64 / (rows.size * rows.count) as f64
        };
        let rows = Rows { size: 1000, count: 100, stride: 1200, host_stride: 1000 };
        for times in [1.0, 1.5, 2.0, 3.75, 9.1] {
            assert!((moved(times, Rows::one(1 << 20)) - times).abs() < 0.001, "{times}");
            assert!((moved(times, rows) - times).abs() < 0.011, "{times}");
        }
        assert!((moved(8.0, Rows::one(LEAST_BYTES - 1)) - 1.0).abs() < f64::EPSILON, "small copies run once");
    }

    #[test]
    fn what_was_measured_and_done_is_told() {
        let (_, line) = slow_down(Box::new(Fake::default()), 0.5);
        assert!(line.starts_with("THE LINK IS SLOWED DOWN (link-gbs=0.5): it moves "), "{line}");
        let (_, line) = slow_down(Box::new(Fake::default()), 1000.0);
        assert!(line.starts_with("LINK-GBS=1000 CHANGES NO COPY"), "{line}");
    }
}
