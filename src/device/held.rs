//! A thing that one thread at a time takes away and puts back.
//!
//! Owns: where it lies, who has it, and the waiting for it. Invariants: nobody waits for itself, nor longer than it said.
//! Threads: any. The lock is held to take and put, never across a call. Does not: know what it is.

use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// The place of a `T`, which there may be or not.
pub(super) struct Held<T> {
    place: Mutex<Place<T>>,
    back: Condvar,
}

struct Place<T> {
    /// The outer `None` while somebody has it.
    thing: Option<Option<Box<T>>>,
    owner: Option<ThreadId>,
}

impl<T> Place<T> {
    fn take(&mut self) -> Option<Option<T>> {
        let taken = self.thing.take()?;
        self.owner = Some(thread::current().id());
        Some(taken.map(|thing| *thing))
    }
}

impl<T> Default for Held<T> {
    fn default() -> Self {
        Self { place: Mutex::new(Place { thing: Some(None), owner: None }), back: Condvar::new() }
    }
}

impl<T> Held<T> {
    /// Takes it, if there is one; `None` while somebody has it.
    pub(super) fn take(&self) -> Option<Option<T>> {
        self.place.lock().take()
    }

    /// As [`Held::take`], but waits for whoever has it, unless that is this thread.
    pub(super) fn take_within(&self, patience: Duration) -> Option<Option<T>> {
        let end = Instant::now() + patience;
        let mut place = self.place.lock();
        while place.thing.is_none() && place.owner != Some(thread::current().id()) {
            if self.back.wait_until(&mut place, end).timed_out() {
                break;
            }
        }
        place.take()
    }

    /// Puts it back, or says that there is none.
    pub(super) fn put(&self, thing: Option<T>) {
        let thing = thing.map(Box::new);
        *self.place.lock() = Place { thing: Some(thing), owner: None };
        self.back.notify_one();
    }

    /// Whether it is there and nobody has it.
    pub(super) fn is_there(&self) -> bool {
        matches!(self.place.lock().thing, Some(Some(_)))
    }

    /// Takes it for good; `None` if there is none, or while somebody has it.
    pub(super) fn remove(&self) -> Option<Box<T>> {
        self.place.lock().thing.as_mut().and_then(Option::take)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn one_at_a_time() {
        let held = Held::default();
        assert_eq!(held.take(), Some(None));
        assert_eq!((held.take(), held.remove()), (None, None));
        held.put(Some(7));
        assert_eq!(held.take(), Some(Some(7)));
        held.put(Some(8));
        assert_eq!(held.remove().as_deref(), Some(&8));
        assert_eq!(held.take(), Some(None));
    }

    #[test]
    fn nobody_waits_for_itself() {
        let held = Held::default();
        held.put(Some(7));
        held.take();
        let begin = Instant::now();
        assert_eq!(held.take_within(LONG), None);
        assert!(begin.elapsed() < LONG / 2);
        held.put(Some(8));
        assert_eq!(held.take_within(LONG), Some(Some(8)));
    }

    #[test]
    fn others_wait_until_it_is_back_or_time_is_up() {
        let held = Held::default();
        held.put(Some(7));
        thread::scope(|scope| {
            let ((tell, told), (let_go, may_go)) = (mpsc::channel(), mpsc::channel());
            let held = &held;
            scope.spawn(move || {
                held.take();
                tell.send(()).unwrap();
                may_go.recv().unwrap();
                held.put(Some(8));
            });
            told.recv().unwrap();
            assert_eq!(held.take_within(Duration::from_millis(5)), None, "it is not back in time");
            let_go.send(()).unwrap();
            assert_eq!(held.take_within(LONG), Some(Some(8)));
        });
    }
}
