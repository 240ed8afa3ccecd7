//! The llama-server of b10434, an api 2 host that others have built: with the plugin it answers what it answers without.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::entries;
use crate::summary::{ran_in_blocks, summaries};
use crate::support::process::{Finished, run};
use crate::support::server::{Completion, Server};
use crate::support::stock::{OVER_CPU, Side, command, with_model};
use crate::support::{fixture_model, text};
use crate::toolchain::matrix;

const NAME: &str = "b10434";

/// The server with the environment of one side, and no arguments.
fn program(side: Side<'_>) -> Command {
    let host = entries().into_iter().find(|entry| entry.name == NAME).expect("the matrix has the host");
    let mut command = command(&host.libraries.join("llama-server"), side);
    if let Some(folder) = matrix(&["cpu", NAME]).into_iter().flatten().next().map(PathBuf::from) {
        command.env("LD_LIBRARY_PATH", folder);
    }
    command
}

/// Starts the server, asks and stops it.
fn ask<T>(side: Side<'_>, arguments: &[&str], question: impl FnOnce(&Server) -> T) -> (T, Finished) {
    ask_with(side, &[], arguments, question)
}

/// The same with more of an environment.
pub(crate) fn ask_with<T>(
    side: Side<'_>,
    environment: &[(&str, &str)],
    arguments: &[&str],
    question: impl FnOnce(&Server) -> T,
) -> (T, Finished) {
    let mut command = program(side);
    command.envs(environment.iter().copied());
    with_model(&mut command, side, &fixture_model(), 2);
    let mut server = Server::launch(command.args(arguments));
    server.wait_ready();
    (question(&server), server.stop())
}

/// Everything that is compared.
#[derive(Debug, PartialEq)]
struct Answers {
    /// 200 greedy tokens, with the ten best at each position.
    greedy: Completion,
    /// Two prompts at once, in two slots.
    together: Vec<Value>,
    /// What follows a slot that was saved and restored into another one.
    restored: Completion,
    /// The saved slot.
    file: Vec<u8>,
}

fn all(side: Side<'_>) -> (Answers, Finished) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = format!("{}/", text(folder.path()));
    ask(side, &["-c", "1024", "-np", "2", "--slot-save-path", &path], |server| {
        let slot = |id: u32| json!({"id_slot": id, "ignore_eos": true});
        let greedy = server.complete_with("The function returns", 200, 10, &slot(0));
        let saved = server.post("/slots/0?action=save", &json!({"filename": "slot"}));
        server.post("/slots/0?action=erase", &json!({}));
        let back = server.post("/slots/1?action=restore", &json!({"filename": "slot"}));
        assert!(saved["n_saved"].as_u64().is_some_and(|count| count > 200), "{saved}");
        assert_eq!(back["n_restored"], saved["n_saved"]);
        let restored = server.complete_with("The function returns", 24, 3, &slot(1));
        // One request with both prompts: they enter the two slots in one step, so that each pass holds the same tokens on every run.
        let body = json!({
            "prompt": ["A list is a mutable", "import os\nfor name in"], "n_predict": 24, "temperature": 0, "seed": 1,
            "return_tokens": true, "cache_prompt": false,
        });
        let mut together = server.post("/completion", &body).as_array().expect("one answer per prompt").clone();
        together.sort_by_key(|answer| answer["index"].as_u64());
        let together = together.iter().map(|answer| answer["tokens"].clone()).collect();
        Answers { greedy, together, restored, file: std::fs::read(folder.path().join("slot")).expect("saved") }
    })
}

#[test]
fn the_api_2_server_answers_as_without_the_plugin() {
    let (stock, _) = all(Side::Stock);
    let (plugin, finished) = all(OVER_CPU);
    ran_in_blocks(&finished);
    assert_eq!(finished.lines_with("host layout api 2,").len(), 1, "{}", finished.report("the layout"));
    assert_eq!(stock.greedy.tokens.len(), 200);
    let positions = stock.greedy.probabilities.as_array().expect("probabilities were asked for");
    assert_eq!(positions.len(), 200);
    assert_eq!(positions[0]["top_logprobs"].as_array().map(Vec::len), Some(10), "{}", positions[0]);
    assert_eq!(stock.together.len(), 2);
    assert!(plugin.file == stock.file, "the saved keys and values differ");
    assert_eq!(plugin.greedy.tokens, stock.greedy.tokens);
    assert_eq!(plugin, stock);
}

/// Loaded but not named, the plugin's device is listed and not used.
#[test]
fn the_default_devices_of_the_api_2_server_stay() {
    let unnamed = Side::Plugin { keys: "inner=CPU;log=debug", device: "" };
    let list = |side| {
        let finished = run(program(side).arg("--list-devices"), Duration::from_secs(30)).success();
        finished.lines_with("  ").into_iter().filter(|line| !line.contains("(none)")).collect::<Vec<String>>()
    };
    let (ours, others): (Vec<String>, Vec<String>) =
        list(unnamed).into_iter().partition(|line| line.trim_start().starts_with("MoE0: "));
    assert_eq!(ours.len(), 1, "MoE0 is listed once");
    assert_eq!(others, list(Side::Stock));

    let complete =
        |side| ask(side, &["-c", "256", "-np", "1", "-lv", "4"], |server| server.complete("A tuple is", 16, 3));
    let (answer, finished) = complete(unnamed);
    assert!(summaries(&finished.log()).is_empty(), "{}", finished.report("a backend of ours was made"));
    assert!(finished.lines_with("using device MoE0").is_empty(), "{}", finished.report("MoE0 was used unnamed"));
    assert_eq!(answer, complete(Side::Stock).0);
}
