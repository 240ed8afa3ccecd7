//! Long passes: graphs of so many tokens that each block uses nearly all of its experts.
//!
//! Owns: the order of copies and work of such a graph. While the device computes a block, the experts of the next are on their way; the host waits
//! for nothing.
//! Invariants: as those of the backend; the ring and the cache are back in their device when a graph ends.
//! Threads: the one that drives the backend. Another backend of the device finds no ring meanwhile and takes the plain path.
//! Does not: copy (`experts::stage` does).

use super::{Backend, BackendError, Planned, State};
use crate::abi::graph::Graph;
use crate::abi::inner::Status;
use crate::abi::tensor::{Patch, Tensor};
use crate::buffer::BufferError;
use crate::experts::cache::Cache;
use crate::experts::stage::{Brought, Ring};
use crate::graph::Step;
use crate::telemetry::log;

impl Backend {
    /// Runs a graph with blocks whose experts are brought as a whole; `None` if there is no memory for it now.
    pub(super) fn run_streamed(
        &self,
        state: &mut State,
        graph: Graph<'_>,
        nodes: &[Tensor<'_>],
        planned: &Planned,
    ) -> Option<Result<Status, BackendError>> {
        let blocks = planned.plan.steps.iter().filter_map(|step| match step {
            Step::Streamed { products, .. } => {
                Some(Brought::new(self.device, products.iter().map(|&index| nodes[index]).collect()))
            }
            Step::Segment(_) | Step::Copied { .. } | Step::Cached { .. } => None,
        });
        let blocks: Vec<Brought<'_>> = blocks.collect::<Option<_>>()?;
        let bytes = blocks.iter().map(Brought::bytes).max()?;
        let had = self.device.has_ring();
        let mut ring = self.device.take_ring(bytes)?;
        if !had {
            state.counters.lent_bytes += (Ring::DEPTH * ring.bytes()) as u64;
        }
        let mut cache = if planned.all.is_empty() { None } else { self.take_cache_for(nodes, &planned.all) };
        let outcome = self.run_brought(state, graph, nodes, planned, (&mut ring, &blocks, cache.as_mut()));
        let good = matches!(outcome, Ok(Status::SUCCESS));
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
        (ring, blocks, mut cache): (&mut Ring, &[Brought<'a>], Option<&mut Cache>),
    ) -> Result<Status, BackendError> {
        if let Some(cache) = cache.as_deref_mut() {
            cache.begin_pass();
        }
        // What was queued before may still read the ring.
        self.device.driver().follow(&self.inner).map_err(BufferError::from)?;
        for (number, block) in blocks.iter().enumerate().take(Ring::DEPTH) {
            state.counters.expert_bytes += ring.fill(self.device, number, block, cache.as_deref_mut())?;
        }
        let mut number = 0;
        for step in &planned.plan.steps {
            if !matches!(step, Step::Streamed { .. }) {
                let status = self.run_step(state, graph, nodes, step)?;
                if status != Status::SUCCESS {
                    return Ok(status);
                }
                continue;
            }
            let (patches, variant) = ring.open(&self.inner, number, &blocks[number])?;
            let range = step.range();
            let uid = super::part_uid(graph.uid(), nodes, &range, variant);
            let mut part = graph.part(nodes, range.clone(), uid)?;
            state.counters.segments += 1;
            state.counters.streamed_blocks += 1;
            self.note_run(&mut state.counters, &mut state.replays, nodes[range.start], uid);
            let status = self.inner.compute(&mut part);
            state.plain.retire_patches(patches.into_iter().filter_map(Patch::retire));
            if status != Status::SUCCESS {
                return Ok(status);
            }
            if let Some(next) = blocks.get(number + Ring::DEPTH) {
                self.device.driver().follow(&self.inner).map_err(BufferError::from)?;
                state.counters.expert_bytes +=
                    ring.fill(self.device, number + Ring::DEPTH, next, cache.as_deref_mut())?;
            }
            number += 1;
        }
        if let Some(cache) = cache {
            state.counters.upload_bytes += cache.end_pass(self.device)?;
        }
        Ok(Status::SUCCESS)
    }
}
