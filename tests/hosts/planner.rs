//! What the planner reckons of a model's memory, against llama.cpp's own figures for every MoE architecture that stock's test program writes.

use std::path::Path;
use std::time::Duration;

use ggml_moe::planner::memory::{compute_bytes, context_bytes};
use ggml_moe::planner::{MIB, Model, Usage};

use crate::architectures::plain_models;
use crate::support::process::run;
use crate::support::stock::{Side, program};
use crate::support::text;

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
const MORE_COMPUTE: [(&str, f64); 4] = [("grok", 7.0), ("minimax-m3", 2.0), ("qwen4exp", 1.6), ("deepseek4", 1.6)];

#[test]
fn memory_of_every_architecture() {
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for path in plain_models() {
        let name = path.file_stem().and_then(|name| name.to_str()).expect("a name");
        let model = Model::open(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        seen += usize::from(model.has_experts());
        // Long, because sizes are told in whole MiB; two slots, because some states are per slot.
        let context = 1 << 20;
        let [_, kept, computing] = told(&path, &["-np", "2", "-c", "1048576", "-ub", "512"]);
        let usage = Usage { parallel: 2, unified: false, ..Usage::default() };
        let ours = context_bytes(&model, 0, model.layers.len(), &usage, context, 512) / MIB;
        if ours.abs_diff(kept) > 1 {
            wrong.push(format!("{name}: context of {kept} MiB, {ours} reckoned"));
        }
        let reckoned = compute_bytes(&model, &usage, context, 512, true) as f64 / MIB as f64;
        let ratio = computing as f64 / reckoned.max(1.0);
        let most = MORE_COMPUTE.iter().find(|(known, _)| name.starts_with(known)).map_or(1.25, |(_, most)| *most);
        if computing > 20 && !(0.5..=most).contains(&ratio) {
            wrong.push(format!("{name}: {computing} MiB to compute, {reckoned:.0} reckoned"));
        }
    }
    assert!(wrong.is_empty(), "{} of {seen} models:\n{}", wrong.len(), wrong.join("\n"));
    assert!(seen >= 50, "only {seen} models with experts");
}
