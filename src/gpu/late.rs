//! The driver for any device, late on purpose (`debug-late`): what a copy engine does without a GPU.
//!
//! Owns: a queue of copies and fills and the thread that does them, in order, after delays that look random.
//! Invariants: those of the contract, and nothing more: an operation has run when `synchronize` returns or its mark is reached, and rarely
//! before.
//! Threads: any; one of its own per device, which lives as long as the process, as drivers do.
//! Does not: compute, or copy by itself (`generic` does).
// UNSAFETY: the contract passes raw host memory, here to another thread; callers vouch for it until `synchronize`.
#![expect(unsafe_code, reason = "the contract passes raw host memory; callers vouch for it")]

use core::ffi::c_void;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::generic::Generic;
use super::{Driver, DriverError, Elastic, ListedCopy, Mark, Memory, Place, Registration, Rows, Sparse};
use crate::abi::inner::{self, Passport};
use crate::experts::HostRange;
use crate::graph::Ranges;

type Work = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    /// Each with the memory that it is about. The first stays in the list while it runs.
    works: Mutex<VecDeque<(Passport, Option<Work>)>>,
    /// Lists of copies, which run beside the uploads that are asked for next.
    beside: Mutex<Vec<(Passport, Work)>>,
    changed: Condvar,
    asked: AtomicU64,
    done: AtomicU64,
}

impl core::fmt::Debug for Queue {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Queue")
    }
}

impl Queue {
    /// Behind the lists.
    fn ask(&self, memory: Passport, work: impl FnOnce() + Send + 'static) {
        self.join();
        self.ask_beside(memory, work);
    }

    fn join(&self) {
        let lists = std::mem::take(&mut *self.beside.lock());
        lists.into_iter().for_each(|(memory, work)| self.ask_beside(memory, work));
    }

    fn ask_beside(&self, memory: Passport, work: impl FnOnce() + Send + 'static) {
        let mut works = self.works.lock();
        works.push_back((memory, Some(Box::new(work))));
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.changed.notify_all();
    }

    fn wait(&self, number: u64) {
        let mut works = self.works.lock();
        while self.done.load(Ordering::Acquire) < number {
            self.changed.wait(&mut works);
        }
    }

    /// Waits for what is about this memory; the order of works about different ones shows to nobody.
    fn wait_for_memory(&self, memory: Passport) {
        self.join();
        let mut works = self.works.lock();
        while works.iter().any(|(other, _)| *other == memory) {
            self.changed.wait(&mut works);
        }
    }

    fn wait_for_all(&self) {
        self.join();
        self.wait(self.asked.load(Ordering::Relaxed));
    }

    fn run(&self, mut random: u64) {
        loop {
            let work = {
                let mut works = self.works.lock();
                loop {
                    if let Some(work) = works.front_mut().and_then(|(_, work)| work.take()) {
                        break work;
                    }
                    self.changed.wait(&mut works);
                }
            };
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            // Most run soon, some after several blocks have gone by, a few after several graphs.
            let us = match (random >> 16) % 8 {
                0..4 => 0,
                4..7 => (random >> 24) % 100,
                _ if !(random >> 20).is_multiple_of(16) => (random >> 24) % 1000,
                _ => (random >> 24) % 30_000,
            };
            if us > 0 {
                std::thread::sleep(Duration::from_micros(us));
            }
            work();
            let mut works = self.works.lock();
            works.pop_front();
            self.done.fetch_add(1, Ordering::Release);
            self.changed.notify_all();
        }
    }
}

/// Memory and copies through ggml's interface, late.
#[derive(Debug)]
pub(crate) struct Late {
    generic: Generic,
    queue: Arc<Queue>,
}

impl Late {
    /// A driver over the inner device's buffer type; `None` if the system has no thread for it.
    pub(crate) fn new(buffer_type: inner::BufferType, is_cpu: bool, pins: bool, seed: u32) -> Option<Self> {
        let queue = Arc::new(Queue::default());
        let random = u64::from(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let worker = Arc::clone(&queue);
        let thread = std::thread::Builder::new().name("ggml-moe-late".to_owned());
        thread.spawn(move || worker.run(random)).ok()?;
        Some(Self { generic: Generic::new(buffer_type, is_cpu, pins), queue })
    }
}

/// Memory that waits for the queue before it goes.
#[derive(Debug)]
struct LateMemory {
    memory: Box<dyn Memory>,
    queue: Arc<Queue>,
}

impl Memory for LateMemory {
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

impl Drop for LateMemory {
    fn drop(&mut self) {
        self.queue.wait_for_all();
    }
}

/// Memory whose size changes: what goes is waited for.
#[derive(Debug)]
struct LateElastic {
    memory: Box<dyn Elastic>,
    queue: Arc<Queue>,
}

impl Memory for LateElastic {
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

impl Elastic for LateElastic {
    fn reserved(&self) -> usize {
        self.memory.reserved()
    }

    fn unit(&self) -> usize {
        self.memory.unit()
    }

    fn resize(&mut self, bytes: usize) -> Result<(), DriverError> {
        if bytes < self.bytes() {
            self.queue.wait_for_all();
        }
        self.memory.resize(bytes)
    }
}

impl Drop for LateElastic {
    fn drop(&mut self) {
        self.queue.wait_for_all();
    }
}

/// Memory behind parts of its addresses: what goes is waited for.
#[derive(Debug)]
struct LateSparse {
    memory: Box<dyn Sparse>,
    queue: Arc<Queue>,
}

impl Memory for LateSparse {
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

impl Sparse for LateSparse {
    fn unit(&self) -> usize {
        self.memory.unit()
    }

    fn map(&self, ranges: &Ranges) -> Result<(), DriverError> {
        self.memory.map(ranges)
    }

    fn keep_only(&self, ranges: &Ranges) -> Result<(), DriverError> {
        self.queue.wait_for_all();
        self.memory.keep_only(ranges)
    }

    fn mapped_bytes(&self) -> usize {
        self.memory.mapped_bytes()
    }
}

impl Drop for LateSparse {
    fn drop(&mut self) {
        self.queue.wait_for_all();
    }
}

/// A place in the queue.
#[derive(Debug)]
struct LateMark {
    number: u64,
    queue: Arc<Queue>,
}

impl Mark for LateMark {
    fn is_reached(&self) -> Result<bool, DriverError> {
        Ok(self.queue.done.load(Ordering::Acquire) >= self.number)
    }
}

impl Driver for Late {
    fn name(&self) -> &'static str {
        "ggml, late"
    }

    fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>, DriverError> {
        let memory = self.generic.allocate(bytes)?;
        Ok(Box::new(LateMemory { memory, queue: Arc::clone(&self.queue) }))
    }

    fn reserve(&self, bytes: usize) -> Result<Box<dyn Elastic>, DriverError> {
        let memory = self.generic.reserve(bytes)?;
        Ok(Box::new(LateElastic { memory, queue: Arc::clone(&self.queue) }))
    }

    fn sparse(&self, bytes: usize) -> Result<Box<dyn Sparse>, DriverError> {
        // Late devices are those of the tests, which compute in memory of the host.
        let memory = self.generic.sparse_in_host_memory(bytes)?;
        Ok(Box::new(LateSparse { memory, queue: Arc::clone(&self.queue) }))
    }

    fn fill(&self, target: Place<'_>, value: u8, bytes: usize) -> Result<(), DriverError> {
        let (passport, address) = (target.memory.passport(), target.address);
        // SAFETY: the contract says that the range lies in the memory, which waits for the queue before it goes.
        self.queue.ask(passport, move || unsafe { passport.fill(address, value, bytes) });
        Ok(())
    }

    unsafe fn upload(&self, target: Place<'_>, source: *const c_void, rows: Rows) -> Result<(), DriverError> {
        if !rows.is_empty() {
            let (passport, address, source) = (target.memory.passport(), target.address, source.expose_provenance());
            self.queue.ask_beside(passport, move || {
                let source = core::ptr::with_exposed_provenance(source);
                // SAFETY: the range lies in the memory, which waits for the queue before it goes; the source is readable until `synchronize`.
                unsafe { passport.write(address, source, rows) };
            });
        }
        Ok(())
    }

    unsafe fn upload_taking(&self, target: Place<'_>, source: *const c_void, rows: Rows) -> Result<(), DriverError> {
        // At once, beside the uploads of the cache: a synchronization would end them all with every token's inputs.
        self.queue.wait_for_memory(target.memory.passport());
        // SAFETY: the caller's contract.
        unsafe { self.generic.upload(target, source, rows) }
    }

    fn waits_for_uses(&self) -> bool {
        true // the late device of the tests waits for its streams before it frees memory
    }

    unsafe fn download(&self, target: *mut c_void, source: Place<'_>, rows: Rows) -> Result<(), DriverError> {
        if !rows.is_empty() {
            let (passport, address, target) = (source.memory.passport(), source.address, target.expose_provenance());
            self.queue.ask(passport, move || {
                let target = core::ptr::with_exposed_provenance_mut(target);
                // SAFETY: as in `upload`; the target is writable until `synchronize`.
                unsafe { passport.read(address, target, rows) };
            });
        }
        Ok(())
    }

    fn copy(&self, target: Place<'_>, source: Place<'_>, bytes: usize) -> Result<bool, DriverError> {
        self.queue.wait_for_all(); // whether it can be done is known at once only by doing it
        self.generic.copy(target, source, bytes)
    }

    fn copy_list(&self, copies: &[ListedCopy<'_>]) -> Result<bool, DriverError> {
        // Whether it can be done is known at once only by doing it; the first stands for all, and is done again.
        let Some(first) = copies.first() else { return Ok(true) };
        if !self.copy(first.target, first.source, first.bytes)? {
            return Ok(false);
        }
        let mut beside = self.queue.beside.lock();
        for copy in copies {
            let (from, to) = (copy.source.memory.passport(), copy.target.memory.passport());
            let (source, target, bytes) = (copy.source.address, copy.target.address, copy.bytes);
            let work = move || {
                // SAFETY: both ranges lie in their memories, which wait for the queue before they go.
                let _ = unsafe { Passport::copy((from, source), (to, target), bytes) };
            };
            beside.push((to, Box::new(work)));
        }
        Ok(true)
    }

    fn mark(&self) -> Result<Box<dyn Mark>, DriverError> {
        self.queue.join();
        Ok(Box::new(LateMark { number: self.queue.asked.load(Ordering::Relaxed), queue: Arc::clone(&self.queue) }))
    }

    fn synchronize(&self) -> Result<(), DriverError> {
        self.queue.wait_for_all();
        Ok(())
    }

    unsafe fn register(&self, range: HostRange<'_>) -> Result<Box<dyn Registration>, DriverError> {
        // SAFETY: the caller's contract.
        unsafe { self.generic.register(range) }
    }
}
