//! What `handover` is built from. The model of tests/loom/ puts loom's own in its place.

pub(super) use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
pub(super) use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// Waits busily until `ready` says so, at most so long. Returns what it said last.
pub(super) fn spin_until(limit: Duration, ready: impl Fn() -> bool) -> bool {
    const TRIES: usize = 64; // between two looks at the clock
    let start = Instant::now();
    loop {
        for _ in 0..TRIES {
            if ready() {
                return true;
            }
            core::hint::spin_loop();
        }
        if start.elapsed() >= limit {
            return false;
        }
    }
}

/// Lets another thread run.
pub(super) fn yield_now() {
    std::thread::yield_now();
}
