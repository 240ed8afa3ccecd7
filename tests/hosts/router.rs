//! llama-server as a router: it loads no model itself and starts a server of its own for each, which inherits arguments and
//! environment, the plugin's among them.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::summary::{largest, summaries};
use crate::support::derived::{Model, Parts};
use crate::support::fixture_model;
use crate::support::process::Finished;
use crate::support::server::{Completion, Server};
use crate::support::stock::{OVER_CPU, Side, program};
use crate::support::text;

/// Two models, by the names that the router gives them.
const MODELS: [&str; 2] = ["whole", "shorter"];

/// The bundled model without its last layer: other answers from the same tokenizer.
pub(crate) fn shorter_model(path: &Path) {
    let parts = Parts::read();
    let mut file = Model::default();
    file.copy_keys(&parts, |name| (name != "qwen3moe.block_count").then(|| name.to_owned()));
    file.keys.u32("qwen3moe.block_count", 5);
    for tensor in parts.tensors().iter().filter(|tensor| !tensor.name.starts_with("blk.5.")) {
        file.copy(&parts, tensor, &tensor.name);
    }
    file.write(path);
}

/// Waits until the router says this of a model.
fn wait_for(server: &Server, model: &str, state: &str) {
    let end = Instant::now() + Duration::from_secs(300);
    loop {
        let all = server.get("/models");
        let listed = all["data"].as_array().expect("a list of models");
        if listed.iter().any(|entry| entry["id"] == model && entry["status"]["value"] == state) {
            return;
        }
        assert!(Instant::now() < end, "{model} is not {state}: {all}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Asks both models in turn, unloads the first and asks the second, loads the first again and asks it.
fn ask(side: Side<'_>, folder: &Path, more: &[&str]) -> (Vec<Completion>, Finished) {
    let mut command = program("llama-server", side);
    command.args(["--models-dir", text(folder), "-c", "512", "-np", "1", "-nr", "-t", "2", "-ngl", "99"]);
    let mut server = Server::launch(command.args(more));
    server.wait_ready();
    let complete = |model: &str| server.complete_with("The standard library", 16, 3, &json!({"model": model}));
    let mut answers: Vec<Completion> = MODELS.iter().chain(&MODELS).map(|model| complete(model)).collect();
    server.post("/models/unload", &json!({"model": MODELS[0]}));
    wait_for(&server, MODELS[0], "unloaded");
    answers.push(complete(MODELS[1]));
    server.post("/models/load", &json!({"model": MODELS[0]}));
    wait_for(&server, MODELS[0], "loaded");
    answers.push(complete(MODELS[0]));
    (answers, server.stop())
}

#[test]
fn routed_models_equal_stock() {
    let folder = tempfile::tempdir().expect("a folder");
    symlink(fixture_model(), folder.path().join("whole.gguf")).expect("a link to the model");
    shorter_model(&folder.path().join("shorter.gguf"));
    let preset = folder.path().join("preset.ini");
    std::fs::write(&preset, "version = 1\n[*]\ndevice = MoE0\n").expect("a preset");
    let (stock, _) = ask(Side::Stock, folder.path(), &[]);
    assert!(stock[0] != stock[1], "two models, one answer");
    assert!(stock[5] == stock[0], "the model that was loaded again answers as before");
    // The device is named to the router, or in a file only: both are arguments of the children.
    for naming in [["--device", "MoE0"], ["--models-preset", text(&preset)]] {
        let (plugin, finished) = ask(OVER_CPU, folder.path(), &naming);
        assert_eq!(plugin, stock, "{}", finished.report("not equal to stock"));
        // The log of a child passes through the router: three children ran a model, one of them after the unloading.
        let log = finished.log();
        let ran = summaries(&log).iter().filter(|summary| summary["blocks"].as_u64() > Some(0)).count();
        assert_eq!(ran, 3, "{}", finished.report("children that ran on our device"));
        assert_eq!(largest(&log, "unrecognised"), 0, "{}", finished.report("MoE nodes in no block"));
    }
}
