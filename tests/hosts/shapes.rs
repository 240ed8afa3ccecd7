//! Blocks of other shapes than the fixture's, with the cache: small versions of what `tests/gpu/synth_moe.py` makes for the GPU machine.
//!
//! One like gpt-oss (128 experts, 4 used, MXFP4, biases on every expert, a clamped activation) and one like DeepSeek (256 experts, 8 used, a
//! shared expert, a dense layer first). Weights are random: figures say nothing of language, but must be stock's.

use std::path::Path;
use std::time::Duration;

use crate::architectures;
use crate::perplexity::figures;
use crate::summary::largest;
use crate::support::generated::{LIKE_GPT_OSS, model};
use crate::support::process::{Finished, run};
use crate::support::stock::{Side, tool};
use crate::support::{fixture, text};

const LIKE_DEEPSEEK: [&str; 20] = [
    "--arch",
    "deepseek2",
    "--layers",
    "3",
    "--embd",
    "256",
    "--ff",
    "256",
    "--heads",
    "4",
    "--hd",
    "32",
    "--rope",
    "32",
    "--q-rank",
    "64",
    "--kv-rank",
    "64",
    "--vocab",
    "1024",
];

fn one_token_per_pass(side: Side<'_>, model: &Path) -> Finished {
    let mut command = tool("llama-perplexity", side, model, 1);
    command.args(["-f", text(&fixture("eval.txt")), "-b", "1", "-ub", "1", "-c", "64", "--chunks", "2"]);
    run(&mut command, Duration::from_secs(120)).success()
}

/// With nearly none, a third and all of the experts on the device, over the CPU and over the late device; every expert block is the cache's.
fn equals_stock(model: &Path, sizes: [u32; 3]) {
    let stock = figures(&one_token_per_pass(Side::Stock, model));
    for mib in sizes {
        for keys in [
            format!("inner=CPU;log=debug;cache={mib}"),
            format!("inner=LATE0;log=debug;debug-late={mib};debug-poison=on;cache={mib}"),
        ] {
            let finished = one_token_per_pass(Side::Plugin { keys: &keys, device: "MoE0" }, model);
            assert_eq!(figures(&finished), stock, "{}", finished.report(&keys));
            let log = finished.log();
            assert!(largest(&log, "hits").min(largest(&log, "misses")) > 0, "{}", finished.report(&keys));
            assert_eq!(largest(&log, "unrecognised"), 0, "{}", finished.report(&keys));
        }
    }
    // All logits of a prompt and of tokens after it, bit for bit.
    let keys = format!("inner=CPU;log=debug;cache={}", sizes[1]);
    let cached =
        architectures::equal_with(Side::Plugin { keys: &keys, device: "MoE0" }, &[model.to_owned()], &[]).cached;
    assert_eq!(cached, 1, "the cache computed nothing");
}

#[test]
fn like_gpt_oss_equals_stock() {
    equals_stock(&model("like-gpt-oss", &LIKE_GPT_OSS), [1, 8, 80]);
}

#[test]
fn like_deepseek_equals_stock() {
    let model = model("like-deepseek", &[&LIKE_DEEPSEEK[..], &["--dense-ff", "256"]].concat());
    equals_stock(&model, [5, 20, 80]);
}
