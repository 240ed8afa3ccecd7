//! A driver in process, for tests: deterministic, with faults on demand. Work is done as late as the contract allows, at
//! `synchronize` or when a memory is dropped, so that a caller who forgets to wait reads old bytes.

use core::ffi::c_void;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{Driver, DriverError, Mark, Memory, Place, Reached, Registration, Rows};
use crate::abi::inner::Passport;
use crate::experts::{HostMemory, HostRange};

type Work = Box<dyn FnOnce() + Send>;

/// What fails next.
#[derive(Debug, Default)]
struct Faults {
    allocations: u32,
    fail_allocation: Option<u32>,
    registered: usize,
    register_limit: Option<usize>,
}

/// The fake driver.
#[derive(Clone, Default)]
pub(crate) struct Fake {
    queue: Arc<Mutex<Vec<Work>>>,
    faults: Arc<Mutex<Faults>>,
}

impl std::fmt::Debug for Fake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fake").field("queued", &self.queue.lock().len()).finish_non_exhaustive()
    }
}

impl Fake {
    /// The n-th allocation from now (from 1) fails.
    pub(crate) fn fail_allocation(&self, number: u32) {
        let mut faults = self.faults.lock();
        faults.fail_allocation = Some(faults.allocations + number);
    }

    /// No more than this many bytes can be registered at once.
    pub(crate) fn limit_registration(&self, bytes: usize) {
        self.faults.lock().register_limit = Some(bytes);
    }

    /// Bytes registered now.
    pub(crate) fn registered(&self) -> usize {
        self.faults.lock().registered
    }

    fn queue(&self, work: impl FnOnce() + Send + 'static) {
        self.queue.lock().push(Box::new(work));
    }

    fn drain(&self) {
        let work: Vec<Work> = std::mem::take(&mut *self.queue.lock());
        work.into_iter().for_each(|work| work());
    }
}

struct FakeMemory {
    bytes: Arc<HostMemory>,
    driver: Fake,
}

impl std::fmt::Debug for FakeMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FakeMemory({} bytes)", self.bytes.bytes())
    }
}

impl Memory for FakeMemory {
    fn base(&self) -> usize {
        self.bytes.address()
    }

    fn bytes(&self) -> usize {
        self.bytes.bytes()
    }

    fn passport(&self) -> Passport {
        Passport::none()
    }
}

impl Drop for FakeMemory {
    fn drop(&mut self) {
        self.driver.drain();
    }
}

/// A raw pointer that crosses into queued work; the contract keeps what it points to alive until then.
#[derive(Clone, Copy)]
struct Raw(usize);

#[derive(Debug)]
struct FakeRegistration {
    faults: Arc<Mutex<Faults>>,
    bytes: usize,
}

impl Registration for FakeRegistration {}

impl Drop for FakeRegistration {
    fn drop(&mut self) {
        self.faults.lock().registered -= self.bytes;
    }
}

/// Copies rows between two raw places.
///
/// # Safety
/// Every row is readable or writable.
unsafe fn copy_rows(target: Raw, target_stride: usize, source: Raw, source_stride: usize, rows: Rows) {
    for row in 0..rows.count {
        let from = core::ptr::with_exposed_provenance::<u8>(source.0 + row * source_stride);
        let to = core::ptr::with_exposed_provenance_mut::<u8>(target.0 + row * target_stride);
        // SAFETY: the caller's contract.
        unsafe { core::ptr::copy(from, to, rows.size) };
    }
}

impl Driver for Fake {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>, DriverError> {
        let mut faults = self.faults.lock();
        faults.allocations += 1;
        if faults.fail_allocation == Some(faults.allocations) {
            return Err(DriverError::OutOfMemory);
        }
        let memory = HostMemory::map(bytes).map_err(|_| DriverError::OutOfMemory)?;
        // Content is unspecified: make that visible, and make the address usable from queued work.
        memory.fill(memory.address(), 0xa5, bytes);
        memory.as_ptr().expose_provenance();
        Ok(Box::new(FakeMemory { bytes: Arc::new(memory), driver: self.clone() }))
    }

    fn fill(&self, target: Place<'_>, value: u8, bytes: usize) -> Result<(), DriverError> {
        let address = Raw(target.address);
        self.queue(move || {
            let Raw(address) = address;
            // SAFETY: the range lies in a memory that lives: dropping it drains the queue first.
            unsafe { core::ptr::with_exposed_provenance_mut::<u8>(address).write_bytes(value, bytes) };
        });
        Ok(())
    }

    unsafe fn upload(&self, target: Place<'_>, source: *const c_void, rows: Rows) -> Result<(), DriverError> {
        let (to, from) = (Raw(target.address), Raw(source.expose_provenance()));
        // SAFETY: the target lies in a live memory, the source is the caller's until `synchronize`.
        self.queue(move || unsafe { copy_rows(to, rows.stride, from, rows.host_stride, rows) });
        Ok(())
    }

    unsafe fn upload_taking(&self, target: Place<'_>, source: *const c_void, rows: Rows) -> Result<(), DriverError> {
        let extent = rows.count.saturating_sub(1) * rows.host_stride + rows.size;
        let mut taken = vec![0_u8; if rows.is_empty() { 0 } else { extent }];
        // SAFETY: every row of the source is readable; the vector spans them all.
        unsafe {
            copy_rows(
                Raw(taken.as_mut_ptr().expose_provenance()),
                rows.host_stride,
                Raw(source.expose_provenance()),
                rows.host_stride,
                rows,
            );
        }
        let to = Raw(target.address);
        // SAFETY: the target lies in a live memory, the source belongs to the work.
        self.queue(move || unsafe {
            copy_rows(to, rows.stride, Raw(taken.as_ptr().expose_provenance()), rows.host_stride, rows)
        });
        Ok(())
    }

    unsafe fn download(&self, target: *mut c_void, source: Place<'_>, rows: Rows) -> Result<(), DriverError> {
        let (to, from) = (Raw(target.expose_provenance()), Raw(source.address));
        // SAFETY: as in `upload`, the other way round.
        self.queue(move || unsafe { copy_rows(to, rows.host_stride, from, rows.stride, rows) });
        Ok(())
    }

    fn copy(&self, target: Place<'_>, source: Place<'_>, bytes: usize) -> Result<bool, DriverError> {
        let (to, from, rows) = (Raw(target.address), Raw(source.address), Rows::one(bytes));
        // SAFETY: both lie in live memories.
        self.queue(move || unsafe { copy_rows(to, bytes, from, bytes, rows) });
        Ok(true)
    }

    fn mark(&self) -> Result<Box<dyn Mark>, DriverError> {
        self.drain();
        Ok(Box::new(Reached))
    }

    fn synchronize(&self) -> Result<(), DriverError> {
        self.drain();
        Ok(())
    }

    unsafe fn register(&self, range: HostRange<'_>) -> Result<Box<dyn Registration>, DriverError> {
        let mut faults = self.faults.lock();
        if faults.register_limit.is_some_and(|limit| faults.registered + range.bytes() > limit) {
            return Err(DriverError::Failed { what: "register", why: "limit".to_owned() });
        }
        faults.registered += range.bytes();
        Ok(Box::new(FakeRegistration { faults: Arc::clone(&self.faults), bytes: range.bytes() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_done_as_late_as_allowed() {
        let driver = Fake::default();
        let memory = driver.allocate(16).unwrap();
        let mut out = [0_u8; 16];
        let place = Place { memory: &*memory, address: memory.base() };
        driver.fill(place, 7, 16).unwrap();
        // SAFETY: 16 writable bytes that live until `synchronize`.
        unsafe { driver.download(out.as_mut_ptr().cast(), place, Rows::one(16)) }.unwrap();
        assert_eq!(out, [0; 16], "nothing ran yet");
        driver.synchronize().unwrap();
        assert_eq!(out, [7; 16]);
    }

    #[test]
    fn registration_has_a_limit_and_is_taken_back() {
        let driver = Fake::default();
        driver.limit_registration(100);
        let memory = HostMemory::map(4096).unwrap();
        let range = |bytes| memory.range(memory.address(), bytes).unwrap();
        // SAFETY: the mapping outlives the registrations.
        let first = unsafe { driver.register(range(80)) }.unwrap();
        // SAFETY: as above.
        assert!(unsafe { driver.register(range(80)) }.is_err());
        assert_eq!(driver.registered(), 80);
        drop(first);
        assert_eq!(driver.registered(), 0);
    }

    #[test]
    fn faults_on_demand() {
        let driver = Fake::default();
        driver.fail_allocation(2);
        assert!(driver.allocate(1).is_ok());
        assert_eq!(driver.allocate(1).unwrap_err(), DriverError::OutOfMemory);
        assert!(driver.allocate(1).is_ok());
    }
}
