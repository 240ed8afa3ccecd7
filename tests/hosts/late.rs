//! The expert cache over a device that is late (`tests/host/late.c`): copies and graphs run on a thread of its own after delays that look
//! random, our uploads on another (`debug-late`), and memory of the cache that nobody may read is poisoned (`debug-poison`).
//!
//! It computes with ggml's CPU backend, so results are stock's unless something was read, written or freed too early. A product that has read
//! poison ends the host. Odd seeds keep pointers to patched operands until a graph has run, as the
//! Vulkan backend does. Seeds with the second bit reach host memory, so that blocks run ahead.

use std::time::Duration;

use serde_json::json;

use crate::architectures;
use crate::perplexity::{figures, perplexity};
use crate::sides::equal_over;
use crate::summary::{largest, ran_in_blocks};
use crate::support::fixture_model;
use crate::support::process::run;
use crate::support::stock::{Side, command, folder};
use crate::support::text;

fn keys(mib: u32, seed: u32) -> String {
    format!("inner=LATE0;log=debug;debug-late={seed};debug-poison=on;cache={mib}")
}

/// 8, 33, 58 and nearly 100% of the fixture's experts.
const SIZES: [u32; 4] = [3, 6, 9, 14];

#[test]
fn one_token_per_pass_equals_stock() {
    let arguments = ["-b", "1", "-ub", "1", "-c", "128"];
    let stock = figures(&perplexity(Side::Stock, 1, 3, &arguments));
    for (seed, mib) in (1..).zip(SIZES) {
        let finished = perplexity(Side::Plugin { keys: &keys(mib, seed), device: "MoE0" }, 1, 3, &arguments);
        assert_eq!(figures(&finished), stock, "{}", finished.report("one token"));
        let log = finished.log();
        for counter in ["hits", "misses", "upload_bytes", "cpu_bytes"] {
            assert!(largest(&log, counter) > 0, "{}", finished.report(&format!("no {counter}")));
        }
        // Where blocks run ahead, nobody waits for the stream.
        assert_eq!(largest(&log, "waits") == 0, seed & 2 != 0, "{}", finished.report("waits of the other kind"));
        assert_eq!(finished.lines_with("runs over LATE0").len(), 1, "{}", finished.report("not over the late device"));
    }
}

#[test]
fn passes_of_eight_tokens_equal_stock() {
    let arguments = ["-b", "8", "-ub", "8", "-c", "128"];
    let stock = figures(&perplexity(Side::Stock, 2, 6, &arguments));
    for (seed, mib) in (11..).zip(SIZES) {
        let finished = perplexity(Side::Plugin { keys: &keys(mib, seed), device: "MoE0" }, 2, 6, &arguments);
        assert_eq!(figures(&finished), stock, "{}", finished.report("eight tokens"));
        assert!(largest(&finished.log(), "misses") > 0, "{}", finished.report("nothing was computed in RAM"));
    }
}

/// Without a cache all experts are copied before each product: what is copied to is what the product before still reads.
#[test]
fn the_plain_path_equals_stock() {
    for (arguments, seed) in [(["-b", "1", "-ub", "1", "-c", "128"], 21), (["-b", "64", "-ub", "32", "-c", "128"], 22)]
    {
        let stock = figures(&perplexity(Side::Stock, 1, 3, &arguments));
        let keys = format!("inner=LATE0;log=debug;debug-late={seed};cache=off");
        let finished = perplexity(Side::Plugin { keys: &keys, device: "MoE0" }, 1, 3, &arguments);
        assert_eq!(figures(&finished), stock, "{}", finished.report("the plain path"));
        ran_in_blocks(&finished);
    }
}

/// Prompts take the plain path, single tokens the cache, in four slots; the model is freed and loaded again in between.
#[test]
fn a_server_with_four_slots_answers_as_stock() {
    let keys = keys(6, 31);
    let side = Side::Plugin { keys: &keys, device: "MoE0" };
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
}

/// Every fifth of the models of test-llama-archs, quantized.
#[test]
fn architectures_equal_stock() {
    let (models, unable) = architectures::k_quantized_models();
    let some: Vec<_> = models.into_iter().step_by(5).collect();
    let keys = keys(64, 41);
    let cached = architectures::equal_with(Side::Plugin { keys: &keys, device: "MoE0" }, &some, &unable).cached;
    assert!(2 * cached > some.len(), "the cache computed in {cached} of {} models", some.len());
}

/// The device itself, without the plugin, computes what stock computes: what the others find is the plugin's.
#[test]
fn the_device_alone_equals_stock() {
    let mut host = command(&folder().join("llama-perplexity"), Side::Plugin { keys: "inner=LATE0", device: "" });
    host.env_remove("GGML_BACKEND_PATH").args([
        "-m",
        text(&fixture_model()),
        "-nr",
        "-t",
        "1",
        "-ngl",
        "99",
        "--device",
        "LATE0",
    ]);
    host.args(["-f", text(&crate::support::fixture("eval.txt")), "-b", "1", "-ub", "1", "-c", "128", "--chunks", "2"]);
    let alone = run(&mut host, Duration::from_secs(60)).success();
    assert_eq!(figures(&alone), figures(&perplexity(Side::Stock, 1, 2, &["-b", "1", "-ub", "1", "-c", "128"])));
}
