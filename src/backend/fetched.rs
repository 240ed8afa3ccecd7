//! Passes of more than 8 tokens: which way each goes to its experts, and the two ways of the shorter ones.
//!
//! Owns: the question to the cost model, and the order of copies and work where a block's ids are waited for: the experts that it uses come to
//! the ring, and the host's own nodes run over them as in a long pass.
//! Invariants: as those of the backend; a pass goes one way with all of its blocks.
//! Threads: the one that drives the backend. Does not: copy (`experts::stage` does), compute in RAM (`experts::cache` does) or know what is
//! cheaper (`experts::cost` does).

use std::time::Instant;

use super::sliced::Slices;
use super::streamed::{self, Pass};
use super::{Backend, BackendError, Planned, State};
use crate::abi::graph::Graph;
use crate::abi::inner::Status;
use crate::abi::tensor::Tensor;
use crate::buffer::BufferError;
use crate::experts::cache::{self, Candidate};
use crate::experts::cost::{Layer, Way};
use crate::experts::readback;
use crate::graph::{Plan, Step};

/// What the cost model is asked about a pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Middle {
    /// Of its largest block.
    tokens: u32,
    layer: Layer,
    /// The cache could compute each of its blocks.
    suits_cache: bool,
}

impl Middle {
    /// `None` if no block's experts may be brought.
    pub(super) fn new(nodes: &[Tensor<'_>], plan: &Plan, all: &[Candidate]) -> Option<Self> {
        let is_block = |step: &&Step| matches!(step, Step::Streamed { .. } | Step::Cached { .. });
        let brought = plan.steps.iter().filter_map(|step| match step {
            Step::Streamed { products, .. } => Some(products.as_slice()),
            Step::Segment(_) | Step::Copied { .. } | Step::Cached { .. } => None,
        });
        let narrow = |count: i64| u32::try_from(count).unwrap_or(0);
        let ids = |products: &[usize]| nodes[*products.first()?].source(2).map(|ids| ids.ne());
        let tokens = brought.clone().filter_map(ids).map(|ne| narrow(ne[1])).max()?;
        let products = brought.clone().next()?;
        let weights: Vec<Tensor<'_>> = products.iter().filter_map(|&product| nodes[product].source(0)).collect();
        let layer = Layer {
            experts: narrow(weights.first()?.ne()[2]),
            used: narrow(ids(products)?[0]),
            expert_bytes: weights.iter().map(|weight| weight.nb()[2] as u64).sum(),
            resident: 0.0,
        };
        let suits_cache = !all.is_empty()
            && plan.steps.iter().filter(is_block).count() == all.len()
            && all.iter().all(|block| cache::suits_middle(nodes, block));
        Some(Self { tokens, layer, suits_cache })
    }
}

impl Backend {
    /// Runs a graph with blocks whose experts may be brought; `None` if there is no memory for it now.
    pub(super) fn run_long(
        &self,
        state: &mut State,
        graph: Graph<'_>,
        nodes: &[Tensor<'_>],
        planned: &Planned,
        sliced: Option<Slices<'_>>,
    ) -> Option<Result<Status, BackendError>> {
        let middle = planned.middle?;
        let (resident, is_there) = self.device.resident_share();
        let layer = Layer { resident, ..middle.layer };
        if !self.device.may_cache() {
            self.device.tell_passes(&layer, false);
        }
        // A cache that is not there yet has nothing to compute with.
        let in_ram = is_there && middle.suits_cache && !self.device.lends_contexts();
        let way = self.device.way(middle.tokens, &layer, in_ram);
        if way != Way::Stream
            && sliced.is_some()
            && let Err(error) = self.bring_rest(state, graph.key(), planned)
        {
            return Some(Err(error.into()));
        }
        let sliced = sliced.filter(|_| way == Way::Stream);
        if way == Way::InRam
            && let Some(outcome) = self.run_in_ram(state, graph, nodes, planned)
        {
            return Some(outcome);
        }
        self.run_streamed(state, graph, nodes, planned, (way != Way::Stream, sliced))
    }

    /// The cache computes every block: the device with what is held, the processor with the rest. `None` if there is none.
    fn run_in_ram(
        &self,
        state: &mut State,
        graph: Graph<'_>,
        nodes: &[Tensor<'_>],
        planned: &Planned,
    ) -> Option<Result<Status, BackendError>> {
        let mut session = self.begin_cached(nodes, &planned.all)?;
        let mut blocks = planned.all.iter().enumerate();
        let mut run = |state: &mut State| {
            for step in &planned.plan.steps {
                let block = match step {
                    Step::Streamed { .. } | Step::Cached { .. } => blocks.next(),
                    Step::Segment(_) | Step::Copied { .. } => None,
                };
                let status = match block {
                    Some(block) => self.run_cached(state, &mut session, graph, nodes, step, block)?,
                    None => self.run_step(state, graph, nodes, step)?,
                };
                if status != Status::SUCCESS {
                    return Ok(status);
                }
            }
            Ok(Status::SUCCESS)
        };
        let outcome = run(state);
        self.end_cached(state, session, matches!(outcome, Ok(Status::SUCCESS)));
        Some(outcome)
    }

    /// Brings the experts that each block uses, when its ids are there.
    pub(super) fn run_fetched<'a>(
        &self,
        state: &mut State,
        graph: Graph<'a>,
        nodes: &[Tensor<'a>],
        planned: &Planned,
        pass: &mut Pass<'_, 'a>,
    ) -> Result<Status, BackendError> {
        let mut block = 0;
        for step in &planned.plan.steps {
            let status = if let Some((_, products)) = streamed::brought(nodes, step) {
                let products = products.iter().map(|&index| nodes[index]);
                block += 1;
                self.run_fetched_block(state, graph, nodes, pass, (block - 1, products))?
            } else {
                self.run_step(state, graph, nodes, step)?
            };
            if status != Status::SUCCESS {
                return Ok(status);
            }
        }
        if let (Some(cache), Some(middle)) = (pass.cache.as_deref_mut(), planned.middle) {
            cache.end_fetched(middle.tokens);
        }
        Ok(Status::SUCCESS)
    }

    fn run_fetched_block<'a>(
        &self,
        state: &mut State,
        graph: Graph<'a>,
        nodes: &[Tensor<'a>],
        pass: &mut Pass<'_, 'a>,
        (block, mut products): (usize, impl Iterator<Item = Tensor<'a>>),
    ) -> Result<Status, BackendError> {
        let Some(first) = products.next() else { return Ok(Status::SUCCESS) };
        let waits = Instant::now();
        // The stream is idle after it, so nobody reads the ring any more.
        let used = readback::used(&self.inner, first)?;
        state.counters.waits += 1;
        state.counters.wait_ns += u64::try_from(waits.elapsed().as_nanos()).unwrap_or(u64::MAX);
        state.plain.forget_retired();
        if let (Some(cache), Some(weight)) = (pass.cache.as_deref_mut(), first.source(0)) {
            state.counters.upload_bytes += cache.load_used(self.device, weight.data(), &used)?;
        }
        let parts = pass.parts;
        let start = parts.partition_point(|part| part.block < block);
        let end = parts.partition_point(|part| part.block <= block);
        let depth = pass.ring.depth();
        let read = self.device.driver().point(&self.inner).map_err(BufferError::from)?;
        for number in start..end.min(start + depth) {
            self.fill(state, pass, (number, &read), Some(&used.runs))?;
        }
        for number in start..end {
            let status = self.run_part(state, graph, nodes, pass, number)?;
            if status != Status::SUCCESS {
                return Ok(status);
            }
            if number + depth < end {
                let read = self.device.driver().point(&self.inner).map_err(BufferError::from)?;
                self.fill(state, pass, (number + depth, &read), Some(&used.runs))?;
            }
        }
        state.counters.fetched_blocks += 1;
        Ok(Status::SUCCESS)
    }
}
