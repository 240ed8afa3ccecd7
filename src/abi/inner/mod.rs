//! The inner device's objects: what the plugin stands in front of.
//!
//! Owns: safe wrappers of foreign devices (`device`), buffer types and buffers (`buffer`), backends and events (`backend`).
//! Invariants: an owned object is freed exactly once, by its wrapper. Data is reached through *shims*: short-lived byte tensors
//! that name the inner buffer, so that the inner code sees only what belongs to it, whoever owns the host's tensor.
//! Threads: devices and buffer types are usable from any thread by ggml's contract; a backend by one thread at a time, which the
//! host guarantees for the backend of ours that owns it.
//! Does not: decide where anything lies.

mod backend;
mod buffer;
mod device;

pub(crate) use backend::{Backend, Event, Status};
pub(crate) use buffer::{Buffer, BufferType, Passport};
pub(crate) use device::{Device, DeviceKind, devices};
