//! Asking for experts that lie in the model's file before they are read.
//!
//! Owns: whether it is done. Asking costs microseconds for each expert even when its pages are there, so it is done only while this process makes the
//! system read: after a step during which it did, for some steps. For the team a step is a graph; for the threads that copy what passes bring, a piece.
//! Invariants: what is asked for is read by the team of this graph, or copied soon; nothing else is.
//! Threads: the one that drives the backend; under a lock, those that copy. Does not: read by itself.
// UNSAFETY: the process's own figures are asked for.
#![expect(unsafe_code, reason = "the process's own figures are asked for")]

use super::mapped;

/// Steps for which it goes on after one that made the system read.
const STEPS: u32 = 16;
/// Units in which the system counts what is read, that count as reading.
const LEAST_BLOCKS: u64 = 64;

/// For the experts of one cache, or the copies of one queue.
#[derive(Debug, Default)]
pub(crate) struct ReadAhead {
    /// Whether any of them lie in a file.
    from_file: bool,
    seen: u64,
    left: u32,
}

impl ReadAhead {
    /// For experts of which some lie in a file, or none.
    pub(crate) fn new(from_file: bool) -> Self {
        Self { from_file, seen: 0, left: STEPS }
    }

    /// A step begins.
    pub(crate) fn begin(&mut self) {
        if self.from_file {
            self.note(blocks_read());
        }
    }

    fn note(&mut self, read: u64) {
        self.left = if read >= self.seen + LEAST_BLOCKS { STEPS } else { self.left.saturating_sub(1) };
        self.seen = read;
    }

    /// Whether experts are to be asked for.
    pub(crate) fn is_on(&self) -> bool {
        self.from_file && self.left > 0
    }

    /// Asks for bytes, each an address and a length.
    pub(crate) fn ask(&self, wanted: impl Iterator<Item = (usize, usize)>) {
        if self.is_on() {
            wanted.for_each(|(address, bytes)| mapped::will_need(address, bytes));
        }
    }
}

/// What this process made the system read so far, in blocks of 512 bytes.
fn blocks_read() -> u64 {
    // SAFETY: a record of numbers; zeros are valid.
    let mut usage: libc::rusage = unsafe { core::mem::zeroed() };
    // SAFETY: a record of this type, which the call fills.
    if unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) } != 0 {
        return 0;
    }
    u64::try_from(usage.ru_inblock).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_on_while_the_system_reads() {
        let mut ahead = ReadAhead::new(true);
        assert!(ahead.is_on(), "the first steps after loading");
        for _ in 0..STEPS {
            ahead.note(1000);
            ahead.note(1000);
        }
        assert!(!ahead.is_on());
        ahead.note(1000 + LEAST_BLOCKS - 1);
        assert!(!ahead.is_on());
        ahead.note(5000);
        assert!(ahead.is_on());
        assert!(!ReadAhead::new(false).is_on());
        assert!(blocks_read() < u64::MAX);
    }
}
