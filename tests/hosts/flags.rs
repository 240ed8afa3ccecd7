//! A sweep over llama-server's flags that change how weights, caches, threads or graphs are handled: with each of them, a short greedy
//! completion and its probabilities equal stock's.

use crate::summary::ran_in_blocks;
use crate::support::fixture_model;
use crate::support::process::Finished;
use crate::support::server::{Completion, Server};
use crate::support::stock::{OVER_CPU, Side};

/// A prompt of a few passes, then single tokens.
const PROMPT: &str =
    "## What is ownership?\n\nOwnership is a set of rules that govern how a program manages memory. The";

fn completion(side: Side<'_>, flags: &[&str]) -> (Completion, Finished) {
    let flags = [&["-c", "256", "-np", "1", "-ub", "16", "--no-warmup"], flags].concat();
    let server = Server::start(side, &fixture_model(), &flags);
    (server.complete(PROMPT, 8, 3), server.stop())
}

/// Compares each set of flags and lists everything that differs. Returns what stock answered, in order.
fn equal_to_stock(rows: &[&[&str]]) -> Vec<Completion> {
    let mut wrong = Vec::new();
    let mut answers = Vec::new();
    for flags in rows {
        let (stock, _) = completion(Side::Stock, flags);
        let (plugin, finished) = completion(OVER_CPU, flags);
        if plugin != stock {
            wrong.push(finished.report(&format!("{flags:?}: {plugin:?} is not {stock:?}")));
        }
        ran_in_blocks(&finished);
        answers.push(stock);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    answers
}

#[test]
fn of_the_model_and_the_cache() {
    let answers = equal_to_stock(&[
        &["--override-kv", "qwen3moe.expert_used_count=int:2"],
        &["--override-kv", "qwen3moe.expert_used_count=int:8"],
        &["--rope-freq-scale", "0.5"],
        &["-fa", "off"],
        &["-fa", "off", "-ctk", "q4_0"],
        &["-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0"],
        &["-ctk", "f32", "-ctv", "f32"],
        &["--swa-full"],
        &["-kvu"],
        &["--no-kv-offload"],
        &["--no-op-offload"],
        &["-b", "8", "-ub", "8"],
        &["-bs"],
    ]);
    // Overrides that reach no kernel would compare the same thing several times.
    assert_ne!(answers[0], answers[1]);
    assert_ne!(answers[0], answers[2]);
    assert_ne!(answers[3], answers[4]);
}

#[test]
fn of_threads_and_memory() {
    equal_to_stock(&[
        &["--numa", "distribute"],
        &["--numa", "isolate"],
        &["--poll", "0"],
        &["--poll", "100"],
        &["--prio", "0"],
        &["--prio", "-1"],
        &["--cpu-mask", "3", "--cpu-strict", "1"],
        &["-t", "1", "-tb", "2"],
    ]);
}
