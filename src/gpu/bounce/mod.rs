//! Copies from plain host memory by way of pinned memory, in front of another driver: several threads copy to pinned pieces while the link moves
//! others.
//!
//! Owns: which host memory is registered, and (in `queue`) the pieces, the threads and what waits for them.
//! Invariants: those of the contract. An upload from memory that is registered, and a small one, goes to the driver at once. Any other waits in the
//! queue, whose order is kept; a large one whose bytes are to be taken goes the same way and is waited for. Whatever touches device memory that an upload
//! in the queue is for waits for the queue first. A mark behind the queue takes its turn there, so nobody waits where it is made.
//! Threads: any; a lock holds what is registered, another the queue.
//! Does not: read a source that the driver could read itself as fast.
// UNSAFETY: the contract passes raw host memory; callers vouch for it until `synchronize`.
#![expect(unsafe_code, reason = "the contract passes raw host memory; callers vouch for it")]

mod ahead;
mod queue;

use core::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use parking_lot::RwLock;

use super::{Clock, Driver, DriverError, Elastic, ListedCopy, Mark, Memory, Place, Point, Registration, Rows, Sparse};
use crate::abi::inner::{self, Passport};
use crate::experts::HostRange;
use crate::graph::Ranges;
use queue::Queue;

/// Uploads below this are not worth a thread's waking.
const LEAST_BYTES: usize = 256 << 10;
/// Uploads whose bytes are taken at once: below this drivers copy them to pinned memory of their own, or it makes no difference.
const LEAST_TAKEN_BYTES: usize = 2 << 20;

/// The driver in front of another.
pub(crate) struct Bounce {
    queue: Arc<Queue>,
    /// Ascending by their start.
    registered: Arc<RwLock<Vec<Range<usize>>>>,
}

impl std::fmt::Debug for Bounce {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bounce({:?})", self.queue.driver())
    }
}

/// Puts it in front of a driver.
pub(crate) fn over(driver: Box<dyn Driver>) -> Box<dyn Driver> {
    Box::new(Bounce { queue: Arc::new(Queue::new(driver)), registered: Arc::default() })
}

impl Bounce {
    fn is_registered(&self, source: Range<usize>) -> bool {
        let mut reached = source.start;
        for range in self.registered.read().iter() {
            if range.contains(&reached) {
                reached = range.end;
            }
        }
        reached >= source.end
    }

    fn driver(&self) -> &dyn Driver {
        self.queue.driver()
    }

    /// Waits for the queue if it holds an upload to any of these bytes.
    fn settle_range(&self, place: Place<'_>, bytes: usize) -> Result<(), DriverError> {
        self.queue.settle_range(&(place.address..place.address.saturating_add(bytes)))
    }
}

/// Memory that waits for the queue before it goes.
#[derive(Debug)]
struct Waiting<M: ?Sized> {
    queue: Arc<Queue>,
    memory: Box<M>,
}

impl<M: Memory + ?Sized> Memory for Waiting<M> {
    fn base(&self) -> usize {
        self.memory.base()
    }

    fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    fn passport(&self) -> Passport {
        self.memory.passport()
    }
}

impl Elastic for Waiting<dyn Elastic> {
    fn reserved(&self) -> usize {
        self.memory.reserved()
    }

    fn unit(&self) -> usize {
        self.memory.unit()
    }

    fn resize(&mut self, bytes: usize) -> Result<(), DriverError> {
        if bytes < self.memory.bytes() {
            self.queue.settle()?;
        }
        self.memory.resize(bytes)
    }
}

impl Sparse for Waiting<dyn Sparse> {
    fn unit(&self) -> usize {
        self.memory.unit()
    }

    fn map(&self, ranges: &Ranges) -> Result<(), DriverError> {
        self.memory.map(ranges)
    }

    fn keep_only(&self, ranges: &Ranges) -> Result<(), DriverError> {
        self.queue.settle()?;
        self.memory.keep_only(ranges)
    }

    fn mapped_bytes(&self) -> usize {
        self.memory.mapped_bytes()
    }
}

impl<M: ?Sized> Drop for Waiting<M> {
    fn drop(&mut self) {
        // A failure stays for whoever asks next.
        self.queue.wait();
    }
}

/// A registration that uploads know of.
#[derive(Debug)]
struct Known {
    range: Range<usize>,
    registered: Arc<RwLock<Vec<Range<usize>>>>,
    _registration: Box<dyn Registration>,
}

impl Registration for Known {}

impl Drop for Known {
    fn drop(&mut self) {
        let mut registered = self.registered.write();
        if let Some(index) = registered.iter().position(|range| *range == self.range) {
            registered.remove(index);
        }
    }
}

impl Driver for Bounce {
    fn name(&self) -> &'static str {
        self.driver().name()
    }

    fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>, DriverError> {
        let memory = self.driver().allocate(bytes)?;
        Ok(Box::new(Waiting { queue: Arc::clone(&self.queue), memory }))
    }

    fn reserve(&self, bytes: usize) -> Result<Box<dyn Elastic>, DriverError> {
        let memory = self.driver().reserve(bytes)?;
        Ok(Box::new(Waiting { queue: Arc::clone(&self.queue), memory }))
    }

    fn sparse(&self, bytes: usize) -> Result<Box<dyn Sparse>, DriverError> {
        let memory = self.driver().sparse(bytes)?;
        Ok(Box::new(Waiting { queue: Arc::clone(&self.queue), memory }))
    }

    fn fill(&self, target: Place<'_>, value: u8, bytes: usize) -> Result<(), DriverError> {
        self.settle_range(target, bytes)?;
        self.driver().fill(target, value, bytes)
    }

    unsafe fn upload(&self, target: Place<'_>, source: *const c_void, rows: Rows) -> Result<(), DriverError> {
        let start = source.expose_provenance();
        let plain = rows.count == 1 && !self.is_registered(start..start.saturating_add(rows.size));
        // SAFETY: the row is readable until `synchronize`, which waits for the queue.
        if plain && rows.size >= LEAST_BYTES && unsafe { self.queue.upload(target, start, rows.size) } {
            return Ok(());
        }
        self.settle_range(target, rows.extent())?;
        if plain && rows.size < LEAST_BYTES {
            // Drivers refuse memory that is registered in part, and what is taken is not looked at later.
            // SAFETY: the caller's contract.
            return unsafe { self.driver().upload_taking(target, source, rows) };
        }
        // SAFETY: the caller's contract.
        unsafe { self.driver().upload(target, source, rows) }
    }

    unsafe fn upload_taking(&self, target: Place<'_>, source: *const c_void, rows: Rows) -> Result<(), DriverError> {
        let start = source.expose_provenance();
        // The host's inputs of a long pass, whose memory is too large to be pinned: drivers copy them at a fraction of the link's speed.
        let is_slow = rows.count == 1
            && rows.size >= LEAST_TAKEN_BYTES
            && !self.is_registered(start..start.saturating_add(rows.size))
            && !self.driver().is_pinned(source, rows.size);
        // SAFETY: the row is readable during the call, and `synchronize` waits for the queue.
        if is_slow && unsafe { self.queue.upload(target, start, rows.size) } {
            return self.synchronize();
        }
        self.settle_range(target, rows.extent())?;
        // SAFETY: the caller's contract.
        unsafe { self.driver().upload_taking(target, source, rows) }
    }

    fn is_pinned(&self, source: *const c_void, bytes: usize) -> bool {
        self.driver().is_pinned(source, bytes)
    }

    fn takes_plain_memory(&self) -> bool {
        true
    }

    fn order_before(&self, inner: &inner::Backend, seen: &AtomicU64) -> Result<(), DriverError> {
        self.driver().order_before(inner, seen)
    }

    fn point(&self, inner: &inner::Backend) -> Result<Point, DriverError> {
        self.driver().point(inner)
    }

    fn follow(&self, point: &Point) -> Result<(), DriverError> {
        self.queue.settle()?;
        self.driver().follow(point)
    }

    fn note_use(&self, inner: &inner::Backend) -> Result<(), DriverError> {
        self.driver().note_use(inner)
    }

    fn waits_for_uses(&self) -> bool {
        self.driver().waits_for_uses()
    }

    fn forget(&self, inner: &inner::Backend) {
        self.driver().forget(inner);
    }

    unsafe fn download(&self, target: *mut c_void, source: Place<'_>, rows: Rows) -> Result<(), DriverError> {
        self.settle_range(source, rows.extent())?;
        // SAFETY: the caller's contract.
        unsafe { self.driver().download(target, source, rows) }
    }

    fn copy(&self, target: Place<'_>, source: Place<'_>, bytes: usize) -> Result<bool, DriverError> {
        self.settle_range(target, bytes)?;
        self.settle_range(source, bytes)?;
        self.driver().copy(target, source, bytes)
    }

    fn copy_list(&self, copies: &[ListedCopy<'_>]) -> Result<bool, DriverError> {
        for copy in copies {
            self.settle_range(copy.target, copy.bytes)?;
            self.settle_range(copy.source, copy.bytes)?;
        }
        self.driver().copy_list(copies)
    }

    fn clock(&self) -> Result<Box<dyn Clock>, DriverError> {
        self.driver().clock()
    }

    fn mark(&self) -> Result<Box<dyn Mark>, DriverError> {
        self.queue.mark()
    }

    fn synchronize(&self) -> Result<(), DriverError> {
        self.queue.settle()?;
        self.driver().synchronize()
    }

    fn settle(&self) -> Result<(), DriverError> {
        self.queue.settle()?;
        self.driver().settle()
    }

    fn reads_host_memory(&self) -> bool {
        self.driver().reads_host_memory()
    }

    fn pins(&self) -> bool {
        self.driver().pins()
    }

    unsafe fn register(&self, range: HostRange<'_>) -> Result<Box<dyn Registration>, DriverError> {
        let start = range.as_ptr().addr();
        // SAFETY: the caller's contract.
        let registration = unsafe { self.driver().register(range) }?;
        let range = start..start.saturating_add(range.bytes());
        let mut registered = self.registered.write();
        let index = registered.partition_point(|known| known.start < range.start);
        registered.insert(index, range.clone());
        drop(registered);
        Ok(Box::new(Known { range, registered: Arc::clone(&self.registered), _registration: registration }))
    }
}

/// In front of the fake driver, for the driver suite.
#[cfg(test)]
pub(super) fn over_fake() -> Box<dyn Driver> {
    over(Box::new(super::fake::Fake::default()))
}

#[cfg(test)]
mod tests {
    use super::super::fake::Fake;
    use super::*;
    use crate::experts::HostMemory;

    fn pattern(bytes: usize, seed: usize) -> HostMemory {
        let memory = HostMemory::map(bytes).unwrap();
        let content: Vec<u8> =
            (0..bytes).map(|index| u8::try_from((index * 7 + index / 4099 + seed) % 251).unwrap()).collect();
        // SAFETY: the vector is readable for its length.
        unsafe { memory.write(memory.address(), content.as_ptr().cast(), bytes) }.unwrap();
        memory
    }

    fn content(memory: &HostMemory, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        // SAFETY: the vector is writable for its length.
        unsafe { memory.read(memory.address(), out.as_mut_ptr().cast(), bytes) };
        out
    }

    fn upload(driver: &dyn Driver, memory: &dyn Memory, offset: usize, source: &HostMemory, bytes: usize) {
        let place = Place { memory, address: memory.base() + offset };
        // SAFETY: the sources of these tests live until the driver was waited for.
        unsafe { driver.upload(place, source.as_ptr(), Rows::one(bytes)) }.unwrap();
    }

    /// More than all pieces together, at sizes that are no multiple of one, one copy over another: the last one holds.
    #[test]
    fn every_byte_arrives_in_the_order_of_the_uploads() {
        let fake = Fake::default();
        let driver = over(Box::new(fake.clone()));
        let bytes = queue::ring_bytes() + 3 * LEAST_BYTES + 17;
        let (first, second) = (pattern(bytes, 1), pattern(bytes, 2));
        let memory = driver.allocate(2 * bytes).unwrap();
        for round in 0..3 {
            upload(&*driver, &*memory, 0, &first, bytes);
            upload(&*driver, &*memory, bytes / 2, &second, bytes);
            let mark = driver.mark().unwrap();
            driver.synchronize().unwrap();
            assert!(mark.is_reached().unwrap(), "round {round}");
            let place = Place { memory: &*memory, address: memory.base() };
            let all = fake.read(place, bytes / 2 + bytes);
            assert!(all[..bytes / 2] == content(&first, bytes)[..bytes / 2], "round {round}");
            assert!(all[bytes / 2..] == content(&second, bytes)[..], "round {round}");
        }
    }

    #[test]
    fn what_touches_an_upload_under_way_waits_for_it() {
        let fake = Fake::default();
        let driver = over(Box::new(fake.clone()));
        let bytes = 5 << 20;
        let source = pattern(bytes, 3);
        let (memory, other) = (driver.allocate(bytes).unwrap(), driver.allocate(bytes).unwrap());
        let (at, to) =
            (Place { memory: &*memory, address: memory.base() }, Place { memory: &*other, address: other.base() });
        upload(&*driver, &*memory, 0, &source, bytes);
        driver.fill(at, 9, 100).unwrap();
        assert!(driver.copy(to, at, bytes).unwrap());
        let mut expected = content(&source, bytes);
        expected[..100].fill(9);
        driver.synchronize().unwrap();
        assert!(fake.read(to, bytes) == expected);
        // Memory that goes waits as well.
        upload(&*driver, &*memory, 0, &source, bytes);
        drop(memory);
        drop(other);
    }

    #[test]
    fn registered_memory_goes_to_the_driver_itself() {
        let fake = Fake::default();
        let driver = over(Box::new(fake.clone()));
        let bytes = 4 << 20;
        let source = pattern(bytes, 4);
        let memory = driver.allocate(bytes).unwrap();
        // SAFETY: the memory outlives the registration.
        let registration = unsafe { driver.register(source.range(source.address(), bytes).unwrap()) }.unwrap();
        let before = fake.registered();
        upload(&*driver, &*memory, 0, &source, bytes);
        driver.synchronize().unwrap();
        assert_eq!(fake.registered(), before, "no piece was made");
        drop(registration);
        upload(&*driver, &*memory, 0, &source, bytes);
        driver.synchronize().unwrap();
        assert_eq!(fake.registered(), queue::ring_bytes(), "the pieces are pinned");
        let place = Place { memory: &*memory, address: memory.base() };
        assert!(fake.read(place, bytes) == content(&source, bytes));
        drop(memory);
        drop(driver);
        assert_eq!(fake.registered(), 0);
    }

    /// A mask of a long pass: taken by way of the pieces, so that a link that repeats copies repeats fast ones.
    #[test]
    fn large_inputs_are_taken_by_way_of_the_pieces() {
        let fake = Fake::default();
        let driver = over(Box::new(fake.clone()));
        let bytes = queue::ring_bytes() + 12_345;
        let source = pattern(bytes, 7);
        let memory = driver.allocate(bytes).unwrap();
        let place = Place { memory: &*memory, address: memory.base() };
        // SAFETY: the source is readable for its length.
        let take = |bytes| unsafe { driver.upload_taking(place, source.as_ptr(), Rows::one(bytes)) }.unwrap();
        fake.pin_all(true);
        take(bytes);
        assert_eq!(fake.registered(), 0, "pinned memory goes to the driver itself");
        fake.pin_all(false);
        take(LEAST_TAKEN_BYTES - 1);
        assert_eq!(fake.registered(), 0, "so does what is small");
        let expected = content(&source, bytes);
        driver.fill(place, 0, bytes).unwrap();
        take(bytes);
        assert_eq!(fake.registered(), queue::ring_bytes(), "the pieces are pinned");
        source.fill(source.address(), 0xee, bytes).unwrap();
        assert!(fake.read(place, bytes) == expected, "the source may be reused at once");
    }

    #[test]
    fn without_pinned_memory_the_driver_copies_itself() {
        let fake = Fake::default();
        fake.limit_registration(100);
        let driver = over(Box::new(fake.clone()));
        let bytes = 3 << 20;
        let source = pattern(bytes, 5);
        let memory = driver.allocate(bytes).unwrap();
        upload(&*driver, &*memory, 0, &source, bytes);
        driver.synchronize().unwrap();
        let place = Place { memory: &*memory, address: memory.base() };
        assert!(fake.read(place, bytes) == content(&source, bytes));
    }

    #[test]
    fn a_failed_copy_is_told_once_and_ends_what_waits() {
        let fake = Fake::default();
        let driver = over(Box::new(fake.clone()));
        let bytes = 8 << 20;
        let source = pattern(bytes, 6);
        let memory = driver.allocate(bytes).unwrap();
        fake.fail_uploads(true);
        upload(&*driver, &*memory, 0, &source, bytes);
        assert!(driver.synchronize().is_err());
        fake.fail_uploads(false);
        driver.synchronize().unwrap();
        upload(&*driver, &*memory, 0, &source, bytes);
        driver.synchronize().unwrap();
        let place = Place { memory: &*memory, address: memory.base() };
        assert!(fake.read(place, bytes) == content(&source, bytes));
    }
}
