//! Long passes: graphs of so many tokens that each block uses nearly all of its experts.
//!
//! Owns: the order of copies and work of such a graph. While the device computes a part, the experts of the next are on their way; the host waits
//! for nothing.
//! Invariants: as those of the backend; the ring and the cache are back in their device when a graph ends. A part is a whole block, or the nodes
//! behind one of its products, as the ring holds layers or single tensors.
//! Threads: the one that drives the backend. Another backend of the device finds no ring meanwhile and takes the plain path.
//! Does not: copy (`experts::stage` does).

use std::ops::Range;

use super::sliced::{SlicedPass, Slices};
use super::watch::Watch;
use super::{Backend, BackendError, Planned, State};
use crate::abi::graph::Graph;
use crate::abi::inner::Status;
use crate::abi::tensor::{Patch, Tensor};
use crate::buffer::BufferError;
use crate::experts::cache::Cache;
use crate::experts::stage::{self, Brought, Ring, Unit};
use crate::gpu::Point;
use crate::graph::Step;
use crate::telemetry::log;

/// The nodes and products of a block.
pub(super) type Block<'s> = (Range<usize>, &'s [usize]);

/// The staging of one pass.
pub(super) struct Pass<'p, 'a> {
    /// Of each step, whether its experts are brought.
    pub(super) is_brought: Vec<bool>,
    pub(super) ring: &'p mut Ring,
    pub(super) parts: &'p [Brought<'a>],
    pub(super) cache: Option<&'p mut Cache>,
    pub(super) watch: Option<Watch>,
    /// How blocks run in slices.
    pub(super) slices: Option<&'p SlicedPass>,
}

impl Backend {
    /// Runs a graph with blocks whose experts are brought, as a whole or those that they use; `None` if there is no memory for it now.
    pub(super) fn run_streamed(
        &self,
        state: &mut State,
        graph: Graph<'_>,
        nodes: &[Tensor<'_>],
        planned: &Planned,
        (fetch, sliced): (bool, Option<Slices<'_>>),
    ) -> Option<Result<Status, BackendError>> {
        let steps: Vec<Option<Block<'_>>> = planned.plan.steps.iter().map(|step| brought(nodes, step)).collect();
        let is_brought = steps.iter().map(Option::is_some).collect();
        let blocks: Vec<Block<'_>> = steps.into_iter().flatten().collect();
        let had = self.device.has_ring();
        let needs = stage::needs(self.device, nodes, &blocks)?;
        let mut ring = self.device.take_ring(needs)?;
        // A slice needs all experts of its block.
        let slices = sliced.as_ref().filter(|_| ring.shape().unit == Unit::Layer);
        if slices.is_none() && sliced.is_some() {
            // What all tokens take comes first, and the ring gets what is left, as if slices had not been thought of.
            self.inner.synchronize();
            self.device.put_ring(ring);
            self.device.drop_ring();
            if let Err(error) = self.bring_rest(state, graph.key(), planned) {
                return Some(Err(error.into()));
            }
            ring = self.device.take_ring(needs)?;
        }
        let Some(parts) = stage::brought(self.device, nodes, &blocks, ring.shape().unit) else {
            self.device.put_ring(ring);
            return None;
        };
        if !had {
            state.counters.lent_bytes += (ring.depth() * ring.shape().bytes) as u64;
        }
        let mut cache = if planned.all.is_empty() { None } else { self.take_cache_for(nodes, &planned.all) };
        if let Some(cache) = &mut cache {
            self.device.fill_cache(cache);
        }
        let tokens =
            blocks.first().and_then(|(_, products)| nodes[*products.first()?].source(2)).map(|ids| ids.ne()[1]);
        let tokens = tokens.and_then(|tokens| u64::try_from(tokens).ok()).unwrap_or(0);
        let watch = Watch::new(self.device, ring.shape(), &parts, tokens);
        let slices = slices.map(|slices| self.tell_slices(slices));
        let mut pass = Pass { is_brought, ring: &mut ring, parts: &parts, cache: cache.as_mut(), watch, slices };
        let outcome = if fetch {
            self.run_fetched(state, graph, nodes, planned, &mut pass)
        } else {
            self.run_brought(state, graph, nodes, planned, &mut pass)
        };
        let good = matches!(outcome, Ok(Status::SUCCESS));
        if let Some(watch) = pass.watch.filter(|_| good) {
            state.watches.keep(watch);
        }
        if !good || self.device.has_several_backends() || !self.device.driver().waits_for_uses() {
            self.inner.synchronize();
        }
        if let Some(cache) = cache {
            if good {
                self.device.put_cache(Some(cache));
            } else {
                log::notice(&format!("{}: the cache is dropped: a graph failed", self.device.label()));
                drop(cache);
                self.device.postpone_cache();
                self.device.put_cache(None);
            }
        }
        self.device.put_ring(ring);
        Some(outcome)
    }

    fn run_brought<'a>(
        &self,
        state: &mut State,
        graph: Graph<'a>,
        nodes: &[Tensor<'a>],
        planned: &Planned,
        pass: &mut Pass<'_, 'a>,
    ) -> Result<Status, BackendError> {
        if let Some(cache) = pass.cache.as_deref_mut() {
            cache.begin_pass();
        }
        let depth = pass.ring.depth();
        // What was queued before may still read the ring.
        let mut read = self.device.driver().point(&self.inner).map_err(BufferError::from)?;
        for number in 0..depth {
            self.fill(state, pass, (number, &read), None)?;
        }
        let (mut number, mut block, mut done) = (0, 0, 0);
        for (index, step) in planned.plan.steps.iter().enumerate() {
            if !pass.is_brought[index] {
                // What is behind a block may have run with it.
                let rest;
                let step = match step {
                    Step::Segment(range) if range.end <= done => continue,
                    Step::Segment(range) if range.start < done => {
                        rest = Step::Segment(done..range.end);
                        &rest
                    }
                    step => step,
                };
                if let Some(watch) = &mut pass.watch {
                    watch.compute_begins(&self.inner).map_err(BufferError::from)?;
                }
                let status = self.run_step(state, graph, nodes, step)?;
                if status != Status::SUCCESS {
                    return Ok(status);
                }
                if let Some(watch) = &mut pass.watch {
                    watch.compute_ends(&self.inner, None).map_err(BufferError::from)?;
                }
                continue;
            }
            if let (Some(cache), Some((_, products))) = (pass.cache.as_deref_mut(), brought(nodes, step))
                && let Some(&product) = products.last()
            {
                cache.read_tail(self.device, &self.inner, nodes[product]);
            }
            while pass.parts.get(number).is_some_and(|part| part.block == block) {
                let status = match pass.slices.and_then(|slices| slices.block(index)) {
                    Some(block) => {
                        done = block.end();
                        self.run_sliced(state, graph, nodes, pass, (number, block))?
                    }
                    None => self.run_part(state, graph, nodes, pass, number)?,
                };
                if status != Status::SUCCESS {
                    return Ok(status);
                }
                // The next part is handed on before anything is brought for the one that comes after it, because copies may fill the queue
                // of the device's driver, and the host then waits for them.
                if let Some(next) = number.checked_sub(1) {
                    self.fill(state, pass, (next + depth, &read), None)?;
                }
                read = self.device.driver().point(&self.inner).map_err(BufferError::from)?;
                number += 1;
            }
            state.counters.streamed_blocks += 1;
            block += 1;
        }
        if let Some(cache) = pass.cache.as_deref_mut() {
            state.counters.upload_bytes += cache.end_pass(self.device)?;
        }
        Ok(Status::SUCCESS)
    }

    /// Begins to bring the experts of a part, if there is one of this number, when the device has come to a point, behind whoever read the buffer
    /// last: all, or those of `used`.
    pub(super) fn fill(
        &self,
        state: &mut State,
        pass: &mut Pass<'_, '_>,
        (number, read): (usize, &Point),
        used: Option<&[Range<usize>]>,
    ) -> Result<(), BufferError> {
        let Some(part) = pass.parts.get(number) else { return Ok(()) };
        self.device.driver().follow(read)?;
        if let Some(watch) = &mut pass.watch {
            watch.copy_begins()?;
        }
        let moved = pass.ring.fill(self.device, number, part, used, pass.cache.as_deref_mut())?;
        if let Some(watch) = &mut pass.watch {
            watch.copy_ends(part, moved)?;
        }
        state.counters.expert_bytes += moved.ram;
        Ok(())
    }

    /// Hands a part on, behind its experts.
    pub(super) fn run_part<'a>(
        &self,
        state: &mut State,
        graph: Graph<'a>,
        nodes: &[Tensor<'a>],
        pass: &mut Pass<'_, 'a>,
        number: usize,
    ) -> Result<Status, BackendError> {
        let part = &pass.parts[number];
        let (patches, variant) = pass.ring.open(&self.inner, number, part)?;
        if let Some(watch) = &mut pass.watch {
            watch.compute_begins(&self.inner).map_err(BufferError::from)?;
        }
        let range = part.range.clone();
        let uid = super::part_uid(graph.uid(), nodes, &range, variant);
        let mut view = graph.part(nodes, range.clone(), uid)?;
        state.counters.segments += 1;
        self.note_run(&mut state.counters, &mut state.replays, nodes[range.start], uid);
        let status = self.inner.compute(&mut view);
        state.plain.retire_patches(patches.into_iter().filter_map(Patch::retire));
        if let Some(watch) = &mut pass.watch {
            watch.compute_ends(&self.inner, Some(part)).map_err(BufferError::from)?;
        }
        Ok(status)
    }
}

/// The nodes and products of a block whose experts are brought. Those of few tokens are, too, if they would be copied otherwise: that needs memory of
/// its own and a wait for the ids.
pub(super) fn brought<'s>(nodes: &[Tensor<'_>], step: &'s Step) -> Option<Block<'s>> {
    let few = |products: &[usize]| {
        let may = |&product: &usize| !nodes[product].is_empty() && stage::may_bring(nodes[product]);
        !products.is_empty() && products.iter().all(may)
    };
    match step {
        Step::Streamed { range, products, .. } => Some((range.clone(), products)),
        Step::Cached { range, products, copied } if !copied.is_empty() && few(products) => {
            Some((range.clone(), products))
        }
        Step::Copied { range, products } if few(products) => Some((range.clone(), products)),
        Step::Segment(_) | Step::Copied { .. } | Step::Cached { .. } => None,
    }
}
