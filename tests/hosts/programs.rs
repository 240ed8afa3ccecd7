//! The other stock programs: imatrix (which stops graphs at every matrix), bench, cli, the cancelled load.

use std::fs;
use std::time::Duration;

use serde_json::Value;

use crate::summary::largest;
use crate::support::process::run;
use crate::support::stock::{OVER_CPU, Side, command, load_all_backends, program, tool};
use crate::support::{fixture, fixture_model, text};

const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn importance_matrix_equals_stock() {
    let folder = tempfile::tempdir().expect("a folder");
    let matrix = |side, name: &str| {
        let path = folder.path().join(name);
        let mut command = tool("llama-imatrix", side, &fixture_model(), 2);
        command.args(["-f", text(&fixture("eval.txt")), "-c", "256", "--chunks", "4", "-o", text(&path)]);
        let finished = run(&mut command, LIMIT).success();
        (fs::read(&path).expect("the matrix was written"), finished)
    };
    let (stock, _) = matrix(Side::Stock, "stock.gguf");
    let (plugin, finished) = matrix(OVER_CPU, "plugin.gguf");
    assert!(plugin == stock, "{}", finished.report("the matrices differ"));
    assert!(largest(&finished.log(), "graphs") > 0, "{}", finished.report("nothing ran on MoE0"));
}

#[test]
fn bench_measures_our_device() {
    let mut command = program("llama-bench", OVER_CPU);
    command.args([
        "-m",
        text(&fixture_model()),
        "-dev",
        "MoE0",
        "-ngl",
        "99",
        "-t",
        "2",
        "-p",
        "64",
        "-n",
        "8",
        "-r",
        "1",
    ]);
    let finished = run(command.args(["-o", "json"]), LIMIT).success();
    let rows: Value =
        serde_json::from_str(&finished.stdout).unwrap_or_else(|error| panic!("{error}: {}", finished.stdout));
    let rows = rows.as_array().expect("one row per test");
    assert_eq!(rows.len(), 2, "a prompt and a generation test: {rows:?}");
    for row in rows {
        assert_eq!(row["devices"], "MoE0", "{row}");
        assert!(row["avg_ts"].as_f64().is_some_and(|speed| speed > 0.0), "{row}");
    }
}

#[test]
fn cli_answers_once() {
    let answer = |side| {
        let mut command = tool("llama-cli", side, &fixture_model(), 2);
        command.args([
            "-c",
            "512",
            "-n",
            "16",
            "--temp",
            "0",
            "--seed",
            "1",
            "-st",
            "--no-display-prompt",
            "--simple-io",
        ]);
        command.args(["--no-show-timings", "-p", "What is a list?"]);
        run(&mut command, LIMIT).success()
    };
    let (stock, plugin) = (answer(Side::Stock), answer(OVER_CPU));
    assert!(stock.stdout.len() > 20, "{}", stock.report("no answer to compare"));
    assert_eq!(plugin.stdout, stock.stdout);
}

/// The host gives up in the middle of a load: everything that we hold by then is freed.
#[test]
fn stock_model_load_cancel() {
    let mut cancel = program("test-model-load-cancel", OVER_CPU);
    let finished = run(load_all_backends(&mut cancel).arg(fixture_model()), LIMIT).success();
    assert!(!finished.lines_with("cancelled model load").is_empty(), "{}", finished.report("nothing was cancelled"));
}

/// A program that has no backend but ours: nothing to stand in front of, and nothing to crash on.
#[test]
fn a_host_without_any_other_backend_survives() {
    // `env` lies in no folder with ggml's own backends, so that loading all of them finds only GGML_BACKEND_PATH.
    let mut host = command("/usr/bin/env".as_ref(), OVER_CPU);
    let finished = run(load_all_backends(&mut host).arg("true"), LIMIT).success();
    assert!(!finished.lines_with("ggml-moe: ").is_empty(), "{}", finished.report("the plugin was not loaded"));
}
