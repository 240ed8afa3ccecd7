//! Experts: their bytes in host memory, the ways that bring them to the inner device, and what the cache of them needs to know.
//!
//! Owns: the host memory of expert buffers (`store`), which of it stays in the model's file (`mapped`, `origin`), its registration with the device (`pin`), the reading of expert ids (`ids`) and
//! the plain path (`plain`), staging for long passes (`stage`), the reading of files before they are used (`readahead`). For the cache: the numbering of blocks ([`shape`]), lifetime heat ([`heat`]), what is worth a slot
//! ([`policy`]), what lies in which slot and who may read it ([`residency`]), and what is remembered
//! ([`statefile`], [`statestore`], [`statefolder`]).
//! Invariants: expert weights have one home, host memory; whatever lies on the inner device is a copy that can be dropped.
//! Threads: host memory is filled by the loader and read by the threads that run graphs; the host orders the two.
//! What keeps experts on the device from one graph to the next is `cache`.
//! Does not: run graphs.

pub(crate) mod cache;
pub mod cost;
pub mod heat;
pub mod ids;
pub(crate) mod mapped;
mod origin;
mod pin;
mod plain;
pub mod policy;
pub(crate) mod readahead;
pub(crate) mod readback;
pub mod residency;
#[cfg(test)]
mod residency_model;
pub mod shape;
pub(crate) mod stage;
pub mod statefile;
pub mod statefolder;
pub mod statestore;
mod store;

pub(crate) use origin::Origin;
pub(crate) use pin::Pinner;
pub(crate) use plain::{PlainError, PlainPath};
pub(crate) use store::{HostMemory, HostRange};
