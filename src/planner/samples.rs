//! Models for the tests, in the shapes that `tests/gpu/synth_moe.py` writes, as headers only.

use std::sync::OnceLock;

use super::model::Model;
use crate::model::gguf::{Header, TensorInfo, Value};
use crate::model::types::Type;

const F32: u32 = 0;
const Q8_0: u32 = 8;
const Q4_K: u32 = 12;
const MXFP4: u32 = 39;

struct Maker {
    header: Header,
    architecture: &'static str,
}

impl Maker {
    fn new(architecture: &'static str, numbers: &[(&str, u64)]) -> Self {
        let mut keys = vec![("general.architecture".to_owned(), Value::Text(Some(architecture.to_owned())))];
        keys.extend(
            numbers
                .iter()
                .map(|(name, number)| (format!("{architecture}.{name}"), Value::Integer(i128::from(*number)))),
        );
        Self { header: Header { keys, tensors: Vec::new(), data_start: 0, missing: 0 }, architecture }
    }

    fn add(&mut self, name: &str, kind: u32, shape: &[u64]) {
        let kind = Type::of(kind).unwrap();
        let bytes = kind.tensor_bytes(shape).unwrap();
        self.header.tensors.push(TensorInfo { name: name.to_owned(), shape: shape.to_vec(), kind, bytes, offset: 0 });
    }

    fn layer(&mut self, layer: u64, name: &str, kind: u32, shape: &[u64]) {
        self.add(&format!("blk.{layer}.{name}.weight"), kind, shape);
    }

    fn experts(&mut self, layer: u64, kind: u32, (width, rows, experts): (u64, u64, u64)) {
        self.layer(layer, "ffn_gate_inp", F32, &[width, experts]);
        self.layer(layer, "ffn_gate_exps", kind, &[width, rows, experts]);
        self.layer(layer, "ffn_up_exps", kind, &[width, rows, experts]);
        self.layer(layer, "ffn_down_exps", kind, &[rows, width, experts]);
    }

    fn tables(&mut self, width: u64, vocabulary: u64) {
        self.add("token_embd.weight", Q8_0, &[width, vocabulary]);
        self.add("output_norm.weight", F32, &[width]);
        self.add("output.weight", Q8_0, &[width, vocabulary]);
    }

    fn model(self) -> Model {
        let model = Model::of(&[self.header]).unwrap();
        assert_eq!(model.shape.architecture, self.architecture);
        model
    }
}

/// A model with grouped heads: layers, width, rows of an expert, experts, used, heads, kept heads, values of a head, vocabulary.
pub struct Grouped {
    pub layers: u64,
    pub width: u64,
    pub rows: u64,
    pub experts: u64,
    pub used: u64,
    pub heads: (u64, u64, u64),
    pub vocabulary: u64,
    pub context: u64,
}

/// A model in the manner of qwen3moe.
pub fn grouped(of: &Grouped) -> Model {
    let (heads, kept, size) = of.heads;
    let mut maker = Maker::new(
        "qwen3moe",
        &[
            ("block_count", of.layers),
            ("context_length", of.context),
            ("embedding_length", of.width),
            ("attention.head_count", heads),
            ("attention.head_count_kv", kept),
            ("attention.key_length", size),
            ("attention.value_length", size),
            ("expert_count", of.experts),
            ("expert_used_count", of.used),
        ],
    );
    maker.tables(of.width, of.vocabulary);
    for layer in 0..of.layers {
        maker.layer(layer, "attn_q", Q8_0, &[of.width, heads * size]);
        maker.layer(layer, "attn_k", Q8_0, &[of.width, kept * size]);
        maker.layer(layer, "attn_v", Q8_0, &[of.width, kept * size]);
        maker.layer(layer, "attn_output", Q8_0, &[heads * size, of.width]);
        maker.experts(layer, Q4_K, (of.width, of.rows, of.experts));
    }
    maker.model()
}

/// The generated model of the measurements: the shape of a 30B-A3B model.
pub fn qwen() -> Model {
    static MODEL: OnceLock<Model> = OnceLock::new();
    MODEL.get_or_init(|| grouped(&QWEN)).clone()
}

/// Its shape.
pub const QWEN: Grouped = Grouped {
    layers: 48,
    width: 2048,
    rows: 768,
    experts: 128,
    used: 8,
    heads: (32, 4, 128),
    vocabulary: 32768,
    context: 131_072,
};

/// Eight layers like gpt-oss.
pub fn gpt_oss() -> Model {
    let mut maker = Maker::new(
        "gpt-oss",
        &[
            ("block_count", 8),
            ("context_length", 131_072),
            ("embedding_length", 2880),
            ("attention.head_count", 64),
            ("attention.head_count_kv", 8),
            ("attention.key_length", 64),
            ("attention.value_length", 64),
            ("attention.sliding_window", 128),
            ("expert_count", 128),
            ("expert_used_count", 4),
        ],
    );
    maker.tables(2880, 32768);
    for layer in 0..8 {
        maker.layer(layer, "attn_q", Q8_0, &[2880, 4096]);
        maker.layer(layer, "attn_k", Q8_0, &[2880, 512]);
        maker.layer(layer, "attn_v", Q8_0, &[2880, 512]);
        maker.layer(layer, "attn_output", Q8_0, &[4096, 2880]);
        maker.experts(layer, MXFP4, (2880, 2880, 128));
    }
    maker.model()
}

/// Nine layers like DeepSeek, the first without experts.
pub fn deepseek() -> Model {
    let mut maker = Maker::new(
        "deepseek2",
        &[
            ("block_count", 9),
            ("context_length", 131_072),
            ("embedding_length", 4096),
            ("attention.head_count", 32),
            ("attention.head_count_kv", 1),
            ("attention.key_length", 576),
            ("attention.value_length", 512),
            ("attention.key_length_mla", 192),
            ("attention.value_length_mla", 128),
            ("expert_count", 256),
            ("expert_used_count", 8),
        ],
    );
    maker.tables(4096, 32768);
    for layer in 0..9 {
        maker.layer(layer, "attn_q_a", Q8_0, &[4096, 1536]);
        maker.layer(layer, "attn_q_b", Q8_0, &[1536, 32 * 192]);
        maker.layer(layer, "attn_kv_a_mqa", Q8_0, &[4096, 576]);
        maker.layer(layer, "attn_k_b", Q8_0, &[128, 512, 32]);
        maker.layer(layer, "attn_v_b", Q8_0, &[512, 128, 32]);
        maker.layer(layer, "attn_output", Q8_0, &[4096, 4096]);
        if layer == 0 {
            maker.layer(layer, "ffn_gate", Q8_0, &[4096, 8192]);
            maker.layer(layer, "ffn_up", Q8_0, &[4096, 8192]);
            maker.layer(layer, "ffn_down", Q8_0, &[8192, 4096]);
        } else {
            maker.experts(layer, Q4_K, (4096, 1024, 256));
            maker.layer(layer, "ffn_gate_shexp", Q8_0, &[4096, 1024]);
            maker.layer(layer, "ffn_up_shexp", Q8_0, &[4096, 1024]);
            maker.layer(layer, "ffn_down_shexp", Q8_0, &[1024, 4096]);
        }
    }
    maker.model()
}

/// A dense model.
pub fn dense() -> Model {
    let mut maker = Maker::new(
        "qwen3",
        &[
            ("block_count", 32),
            ("context_length", 40_960),
            ("embedding_length", 4096),
            ("attention.head_count", 32),
            ("attention.head_count_kv", 8),
        ],
    );
    maker.tables(4096, 32768);
    for layer in 0..32 {
        maker.layer(layer, "attn_q", Q8_0, &[4096, 4096]);
        maker.layer(layer, "attn_k", Q8_0, &[4096, 1024]);
        maker.layer(layer, "attn_v", Q8_0, &[4096, 1024]);
        maker.layer(layer, "attn_output", Q8_0, &[4096, 4096]);
        maker.layer(layer, "ffn_gate", Q8_0, &[4096, 12288]);
        maker.layer(layer, "ffn_up", Q8_0, &[4096, 12288]);
        maker.layer(layer, "ffn_down", Q8_0, &[12288, 4096]);
    }
    maker.model()
}
