//! The command `ggml-moe` as a user calls it: output, files, errors, exit codes.
#![expect(clippy::expect_used, reason = "a test reports by panicking")]

#[path = "command/bench.rs"]
mod bench;

use std::process::{Command, Output};

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ggml-moe")).args(arguments).output().expect("the command starts")
}

fn printed(arguments: &[&str]) -> String {
    let output = run(arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {error}");
    assert!(error.is_empty(), "{error}");
    String::from_utf8(output.stdout).expect("text")
}

fn refused(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    assert!(output.stdout.is_empty());
    String::from_utf8(output.stderr).expect("text")
}

#[test]
fn version_and_keys() {
    assert_eq!(printed(&["version"]), format!("ggml-moe {}\n", env!("CARGO_PKG_VERSION")));
    assert!(printed(&["keys"]).starts_with("inner\n"));
    assert!(printed(&["keys", "--markdown"]).starts_with("# Keys\n"));
}

#[test]
fn a_simulation_prints_a_table() {
    let table = printed(&[
        "sim",
        "gpt-oss",
        "--tokens",
        "60",
        "--layers",
        "2",
        "--share",
        "10,20",
        "--policy",
        "lru,window,layers",
    ]);
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines[0].starts_with("gpt-oss, seed 1: 60 tokens, 2 layers, 4 of 128 experts"), "{table}");
    assert!(lines[2].contains("lru") && lines[2].contains("window") && lines[2].contains("layers"), "{table}");
    assert!(lines[3].starts_with("  10%           13") && lines[4].starts_with("  20%           26"), "{table}");
    assert_eq!(lines.len(), 5);
}

#[test]
fn a_written_trace_gives_the_figures_of_its_preset() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("text").to_owned();
    let (trace, picture) = (path("t.npy"), path("t.svg"));
    let size = ["--tokens", "80", "--layers", "3", "--seed", "5"];
    let arguments = |source: &'static str, more: &[&str]| {
        let mut all: Vec<String> = ["sim", source, "--json", "--share", "20"].map(str::to_owned).to_vec();
        all.extend(more.iter().map(|&word| word.to_owned()));
        all
    };
    let call = |words: Vec<String>| -> serde_json::Value {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        serde_json::from_str(&printed(&words)).expect("JSON")
    };
    let mut first = arguments("qwen3-30b", &size);
    first.extend(["--write".to_owned(), trace.clone(), "--svg".to_owned(), picture.clone()]);
    let preset = call(first);
    let mut second = arguments("PLACE", &["--experts", "128"]);
    second[1] = trace;
    let file = call(second);
    assert_eq!(preset["results"], file["results"]);
    assert_eq!(file["experts"], 128);
    let picture = std::fs::read_to_string(picture).expect("the picture");
    assert!(picture.starts_with("<svg") && picture.contains("qwen3-30b, seed 5") && picture.contains("window"));
}

#[test]
fn a_redraw_is_told_by_tokens_from_it() {
    let table = printed(&[
        "sim",
        "gemma4-26b",
        "--tokens",
        "300",
        "--layers",
        "2",
        "--share",
        "20",
        "--redraw",
        "all",
        "--policy",
        "window",
    ]);
    assert!(table.contains("600 tokens") && table.contains("256 before") && table.contains("128-256"), "{table}");
}

#[test]
fn what_cannot_be_simulated_is_told() {
    assert!(refused(&["sim", "no-such-thing"]).contains("presets: qwen3-30b, gemma4-26b"));
    assert!(refused(&["sim", "uniform", "--policy", "fifo"]).contains("rules: lru, lfu"));
    assert!(refused(&["sim", "uniform", "--share", "0"]).contains("--share 0"));
    assert!(refused(&["sim", "uniform", "--share", "NaN"]).contains("--share NaN"));
    assert!(refused(&["sim", "uniform", "--window", "500"]).contains("8 to 127"));
    assert!(refused(&["sim", "uniform", "--payback=-1"]).contains("0 or more"));
    assert!(refused(&["sim", "uniform", "--tokens", "1"]).contains("two tokens"));
    assert!(refused(&["sim", "uniform", "--seeds", "0"]).contains("--seeds 0"));
    assert!(
        refused(&["sim", "uniform", "--tokens", "9", "--layers", "1", "--svg", "/no/such/folder/x.svg"])
            .contains("x.svg")
    );
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("t.npy");
    std::fs::write(&path, b"not a trace").expect("written");
    let path = path.to_str().expect("text");
    assert!(refused(&["sim", path]).contains("no .npy file"));
    assert!(refused(&["sim", path, "--redraw", "all"]).contains("go with a preset"));
}
