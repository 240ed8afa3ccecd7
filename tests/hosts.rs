//! Gates: the plugin in stock llama.cpp hosts, compared with the same hosts without it. ggml's CPU backend is the inner
//! device, so every result can be asked to be equal: the same kernels, the same threads, the same order.
//!
//! `make stock` first, then `cargo test --test hosts -- --test-threads=1`. Tests may run side by side, but for those that measure time or memory:
//! `.ci/test.sh` names them and runs them one at a time.
#![expect(
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test reports by panicking and printing"
)]

mod support;

#[path = "hosts/adapters.rs"]
mod adapters;
#[path = "hosts/after_passes.rs"]
mod after_passes;
#[path = "hosts/architectures.rs"]
mod architectures;
#[path = "hosts/cache.rs"]
mod cache;
#[path = "hosts/cancelled_loads.rs"]
mod cancelled_loads;
#[path = "hosts/compared.rs"]
mod compared;
#[path = "hosts/completions.rs"]
mod completions;
#[path = "hosts/context_shift.rs"]
mod context_shift;
#[path = "hosts/devices.rs"]
mod devices;
#[path = "hosts/doctored.rs"]
mod doctored;
#[path = "hosts/embeddings.rs"]
mod embeddings;
#[path = "hosts/endurance.rs"]
mod endurance;
#[path = "hosts/exceptions.rs"]
mod exceptions;
#[path = "hosts/faults.rs"]
mod faults;
#[path = "hosts/flags.rs"]
mod flags;
#[path = "hosts/images.rs"]
mod images;
#[path = "hosts/interrupts.rs"]
mod interrupts;
#[path = "hosts/late.rs"]
mod late;
#[path = "hosts/learned.rs"]
mod learned;
#[path = "hosts/lending.rs"]
mod lending;
#[path = "hosts/load_modes.rs"]
mod load_modes;
#[path = "hosts/load_time.rs"]
mod load_time;
#[path = "hosts/memory.rs"]
mod memory;
#[path = "hosts/operations.rs"]
mod operations;
#[path = "hosts/passes.rs"]
mod passes;
#[path = "hosts/perplexity.rs"]
mod perplexity;
#[path = "hosts/placement.rs"]
mod placement;
#[path = "hosts/planner.rs"]
mod planner;
#[path = "hosts/prediction.rs"]
mod prediction;
#[path = "hosts/programs.rs"]
mod programs;
#[path = "hosts/prompt_cache.rs"]
mod prompt_cache;
#[path = "hosts/router.rs"]
mod router;
#[path = "hosts/rpc.rs"]
mod rpc;
#[path = "hosts/settings.rs"]
mod settings;
#[path = "hosts/shapes.rs"]
mod shapes;
#[path = "hosts/sides.rs"]
mod sides;
#[path = "hosts/slices.rs"]
mod slices;
#[path = "hosts/slots.rs"]
mod slots;
#[path = "hosts/splits.rs"]
mod splits;
#[path = "hosts/staging.rs"]
mod staging;
#[path = "hosts/state.rs"]
mod state;
#[path = "hosts/storage.rs"]
mod storage;
#[path = "hosts/summary.rs"]
mod summary;
#[path = "hosts/telemetry.rs"]
mod telemetry;
