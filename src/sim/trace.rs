//! Traces of routing, and their file format.
//!
//! Owns: [`Trace`] and its reading from and writing to the bytes of a `.npy` file: a C-ordered array of 16-bit signed
//! little-endian integers `[tokens][layers][experts per token]` (`np.save` of an `int16` array); `int32` is read, too.
//! Invariants: every id is below `experts`, and no token uses an expert twice in a layer.
//! Threads: none. Does not: open files.

use std::fmt;

/// The experts that each token used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    ids: Vec<u16>,
    layers: usize,
    used: usize,
    experts: usize,
}

/// Why bytes are no trace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// Not the format.
    #[error("no .npy file of three dimensions with int16 or int32 values in C order ({0})")]
    Format(&'static str),
    /// The array is cut off or has no content.
    #[error("the array is {shape} and needs {needed} bytes, the file has {given}")]
    Length {
        /// The shape in the header.
        shape: Shape,
        /// Bytes that it needs.
        needed: usize,
        /// Bytes that follow the header.
        given: usize,
    },
    /// An id is out of range, or stands twice.
    #[error("token {token}, layer {layer}: {what}")]
    Id {
        /// The token.
        token: usize,
        /// The layer.
        layer: usize,
        /// What is wrong.
        what: String,
    },
}

/// `[tokens][layers][used]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape(pub [usize; 3]);

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {} x {}", self.0[0], self.0[1], self.0[2])
    }
}

const MAGIC: &[u8; 6] = b"\x93NUMPY";

impl Trace {
    pub(super) fn from_parts(ids: Vec<u16>, layers: usize, used: usize, experts: usize) -> Self {
        Self { ids, layers, used, experts }
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.ids.len() / (self.layers * self.used)
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Experts per token and layer.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Experts per layer.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// What one token used in one layer.
    pub fn at(&self, token: usize, layer: usize) -> &[u16] {
        let at = (token * self.layers + layer) * self.used;
        &self.ids[at..at + self.used]
    }

    /// Reads a trace. `experts` is the number per layer, which the format does not hold; without it, one more than the largest
    /// id.
    pub fn read(bytes: &[u8], experts: Option<usize>) -> Result<Self, TraceError> {
        let (header, data) = header(bytes)?;
        let width = match field(header, "descr") {
            Some("'<i2'") => 2,
            Some("'<i4'") => 4,
            _ => return Err(TraceError::Format("the values are of another type")),
        };
        if field(header, "fortran_order") != Some("False") {
            return Err(TraceError::Format("Fortran order"));
        }
        let shape = shape(header).ok_or(TraceError::Format("the shape has not three dimensions"))?;
        let Shape([tokens, layers, used]) = shape;
        let count = tokens.checked_mul(layers).and_then(|count| count.checked_mul(used));
        let needed = count.and_then(|count| count.checked_mul(width)).unwrap_or(usize::MAX);
        if needed == 0 || data.len() < needed {
            return Err(TraceError::Length { shape, needed, given: data.len() });
        }
        let value = |bytes: &[u8]| match *bytes {
            [a, b] => i32::from(i16::from_le_bytes([a, b])),
            [a, b, c, d] => i32::from_le_bytes([a, b, c, d]),
            _ => -1,
        };
        let values: Vec<i32> = data[..needed].chunks_exact(width).map(value).collect();
        let experts =
            experts.unwrap_or_else(|| values.iter().max().map_or(0, |&most| usize::try_from(most).unwrap_or(0) + 1));
        let mut last = vec![usize::MAX; experts];
        let mut ids = Vec::with_capacity(values.len());
        for (row, values) in values.chunks_exact(used).enumerate() {
            for &id in values {
                let error = |what| TraceError::Id { token: row / layers, layer: row % layers, what };
                let known = u16::try_from(id).ok().filter(|&known| usize::from(known) < experts);
                let Some(known) = known else { return Err(error(format!("{id} is none of {experts} experts"))) };
                if std::mem::replace(&mut last[usize::from(known)], row) == row {
                    return Err(error(format!("expert {id} stands twice")));
                }
                ids.push(known);
            }
        }
        Ok(Self { ids, layers, used, experts })
    }

    /// The bytes of a file that [`Trace::read`] reads.
    pub fn write(&self) -> Vec<u8> {
        let mut header = format!(
            "{{'descr': '<i2', 'fortran_order': False, 'shape': ({}, {}, {}), }}",
            self.tokens(),
            self.layers,
            self.used
        );
        while (10 + header.len() + 1) % 64 != 0 {
            header.push(' ');
        }
        header.push('\n');
        let length = u16::try_from(header.len()).unwrap_or(u16::MAX);
        let mut bytes = MAGIC.to_vec();
        bytes.extend([1, 0]);
        bytes.extend(length.to_le_bytes());
        bytes.extend(header.bytes());
        bytes.extend(self.ids.iter().flat_map(|id| id.to_le_bytes()));
        bytes
    }
}

/// The header's text and what follows it.
fn header(bytes: &[u8]) -> Result<(&str, &[u8]), TraceError> {
    let rest = bytes.strip_prefix(MAGIC).ok_or(TraceError::Format("no such beginning"))?;
    let cut = TraceError::Format("cut off in the header");
    let (length, rest) = match *rest {
        [1, _, low, high, ref rest @ ..] => (usize::from(u16::from_le_bytes([low, high])), rest),
        [2 | 3, _, a, b, c, d, ref rest @ ..] => {
            (usize::try_from(u32::from_le_bytes([a, b, c, d])).unwrap_or(usize::MAX), rest)
        }
        [1..=3, ..] | [] => return Err(cut),
        _ => return Err(TraceError::Format("unknown version")),
    };
    let (header, data) = rest.split_at_checked(length).ok_or(cut)?;
    let text = std::str::from_utf8(header).map_err(|_| TraceError::Format("the header is no text"))?;
    Ok((text, data))
}

/// The value of a field that is no tuple.
fn field<'a>(header: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = header.split_once(&format!("'{name}':"))?;
    rest.split([',', '}']).next().map(str::trim)
}

fn shape(header: &str) -> Option<Shape> {
    let (_, rest) = header.split_once("'shape':")?;
    let (inside, _) = rest.trim_start().strip_prefix('(')?.split_once(')')?;
    let mut sizes = inside.split(',').map(str::trim).filter(|size| !size.is_empty()).map(|size| size.parse().ok());
    let shape = [sizes.next()??, sizes.next()??, sizes.next()??];
    sizes.next().is_none().then_some(Shape(shape))
}
