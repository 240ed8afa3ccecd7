//! What graphs touch in compute buffers whose memory comes and goes.
//!
//! Owns: the walk over a graph's tensors, and the question, before a graph runs, whether there is memory behind all of them.
//! Invariants: a graph is handed on only when there is. A graph that ran before, with nothing changed since, costs one comparison for each of its
//! buffers. Threads: the one that drives the backend. Does not: decide what comes and goes (`memory` does) or map it (`lent` does).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use super::{Backend, Planned, State};
use crate::abi::tensor::Tensor;
use crate::buffer::{BufferError, alloc_size};
use crate::device::Device;
use crate::experts::PlainPath;
use crate::graph::{KeySet, Plan, PlanKey, Ranges, Span, Step, walk};
use crate::lent::Lent;
use crate::purpose::Role;

/// What a graph touches in one buffer.
#[derive(Debug)]
pub(super) struct Touch {
    /// Gone with the buffer, whose plans are void then.
    lent: Weak<Lent>,
    /// Whole units.
    units: Ranges,
    /// The stamp at which the graph needed nothing; 0 before.
    ready: AtomicU64,
}

/// Alignment of what is put into a compute buffer.
const PLACE_ALIGNMENT: usize = 256;

/// The buffer behind a tensor; compared by identity.
struct In<'a>(&'a Arc<Lent>);

impl PartialEq for In<'_> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(self.0, other.0)
    }
}

/// What these nodes touch, with all that kernels may use behind each tensor, but for tensors whose data lie elsewhere.
pub(super) fn touches<'a>(nodes: &[Tensor<'a>], elsewhere: &KeySet) -> Vec<Touch> {
    let span = |tensor: Tensor<'a>| {
        if elsewhere.contains(&tensor.key()) {
            return None;
        }
        let buffer = tensor.our_buffer()?;
        let lent = buffer.lent().filter(|lent| lent.comes_and_goes())?; // not weights, nor a cache of keys and values
        let (base, end) = (lent.memory().base(), lent.memory().base() + lent.memory().bytes());
        let bytes = alloc_size(buffer.device(), Role::Default, tensor).max(tensor.bytes());
        let start = tensor.data().clamp(base, end) - base;
        let behind = tensor.data().saturating_add(bytes).clamp(base, end) - base;
        Some(Span { memory: In(lent), range: start..behind })
    };
    let sources = |tensor: Tensor<'a>| tensor.sources();
    let found = walk(nodes, |tensor| tensor.key(), sources, |tensor| tensor.viewed(), span);
    let touch = |(In(lent), ranges): (In<'a>, Ranges)| Touch {
        units: lent.units(&ranges),
        lent: Arc::downgrade(lent),
        ready: AtomicU64::new(0),
    };
    found.into_iter().map(touch).collect()
}

/// Takes a place of so many bytes for a graph among bytes that it may write over, in the memory of a tensor: where the graph touches most of it
/// anyway. Returns its address; `None` if no run is long enough, or if the memory does not come and go.
pub(super) fn reserve(touches: &mut [Touch], tensor: Tensor<'_>, free: &Ranges, bytes: usize) -> Option<usize> {
    let lent = tensor.our_buffer()?.lent()?;
    let touch = touches.iter_mut().find(|touch| std::ptr::eq(touch.lent.as_ptr(), Arc::as_ptr(lent)))?;
    let base = lent.memory().base();
    let own: Ranges = free.iter().map(|run| run.start.saturating_sub(base)..run.end.saturating_sub(base)).collect();
    let own = own.within(&Ranges::from(0..lent.memory().bytes()));
    let start = touch.units.best_place(&own, bytes, PLACE_ALIGNMENT)?;
    touch.units = touch.units.with(&lent.units(&Ranges::from(start..start + bytes)));
    Some(base + start)
}

/// Bytes of all of it.
pub(super) fn bytes(touches: &[Touch]) -> usize {
    touches.iter().map(|touch| touch.units.bytes()).sum()
}

/// Bytes of all of it that have no memory now.
pub(super) fn lacks(touches: &[Touch]) -> usize {
    touches.iter().filter_map(|touch| Some(touch.lent.upgrade()?.lacks(&touch.units))).sum()
}

/// Whether the host's own bytes in it are lost.
pub(super) fn has_lost(touches: &[Touch]) -> bool {
    touches.iter().filter_map(|touch| touch.lent.upgrade()).any(|lent| lent.has_lost())
}

/// The largest scratch that a step needs whose experts are copied. Blocks that the cache computes need none, but it does not in a long pass.
pub(super) fn scratch_bytes(device: &Device, nodes: &[Tensor<'_>], plan: &Plan, is_streamed: bool) -> usize {
    let bytes = plan.steps.iter().map(|step| match step {
        Step::Copied { products, .. } => bytes_of(device, nodes, products),
        Step::Cached { copied, .. } if is_streamed => bytes_of(device, nodes, copied),
        Step::Cached { .. } | Step::Streamed { .. } | Step::Segment(_) => 0,
    });
    bytes.max().unwrap_or(0)
}

fn bytes_of(device: &Device, nodes: &[Tensor<'_>], products: &[usize]) -> usize {
    PlainPath::scratch_bytes(device, &products.iter().map(|&product| nodes[product]).collect::<Vec<_>>())
}

impl Backend {
    /// Takes and gives what a graph needs beside the host's buffers, before it has the cache: what it takes then, the cache could not give.
    pub(super) fn make_ready(&self, state: &mut State, planned: &Planned) {
        let is_small = !planned.is_streamed && !planned.blocks.is_empty();
        let ring_is_idle = is_small && self.device.ring_is_idle();
        if ring_is_idle || is_small && state.plain.is_lent() {
            // No long pass came for a while: its memory goes back.
            self.inner.synchronize();
            let scratch = if state.plain.is_lent() { state.plain.release() } else { 0 };
            let ring = if ring_is_idle { self.device.drop_ring() } else { 0 };
            state.counters.returned_bytes += ring + scratch;
        }
        state.plain.reserve(self.device, &self.inner, planned.scratch_bytes, planned.is_streamed);
    }

    /// Brings memory behind all that a graph touches.
    pub(super) fn bring(&self, state: &mut State, key: PlanKey, touches: &[Touch]) -> Result<(), BufferError> {
        for touch in touches {
            let Some(lent) = touch.lent.upgrade() else { continue };
            if lent.is_unchanged(touch.ready.load(Ordering::Relaxed)) {
                continue;
            }
            let (moved, stamp) = lent.prepare((key.first, key.count), &touch.units, &|| self.inner.synchronize())?;
            touch.ready.store(stamp, Ordering::Relaxed);
            state.counters.lent_bytes += moved.came as u64;
            state.counters.returned_bytes += moved.went as u64;
        }
        Ok(())
    }
}
