//! How fast a placement should decode, and what bounds it.
//!
//! Owns: that prediction, what it and the one of prompts (`prompts`) rest on, and the constants that were fitted to measurements. docs/planner.md has the formulas, where each constant comes
//! from, and how far the predictions lie from what was measured.
//! Invariants: a faster link, processor or card, more memory on it or more hits never make a prediction slower.
//! Threads: none. Does not: choose a placement.

use super::cards::{Ability, kernel_gbs};
use super::machine::Machine;
use super::model::{Layer, Model};
use super::prompts::Ways;

/// Time of a layer's kernels in decoding, beside the reading of its weights, microseconds; of those of a pass as well.
pub(super) const LAYER_US: f64 = 58.0;
/// What the plugin adds to a layer of experts.
const PLUGIN_US: f64 = 6.0;
/// Going to the processors and back, for a layer.
pub(super) const ROUND_US: f64 = 30.0;
/// The part of a card's memory rate that reading weights reaches.
pub(super) const CARD_PART: f64 = 0.75;
/// The part of the RAM's rate, and of the kernels', that the plugin's threads reach.
const TEAM_PARTS: [f64; 2] = [0.68, 0.72];
/// The same of stock's.
const STOCK_PARTS: [f64; 2] = [0.60, 0.60];
/// What one use of an expert less per B_cpu/B_link costs in hits.
const HITS_PER_PAYBACK: f64 = 0.005;
/// A disk of which nothing is known, 10^9 bytes per second.
pub(super) const DISK_GBS: f64 = 2.0;

/// What takes most of the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The card.
    Gpu,
    /// The processors, or the RAM that they read.
    Cpu,
    /// Waiting of one for the other, layer by layer.
    Rounds,
    /// The link to the card.
    Link,
    /// The disk.
    Disk,
}

impl Bound {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Gpu => "the card",
            Self::Cpu => "the processors reading RAM",
            Self::Rounds => "rounds between card and processors",
            Self::Link => "the link",
            Self::Disk => "the disk",
        }
    }
}

/// A predicted speed.
#[derive(Clone, Debug, PartialEq)]
pub struct Speed {
    /// Tokens per second.
    pub rate: f64,
    /// What takes most of the time.
    pub bound: Bound,
    /// Microseconds of each.
    pub parts: Vec<(Bound, f64)>,
}

impl Speed {
    pub(super) fn of(tokens: f64, microseconds: f64, parts: Vec<(Bound, f64)>) -> Self {
        let bound = parts.iter().max_by(|one, other| one.1.total_cmp(&other.1)).map_or(Bound::Gpu, |(bound, _)| *bound);
        Self { rate: tokens * 1e6 / microseconds.max(1e-9), bound, parts }
    }
}

/// Where a layer lies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place {
    /// The card, by number; `None` is the processors.
    pub card: Option<usize>,
    /// The part of the uses of its experts that are found on the card.
    pub found: f64,
    /// The part of its experts' bytes that lie there.
    pub held: f64,
}

/// What computes experts that are not on a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// llama.cpp itself.
    Stock,
    /// The plugin.
    Ours,
}

/// What a prediction rests on.
#[derive(Clone, Copy, Debug)]
pub struct Setting<'a> {
    /// The model.
    pub model: &'a Model,
    /// The machine.
    pub machine: &'a Machine,
    /// Cards, in the order of [`Place::card`]: what each can do, and its link in 10^9 bytes per second.
    pub cards: &'a [(Ability, f64)],
    /// Where each layer lies.
    pub places: &'a [Place],
    /// The card with the output.
    pub output: Option<usize>,
    /// Threads.
    pub threads: u64,
    /// Who computes.
    pub engine: Engine,
    /// The part of a layer's experts that a pass uses, if it is known.
    pub touched: Option<f64>,
    /// How experts and inputs of passes reach the card.
    pub ways: Ways,
}

/// 10^9 bytes per second of this layer's experts that the threads get through.
pub fn expert_gbs(layer: &Layer, machine: &Machine, threads: u64, engine: Engine) -> f64 {
    let [memory, kernel] = match engine {
        Engine::Stock => STOCK_PARTS,
        Engine::Ours => TEAM_PARTS,
    };
    let bytes: f64 = layer.types.iter().map(|(_, bytes)| *bytes as f64).sum();
    let seconds: f64 = layer.types.iter().map(|(kind, bytes)| *bytes as f64 / kernel_gbs(*kind)).sum();
    let each = if seconds > 0.0 { bytes / seconds } else { kernel_gbs(12) };
    (memory * machine.cpu_gbs).min(kernel * each * threads.max(1) as f64).max(0.01)
}

/// Hits on a link of this rate: each upload must bring more uses on a slow one, so fewer are made.
pub fn hits_on_link(hits: f64, cpu_gbs: f64, link_gbs: f64) -> f64 {
    if hits >= 1.0 {
        return hits;
    }
    let payback = cpu_gbs / link_gbs.max(0.1);
    (hits - HITS_PER_PAYBACK * payback.min(20.0)).max(hits / 2.0)
}

/// The part of the model's experts that does not fit the RAM, and is read from the disk.
pub(super) fn on_disk(setting: &Setting<'_>) -> f64 {
    let experts = setting.model.expert_bytes() as f64;
    let room = setting.machine.room() as f64;
    if experts > room { (experts - room) / experts } else { 0.0 }
}

/// Decoding, one token at a time, with a short context.
pub fn decode(setting: &Setting<'_>) -> Speed {
    let Setting { model, machine, cards, engine, .. } = *setting;
    let (mut gpu, mut cpu, mut rounds, mut missed) = (0.0, 0.0, 0.0, 0.0);
    let card_us =
        |card: usize, bytes: f64| bytes / (CARD_PART * cards.get(card).map_or(1.0, |card| card.0.memory_gbs)) / 1e3;
    let ram_us = |bytes: f64| bytes / (STOCK_PARTS[0] * machine.cpu_gbs).max(0.01) / 1e3;
    for (layer, place) in model.layers.iter().zip(setting.places) {
        let used = layer.used_bytes();
        let found = place.found.clamp(0.0, 1.0);
        match place.card {
            Some(card) => gpu += LAYER_US + card_us(card, layer.dense_bytes as f64 + found * used),
            None => cpu += ram_us(layer.dense_bytes as f64),
        }
        if layer.experts == 0 {
            continue;
        }
        let misses = (1.0 - found) * used;
        missed += misses;
        cpu += misses / expert_gbs(layer, machine, setting.threads, engine) / 1e3;
        if place.card.is_some() {
            let any = 1.0 - found.powf(layer.used as f64);
            rounds += ROUND_US * if engine == Engine::Stock { any.ceil() } else { any };
            gpu += if engine == Engine::Ours { PLUGIN_US } else { 0.0 };
        }
    }
    match setting.output {
        Some(card) => gpu += card_us(card, model.output_bytes as f64),
        None => cpu += ram_us(model.output_bytes as f64),
    }
    let disk = missed * on_disk(setting) / machine.disk_gbs.unwrap_or(DISK_GBS).max(0.01) / 1e3;
    let parts = vec![(Bound::Gpu, gpu), (Bound::Cpu, cpu), (Bound::Rounds, rounds), (Bound::Disk, disk)];
    Speed::of(1.0, parts.iter().map(|(_, us)| us).sum(), parts)
}

#[cfg(test)]
mod tests {
    use super::super::cards::ability;
    use super::super::prompts::prompt;
    use super::super::samples;
    use super::*;
    use proptest::prelude::*;

    fn speeds(link: f64, cpu: f64, found: f64, engine: Engine) -> (f64, f64) {
        let model = samples::qwen();
        let machine = Machine { ram: 1 << 40, available: 1 << 40, cpu_gbs: cpu, ..Machine::default() };
        let places = vec![Place { card: Some(0), found, held: found }; 48];
        let cards = [(ability("RTX 4060"), link)];
        let setting = Setting {
            model: &model,
            machine: &machine,
            cards: &cards,
            places: &places,
            output: Some(0),
            threads: 8,
            engine,
            touched: None,
            ways: Ways::default(),
        };
        (decode(&setting).rate, prompt(&setting, 4096, 2048).rate)
    }

    #[test]
    fn what_bounds_is_named() {
        let model = samples::qwen();
        let machine = Machine { ram: 1 << 40, available: 1 << 40, cpu_gbs: 40.0, ..Machine::default() };
        let cards = [(ability("NVIDIA H200"), 3.0)];
        let at = |found: f64| {
            let places = vec![Place { card: Some(0), found, held: found }; 48];
            let setting = Setting {
                model: &model,
                machine: &machine,
                cards: &cards,
                places: &places,
                output: Some(0),
                threads: 8,
                engine: Engine::Ours,
                touched: None,
                ways: Ways::default(),
            };
            (decode(&setting).bound, prompt(&setting, 2048, 2048).bound)
        };
        assert_eq!(at(0.2), (Bound::Cpu, Bound::Link));
        assert_eq!(at(1.0), (Bound::Gpu, Bound::Gpu));
    }

    #[test]
    fn a_model_larger_than_ram_is_bound_by_the_disk() {
        let model = samples::qwen();
        let machine = Machine { ram: 4 << 30, available: 4 << 30, cpu_gbs: 40.0, ..Machine::default() };
        let places = vec![Place { card: Some(0), found: 0.0, held: 0.0 }; 48];
        let cards = [(ability("NVIDIA H200"), 25.0)];
        let setting = Setting {
            model: &model,
            machine: &machine,
            cards: &cards,
            places: &places,
            output: Some(0),
            threads: 8,
            engine: Engine::Ours,
            touched: None,
            ways: Ways::default(),
        };
        assert_eq!(decode(&setting).bound, Bound::Disk);
    }

    proptest! {
        #[test]
        fn better_is_never_slower(link in 1.0_f64..60.0, cpu in 5.0_f64..300.0, found in 0.0_f64..1.0, more in 1.0_f64..3.0, ours: bool) {
            let engine = if ours { Engine::Ours } else { Engine::Stock };
            let (decode, prompt) = speeds(link, cpu, found, engine);
            let better = [
                speeds(link * more, cpu, found, engine),
                speeds(link, cpu * more, found, engine),
                speeds(link, cpu, (found * more).min(1.0), engine),
            ];
            for (faster, sooner) in better {
                prop_assert!(faster >= decode * 0.999_999 && sooner >= prompt * 0.999_999);
            }
            prop_assert!(hits_on_link(found, cpu, link * more) >= hits_on_link(found, cpu, link));
            prop_assert!((0.0..=1.0).contains(&hits_on_link(found, cpu, link)));
        }
    }
}
