//! Predictions against figures of docs/measurements.md, on the machine that they were measured on.
//!
//! The constants of `speed` were fitted to these rows, so they show that the formulas can describe them, not that another machine is
//! predicted as well. What is known to miss is listed at the end, with how far.

use super::cards::ability;
use super::machine::Machine;
use super::model::Model;
use super::samples;
use super::speed::{Engine, Place, Setting, decode, hits_on_link, prompt};
use super::{Card, MIB, Usage, cache};
use crate::config::CacheSize;

/// The machine of the rows: an H200, with the rate at which its processors read RAM. It was not measured in those runs. 90 GB/s lies between
/// the 81 and 117 that two other instances read; the instance of the runs "under harder conditions" was slower by as much as stock itself
/// was with the same flags (43.9 instead of 52.6 tokens per second).
fn h200(cpu_gbs: f64, link_gbs: f64, cores: u64) -> Machine {
    Machine {
        ram: 125 * 1024 * MIB,
        available: 120 * 1024 * MIB,
        cores,
        nodes: 1,
        cpu_gbs,
        cards: vec![Card {
            name: "CUDA0".into(),
            description: "NVIDIA H200".into(),
            total: 143_771 * MIB,
            free: 142_000 * MIB,
            link_gbs,
            ..Card::default()
        }],
        ..Machine::default()
    }
}

const USUAL: f64 = 90.0;
const SLOWER: f64 = 72.0;
/// A router with random weights uses half of a layer's experts in a pass: what stock's own speeds with 0 to 48 layers in RAM say.
const TOUCHED: f64 = 0.52;

/// The plugin with a cache for a share of the experts.
fn ours(model: &Model, machine: &Machine, share: f64, batch: u64) -> cache::CachePlan {
    let mib = crate::bench::placement::cache_mib(&model.shape, share);
    let usage = Usage {
        cache: CacheSize::Mib(usize::try_from(mib).unwrap()),
        touched: Some(TOUCHED),
        request: (batch, 128),
        ..Usage::default()
    };
    cache::cache(model, machine, &[&machine.cards[0]], &usage, (16_384, batch), machine.cores).unwrap()
}

/// Stock with the experts of the first layers in RAM; or the plugin with whole layers.
fn layers(model: &Model, machine: &Machine, on_cpu: usize, engine: Engine, batch: u64) -> (f64, f64) {
    let first = model.layers.iter().position(|layer| layer.experts > 0).unwrap();
    let place = |layer: usize| {
        let held = if layer < first + on_cpu { 0.0 } else { 1.0 };
        Place { card: Some(0), found: held, held }
    };
    let places: Vec<Place> = (0..model.layers.len()).map(place).collect();
    let cards = [(ability("NVIDIA H200"), machine.cards[0].link_gbs)];
    let setting = Setting {
        model,
        machine,
        cards: &cards,
        places: &places,
        output: Some(0),
        threads: machine.cores,
        engine,
        touched: Some(TOUCHED),
    };
    (decode(&setting).rate, prompt(&setting, batch, batch).rate)
}

/// Rows that are off by more than a part, each with the figure and the prediction.
fn off(rows: &[(&str, f64, f64)], part: f64) -> Vec<String> {
    let off = |(_, told, predicted): &&(&str, f64, f64)| !((1.0 - part)..=(1.0 + part)).contains(&(predicted / told));
    rows.iter()
        .filter(off)
        .map(|(name, told, predicted)| {
            format!("{name}: {told} measured, {predicted:.1} predicted ({:+.0}%)", 100.0 * (predicted / told - 1.0))
        })
        .collect()
}

#[test]
fn decoding_within_a_fifth() {
    let (qwen, gpt, deepseek) = (samples::qwen(), samples::gpt_oss(), samples::deepseek());
    let (usual, slower) = (h200(USUAL, 53.0, 16), h200(SLOWER, 53.0, 16));
    // Six cores: the rate of eight threads and of four were 48 and 32 GB/s.
    let six = h200(40.0, 53.0, 6);
    let slow = |gbs: f64| h200(SLOWER, gbs, 16);
    let cached = |model: &Model, machine: &Machine, share: f64| ours(model, machine, share, 512).decode.rate;
    let stock = |model: &Model, machine: &Machine, on_cpu: usize| layers(model, machine, on_cpu, Engine::Stock, 512).0;
    let whole = |on_cpu: usize| layers(&qwen, &slower, on_cpu, Engine::Ours, 512).0;
    let rows = [
        ("cache, 20%", 127.8, cached(&qwen, &usual, 0.20)),
        ("cache, 45%", 184.0, cached(&qwen, &usual, 0.45)),
        ("cache, 70%", 229.1, cached(&qwen, &usual, 0.70)),
        ("cache, 100%", 273.0, cached(&qwen, &usual, 1.0)),
        ("like gpt-oss, 30%", 394.8, cached(&gpt, &usual, 0.30)),
        ("like DeepSeek, 30%", 397.3, cached(&deepseek, &usual, 0.30)),
        ("link of 13 GB/s, 20%", 90.9, cached(&qwen, &slow(13.0), 0.20)),
        ("link of 13 GB/s, 45%", 153.8, cached(&qwen, &slow(13.0), 0.45)),
        ("link of 6 GB/s, 20%", 89.9, cached(&qwen, &slow(6.0), 0.20)),
        ("link of 6 GB/s, 45%", 133.7, cached(&qwen, &slow(6.0), 0.45)),
        ("6 cores, 20%", 79.1, cached(&qwen, &six, 0.20)),
        ("6 cores, 45%", 164.5, cached(&qwen, &six, 0.45)),
        ("stock mode, 20%", 54.2, whole(38)),
        ("stock mode, 45%", 77.2, whole(26)),
        ("stock mode, 70%", 105.9, whole(14)),
        ("stock, -ncmoe 38", 52.6, stock(&qwen, &usual, 38)),
        ("stock, -ncmoe 26", 78.5, stock(&qwen, &usual, 26)),
        ("stock, -ncmoe 14", 113.2, stock(&qwen, &usual, 14)),
        ("stock, all in VRAM", 297.3, stock(&qwen, &usual, 0)),
        ("stock, slower instance, -ncmoe 38", 43.9, stock(&qwen, &slower, 38)),
        ("stock, slower instance, -ncmoe 26", 61.4, stock(&qwen, &slower, 26)),
        ("stock, slower instance, -ncmoe 14", 96.5, stock(&qwen, &slower, 14)),
        ("stock, 6 cores, -ncmoe 38", 21.4, stock(&qwen, &six, 38)),
        ("stock, 6 cores, -ncmoe 26", 32.5, stock(&qwen, &six, 26)),
        ("stock, like gpt-oss, 2 of 8 layers", 130.0, stock(&gpt, &usual, 6)),
        ("stock, like DeepSeek, 2 of 8 layers", 142.0, stock(&deepseek, &usual, 6)),
    ];
    for (name, told, predicted) in &rows {
        println!("{name:<40} {told:>7.1} {predicted:>7.1} {:>+5.0}%", 100.0 * (predicted / told - 1.0));
    }
    assert_eq!(off(&rows, 0.20), Vec::<String>::new());
}

#[test]
fn hits_near_those_that_were_counted() {
    let (qwen, gpt, deepseek) = (samples::qwen(), samples::gpt_oss(), samples::deepseek());
    let hits =
        |model: &Model, link: f64, cpu: f64, share: f64| 100.0 * ours(model, &h200(cpu, link, 16), share, 512).hits;
    for (name, told, predicted) in [
        ("20%", 77.7, hits(&qwen, 53.0, USUAL, 0.20)),
        ("45%", 93.5, hits(&qwen, 53.0, USUAL, 0.45)),
        ("70%", 96.7, hits(&qwen, 53.0, USUAL, 0.70)),
        ("13 GB/s, 20%", 76.1, hits(&qwen, 13.0, SLOWER, 0.20)),
        ("13 GB/s, 45%", 90.6, hits(&qwen, 13.0, SLOWER, 0.45)),
        ("6 GB/s, 20%", 73.7, hits(&qwen, 6.0, SLOWER, 0.20)),
        ("6 GB/s, 45%", 87.6, hits(&qwen, 6.0, SLOWER, 0.45)),
        ("like gpt-oss, 30%", 82.3, hits(&gpt, 53.0, USUAL, 0.30)),
        ("like DeepSeek, 30%", 84.5, hits(&deepseek, 53.0, USUAL, 0.30)),
    ] {
        println!("{name:<20} {told:>6.1} {predicted:>6.1}");
        assert!((predicted - told).abs() < 4.0, "{name}: {told} counted, {predicted:.1} expected");
    }
    assert!((hits_on_link(0.9, 60.0, 60.0) - 0.895).abs() < 1e-9);
}

#[test]
fn prompts_within_a_fifth_where_the_link_is_known() {
    let model = samples::qwen();
    // The instance of the rows "cache, pp64" to "pp8192" moved about 27 GB/s.
    let narrow = h200(USUAL, 27.0, 16);
    let wide = h200(USUAL, 53.0, 16);
    let cached = |share: f64, batch: u64| ours(&model, &narrow, share, batch).prompt.rate;
    let stock = |on_cpu: usize, batch: u64| layers(&model, &wide, on_cpu, Engine::Stock, batch).1;
    let rows = [
        ("cache, pp64, 20%", 244.0, cached(0.20, 64)),
        ("cache, pp64, 45%", 315.0, cached(0.45, 64)),
        ("cache, pp512, 20%", 1907.0, cached(0.20, 512)),
        ("cache, pp512, 45%", 2344.0, cached(0.45, 512)),
        ("cache, pp2048, 20%", 6934.0, cached(0.20, 2048)),
        ("cache, pp8192, 20%", 6882.0, cached(0.20, 2048)),
        ("cache, pp2048, 45%", 7777.0, cached(0.45, 2048)),
        ("cache, pp8192, 45%", 7276.0, cached(0.45, 2048)),
        ("everything in VRAM, pp2048", 13_380.0, stock(0, 2048)),
        ("everything in VRAM, pp512", 11_126.0, stock(0, 512)),
        // Of the prototype's table, prompts of 12,288 tokens.
        ("stock, -ncmoe 48, ub 512", 2909.0, stock(48, 512)),
        ("stock, -ncmoe 38, ub 512", 3417.0, stock(38, 512)),
        ("stock, -ncmoe 26, ub 512", 4386.0, stock(26, 512)),
        ("stock, -ncmoe 14, ub 512", 5488.0, stock(14, 512)),
        ("stock, -ncmoe 48, ub 2048", 6460.0, stock(48, 2048)),
        ("stock, -ncmoe 38, ub 2048", 7380.0, stock(38, 2048)),
        ("stock, -ncmoe 26, ub 2048", 8722.0, stock(26, 2048)),
        ("stock, -ncmoe 14, ub 2048", 9898.0, stock(14, 2048)),
        ("stock, -ncmoe 48, ub 12288", 7853.0, stock(48, 12288)),
        ("stock, -ncmoe 26, ub 12288", 8421.0, stock(26, 12288)),
        ("stock, all in VRAM, ub 12288", 8683.0, stock(0, 12288)),
    ];
    for (name, told, predicted) in &rows {
        println!("{name:<40} {told:>7.0} {predicted:>7.0} {:>+5.0}%", 100.0 * (predicted / told - 1.0));
    }
    assert_eq!(off(&rows, 0.20), Vec::<String>::new());
}

/// Prompts of 12,288 tokens in passes whose memory the cache lends; the last two are missed.
#[test]
fn long_passes() {
    let model = samples::qwen();
    let cached = |share: f64, link: f64, batch: u64| {
        let mib = crate::bench::placement::cache_mib(&model.shape, share);
        let usage = Usage {
            cache: CacheSize::Mib(usize::try_from(mib).unwrap()),
            touched: Some(TOUCHED),
            request: (12_288, 128),
            ..Usage::default()
        };
        let mut machine = h200(USUAL, link, 16);
        // The bench's budget: what dense weights, a context and a buffer for 512 tokens take, and the cache.
        let beside = crate::planner::room::taken(&model, &usage, (0, model.layers.len()), true, 16_384, 512).sum();
        machine.cards[0].free = beside + (mib + 384) * MIB;
        cache::cache(&model, &machine, &[&machine.cards[0]], &usage, (16_384, batch), 16).unwrap().prompt.rate
    };
    let rows = [
        ("45%, ub 2048", 9189.0, cached(0.45, 53.0, 2048)),
        ("45%, ub 4096", 10_716.0, cached(0.45, 53.0, 4096)),
        ("45%, ub 8192", 9479.0, cached(0.45, 53.0, 8192)),
        ("45%, ub 12288", 7456.0, cached(0.45, 53.0, 12_288)),
        ("20%, ub 4096", 10_970.0, cached(0.20, 53.0, 4096)),
        ("20%, ub 8192", 9042.0, cached(0.20, 53.0, 8192)),
        ("45%, 13 GB/s, ub 12288", 7720.0, cached(0.45, 13.0, 12_288)),
    ];
    for (name, told, predicted) in &rows {
        println!("{name:<40} {told:>7.0} {predicted:>7.0} {:>+5.0}%", 100.0 * (predicted / told - 1.0));
    }
    assert_eq!(off(&rows, 0.20), Vec::<String>::new());
    let missed = [
        ("20%, ub 2048", 7179.0, cached(0.20, 53.0, 2048)),
        ("45%, 6 GB/s, ub 12288", 4181.0, cached(0.45, 6.0, 12_288)),
    ];
    assert_eq!(off(&missed, 0.20).len(), missed.len());
}

/// Rows that the formulas do not describe, so that nobody takes them for covered: a change that reaches one should move it above.
#[test]
fn what_is_known_to_miss() {
    let model = samples::qwen();
    let narrow = h200(USUAL, 27.0, 16);
    let stock = |on_cpu: usize, batch: u64| layers(&model, &narrow, on_cpu, Engine::Stock, batch).1;
    let rows = [
        // Stock on the instance with the narrow link was slower than its bytes at 27 GB/s take, and its own repetitions differ by half.
        ("stock, pp64, -ncmoe 38", 91.0, stock(38, 64)),
        ("stock, pp512, -ncmoe 38", 727.0, stock(38, 512)),
        ("stock, pp2048, -ncmoe 38", 2230.0, stock(38, 2048)),
        ("stock, pp8192, -ncmoe 38", 3170.0, stock(38, 2048)),
    ];
    for (name, told, predicted) in &rows {
        println!("{name:<40} {told:>7.0} {predicted:>7.0} {:>+5.0}%", 100.0 * (predicted / told - 1.0));
    }
    assert_eq!(off(&rows, 0.20).len(), rows.len());
}
