//! The plan for a model on a machine: what goes where, and how fast it should run. Pure.
//!
//! Owns: what a model needs by its header ([`model`], [`attention`], [`memory`], [`room`]), what a machine has ([`machine`], [`cards`]), what the user
//! wants ([`usage`], with llama.cpp's flags in [`flags`] and [`crate::explicit`]), the best placement with llama.cpp's own flags ([`stock`]), the prediction of speed ([`speed`], [`prompts`]), the choice
//! ([`choose`], `verdict`), what a host is set up with when it loads a model ([`advice`]), and its words ([`table`], [`json`], [`arguments`]).
//! Invariants: the same input gives the same plan; what is planned on a card never takes more than it has free less what is kept free;
//! every choice has a reason. No figure of speed is a promise: docs/planner.md says what was compared with measurements.
//! Threads: none. Does not: read files, ask devices or measure (`machine` beside this module does).

pub mod advice;
pub mod arguments;
pub mod attention;
pub mod cache;
pub mod cards;
pub mod choose;
pub mod flags;
pub mod json;
pub mod learned;
pub mod machine;
pub mod memory;
pub mod model;
pub mod prompts;
pub mod room;
pub mod speed;
pub mod stock;
pub mod table;
pub mod usage;
mod verdict;

#[cfg(test)]
mod cases;
#[cfg(test)]
mod measured;
#[cfg(test)]
mod measured_prompts;
#[cfg(test)]
pub(crate) mod samples;

pub use advice::{Advice, advise};
pub use choose::{CardPlan, Choice, LoadMode, Mode, Plan, plan};
pub use machine::{Card, Machine};
pub use model::Model;
pub use usage::Usage;

/// Bytes of a MiB.
pub const MIB: u64 = 1 << 20;

/// A number that is known to be a size, rounded down.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the cast saturates, and the value is a size"
)]
pub(crate) fn whole(value: f64) -> u64 {
    value as u64
}
