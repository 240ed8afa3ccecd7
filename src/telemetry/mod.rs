//! What the plugin tells: log lines, counters, requests, and all of it as JSON to who may ask.
//!
//! Owns: the log filter (`log`), counters ([`Counters`]), what a device tells while it works (`board`) and the rule by which graphs become
//! requests (`requests`), the times of long passes (`timeline`), and the socket through which it is asked (`service`).
//! Invariants: one event, one line; a cause that repeats is told once.
//! Threads: any; a backend's counters are counted by the thread that drives it. `service` has one of its own.
//! Does not: leave the machine, or know a host type.

mod board;
mod counters;
pub mod json;
pub(crate) mod log;
mod rates;
mod requests;
pub mod service;
pub mod timeline;

pub use board::Mode;
pub(crate) use board::{Board, Busy, CacheState, PassShape, Reporter};
pub use counters::Counters;
pub(crate) use requests::MOST_DECODED;
