//! Experts that the GPU does not hold, computed in RAM by threads of our own while the GPU computes the others.
//!
//! Owns: what a block computes ([`shape`], [`activation`]), how a job is cut ([`cut`]), its intermediate results ([`work`]), the threads
//! ([`team`], [`threads`]) and the order between them ([`handover`]).
//! Invariants: results are those of ggml's CPU backend without repacking: its own products on its own forms, in its order.
//! Threads: those of the team; callers may be any.
//! Does not: decide which experts it gets, or move anything to a device. docs/adr/0008-cpu-team.md says why it is built this way.

pub(crate) mod activation;
mod cut;
mod handover;
pub(crate) mod shape;
mod sync;
pub(crate) mod team;
pub(crate) mod threads;
mod work;

#[cfg(test)]
mod against_stock;
#[cfg(test)]
mod speed;
