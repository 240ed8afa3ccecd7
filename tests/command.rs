//! The command `ggml-moe` as a user calls it: output, files, errors, exit codes.
#![expect(clippy::expect_used, reason = "a test reports by panicking")]

#[path = "command/bench.rs"]
mod bench;
#[path = "command/plan.rs"]
mod plan;

use std::io::Write as _;
use std::os::unix::net::UnixListener;
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

#[test]
fn what_is_too_large_to_simulate_is_told() {
    assert!(refused(&["sim", "gpt-oss", "--tokens", "99999999999999", "--layers", "1"]).contains("too long"));
    assert!(refused(&["sim", "/dev/zero"]).contains("no regular file"));
    assert!(refused(&["state", "show", "--file", "/dev/zero"]).contains("no regular file"));
}

const STATE: &str = "format = 1\n\n[model aa11]\nstamp = 5\ntokens = 100\nheat.blk.10.gate = 0 0 0 0 0 0 0 0 0 0\nheat.blk.9.gate = 600 200 50 50 50 \
                     50 0 0 0 0\n\n[model ab22]\nstamp = 5\ntokens = 300\nheat.g = 1 1 1 1\n";

#[test]
fn a_state_is_shown() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("s.ini");
    std::fs::write(&file, STATE).expect("written");
    let file = file.to_str().expect("text");
    let text = printed(&["state", "show", "--file", file]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], format!("{file}: 2 models"));
    assert!(lines[2].starts_with("model aa11: 100 tokens, 20 experts in 2 layers, last used "), "{text}");
    let row = |name: &str| -> Vec<&str> {
        let found = lines.iter().find(|line| line.trim_start().starts_with(name));
        found.unwrap_or_else(|| panic!("{text}")).split_whitespace().skip(1).collect()
    };
    assert_eq!(row("blk.9.gate"), ["10", "60.0%", "80.0%", "85.0%", "95.0%"]);
    assert_eq!(row("blk.10.gate"), ["10", "-%", "-%", "-%", "-%"]);
    assert_eq!(row("all"), ["20", "80.0%", "90.0%", "100.0%", "100.0%"]);
    let (nine, ten) = (text.find("blk.9.gate"), text.find("blk.10.gate"));
    assert!(nine < ten, "layers in order: {text}");
    let one = printed(&["state", "show", "ab", "--file", file]);
    assert!(one.contains("model ab22") && !one.contains("aa11"), "{one}");
}

#[test]
fn the_state_file_is_the_one_of_the_plugin() {
    let folder = tempfile::tempdir().expect("a folder");
    let show = |name: &str, value: &std::path::Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ggml-moe"));
        command.args(["state", "show"]).env_remove("GGML_MOE").env_remove("LLAMA_CACHE").env(name, value);
        String::from_utf8(command.output().expect("the command starts").stdout).expect("text")
    };
    let file = folder.path().join("moe-state.ini");
    std::fs::write(&file, STATE).expect("written");
    assert!(show("LLAMA_CACHE", folder.path()).contains("2 models"));
    let setting = format!("log=info;state-file={}", file.display());
    assert!(show("GGML_MOE", setting.as_ref()).contains("2 models"));
}

#[test]
fn states_are_reset_and_merged() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("text").to_owned();
    let (file, other) = (path("s.ini"), path("o.ini"));
    std::fs::write(&other, STATE).expect("written");
    assert!(printed(&["state", "merge", "--file", &file, &other, &other]).contains("4 models of 2 files added"));
    assert!(printed(&["state", "show", "--file", &file]).contains("model aa11: 200 tokens"));
    assert!(printed(&["state", "reset", "aa", "--file", &file]).contains("1 models forgotten"));
    let left = std::fs::read_to_string(&file).expect("the file");
    assert!(!left.contains("aa11") && left.contains("[model ab22]"), "{left}");
    assert!(printed(&["state", "reset", "--all", "--file", &file]).contains("1 models forgotten"));
    assert!(printed(&["state", "show", "--file", &file]).contains("0 models"));
}

#[test]
fn what_cannot_be_done_with_a_state_is_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("text").to_owned();
    let (file, broken) = (path("s.ini"), path("b.ini"));
    std::fs::write(&file, STATE).expect("written");
    std::fs::write(&broken, "[model x").expect("written");
    assert!(refused(&["state", "show", "--file", &path("none.ini")]).contains("none.ini"));
    assert!(refused(&["state", "show", "--file", &broken]).contains("line 1: a heading without"));
    assert!(refused(&["state", "show", "zz", "--file", &file]).contains("no model zz; known: aa11, ab22"));
    assert!(refused(&["state", "reset", "a", "--file", &file]).contains("2 models begin with a"));
    assert!(refused(&["state", "merge", "--file", &file, &broken]).contains("b.ini: line 1"));
    assert_eq!(std::fs::read_to_string(&file).expect("the file"), STATE, "nothing was changed");
    assert!(std::path::Path::new(&broken).exists(), "and the broken file was left alone");
    assert_eq!(run(&["state", "reset", "--file", &file]).status.code(), Some(2), "a model or --all");
}

/// A process that answers so, once.
fn told_by(answer: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("own.sock");
    let listener = UnixListener::bind(&path).expect("a socket");
    let answer = answer.to_owned();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("somebody asks");
        stream.write_all(answer.as_bytes()).expect("the answer is taken");
    });
    (folder, path.to_str().expect("text").to_owned())
}

#[test]
fn top_shows_what_a_process_tells() {
    let answer = r#"{"format":1,"version":"9.9","pid":77,"program":"llama\u001b[2Jserver","uptime_s":180.0,"devices":[
        {"name":"MoE0","inner":"CUDA0","cache":{"mode":"recency","bytes":2000000000,"slots":50,"experts":200,"share":0.25,
         "resident":40,"loading":3,"threads":7},"counters":{"hits":30,"misses":10,"tokens":5,"prompt_tokens":9},
         "rates":{"window_s":5.0,"tokens":12.34},
         "requests":[{"number":1,"open":false},{"number":2,"open":true,"tokens":5,"tokens_per_second":12.5}]},
        {"name":"MoE1","inner":"CUDA1","cache":null,"no_cache":"no memory"}]}"#;
    let (_folder, socket) = told_by(answer);
    let page = printed(&["top", "--once", "--socket", &socket]);
    for part in [
        "llama?[2Jserver (pid 77), ggml-moe 9.9, 3 minutes",
        "MoE0 over CUDA0: cache of 2.0 GB for 50 of 200 experts (25%), 40 there, 3 on their way, by recent use; 7 threads",
        "9 prompt tokens, 5 decoded; 75.0% hits",
        "last 5 s: 12.3 tokens decoded/s",
        "request 2 (runs): 0 prompt tokens, 5 decoded at 12.5/s",
        "MoE1 over CUDA1: no cache: no memory",
    ] {
        assert!(page.contains(part), "{part:?} in {page}");
    }
    let (_folder, socket) = told_by(answer);
    assert_eq!(printed(&["top", "--json", "--socket", &socket]).trim_end(), answer);
    let (_folder, socket) = told_by("[[[");
    assert!(printed(&["top", "--once", "--socket", &socket]).contains("not understood"));
    let (_folder, socket) = told_by("");
    assert!(refused(&["top", "--once", "--socket", &socket]).contains("its own user only"));
    assert!(refused(&["top", "--socket", "/no/such.sock"]).contains("/no/such.sock: No such file"));
    assert!(refused(&["top", "--interval", "0"]).contains("0.1 to 3600"));
}
