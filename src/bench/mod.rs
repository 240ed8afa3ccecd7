//! Comparisons with stock llama.cpp: what `ggml-moe bench` and `ggml-moe ppl` compute from what the programs printed.
//!
//! Owns: the share of memory and stock's flags for the same memory (`placement`), the reading of the programs' output (`output`), the
//! figures with their spread (`stats`), the same memory with larger micro-batches (`memory`), the table of prompts (`prompts`), decoding token by
//! token (`curve`), timelines of passes (`timeline`), the report as table, JSON and picture (`report`), kept runs (`runs`), and the comparison of
//! perplexities chunk by chunk (`ppl`).
//! Invariants: a run in which the plugin did not do its work yields no figure.
//! Threads: none. Does not: start a program or touch a file; the command does.

pub mod curve;
pub mod memory;
pub mod output;
pub mod placement;
pub mod ppl;
pub mod prompts;
pub mod report;
pub mod runs;
pub mod stats;
pub mod timeline;
