//! Staging for long passes: the experts of a block are brought to the device as a whole, behind the work on the blocks before it.
//!
//! Owns: the ring of buffers, each as large as the experts of the largest block, and the copies that fill them: experts that the cache holds come
//! from its arena, the others from RAM.
//! Invariants: a buffer is written when the stream has passed the block that read it last (`fill` is called behind it); a block runs when its
//! buffer is full (`open`). Experts keep their place within the tensor, so the host's ids stay valid and nobody reads them.
//! Threads: the one that drives the backend. Does not: choose which passes are long (`backend` does).

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use super::cache::{Cache, uploads};
use super::plain;
use crate::abi::inner;
use crate::abi::tensor::{Patch, Tensor};
use crate::buffer::{Buffer, BufferError};
use crate::device::Device;
use crate::gpu::{Mark, Memory, Place};
use crate::graph::TensorKey;

/// Buffers of a ring: one is read while the other is filled.
const DEPTH: usize = 2;
/// Alignment of tensors in a buffer.
const ALIGNMENT: usize = 256;

/// The ring of one device.
#[derive(Debug)]
pub(crate) struct Ring {
    buffers: Vec<Staging>,
    bytes: usize,
}

#[derive(Debug)]
struct Staging {
    memory: Box<dyn Memory>,
    full: Option<Box<dyn Mark>>,
}

/// A block whose experts are brought as a whole.
#[derive(Debug)]
pub(crate) struct Brought<'a> {
    products: Vec<Tensor<'a>>,
    /// Its distinct weights, and where in a buffer each lies.
    weights: Vec<(Tensor<'a>, usize)>,
    bytes: usize,
}

impl<'a> Brought<'a> {
    /// The block of these products; `None` if a weight does not lie in RAM as whole experts.
    pub(crate) fn new(device: &Device, products: Vec<Tensor<'a>>) -> Option<Self> {
        let (mut weights, mut bytes) = (Vec::<(Tensor<'_>, usize)>::new(), 0);
        for product in &products {
            let weight = product.source(0)?;
            weight.our_buffer().and_then(Buffer::host)?;
            if plain::interleaves(weight) || !weight.is_contiguous() {
                return None;
            }
            if weights.iter().all(|(known, _)| known.key() != weight.key()) {
                weights.push((weight, bytes));
                bytes = (bytes + plain::slot_bytes(device, weight)).next_multiple_of(ALIGNMENT);
            }
        }
        Some(Self { products, weights, bytes })
    }

    /// Bytes that it takes in a buffer.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    fn place(&self, weight: TensorKey) -> Option<usize> {
        self.weights.iter().find(|(known, _)| known.key() == weight).map(|(_, offset)| *offset)
    }
}

impl Ring {
    /// Blocks whose experts may be on their way at once.
    pub(crate) const DEPTH: usize = DEPTH;

    /// A ring for blocks of at most `bytes` bytes.
    pub(crate) fn new(device: &Device, bytes: usize) -> Result<Self, BufferError> {
        let buffers = (0..DEPTH)
            .map(|_| Ok(Staging { memory: Buffer::lent_memory(device, bytes)?, full: None }))
            .collect::<Result<_, BufferError>>()?;
        Ok(Self { buffers, bytes })
    }

    /// The largest block that fits.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Begins to bring a block's experts into the buffer of its number: all, or those of `used`. Returns the bytes that come from RAM.
    pub(crate) fn fill(
        &mut self,
        device: &Device,
        number: usize,
        block: &Brought<'_>,
        used: Option<&[Range<usize>]>,
        mut cache: Option<&mut Cache>,
    ) -> Result<u64, BufferError> {
        let buffer = &mut self.buffers[number % DEPTH];
        let mut from_ram = 0;
        for &(weight, offset) in &block.weights {
            if let Some(cache) = cache.as_deref_mut() {
                from_ram += cache.load_on_the_way(device, weight.data())?;
            }
            let cache = cache.as_deref();
            let target = Place { memory: &*buffer.memory, address: buffer.memory.base() + offset };
            from_ram += bring(device, weight, target, used, cache)?;
        }
        buffer.full = Some(device.driver().mark()?);
        Ok(from_ram)
    }

    /// Makes the inner stream wait for the buffer of a block, and the block's products read it. Returns a number that stands for it.
    pub(crate) fn open<'a>(
        &self,
        inner: &inner::Backend,
        number: usize,
        block: &Brought<'a>,
    ) -> Result<(Vec<Patch<'a>>, u64), BufferError> {
        let buffer = &self.buffers[number % DEPTH];
        if let Some(full) = &buffer.full {
            full.hold(inner)?;
        }
        let mut hasher = DefaultHasher::new();
        let mut patches = Vec::with_capacity(block.products.len());
        for product in &block.products {
            let offset = product.source(0).and_then(|weight| block.place(weight.key())).unwrap_or(0);
            let address = buffer.memory.base() + offset;
            patches.extend(Patch::new(*product, 0, address, buffer.memory.passport()));
            (product.key(), address).hash(&mut hasher);
        }
        Ok((patches, hasher.finish()))
    }
}

/// Where experts of a weight come from.
#[derive(Debug, Default, PartialEq, Eq)]
struct Sources {
    /// From the device, one by one.
    resident: Vec<usize>,
    /// From RAM: runs of neighbours, each one copy.
    missing: Vec<Range<usize>>,
}

/// Divides experts, given as runs in ascending order, by where they come from.
fn divide(wanted: &[Range<usize>], resident: impl Fn(usize) -> bool) -> Sources {
    let mut sources = Sources::default();
    for expert in wanted.iter().cloned().flatten() {
        if resident(expert) {
            sources.resident.push(expert);
            continue;
        }
        match sources.missing.last_mut() {
            Some(run) if run.end == expert => run.end += 1,
            _ => sources.missing.push(expert..expert + 1),
        }
    }
    sources
}

/// Brings experts of a weight to their places behind `target`: all of them, or the runs of `used`, in ascending order. What kernels read behind
/// the last expert is zero, and what they read behind a run is that of the next expert or zero. Returns the bytes that come from RAM.
pub(crate) fn bring(
    device: &Device,
    weight: Tensor<'_>,
    target: Place<'_>,
    used: Option<&[Range<usize>]>,
    cache: Option<&Cache>,
) -> Result<u64, BufferError> {
    let (experts, expert_bytes) = (usize::try_from(weight.ne()[2]).unwrap_or(0), weight.nb()[2]);
    let at = |expert: usize| Place { address: target.address + expert * expert_bytes, ..target };
    let all = [0..experts];
    let wanted = used.unwrap_or(&all);
    let located = cache.and_then(|cache| cache.locate(weight.data()));
    let find = |expert: usize| located.as_ref().and_then(|located| located.find(expert));
    let mut sources = divide(wanted, |expert| find(expert).is_some());
    let whole = weight.bytes();
    let padding = Place { address: target.address + whole, ..target };
    device.driver().fill(padding, 0, plain::slot_bytes(device, weight) - whole)?;
    for &expert in &sources.resident {
        let Some(source) = find(expert) else { continue };
        if !device.driver().copy(at(expert), source, expert_bytes)? {
            sources = divide(wanted, |_| false);
            break;
        }
    }
    let mut from_ram = 0;
    let mut bring = |start: usize, end: usize| {
        from_ram += (end - start) as u64;
        let place = Place { address: target.address + start, ..target };
        uploads::upload(device, place, weight.data() + start, end - start)
    };
    for run in &sources.missing {
        bring(run.start * expert_bytes, run.end * expert_bytes)?;
    }
    // Kernels read past the last row of an expert whose neighbour was not asked for.
    for end in wanted.iter().map(|run| run.end * expert_bytes).filter(|end| *end < whole) {
        bring(end, (end + plain::RUN_PADDING.min(expert_bytes)).min(whole))?;
    }
    Ok(from_ram)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_that_are_missing_are_one_copy() {
        let held = |expert: usize| [2, 3, 6].contains(&expert);
        assert_eq!(divide(&[0..8], held), Sources { resident: vec![2, 3, 6], missing: vec![0..2, 4..6, 7..8] });
        assert_eq!(divide(&[1..3, 5..6, 7..8], held), Sources { resident: vec![2], missing: vec![1..2, 5..6, 7..8] });
        assert_eq!(divide(&[0..4, 4..8], |_| false).missing, [0..8]);
        assert_eq!(divide(&[], held), Sources::default());
    }
}
