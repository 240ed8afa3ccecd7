//! Asking for what lies in the model's file a few pieces before it is copied.
//!
//! Owns: how far ahead, and up to which item was asked for. A thread that touches pages waits for one read at a time, of as much as the system's read-ahead,
//! and a disk needs more of them at once to be fast; the host's own threads are more than those that copy.
//! Invariants: nothing is asked for twice, nor further ahead than a window that is small beside the memory of any machine.
//! Threads: under the queue's lock. Does not: ask by itself (who copies does, without the lock), or know which sources lie in a file: asking is done while
//! this process makes the system read, and costs little where memory is no file's.

use std::ops::Range;

use crate::experts::readahead::ReadAhead;

/// Items of the queue: pieces of a MiB.
const WINDOW: u64 = 16;

/// For one queue.
#[derive(Debug)]
pub(super) struct Ahead {
    /// The number of the first item that was not asked for.
    asked: u64,
    reading: ReadAhead,
}

impl Default for Ahead {
    fn default() -> Self {
        Self { asked: 0, reading: ReadAhead::new(true) }
    }
}

impl Ahead {
    /// The numbers of the items that are to be asked for when a thread takes one and the queue ends before another.
    pub(super) fn begin(&mut self, taken: u64, end: u64) -> Range<u64> {
        self.reading.begin();
        if self.reading.is_on() { self.window(taken, end) } else { 0..0 }
    }

    fn window(&mut self, taken: u64, end: u64) -> Range<u64> {
        let from = self.asked.max(taken);
        let to = end.min(taken + WINDOW).max(from);
        self.asked = to;
        from..to
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_item_is_asked_for_once_and_in_time() {
        let mut ahead = Ahead::default();
        assert_eq!(ahead.window(0, 100), 0..WINDOW, "that of the thread as well");
        assert_eq!(ahead.window(1, 100), WINDOW..WINDOW + 1);
        assert!(ahead.window(1, 100).is_empty(), "nothing twice");
        assert_eq!(ahead.window(95, 100), 95..100, "what nobody asked for meanwhile is left out");
        assert!(ahead.window(96, 100).is_empty(), "the end of the queue");
        assert_eq!(ahead.window(97, 102), 100..102, "more came");
        assert_eq!(ahead.window(200, 200 + 2 * WINDOW), 200..200 + WINDOW);
    }

    #[test]
    fn a_new_queue_asks() {
        assert_eq!(Ahead::default().begin(3, 5), 3..5);
    }
}
