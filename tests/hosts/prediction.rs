//! Multi-token prediction: one model, a second context that runs only its last block and drafts from the first one's hidden states.

use std::path::Path;

use serde_json::json;

use crate::sides::equal;
use crate::summary::summaries;
use crate::support::derived::{Model, Parts};

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

#[test]
fn a_predicting_context_equals_stock() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("predicting.gguf");
    predicting_model(&path);
    let arguments = ["-c", "512", "-np", "1", "--spec-type", "draft-mtp", "--spec-draft-n-max", "2"];
    let ((tokens, drafted, accepted), finished) = equal(&path, &arguments, |server| {
        let question = json!({
            "prompt": "## What is ownership?\n\nOwnership is a set of rules that", "n_predict": 48, "temperature": 0,
            "seed": 1, "return_tokens": true,
        });
        let answer = server.post("/completion", &question);
        let timings = &answer["timings"];
        (answer["tokens"].clone(), timings["draft_n"].as_u64(), timings["draft_n_accepted"].as_u64())
    });
    assert_eq!(tokens.as_array().map(Vec::len), Some(48), "{tokens}");
    println!("{drafted:?} tokens drafted, {accepted:?} accepted");
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
