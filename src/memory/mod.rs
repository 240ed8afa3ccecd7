//! Device memory as an amount: who has how much of it, and how much the arena of the cache may have.
//!
//! Owns: the account of a device's leases ([`Account`]), the rule that divides what is free ([`Limits`]), and the rule by which the arena
//! grows and shrinks over time ([`Control`]), and which bytes of a compute buffer have memory ([`Mapping`]).
//! Invariants: a lease is counted as long as it lives, under one use at a time. The rules are pure.
//! Threads: any; the account has a lock of its own, held for sums only.
//! Does not: allocate, ask a device or move experts (`device/memory.rs` and `experts/cache` do).

mod account;
mod control;
mod lending;

pub use account::{Account, Figures, Lease, Limits, Use};
pub use control::{Change, Control, Why};
pub use lending::{GraphName, Mapping, Need};
