//! Headers of GGUF files.
//!
//! Owns: [`Header`]: keys with their values, tensors with name, shape, type and place. Versions 2 and 3, little endian, as the host takes.
//! Invariants: any input ends in a header or an error. What is kept grows with the bytes that were read: a count in the file reserves no
//! memory. Long texts and lists are counted and skipped, not kept.
//! Threads: none. Does not: read tensor data, or know what a key means (`moe` does).

use std::collections::HashSet;
use std::fs::OpenOptions;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::types::Type;

/// The most keys, and tensors, of one file.
const MOST_ITEMS: u64 = 1 << 20;
/// The longest name of a key or a tensor, in bytes.
const LONGEST_NAME: u64 = 1 << 10;
/// Texts up to this many bytes are kept.
const LONGEST_TEXT: u64 = 1 << 14;
/// Numbers of a list that are kept.
const MOST_NUMBERS: u64 = 1 << 12;
/// The most dimensions of a tensor.
const MOST_DIMENSIONS: u32 = 4;
/// The alignment of data where no key says otherwise.
const ALIGNMENT: u64 = 32;
/// The most files of a split model.
const MOST_FILES: u64 = 1000;

/// Why a file is no model header.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// It does not begin as one.
    #[error("not a GGUF file")]
    Magic,
    /// Another version of the format.
    #[error("GGUF version {0} is not known (2 and 3 are)")]
    Version(u32),
    /// Written for processors of the other byte order.
    #[error("a GGUF file for big-endian machines")]
    BigEndian,
    /// It ends within the header.
    #[error("the header ends after {0} bytes, within {1}")]
    Truncated(u64, &'static str),
    /// Something in it cannot be.
    #[error("{0}")]
    Wrong(String),
    /// The rest of a split model.
    #[error("{path}: {reason}", path = .0.display(), reason = .1)]
    Part(PathBuf, Box<GgufError>),
    /// It cannot be read.
    #[error(transparent)]
    Io(io::Error),
}

/// The value of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A whole number of any width.
    Integer(i128),
    /// A floating-point number.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A text; `None` if it is long.
    Text(Option<String>),
    /// A list.
    List {
        /// How many there are.
        count: u64,
        /// Whole numbers, if they are and are not too many; empty otherwise.
        numbers: Vec<i128>,
    },
}

/// A tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Extents, fastest first.
    pub shape: Vec<u64>,
    /// Its type.
    pub kind: &'static Type,
    /// Its bytes, without padding.
    pub bytes: u64,
    /// Where they begin, from the start of the data.
    pub offset: u64,
}

/// A header.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// Keys in the order of the file.
    pub keys: Vec<(String, Value)>,
    /// Tensors in the order of the file.
    pub tensors: Vec<TensorInfo>,
    /// Where the data begins in the file.
    pub data_start: u64,
    /// Bytes of the tensors that lie behind the end of the file; 0 if it is not known where it ends.
    pub missing: u64,
}

impl Header {
    /// Reads a header from its first byte on.
    pub fn read(source: impl Read) -> Result<Self, GgufError> {
        let mut input = Input { source, position: 0 };
        if input.bytes::<4>("the magic")? != *b"GGUF" {
            return Err(GgufError::Magic);
        }
        match input.u32("the version")? {
            2 | 3 => {}
            other if other.swap_bytes() <= 3 && other != 0 => return Err(GgufError::BigEndian),
            other => return Err(GgufError::Version(other)),
        }
        let (tensor_count, key_count) = (input.u64("the counts")?, input.u64("the counts")?);
        if tensor_count > MOST_ITEMS || key_count > MOST_ITEMS {
            return Err(GgufError::Wrong(format!("{tensor_count} tensors and {key_count} keys are too many")));
        }
        let (mut keys, mut names) = (Vec::new(), HashSet::new());
        for _ in 0..key_count {
            let name = input.name("a key")?;
            let value = input.value(&name)?;
            if !names.insert(name.clone()) {
                return Err(GgufError::Wrong(format!("key \"{}\" stands twice", shown(&name))));
            }
            keys.push((name, value));
        }
        let (mut tensors, mut names) = (Vec::new(), HashSet::new());
        for _ in 0..tensor_count {
            let tensor = input.tensor()?;
            if !names.insert(tensor.name.clone()) {
                return Err(GgufError::Wrong(format!("tensor \"{}\" stands twice", shown(&tensor.name))));
            }
            tensors.push(tensor);
        }
        let header = Self { keys, tensors, data_start: 0, missing: 0 };
        let alignment = match header.value("general.alignment") {
            None => ALIGNMENT,
            Some(Value::Integer(number)) => u64::try_from(*number)
                .ok()
                .filter(|bytes| bytes.is_power_of_two() && *bytes <= 1 << 30)
                .ok_or_else(|| GgufError::Wrong(format!("an alignment of {number}")))?,
            Some(_) => return Err(GgufError::Wrong("general.alignment is no number".to_owned())),
        };
        Ok(Self { data_start: input.position.next_multiple_of(alignment), ..header })
    }

    /// Reads the header of a file, and of nothing else: to open a pipe may wait, and what is read from it is gone for the host.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(GgufError::Io)?;
        if !file.metadata().map_err(GgufError::Io)?.is_file() {
            return Err(GgufError::Io(io::Error::other("it is no regular file")));
        }
        let mut header = Self::read(BufReader::new(&file))?;
        // A file that is still being fetched has its header, so it can be planned, but no host takes it.
        header.missing = header.end().saturating_sub(file.metadata().map_err(GgufError::Io)?.len());
        Ok(header)
    }

    /// Where the last tensor ends in the file.
    fn end(&self) -> u64 {
        let ends = self.tensors.iter().map(|tensor| tensor.offset.saturating_add(tensor.bytes));
        ends.max().map_or(0, |end| self.data_start.saturating_add(end))
    }

    /// The value of a key.
    pub fn value(&self, name: &str) -> Option<&Value> {
        self.keys.iter().find(|(key, _)| key == name).map(|(_, value)| value)
    }

    /// A key that is a number from 0 on; of a list of numbers (one per layer) the largest.
    pub fn number(&self, name: &str) -> Option<u64> {
        match self.value(name)? {
            Value::Integer(number) => u64::try_from(*number).ok(),
            Value::List { numbers, .. } => numbers.iter().max().and_then(|number| u64::try_from(*number).ok()),
            _ => None,
        }
    }

    /// A key that is a text.
    pub fn text(&self, name: &str) -> Option<&str> {
        match self.value(name)? {
            Value::Text(text) => text.as_deref(),
            _ => None,
        }
    }
}

/// The headers of a model, in the order of its files. Of a split model any file may be named; the others lie beside it.
pub fn open_all(path: &Path) -> Result<Vec<Header>, GgufError> {
    let first = Header::open(path)?;
    let count = first.number("split.count").unwrap_or(1);
    if count <= 1 {
        return Ok(vec![first]);
    }
    if count > MOST_FILES {
        return Err(GgufError::Wrong(format!("a model of {count} files")));
    }
    let prefix = path
        .to_str()
        .and_then(|path| split_prefix(path, count))
        .ok_or_else(|| GgufError::Wrong(format!("one of {count} files, but not named -00001-of-{count:05}.gguf")))?;
    (1..=count)
        .map(|number| {
            let part = PathBuf::from(format!("{prefix}-{number:05}-of-{count:05}.gguf"));
            if part == path {
                return Ok(first.clone());
            }
            Header::open(&part).map_err(|error| GgufError::Part(part, Box::new(error)))
        })
        .collect()
}

/// What stands before `-00001-of-0000N.gguf` in a name.
fn split_prefix(path: &str, count: u64) -> Option<&str> {
    let rest = path.strip_suffix(&format!("-of-{count:05}.gguf"))?;
    let (prefix, number) = rest.rsplit_once('-')?;
    (number.len() == 5 && number.bytes().all(|byte| byte.is_ascii_digit())).then_some(prefix)
}

/// A source that knows how far it has been read.
struct Input<R> {
    source: R,
    position: u64,
}

impl<R: Read> Input<R> {
    fn bytes<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], GgufError> {
        let mut bytes = [0; N];
        self.source.read_exact(&mut bytes).map_err(|error| self.failed(error, what))?;
        self.position = self.position.saturating_add(N as u64);
        Ok(bytes)
    }

    fn failed(&self, error: io::Error, what: &'static str) -> GgufError {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => GgufError::Truncated(self.position, what),
            _ => GgufError::Io(error),
        }
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.bytes(what)?))
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.bytes(what)?))
    }

    /// So many bytes, which are known to be few.
    fn take(&mut self, count: u64, what: &'static str) -> Result<Vec<u8>, GgufError> {
        let mut bytes = Vec::new();
        let read = self.source.by_ref().take(count).read_to_end(&mut bytes).map_err(GgufError::Io)?;
        self.position = self.position.saturating_add(read as u64);
        if read as u64 == count { Ok(bytes) } else { Err(GgufError::Truncated(self.position, what)) }
    }

    fn skip(&mut self, count: u64, what: &'static str) -> Result<(), GgufError> {
        let read = io::copy(&mut self.source.by_ref().take(count), &mut io::sink()).map_err(GgufError::Io)?;
        self.position = self.position.saturating_add(read);
        if read == count { Ok(()) } else { Err(GgufError::Truncated(self.position, what)) }
    }

    fn name(&mut self, what: &'static str) -> Result<String, GgufError> {
        let length = self.u64(what)?;
        if length > LONGEST_NAME {
            return Err(GgufError::Wrong(format!("the name of {what} has {length} bytes")));
        }
        let bytes = self.take(length, what)?;
        String::from_utf8(bytes).map_err(|_| GgufError::Wrong(format!("the name of {what} is no text")))
    }

    fn value(&mut self, name: &str) -> Result<Value, GgufError> {
        let kind = self.u32("a key")?;
        match kind {
            8 => {
                let length = self.u64("a text")?;
                if length > LONGEST_TEXT {
                    self.skip(length, "a text")?;
                    return Ok(Value::Text(None));
                }
                let bytes = self.take(length, "a text")?;
                Ok(Value::Text(Some(String::from_utf8_lossy(&bytes).into_owned())))
            }
            9 => self.list(name),
            other => self.scalar(other, name),
        }
    }

    fn list(&mut self, name: &str) -> Result<Value, GgufError> {
        let (kind, count) = (self.u32("a list")?, self.u64("a list")?);
        let mut numbers = Vec::new();
        match scalar_bytes(kind) {
            Some(_) if count <= MOST_NUMBERS => {
                for _ in 0..count {
                    match self.scalar(kind, name)? {
                        Value::Integer(number) => numbers.push(number),
                        Value::Bool(truth) => numbers.push(i128::from(truth)),
                        _ => {}
                    }
                }
            }
            Some(size) => {
                let bytes = count
                    .checked_mul(size)
                    .ok_or_else(|| GgufError::Wrong(format!("key \"{}\" is a list of {count}", shown(name))))?;
                self.skip(bytes, "a list")?;
            }
            None if kind == 8 => {
                for _ in 0..count {
                    let length = self.u64("a list")?;
                    self.skip(length, "a list")?;
                }
            }
            None => return Err(GgufError::Wrong(format!("key \"{}\" is a list of type {kind}", shown(name)))),
        }
        Ok(Value::List { count, numbers })
    }

    fn scalar(&mut self, kind: u32, name: &str) -> Result<Value, GgufError> {
        let what = "a value";
        Ok(match kind {
            0 => Value::Integer(u8::from_le_bytes(self.bytes(what)?).into()),
            1 => Value::Integer(i8::from_le_bytes(self.bytes(what)?).into()),
            2 => Value::Integer(u16::from_le_bytes(self.bytes(what)?).into()),
            3 => Value::Integer(i16::from_le_bytes(self.bytes(what)?).into()),
            4 => Value::Integer(u32::from_le_bytes(self.bytes(what)?).into()),
            5 => Value::Integer(i32::from_le_bytes(self.bytes(what)?).into()),
            6 => Value::Float(f32::from_le_bytes(self.bytes(what)?).into()),
            7 => Value::Bool(self.bytes::<1>(what)? != [0]),
            10 => Value::Integer(u64::from_le_bytes(self.bytes(what)?).into()),
            11 => Value::Integer(i64::from_le_bytes(self.bytes(what)?).into()),
            12 => Value::Float(f64::from_le_bytes(self.bytes(what)?)),
            other => return Err(GgufError::Wrong(format!("key \"{}\" is of type {other}", shown(name)))),
        })
    }

    fn tensor(&mut self) -> Result<TensorInfo, GgufError> {
        let what = "a tensor";
        let name = self.name(what)?;
        let wrong = |reason: String| GgufError::Wrong(format!("tensor \"{}\" {reason}", shown(&name)));
        let dimensions = self.u32(what)?;
        if dimensions > MOST_DIMENSIONS {
            return Err(wrong(format!("has {dimensions} dimensions")));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            shape.push(self.u64(what)?);
        }
        let number = self.u32(what)?;
        let kind = Type::of(number).ok_or_else(|| wrong(format!("is of type {number}, which is not known")))?;
        let bytes = kind
            .tensor_bytes(&shape)
            .filter(|bytes| i64::try_from(*bytes).is_ok())
            .ok_or_else(|| wrong(format!("of type {} cannot have the shape {shape:?}", kind.name)))?;
        Ok(TensorInfo { offset: self.u64(what)?, name, shape, kind, bytes })
    }
}

/// Bytes of a value that is neither text nor list.
fn scalar_bytes(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

/// A name of a file, for a message of one line.
fn shown(name: &str) -> String {
    crate::config::shown(name)
}

#[cfg(test)]
#[path = "gguf_tests.rs"]
mod tests;
