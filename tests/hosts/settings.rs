//! The plugin alone, by GGML_BACKEND_PATH: what the user placed by llama.cpp's own flags wins over the cache, unless a cache is asked for;
//! keys that have no effect over this inner device are told.

use crate::perplexity::perplexity;
use crate::support::process::{Finished, run};
use crate::support::stock::{OVER_CPU, Side, program, tool};
use crate::support::{fixture_model, text};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);

/// A run of single tokens with room for a cache.
fn with(keys: &str, flags: &[&str]) -> Finished {
    let keys = format!("inner=CPU;log=debug;vram-budget-mb=4096;{keys}");
    let side = Side::Plugin { keys: &keys, device: "MoE0" };
    perplexity(side, 2, 1, &[&["-c", "32", "-ub", "1"], flags].concat())
}

fn has_cache(finished: &Finished) -> bool {
    !finished.lines_with("MoE0: expert cache of ").is_empty()
}

#[test]
fn what_flags_place_has_no_cache_unless_asked_for() {
    let mut wrong = Vec::new();
    for (keys, flags, cache, line) in [
        // `-ngl 99` comes with every run here: that is how a named device is used.
        ("", &[][..], true, None),
        ("", &["-ngl", "7"], true, None),
        ("", &["-ngl", "6"], false, Some("-ngl was given and is left alone, so there is no cache of experts")),
        ("", &["-ncmoe", "2"], false, Some("-ncmoe was given and is left alone, so there is no cache of experts")),
        ("", &["-ot", r"blk\.0\..*exps=CPU"], false, Some("-ot was given and is left alone")),
        ("cache=auto", &["-ncmoe", "2"], true, Some("-ncmoe was given: what it leaves to the CPU is computed there")),
        ("moe-expert-cache=8", &["-ngl", "6"], true, Some("-ngl was given: what it leaves to the CPU")),
        ("cache=off", &["-ncmoe", "2"], false, None),
    ] {
        let finished = with(keys, flags);
        let told = finished.lines_with(" was given");
        let right = match line {
            Some(line) => told.len() == 1 && told[0].contains(line),
            None => told.is_empty(),
        };
        if has_cache(&finished) != cache || !right {
            wrong.push(finished.report(&format!("{keys} {flags:?}: {told:?}")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn variables_place_as_flags_do() {
    let run_with = |name: &str, value: &str| {
        let side = Side::Plugin { keys: "inner=CPU;log=debug;vram-budget-mb=4096", device: "MoE0" };
        let mut command = tool("llama-perplexity", side, &fixture_model(), 2);
        command.args(["-f", text(&crate::support::fixture("eval.txt")), "-c", "32", "-ub", "1", "--chunks", "1"]);
        run(command.env(name, value), LIMIT).success()
    };
    let on = run_with("LLAMA_ARG_CPU_MOE", "1");
    assert_eq!(on.lines_with("LLAMA_ARG_CPU_MOE was given and is left alone").len(), 1, "{}", on.report("no line"));
    let off = run_with("LLAMA_ARG_CPU_MOE", "0");
    assert!(off.lines_with(" was given").is_empty() && has_cache(&off), "{}", off.report("the host does not take it"));
}

/// A process that names none of our devices is none of ours to advise.
#[test]
fn nobody_else_is_told() {
    let mut command = program("llama-bench", Side::Plugin { keys: "inner=CPU;pass-tokens=64", device: "" });
    command.args(["-m", text(&fixture_model()), "-t", "2", "-p", "8", "-n", "0", "-r", "1", "-ncmoe", "2", "-v"]);
    let finished = run(&mut command, LIMIT).success();
    assert!(finished.lines_with(" was given").is_empty(), "{}", finished.report("advice"));
    assert!(finished.lines_with("pass-tokens").is_empty(), "{}", finished.report("advice"));
}

#[test]
fn keys_that_this_device_cannot_follow_are_told() {
    let Side::Plugin { keys, device } = OVER_CPU else { panic!("a side of ours") };
    let keys = format!("{keys};policy=window;pin-budget-mb=64;pass-tokens=64");
    let finished = perplexity(Side::Plugin { keys: &keys, device }, 2, 1, &["-c", "32", "-ub", "32"]);
    let lines = finished.lines_with("without effect over CPU");
    assert!(
        lines.len() == 1
            && lines[0].contains("policy (there is a cache")
            && lines[0].contains("pin-budget-mb (memory is pinned"),
        "{}",
        finished.report("one line")
    );
    assert_eq!(finished.lines_with("pass-tokens has no effect here").len(), 1, "{}", finished.report("no line"));
}
