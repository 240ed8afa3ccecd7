//! The mask of a long pass, filled by several threads: answers are stock's, and where the host's function is not what is known it fills masks
//! alone. What is called is told by a library between the plugin and the host (`masks.cpp`).

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::support::generated::{LIKE_GPT_OSS, model};
use super::support::process::{Finished, run};
use super::support::server::Server;
use super::support::stock::{self, Side, preloaded, program};
use super::support::{fixture, fixture_model, text};
use super::{LIMIT, one_decision, ran_in_blocks};

/// The device is named, so that memory decides nothing.
const NAMED: [&str; 11] = [
    "--moe",
    "inner=CPU",
    "--moe",
    "log=debug",
    "--moe",
    "state-file=off",
    "--moe=threads=1",
    "--moe",
    "mask-threads=2",
    "--device",
    "MoE0",
];
const TOLD: &str = "ggml-moe: the mask of a pass of 2048 tokens over 2048 cells was filled by 2 threads in ";
const ALONE: &str = "ggml-moe: llama.cpp fills the masks of long passes alone: ";

fn host(name: &str, model: &Path) -> Command {
    let mut command = program(name, Side::Stock);
    command.args(["-m", text(model), "-nr", "-t", "2", "-b", "2048", "-ub", "2048"]);
    command
}

/// Preloads the plugin before the library that tells what is called.
fn help<'c>(command: &'c mut Command, fault: &str) -> &'c mut Command {
    let libraries = [stock::plugin().to_owned(), preloaded("support/flush_log"), preloaded("preload/masks.cpp")];
    let libraries = libraries.map(|path| path.display().to_string());
    command.env("LD_PRELOAD", libraries.join(" ")).env("MASK_FAULT", fault).args(NAMED)
}

/// The perplexity of two chunks, each one pass, by stock or with a fault of the host's function.
fn perplexity(model: &Path, fault: Option<&str>, more: &[&str]) -> (String, Finished) {
    let mut command = host("llama-perplexity", model);
    command.args(["-f", text(&fixture("eval.txt")), "--chunks", "2", "-c", "2048"]);
    if let Some(fault) = fault {
        help(&mut command, fault).args(more);
    }
    let finished = run(&mut command, LIMIT).success();
    let figure = finished.lines_with("Final estimate").pop().expect("a result");
    (figure.split_once("Final").expect("it begins so").1.to_owned(), finished)
}

/// Calls of the host's function for parts longer than those of the check, and for masks of long passes as a whole.
fn calls(finished: &Finished) -> (usize, usize) {
    let count = |word: &str, least: u32| {
        let tokens = finished
            .lines_with(word)
            .into_iter()
            .filter_map(|line| line.split_once(word)?.1.strip_suffix(" tokens")?.parse::<u32>().ok());
        tokens.filter(|tokens| *tokens >= least).count()
    };
    (count("mask: a part of ", 33), count("mask: all of ", 1024))
}

#[test]
fn masks_by_threads_are_stocks() {
    let model_file = fixture_model();
    let stock = perplexity(&model_file, None, &[]).0;
    let (ours, finished) = perplexity(&model_file, Some(""), &[]);
    one_decision(&finished, "ggml-moe: on for tiny-docs-moe");
    ran_in_blocks(&finished);
    assert_eq!(ours, stock, "{}", finished.report("not equal"));
    assert_eq!(finished.lines_with(TOLD).len(), 1, "{}", finished.report("told once"));
    assert_eq!(calls(&finished), (16, 0), "{}", finished.report("two passes, two threads, four parts for each"));

    let (ours, finished) = perplexity(&model_file, Some(""), &["--moe", "mask-threads=1"]);
    assert_eq!(ours, stock);
    assert_eq!(
        (calls(&finished), finished.lines_with("mask: a part").len()),
        ((0, 2), 0),
        "{}",
        finished.report("off")
    );

    // Every second layer sees a window of 128 tokens: two masks for each pass.
    let windows = model("like-gpt-oss", &LIKE_GPT_OSS);
    let (ours, finished) = perplexity(&windows, Some(""), &[]);
    assert_eq!(ours, perplexity(&windows, None, &[]).0, "{}", finished.report("windows"));
    assert_eq!(calls(&finished), (32, 0), "{}", finished.report("windows"));
}

#[test]
fn a_host_that_does_not_take_parts_fills_masks_alone() {
    let model = fixture_model();
    let stock = perplexity(&model, None, &[]).0;
    for (fault, reason) in [
        ("wrong", "a part of a mask is not what it is in the whole"),
        ("throw", "it failed for a part of a pass"),
        ("late", "it failed for a part of a pass"),
    ] {
        let (ours, finished) = perplexity(&model, Some(fault), &[]);
        assert_eq!(ours, stock, "{}", finished.report(fault));
        let told: Vec<String> = finished.lines_with(ALONE);
        assert!(told.len() == 1 && told[0].ends_with(reason), "{told:?}: {}", finished.report(fault));
        let (parts, wholes) = calls(&finished);
        assert_eq!((parts > 0, wholes), (fault == "late", 2), "{}", finished.report(fault));
    }
}

/// Two slots share the cells: cells of other texts, and of what was answered before, lie among those of a prompt.
#[test]
fn prompts_behind_others_equal_stock() {
    let answers = |helped: bool| {
        let mut command = host("llama-server", &fixture_model());
        command.args(["-c", "8192", "-np", "2", "-kvu"]);
        if helped {
            help(&mut command, "");
        }
        let mut server = Server::launch(&mut command);
        server.wait_ready();
        let mut answers: Vec<Value> = Vec::new();
        for (slot, tokens) in [(0, 1900_u32), (1, 1700), (0, 3500), (1, 300)] {
            let prompt: Vec<u32> = (0..tokens).map(|at| 20 + (at * 37 + slot * 5 + at * at % 13) % 400).collect();
            let body = json!({
                "prompt": prompt, "n_predict": 6, "n_probs": 3, "temperature": 0, "seed": 1, "return_tokens": true, "id_slot": slot,
            });
            let answer = server.post("/completion", &body);
            assert_eq!(answer["tokens"].as_array().map(Vec::len), Some(6), "{answer}");
            answers.push(json!([answer["tokens"], answer["completion_probabilities"]]));
        }
        (answers, server.stop())
    };
    let (ours, finished) = answers(true);
    assert_eq!(ours, answers(false).0, "{}", finished.report("not equal"));
    let (parts, wholes) = calls(&finished);
    assert!(parts >= 3 * 8 && wholes == 0, "{parts} parts and {wholes} wholes: {}", finished.report("calls"));
}
