//! Drafts from beside the target: by multi-token prediction, where a second context of the same model runs only its last block, on
//! the first one's hidden states; and by a draft model that is not on our device. One that is has its test in `completions.rs`.

use std::path::Path;

use serde_json::{Value, json};

use crate::architectures::plain_models;
use crate::router::shorter_model;
use crate::sides::equal;
use crate::summary::summaries;
use crate::support::derived::{Model, Parts, noise};
use crate::support::server::Server;
use crate::support::{fixture_model, text};

/// The bundled model as an architecture of the same mathematics that has such a block: the last layer once more, in front of
/// which the last token's embedding and the hidden state are mixed in equal parts. Untrained, so most drafts are wrong.
fn predicting_model(path: &Path) {
    const LAYERS: u32 = 6;
    let parts = Parts::read();
    let mut file = Model::default();
    file.keys.string("general.architecture", "glm4moe");
    file.copy_tokenizer(&parts);
    file.copy_keys(&parts, |name| {
        let rest = name.strip_prefix("qwen3moe.").filter(|rest| *rest != "block_count")?;
        Some(format!("glm4moe.{rest}"))
    });
    let numbers = [
        ("block_count", LAYERS + 1),
        ("nextn_predict_layers", 1),
        ("expert_shared_count", 1),
        // Softmax.
        ("expert_gating_func", 1),
    ];
    numbers.iter().for_each(|(key, value)| file.keys.u32(&format!("glm4moe.{key}"), *value));
    file.keys.bool("glm4moe.expert_weights_norm", true);
    for tensor in parts.tensors() {
        let name = tensor.name.replace("ffn_norm", "post_attention_norm");
        file.copy(&parts, tensor, &name);
        if let Some(rest) = name.strip_prefix("blk.5.") {
            file.copy(&parts, tensor, &format!("blk.6.{rest}"));
        }
    }
    for layer in 0..=LAYERS {
        // What the other architecture lacks: it adds nothing.
        let mut zeros = |name: &str, shape: &[u64]| {
            file.floats(&format!("blk.{layer}.{name}"), shape, std::iter::repeat(0.0));
        };
        zeros("exp_probs_b.bias", &[32]);
        zeros("ffn_gate_shexp.weight", &[256, 128]);
        zeros("ffn_up_shexp.weight", &[256, 128]);
        zeros("ffn_down_shexp.weight", &[128, 256]);
    }
    let mix = (0..256).flat_map(|row| (0..512).map(move |column| if column % 256 == row { 0.5 } else { 0.0 }));
    file.floats("blk.6.nextn.eh_proj.weight", &[512, 256], mix);
    for name in ["enorm", "hnorm"] {
        file.floats(&format!("blk.6.nextn.{name}.weight"), &[256], std::iter::repeat(1.0));
    }
    file.write(path);
}

/// What a prompt is answered with, how many tokens the second context drafted for it, and how many of them were right.
type Answer = (Value, Option<u64>, Option<u64>);

fn ask(server: &Server, prompt: &Value) -> Answer {
    let question = json!({
        "prompt": prompt, "n_predict": 40, "temperature": 0, "seed": 1, "return_tokens": true, "ignore_eos": true,
    });
    let answer = server.post("/completion", &question);
    assert_eq!(answer["tokens"].as_array().map(Vec::len), Some(40), "{answer}");
    let timings = &answer["timings"];
    (answer["tokens"].clone(), timings["draft_n"].as_u64(), timings["draft_n_accepted"].as_u64())
}

const ARGUMENTS: [&str; 8] = ["-c", "256", "-np", "1", "--spec-type", "draft-mtp", "--spec-draft-n-max", "2"];

#[test]
fn a_predicting_context_equals_stock() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("predicting.gguf");
    predicting_model(&path);
    let prompt = json!("## What is ownership?\n\nOwnership is a set of rules that");
    let ((_, drafted, accepted), finished) = equal(&path, &ARGUMENTS, |server| ask(server, &prompt));
    assert!(drafted > Some(0), "nothing was drafted");
    assert!(
        accepted > Some(0) && accepted < drafted,
        "{accepted:?} of {drafted:?} accepted: both ways are to be tried"
    );
    // The target has a block in each of its layers, the second context in its only one.
    for blocks in [6, 1] {
        let ran = summaries(&finished.log()).iter().any(|summary| summary["blocks_max"].as_u64() == Some(blocks));
        assert!(ran, "{}", finished.report(&format!("no backend of ours ran {blocks} blocks in a graph")));
    }
}

/// The architectures of test-llama-archs that stock runs with the last layer once more as such a block. With others it fails
/// or has no such block.
const PREDICTING: [&str; 7] = ["cohere2moe", "deepseek2", "deepseek32", "glm-dsa", "hy_v3", "qwen35moe", "qwen3next"];

/// A model with its last layer once more, in front of which the mixing is random.
fn with_prediction(model: &Path, path: &Path) {
    let parts = Parts::of(model);
    let (layers, width) = (parts.number(".block_count"), u64::from(parts.number(".embedding_length")));
    let mut file = Model::default();
    for key in parts.keys().iter().filter(|key| !key.name.ends_with(".nextn_predict_layers")) {
        match key.name.strip_suffix(".block_count") {
            Some(architecture) => {
                file.keys.u32(&key.name, layers + 1);
                file.keys.u32(&format!("{architecture}.nextn_predict_layers"), 1);
            }
            None => file.keys.copy(&key.name, &key.longer(layers)),
        }
    }
    let last = format!("blk.{}.", layers - 1);
    for tensor in parts.tensors() {
        file.copy(&parts, tensor, &tensor.name);
        if let Some(rest) = tensor.name.strip_prefix(&last) {
            file.copy(&parts, tensor, &format!("blk.{layers}.{rest}"));
        }
    }
    file.floats(&format!("blk.{layers}.nextn.eh_proj.weight"), &[2 * width, width], noise(1, 0.2));
    for name in ["enorm", "hnorm", "shared_head_norm"] {
        file.floats(&format!("blk.{layers}.nextn.{name}.weight"), &[width], std::iter::repeat(1.0));
    }
    file.write(path);
}

#[test]
fn predicting_contexts_of_other_architectures_equal_stock() {
    let folder = tempfile::tempdir().expect("a folder");
    let models = plain_models();
    for architecture in PREDICTING {
        let name = format!("{architecture}-moe.gguf");
        let model = models.iter().find(|model| model.ends_with(&name)).unwrap_or_else(|| panic!("no {name}"));
        let path = folder.path().join(name);
        with_prediction(model, &path);
        let ((_, drafted, _), finished) =
            equal(&path, &ARGUMENTS, |server| ask(server, &json!([1, 5, 7, 9, 11, 3, 2])));
        assert!(drafted > Some(0), "{architecture}: nothing was drafted");
        let ran = summaries(&finished.log()).iter().filter(|summary| summary["blocks"].as_u64() > Some(0)).count();
        assert_eq!(ran, 2, "{}", finished.report("backends of ours with blocks"));
    }
}

/// The target on our device, its draft model on the host's CPU.
#[test]
fn a_draft_model_on_another_device_equals_stock() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("shorter.gguf");
    shorter_model(&path);
    let draft = ["-md", text(&path), "-devd", "none", "--spec-type", "draft-simple", "--spec-draft-n-max", "4"];
    let arguments = [&["-c", "256", "-np", "1"][..], &draft].concat();
    let prompt = json!("A list is a mutable sequence. A tuple is");
    let ((_, drafted, accepted), finished) = equal(&fixture_model(), &arguments, |server| ask(server, &prompt));
    assert!(
        accepted > Some(0) && accepted < drafted,
        "{accepted:?} of {drafted:?} accepted: both ways are to be tried"
    );
    let ran = summaries(&finished.log()).iter().filter(|summary| summary["blocks"].as_u64() > Some(0)).count();
    assert_eq!(ran, 1, "{}", finished.report("backends of ours with blocks"));
}
