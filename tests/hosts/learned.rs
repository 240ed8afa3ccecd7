//! What the cache remembers from run to run, and the mode in which nothing depends on time or earlier runs.
//!
//! The hosts end as users end them; what they left in the state file is what the next one begins with.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tempfile::TempDir;

use crate::perplexity::{figures, perplexity};
use crate::summary::largest;
use crate::support::process::{Finished, run};
use crate::support::server::{Completion, Server};
use crate::support::stock::{Side, tool};
use crate::support::{fixture_model, text};

/// About a quarter of the fixture's experts.
const KEYS: &str = "inner=CPU;log=debug;moe-expert-cache=8";
const ONE_BY_ONE: [&str; 4] = ["-b", "1", "-ub", "1"];

struct Folder {
    folder: TempDir,
}

impl Folder {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a folder") }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("moe-state.ini")
    }

    fn keys(&self) -> String {
        keys_with(&self.file())
    }
}

fn keys_with(file: &Path) -> String {
    format!("{KEYS};state-file={}", file.display())
}

/// Runs chunks of 128 tokens, one token per graph.
fn decode(keys: &str, chunks: u32) -> Finished {
    decode_chunks(keys, "128", chunks)
}

fn decode_chunks(keys: &str, tokens: &str, chunks: u32) -> Finished {
    let arguments = [&ONE_BY_ONE[..], &["-c", tokens]].concat();
    perplexity(Side::Plugin { keys, device: "MoE0" }, 1, chunks, &arguments)
}

fn hits(finished: &Finished) -> u64 {
    largest(&finished.log(), "hits")
}

/// What `ggml-moe state show` tells.
fn shown(file: &Path) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ggml-moe"));
    run(command.args(["state", "show", "--file", text(file)]), Duration::from_secs(20)).success().stdout
}

#[test]
fn the_next_run_begins_with_what_was_learned() {
    let folder = Folder::new();
    let large = "inner=CPU;log=debug;moe-expert-cache=20";
    let keys = format!("{large};state-file={}", folder.file().display());
    let cold = decode_chunks(large, "8", 1);
    let first = decode(&keys, 3);
    assert!(first.lines_with("are remembered").is_empty(), "{}", first.report("nothing was there yet"));
    let state = shown(&folder.file());
    assert!(state.contains(": 1 models") && state.contains("192 experts in "), "{state}");
    let warm = decode_chunks(&keys, "8", 1);
    let lines = warm.lines_with("tokens of this model are remembered");
    assert!(lines.len() == 1 && lines[0].contains(text(&folder.file())), "{}", warm.report("told once, with the file"));
    assert_eq!(figures(&warm), figures(&cold), "what is cached changes no result");
    assert!(hits(&warm) * 4 > hits(&cold) * 5, "{} hits, {} without the file", hits(&warm), hits(&cold));
    // The file does not depend on where a program was told to look.
    let tokens = |state: &str| -> u64 {
        let (_, rest) = state.split_once("model ").expect("a model");
        let words: Vec<&str> = rest.split_whitespace().collect();
        words[1].parse().unwrap_or_else(|error| panic!("{error}: {state}"))
    };
    assert!(tokens(&shown(&folder.file())) > tokens(&state), "the second run added to it");
}

/// The default place, a server that is interrupted, and a model that is freed and loaded again meanwhile.
#[test]
fn a_server_remembers_in_the_cache_folder() {
    let folder = Folder::new();
    let mut command =
        tool("llama-server", Side::Plugin { keys: &keys_with(&folder.file()), device: "MoE0" }, &fixture_model(), 2);
    command.env("GGML_MOE", KEYS).env("LLAMA_CACHE", folder.folder.path());
    command.args(["-c", "512", "-np", "1", "--sleep-idle-seconds", "1"]);
    let mut server = Server::launch(&mut command);
    server.wait_ready();
    server.complete("A list comprehension is a", 48, 1);
    server.wait_asleep();
    let asleep = shown(&folder.file());
    assert!(asleep.contains(": 1 models"), "{asleep}");
    server.complete("A tuple is", 48, 1);
    let finished = server.stop();
    // On a busy machine the server may fall asleep once more than it is waited for.
    let (loads, told) =
        (finished.lines_with("loading model '"), finished.lines_with("tokens of this model are remembered"));
    assert!((1..loads.len()).contains(&told.len()), "{}", finished.report("the second load"));
    assert_ne!(shown(&folder.file()), asleep, "{}", finished.report("nothing was written at the end"));
    assert!(hits(&finished) > 0, "{}", finished.report("no hits"));
}

#[test]
fn a_file_that_cannot_be_used_is_one_line() {
    let folder = Folder::new();
    std::fs::write(folder.file(), "[model x\n").expect("written");
    let broken = decode(&folder.keys(), 1);
    assert_eq!(broken.lines_with("was broken (line 1").len(), 1, "{}", broken.report("a broken file"));
    assert!(shown(&folder.file()).contains(": 1 models"));
    // A folder that cannot be there: root may write anywhere, but not below a file.
    let nowhere = decode(&keys_with(&folder.file().join("moe-state.ini")), 1);
    let told = nowhere.lines_with("cannot be kept in");
    assert_eq!(told.len(), 1, "{}", nowhere.report("a path below a file"));
    assert!(told[0].contains("set state-file to another path, or to off"), "{}", told[0]);
    assert_eq!(figures(&nowhere), figures(&broken));
    let later = "format = 9\n";
    std::fs::write(folder.file(), later).expect("written");
    let newer = decode(&folder.keys(), 1);
    assert_eq!(newer.lines_with("format 9 is newer").len(), 1, "{}", newer.report("a later format"));
    assert_eq!(std::fs::read_to_string(folder.file()).expect("the file"), later, "left alone");
}

#[test]
fn two_processes_add_to_one_file() {
    let folder = Folder::new();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| decode(&folder.keys(), 1));
        }
    });
    let state = shown(&folder.file());
    assert!(state.contains(": 1 models"), "{state}");
    // A chunk of 128 tokens each, of which little has faded.
    let tokens =
        state.lines().find_map(|line| line.strip_prefix("model ")?.split_whitespace().nth(1)?.parse::<u64>().ok());
    assert!(tokens.is_some_and(|tokens| (250..=260).contains(&tokens)), "{state}");
}

/// One greedy answer of a server with one slot; text and counters.
fn fixed_run(keys: &str) -> (Completion, [u64; 4]) {
    let server = Server::start(Side::Plugin { keys, device: "MoE0" }, &fixture_model(), &["-c", "512", "-np", "1"]);
    let answer = server.complete("import os\nfor name in", 160, 3);
    let finished = server.stop();
    let log = finished.log();
    assert_eq!(finished.lines_with("fixed=1: nothing is measured").len(), 1, "{}", finished.report("it is told"));
    (answer, ["hits", "misses", "cpu_bytes", "upload_bytes"].map(|counter| largest(&log, counter)))
}

#[test]
fn fixed_runs_are_the_same_in_text_and_counters() {
    let folder = Folder::new();
    std::fs::write(folder.file(), "not read, or this would be set aside").expect("written");
    let keys = format!("{};fixed=1", folder.keys());
    let first = fixed_run(&keys);
    assert!(first.1.iter().all(|counter| *counter > 0), "hits, misses and uploads: {:?}", first.1);
    assert_eq!(fixed_run(&keys), first);
    let stop = AtomicBool::new(false);
    let loaded = std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let outcome = std::panic::catch_unwind(|| fixed_run(&keys));
        stop.store(true, Ordering::Relaxed);
        outcome
    });
    assert_eq!(loaded.expect("the run under load"), first);
    let file = std::fs::read_to_string(folder.file()).expect("the file");
    assert_eq!(file, "not read, or this would be set aside", "neither read nor written");
}

/// Over a device whose copies end late, after delays that differ: with `fixed` runs are the same, and waiting for uploads changes no result. (That
/// late ones are waited for is tested where it is decided, `experts::cache::uploads`: on this device each block waits for copies in any case.)
#[test]
fn waiting_for_uploads_changes_no_result() {
    let run = |seed: u32, more: &str| {
        let keys = format!("inner=LATE0;log=debug;debug-late={seed};debug-poison=on;moe-expert-cache=8;{more}");
        let finished = decode_chunks(&keys, "96", 1);
        let log = finished.log();
        (figures(&finished), ["hits", "misses", "upload_bytes"].map(|counter| largest(&log, counter)))
    };
    let fixed = run(1, "fixed=1");
    assert_eq!(run(2, "fixed=1"), fixed, "other delays, the same run");
    for more in ["wait-swaps=on;governor=off", "wait-swaps=on;swap-lead=64;governor=off;upload-chunk-kb=2"] {
        let waiting = run(3, more);
        assert_eq!(waiting.0, fixed.0, "{more}");
        assert!(waiting.1.iter().all(|counter| *counter > 0), "{more}: {:?}", waiting.1);
    }
}

/// The size in slots per layer, pieces, waiting and a slow link: the results are stock's.
#[test]
fn keys_change_no_result() {
    let arguments = [&ONE_BY_ONE[..], &["-c", "128"]].concat();
    let stock = figures(&perplexity(Side::Stock, 1, 1, &arguments));
    let mut uploads = Vec::new();
    for more in [
        "moe-expert-cache=8;upload-chunk-kb=3;wait-swaps=on;swap-lead=1",
        "cache=4;policy=layers",
        "cache=4;policy=frequency;swaps-per-step=1",
        "cache=4;link-gbs=0.5",
    ] {
        let finished = decode(&format!("inner=CPU;log=debug;{more}"), 1);
        assert_eq!(figures(&finished), stock, "{}", finished.report(more));
        assert!(hits(&finished) > 0 && largest(&finished.log(), "misses") > 0, "{}", finished.report(more));
        uploads.push(largest(&finished.log(), "upload_bytes"));
        if more.starts_with("moe-expert-cache") {
            assert_eq!(
                finished.lines_with("48 of 192 experts").len(),
                1,
                "{}",
                finished.report("8 of each of 6 layers")
            );
        }
        if more.contains("link-gbs") {
            let told = finished.lines_with("THE LINK IS SLOWED DOWN (link-gbs=0.5)");
            assert!(
                told.len() == 1 && told[0].contains("each copy of 64 KiB or more runs "),
                "{}",
                finished.report("what was done is told")
            );
        }
    }
    assert!(uploads.iter().all(|bytes| *bytes > 0), "{uploads:?}");
}

#[test]
fn a_cache_below_the_floor_says_so() {
    let finished = decode("inner=CPU;log=debug;moe-expert-cache=1", 1);
    assert_eq!(finished.lines_with("6 of 192 experts").len(), 1, "{}", finished.report("one of each layer"));
    assert_eq!(finished.lines_with("it holds whole layers").len(), 1, "{}", finished.report("the floor"));
}
