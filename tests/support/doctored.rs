//! Models that are wrong on purpose: a sound GGUF file taken apart, one thing in it changed, and written again.
//!
//! The parts are kept as bytes, so that also what no program would write can be written. The sound model is the fixture, cut down to
//! its first layer.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use super::gguf::Header;

/// The number of blocks that a row of values is made of, and their bytes, by ggml's type number: only those of the fixture.
const LAYOUTS: [(u32, u64, u64); 4] = [(0, 1, 4), (6, 32, 22), (12, 256, 144), (14, 256, 210)];

/// A metadata entry: name, type and bytes as they stand in a file.
#[derive(Clone)]
struct Key {
    name: Vec<u8>,
    kind: u32,
    value: Arc<[u8]>,
}

/// A tensor's description, as it stands in a file.
#[derive(Clone)]
struct Tensor {
    name: Vec<u8>,
    shape: Vec<u64>,
    kind: u32,
    offset: u64,
}

/// A GGUF file in parts.
#[derive(Clone)]
pub struct Model {
    /// What was changed.
    pub label: String,
    version: u32,
    keys: Vec<Key>,
    tensors: Vec<Tensor>,
    data: Arc<[u8]>,
    /// So many zero bytes stand behind the data.
    spare: usize,
    /// Only so many bytes are written.
    length: Option<usize>,
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().expect("four bytes"))
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().expect("eight bytes"))
    }

    fn text(&mut self) -> &'a [u8] {
        let length = usize::try_from(self.u64()).expect("a text fits memory");
        self.take(length)
    }

    fn skip_value(&mut self, kind: u32) {
        match kind {
            0 | 1 | 7 => drop(self.take(1)),
            2 | 3 => drop(self.take(2)),
            4..=6 => drop(self.take(4)),
            8 => drop(self.text()),
            9 => {
                let (kind, count) = (self.u32(), self.u64());
                (0..count).for_each(|_| self.skip_value(kind));
            }
            _ => drop(self.take(8)),
        }
    }
}

impl Model {
    /// Takes a sound model apart and keeps its first layer.
    pub fn one_layer_of(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let start = usize::try_from(Header::read(path).data_start).expect("a header fits memory");
        let mut reader = Reader(&bytes[4..]);
        let version = reader.u32();
        let (tensor_count, key_count) = (reader.u64(), reader.u64());
        let mut keys = Vec::new();
        for _ in 0..key_count {
            let (name, kind) = (reader.text().to_vec(), reader.u32());
            let before = reader.0;
            reader.skip_value(kind);
            keys.push(Key { name, kind, value: before[..before.len() - reader.0.len()].into() });
        }
        let (mut tensors, mut data) = (Vec::new(), Vec::new());
        for _ in 0..tensor_count {
            let name = reader.text().to_vec();
            let shape: Vec<u64> = (0..reader.u32()).map(|_| reader.u64()).collect();
            let (kind, offset) = (reader.u32(), reader.u64());
            let mut tensor = Tensor { name, shape, kind, offset };
            if !tensor.name.starts_with(b"blk.") || tensor.name.starts_with(b"blk.0.") {
                let from = start + usize::try_from(tensor.offset).expect("the fixture fits memory");
                tensor.offset = data.len() as u64;
                data.extend(&bytes[from..from + usize::try_from(size(&tensor)).expect("the fixture fits memory")]);
                data.resize(data.len().next_multiple_of(32), 0);
                tensors.push(tensor);
            }
        }
        let mut model =
            Self { label: "sound".into(), version, keys, tensors, data: data.into(), spare: 0, length: None };
        model.number("qwen3moe.block_count", 1);
        model
    }

    /// The file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        let text = |out: &mut Vec<u8>, text: &[u8]| {
            out.extend((text.len() as u64).to_le_bytes());
            out.extend(text);
        };
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for key in &self.keys {
            text(&mut out, &key.name);
            out.extend(key.kind.to_le_bytes());
            out.extend(&*key.value);
        }
        for tensor in &self.tensors {
            text(&mut out, &tensor.name);
            out.extend(u32::try_from(tensor.shape.len()).expect("few dimensions").to_le_bytes());
            tensor.shape.iter().for_each(|extent| out.extend(extent.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend(tensor.offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(&*self.data);
        out.resize(out.len() + self.spare, 0);
        out.truncate(self.length.unwrap_or(usize::MAX));
        out
    }

    fn number(&mut self, name: &str, value: u32) {
        self.put(name, 4, &value.to_le_bytes());
    }

    fn put(&mut self, name: &str, kind: u32, value: &[u8]) {
        self.keys.retain(|key| key.name != name.as_bytes());
        self.keys.push(Key { name: name.into(), kind, value: value.into() });
    }

    fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|tensor| tensor.name == name.as_bytes()).expect("a tensor of the fixture")
    }

    /// A copy with one thing changed.
    fn with(&self, label: impl Into<String>, change: impl FnOnce(&mut Self)) -> Self {
        let mut model = Self { label: label.into(), ..self.clone() };
        change(&mut model);
        model
    }

    /// All that can be wrong with this model, each by itself.
    pub fn doctored(&self) -> Vec<Self> {
        [self.types(), self.shapes(), self.offsets(), self.names(), self.metadata(), self.truncated()].concat()
    }

    /// Expert and dense tensors of each type that exists, once existed, or never will.
    fn types(&self) -> Vec<Self> {
        let absurd = [63, 255, 1 << 16, i32::MAX.cast_unsigned(), 1 << 31, u32::MAX];
        let mut models = Vec::new();
        for kind in (0..46).chain(absurd) {
            for name in ["blk.0.ffn_up_exps.weight", "blk.0.attn_q.weight"] {
                models.push(self.with(format!("type {kind} of {name}"), |model| model.tensor(name).kind = kind));
            }
            // With offsets that fit, a type of another size gets further.
            models.push(self.with(format!("type {kind} of the last tensor"), |model| {
                let last = model.tensors.iter_mut().max_by_key(|tensor| tensor.offset).expect("a tensor");
                last.kind = kind;
                model.spare = 4 << 20;
            }));
        }
        models
    }

    fn shapes(&self) -> Vec<Self> {
        let mut models = Vec::new();
        for name in [
            "blk.0.ffn_gate_exps.weight",
            "blk.0.ffn_down_exps.weight",
            "blk.0.ffn_gate_inp.weight",
            "output_norm.weight",
        ] {
            let shape =
                self.tensors.iter().find(|tensor| tensor.name == name.as_bytes()).expect("a tensor").shape.clone();
            for (at, own) in shape.iter().copied().enumerate() {
                for extent in
                    [0, 1, own - 1, own + 1, 2 * own, 1 << 20, 1 << 40, i64::MAX.cast_unsigned(), 1 << 63, u64::MAX]
                {
                    models.push(
                        self.with(format!("{name} {at} is {extent}"), |model| model.tensor(name).shape[at] = extent),
                    );
                }
            }
            for (label, shape) in [
                ("no dimension", vec![]),
                ("one dimension", vec![shape.iter().product()]),
                ("four dimensions", [&shape[..], &[1, 1, 1, 1]].concat()[..4].to_vec()),
                (
                    "four dimensions, two of something",
                    [&shape[..], &[1, 1, 1]].concat()[..3].iter().copied().chain([2]).collect(),
                ),
                ("five dimensions", [&shape[..], &[1, 1, 1, 1]].concat()[..5].to_vec()),
                ("turned", shape.iter().rev().copied().collect()),
            ] {
                models.push(self.with(format!("{name} has {label}"), |model| model.tensor(name).shape = shape));
            }
        }
        models
    }

    fn offsets(&self) -> Vec<Self> {
        let mut models = Vec::new();
        let end = self.data.len() as u64;
        for (name, own) in self.tensors.iter().map(|tensor| (&tensor.name, tensor.offset)) {
            let name = String::from_utf8_lossy(name);
            for (label, offset) in [("unaligned", own + 1), ("next", own + 32), ("another's", 32), ("at the end", end)]
            {
                if name.contains("exps") || name.contains("norm") {
                    models.push(self.with(format!("{name} lies {label}"), |model| model.tensor(&name).offset = offset));
                }
            }
        }
        for offset in [end - 32, end + 32, 1 << 40, 1 << 63, u64::MAX, u64::MAX - 31] {
            models.push(self.with(format!("an expert tensor lies at {offset}"), |model| {
                model.tensor("blk.0.ffn_up_exps.weight").offset = offset;
            }));
        }
        models
    }

    fn names(&self) -> Vec<Self> {
        let mut models = Vec::new();
        let mut rename = |from: &str, to: &[u8]| {
            let label = format!("{from} is called {:.40}", String::from_utf8_lossy(to));
            models.push(self.with(label, |model| model.tensor(from).name = to.to_vec()));
        };
        let (expert, dense) = ("blk.0.ffn_gate_exps.weight", "blk.0.attn_q.weight");
        for to in [
            &b"blk.0.ffn_gate.weight"[..],
            b"blk.0.ffn_gate_exps",
            b"blk.0.ffn_gate_exps.bias",
            b"blk.0.ffn_gate_exps.scale",
            b"blk.1.ffn_gate_exps.weight",
            b"blk.4294967296.ffn_gate_exps.weight",
            b"blk.-1.ffn_gate_exps.weight",
            b"blk.0.ffn_up_exps.weight",
            b"cache_k_l0",
            b"",
            b"\xff\xfe\x80",
            b"a\nggml-moe: b\x1b[2J",
            b"nul\0inside.weight",
        ] {
            rename(expert, to);
            rename(dense, to);
        }
        for length in [62, 63, 64, 65, 1000, 100_000] {
            rename(expert, &vec![b'x'; length]);
            rename(dense, &[&vec![b'x'; length][..], b".weight"].concat());
        }
        rename(dense, expert.as_bytes());
        for name in [expert, dense, "output.weight", "blk.0.ffn_gate_inp.weight"] {
            models.push(self.with(format!("{name} is missing"), |model| {
                model.tensors.retain(|tensor| tensor.name != name.as_bytes())
            }));
            models.push(self.with(format!("{name} stands twice"), |model| {
                let copy = model.tensor(name).clone();
                model.tensors.push(copy);
            }));
        }
        models.push(self.with("gate and down change places", |model| {
            model.tensor(expert).name = b"x".to_vec();
            model.tensor("blk.0.ffn_down_exps.weight").name = expert.into();
            model.tensor("x").name = b"blk.0.ffn_down_exps.weight".to_vec();
        }));
        models.push(self.with("an expert bias more", |model| {
            model.tensors.push(Tensor {
                name: b"blk.0.ffn_gate_exps.bias".to_vec(),
                shape: vec![128, 32],
                kind: 0,
                offset: 0,
            });
        }));
        models.push(self.with("a tensor more of no layer", |model| {
            model.tensors.push(Tensor {
                name: b"blk.77.ffn_up_exps.weight".to_vec(),
                shape: vec![32, 2, 2],
                kind: 0,
                offset: 0,
            });
        }));
        models.push(self.with("no tensor at all", |model| model.tensors.clear()));
        models
    }

    fn metadata(&self) -> Vec<Self> {
        let mut models = Vec::new();
        for (name, values) in [
            ("qwen3moe.expert_count", &[0, 1, 31, 33, 1 << 20, u32::MAX][..]),
            ("qwen3moe.expert_used_count", &[0, 1, 32, 33, 1000, u32::MAX]),
            ("qwen3moe.expert_feed_forward_length", &[0, 1, 127, 256, u32::MAX]),
            ("qwen3moe.block_count", &[0, 2, 1000, u32::MAX]),
            ("qwen3moe.embedding_length", &[0, 1, 255, 512, u32::MAX]),
            ("qwen3moe.attention.head_count", &[0, 1, 3, 1000, u32::MAX]),
            ("qwen3moe.attention.head_count_kv", &[0, 3, u32::MAX]),
            ("qwen3moe.attention.key_length", &[0, 1, 63, u32::MAX]),
            ("qwen3moe.context_length", &[0, u32::MAX]),
            ("qwen3moe.expert_group_count", &[0, 1, 3, 1000]),
            ("general.alignment", &[0, 1, 8, 33, 64, 1 << 31, u32::MAX]),
            ("split.count", &[0, 1, 2, u32::MAX]),
        ] {
            for &value in values {
                models.push(self.with(format!("{name} is {value}"), |model| model.number(name, value)));
            }
            if name.starts_with("qwen3moe.expert") || name == "qwen3moe.block_count" {
                models.push(
                    self.with(format!("{name} is missing"), |model| {
                        model.keys.retain(|key| key.name != name.as_bytes())
                    }),
                );
                models.push(self.with(format!("{name} is a text"), |model| {
                    model.put(name, 8, &[&1_u64.to_le_bytes()[..], b"4"].concat())
                }));
                models.push(self.with(format!("{name} is a list"), |model| {
                    model.put(name, 9, &[4, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0])
                }));
            }
        }
        for architecture in ["", "llama", "qwen2moe", "mixtral", "no such architecture"] {
            models.push(self.with(format!("the architecture is {architecture}"), |model| {
                model.put(
                    "general.architecture",
                    8,
                    &[&(architecture.len() as u64).to_le_bytes()[..], architecture.as_bytes()].concat(),
                );
            }));
        }
        models.extend(
            [0, 1, 2, 4, u32::MAX]
                .map(|version| self.with(format!("version {version}"), |model| model.version = version)),
        );
        models
    }

    fn truncated(&self) -> Vec<Self> {
        let whole = self.bytes().len();
        let data = whole - self.data.len();
        let ends =
            self.tensors.iter().map(|tensor| data + usize::try_from(tensor.offset).expect("the fixture fits memory"));
        let lengths =
            (0..8).map(|part| data * part / 8).chain(ends).chain([3, 4, 8, 16, 24, data - 1, whole - 1, whole - 32]);
        lengths.map(|length| self.with(format!("cut to {length}"), |model| model.length = Some(length))).collect()
    }
}

fn size(tensor: &Tensor) -> u64 {
    let (_, values, bytes) =
        LAYOUTS.into_iter().find(|(kind, ..)| *kind == tensor.kind).expect("a type of the fixture");
    tensor.shape.iter().product::<u64>() / values * bytes
}
