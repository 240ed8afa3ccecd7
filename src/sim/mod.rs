//! Simulation of the expert cache: what a policy would find and upload, on traces of routing, without a model or a device.
//!
//! Owns: synthetic routing with its presets (`routing`, `random`), the trace format (`trace`), rules to compare with (`baselines`),
//! replays by name (`run`, `series`) and with a prompt (`prompt`), and the figures as table, JSON and picture (`report`).
//! Invariants: the same trace and settings give the same figures on every machine.
//! Threads: none. Does not: touch files or print; the command does.

mod baselines;
mod prompt;
mod random;
mod report;
mod routing;
mod run;
mod series;
#[cfg(test)]
mod tests;
mod trace;

pub use prompt::{Prompt, Told};
pub use random::Random;
pub use report::{Cell, Report, Row};
pub use routing::{PRESETS, Preset, Redraw, Routing, trace};
pub use run::{Rule, slots_per_layer, uniform_shape};
pub use series::{Outcome, Series};
pub use trace::{Shape, Trace, TraceError};
