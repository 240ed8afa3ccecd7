//! The memory budget over ggml's CPU backend: the cache starts small, takes what is left, gives it back to what is loaded later and takes it
//! again. Whatever it holds at a time, results are stock's.

use std::fs;
use std::time::Duration;

use serde_json::json;

use crate::sides::equal_over;
use crate::summary::largest;
use crate::support::fixture_model;
use crate::support::process::{Finished, run};
use crate::support::stock::{Side, command, model_host};
use crate::support::text;

/// A model, then a second one beside it, whose context and weights go again. Returns the logits of both, and what the host printed.
fn pair(side: Side<'_>) -> (Vec<u8>, Finished) {
    let output = tempfile::NamedTempFile::new().expect("a file");
    let devices = if matches!(side, Side::Stock) { "cpu" } else { "MoE0" };
    let mut command = command(&model_host(), side);
    command.args(["pair", "1", devices, text(&fixture_model()), text(output.path())]);
    let finished = run(&mut command, Duration::from_secs(120)).success();
    (fs::read(output.path()).expect("the logits"), finished)
}

fn told(finished: &Finished, needles: &[&str]) {
    let mut lines = finished.lines_with("the cache");
    for needle in needles {
        let at = lines.iter().position(|line| line.contains(needle));
        let at = at.unwrap_or_else(|| {
            panic!("no \"{needle}\" here, or not in this order: {needles:?}\n{}", finished.report(""))
        });
        lines.drain(..=at);
    }
}

#[test]
fn a_second_model_gets_memory_from_the_cache_of_the_first() {
    let (stock, _) = pair(Side::Stock);
    let with = |keys: &str| {
        let keys = format!("inner=CPU;log=debug;{keys}");
        let (logits, finished) = pair(Side::Plugin { keys: &keys, device: "MoE0" });
        assert!(logits == stock, "{}", finished.report(&format!("{keys}: not equal to stock")));
        let log = finished.log();
        assert!(largest(&log, "hits") > 0 && largest(&log, "misses") > 0, "{}", finished.report(&keys));
        finished
    };
    // All of it is in use when the second model comes; the first graph after its context has gone is a while later.
    let budget = with("cache=auto;vram-budget-mb=26;vram-reserve-mb=1");
    told(&budget, &["grows from", "are needed for", "memory stayed free"]);
    // The same where memory has one size.
    let fixed = with("cache=auto;vram-budget-mb=26;vram-reserve-mb=1;debug-memory=fixed");
    told(&fixed, &["grows from", "is dropped: "]);
    assert!(fixed.lines_with("expert cache of").len() >= 3, "{}", fixed.report("it was not made again"));
    // The seventh allocation is the second model's first one.
    let failing = with("cache=8;debug-fail-alloc=device:7");
    told(&failing, &["are needed for"]);
}

/// Whether a line tells of a request that found experts in the cache.
fn is_hit(line: &str) -> bool {
    line.contains("ggml-moe: ") && line.contains(" hits (") && !line.contains("; 0 hits (")
}

/// Target and draft model in one server with room for a few experts; both are freed while it sleeps, and loaded again.
#[test]
fn a_server_with_a_draft_model_keeps_to_its_budget() {
    let keys = "inner=CPU;log=debug;cache=auto;vram-budget-mb=18;vram-reserve-mb=1";
    let model = fixture_model();
    let draft = ["-md", text(&model), "--spec-draft-n-max", "4", "--spec-type", "draft-simple"];
    let arguments = [&["-c", "1024", "-np", "1", "--sleep-idle-seconds", "1"][..], &draft].concat();
    let side = Side::Plugin { keys, device: "MoE0" };
    let (_, finished) = equal_over(side, &model, &arguments, |server| {
        let ask = |prompt: &str| {
            let body = json!({ "prompt": prompt, "n_predict": 90, "temperature": 0, "seed": 1, "return_tokens": true, "ignore_eos": true,
                "cache_prompt": false });
            server.post("/completion", &body)["tokens"].clone()
        };
        let first = ask("A list is a mutable");
        server.wait_asleep();
        let (second, third) = (ask("The function returns"), ask("import os\nfor name in"));
        // What was dropped for the draft model is tried again some seconds later, by the clock; by then a quick machine has answered.
        let stock_or_hit = |log: &str| !log.contains("ggml-moe: ") || log.lines().any(is_hit);
        server.repeat_until("hit of the cache", stock_or_hit, || {
            assert_eq!(ask("The function returns"), second, "without a cache and with one");
        });
        (first, second, third)
    });
    assert!(largest(&finished.log(), "hits") > 0, "{}", finished.report("no hit"));
    for line in finished.lines_with("memory of CPU") {
        // "dense weights 1 MiB, KV 0 MiB, ..." behind the name
        let parts = line.rsplit(": ").next().unwrap_or_default().split(", ");
        let sum: usize = parts.filter_map(|part| part.split_whitespace().rev().nth(1)?.parse::<usize>().ok()).sum();
        assert!((1..=18).contains(&sum), "{sum} MiB: {line}");
    }
    told(&finished, &["are needed for"]); // the draft model comes when the server has tried the target with a few tokens
    let made = finished.lines_with("expert cache of").len();
    assert!(made >= 2, "{}", finished.report("it was not made again after the sleep"));
}
