//! How many threads a team gets, and where they run.
//!
//! Owns: the count out of what the host was told and what the system allows; binding threads to processors.
//! Invariants: at least one thread. Binding is a wish: where the system refuses, the thread runs unbound.
//! Threads: any; nothing is kept.
//! Does not: start threads.
// UNSAFETY: the C library's functions for the processors of a thread.
#![expect(unsafe_code, reason = "the C library's functions for the processors of a thread")]

use core::mem::MaybeUninit;

/// The threads of a team: what the host uses (`-t`), but no more than the processors that this process may use (its affinity and the limits
/// of its control groups), less one for each thread that drives a GPU.
pub(crate) fn team_threads(host: usize, gpus: usize) -> usize {
    let usable = std::thread::available_parallelism().map_or(usize::MAX, core::num::NonZero::get);
    bounded(host, gpus, usable)
}

fn bounded(host: usize, gpus: usize, usable: usize) -> usize {
    host.min(usable.saturating_sub(gpus)).max(1)
}

/// The processors that the calling thread may use.
pub(super) fn processors() -> Vec<usize> {
    let mut set = MaybeUninit::<libc::cpu_set_t>::zeroed();
    // SAFETY: 0 is the calling thread; the set has the size that is named.
    let status = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), set.as_mut_ptr()) };
    // SAFETY: a set of bits for which zero is valid.
    let set = unsafe { set.assume_init() };
    let size = usize::try_from(libc::CPU_SETSIZE).unwrap_or(0);
    // SAFETY: the number is below the size of the set.
    (0..size).filter(|&processor| status == 0 && unsafe { libc::CPU_ISSET(processor, &set) }).collect()
}

/// Binds the calling thread to one of [`processors`].
pub(super) fn pin_to(processor: usize) {
    let set = MaybeUninit::<libc::cpu_set_t>::zeroed();
    // SAFETY: a set of bits for which zero is valid.
    let mut set = unsafe { set.assume_init() };
    // SAFETY: the number came from such a set.
    unsafe { libc::CPU_SET(processor, &mut set) };
    // SAFETY: 0 is the calling thread; the set has the size that is named. A refusal changes nothing.
    unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_is_left_for_each_gpu() {
        assert_eq!(bounded(16, 1, 16), 15);
        assert_eq!(bounded(8, 1, 16), 8);
        assert_eq!(bounded(64, 2, 16), 14);
        assert_eq!(bounded(4, 2, 2), 1);
        assert_eq!(bounded(0, 0, 2), 1);
        assert!(team_threads(usize::MAX, 0) >= 1);
    }

    #[test]
    fn a_pinned_thread_stays_where_it_was_put() {
        let last = *processors().last().unwrap();
        let seen = std::thread::spawn(move || {
            pin_to(last);
            processors()
        });
        assert_eq!(seen.join().unwrap(), [last]);
    }
}
