//! What the planner reckons of a model's memory, against llama.cpp's own figures for every MoE architecture that stock's test program writes.

use std::path::Path;
use std::time::Duration;

use ggml_moe::planner::memory::{compute_bytes, context_bytes};
use ggml_moe::planner::{MIB, Model, Usage};

use crate::architectures::plain_models;
use crate::summary::ran_in_blocks;
use crate::support::process::{Finished, run};
use crate::support::server::Server;
use crate::support::stock::{Side, command, program};
use crate::support::{fixture, fixture_model, text};

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

/// `ggml-moe plan --args` for the bundled model on a small recorded machine.
fn printed(cards: &[u64], whose: &str, more: &[&str]) -> Vec<String> {
    let folder = tempfile::tempdir().expect("a folder");
    let machine = folder.path().join("machine.json");
    let card = |(number, free): (usize, &u64)| {
        format!(r#"{{"name": "CUDA{number}", "total_mib": {}, "free_mib": {free}, "link_gbs": 6}}"#, free + 100)
    };
    let cards: Vec<String> = cards.iter().enumerate().map(card).collect();
    let text_of = format!(r#"{{"ram_mib": 8192, "cores": 2, "cpu_gbs": 20, "cards": [{}]}}"#, cards.join(","));
    std::fs::write(&machine, text_of).expect("written");
    let mut command = command(Path::new(env!("CARGO_BIN_EXE_ggml-moe")), Side::Stock);
    command.args(["plan", "-m", text(&fixture_model()), "--machine", text(&machine), "--args", whose]);
    command.args(["-c", "512", "--ubatch-size", "512", "--threads", "2", "--", "-fitt", "1"]).args(more);
    let line = run(&mut command, Duration::from_secs(30)).success().stdout;
    // The one word that is quoted has no space in it.
    line.replace('"', "").split_whitespace().map(str::to_owned).collect()
}

fn perplexity_with(side: Side<'_>, arguments: &[String]) -> Finished {
    let mut command = program("llama-perplexity", side);
    command.args(["-m", text(&fixture_model()), "-nr", "-f", text(&fixture("eval.txt")), "--chunks", "1", "-b", "512"]);
    run(command.args(arguments).args(["-lv", "4"]), Duration::from_secs(60)).success()
}

/// What `plan --args` prints starts: stock's placement without us, ours with us.
#[test]
fn printed_arguments_start() {
    // One card for a part of the experts, two of different sizes, and one for some of the layers only.
    for (cards, has) in [(&[21][..], "-ot"), (&[9, 13], "-ts"), (&[14], "4")] {
        let arguments = printed(cards, "stock", &[]);
        assert!(arguments.iter().any(|word| word == has), "{cards:?}: {arguments:?}");
        let finished = perplexity_with(Side::Stock, &arguments);
        assert!(!finished.lines_with("Final estimate").is_empty(), "{}", finished.report("no result"));
        if has == "-ot" {
            let mut server = program("llama-server", Side::Stock);
            let mut server = Server::launch(server.args(["-m", text(&fixture_model()), "-np", "1"]).args(&arguments));
            server.wait_ready();
            assert_eq!(server.complete("A list is", 2, 0).tokens.len(), 2);
            server.stop();
        }
    }
    let arguments = printed(&[100, 80], "plugin", &["--device", "MoE0,MoE1", "--moe", "vram-reserve-mb=0"]);
    assert!(arguments.iter().any(|word| word == "-ts") && arguments[1] == "MoE0,MoE1", "{arguments:?}");
    let keys = "inner=CPU,CPU;vram-budget-mb=64;vram-reserve-mb=0;cache=6;log=debug;state-file=off";
    let finished = perplexity_with(Side::Plugin { keys, device: "" }, &arguments);
    ran_in_blocks(&finished);
    for device in ["MoE0", "MoE1"] {
        assert!(!finished.lines_with(&format!("{device} model buffer size")).is_empty(), "{}", finished.report(device));
    }
}
