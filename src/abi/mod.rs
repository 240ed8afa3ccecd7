//! The boundary with ggml: the only module that names upstream's types.
//!
//! Owns: the struct layouts ([`layout`], the generated `gen_*`), the choice among them ([`probe`]), the host's functions ([`mod@imports`]),
//! op numbers by name ([`ops`]), the kernels of its CPU backend ([`cpu_kernels`]), tagged handles ([`handle`]), the panic boundary ([`boundary`]), views of tensors and graphs
//! ([`tensor`], [`graph`]), tensors of the host that stand for a part of their tokens ([`slice`](mod@slice)), tensors of our own ([`own`]), wrappers of the inner device's objects ([`inner`]), the functions that the host calls ([`slots`]) and those that it calls by way of us when we are
//! preloaded ([`llama`]).
//! Invariants: nothing unwinds out of it; no number of the host is trusted before the probe confirmed it.
//! Threads: any thread of the host; see each object.
//! Does not: decide anything about experts, memory or graphs.
// UNSAFETY: this module is the C boundary; every block says what it relies on.
#![expect(unsafe_code, reason = "this module is the C boundary; every block says what it relies on")]

pub(crate) mod boundary;
pub(crate) mod cpu_kernels;
#[cfg(test)]
pub(crate) mod cpu_reference;
mod exceptions;
#[path = "gen/api2.rs"]
#[rustfmt::skip]
#[expect(
    non_camel_case_types,
    dead_code,
    reason = "generated; only the places of the fields are used"
)]
mod gen_api2;
#[path = "gen/api2_2025.rs"]
#[rustfmt::skip]
#[expect(
    non_camel_case_types,
    dead_code,
    reason = "generated; only the places of the fields are used"
)]
mod gen_api2_2025;
#[path = "gen/api3.rs"]
#[rustfmt::skip]
#[expect(
    non_camel_case_types,
    dead_code,
    reason = "generated; the bindings hold the whole header set"
)]
mod gen_api3;
pub(crate) mod graph;
mod handle;
mod host;
mod imports;
pub(crate) mod inner;
mod layout;
#[cfg(all(target_arch = "x86_64", target_os = "linux", target_env = "gnu"))]
pub(crate) mod llama;
mod ops;
pub(crate) mod own;
mod probe;
pub(crate) mod slice;
pub(crate) mod slots;
pub(crate) mod tensor;

pub(crate) use cpu_kernels::cpu_kernels;
#[cfg(test)]
pub(crate) use host::load_for_tests;
pub(crate) use host::{Host, host, log_to_host};
pub(crate) use ops::OpClass;
pub(crate) use probe::{Refusal, probe};
