//! Experts: their bytes in host memory, and the path that brings them to the inner device.
//!
//! Owns: the host memory of expert buffers (`store`), its registration with the device (`pin`), the reading of expert ids (`ids`) and
//! the plain path (`plain`).
//! Invariants: expert weights have one home, host memory; whatever lies on the inner device is a copy that can be dropped.
//! Threads: host memory is filled by the loader and read by the threads that run graphs; the host orders the two.
//! Does not: keep experts on the device from one graph to the next (no cache yet).

pub mod ids;
mod pin;
mod plain;
mod store;

pub(crate) use pin::Pinner;
pub(crate) use plain::{PlainError, PlainPath};
pub(crate) use store::{HostMemory, HostRange};
