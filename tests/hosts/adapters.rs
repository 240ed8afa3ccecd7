//! LoRA adapters on dense and on expert weights, applied from the start and changed while the server runs.
//!
//! An adapter of an expert weight is itself a stack of matrices, one for each expert: stock puts it into the buffer type of the
//! weight and multiplies with it by expert ids, so that each block holds three products where it held one.

use std::path::Path;

use serde_json::json;

use crate::sides::equal;
use crate::summary::summaries;
use crate::support::derived::{Model, Parts, noise};
use crate::support::server::{Completion, Server};
use crate::support::{fixture_model, text};

const RANK: u64 = 4;

/// Writes an adapter for every weight whose name ends in one of these; numbers of `limit` change answers but leave them words.
pub(crate) fn adapter(path: &Path, endings: &[&str], limit: f32) {
    let parts = Parts::read();
    let mut file = Model::default();
    file.keys.string("general.type", "adapter");
    file.keys.string("general.architecture", "qwen3moe");
    file.keys.string("adapter.type", "lora");
    file.keys.f32("adapter.lora.alpha", 8.0);
    let mut seed = 0;
    for tensor in parts.tensors().iter().filter(|tensor| endings.iter().any(|ending| tensor.name.ends_with(ending))) {
        // Both matrices of a pair have as many experts as the weight; one that is dense has none.
        let (inputs, outputs, experts) = (tensor.shape[0], tensor.shape[1], &tensor.shape[2..]);
        for (letter, shape) in [("a", [inputs, RANK]), ("b", [RANK, outputs])] {
            seed += 1;
            let shape = [&shape[..], experts].concat();
            file.floats(&format!("{}.lora_{letter}", tensor.name), &shape, noise(seed, limit));
        }
    }
    assert!(seed > 0, "no weight ends in {endings:?}");
    file.write(path);
}

/// Sets the scale of both adapters, then asks.
fn at(server: &Server, dense: f32, experts: f32) -> Completion {
    server.post("/lora-adapters", &json!([{"id": 0, "scale": dense}, {"id": 1, "scale": experts}]));
    ask(server)
}

fn ask(server: &Server) -> Completion {
    server.complete_with("A list comprehension is a", 16, 3, &json!({"cache_prompt": false}))
}

#[test]
fn dense_and_expert_adapters_equal_stock() {
    let folder = tempfile::tempdir().expect("a folder");
    let (dense, experts) = (folder.path().join("dense.gguf"), folder.path().join("experts.gguf"));
    adapter(&dense, &["attn_q.weight", "attn_output.weight", "ffn_gate_inp.weight"], 0.1);
    adapter(&experts, &["ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"], 0.1);
    let scaled = format!("{}:0.75", text(&experts));
    let arguments = ["-c", "512", "-np", "1", "-lv", "4", "--lora", text(&dense), "--lora-scaled", &scaled];
    let (answers, finished) = equal(&fixture_model(), &arguments, |server| {
        let from_the_start = ask(server);
        [from_the_start, at(server, 0.0, 0.0), at(server, 1.0, 0.0), at(server, 0.0, 1.0), at(server, 1.0, 0.75)]
    });
    for (index, answer) in answers.iter().enumerate().take(4) {
        let others = answers.iter().skip(index + 1).take(3 - index);
        assert!(others.clone().all(|other| other != answer), "an adapter changed nothing: {answers:?}");
    }
    assert_eq!(answers[4], answers[0], "the scales of the start, set again");
    for buffer in ["MoE0 LoRA buffer", "MoE0_Experts LoRA buffer"] {
        assert!(!finished.lines_with(buffer).is_empty(), "{}", finished.report(&format!("no {buffer}")));
    }
}

/// A server that goes to sleep frees the adapters with the model, and loads both again.
#[test]
fn adapters_after_sleep_equal_stock() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("experts.gguf");
    adapter(&path, &["ffn_gate_exps.weight", "ffn_down_exps.weight"], 0.1);
    let arguments = ["-c", "512", "-np", "1", "--sleep-idle-seconds", "1", "--lora", text(&path)];
    let (answers, finished) = equal(&fixture_model(), &arguments, |server| {
        let before = ask(server);
        server.wait_asleep();
        [before, ask(server)]
    });
    assert_eq!(answers[1], answers[0]);
    let ran = summaries(&finished.log()).iter().filter(|summary| summary["blocks"].as_u64() > Some(0)).count();
    assert!(ran >= 2, "{}", finished.report("the model was loaded again"));
}
