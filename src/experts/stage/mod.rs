//! Staging for long passes: the experts of blocks are brought to the device as a whole, behind the work on what comes before.
//!
//! Owns: the ring of buffers, each as large as the experts of the largest block or of the largest weight (`unit`), the cut of a block into parts
//! where it is the weight, and the copies that fill a buffer (`bring`): experts that the cache holds come from its arena, the others from RAM.
//! Invariants: a buffer is written when the stream has passed the part that read it last (`fill` is called behind it); a part runs when its
//! buffer is full (`open`). Experts keep their place within the tensor, so the host's ids stay valid and nobody reads them. Parts are runs of the
//! host's nodes, in order, each node in one.
//! Threads: the one that drives the backend. Does not: choose which passes are long (`backend` does).

mod bring;
pub(crate) mod unit;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use super::cache::Cache;
use super::plain;
use crate::abi::inner;
use crate::abi::tensor::{Patch, Tensor};
use crate::buffer::{Buffer, BufferError};
use crate::device::Device;
use crate::gpu::{Mark, Memory, Place};
use crate::graph::TensorKey;

pub(crate) use bring::Moved;
pub(crate) use unit::{Needs, Shape, Unit, reason, shapes};

/// Alignment of tensors in a buffer.
const ALIGNMENT: usize = 256;

/// The ring of one device.
#[derive(Debug)]
pub(crate) struct Ring {
    buffers: Vec<Staging>,
    shape: Shape,
}

#[derive(Debug)]
struct Staging {
    memory: Box<dyn Memory>,
    full: Option<Box<dyn Mark>>,
    /// The bytes behind weights that are zero: where they begin, and how many.
    zeros: Vec<(usize, usize)>,
}

/// A part of a block, and the experts that are brought for it.
#[derive(Debug)]
pub(crate) struct Brought<'a> {
    /// The block, in the order of the graph, and the part of it.
    pub(crate) block: usize,
    pub(crate) part: usize,
    /// The host's nodes that run when the experts are there.
    pub(crate) range: Range<usize>,
    products: Vec<Tensor<'a>>,
    /// Its distinct weights, and where in a buffer each lies.
    weights: Vec<(Tensor<'a>, usize)>,
    bytes: usize,
}

impl<'a> Brought<'a> {
    /// `None` if a weight does not lie in RAM as whole experts.
    fn new(
        device: &Device,
        (block, part): (usize, usize),
        range: Range<usize>,
        products: Vec<Tensor<'a>>,
    ) -> Option<Self> {
        let (mut weights, mut bytes) = (Vec::<(Tensor<'_>, usize)>::new(), 0);
        for product in &products {
            let weight = product.source(0).filter(|_| may_bring(*product))?;
            if weights.iter().all(|(known, _)| known.key() != weight.key()) {
                weights.push((weight, bytes));
                bytes = (bytes + plain::slot_bytes(device, weight)).next_multiple_of(ALIGNMENT);
            }
        }
        Some(Self { block, part, range, products, weights, bytes })
    }

    fn place(&self, weight: TensorKey) -> Option<usize> {
        self.weights.iter().find(|(known, _)| known.key() == weight).map(|(_, offset)| *offset)
    }
}

/// Whether a product's weight lies in RAM as whole experts.
pub(crate) fn may_bring(product: Tensor<'_>) -> bool {
    let in_ram = |weight: &Tensor<'_>| weight.our_buffer().is_some_and(|buffer| buffer.host().is_some());
    product.source(0).filter(in_ram).is_some_and(|weight| !plain::interleaves(weight) && weight.is_contiguous())
}

/// What a pass brings, in order: `blocks` are its blocks' nodes and products. `None` if a weight does not lie in RAM as whole experts.
pub(crate) fn brought<'a>(
    device: &Device,
    nodes: &[Tensor<'a>],
    blocks: &[(Range<usize>, &[usize])],
    unit: Unit,
) -> Option<Vec<Brought<'a>>> {
    let mut all = Vec::new();
    for (number, (range, products)) in blocks.iter().enumerate() {
        let parts = match unit {
            Unit::Layer => vec![(range.clone(), products.to_vec())],
            Unit::Tensor => {
                let weights = products.iter().map(|&index| Some((index, nodes[index].source(0)?.key())));
                parts(range.clone(), &weights.collect::<Option<Vec<_>>>()?)
            }
        };
        for (part, (range, products)) in parts.into_iter().enumerate() {
            let products = products.into_iter().map(|index| nodes[index]).collect();
            all.push(Brought::new(device, (number, part), range, products)?);
        }
    }
    Some(all)
}

/// The sizes of what a pass brings.
pub(crate) fn needs(device: &Device, nodes: &[Tensor<'_>], blocks: &[(Range<usize>, &[usize])]) -> Option<Needs> {
    let largest = |unit| {
        brought(device, nodes, blocks, unit)?.iter().map(|brought| brought.bytes).max().filter(|bytes| *bytes > 0)
    };
    Some(Needs { layer: largest(Unit::Layer)?, tensor: largest(Unit::Tensor)? })
}

/// Cuts a block's nodes in front of each product that reads another weight than the one before. `products` are node and weight, in order.
fn parts<K: PartialEq>(range: Range<usize>, products: &[(usize, K)]) -> Vec<(Range<usize>, Vec<usize>)> {
    let mut parts: Vec<(Range<usize>, Vec<usize>)> = Vec::new();
    let mut before: Option<&K> = None;
    for (index, weight) in products {
        match parts.last_mut() {
            Some((_, products)) if before == Some(weight) => products.push(*index),
            last => {
                let start = last.map_or(range.start, |(part, _)| {
                    part.end = *index;
                    *index
                });
                parts.push((start..range.end, vec![*index]));
            }
        }
        before = Some(weight);
    }
    parts
}

impl Ring {
    /// A ring of this shape.
    pub(crate) fn new(device: &Device, shape: Shape) -> Result<Self, BufferError> {
        let buffer =
            |_| Ok(Staging { memory: Buffer::lent_memory(device, shape.bytes)?, full: None, zeros: Vec::new() });
        Ok(Self { buffers: (0..shape.buffers).map(buffer).collect::<Result<_, BufferError>>()?, shape })
    }

    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    /// How many parts' experts may be on their way at once.
    pub(crate) fn depth(&self) -> usize {
        self.buffers.len()
    }

    /// Begins to bring a part's experts into the buffer of its number: all, or those of `used`, runs in ascending order.
    pub(crate) fn fill(
        &mut self,
        device: &Device,
        number: usize,
        part: &Brought<'_>,
        used: Option<&[Range<usize>]>,
        cache: Option<&mut Cache>,
    ) -> Result<Moved, BufferError> {
        let depth = self.depth();
        let buffer = &mut self.buffers[number % depth];
        let at = |offset: usize| Place { memory: &*buffer.memory, address: buffer.memory.base() + offset };
        let pad = |&(weight, offset): &(Tensor<'_>, usize)| {
            (offset + weight.bytes(), plain::slot_bytes(device, weight) - weight.bytes())
        };
        let zeros: Vec<(usize, usize)> = part.weights.iter().map(pad).collect();
        if buffer.zeros != zeros {
            for &(offset, bytes) in &zeros {
                device.driver().fill(at(offset), 0, bytes)?;
            }
        }
        let weights: Vec<(Tensor<'_>, Place<'_>)> =
            part.weights.iter().map(|&(weight, offset)| (weight, at(offset))).collect();
        let moved = bring::bring(device, &weights, used, cache)?;
        buffer.zeros = zeros;
        buffer.full = Some(device.driver().mark()?);
        Ok(moved)
    }

    /// Makes the inner stream wait for the buffer of a part, and the part's products read it. Returns a number that stands for it.
    pub(crate) fn open<'a>(
        &self,
        inner: &inner::Backend,
        number: usize,
        part: &Brought<'a>,
    ) -> Result<(Vec<Patch<'a>>, u64), BufferError> {
        let buffer = &self.buffers[number % self.depth()];
        if let Some(full) = &buffer.full {
            full.hold(inner)?;
        }
        let mut hasher = DefaultHasher::new();
        let mut patches = Vec::with_capacity(part.products.len());
        for product in &part.products {
            let offset = product.source(0).and_then(|weight| part.place(weight.key())).unwrap_or(0);
            let address = buffer.memory.base() + offset;
            patches.extend(Patch::new(*product, 0, address, buffer.memory.passport()));
            (product.key(), address).hash(&mut hasher);
        }
        Ok((patches, hasher.finish()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_block_is_cut_in_front_of_each_new_weight() {
        assert_eq!(
            parts(3..20, &[(5, 'g'), (6, 'u'), (12, 'd')]),
            [(3..6, vec![5]), (6..12, vec![6]), (12..20, vec![12])]
        );
        assert_eq!(parts(0..9, &[(1, 'a'), (2, 'a'), (7, 'b')]), [(0..7, vec![1, 2]), (7..9, vec![7])]);
        assert_eq!(parts(0..9, &[(1, 'a'), (2, 'b'), (7, 'a')]).len(), 3, "a weight comes again when it is read again");
        assert_eq!(parts(4..6, &[(4, 'a')]), [(4..6, vec![4])]);
    }

    proptest! {
        /// Every node is in one part, in order, and every product in the part of its weight.
        #[test]
        fn each_node_runs_once(gaps in proptest::collection::vec((0_usize..5, 0_u8..3), 1..8), before in 0_usize..5, behind in 0_usize..5) {
            let start = 7;
            let mut at = start + before;
            let mut products = Vec::new();
            for (gap, weight) in gaps {
                products.push((at, weight));
                at += gap + 1;
            }
            let range = start..at + behind;
            let parts = parts(range.clone(), &products);
            prop_assert_eq!(parts.iter().flat_map(|(part, _)| part.clone()).collect::<Vec<_>>(), range.collect::<Vec<_>>());
            let listed: Vec<usize> = parts.iter().flat_map(|(_, products)| products.clone()).collect();
            prop_assert_eq!(listed, products.iter().map(|(index, _)| *index).collect::<Vec<_>>());
            for (part, inside) in &parts {
                let weights: Vec<u8> = products.iter().filter(|(index, _)| inside.contains(index)).map(|(_, weight)| *weight).collect();
                prop_assert!(!part.is_empty() && inside.iter().all(|index| part.contains(index)));
                prop_assert!(weights.windows(2).all(|pair| pair[0] == pair[1]));
            }
        }
    }
}
