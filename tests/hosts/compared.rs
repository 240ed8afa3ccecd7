//! `ggml-moe bench` and `ggml-moe ppl` over the real programs, briefly.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::support::process::{Finished, run};
use crate::support::stock::{folder, plugin};
use crate::support::{fixture, fixture_model, text};

/// Runs the command on the fixture over the CPU.
fn compare(arguments: &[&str]) -> Finished {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ggml-moe"));
    command.args(&arguments[..1]).args(["-m", text(&fixture_model()), "--host-dir", text(folder()), "-t", "1"]);
    command.args(["--plugin", text(plugin()), "--inner", "CPU"]).args(&arguments[1..]);
    command.env("OMP_WAIT_POLICY", "passive");
    run(&mut command, Duration::from_secs(120))
}

#[test]
fn speed_of_both_sides() {
    let out = tempfile::tempdir().expect("a folder");
    let json = out.path().join("bench.json");
    let arguments =
        ["bench", "-p", "16", "-n", "12", "--share", "50", "--repeats", "2", "--samples", "2", "--skip", "1"];
    let files = ["--runs", "none", "--json", text(&json), "--", "--repack", "0"];
    let done = compare(&[&arguments[..], &files].concat()).success();
    let last = done.stdout.lines().last().unwrap_or_default();
    assert!(last.starts_with("bench: decode ") && last.contains("x ("), "{}", done.report("no figures"));
    let report: Value = serde_json::from_slice(&std::fs::read(json).expect("a file")).expect("JSON");
    let decode = report.pointer("/cases/0/phases/1").expect("decoding");
    let uses = ["hits", "misses"].map(|name| decode[name].as_u64().unwrap_or(0));
    // Two processes of two samples of twelve tokens and a warm-up, six layers, four experts.
    assert_eq!(uses.iter().sum::<u64>(), 2 * 25 * 6 * 4, "{decode}");
    assert!(uses.iter().all(|count| *count > 0), "{decode}");
    assert_eq!(decode.pointer("/held/experts").and_then(Value::as_u64), Some(192), "{decode}");
    assert!(decode.pointer("/device_mib/ours_without_cache").is_some_and(Value::is_number), "{decode}");
    assert_eq!(decode["tokens"], 50);
}

#[test]
fn prompts_with_their_timeline_and_decoding_after_them() {
    let out = tempfile::tempdir().expect("a folder");
    let path = |name: &str| out.path().join(name);
    let (json, timeline) = (path("table.json"), path("timeline.svg"));
    let arguments =
        ["bench", "--prompt-table", "-p", "16,64", "--our-ubatch", "64", "--stock-ubatch", "32,64", "--share", "50"];
    let more =
        ["--samples", "2", "--skip", "1", "--runs", "none", "--json", text(&json), "--timeline", text(&timeline)];
    let done = compare(&[&arguments[..], &more, &["--", "--repack", "0"]].concat()).success();
    let last = done.stdout.lines().last().unwrap_or_default();
    assert!(
        last.starts_with("bench: 50%: pp16 ") && last.contains("x of stock's best"),
        "{}",
        done.report("no figures")
    );
    assert!(done.stdout.contains("of 64 tokens on MoE0"), "{}", done.report("no timeline"));
    let drawn = std::fs::read_to_string(timeline).expect("a picture");
    // Six layers, of each a copy and what is computed, in the whole pass.
    assert!(drawn.contains(">copy<") && drawn.matches("<rect x=").count() >= 12, "{drawn}");
    let report: Value = serde_json::from_slice(&std::fs::read(json).expect("a file")).expect("JSON");
    let table = report.pointer("/prompt_tables/0").expect("a table");
    let sides: Vec<&str> =
        table["entries"].as_array().into_iter().flatten().filter_map(|row| row["side"].as_str()).collect();
    assert_eq!(sides, ["ours", "equal", "equal", "default"], "{table}");
    assert!(table.pointer("/prompts/1/best/equal/ratio").is_some_and(Value::is_number), "{table}");

    let curve = path("curve");
    let arguments =
        ["bench", "--curve", text(&curve), "--curve-prompt", "100", "--curve-tokens", "24", "--curve-from", "8"];
    let done = compare(&[&arguments[..], &["--share", "50", "-ub", "64", "--", "-nr"]].concat()).success();
    assert!(done.stdout.contains("bench: decoding after a prompt "), "{}", done.report("no figures"));
    let rows = std::fs::read_to_string(curve.with_extension("csv")).expect("a file");
    let times: Vec<Vec<f64>> =
        rows.lines().skip(1).map(|row| row.split(',').filter_map(|cell| cell.parse().ok()).collect()).collect();
    assert_eq!((times.len(), times[23].len()), (24, 7), "{rows}");
    // The prompt is computed before the first token; when it is asked for again, the slot has all of it but the last token.
    for (what, tokens) in [("after a prompt", 100), ("same context without a pass", 1)] {
        let told = done.lines_with(&format!("curve: ours {what}: {tokens} tokens in "));
        assert_eq!(told.len(), 1, "{}", done.report(what));
    }
}

#[test]
fn a_bench_of_a_plugin_that_does_nothing_is_void() {
    let done = compare(&["bench", "-p", "0", "-n", "2", "--runs", "none", "--moe", "debug-experts=device"]);
    assert_eq!(done.status.code(), Some(1), "{}", done.report("not void"));
    let last = done.stdout.lines().last().unwrap_or_default();
    assert!(last.starts_with("bench: void: "), "{}", done.report("not void"));
}

#[test]
fn perplexity_of_both_sides() {
    let eval = fixture("eval.txt");
    let arguments = ["ppl", "-f", text(&eval), "-c", "64", "--chunks", "4", "--share", "40"];
    let done = compare(&arguments).success();
    assert!(done.stdout.contains("over 4 chunks, equal to the last decimal: ok"), "{}", done.report("not equal"));
    let fewer = ["--our-args", "--override-kv qwen3moe.expert_used_count=int:3"];
    let done = compare(&[&arguments[..], &fewer].concat());
    assert_eq!(done.status.code(), Some(1), "{}", done.report("three experts are not four"));
    assert!(done.stdout.contains(", more than "), "{}", done.report("no verdict"));
}
