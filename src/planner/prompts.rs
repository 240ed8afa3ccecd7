//! How fast a placement should take prompts, pass by pass.
//!
//! Owns: the prediction and the constants that were fitted to measurements; docs/planner.md has the formula and the source of each.
//! Invariants: a faster link or card, more of the experts on it, never make a prediction slower.
//! Threads: none. Does not: choose the length of passes, or know how much memory they take (`cache` does).

use super::cards::Ability;
use super::machine::Machine;
use super::speed::{Bound, CARD_PART, DISK_GBS, Engine, LAYER_US, ROUND_US, Setting, Speed, on_disk};

/// Tables of cards (`cards`) say what a prompt of some 2,000 tokens reaches in all. Operations of full tiles run so much faster.
const FULL_TILES: f64 = 1.32;
/// The same of attention, which is computed in half precision.
const ATTENTION: f64 = 5.1;
/// Rows that each expert in use computes for nothing, because its tokens do not fill the last tile.
pub(crate) const PADDING_ROWS: f64 = 40.0;
/// The host's own work on the mask before a pass, in nanoseconds for each pair of its tokens: from the second token on it goes
/// over the cells of the batch (llama-kv-cache.cpp of b11434).
const MASK_NS: f64 = 2.5;
/// Of these, what filling the mask took where it was timed (240 ms for 12,288 tokens).
const FILL_NS: f64 = 1.6;
/// Threads that share it go over half of the cells together (`preload::masks`), and write no faster than memory takes: reckoned.
const SHARED: f64 = 0.5;
const WRITE_NS: f64 = 0.1;
/// Bytes of a cell of the mask.
const MASK_BYTES: f64 = 2.0;
/// What copies from memory that is not pinned reach, 10^9 bytes per second: stock's of a mapped file, and the mask's of long passes.
const PAGEABLE_GBS: f64 = 9.4;
/// Host memory for computing above this is not pinned.
const PINNED_INPUTS: f64 = (256_u64 << 20) as f64;
/// Tokens of one text use each other's experts: so many count for `tokens` to this power.
const ALIKE: f64 = 0.6;
/// What a thread computes of prompts, 10^12 operations per second; a guess.
const THREAD_TFLOPS: f64 = 0.05;
/// Computing in slices takes so much longer, as measured with slices of 4,096 of 12,288 tokens.
pub(crate) const SLICED: f64 = 1.035;
/// How much of the shorter of computing and copying was hidden behind the longer one by [`Ways::used_only`].
const HALF: f64 = 0.5;

/// How bytes reach the card.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ways {
    /// Stock copies experts from a mapped file, which is not pinned.
    pub pageable: bool,
    /// The plugin brings experts that are used only, and hides half of the shorter time: as it was before layers were brought as a whole. For
    /// rows that were measured then.
    pub used_only: bool,
    /// Large inputs of the plugin's passes are copied from memory that is not pinned, so many times: as it was before commit 48757c1, where a
    /// link that was made to look slow repeated these copies. For rows that were measured then.
    pub slow_inputs: Option<f64>,
    /// The plugin computes experts in slices.
    pub sliced: bool,
    /// Threads that fill the mask of the plugin's passes, where the host's one does not.
    pub mask_threads: Option<u32>,
    /// Tokens of a pass from which on the plugin brings all experts of a layer; the shorter way if not told.
    pub stream_from: Option<u64>,
}

/// One pass.
#[derive(Clone, Copy, Debug)]
struct Pass {
    tokens: f64,
    /// Cells of the context behind it.
    cells: f64,
}

/// What a pass takes, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    /// Tokens, no time.
    tokens: f64,
    gpu: f64,
    /// Bytes of experts that are used, or of all, on the way to the card.
    used: f64,
    whole: f64,
    /// What comes before the pass.
    before: f64,
    /// Waiting for the ids of layers whose experts are brought by use.
    rounds: f64,
    cpu: f64,
    disk: f64,
}

/// The part of a layer's experts that so many tokens use.
pub fn touched(used: u64, experts: u64, tokens: f64) -> f64 {
    1.0 - (1.0 - used as f64 / experts.max(1) as f64).powf(tokens.powf(ALIKE))
}

/// What so many operations of products and of attention take a card, in microseconds.
pub(crate) fn computing_us(ability: &Ability, operations: f64, attention: f64) -> f64 {
    operations / (FULL_TILES * ability.prompt_tflops) / 1e6 + attention / (ATTENTION * ability.prompt_tflops) / 1e6
}

/// A prompt of so many tokens in passes of at most `batch`.
pub fn prompt(setting: &Setting<'_>, tokens: u64, batch: u64) -> Speed {
    let (tokens, batch) = (tokens.max(1), batch.max(1));
    let (mut at, mut us) = (0, 0.0);
    let mut sums = Times::default();
    let mut link = 0.0;
    // Long prompts in short passes are not walked pass by pass: all full passes are like the one in their middle.
    let full = tokens / batch;
    let middle = Pass { tokens: batch as f64, cells: batch as f64 * (full as f64 + 1.0) / 2.0 };
    let tail = Pass { tokens: (tokens % batch) as f64, cells: tokens as f64 };
    for (pass, count) in [(middle, full), (tail, u64::from(tail.tokens > 0.0))] {
        if count == 0 {
            continue;
        }
        let times = times(setting, pass);
        let (each, moved) = length(setting, &times);
        let count = count as f64;
        us += count * each;
        link += count * (moved + times.before);
        sums.gpu += count * times.gpu;
        sums.cpu += count * times.cpu;
        sums.disk += count * times.disk;
        at += 1;
    }
    debug_assert!(at > 0);
    let parts = vec![(Bound::Gpu, sums.gpu), (Bound::Link, link), (Bound::Cpu, sums.cpu), (Bound::Disk, sums.disk)];
    Speed::of(tokens as f64, us, parts)
}

/// How long a pass takes, and its copies.
fn length(setting: &Setting<'_>, times: &Times) -> (f64, f64) {
    let Times { gpu, used, whole, before, rounds, cpu, disk, .. } = *times;
    let beside = before + cpu;
    match setting.engine {
        // A layer waits for its ids, and then for its experts.
        Engine::Stock => (gpu + used.max(disk) + rounds + beside, used),
        Engine::Ours if setting.ways.used_only => {
            let moved = used.max(disk);
            (gpu.max(moved) + HALF * gpu.min(moved) + beside, used)
        }
        Engine::Ours => {
            // Whole layers come while the layers before are computed, so only the first one is waited for; or those that are used, layer by layer.
            let first = whole / setting.places.len().max(1) as f64;
            let streamed = gpu.max(whole).max(disk) + first;
            let fetched = gpu + used.max(disk) + rounds;
            let streams = setting.ways.stream_from.map_or(streamed <= fetched, |least| times.tokens >= least as f64);
            if streams { (streamed + beside, whole) } else { (fetched + beside, used) }
        }
    }
}

fn times(setting: &Setting<'_>, pass: Pass) -> Times {
    let Pass { tokens, cells } = pass;
    let mut out = Times { tokens, ..Times::default() };
    for (layer, place) in setting.model.layers.iter().zip(setting.places) {
        let share = layer.used as f64 / layer.experts.max(1) as f64;
        let part = setting.touched.unwrap_or_else(|| touched(layer.used, layer.experts, tokens)).clamp(0.0, 1.0);
        let each_expert = layer.expert_values as f64 / layer.experts.max(1) as f64;
        let rows = tokens * layer.used as f64 + PADDING_ROWS * part * layer.experts as f64;
        let operations = 2.0 * (layer.dense_values as f64 * tokens + each_expert * rows);
        let seen = layer.memory.window.map_or(cells, |window| cells.min(window as f64 + tokens));
        let heads =
            if layer.memory.key > 0 { setting.model.heads as f64 * setting.model.head_values as f64 } else { 0.0 };
        let attention = 2.0 * heads * tokens * seen;
        // Stock brings layers of the processors to the first card as well.
        let Some((ability, rate)) = setting.cards.get(place.card.unwrap_or(0)) else {
            let plain = 2.0 * (layer.dense_values as f64 + share * layer.expert_values as f64) * tokens + attention;
            out.cpu += plain / (setting.threads.max(1) as f64 * THREAD_TFLOPS * 1e12) * 1e6;
            continue;
        };
        let held = place.held.clamp(0.0, 1.0);
        let experts = layer.expert_bytes as f64;
        out.rounds += if held < 1.0 && layer.experts > 0 { ROUND_US } else { 0.0 };
        let weights = layer.dense_bytes as f64 + part * experts;
        out.gpu +=
            LAYER_US + weights / (CARD_PART * ability.memory_gbs) / 1e3 + computing_us(ability, operations, attention);
        let dense = if place.card.is_none() { layer.dense_bytes as f64 } else { 0.0 };
        let rate = if setting.ways.pageable { rate.min(PAGEABLE_GBS) } else { *rate }.max(0.01);
        out.used += ((1.0 - held) * part * experts + dense) / rate / 1e3;
        out.whole += ((1.0 - held) * experts + dense) / rate / 1e3;
    }
    out.gpu *= if setting.ways.sliced { SLICED } else { 1.0 };
    out.before = tokens * tokens * mask_ns(setting) / 1e3;
    if let Some((_, rate)) = setting.cards.first() {
        let bytes = tokens * cells * MASK_BYTES;
        out.before += match setting.ways.slow_inputs {
            Some(times) if bytes > PINNED_INPUTS => times * bytes / PAGEABLE_GBS / 1e3,
            _ => bytes / rate.max(0.01) / 1e3,
        };
    }
    let bytes: f64 = link_bytes(setting);
    out.disk = bytes * on_disk(setting) / disk_gbs(setting.machine) / 1e3;
    out
}

/// The host's work for each pair of tokens.
fn mask_ns(setting: &Setting<'_>) -> f64 {
    match setting.ways.mask_threads.filter(|threads| *threads > 1 && setting.engine == Engine::Ours) {
        Some(threads) => MASK_NS - FILL_NS + (FILL_NS * SHARED / f64::from(threads)).max(WRITE_NS),
        None => MASK_NS,
    }
}

fn disk_gbs(machine: &Machine) -> f64 {
    machine.disk_gbs.unwrap_or(DISK_GBS).max(0.01)
}

/// Bytes of experts that a pass reads of RAM, at most.
fn link_bytes(setting: &Setting<'_>) -> f64 {
    let layers = setting.model.layers.iter().zip(setting.places);
    layers.map(|(layer, place)| (1.0 - place.held.clamp(0.0, 1.0)) * layer.expert_bytes as f64).sum()
}
