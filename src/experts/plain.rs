//! The plain path: the experts that a graph uses are copied to a scratch on the inner device, then its nodes run unchanged.
//!
//! Owns: one scratch buffer per backend.
//! Invariants: experts keep their place within the tensor, so the host's ids stay valid; the bytes behind a copied run are
//! those of the next expert or zero, because device kernels read past the last row. The scratch is overwritten only after the
//! inner stream is idle, and so are the tensors freed that patched nodes read.
//! Threads: the one that drives the backend.
//! Does not: keep anything for the next graph, nor overlap copies with work. It is the path that is always right.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use super::ids::Ids;
use crate::abi::inner;
use crate::abi::tensor::{Patch, Retired, Tensor};
use crate::buffer::{Buffer, BufferError};
use crate::device::Device;
use crate::gpu::{self, Memory, Place};
use crate::graph::{IdsKey, TensorKey};
use crate::telemetry::Counters;

/// Elements of a row that device kernels may read behind the last one.
const ROW_PADDING: i64 = 512;
/// Bytes of the next expert that are copied behind a run.
pub(super) const RUN_PADDING: usize = 512;
/// Alignment of tensors in the scratch.
const ALIGNMENT: usize = 256;

/// Tensors that are kept before the stream is waited for.
const MOST_RETIRED: usize = 1 << 16;

/// Expert products could not be prepared.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PlainError {
    /// No memory for the copies.
    #[error(transparent)]
    Buffer(#[from] BufferError),
    /// The router named an expert that does not exist.
    #[error("expert {id} of {experts} was asked for by \"{node}\": the model or its routing is broken")]
    BadId { node: String, id: i64, experts: usize },
    /// An operand is missing or not where it must be.
    #[error("\"{0}\" has an operand that this plugin cannot reach")]
    Operand(String),
}

/// Products that are ready to run: their nodes read the scratch until this is dropped.
pub(crate) struct Prepared<'a> {
    // Restores the nodes when dropped.
    patches: Vec<Patch<'a>>,
    /// Stands for what was patched: equal numbers, equal nodes.
    pub(crate) variant: u64,
}

/// The plain path of one backend.
#[derive(Debug, Default)]
pub(crate) struct PlainPath {
    scratch: Option<Box<dyn Memory>>,
    /// Whether the scratch goes back after a long pass.
    lent: bool,
    // What the inner stream may still look at.
    retired: Vec<Retired>,
}

/// What is known of the ids of the products while they are prepared.
struct UsedExperts {
    key: IdsKey,
    experts: usize,
    runs: Vec<Range<usize>>,
}

impl PlainPath {
    /// Copies the experts that these products use to the scratch and makes the products read them there.
    ///
    /// Waits for the inner stream: the ids must have been computed, and nobody may still read the scratch.
    pub(crate) fn prepare<'a>(
        &mut self,
        device: &Device,
        backend: &inner::Backend,
        products: &[Tensor<'a>],
        counters: &mut Counters,
    ) -> Result<Prepared<'a>, PlainError> {
        backend.synchronize();
        self.retired.clear();
        let mut used: Vec<UsedExperts> = Vec::new();
        let mut placed: Vec<(TensorKey, usize)> = Vec::new();
        let mut end = 0;
        for product in products {
            let (weight, ids) = operands(*product)?;
            let experts = experts(weight);
            if !used.iter().any(|known| known.key == ids.ids_key() && known.experts == experts) {
                used.push(UsedExperts { key: ids.ids_key(), experts, runs: read_runs(*product, ids, experts)? });
            }
            if !placed.iter().any(|(key, _)| *key == weight.key()) {
                placed.push((weight.key(), end));
                end = (end + slot_bytes(device, weight)).next_multiple_of(ALIGNMENT);
            }
        }
        let scratch = self.scratch(device, end)?;
        let mut hasher = DefaultHasher::new();
        let mut patches = Vec::with_capacity(products.len());
        let mut copied: Vec<(TensorKey, IdsKey)> = Vec::with_capacity(products.len());
        for product in products {
            let (weight, ids) = operands(*product)?;
            let offset = placed.iter().find(|(key, _)| *key == weight.key()).map_or(0, |(_, offset)| *offset);
            let address = scratch.base() + offset;
            if !copied.contains(&(weight.key(), ids.ids_key())) {
                copied.push((weight.key(), ids.ids_key()));
                let known = used.iter().find(|known| known.key == ids.ids_key() && known.experts == experts(weight));
                let runs = known.map_or(&[][..], |known| &known.runs);
                counters.expert_bytes += copy_runs(device, *product, weight, scratch, address, runs)?;
            }
            let patch = Patch::new(*product, 0, address, scratch.passport());
            patches.push(patch.ok_or_else(|| PlainError::Operand(product.name()))?);
            (product.key(), address, weight.nb(), ids.key()).hash(&mut hasher);
        }
        counters.plain_nodes += products.len() as u64;
        Ok(Prepared { patches, variant: hasher.finish() })
    }

    /// The products were handed to the inner stream: their nodes are restored, and what these read is kept until the stream is idle.
    pub(crate) fn retire(&mut self, prepared: Prepared<'_>) {
        self.retired.extend(prepared.patches.into_iter().filter_map(Patch::retire));
    }

    /// Whether so much is kept that the stream should be waited for: a host waits for each token, but it need not.
    pub(crate) fn is_crowded(&self) -> bool {
        self.retired.len() > MOST_RETIRED
    }

    /// The stream is idle.
    pub(crate) fn forget_retired(&mut self) {
        self.retired.clear();
    }

    /// What nodes read that were handed on by another path is kept until the stream is idle, too.
    pub(crate) fn retire_patches(&mut self, retired: impl Iterator<Item = Retired>) {
        self.retired.extend(retired);
    }

    /// What the inner stream may still look at, for another path that adds to it.
    pub(crate) fn take_retired(&mut self) -> Vec<Retired> {
        std::mem::take(&mut self.retired)
    }

    /// Gives it back.
    pub(crate) fn keep_retired(&mut self, retired: Vec<Retired>) {
        self.retired = retired;
    }

    /// Takes memory for a scratch of `bytes` bytes while the cache can still give it: it cannot while a graph has it. `lent` says that it goes back
    /// after a long pass. A failure shows when the scratch is used.
    pub(crate) fn reserve(&mut self, device: &Device, backend: &inner::Backend, bytes: usize, lent: bool) {
        if bytes == 0 || self.scratch.as_ref().is_some_and(|scratch| scratch.bytes() >= bytes) {
            return;
        }
        if self.scratch.is_some() {
            backend.synchronize();
            self.scratch = None;
        }
        let memory = if lent { Buffer::lent_memory(device, bytes) } else { Buffer::device_memory(device, bytes) };
        (self.scratch, self.lent) = (memory.ok(), lent);
    }

    /// Bytes of a scratch for these products.
    pub(crate) fn scratch_bytes(device: &Device, products: &[Tensor<'_>]) -> usize {
        let mut known: Vec<TensorKey> = Vec::new();
        products.iter().filter_map(|product| product.source(0)).fold(0, |end, weight| {
            if known.contains(&weight.key()) {
                return end;
            }
            known.push(weight.key());
            (end + slot_bytes(device, weight)).next_multiple_of(ALIGNMENT)
        })
    }

    /// Whether the scratch was taken for a long pass.
    pub(crate) fn is_lent(&self) -> bool {
        self.lent
    }

    /// Gives the scratch back, of which nobody reads any more; returns its bytes.
    pub(crate) fn release(&mut self) -> u64 {
        self.lent = false;
        self.scratch.take().map_or(0, |scratch| scratch.bytes() as u64)
    }

    /// The scratch, grown to at least `bytes`.
    fn scratch(&mut self, device: &Device, bytes: usize) -> Result<&dyn Memory, BufferError> {
        let old = self.scratch.take().filter(|scratch| scratch.bytes() >= bytes);
        let scratch = match old {
            Some(scratch) => scratch,
            // The old one is freed first: both may not fit.
            None => Buffer::device_memory(device, bytes.max(ALIGNMENT))?,
        };
        Ok(&**self.scratch.insert(scratch))
    }
}

fn operands<'a>(product: Tensor<'a>) -> Result<(Tensor<'a>, Tensor<'a>), PlainError> {
    product.source(0).zip(product.source(2)).ok_or_else(|| PlainError::Operand(product.name()))
}

fn experts(weight: Tensor<'_>) -> usize {
    usize::try_from(weight.ne()[2]).unwrap_or(0)
}

/// Bytes of a weight in the scratch, the padding that kernels read included.
pub(super) fn slot_bytes(device: &Device, weight: Tensor<'_>) -> usize {
    let padded = device.inner_buffer_type.alloc_size(weight).max(weight.bytes());
    padded + row_padding(weight)
}

fn row_padding(weight: Tensor<'_>) -> usize {
    let host = crate::abi::host();
    if host.is_quantized(weight.type_()) { host.row_size(weight.type_(), ROW_PADDING) } else { RUN_PADDING }
}

fn read_runs(product: Tensor<'_>, ids: Tensor<'_>, experts: usize) -> Result<Vec<Range<usize>>, PlainError> {
    let bytes = crate::abi::slots::buffer::download(ids).ok_or_else(|| PlainError::Operand(product.name()))?;
    let extent = |dimension: usize| usize::try_from(ids.ne()[dimension]).unwrap_or(0);
    let view =
        Ids { bytes: &bytes, used: extent(0), tokens: extent(1), id_stride: ids.nb()[0], token_stride: ids.nb()[1] };
    view.runs(experts).map_err(|bad| PlainError::BadId { node: product.name(), id: bad.id, experts })
}

/// Whether the rows of one expert lie between those of another, as in a permuted view: then no run of bytes is one expert.
pub(super) fn interleaves(weight: Tensor<'_>) -> bool {
    let ([row, rows, ..], [_, row_bytes, expert_bytes, _]) = (weight.ne(), weight.nb());
    let rows_before_the_last = usize::try_from(rows - 1).unwrap_or(0);
    expert_bytes < rows_before_the_last * row_bytes + crate::abi::host().row_size(weight.type_(), row)
}

/// Copies runs of experts from host memory to their place in the scratch; returns the bytes copied.
fn copy_runs(
    device: &Device,
    product: Tensor<'_>,
    weight: Tensor<'_>,
    scratch: &dyn Memory,
    address: usize,
    runs: &[Range<usize>],
) -> Result<u64, PlainError> {
    let unreachable = || PlainError::Operand(product.name());
    let memory = weight.our_buffer().and_then(Buffer::host).ok_or_else(unreachable)?;
    let expert_bytes = weight.nb()[2];
    let whole = weight.bytes();
    let spans: Vec<Range<usize>> = if interleaves(weight) {
        runs.iter().take(1).map(|_| 0..whole).collect()
    } else {
        let end = |run: &Range<usize>| (run.end * expert_bytes + RUN_PADDING.min(expert_bytes)).min(whole);
        runs.iter().map(|run| run.start * expert_bytes..end(run)).collect()
    };
    let mut copies = Vec::with_capacity(spans.len());
    for span in spans {
        let range = memory.range(weight.data() + span.start, span.len()).ok_or_else(unreachable)?;
        copies.push((Place { memory: scratch, address: address + span.start }, range));
    }
    // Another tensor may have lain here: what kernels read behind the last row must decode to zero.
    let padding = Place { memory: scratch, address: address + whole };
    device.driver().fill(padding, 0, slot_bytes(device, weight) - whole).map_err(BufferError::from)?;
    gpu::upload_ranges(device.driver(), &copies).map_err(BufferError::from)?;
    Ok(copies.iter().map(|(_, range)| range.bytes() as u64).sum())
}
