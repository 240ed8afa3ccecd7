//! What the plugin tells: log lines and counters.
//!
//! Owns: the log filter (`log`) and the per-backend counters ([`Counters`]).
//! Invariants: one event, one line; a cause that repeats is told once.
//! Threads: any; counters belong to one backend and are counted by the thread that drives it.
//! Does not: leave the machine, or know a host type.

mod counters;
pub(crate) mod log;

pub use counters::Counters;
