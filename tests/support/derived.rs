//! Small GGUF files made for one test: from parts of another file, the bundled model for one, from noise, or from both.
//!
//! All contents are held in memory until the file is written. Noise has a fixed seed, so that a file is the same in every run.
//! What a file must hold is the business of the test that makes it.

use std::fs;
use std::path::Path;

use super::fixture_model;
use super::gguf::{Header, Key, Tensor, Writer};

/// ggml's number of 32-bit floats.
const F32: u32 = 0;

/// The values and bytes of a block of each type that the files here use.
fn block(kind: u32) -> (u64, u64) {
    match kind {
        F32 => (1, 4),
        6 => (32, 22),
        8 => (32, 34),
        12 => (256, 144),
        14 => (256, 210),
        other => panic!("the block of type {other} is not known here"),
    }
}

fn size(tensor: &Tensor) -> usize {
    let (values, bytes) = block(tensor.kind);
    usize::try_from(tensor.shape.iter().product::<u64>() / values * bytes).expect("a small tensor")
}

/// A small model, read.
pub struct Parts {
    header: Header,
    bytes: Vec<u8>,
}

impl Parts {
    /// Reads the bundled model.
    pub fn read() -> Self {
        Self::of(&fixture_model())
    }

    /// Reads any small model of the types that are known here.
    pub fn of(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self { header: Header::read(path), bytes }
    }

    /// Its keys in file order.
    pub fn keys(&self) -> &[Key] {
        &self.header.keys
    }

    /// The number of a key whose name ends in this.
    pub fn number(&self, ending: &str) -> u32 {
        let mut found = self.keys().iter().filter(|key| key.name.ends_with(ending));
        found.find_map(Key::number).unwrap_or_else(|| panic!("no number {ending}"))
    }

    /// Its tensors in file order.
    pub fn tensors(&self) -> &[Tensor] {
        &self.header.tensors
    }

    fn contents(&self, tensor: &Tensor) -> &[u8] {
        let start = usize::try_from(self.header.data_start + tensor.offset).expect("a small file");
        &self.bytes[start..start + size(tensor)]
    }
}

/// A file in the making.
#[derive(Default)]
pub struct Model {
    /// Its metadata.
    pub keys: Writer,
    contents: Vec<Vec<u8>>,
}

impl Model {
    /// Copies the keys of a model for which `rename` has a name.
    pub fn copy_keys(&mut self, parts: &Parts, rename: impl Fn(&str) -> Option<String>) {
        for key in parts.keys() {
            if let Some(name) = rename(&key.name) {
                self.keys.copy(&name, key);
            }
        }
    }

    /// Copies the tokenizer of a model.
    pub fn copy_tokenizer(&mut self, parts: &Parts) {
        self.copy_keys(parts, |name| name.starts_with("tokenizer.").then(|| name.to_owned()));
    }

    /// Copies a tensor of a model under a name of the caller's.
    pub fn copy(&mut self, parts: &Parts, tensor: &Tensor, name: &str) {
        self.keys.tensor(name, tensor.kind, block(tensor.kind), &tensor.shape);
        self.contents.push(parts.contents(tensor).to_vec());
    }

    /// Adds a tensor of 32-bit floats.
    pub fn floats(&mut self, name: &str, shape: &[u64], values: impl Iterator<Item = f32>) {
        self.keys.tensor(name, F32, block(F32), shape);
        let count = usize::try_from(shape.iter().product::<u64>()).expect("a small tensor");
        let bytes: Vec<u8> = values.take(count).flat_map(f32::to_le_bytes).collect();
        assert_eq!(bytes.len(), 4 * count, "{name} has all its values");
        self.contents.push(bytes);
    }

    /// Writes the file.
    pub fn write(&self, path: &Path) {
        let mut contents = self.contents.iter();
        self.keys.write(path, |_, count, output| {
            let bytes = contents.next().expect("every tensor has contents");
            output.write_all(bytes)?;
            let padding = count - bytes.len() as u64;
            std::io::copy(&mut std::io::Read::take(std::io::repeat(0), padding), output).map(|_| ())
        });
    }
}

/// Evenly distributed numbers between `-limit` and `limit`, the same for the same seed.
pub fn noise(seed: u64, limit: f32) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let part = u16::try_from(state >> 48).expect("16 bits");
        (f32::from(part) / 32_768.0 - 1.0) * limit
    })
}
