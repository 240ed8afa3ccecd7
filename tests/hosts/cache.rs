//! The expert cache over ggml's CPU backend: part of the experts "on the device", the others computed by the thread team in RAM.
//!
//! Both sides compute with ggml's own kernels, so everything is equal to stock, whatever the size of the cache.

use crate::architectures;
use crate::perplexity::{figures, perplexity, perplexity_within};
use crate::sides::equal_over;
use std::time::Duration;

use crate::summary::{largest, ran_in_blocks, summaries};
use crate::support::process::run;
use crate::support::stock::{Side, program};
use crate::support::{fixture_model, text};
use serde_json::json;

/// 8, 33, 58 and nearly 100% of the fixture's 192 experts.
const SIZES: [&str; 4] = ["cache=3", "cache=6", "cache=9", "cache=14"];

/// In so many of the models of test-llama-archs the cache computes; the others have blocks of forms that it leaves to the plain path.
const LEAST_CACHED: usize = 40;

#[test]
fn one_token_per_pass_equals_stock_at_every_size() {
    let arguments = ["-b", "1", "-ub", "1", "-c", "128"];
    let stock = figures(&perplexity(Side::Stock, 1, 6, &arguments));
    for size in SIZES {
        let keys = format!("inner=CPU;log=debug;{size}");
        let finished = perplexity(Side::Plugin { keys: &keys, device: "MoE0" }, 1, 6, &arguments);
        assert_eq!(figures(&finished), stock, "{}", finished.report(size));
        let log = finished.log();
        for counter in ["hits", "misses", "upload_bytes", "cpu_bytes"] {
            assert!(largest(&log, counter) > 0, "{}", finished.report(&format!("{size}: no {counter}")));
        }
        assert_eq!(largest(&log, "unrecognised"), 0, "{}", finished.report(size));
    }
}

/// All of the text, about three minutes for `make test-full`. Equal figures in each chunk are more than the quality bar asks for: no difference
/// within 0.2% and two standard errors.
#[test]
#[ignore = "make test-full runs it"]
fn all_chunks_of_one_token_per_pass_equal_stock() {
    let arguments = ["-b", "1", "-ub", "1"];
    let limit = Duration::from_secs(600);
    let stock = figures(&perplexity_within(limit, Side::Stock, 1, 0, &arguments));
    assert!(stock.len() > 40, "{} figures", stock.len());
    for size in &SIZES[..3] {
        let keys = format!("inner=CPU;log=debug;{size}");
        let finished = perplexity_within(limit, Side::Plugin { keys: &keys, device: "MoE0" }, 1, 0, &arguments);
        assert_eq!(figures(&finished), stock, "{}", finished.report(size));
        let log = finished.log();
        println!(
            "{size}: {} hits, {} misses, equal in {} chunks",
            largest(&log, "hits"),
            largest(&log, "misses"),
            stock.len() - 1
        );
        assert!(largest(&log, "hits").min(largest(&log, "misses")) > 0, "{}", finished.report(size));
    }
}

#[test]
fn passes_of_several_tokens_equal_stock() {
    let arguments = ["-b", "8", "-ub", "8", "-c", "128"];
    let stock = figures(&perplexity(Side::Stock, 2, 6, &arguments));
    let finished = perplexity(Side::Plugin { keys: "inner=CPU;log=debug;cache=6", device: "MoE0" }, 2, 6, &arguments);
    assert_eq!(figures(&finished), stock, "{}", finished.report("eight tokens"));
    assert!(largest(&finished.log(), "misses") > 0, "{}", finished.report("nothing was computed in RAM"));
}

/// A prompt's graph has one block for the cache, that of the last layer, which computes the last token alone. What is made for it must not
/// be all that later tokens find.
#[test]
fn a_prompt_before_leaves_a_cache_for_all_layers() {
    let mut command = program("llama-bench", Side::Plugin { keys: "inner=CPU;log=debug;cache=6", device: "MoE0" });
    command.args(["-m", text(&fixture_model()), "-dev", "MoE0", "-ngl", "99", "-t", "1", "--repack", "0", "-v"]);
    let finished = run(command.args(["-p", "16", "-n", "8", "-r", "1"]), Duration::from_secs(60)).success();
    let decode = summaries(&finished.log()).pop().expect("a context for the prompt, one for decoding");
    let uses = ["hits", "misses"].map(|name| decode[name].as_u64().unwrap_or(0)).iter().sum::<u64>();
    assert_eq!(uses, 6 * 4 * 9, "{}", finished.report("six layers, four experts, a warm-up and eight tokens"));
    assert!(finished.lines_with("of 192 experts").len() == 1, "{}", finished.report("the cache knows all experts"));
}

/// Prompts take the plain path, single tokens the cache; two contexts share it; the model is freed and loaded again in between.
#[test]
fn a_server_answers_as_stock() {
    let side = Side::Plugin { keys: "inner=CPU;log=debug;cache=6", device: "MoE0" };
    let arguments = ["-c", "2048", "-np", "4", "--sleep-idle-seconds", "1"];
    let body = json!({
        "prompt": ["A list is a mutable", "import os\nfor name in", "The function returns", "## Ownership\n"], "n_predict": 24,
        "temperature": 0, "seed": 1, "return_tokens": true, "cache_prompt": false,
    });
    let tokens = |answer: &serde_json::Value| {
        let mut all = answer.as_array().expect("one answer per prompt").clone();
        all.sort_by_key(|one| one["index"].as_u64());
        all.iter().map(|one| one["tokens"].clone()).collect::<Vec<_>>()
    };
    let (_, finished) = equal_over(side, &fixture_model(), &arguments, |server| {
        let first = tokens(&server.post("/completion", &body));
        server.wait_asleep();
        (first, tokens(&server.post("/completion", &body)), server.complete("A tuple is", 32, 5))
    });
    assert!(largest(&finished.log(), "hits") > 0, "{}", finished.report("no hit"));
    ran_in_blocks(&finished);
}

/// Their logits after single tokens must be stock's: the first is computed in RAM, the others more and more from the cache, which holds all of
/// a model in the end.
#[test]
fn architectures_equal_stock() {
    let side = Side::Plugin { keys: "inner=CPU;log=debug;cache=64", device: "MoE0" };
    let plain = architectures::equal_with(side, &architectures::plain_models(), &[]).cached;
    let (models, unable) = architectures::k_quantized_models();
    let quantized = architectures::equal_with(side, &models, &unable).cached;
    println!("the cache computed in {plain} plain models and in {quantized} as Q4_K_M");
    assert!(plain.min(quantized) >= LEAST_CACHED, "the cache computed in {plain} and {quantized} models only");
}
