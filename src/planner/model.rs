//! What a model needs, by the headers of its files.
//!
//! Owns: [`Model`]: per layer the bytes of dense weights and of experts, what the layer remembers, and the sizes that computing depends on.
//! Invariants: sums never wrap; a header that makes no sense is an error, not a model.
//! Threads: none. Does not: choose anything.

use std::collections::BTreeMap;
use std::path::Path;

use super::attention::{self, Memory};
use crate::model::gguf::{GgufError, Header, TensorInfo, Value, open_all};
use crate::model::moe::{MoeShape, expert_layer};

/// The most layers of a model.
const MOST_LAYERS: u32 = 4096;

/// One layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layer {
    /// Bytes of weights that are no experts.
    pub dense_bytes: u64,
    /// Values of them.
    pub dense_values: u64,
    /// Bytes of all experts.
    pub expert_bytes: u64,
    /// Values of all experts.
    pub expert_values: u64,
    /// Experts that the router chooses from; 0: a layer without any.
    pub experts: u64,
    /// Experts that a token uses.
    pub used: u64,
    /// Rows of an expert's first matrix.
    pub expert_width: u64,
    /// Types of the experts' matrices, with bytes of each type.
    pub types: Vec<(u32, u64)>,
    /// What it remembers of the tokens before.
    pub memory: Memory,
}

impl Layer {
    /// Bytes of experts that a token reads.
    pub fn used_bytes(&self) -> f64 {
        self.expert_bytes as f64 * self.used as f64 / self.experts.max(1) as f64
    }
}

/// A model.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// The experts, as the rest of the project knows them.
    pub shape: MoeShape,
    /// Layers by number.
    pub layers: Vec<Layer>,
    /// Bytes of weights in no layer that lie on a device: the output matrix and norms.
    pub output_bytes: u64,
    /// Bytes of tables that llama.cpp reads in RAM.
    pub input_bytes: u64,
    /// Width of the model.
    pub width: u64,
    /// Tokens of the vocabulary.
    pub vocabulary: u64,
    /// Heads of attention, the most of all layers.
    pub heads: u64,
    /// Values of a head's key and of its value together.
    pub head_values: u64,
    /// The context that it was trained for.
    pub train_context: u64,
    /// Bytes that its files lack: they are cut, or still being fetched.
    pub missing: u64,
}

impl Model {
    /// The model of a file, or of all files of a split model.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        Self::of(&open_all(path)?)
    }

    /// The model that these headers describe.
    pub fn of(headers: &[Header]) -> Result<Self, GgufError> {
        let shape = MoeShape::of(headers)?;
        let [first, ..] = headers else { return Err(GgufError::Wrong("no header".to_owned())) };
        let architecture = shape.architecture.clone();
        let number = |name: &str| first.number(&format!("{architecture}.{name}")).unwrap_or(0);
        let tensors = || headers.iter().flat_map(|header| &header.tensors);
        let named =
            tensors().filter_map(|tensor| layer_of(&tensor.name)).map(|(layer, _)| layer + 1).max().unwrap_or(0);
        let count = shape.layers.max(named);
        if count > MOST_LAYERS {
            return Err(GgufError::Wrong(format!("{count} layers are too many")));
        }
        let mut layers = vec![Layer::default(); count as usize];
        let mut own: Vec<BTreeMap<&str, &TensorInfo>> = vec![BTreeMap::new(); count as usize];
        let (mut output_bytes, mut table, mut vocabulary, mut has_output) = (0_u64, 0, 0, false);
        for tensor in tensors() {
            if let Some((layer, rest)) = layer_of(&tensor.name) {
                own[layer as usize].insert(rest, tensor);
                add(&mut layers[layer as usize], tensor);
            } else if tensor.name.contains("token_embd.") {
                if tensor.name == "token_embd.weight" {
                    table = tensor.bytes;
                    vocabulary = tensor.shape.get(1).copied().unwrap_or(0);
                }
            } else {
                has_output |= tensor.name == "output.weight";
                output_bytes = output_bytes.saturating_add(tensor.bytes);
            }
        }
        if !has_output {
            output_bytes = output_bytes.saturating_add(table);
        }
        let used = first.value(&format!("{architecture}.expert_used_count"));
        for (layer, at) in layers.iter_mut().zip(0_usize..) {
            let told = match used {
                Some(Value::List { numbers, .. }) => numbers.get(at).and_then(|number| u64::try_from(*number).ok()),
                _ => None,
            };
            layer.used = told.unwrap_or(shape.used).min(layer.experts);
        }
        for (layer, memory) in layers.iter_mut().zip(attention::memories(first, &architecture, &own)) {
            layer.memory = memory;
        }
        let heads = number("attention.head_count").max(1);
        let of_head = |name: &str| match number(name) {
            0 => number("embedding_length") / heads,
            told => told,
        };
        Ok(Self {
            layers,
            output_bytes,
            input_bytes: shape.input_bytes,
            width: number("embedding_length"),
            vocabulary,
            heads,
            head_values: of_head("attention.key_length").saturating_add(of_head("attention.value_length")),
            train_context: number("context_length").max(1),
            missing: headers.iter().map(|header| header.missing).fold(0, u64::saturating_add),
            shape,
        })
    }

    /// Bytes of weights that are no experts and lie on devices.
    pub fn dense_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.dense_bytes).fold(self.output_bytes, u64::saturating_add)
    }

    /// Bytes of all experts.
    pub fn expert_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.expert_bytes).fold(0, u64::saturating_add)
    }

    /// Bytes of everything.
    pub fn bytes(&self) -> u64 {
        self.dense_bytes().saturating_add(self.expert_bytes()).saturating_add(self.input_bytes)
    }

    /// Bytes of the experts that a token reads.
    pub fn used_bytes(&self) -> f64 {
        self.layers.iter().map(Layer::used_bytes).sum()
    }

    /// Whether it has experts.
    pub fn has_experts(&self) -> bool {
        self.layers.iter().any(|layer| layer.expert_bytes > 0)
    }
}

/// The layer of a tensor and the rest of its name.
fn layer_of(name: &str) -> Option<(u32, &str)> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let layer = layer.bytes().all(|byte| byte.is_ascii_digit()).then(|| layer.parse().ok())??;
    (layer < MOST_LAYERS).then_some((layer, rest))
}

fn add(layer: &mut Layer, tensor: &TensorInfo) {
    let values = tensor.shape.iter().fold(1_u64, |product, extent| product.saturating_mul(*extent));
    if expert_layer(&tensor.name).is_none() {
        layer.dense_bytes = layer.dense_bytes.saturating_add(tensor.bytes);
        layer.dense_values = layer.dense_values.saturating_add(values);
        return;
    }
    layer.expert_bytes = layer.expert_bytes.saturating_add(tensor.bytes);
    layer.expert_values = layer.expert_values.saturating_add(values);
    if let [_, outer, experts] = tensor.shape[..] {
        layer.experts = layer.experts.max(experts);
        if !tensor.name.contains("_down_") {
            layer.expert_width = layer.expert_width.max(outer);
        }
        match layer.types.iter_mut().find(|(kind, _)| *kind == tensor.kind.number) {
            Some((_, bytes)) => *bytes = bytes.saturating_add(tensor.bytes),
            None => layer.types.push((tensor.kind.number, tensor.bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;

    #[test]
    fn the_bundled_model() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-docs-moe.Q4_K_M.gguf");
        let model = Model::open(&path).unwrap();
        assert_eq!(model.layers.len(), model.shape.layers as usize);
        assert_eq!(model.expert_bytes(), model.shape.expert_bytes());
        assert_eq!(model.dense_bytes(), model.shape.dense_bytes);
        assert!(model.layers.iter().all(|layer| layer.memory.key == layer.memory.value && layer.memory.key > 0));
        assert!(model.layers.iter().all(|layer| layer.used > 0 && layer.used < layer.experts));
    }

    #[test]
    fn a_30b_a3b_model() {
        let model = samples::qwen();
        assert_eq!((model.layers.len(), model.layers[0].experts, model.layers[0].used), (48, 128, 8));
        assert_eq!(model.expert_bytes(), 48 * 324 * (1 << 20));
        assert_eq!((model.layers[3].memory.key, model.layers[3].memory.value), (512, 512));
        assert!((model.used_bytes() - 1.019e9).abs() < 1e6, "{}", model.used_bytes());
        assert_eq!((model.layers[0].expert_width, model.width, model.vocabulary), (768, 2048, 32768));
    }

    #[test]
    fn names_of_layers() {
        assert_eq!(layer_of("blk.7.attn_k.weight"), Some((7, "attn_k.weight")));
        for other in ["blk.+7.x", "blk..x", "blk.7", "output.weight", "blk.99999999999.x", "blk.4096.x"] {
            assert_eq!(layer_of(other), None, "{other}");
        }
    }
}
