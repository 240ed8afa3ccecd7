//! ggml-moe: a ggml backend that a stock llama.cpp loads, for mixture-of-experts models larger than VRAM.
//!
//! The map, from the host downwards (imports point down only):
//!
//! - [`entry`]: what the loader looks up.
//! - `abi`: the C boundary; the only module that names upstream's types.
//! - `registry`, `device`, `buffer`, `backend`: what those objects of ggml mean here, in safe Rust.
//! - `graph`: cuts a graph into segments and MoE blocks; pure.
//! - [`experts`]: the experts' bytes in host memory, the way they get to the device, and what a cache of them must know.
//! - [`sim`]: simulates that cache; used by the command.
//! - `cpu`: threads that compute experts in RAM.
//! - `lent`: the memory of compute buffers, which comes and goes.
//! - `gpu`: memory of the inner device below ggml: the CUDA driver API, or ggml's own functions.
//! - [`memory`]: who has how much of the device's memory; pure.
//! - `config`, `telemetry`: the table of keys; log and counters.
//! - [`planner`]: what goes where, and how fast it should run; pure; [`machine`]: what this machine has; used by the command.
//! - [`model`]: what a model file's header says about its experts; [`mod@bench`]: comparisons with stock; [`chart`]: pictures; used by the command.
//! - `preload`: the library before a program's `main`: its arguments, and which models it helps.
//! - `request`, `explicit`, `ram`, `purpose`: what the process was asked for, which settings of llama.cpp's the user made, the RAM that it may
//!   use, what a tensor is for; pure.
//!
//! What is public here is so for the command and the tests; the plugin's only interface is `entry`.
//!
//! docs/architecture.md has the picture and the life of one token.

mod abi;
pub mod arguments;
mod backend;
pub mod bench;
mod buffer;
pub mod chart;
pub mod config;
mod cpu;
mod device;
pub mod entry;
pub mod experts;
pub mod explicit;
mod gpu;
pub mod graph;
mod lent;
pub mod machine;
pub mod memory;
pub mod model;
pub mod planner;
#[cfg(all(target_arch = "x86_64", target_os = "linux", target_env = "gnu"))]
mod preload;
#[cfg(not(all(target_arch = "x86_64", target_os = "linux", target_env = "gnu")))]
mod preload {
    //! The exports of `abi::llama` exist for x86-64 Linux with glibc only.

    pub(crate) fn is_active() -> bool {
        false
    }
}
pub mod purpose;
pub mod ram;
mod registry;
pub mod request;
pub mod sim;
pub mod telemetry;

pub use experts::ids;
