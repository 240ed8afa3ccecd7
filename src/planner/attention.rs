//! What a layer remembers of the tokens before: keys and values, keys of an indexer, or a state of fixed size.
//!
//! Owns: the reading of it from the shapes of a layer's tensors, and the table of architectures whose layers see a window only.
//! Sizes come from the tensors wherever these tell them, because the keys of a header differ from architecture to architecture while the
//! rows of a projection are what the cache holds. `tests/planner.rs` compares the sums with llama.cpp's own for every architecture.
//! Threads: none. Does not: know the length of a context (`memory` does).

use std::collections::BTreeMap;

use crate::model::gguf::{Header, TensorInfo, Value};

/// What one layer remembers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Values of a key, per token.
    pub key: u64,
    /// Values of a value, per token.
    pub value: u64,
    /// Values of an indexer's key, per token, in the type of keys.
    pub index: u64,
    /// Values kept of every so many tokens together, in the type of keys: compressed attention.
    pub compressed: Vec<(u64, u64)>,
    /// Tokens that it sees, if not all.
    pub window: Option<u64>,
    /// Bytes of state per sequence, whatever the number of tokens.
    pub state_bytes: u64,
    /// Whether every slot has a cache of its own, whatever is asked for.
    pub apart: bool,
}

/// Which layers of an architecture see a window only.
struct Windows {
    architecture: &'static str,
    /// The window where no key says otherwise; 0: then there is none.
    default: u64,
    /// The window whatever the key says, if it says any.
    fixed: Option<u64>,
    /// Every so many layers one sees everything; 0: none does. `None`: only a list in the file tells.
    period: Option<u64>,
    /// Whether that is the first of each period, not the last.
    first: bool,
}

const fn every(architecture: &'static str, period: u64, first: bool) -> Windows {
    Windows { architecture, default: 0, fixed: None, period: Some(period), first }
}

const fn listed(architecture: &'static str) -> Windows {
    Windows { architecture, default: 0, fixed: None, period: None, first: false }
}

/// Architectures with such layers, as of llama.cpp b11434. Others keep everything, whatever their header says of windows.
static WINDOWS: [Windows; 20] = [
    every("afmoe", 4, false),
    every("cohere2moe", 4, true),
    every("deepseek4", 0, false),
    Windows { default: 128, ..every("exaone-moe", 4, false) },
    every("laguna", 4, true),
    every("lfm2moe", 0, false),
    Windows { default: 8192, fixed: Some(8192), ..every("llama4", 4, false) },
    every("mellum", 4, false),
    every("muse-glimmer", 4, false),
    every("gpt-oss", 2, false),
    Windows { fixed: Some(4096), ..every("smallthinker", 4, true) },
    listed("dots3note"),
    listed("gemma4"),
    listed("granite-swa"),
    listed("granite_swa"),
    listed("maple"),
    listed("mimo2"),
    listed("spark2-5"),
    listed("spark2_5"),
    listed("step35"),
];

/// The windows of all layers.
fn windows(header: &Header, architecture: &str, layers: u64) -> Vec<Option<u64>> {
    let none = vec![None; usize::try_from(layers).unwrap_or(0)];
    let Some(rule) = WINDOWS.iter().find(|rule| rule.architecture == architecture) else { return none };
    let key = header.number(&format!("{architecture}.attention.sliding_window"));
    let window = match key.unwrap_or(rule.default) {
        0 => return none,
        told => rule.fixed.unwrap_or(told),
    };
    let pattern = header.value(&format!("{architecture}.attention.sliding_window_pattern"));
    let narrow = |layer: u64| match pattern {
        Some(Value::List { numbers, .. }) => {
            usize::try_from(layer).ok().and_then(|layer| numbers.get(layer)).is_some_and(|narrow| *narrow != 0)
        }
        other => {
            let told = match other {
                Some(Value::Integer(number)) => u64::try_from(*number).ok(),
                _ => None,
            };
            match told.or(rule.period) {
                None => false,
                Some(0) => true,
                Some(period) if rule.first => !layer.is_multiple_of(period),
                Some(period) => layer % period < period - 1,
            }
        }
    };
    (0..layers).map(|layer| narrow(layer).then_some(window)).collect()
}

/// What is asked of a header.
struct Keys<'a> {
    header: &'a Header,
    architecture: &'a str,
}

impl Keys<'_> {
    fn number(&self, name: &str) -> u64 {
        self.header.number(&format!("{}.{name}", self.architecture)).unwrap_or(0)
    }

    /// The value of a layer: of a list its entry, of a number the number.
    fn of_layer(&self, name: &str, layer: u64) -> Option<u64> {
        match self.header.value(&format!("{}.{name}", self.architecture))? {
            Value::Integer(number) => u64::try_from(*number).ok(),
            Value::List { numbers, .. } => {
                let number = numbers.get(usize::try_from(layer).ok()?)?;
                u64::try_from(*number).ok()
            }
            _ => None,
        }
    }

    /// Bytes of the state of a layer that keeps one; llama.cpp holds it in F32.
    fn state_bytes(&self, layer: u64) -> u64 {
        let heads = self.of_layer("attention.head_count", layer).unwrap_or(0).max(self.number("attention.head_count"));
        let inner = self.number("ssm.inner_size");
        let before = self.number("ssm.conv_kernel").saturating_sub(1);
        let (row, state) = if self.number("shortconv.l_cache") > 0 {
            (self.number("embedding_length").saturating_mul(self.number("shortconv.l_cache") - 1), 0)
        } else if self.number("kda.head_dim") > 0 {
            let width = self.number("kda.head_dim");
            let rows = if before == 0 { 3 } else { before };
            (product(&[3, rows, heads, width]), product(&[width, width, heads]))
        } else if self.architecture == "minimax-01" {
            let width = self.number("attention.key_length");
            (0, product(&[width, width, heads]))
        } else {
            let groups = self.number("ssm.group_count");
            let state = self.number("ssm.state_size");
            (before.saturating_mul(inner.saturating_add(product(&[2, groups, state]))), product(&[state, inner]))
        };
        row.saturating_add(state).saturating_mul(4)
    }
}

fn product(factors: &[u64]) -> u64 {
    factors.iter().fold(1, |product, factor| product.saturating_mul(*factor))
}

/// The rows of a matrix: values that it gives per token.
fn rows(tensors: &BTreeMap<&str, &TensorInfo>, names: &[&str]) -> Option<u64> {
    names.iter().find_map(|name| tensors.get(name).and_then(|tensor| tensor.shape.get(1)).copied())
}

/// What each layer remembers. `tensors` are those of each layer, by the name behind `blk.N.`.
pub fn memories(header: &Header, architecture: &str, tensors: &[BTreeMap<&str, &TensorInfo>]) -> Vec<Memory> {
    let keys = Keys { header, architecture };
    let count = tensors.len() as u64;
    let trunk = count.saturating_sub(keys.number("nextn_predict_layers"));
    let shared = keys.number("attention.shared_kv_layers");
    let windows = windows(header, architecture, count);
    // Diffusion models and encoders see the whole text at once and remember nothing.
    let remembers = !["llada", "llada-moe", "rnd1", "dream", "nomic-bert-moe"].contains(&architecture);
    let mut out = Vec::new();
    for ((layer, own), window) in (0_u64..).zip(tensors).zip(windows) {
        let mut memory = Memory { window, ..Memory::default() };
        if remembers && layer < trunk && (shared == 0 || layer < count.saturating_sub(shared)) {
            of_layer(&keys, layer, own, &mut memory);
        }
        out.push(memory);
    }
    out
}

fn of_layer(keys: &Keys<'_>, layer: u64, own: &BTreeMap<&str, &TensorInfo>, memory: &mut Memory) {
    let recurrent = own.keys().any(|name| name.starts_with("ssm_") || name.starts_with("shortconv."));
    let no_heads = keys.of_layer("attention.head_count_kv", layer) == Some(0);
    let interval = keys.number("full_attention_interval");
    let listed = keys.of_layer("attention.recurrent_layers", layer).is_some_and(|told| told > 0);
    // Linear attention without a tensor that tells it.
    let linear = keys.architecture == "minimax-01" && (listed || interval > 0 && !(layer + 1).is_multiple_of(interval));
    if recurrent || linear {
        memory.state_bytes = keys.state_bytes(layer);
    }
    if linear || recurrent && no_heads {
        return;
    }
    let latent = rows(own, &["attn_kv_a_mqa.weight", "attn_kv.weight"]);
    if let Some(latent) = latent {
        if keys.number("attention.key_length_mla") > 0 || keys.architecture == "deepseek4" {
            memory.key = latent;
        } else {
            // A file from before compressed caches: keys and values of all heads are kept.
            let heads = keys.of_layer("attention.head_count_kv", layer).unwrap_or(0);
            memory.key = heads.saturating_mul(keys.number("attention.key_length"));
            memory.value = heads.saturating_mul(keys.number("attention.value_length"));
        }
    } else if let Some(key) = rows(own, &["attn_k.weight"]) {
        memory.key = key;
        // Where there is no matrix for values, the keys serve as values too.
        memory.value = rows(own, &["attn_v.weight"]).unwrap_or(key);
    } else if let Some(all) = rows(own, &["attn_qkv.weight"]).filter(|_| !recurrent) {
        let heads = keys.of_layer("attention.head_count", layer).unwrap_or(0);
        let kept = keys.of_layer("attention.head_count_kv", layer).unwrap_or(heads);
        let sum = heads.saturating_add(kept.saturating_mul(2)).max(1);
        memory.key = (all / sum).saturating_mul(kept);
        memory.value = memory.key;
    }
    // Only a layer with an indexer of its own keeps its keys.
    let has_indexer = memory.key > 0 && own.keys().any(|name| name.starts_with("indexer"));
    let index = if has_indexer { keys.number("attention.indexer.key_length") } else { 0 };
    if keys.architecture == "deepseek4" {
        memory.apart = true;
        // Beside the window: what is kept of every few tokens together, and the indexer's keys at the same rate.
        if let Some(ratio) = keys.of_layer("attention.compress_ratios", layer).filter(|ratio| *ratio > 0) {
            memory.compressed = vec![(ratio, memory.key), (ratio, index)];
        }
        return;
    }
    // An indexer that pools keeps rows of several kinds side by side.
    if keys.architecture == "minimax-m3" {
        // Its cache of an indexer has values, too.
        memory.index = if has_indexer { index.saturating_add(keys.number("attention.value_length")) } else { 0 };
        return;
    }
    let kinds = match keys.architecture {
        "qwen4exp" => 2,
        "glm5-next" => 3,
        _ => 1,
    };
    let pools = keys.number("attention.indexer.kpool") > 0;
    memory.index = index.saturating_mul(if pools { kinds } else { 1 });
}
