//! What waits for pinned pieces, and the threads that copy to them.
//!
//! Owns: a ring of pinned pieces, made with the first upload that needs it; the uploads, cut to pieces, and marks that wait; the threads.
//! Invariants: pieces and marks are given to the driver in the order of the queue, each when all before it were. A piece of the ring is written again when
//! the driver's mark behind its last copy is reached. After a failure everything that waits is given up; the failure is told once.
//! Threads: named `ggml-moe-copy`, as many as the processors allow, six at most, joined when this is dropped. A panic in one is a failure, and the
//! driver copies everything itself from then on. The lock is held for a look or a change and while the driver is given a copy, which waits for nothing;
//! not while bytes are copied or asked for or a mark is waited for.
// UNSAFETY: raw host memory is copied; who asked for the upload vouches for it.
#![expect(unsafe_code, reason = "raw host memory is copied; who asked for the upload vouches for it")]

use core::ffi::c_void;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::super::{Driver, DriverError, Mark, Memory, Place, Registration, Rows};
use super::ahead::Ahead;
use crate::abi::inner::{self, Passport};
use crate::experts::HostMemory;
use crate::experts::mapped::will_need;
use crate::telemetry::log;

/// Bytes of a piece.
const PIECE_BYTES: usize = 1 << 20;
/// Pieces of the ring.
const PIECES: usize = 32;
/// Threads at most; one core copies some 10 GB/s.
const MOST_THREADS: usize = 6;
/// Time between two looks at a mark.
const LOOK: Duration = Duration::from_micros(30);

/// Bytes of the ring.
#[cfg(test)]
pub(super) fn ring_bytes() -> usize {
    PIECES * PIECE_BYTES
}

/// The queue in front of a driver.
#[derive(Debug)]
pub(super) struct Queue {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    driver: Box<dyn Driver>,
    state: Mutex<State>,
    /// Something waits, or the end has come.
    work: Condvar,
    /// Something was given to the driver.
    given: Condvar,
}

#[derive(Debug, Default)]
struct State {
    items: VecDeque<Item>,
    /// The number of the first item, and of the first that nobody looked at to copy it.
    first: u64,
    next: u64,
    ahead: Ahead,
    /// Pieces that were taken so far: their places in the ring follow each other.
    taken: usize,
    /// Pieces that were taken and not given to the driver.
    under_way: usize,
    /// Threads that copy now.
    copying: usize,
    /// They copy what was given up: nobody may take the places of the ring meanwhile.
    drains: bool,
    ring: Option<Arc<Ring>>,
    /// What the driver still does with each piece of the ring.
    busy: Vec<Option<Arc<dyn Mark>>>,
    failed: Option<DriverError>,
    /// No ring can be had, or a thread ended.
    is_off: bool,
    ends: bool,
}

/// The pinned pieces. The registration is dropped first.
#[derive(Debug)]
struct Ring {
    _registration: Option<Box<dyn Registration>>,
    memory: HostMemory,
}

#[derive(Debug)]
enum Item {
    Piece { source: usize, target: Target, bytes: usize, step: Step },
    Mark(Arc<Turn>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Waiting,
    /// Being copied to a piece, or there.
    Copying,
    Copied(usize),
}

/// A place on the device that outlives the borrow it came with; the memory waits for the queue before it goes.
#[derive(Clone, Copy, Debug)]
struct Target {
    base: usize,
    bytes: usize,
    passport: Passport,
    address: usize,
}

impl Memory for Target {
    fn base(&self) -> usize {
        self.base
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn passport(&self) -> Passport {
        self.passport
    }
}

/// A mark that takes its turn in the queue.
#[derive(Debug, Default)]
struct Turn {
    mark: OnceLock<Result<Box<dyn Mark>, DriverError>>,
}

#[derive(Debug)]
struct TurnMark {
    turn: Arc<Turn>,
    shared: Arc<Shared>,
}

impl Mark for TurnMark {
    fn is_reached(&self) -> Result<bool, DriverError> {
        match self.turn.mark.get() {
            None => Ok(false),
            Some(Ok(mark)) => mark.is_reached(),
            Some(Err(error)) => Err(error.clone()),
        }
    }

    fn hold(&self, inner: &inner::Backend) -> Result<(), DriverError> {
        let mut state = self.shared.state.lock();
        while self.turn.mark.get().is_none() {
            self.shared.given.wait(&mut state);
        }
        drop(state);
        match self.turn.mark.get() {
            Some(Ok(mark)) => mark.hold(inner),
            Some(Err(error)) => Err(error.clone()),
            None => Ok(()),
        }
    }
}

impl Queue {
    /// A queue that has nothing yet but the driver.
    pub(super) fn new(driver: Box<dyn Driver>) -> Self {
        let (work, given) = (Condvar::new(), Condvar::new());
        let shared = Shared { driver, state: Mutex::default(), work, given };
        Self { shared: Arc::new(shared), threads: Mutex::default() }
    }

    /// The driver behind it.
    pub(super) fn driver(&self) -> &dyn Driver {
        &*self.shared.driver
    }

    /// Takes an upload; false if the driver is to do it itself.
    ///
    /// # Safety
    /// The source is readable for `bytes` until the queue was waited for.
    pub(super) unsafe fn upload(&self, target: Place<'_>, source: usize, bytes: usize) -> bool {
        let mut state = self.shared.state.lock();
        if state.ring.is_none() && !state.is_off {
            drop(state);
            self.start();
            state = self.shared.state.lock();
        }
        if state.is_off {
            return false;
        }
        let memory = target.memory;
        let mut done = 0;
        while done < bytes {
            let piece = PIECE_BYTES.min(bytes - done);
            let address = target.address + done;
            let target = Target { base: memory.base(), bytes: memory.bytes(), passport: memory.passport(), address };
            state.items.push_back(Item::Piece { source: source + done, target, bytes: piece, step: Step::Waiting });
            done += piece;
        }
        drop(state);
        self.shared.work.notify_all();
        true
    }

    /// Makes the ring and the threads, once.
    fn start(&self) {
        let mut threads = self.threads.lock();
        if !threads.is_empty() {
            return;
        }
        let ring = self.ring().and_then(|ring| {
            let processors = std::thread::available_parallelism().map_or(1, usize::from);
            for _ in 0..(processors - 1).clamp(1, MOST_THREADS) {
                let shared = Arc::clone(&self.shared);
                let thread = std::thread::Builder::new().name("ggml-moe-copy".to_owned());
                threads.extend(thread.spawn(move || shared.run()));
            }
            if threads.is_empty() { Err("no thread".to_owned()) } else { Ok(ring) }
        });
        let mut state = self.shared.state.lock();
        match ring {
            Ok(ring) => {
                state.busy = vec![None; PIECES];
                state.ring = Some(Arc::new(ring));
            }
            Err(why) => {
                state.is_off = true;
                drop(state);
                log::info(&format!("memory that is not pinned is copied by the driver: {why}"));
            }
        }
    }

    fn ring(&self) -> Result<Ring, String> {
        let memory = HostMemory::map(PIECES * PIECE_BYTES).map_err(|error| error.to_string())?;
        memory.as_ptr().expose_provenance();
        let range = memory.range(memory.address(), PIECES * PIECE_BYTES).ok_or("no range")?;
        // SAFETY: the ring drops the registration before the memory.
        let registration = match unsafe { self.driver().register(range) } {
            Ok(registration) => Some(registration),
            // Nothing is gained there but that the tests run this.
            Err(DriverError::Unsupported(_)) => None,
            Err(error) => return Err(error.to_string()),
        };
        Ok(Ring { _registration: registration, memory })
    }

    /// Marks the place behind everything asked for so far.
    pub(super) fn mark(&self) -> Result<Box<dyn Mark>, DriverError> {
        let mut state = self.shared.state.lock();
        if let Some(error) = state.failed.take() {
            return Err(error);
        }
        if state.items.is_empty() {
            return self.driver().mark();
        }
        let turn = Arc::new(Turn::default());
        state.items.push_back(Item::Mark(Arc::clone(&turn)));
        Ok(Box::new(TurnMark { turn, shared: Arc::clone(&self.shared) }))
    }

    /// Waits until everything was given to the driver; tells a failure.
    pub(super) fn settle(&self) -> Result<(), DriverError> {
        let mut state = self.wait_until(State::is_idle);
        state.failed.take().map_or(Ok(()), Err)
    }

    /// Waits until everything was given to the driver, or was given up.
    pub(super) fn wait(&self) {
        drop(self.wait_until(State::is_idle));
    }

    /// Waits until no upload to any of these bytes waits; tells a failure if one did.
    pub(super) fn settle_range(&self, wanted: &Range<usize>) -> Result<(), DriverError> {
        let touches = |item: &Item| match item {
            Item::Piece { target, bytes, .. } => {
                target.address < wanted.end && wanted.start < target.address.saturating_add(*bytes)
            }
            Item::Mark(_) => false,
        };
        if !self.shared.state.lock().items.iter().any(touches) {
            return Ok(());
        }
        let mut state = self.wait_until(|state| !state.items.iter().any(touches));
        state.failed.take().map_or(Ok(()), Err)
    }

    fn wait_until(&self, is_good: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let mut state = self.shared.state.lock();
        while !is_good(&state) {
            self.shared.given.wait(&mut state);
        }
        state
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.wait();
        self.shared.state.lock().ends = true;
        self.shared.work.notify_all();
        for thread in self.threads.get_mut().drain(..) {
            // A thread catches its own panics.
            let _ = thread.join();
        }
        // The device may still read the ring.
        if self.driver().synchronize().is_err() {
            log::debug("the driver could not be waited for at its end");
        }
        let mut state = self.shared.state.lock();
        state.busy.clear();
        drop(state.ring.take());
    }
}

impl Shared {
    fn run(&self) {
        let copied = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| while self.copy_one() {}));
        if copied.is_err() {
            let mut state = self.state.lock();
            state.is_off = true;
            self.fail(&mut state, DriverError::Failed { what: "a copy", why: "a thread of ours panicked".to_owned() });
        }
    }

    /// Copies one piece and gives the driver what is ready; false at the end.
    fn copy_one(&self) -> bool {
        let mut state = self.state.lock();
        let (number, source, bytes) = loop {
            if state.ends {
                return false;
            }
            if let Some(found) = state.take_waiting() {
                break found;
            }
            self.work.wait(&mut state);
        };
        let Some(ring) = state.ring.clone() else { return false };
        let slot = state.taken % PIECES;
        state.taken += 1;
        state.under_way += 1;
        state.copying += 1;
        let busy = state.busy[slot].take();
        let soon = state.take_soon(number);
        drop(state);
        soon.into_iter().for_each(|(source, bytes)| will_need(source, bytes));
        // Counts the end of the copy also when it ends in a panic.
        let copying = Copying(self);
        let reached = busy.map_or(Ok(()), |mark| wait_for(&*mark));
        if reached.is_ok() {
            let from = core::ptr::with_exposed_provenance::<c_void>(source);
            // SAFETY: who asked for the upload keeps the source readable until the queue was waited for.
            let written = unsafe { ring.memory.write(ring.memory.address() + slot * PIECE_BYTES, from, bytes) };
            debug_assert!(written.is_ok());
        }
        let mut state = copying.end();
        match reached {
            Ok(()) => {
                state.note_copied(number, slot);
                self.give(&mut state, &ring);
            }
            Err(error) => self.fail(&mut state, error),
        }
        true
    }

    /// Gives the driver what is ready, in order.
    fn give(&self, state: &mut State, ring: &Ring) {
        loop {
            let outcome = match state.items.front() {
                Some(Item::Piece { target, bytes, step: Step::Copied(slot), .. }) => {
                    let (target, bytes, slot) = (*target, *bytes, *slot);
                    let piece = core::ptr::with_exposed_provenance(ring.memory.address() + slot * PIECE_BYTES);
                    let place = Place { memory: &target, address: target.address };
                    // SAFETY: the piece is written again when the mark behind this is reached.
                    let given = unsafe { self.driver.upload(place, piece, Rows::one(bytes)) };
                    given.and_then(|()| self.driver.mark()).map(|mark| state.busy[slot] = Some(Arc::from(mark)))
                }
                Some(Item::Mark(turn)) => {
                    // Set here only.
                    let _ = turn.mark.set(self.driver.mark());
                    Ok(())
                }
                _ => break,
            };
            if let Err(error) = outcome {
                return self.fail(state, error);
            }
            if matches!(state.items.pop_front(), Some(Item::Piece { .. })) {
                state.under_way -= 1;
                self.work.notify_one(); // there may be a place in the ring again
            }
            state.first += 1;
        }
        self.given.notify_all();
    }

    /// Gives up what waits.
    fn fail(&self, state: &mut State, error: DriverError) {
        for item in state.items.drain(..) {
            state.first += 1;
            if let Item::Mark(turn) = item {
                let _ = turn.mark.set(Err(error.clone()));
            }
        }
        state.under_way = 0;
        state.drains = state.copying > 0;
        state.failed.get_or_insert(error);
        self.given.notify_all();
    }
}

/// A copy under way.
struct Copying<'a>(&'a Shared);

impl<'a> Copying<'a> {
    fn end(self) -> MutexGuard<'a, State> {
        let shared = self.0;
        drop(self);
        shared.state.lock()
    }
}

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.copying -= 1;
        if state.copying == 0 && state.drains {
            state.drains = false;
            self.0.work.notify_all();
        }
        self.0.given.notify_all();
    }
}

impl State {
    fn is_idle(&self) -> bool {
        self.items.is_empty() && self.copying == 0
    }

    /// The first piece that nobody copies; its number, source and bytes. No more are taken than the ring has pieces.
    fn take_waiting(&mut self) -> Option<(u64, usize, usize)> {
        if self.under_way >= PIECES || self.drains {
            return None;
        }
        self.next = self.next.max(self.first);
        let skipped = usize::try_from(self.next - self.first).ok()?;
        for item in self.items.iter_mut().skip(skipped) {
            let number = self.next;
            self.next += 1;
            if let Item::Piece { source, bytes, step, .. } = item {
                *step = Step::Copying;
                return Some((number, *source, *bytes));
            }
        }
        None
    }

    /// Sources and bytes that are to be asked for when a thread takes the item of this number.
    fn take_soon(&mut self, number: u64) -> Vec<(usize, usize)> {
        let wanted = self.ahead.begin(number, self.first + self.items.len() as u64);
        let piece = |number: u64| match self.items.get(usize::try_from(number.checked_sub(self.first)?).ok()?)? {
            Item::Piece { source, bytes, .. } => Some((*source, *bytes)),
            Item::Mark(_) => None,
        };
        wanted.filter_map(piece).collect()
    }

    /// A piece lies in the ring; after a failure nobody waits for it any more.
    fn note_copied(&mut self, number: u64, slot: usize) {
        let index = number.checked_sub(self.first).and_then(|index| usize::try_from(index).ok());
        if let Some(Item::Piece { step, .. }) = index.and_then(|index| self.items.get_mut(index)) {
            *step = Step::Copied(slot);
        }
    }
}

fn wait_for(mark: &dyn Mark) -> Result<(), DriverError> {
    while !mark.is_reached()? {
        std::thread::sleep(LOOK);
    }
    Ok(())
}
