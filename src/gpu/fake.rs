//! A driver in process, for tests: deterministic, with faults on demand. Work is done as late as the contract allows, at
//! `synchronize` or when a memory is dropped, so that a caller who forgets to wait reads old bytes.

use core::ffi::c_void;
use std::sync::Arc;

use parking_lot::Mutex;

use super::pages::{Pages, SparsePages};
use super::{
    Driver, DriverError, Elastic, ListedCopy, Mark, Memory, Place, Reached, Registration, Rows, Sparse, elastic_size,
};
use crate::abi::inner::Passport;
use crate::experts::{HostMemory, HostRange};
use crate::graph::Ranges;

type Work = Box<dyn FnOnce() + Send>;

/// What fails next.
#[derive(Debug, Default)]
struct Faults {
    allocations: u32,
    fail_allocation: Option<u32>,
    /// Bytes behind reserved addresses, and the most that there may be.
    mapped: usize,
    map_limit: Option<usize>,
    fail_uploads: bool,
    registered: usize,
    /// All memory counts as pinned.
    all_pinned: bool,
    register_limit: Option<usize>,
}

impl Faults {
    /// Counts memory that comes behind reserved addresses.
    fn come(&mut self, bytes: usize) -> Result<(), DriverError> {
        self.allocations += 1;
        let mapped = self.mapped + bytes;
        if self.fail_allocation == Some(self.allocations) || self.map_limit.is_some_and(|limit| mapped > limit) {
            return Err(DriverError::OutOfMemory);
        }
        self.mapped = mapped;
        Ok(())
    }
}

/// The fake driver.
#[derive(Clone, Default)]
pub(crate) struct Fake {
    queue: Arc<Mutex<Vec<Work>>>,
    /// Lists of copies, which run beside the uploads that are asked for next.
    beside: Arc<Mutex<Vec<Work>>>,
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

    /// Uploads fail from now on, or no more.
    pub(crate) fn fail_uploads(&self, fail: bool) {
        self.faults.lock().fail_uploads = fail;
    }

    /// All memory of the host counts as pinned, or none.
    pub(crate) fn pin_all(&self, pinned: bool) {
        self.faults.lock().all_pinned = pinned;
    }

    /// No more than this many bytes can be registered at once.
    pub(crate) fn limit_registration(&self, bytes: usize) {
        self.faults.lock().register_limit = Some(bytes);
    }

    /// No more than this many bytes can lie behind reserved addresses at once.
    pub(crate) fn limit_mapping(&self, bytes: usize) {
        self.faults.lock().map_limit = Some(bytes);
    }

    /// Bytes behind reserved addresses now.
    pub(crate) fn mapped(&self) -> usize {
        self.faults.lock().mapped
    }

    /// Bytes registered now.
    pub(crate) fn registered(&self) -> usize {
        self.faults.lock().registered
    }

    /// What lies at a place, after all work.
    pub(crate) fn read(&self, place: Place<'_>, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        // SAFETY: the vector lives until the queue is empty, below.
        let asked = unsafe { self.download(out.as_mut_ptr().cast(), place, Rows::one(bytes)) };
        self.drain();
        assert!(asked.is_ok());
        out
    }

    fn queue(&self, work: impl FnOnce() + Send + 'static) {
        self.join();
        self.queue.lock().push(Box::new(work));
    }

    fn join(&self) {
        let lists = std::mem::take(&mut *self.beside.lock());
        self.queue.lock().extend(lists);
    }

    fn drain(&self) {
        self.join();
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

/// Reserved addresses. What comes is poisoned; what goes ends the process of whoever still touches it.
#[derive(Debug)]
struct FakeElastic {
    pages: Pages,
    driver: Fake,
}

impl Memory for FakeElastic {
    fn base(&self) -> usize {
        self.pages.base()
    }

    fn bytes(&self) -> usize {
        self.pages.bytes()
    }

    fn passport(&self) -> Passport {
        Passport::none()
    }
}

impl Elastic for FakeElastic {
    fn reserved(&self) -> usize {
        self.pages.reserved()
    }

    fn unit(&self) -> usize {
        self.pages.unit()
    }

    fn resize(&mut self, bytes: usize) -> Result<(), DriverError> {
        let before = self.pages.bytes();
        let after = elastic_size(bytes, self.unit(), self.reserved());
        if bytes > self.reserved() {
            return Err(DriverError::OutOfMemory);
        }
        if after < before {
            self.driver.drain();
        }
        let mut faults = self.driver.faults.lock();
        if after > before {
            faults.come(after - before)?;
        } else {
            faults.mapped -= before - after;
        }
        self.pages.resize(after)?;
        if after > before {
            let start = core::ptr::with_exposed_provenance_mut::<u8>(self.pages.base() + before);
            // SAFETY: these pages have just come.
            unsafe { start.write_bytes(0xa5, after - before) };
        }
        Ok(())
    }
}

impl Drop for FakeElastic {
    fn drop(&mut self) {
        self.driver.drain();
        self.driver.faults.lock().mapped -= self.pages.bytes();
    }
}

/// Memory behind parts of its addresses, as [`FakeElastic`].
#[derive(Debug)]
struct FakeSparse {
    pages: SparsePages,
    driver: Fake,
}

impl FakeSparse {
    fn poison(&self, ranges: &Ranges) {
        for run in ranges.iter() {
            let start = core::ptr::with_exposed_provenance_mut::<u8>(self.pages.base() + run.start);
            // SAFETY: these pages have just come.
            unsafe { start.write_bytes(0xa5, run.len()) };
        }
    }
}

impl Memory for FakeSparse {
    fn base(&self) -> usize {
        self.pages.base()
    }

    fn bytes(&self) -> usize {
        self.pages.bytes()
    }

    fn passport(&self) -> Passport {
        Passport::none()
    }
}

impl Sparse for FakeSparse {
    fn unit(&self) -> usize {
        self.pages.unit()
    }

    fn map(&self, ranges: &Ranges) -> Result<(), DriverError> {
        let missing = ranges.without(&self.pages.mapped());
        self.driver.faults.lock().come(missing.bytes())?;
        self.pages.map(&missing)?;
        self.poison(&missing);
        Ok(())
    }

    fn keep_only(&self, ranges: &Ranges) -> Result<(), DriverError> {
        self.driver.drain();
        let before = self.mapped_bytes();
        self.pages.keep_only(ranges)?;
        self.driver.faults.lock().mapped -= before - self.mapped_bytes();
        Ok(())
    }

    fn mapped_bytes(&self) -> usize {
        self.pages.mapped().bytes()
    }
}

impl Drop for FakeSparse {
    fn drop(&mut self) {
        self.driver.drain();
        self.driver.faults.lock().mapped -= self.mapped_bytes();
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
        memory.fill(memory.address(), 0xa5, bytes).map_err(|_| DriverError::OutOfMemory)?;
        memory.as_ptr().expose_provenance();
        Ok(Box::new(FakeMemory { bytes: Arc::new(memory), driver: self.clone() }))
    }

    fn reserve(&self, bytes: usize) -> Result<Box<dyn Elastic>, DriverError> {
        Ok(Box::new(FakeElastic { pages: Pages::reserve(bytes)?, driver: self.clone() }))
    }

    fn sparse(&self, bytes: usize) -> Result<Box<dyn Sparse>, DriverError> {
        let mut faults = self.faults.lock();
        let pages = SparsePages::new(bytes)?;
        faults.come(pages.bytes())?;
        let memory = FakeSparse { pages, driver: self.clone() };
        memory.poison(&memory.pages.mapped());
        Ok(Box::new(memory))
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
        if self.faults.lock().fail_uploads {
            return Err(DriverError::Failed { what: "upload", why: "asked for".to_owned() });
        }
        let (to, from) = (Raw(target.address), Raw(source.expose_provenance()));
        // SAFETY: the target lies in a live memory, the source is the caller's until `synchronize`.
        let work = move || unsafe { copy_rows(to, rows.stride, from, rows.host_stride, rows) };
        self.queue.lock().push(Box::new(work)); // in front of lists asked for before, as is allowed
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

    fn is_pinned(&self, _source: *const c_void, _bytes: usize) -> bool {
        self.faults.lock().all_pinned
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

    fn copy_list(&self, copies: &[ListedCopy<'_>]) -> Result<bool, DriverError> {
        for copy in copies {
            let (to, from, rows) = (Raw(copy.target.address), Raw(copy.source.address), Rows::one(copy.bytes));
            // SAFETY: both lie in live memories.
            self.beside.lock().push(Box::new(move || unsafe { copy_rows(to, rows.size, from, rows.size, rows) }));
        }
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

    fn pins(&self) -> bool {
        true
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
    fn memory_that_fails_to_come_changes_nothing() {
        let driver = Fake::default();
        driver.limit_mapping(1 << 20);
        let mut memory = driver.reserve(2 << 20).unwrap();
        memory.resize(900 << 10).unwrap();
        let before = memory.bytes();
        assert!(before >= 900 << 10 && driver.mapped() == before);
        assert_eq!(memory.resize(2 << 20).unwrap_err(), DriverError::OutOfMemory);
        assert_eq!((memory.bytes(), driver.mapped()), (before, before));
        driver.fail_allocation(1);
        assert!(memory.resize(before + 1).is_err() && memory.bytes() == before);
        memory.resize(before + 1).unwrap();
        drop(memory);
        assert_eq!(driver.mapped(), 0);
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
