//! What the bookkeeping of the cache costs per token, on traces of routing with 20% of the experts in the cache.
//!
//! `cargo bench --bench policy`. The design asks for less than 100 us per token; `lowest` is the figure that other programs on
//! the machine disturb least.
#![expect(clippy::print_stdout, reason = "the figures are printed")]

use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

use ggml_moe::experts::heat::Heat;
use ggml_moe::experts::policy::{Policy, Pool, Settings};
use ggml_moe::experts::shape::{Block, GroupId};
use ggml_moe::sim::{PRESETS, Preset, Trace, trace, uniform_shape};

/// Tokens that fill the window and the cache, and tokens that are measured.
const WARM: usize = 128;
const TOKENS: usize = 192;
const RUNS: usize = 15;

fn main() -> Result<(), Box<dyn Error>> {
    println!("us per token      lowest   median  uploads per token");
    for (name, layers, used) in [("qwen3-30b", 48, 8), ("qwen3.8-next", 48, 10), ("qwen3.8-next", 92, 10)] {
        let preset = PRESETS.iter().find(|preset| preset.name == name).ok_or("no such preset")?;
        let preset = Preset { used, ..*preset };
        let trace = trace(&preset, WARM + TOKENS, layers, 1, None);
        let mut runs = Vec::new();
        for _ in 0..RUNS {
            runs.push(run(&trace)?);
        }
        runs.sort_by(|a, b| a.0.total_cmp(&b.0));
        let experts = preset.experts;
        println!(
            "{layers} x {experts}, {used:<2} used {:>7.1}  {:>7.1}  {:>17.1}",
            runs[0].0,
            runs[RUNS / 2].0,
            runs[0].1
        );
    }
    Ok(())
}

fn run(trace: &Trace) -> Result<(f64, f64), Box<dyn Error>> {
    let shape = uniform_shape(trace.layers(), trace.experts(), trace.used())?;
    let slots = u32::try_from(shape.blocks() / 5)?;
    let heat = Heat::new(shape.blocks());
    let mut policy = Policy::new(shape, &[Pool { slots, block_bytes: 1 }], Settings::default(), heat);
    let mut spent = Duration::ZERO;
    let mut uploads = 0;
    let mut blocks: Vec<Block> = Vec::new();
    for token in 0..trace.tokens() {
        let start = Instant::now();
        for (group, layer) in (0..).map(GroupId).zip(0..trace.layers()) {
            policy.note_use(group, trace.at(token, layer).iter().map(|&expert| expert.into()));
        }
        blocks.clear();
        blocks.extend(black_box(policy.end_of_step(1)).iter().map(|admission| admission.block));
        blocks.iter().for_each(|&block| policy.loaded(block));
        if token >= WARM {
            spent += start.elapsed();
            uploads += blocks.len();
        }
    }
    Ok((spent.as_secs_f64() * 1e6 / TOKENS as f64, uploads as f64 / TOKENS as f64))
}
