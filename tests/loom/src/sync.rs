//! In place of src/cpu/sync.rs: the same names, by loom.

pub(super) use loom::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
pub(super) use loom::sync::{Condvar, Mutex};
use std::time::Duration;

/// One look: waiting longer shows nothing new to a model that tries every order.
pub(super) fn spin_until(_: Duration, ready: impl Fn() -> bool) -> bool {
    ready()
}

pub(super) fn yield_now() {
    loom::thread::yield_now();
}
