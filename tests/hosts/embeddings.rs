//! Embeddings and reranking: graphs that end in pooling instead of logits, and an encoder, which has no cache of keys and values.

use std::path::Path;

use serde_json::{Value, json};

use crate::sides::{equal, equal_over};
use crate::support::derived::{Model, Parts, noise};
use crate::support::fixture_model;
use crate::support::server::Server;
use crate::support::stock::Side;

const TEXTS: [&str; 3] = [
    "Ownership is a set of rules that govern how a program manages memory.",
    "A list is a mutable sequence.",
    "import os\nprint(os.listdir('.'))",
];

/// All numbers of the embeddings of all texts; not one number for all of them.
fn embeddings(server: &Server) -> Value {
    let answer = server.post("/embedding", &json!({"content": TEXTS}));
    let rows = answer.as_array().expect("one row per text");
    assert_eq!(rows.len(), TEXTS.len(), "{answer}");
    assert!(rows[0]["embedding"] != rows[1]["embedding"], "two texts, one embedding: {answer}");
    answer
}

fn width(answer: &Value) -> Option<usize> {
    answer[0]["embedding"][0].as_array().map(Vec::len)
}

#[test]
fn pooled_embeddings_equal_stock() {
    for pooling in ["mean", "last"] {
        let arguments = ["-c", "512", "--embeddings", "--pooling", pooling];
        let (answer, _) = equal(&fixture_model(), &arguments, embeddings);
        assert_eq!(width(&answer), Some(256), "{pooling}: {answer}");
    }
}

/// Passes without logits, while memory comes and goes.
#[test]
fn embeddings_equal_stock_where_memory_is_lent() {
    let side = Side::Plugin { keys: crate::lending::KEYS, device: "MoE0" };
    let arguments = ["-c", "512", "--embeddings", "--pooling", "mean"];
    let (_, finished) = equal_over(side, &fixture_model(), &arguments, embeddings);
    assert!(crate::summary::largest(&finished.log(), "lent_bytes") > 0, "{}", finished.report("nothing came"));
}

#[test]
fn reranking_equals_stock() {
    let question = json!({"query": "What is a list?", "documents": TEXTS});
    let (answer, _) =
        equal(&fixture_model(), &["-c", "512", "--reranking"], |server| server.post("/rerank", &question));
    let score = |index: usize| answer["results"][index]["relevance_score"].as_f64();
    assert!(score(0).is_some() && score(0) != score(1), "scores were compared: {answer}");
}

/// An encoder whose odd layers have experts, of the one such architecture that stock knows, with meaningless weights.
fn encoder(path: &Path) {
    const LAYERS: u32 = 4;
    const WIDTH: u32 = 64;
    const INNER: u32 = 96;
    const EXPERTS: u32 = 8;
    let mut file = Model::default();
    file.keys.string("general.architecture", "nomic-bert-moe");
    let numbers = [
        ("block_count", LAYERS),
        ("context_length", 512),
        ("embedding_length", WIDTH),
        ("feed_forward_length", INNER),
        ("attention.head_count", 4),
        ("expert_count", EXPERTS),
        ("expert_used_count", 2),
        ("moe_every_n_layers", 2),
        // The mean over all tokens.
        ("pooling_type", 1),
    ];
    numbers.iter().for_each(|(key, value)| file.keys.u32(&format!("nomic-bert-moe.{key}"), *value));
    file.keys.f32("nomic-bert-moe.attention.layer_norm_epsilon", 1e-5);
    file.keys.bool("nomic-bert-moe.attention.causal", false);
    file.keys.u32("tokenizer.ggml.token_type_count", 1);
    let parts = Parts::read();
    file.copy_tokenizer(&parts);
    let vocabulary =
        parts.tensors().iter().find(|tensor| tensor.name == "token_embd.weight").expect("it has one").shape[1];
    let (width, inner, experts) = (u64::from(WIDTH), u64::from(INNER), u64::from(EXPERTS));
    let mut seed = 0;
    let mut add = |name: &str, shape: &[u64]| {
        seed += 1;
        file.floats(name, shape, noise(seed, 0.2));
    };
    add("token_embd.weight", &[width, vocabulary]);
    add("token_types.weight", &[width, 1]);
    let mut normal = vec!["token_embd_norm".to_owned()];
    for layer in 0..LAYERS {
        let mut add = |name: &str, shape: &[u64]| add(&format!("blk.{layer}.{name}.weight"), shape);
        add("attn_qkv", &[width, 3 * width]);
        add("attn_output", &[width, width]);
        if layer % 2 == 1 {
            add("ffn_gate_inp", &[width, experts]);
            add("ffn_up_exps", &[width, inner, experts]);
            add("ffn_down_exps", &[inner, width, experts]);
        } else {
            add("ffn_up", &[width, inner]);
            add("ffn_down", &[inner, width]);
        }
        normal.extend([format!("blk.{layer}.attn_output_norm"), format!("blk.{layer}.layer_output_norm")]);
    }
    for name in normal {
        file.floats(&format!("{name}.weight"), &[width], std::iter::repeat(1.0));
        file.floats(&format!("{name}.bias"), &[width], std::iter::repeat(0.0));
    }
    file.write(path);
}

#[test]
fn an_encoder_with_experts_equals_stock() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("encoder.gguf");
    encoder(&path);
    let (answer, _) = equal(&path, &["-c", "512", "--embeddings"], embeddings);
    assert_eq!(width(&answer), Some(64), "{answer}");
}
