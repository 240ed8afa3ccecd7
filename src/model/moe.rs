//! The shape of a mixture-of-experts model: which layers have experts, how many and how large, and what the rest weighs.
//!
//! Owns: [`MoeShape`], made of headers.
//! Invariants: sums never wrap; a header that makes no sense is an error, not a shape.
//! Threads: none. Does not: choose anything.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::gguf::{GgufError, Header, TensorInfo, open_all};

/// The experts of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertLayer {
    /// The number of the layer.
    pub layer: u32,
    /// Experts that the router chooses from.
    pub experts: u64,
    /// Bytes of all of them, biases included.
    pub bytes: u64,
    /// Type and shape of one expert's matrices, in the order of their names: layers where this is equal can share memory.
    pub kind: Vec<(u32, u64, u64)>,
}

impl ExpertLayer {
    /// Bytes of one expert.
    pub fn expert_bytes(&self) -> u64 {
        self.bytes.div_ceil(self.experts.max(1))
    }
}

/// A model's experts and the rest of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoeShape {
    /// The architecture, as the file names it.
    pub architecture: String,
    /// Layers of the model; the first `layers` numbers.
    pub layers: u32,
    /// Experts that a token uses in a layer, the most of all layers; 0 if the file does not say.
    pub used: u64,
    /// Layers with experts, by number.
    pub expert_layers: Vec<ExpertLayer>,
    /// Bytes of all weights that are no experts and lie on the device when all layers do.
    pub dense_bytes: u64,
    /// Bytes of the tables of token embeddings, which llama.cpp reads in RAM.
    pub input_bytes: u64,
}

impl MoeShape {
    /// The shape of a model file, or of all files of a split model.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        Self::of(&open_all(path)?)
    }

    /// The shape that these headers describe.
    pub fn of(headers: &[Header]) -> Result<Self, GgufError> {
        let [first, ..] = headers else { return Err(GgufError::Wrong("no header".to_owned())) };
        let architecture = first.text("general.architecture").unwrap_or_default().to_owned();
        let number = |name: &str| first.number(&format!("{architecture}.{name}"));
        let mut layers: BTreeMap<u32, ExpertLayer> = BTreeMap::new();
        let mut names = BTreeSet::new();
        let (mut dense_bytes, mut input_bytes, mut table_bytes, mut has_output) = (0_u64, 0_u64, 0_u64, false);
        let mut sum = 0_u64;
        for tensor in headers.iter().flat_map(|header| &header.tensors) {
            if !names.insert(&tensor.name) {
                return Err(GgufError::Wrong("a tensor stands in two files".to_owned()));
            }
            sum = sum
                .checked_add(tensor.bytes)
                .filter(|sum| i64::try_from(*sum).is_ok())
                .ok_or_else(|| GgufError::Wrong("more bytes of weights than a file can have".to_owned()))?;
            if let Some(layer) = expert_layer(&tensor.name) {
                add(&mut layers, layer, tensor);
            } else if tensor.name.contains("token_embd.") {
                input_bytes += tensor.bytes;
                if tensor.name == "token_embd.weight" {
                    table_bytes = tensor.bytes;
                }
            } else {
                has_output |= tensor.name == "output.weight";
                dense_bytes += tensor.bytes;
            }
        }
        if !has_output {
            // Without an output matrix the host takes the table of token embeddings, which then lies on the device as well.
            dense_bytes = dense_bytes.saturating_add(table_bytes);
        }
        let last = layers.keys().next_back().map_or(0, |last| last.saturating_add(1));
        let block_count = number("block_count").and_then(|count| u32::try_from(count).ok()).unwrap_or(0);
        Ok(Self {
            layers: block_count.max(last),
            used: number("expert_used_count").unwrap_or(0),
            architecture,
            expert_layers: layers.into_values().collect(),
            dense_bytes,
            input_bytes,
        })
    }

    /// Bytes of all experts.
    pub fn expert_bytes(&self) -> u64 {
        self.expert_layers.iter().map(|layer| layer.bytes).sum()
    }

    /// Experts of all layers.
    pub fn experts(&self) -> u64 {
        self.expert_layers.iter().fold(0, |sum, layer| sum.saturating_add(layer.experts))
    }
}

fn add(layers: &mut BTreeMap<u32, ExpertLayer>, layer: u32, tensor: &TensorInfo) {
    let entry = layers.entry(layer).or_insert_with(|| ExpertLayer { layer, experts: 0, bytes: 0, kind: Vec::new() });
    entry.bytes += tensor.bytes;
    // A bias has one row per expert; a matrix has the experts as its third dimension.
    if let [inner, outer, experts] = tensor.shape[..] {
        entry.experts = entry.experts.max(experts);
        entry.kind.push((tensor.kind.number, inner, outer));
        entry.kind.sort_unstable();
    }
}

/// The layer whose experts a tensor belongs to, by the rule of the host's flags for experts: `blk.N.ffn_X_exps` or `_chexps`, where X is
/// up, down, gate or gate_up.
pub fn expert_layer(name: &str) -> Option<u32> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once(".ffn_")?;
    let rest = ["gate_up_", "gate_", "up_", "down_"].iter().find_map(|word| rest.strip_prefix(word))?;
    if !(rest.starts_with("exps") || rest.starts_with("chexps")) || layer.starts_with('+') {
        return None;
    }
    layer.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::super::types::Type;
    use super::*;

    fn tensor(name: &str, kind: u32, shape: &[u64]) -> TensorInfo {
        let kind = Type::of(kind).unwrap();
        let bytes = kind.tensor_bytes(shape).unwrap();
        TensorInfo { name: name.to_owned(), shape: shape.to_vec(), kind, bytes, offset: 0 }
    }

    #[test]
    fn names_of_experts() {
        assert_eq!(expert_layer("blk.7.ffn_gate_exps.weight"), Some(7));
        assert_eq!(expert_layer("blk.0.ffn_gate_up_exps.weight"), Some(0));
        assert_eq!(expert_layer("blk.12.ffn_down_chexps.bias"), Some(12));
        for other in
            ["blk.7.ffn_gate_shexp.weight", "blk.7.ffn_gate_inp.weight", "blk.+1.ffn_up_exps", "blk.x.ffn_up_exps", ""]
        {
            assert_eq!(expert_layer(other), None, "{other}");
        }
    }

    #[test]
    fn a_shape_is_summed_over_files() {
        use crate::model::gguf::Value;
        let keys = vec![
            ("general.architecture".to_owned(), Value::Text(Some("a".to_owned()))),
            ("a.block_count".to_owned(), Value::Integer(3)),
            ("a.expert_used_count".to_owned(), Value::List { count: 2, numbers: vec![2, 4] }),
        ];
        let first = Header {
            keys,
            tensors: vec![
                tensor("token_embd.weight", 0, &[8, 10]),
                tensor("blk.1.ffn_up_exps.weight", 0, &[8, 4, 16]),
                tensor("blk.1.ffn_up_exps.bias", 0, &[4, 16]),
            ],
            data_start: 0,
            missing: 0,
        };
        let second = Header {
            keys: Vec::new(),
            tensors: vec![
                tensor("blk.1.ffn_down_exps.weight", 1, &[4, 8, 16]),
                tensor("blk.2.ffn_up_exps.weight", 0, &[8, 4, 6]),
                tensor("blk.0.attn_q.weight", 0, &[8, 8]),
            ],
            data_start: 0,
            missing: 0,
        };
        let shape = MoeShape::of(&[first.clone(), second.clone()]).unwrap();
        assert_eq!((shape.layers, shape.used, shape.experts()), (3, 4, 22));
        assert_eq!(shape.expert_layers[0].bytes, 4 * 512 + 4 * 64 + 2 * 512);
        assert_eq!(shape.expert_layers[0].kind, [(0, 8, 4), (1, 4, 8)]);
        assert_eq!(shape.expert_bytes(), shape.expert_layers[0].bytes + 4 * 192);
        assert_eq!(shape.input_bytes, 320);
        assert_eq!(shape.dense_bytes, 256 + 320, "the table serves as output, too");
        let error = MoeShape::of(&[second.clone(), second]).unwrap_err();
        assert!(error.to_string().contains("two files"));
        assert!(MoeShape::of(&[]).is_err());
    }
}
