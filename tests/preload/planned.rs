//! What the plan decides when a model is loaded, and what the host then says of memory.

use super::support::process::{Finished, run};
use super::support::stock::{self, Side, program};
use super::support::{fixture, fixture_model, text};
use super::{LIMIT, decisions, host, preload_plugin, ran_in_blocks, was_helped};
use std::path::Path;
use std::process::Command;

/// A card on which the weights fit, and not with a margin, behind a slow link: it is helped, in long passes that the cache lends memory to.
const ROOMY: [&str; 12] = [
    "--moe",
    "inner=CPU",
    "--moe",
    "vram-budget-mb=100",
    "--moe",
    "vram-reserve-mb=0",
    "--moe=log=debug",
    "--moe=state-file=off",
    "--moe",
    "cache=4",
    "--moe",
    "link-gbs=0.1",
];

fn perplexity(more: &[&str]) -> Finished {
    let mut command = host("llama-perplexity");
    command.args(["-c", "2048", "-f", text(&fixture("eval.txt")), "--chunks", "1", "-lv", "4"]).args(more);
    run(preload_plugin(&mut command), LIMIT).success()
}

fn micro_batch(finished: &Finished) -> Option<String> {
    Some(finished.lines_with("n_ubatch").pop()?.rsplit_once('=')?.1.trim().to_owned())
}

/// The plan's passes and what it tells of them; then what the host says of memory is what is there: total = free + self + a few MiB.
#[test]
fn passes_are_planned_and_the_breakdown_is_true() {
    let finished = perplexity(&ROOMY);
    was_helped(&finished);
    let line = decisions(&finished).pop().expect("a decision");
    assert!(
        line.contains("32 MiB with 2048 tokens of context") && line.contains("; passes of 2048 tokens ("),
        "{line}"
    );
    assert_eq!(micro_batch(&finished).as_deref(), Some("2048"));
    let breakdown = finished.lines_with("- MoE0 (").pop().expect("a breakdown");
    let numbers: Vec<i64> = breakdown
        .rsplit_once("experts in RAM)")
        .expect("our description")
        .1
        .split(|c: char| !c.is_ascii_digit() && c != '-')
        .filter_map(|word| word.parse().ok())
        .collect();
    let [total, free, own, model, context, compute, rest] = numbers[..] else { panic!("{breakdown}") };
    assert!(total == 100 && (0..=3).contains(&(own - model - context - compute)), "{breakdown}");
    assert!(free < 100 && rest.abs() <= 8, "what is told is not what is there: {breakdown}");

    let own = perplexity(&[&["-ub", "256"][..], &ROOMY].concat());
    assert_eq!(micro_batch(&own).as_deref(), Some("256"), "the user's own holds");
    assert!(!decisions(&own).concat().contains("passes of"));
}

/// A model that is larger than the RAM, as it is told, is mapped where the user said nothing of it.
#[test]
fn what_is_larger_than_the_ram_is_mapped() {
    let mode = |more: &[&str]| {
        let finished = perplexity(&[&ROOMY[..], &["--moe", "debug-ram-mb=20"], more].concat());
        let line = finished.lines_with("(load_mode = ").pop().expect("the mode");
        let told = decisions(&finished).concat().contains("; the file is mapped (");
        (line.rsplit_once("(load_mode = ").expect("it has it").1.trim_end_matches(')').to_owned(), told)
    };
    assert_eq!(mode(&[]), ("mmap".to_owned(), true));
    assert_eq!(mode(&["-lm", "none"]), ("none".to_owned(), false));
}

/// What stock's llama-fit-params prints for our device, as a plugin and preloaded, starts.
#[test]
fn fitted_arguments_start() {
    let keys = "inner=CPU;vram-budget-mb=4096;state-file=off;log=debug";
    let fit = |command: &mut Command| {
        command.args(["-m", text(&fixture_model()), "--device", "MoE0", "-fitt", "2030", "-fitc", "256"]);
        let printed = run(command, LIMIT).success().stdout;
        let line = printed.lines().find(|line| line.starts_with("-c ")).map(str::to_owned);
        line.unwrap_or_else(|| panic!("no arguments: {printed}"))
    };
    let plugin = fit(&mut program("llama-fit-params", Side::Plugin { keys, device: "MoE0" }));
    let mut preloaded = program("llama-fit-params", Side::Stock);
    preloaded.env("GGML_MOE", keys);
    assert_eq!(fit(preload_plugin(&mut preloaded)), plugin);
    let mut command = program("llama-perplexity", Side::Plugin { keys, device: "MoE0" });
    command.args(["-m", text(&fixture_model()), "--device", "MoE0", "-nr", "-t", "2", "-b", "512"]);
    command.args(["-f", text(&fixture("eval.txt")), "--chunks", "1"]).args(plugin.split_whitespace());
    ran_in_blocks(&run(&mut command, LIMIT).success());
}

/// What the launcher and `ggml-moe plan` say of a command line, and what the library does with it.
#[test]
fn plans_say_what_is_decided() {
    let model = fixture_model();
    for (more, on) in [
        ("--moe inner=CPU --moe vram-budget-mb=13", true),
        ("--moe inner=cpu --moe vram-budget-mb=64", false),
        ("--moe inner=CPU --moe vram-budget-mb=64 --moe cache=6", false),
        ("--moe inner=CPU --moe vram-budget-mb=13 -ngl 99", false),
        ("--moe inner=CPU --moe vram-budget-mb=13 -ngl 99 --moe cache=6", true),
        ("--moe inner=NONE7", false),
        ("--moe inner=CPU+CPU --moe vram-budget-mb=13", true),
        ("--moe log=info", false),
    ] {
        let words: Vec<&str> = more.split(' ').collect();
        let bench = |command: &mut Command| {
            command.args(["-m", text(&model), "-t", "2", "-p", "8", "-n", "0", "-r", "1"]).args(&words);
        };
        let mut preloaded = program("llama-bench", Side::Stock);
        bench(&mut preloaded);
        let line = decisions(&run(preload_plugin(&mut preloaded), LIMIT).success()).concat();
        assert_eq!(line.starts_with("ggml-moe: on for "), on, "{more}: {line}");

        let ours = || stock::command(Path::new(env!("CARGO_BIN_EXE_ggml-moe")), Side::Stock);
        let mut launcher = ours();
        launcher.args(["run", "--plan-only", "--plugin", text(stock::plugin()), "--"]);
        launcher.arg(stock::folder().join("llama-bench"));
        bench(&mut launcher);
        let told = run(&mut launcher, LIMIT).success().stdout;
        assert_eq!(told.contains("experts: cache. "), on, "{more}: {told}");

        let mut plan = ours();
        plan.args(["plan", "--json", "-m", text(&model), "--host-dir", text(stock::folder()), "-c", "8", "--"]);
        plan.args(["-ub", "512", "-fit", "off"]).args(&words);
        let plan: serde_json::Value = serde_json::from_str(&run(&mut plan, LIMIT).stdout).expect("JSON");
        assert_eq!(plan["plugin"], on, "{more}: {plan:#}");
    }
}
