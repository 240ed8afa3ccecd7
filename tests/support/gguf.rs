//! The header of a GGUF file, read and written: metadata keys, tensor names, shapes, types and offsets.
//!
//! Only what the tests need: version 3, little endian. The reader is for the tests' own files; it panics on a broken one.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::Path;

/// Data begins at, and every tensor is aligned to, a multiple of this many bytes.
const ALIGNMENT: u64 = 32;

/// One tensor as the header describes it.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// Its extents, fastest first.
    pub shape: Vec<u64>,
    /// ggml's number of its type.
    pub kind: u32,
    /// Where its bytes begin, counted from the start of the data.
    pub offset: u64,
}

/// One metadata key with its value as it stands in the file.
#[derive(Clone, Debug)]
pub struct Key {
    /// Its name.
    pub name: String,
    /// GGUF's number of its type.
    kind: u32,
    /// Its value, undecoded.
    value: Vec<u8>,
}

impl Key {
    /// Its value, if that is an unsigned number of 32 bits.
    pub fn number(&self) -> Option<u32> {
        (self.kind == 4).then(|| self.value.as_slice().try_into().map(u32::from_le_bytes).ok())?
    }

    /// The same key with the last value of its list once more, if it is a list of `count` values of one size.
    pub fn longer(&self, count: u32) -> Self {
        let mut longer = self.clone();
        let head = [self.value.get(..4).unwrap_or_default(), &u64::from(count).to_le_bytes()].concat();
        if self.kind == 9 && count > 0 && self.value.starts_with(&head) && head[0] != 8 {
            let size = (self.value.len() - head.len()) / usize::try_from(count).expect("a short list");
            longer.value[4..12].copy_from_slice(&u64::from(count + 1).to_le_bytes());
            longer.value.extend_from_slice(&self.value[self.value.len() - size..]);
        }
        longer
    }
}

/// A GGUF header.
#[derive(Debug)]
pub struct Header {
    /// The metadata in file order.
    pub keys: Vec<Key>,
    /// The tensors in file order.
    pub tensors: Vec<Tensor>,
    /// Where the data begins in the file.
    pub data_start: u64,
}

impl Header {
    /// Reads the header of a file.
    pub fn read(path: &Path) -> Self {
        let file = File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let mut input = Input { source: BufReader::new(file), position: 0 };
        let mut keys = Vec::new();
        assert_eq!(input.bytes::<4>(), *b"GGUF", "{} is not a GGUF file", path.display());
        assert_eq!(input.u32(), 3, "{} is of another version", path.display());
        let (tensor_count, key_count) = (input.u64(), input.u64());
        for _ in 0..key_count {
            let (name, kind) = (input.string(), input.u32());
            let mut value = Vec::new();
            input.value(kind, &mut value);
            keys.push(Key { name, kind, value });
        }
        let tensors = (0..tensor_count).map(|_| input.tensor()).collect();
        Self { keys, tensors, data_start: input.position.next_multiple_of(ALIGNMENT) }
    }

    /// How many MoE blocks a forward pass over this model runs: the layers that own routed expert weights, where the two
    /// expert families of one layer (`exps` and `chexps`) count apart.
    pub fn moe_blocks(&self) -> usize {
        let owner = |tensor: &Tensor| {
            let (layer, rest) = tensor.name.strip_prefix("blk.")?.split_once(".ffn_")?;
            let family = rest.strip_suffix(".weight")?.rsplit('_').next()?;
            matches!(family, "exps" | "chexps").then(|| format!("{layer} {family}"))
        };
        self.tensors.iter().filter_map(owner).collect::<BTreeSet<_>>().len()
    }
}

/// A source that knows how far it has been read.
struct Input {
    source: BufReader<File>,
    position: u64,
}

impl Input {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.source.read_exact(&mut bytes).expect("the header is complete");
        self.position += N as u64;
        bytes
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    fn take(&mut self, count: u64, value: &mut Vec<u8>) {
        let taken = self.source.by_ref().take(count).read_to_end(value);
        assert_eq!(taken.expect("the header can be read") as u64, count, "the header is complete");
        self.position += count;
    }

    fn string(&mut self) -> String {
        let length = self.u64();
        let mut text = String::new();
        self.source.by_ref().take(length).read_to_string(&mut text).expect("names are UTF-8");
        assert_eq!(text.len() as u64, length, "the header is complete");
        self.position += length;
        text
    }

    /// Adds the bytes of a value of a type, its counts and nested types included.
    fn value(&mut self, kind: u32, value: &mut Vec<u8>) {
        match kind {
            0 | 1 | 7 => self.take(1, value),
            2 | 3 => self.take(2, value),
            4..=6 => self.take(4, value),
            10..=12 => self.take(8, value),
            8 => {
                let length = self.u64();
                value.extend(length.to_le_bytes());
                self.take(length, value);
            }
            9 => {
                let (kind, count) = (self.u32(), self.u64());
                value.extend(kind.to_le_bytes());
                value.extend(count.to_le_bytes());
                (0..count).for_each(|_| self.value(kind, value));
            }
            other => panic!("metadata type {other} is not of GGUF 3"),
        }
    }

    fn tensor(&mut self) -> Tensor {
        let name = self.string();
        let shape = (0..self.u32()).map(|_| self.u64()).collect();
        Tensor { name, shape, kind: self.u32(), offset: self.u64() }
    }
}

/// Writes a GGUF file: keys first, then tensor descriptions, then the data.
#[derive(Default)]
pub struct Writer {
    keys: Vec<u8>,
    key_count: u64,
    tensors: Vec<Tensor>,
    data_bytes: u64,
}

impl Writer {
    /// Adds an unsigned number.
    pub fn u32(&mut self, key: &str, value: u32) {
        self.key(key, 4, &value.to_le_bytes());
    }

    /// Adds a floating-point number.
    pub fn f32(&mut self, key: &str, value: f32) {
        self.key(key, 6, &value.to_le_bytes());
    }

    /// Adds a truth value.
    pub fn bool(&mut self, key: &str, value: bool) {
        self.key(key, 7, &[value.into()]);
    }

    /// Adds a list of floating-point numbers.
    pub fn f32s(&mut self, key: &str, values: &[f32]) {
        let mut bytes = [6_u32.to_le_bytes().as_slice(), &(values.len() as u64).to_le_bytes()].concat();
        values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        self.key(key, 9, &bytes);
    }

    /// Adds a key of another file under a name of the caller's.
    pub fn copy(&mut self, name: &str, key: &Key) {
        self.key(name, key.kind, &key.value);
    }

    /// Adds a text.
    pub fn string(&mut self, key: &str, value: &str) {
        self.key(key, 8, &counted(value));
    }

    /// Adds a list of texts.
    pub fn strings(&mut self, key: &str, values: &[String]) {
        let mut bytes = [8_u32.to_le_bytes().as_slice(), &(values.len() as u64).to_le_bytes()].concat();
        values.iter().for_each(|value| bytes.extend(counted(value)));
        self.key(key, 9, &bytes);
    }

    fn key(&mut self, key: &str, kind: u32, value: &[u8]) {
        self.keys.extend(counted(key));
        self.keys.extend(kind.to_le_bytes());
        self.keys.extend(value);
        self.key_count += 1;
    }

    /// Adds a tensor of a type whose blocks hold `values` numbers in `bytes` bytes.
    pub fn tensor(&mut self, name: &str, kind: u32, (values, bytes): (u64, u64), shape: &[u64]) {
        let offset = self.data_bytes;
        let size = shape.iter().product::<u64>() / values * bytes;
        self.data_bytes = (offset + size).next_multiple_of(ALIGNMENT);
        self.tensors.push(Tensor { name: name.to_owned(), shape: shape.to_vec(), kind, offset });
    }

    /// Writes the file; `fill` writes exactly the bytes of each tensor it is given, in order, from the count it is given.
    pub fn write(&self, path: &Path, mut fill: impl FnMut(&Tensor, u64, &mut dyn Write) -> std::io::Result<()>) {
        let mut write = || -> std::io::Result<()> {
            let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
            let mut head = b"GGUF".to_vec();
            head.extend(3_u32.to_le_bytes());
            head.extend((self.tensors.len() as u64).to_le_bytes());
            head.extend(self.key_count.to_le_bytes());
            head.extend(&self.keys);
            for tensor in &self.tensors {
                head.extend(counted(&tensor.name));
                head.extend(u32::try_from(tensor.shape.len()).expect("few dimensions").to_le_bytes());
                tensor.shape.iter().for_each(|extent| head.extend(extent.to_le_bytes()));
                head.extend(tensor.kind.to_le_bytes());
                head.extend(tensor.offset.to_le_bytes());
            }
            let padded = (head.len() as u64).next_multiple_of(ALIGNMENT);
            head.resize(usize::try_from(padded).expect("a header fits memory"), 0);
            file.write_all(&head)?;
            for (index, tensor) in self.tensors.iter().enumerate() {
                let end = self.tensors.get(index + 1).map_or(self.data_bytes, |next| next.offset);
                // The padding between two tensors is part of what `fill` writes: any bytes will do there.
                fill(tensor, end - tensor.offset, &mut file)?;
            }
            file.flush()
        };
        write().unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
}

/// A text with its length in front.
fn counted(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}
