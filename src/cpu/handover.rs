//! How threads hand work to each other: tasks that are taken one by one, latches between them, and a bell for threads without work.
//!
//! Owns: every atomic of the team that orders memory. Nothing here knows what a task does.
//! Invariants:
//! - A task is taken once. Between [`Tasks::publish`] and the end of its last task a job's data is only read; whoever took a task keeps
//!   the job from ending, so a thread that comes late and takes a task of the next job sees that job's data.
//! - Nobody looks at a job's data without having taken a task of it.
//! - A thread that rings after publishing wakes every thread that looked for work before.
//!
//! Threads: all of the team's and the callers'. Tried exhaustively by the model in tests/loom/, which includes this file.
//! Does not: allocate or unwind.

use super::sync::{AtomicBool, AtomicI32, AtomicU32, Condvar, Mutex, Ordering, spin_until, yield_now};
use std::sync::PoisonError;
use std::time::Duration;

/// The tasks of one job.
pub(super) struct Tasks {
    /// Tasks not yet taken; zero or less when there are none.
    left: AtomicI32,
    count: AtomicI32,
    /// Tasks not yet finished.
    unfinished: AtomicI32,
    failed: AtomicBool,
    lock: Mutex<()>,
    ended: Condvar,
}

impl Tasks {
    pub(super) fn new() -> Self {
        Self {
            left: AtomicI32::new(0),
            count: AtomicI32::new(0),
            unfinished: AtomicI32::new(0),
            failed: AtomicBool::new(false),
            lock: Mutex::new(()),
            ended: Condvar::new(),
        }
    }

    /// Offers so many tasks. The caller owns the job and has written its data; no task of an earlier one is unfinished.
    pub(super) fn publish(&self, count: i32) {
        self.failed.store(false, Ordering::Relaxed);
        self.count.store(count, Ordering::Relaxed);
        self.unfinished.store(count, Ordering::Relaxed);
        // A swap, and taking acquires and releases: so a thread that came too late for the last job happens before this one. (Loom needs
        // that; the language orders the two through the value that the late thread has read.)
        self.left.swap(count, Ordering::AcqRel);
    }

    /// Whether there may be a task to take.
    pub(super) fn any(&self) -> bool {
        self.left.load(Ordering::Relaxed) > 0
    }

    /// Takes the next task: its number, from 0. Whoever gets tasks calls [`Tasks::finish`] once there are no more.
    pub(super) fn take(&self) -> Option<usize> {
        if !self.any() {
            return None;
        }
        let left = self.left.fetch_sub(1, Ordering::AcqRel);
        // `count` is that of the job whose task this is: the job cannot end before this task does.
        if left > 0 { usize::try_from(self.count.load(Ordering::Relaxed) - left).ok() } else { None }
    }

    /// Ends so many tasks that this thread has taken, all of them: one write for many tasks, on memory that all threads write to.
    pub(super) fn finish(&self, count: i32) {
        if self.unfinished.fetch_sub(count, Ordering::AcqRel) == count {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.ended.notify_all();
        }
    }

    /// Notes that a task did not do its work.
    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Whether all tasks are finished; if so, what they wrote is seen.
    pub(super) fn is_done(&self) -> bool {
        self.unfinished.load(Ordering::Acquire) == 0
    }

    /// Waits until all tasks are finished, busily for a while.
    pub(super) fn wait(&self, spin: Duration) {
        if spin_until(spin, || self.is_done()) {
            return;
        }
        let mut lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        while !self.is_done() {
            lock = self.ended.wait(lock).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Opens once so many have arrived.
pub(super) struct Latch {
    missing: AtomicU32,
}

impl Latch {
    pub(super) fn new() -> Self {
        Self { missing: AtomicU32::new(0) }
    }

    /// Closes it, for so many. Nobody uses it meanwhile.
    pub(super) fn close(&self, missing: u32) {
        self.missing.store(missing, Ordering::Relaxed);
    }

    /// Arrives. True for the last one, who sees what all others wrote before they came.
    pub(super) fn arrive(&self) -> bool {
        self.missing.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Whether all have arrived; if so, what they wrote is seen.
    pub(super) fn is_open(&self) -> bool {
        self.missing.load(Ordering::Acquire) == 0
    }

    /// Waits until all have arrived; false if `tasks` failed instead. Those who are missing are at work, so this is short unless the
    /// system has stopped one of them.
    pub(super) fn wait(&self, tasks: &Tasks) -> bool {
        const SPIN: Duration = Duration::from_micros(20);
        while !spin_until(SPIN, || self.is_open() || tasks.has_failed()) {
            yield_now();
        }
        self.is_open()
    }
}

/// Wakes threads that have nothing to do.
pub(super) struct Bell {
    /// Counts the rings. Changed under the lock.
    rung: AtomicU32,
    closed: AtomicBool,
    sleepers: Mutex<u32>,
    wake: Condvar,
}

impl Bell {
    pub(super) fn new() -> Self {
        Self { rung: AtomicU32::new(0), closed: AtomicBool::new(false), sleepers: Mutex::new(0), wake: Condvar::new() }
    }

    /// How often it has rung. To be read before looking for work.
    pub(super) fn count(&self) -> u32 {
        self.rung.load(Ordering::Acquire)
    }

    /// Wakes all. To be called after publishing work.
    pub(super) fn ring(&self) {
        let sleepers = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        self.rung.fetch_add(1, Ordering::Release);
        let sleeping = *sleepers;
        drop(sleepers);
        if sleeping > 0 {
            self.wake.notify_all();
        }
    }

    /// Rings for the last time.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        self.ring();
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Waits for the next ring after the count `seen`: busily for a while, then asleep. False once the bell is closed, also if that was
    /// before `seen` was read.
    pub(super) fn wait(&self, seen: u32, spin: Duration) -> bool {
        let awake = || self.count() != seen || self.is_closed();
        if !spin_until(spin, awake) {
            let mut sleepers = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
            while !awake() {
                *sleepers += 1;
                sleepers = self.wake.wait(sleepers).unwrap_or_else(PoisonError::into_inner);
                *sleepers -= 1;
            }
        }
        !self.is_closed()
    }
}
