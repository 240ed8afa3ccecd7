//! Vulkan as the inner device: the llama-server of b10434 on Mesa's software driver, with the plugin and without it.
//!
//! lavapipe computes a dozen tokens a second, so there is one prompt and one answer. The kernels are the same on both sides, but ggml's
//! Vulkan backend fuses operations across the places where the plugin cuts a graph, so log-probabilities may differ in the last digits.

use std::path::Path;
use std::sync::OnceLock;

use serde_json::{Value, json};

use crate::server::ask_with;
use crate::summary::{largest, ran_in_blocks, summaries};
use crate::support::fixture;
use crate::support::server::{Completion, Server};
use crate::support::stock::Side;

/// Tokens of the answer; the first 64 and the probabilities of 100 positions are what the project asks for.
const TOKENS: u32 = 100;
/// How far log-probabilities may lie apart.
const TOLERANCE: f64 = 1e-3;

/// Sizes of the cache, a third of the experts on the device and all of them, and how far log-probabilities of the five best may lie apart, on
/// average and at most.
///
/// What is computed in RAM is rounded as ggml's CPU backend rounds it, which turns activations into eight bits before each product; Vulkan
/// does not. The bounds were chosen after measuring what stock alone does with the same 100 positions: its CPU backend against its Vulkan
/// backend 0.056 and 1.23, its Vulkan backend token by token against one answer 0.008 and 1.35. The largest comes from one position where
/// two experts are nearly tied, so the average is what tells, and the most is what stock reaches itself and a little; slots in the wrong place gave
/// 0.6 and 8.
const CACHED: [(&str, f64, f64); 2] =
    [("inner=Vulkan0;log=debug;cache=6;fixed=1", 0.04, 1.5), ("inner=Vulkan0;log=debug;cache=20;fixed=1", 0.01, 0.2)];
/// Another token may be the best where the backend's own two best lie no further apart.
const TIE: f64 = 0.2;

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

/// A prompt of about 64 tokens.
fn prompt() -> String {
    std::fs::read_to_string(fixture("eval.txt")).expect("the fixture").chars().take(230).collect()
}

/// The answer to it.
fn complete(server: &Server) -> Completion {
    server.complete(&prompt(), TOKENS, 10)
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
    let (ours, theirs) = (log_probabilities(&plugin), log_probabilities(stock));
    assert_eq!((ours.len(), ours[0].len()), (TOKENS as usize, 10));
    let pairs = ours.iter().flatten().zip(theirs.iter().flatten());
    let apart = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    println!("largest difference of {} log-probabilities: {apart:.2e}", TOKENS * 10);
    assert!(apart <= TOLERANCE, "log-probabilities lie {apart} apart");
}

/// For each token of an answer the log-probabilities of its ten best, each computed behind the tokens of that answer, whatever would be chosen.
fn behind(server: &Server, answer: &Completion) -> Vec<Vec<(u64, f64)>> {
    let prompt = server.post("/tokenize", &json!({"content": prompt(), "add_special": true}));
    let mut tokens = prompt["tokens"].as_array().expect("tokens").clone();
    let mut positions = Vec::new();
    for token in &answer.tokens {
        let body = json!({
            "prompt": tokens, "n_predict": 1, "n_probs": 10, "temperature": 0, "seed": 1, "cache_prompt": true,
        });
        let probabilities = server.post("/completion", &body)["completion_probabilities"].clone();
        positions.extend(candidates(&probabilities));
        tokens.push(token.clone());
    }
    positions
}

/// The candidates of each position, best first.
fn candidates(probabilities: &Value) -> Vec<Vec<(u64, f64)>> {
    let pair = |candidate: &Value| {
        (candidate["id"].as_u64().expect("an id"), candidate["logprob"].as_f64().expect("a number"))
    };
    let position = |position: &Value| {
        position["top_logprobs"].as_array().expect("candidates were asked for").iter().map(pair).collect()
    };
    probabilities.as_array().expect("probabilities were asked for").iter().map(position).collect()
}

/// With a cache: behind the same text the same token is the best, but where the backend's own two best lie as near as rounding may move them.
#[test]
fn answers_with_a_cache_equal_the_vulkan_backend() {
    has_driver();
    let stock = stock();
    let theirs = candidates(&stock.probabilities);
    for (keys, most_mean, most) in CACHED {
        let side = Side::Plugin { keys, device: "MoE0" };
        let arguments = ["-c", "512", "-np", "1", "--no-warmup"];
        let (ours, finished) = ask_with(side, &VISIBLE, &arguments, |server| behind(server, stock));
        let log = finished.log();
        let (hits, misses) = (largest(&log, "hits"), largest(&log, "misses"));
        assert_eq!(ours.len(), TOKENS as usize);
        let (mut apart, mut sum, mut count, mut others) = (0.0_f64, 0.0, 0.0, 0);
        for (position, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
            let same = |(id, theirs): &(u64, f64)| {
                ours.iter().find(|(other, _)| other == id).map(|(_, ours)| (ours - theirs).abs())
            };
            // Of those that only one side has among its ten best nothing is known.
            for difference in theirs.iter().take(5).filter_map(same) {
                apart = apart.max(difference);
                sum += difference;
                count += 1.0;
            }
            if ours[0].0 != theirs[0].0 {
                others += 1;
                let gap = theirs[0].1 - theirs[1].1;
                assert!(gap <= TIE, "position {position}: another token, though {gap} lies between");
            }
        }
        let mean = sum / count;
        println!(
            "{keys}: {hits} hits, {misses} misses; log-probabilities {mean:.1e} apart on average, {apart:.1e} at most; {others} of {TOKENS} \
             best tokens differ"
        );
        assert!(hits > 0, "{}", finished.report("no hit"));
        assert!(apart <= most && mean <= most_mean, "{apart} apart, {mean} on average");
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
