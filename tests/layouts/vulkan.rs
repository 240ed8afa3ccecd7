//! Vulkan as the inner device: the llama-server of b10434 on Mesa's software driver, with the plugin and without it.
//!
//! lavapipe computes a dozen tokens a second, so there is one prompt and one answer. The kernels are the same on both sides, but ggml's
//! Vulkan backend fuses operations across the places where the plugin cuts a graph, so log-probabilities may differ in the last digits.

use std::path::Path;
use std::sync::OnceLock;

use serde_json::Value;

use crate::server::ask_with;
use crate::summary::{largest, ran_in_blocks, summaries};
use crate::support::fixture;
use crate::support::server::{Completion, Server};
use crate::support::stock::Side;

/// Tokens of the answer; the first 64 and the probabilities of 100 positions are what the project asks for.
const TOKENS: u32 = 100;
/// How far log-probabilities may lie apart.
const TOLERANCE: f64 = 1e-3;

/// Tokens that must be the same with a cache, too.
const SAME_TOKENS: usize = 64;
/// Sizes of the cache, and how far log-probabilities may lie apart: what is computed in RAM is rounded as ggml's CPU backend rounds it, which
/// turns activations into eight bits before each product.
const CACHED: [(&str, f64); 2] =
    [("inner=Vulkan0;log=debug;cache=6", 0.25), ("inner=Vulkan0;log=debug;cache=20", 0.25)];

const OVER_VULKAN: Side<'static> = Side::Plugin { keys: "inner=Vulkan0;log=debug", device: "MoE0" };

/// llvmpipe is a processor to Vulkan, and ggml takes such devices only when they are named.
const VISIBLE: [(&str, &str); 1] = [("GGML_VK_VISIBLE_DEVICES", "0")];

/// Fails with what to install when Mesa's software driver is missing: ggml then finds no device, and the plugin refuses.
fn has_driver() {
    let folders = ["/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d"];
    let is_lavapipe = |name: &str| name.starts_with("lvp_icd");
    let found = folders.iter().filter_map(|folder| std::fs::read_dir(Path::new(folder)).ok()).flatten().flatten();
    let found = found.filter(|entry| is_lavapipe(&entry.file_name().to_string_lossy())).count();
    assert!(found > 0, "Mesa's software driver is missing: install Debian's mesa-vulkan-drivers");
}

/// A prompt of about 64 tokens and the answer to it.
fn complete(server: &Server) -> Completion {
    let prompt: String = std::fs::read_to_string(fixture("eval.txt")).expect("the fixture").chars().take(230).collect();
    server.complete(&prompt, TOKENS, 10)
}

fn log_probabilities(completion: &Completion) -> Vec<Vec<f64>> {
    let numbers = |position: &Value| {
        let candidates = position["top_logprobs"].as_array().expect("candidates were asked for");
        candidates.iter().map(|candidate| candidate["logprob"].as_f64().expect("a number")).collect()
    };
    completion.probabilities.as_array().expect("probabilities were asked for").iter().map(numbers).collect()
}

/// The answer of the backend itself, asked once.
fn stock() -> &'static Completion {
    static STOCK: OnceLock<Completion> = OnceLock::new();
    STOCK.get_or_init(|| {
        let arguments = ["-c", "512", "-np", "1", "--no-warmup", "-ngl", "99", "--device", "Vulkan0"];
        ask_with(Side::Stock, &VISIBLE, &arguments, complete).0
    })
}

/// The largest difference between the log-probabilities of two answers, over their first positions.
fn largest_difference(ours: &Completion, theirs: &Completion, positions: usize) -> f64 {
    let (ours, theirs) = (log_probabilities(ours), log_probabilities(theirs));
    assert_eq!((ours.len(), ours[0].len()), (TOKENS as usize, 10));
    let pairs = ours.iter().zip(&theirs).take(positions).flat_map(|(ours, theirs)| ours.iter().zip(theirs));
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn answers_equal_the_vulkan_backend() {
    has_driver();
    let stock = stock();
    let (plugin, finished) = ask_with(OVER_VULKAN, &VISIBLE, &["-c", "512", "-np", "1", "--no-warmup"], complete);
    ran_in_blocks(&finished);
    assert_eq!(
        finished.lines_with("MoE0 runs over Vulkan0: experts stay in RAM").len(),
        1,
        "{}",
        finished.report("the mode")
    );
    assert_eq!(stock.tokens.len(), TOKENS as usize);
    assert_eq!(plugin.tokens, stock.tokens);
    let apart = largest_difference(&plugin, stock, TOKENS as usize);
    println!("largest difference of {} log-probabilities: {apart:.2e}", TOKENS * 10);
    assert!(apart <= TOLERANCE, "log-probabilities lie {apart} apart");
}

/// A third of the experts on the device, and all of them.
#[test]
fn answers_with_a_cache_equal_the_vulkan_backend() {
    has_driver();
    let stock = stock();
    for (keys, tolerance) in CACHED {
        let side = Side::Plugin { keys, device: "MoE0" };
        let (plugin, finished) = ask_with(side, &VISIBLE, &["-c", "512", "-np", "1", "--no-warmup"], complete);
        let log = finished.log();
        let (hits, misses) = (largest(&log, "hits"), largest(&log, "misses"));
        let same = plugin.tokens.iter().zip(&stock.tokens).take_while(|(ours, theirs)| ours == theirs).count();
        // The position at which the answers part still has the same text before it.
        let apart = largest_difference(&plugin, stock, (same + 1).min(TOKENS as usize));
        println!(
            "{keys}: {hits} hits, {misses} misses, {same} tokens equal, log-probabilities at most {apart:.2e} apart"
        );
        assert!(hits > 0, "{}", finished.report("no hit"));
        assert!(same >= SAME_TOKENS, "{}", finished.report(&format!("only {same} tokens are equal")));
        assert!(apart <= tolerance, "log-probabilities lie {apart} apart");
    }
}

/// A Vulkan device without a PCI address cannot be told from ours by it: ours must not become a second device by default.
#[test]
fn the_default_device_stays() {
    has_driver();
    let unnamed = Side::Plugin { keys: "inner=Vulkan0;log=debug", device: "" };
    let short = |server: &Server| server.complete("A tuple is", 4, 0).tokens;
    let arguments = ["-c", "256", "-np", "1", "-lv", "4", "-ngl", "99", "--no-warmup"];
    let (answer, finished) = ask_with(unnamed, &VISIBLE, &arguments, short);
    assert!(summaries(&finished.log()).is_empty(), "{}", finished.report("a backend of ours was made"));
    assert!(finished.lines_with("using device MoE0").is_empty(), "{}", finished.report("MoE0 was used unnamed"));
    assert!(!finished.lines_with("using device Vulkan0").is_empty(), "{}", finished.report("Vulkan0 was not used"));
    assert_eq!(answer, ask_with(Side::Stock, &VISIBLE, &arguments, short).0);
}
