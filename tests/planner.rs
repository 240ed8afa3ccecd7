//! What the planner reckons of memory, against llama.cpp's own figures: every MoE architecture that stock's test program writes, and the commands
//! over programs that only look like the host's.
#![expect(clippy::panic, clippy::expect_used, reason = "a test fails by panicking")]

#[path = "support/mod.rs"]
#[expect(dead_code, reason = "shared with the tests against hosts")]
mod support;

use std::fs;
use std::path::Path;
use std::time::Duration;

use ggml_moe::planner::memory::{compute_bytes, context_bytes};
use ggml_moe::planner::{MIB, Model, Usage};
use support::process::run;
use support::stock::{Side, load_all_backends, program};
use support::text;

/// MiB of weights, context and computing, as llama-fit-params tells them.
fn told(model: &Path, flags: &[&str]) -> [u64; 3] {
    let mut command = program("llama-fit-params", Side::Stock);
    command.args(["-m", text(model), "--fit-print", "on"]).args(flags);
    let done = run(&mut command, Duration::from_secs(30)).success();
    let line = done.log().lines().find(|line| line.starts_with("Host ")).unwrap_or_default().to_owned();
    let numbers: Vec<u64> = line.split_whitespace().skip(1).filter_map(|word| word.parse().ok()).collect();
    numbers.try_into().unwrap_or_else(|_| panic!("{}", done.report("it told no sizes")))
}

/// Architectures whose buffer for computing is larger than reckoned, by up to the factor. grok computes attention in pieces; the others
/// have indexers, of which only one form is known.
const MORE_COMPUTE: [(&str, f64); 4] = [("grok", 7.0), ("minimax-m3", 2.0), ("qwen4exp", 1.6), ("hrm", 1.0)];

#[test]
fn context_of_every_architecture() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut write = program("test-llama-archs", Side::Stock);
    run(load_all_backends(write.args(["-s", "1", "-o", text(folder.path())])), Duration::from_secs(120)).success();
    let (mut wrong, mut seen) = (Vec::new(), 0);
    let mut paths: Vec<_> =
        fs::read_dir(folder.path()).expect("models").map(|entry| entry.expect("a model").path()).collect();
    paths.sort();
    for path in paths {
        let name = path.file_stem().and_then(|name| name.to_str()).expect("a name").to_owned();
        let model = Model::open(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        if !model.has_experts() {
            continue;
        }
        seen += 1;
        // Long, because sizes are told in whole MiB; two slots, because some states are per slot.
        for (flags, slots, unified) in [("-np 1", 1, true), ("-np 2", 2, false)] {
            let context = 1 << 20;
            let words: Vec<&str> = flags.split(' ').chain(["-c", "1048576", "-ub", "512"]).collect();
            let [_, kept, computing] = told(&path, &words);
            let usage = Usage { parallel: slots, unified, ..Usage::default() };
            let ours = context_bytes(&model, 0, model.layers.len(), &usage, context, 512) / MIB;
            if ours.abs_diff(kept) > 1 {
                wrong.push(format!("{name} {flags}: context of {kept} MiB, {ours} reckoned"));
            }
            let reckoned = compute_bytes(&model, &usage, context, 512, true) as f64 / MIB as f64;
            let ratio = computing as f64 / reckoned.max(1.0);
            let most = MORE_COMPUTE.iter().find(|(known, _)| name.starts_with(known)).map_or(1.25, |(_, most)| *most);
            if computing > 20 && !(0.5..=most).contains(&ratio) {
                wrong.push(format!("{name} {flags}: {computing} MiB to compute, {reckoned:.0} reckoned"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {seen} models:\n{}", wrong.len(), wrong.join("\n"));
    assert!(seen >= 50, "only {seen} models with experts");
}
