//! Graphs whose blocks run ahead: each block is handed on with the nodes before it, and the host answers what it misses meanwhile.
//!
//! Owns: the pieces in which such a graph is handed on, and their order: a block is made ready while the device computes the one before, and
//! handed on when that one was answered.
//! Invariants: as those of the backend. Threads: the one that drives it.
//! Does not: know what is in front of a block, or what answers it (`experts::cache` does).

use std::ops::Range;

use super::cached::Session;
use super::{Backend, BackendError, Planned, State};
use crate::abi::graph::Graph;
use crate::abi::inner::Status;
use crate::abi::tensor::Tensor;
use crate::experts::cache::{BlockRun, Staged};
use crate::graph::{Plan, Step};

/// A piece of a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// A step by itself, by its number.
    Step(usize),
    /// A block that the cache can compute, with the nodes before it.
    Block {
        /// The number of its step.
        step: usize,
        /// Its number among those blocks.
        number: usize,
        /// All nodes.
        range: Range<usize>,
        /// Where the block begins.
        start: usize,
    },
}

/// Joins each block of a plan with the segment before it.
pub(super) fn pieces(plan: &Plan) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut number = 0;
    for (step, what) in plan.steps.iter().enumerate() {
        let Step::Cached { range, .. } = what else {
            pieces.push(Piece::Step(step));
            continue;
        };
        let segment = step.checked_sub(1).and_then(|before| match &plan.steps[before] {
            Step::Segment(segment) => Some(segment.start),
            Step::Copied { .. } | Step::Streamed { .. } | Step::Cached { .. } => None,
        });
        if segment.is_some() {
            pieces.pop();
        }
        let whole = segment.unwrap_or(range.start)..range.end;
        pieces.push(Piece::Block { step, number, range: whole, start: range.start });
        number += 1;
    }
    pieces
}

/// A mark in the number of a part that has nodes of ours in it.
const WITH_OURS: u64 = 0x9e37_79b9_7f4a_7c15;

impl Backend {
    pub(super) fn run_pieces(
        &self,
        state: &mut State,
        session: &mut Session,
        graph: Graph<'_>,
        nodes: &[Tensor<'_>],
        planned: &Planned,
    ) -> Result<Status, BackendError> {
        session.begin_ahead(&self.inner, nodes, &planned.blocks);
        let mut ready: Option<Staged<'_>> = None;
        for (at, piece) in planned.pieces.iter().enumerate() {
            let Piece::Block { step, number, range, start } = piece else {
                let Piece::Step(step) = piece else { continue };
                let status = self.run_step(state, graph, nodes, &planned.plan.steps[*step])?;
                if status != Status::SUCCESS {
                    return Ok(status);
                }
                continue;
            };
            let block = &planned.blocks[*number];
            if !session.runs_ahead(nodes, block) {
                if range.start < *start {
                    let status = self.run_step(state, graph, nodes, &Step::Segment(range.start..*start))?;
                    if status != Status::SUCCESS {
                        return Ok(status);
                    }
                }
                let status =
                    self.run_cached(state, session, graph, nodes, &planned.plan.steps[*step], (*number, block))?;
                if status != Status::SUCCESS {
                    return Ok(status);
                }
                continue;
            }
            let (cache, reader) = session.parts()?;
            let run = BlockRun { device: self.device, inner: &self.inner, nodes, block, number: *number, reader };
            let staged = match ready.take() {
                Some(staged) => staged,
                None => cache.stage(&run)?,
            };
            let operands = staged.operands;
            cache.arm(*number, &operands);
            let status = self.hand_on(state, graph, nodes, (range, *start), &staged)?;
            state.plain.retire_patches(staged.retire());
            if status != Status::SUCCESS {
                return Ok(status);
            }
            if let Some(Piece::Block { number, .. }) = planned.pieces.get(at + 1) {
                let block = &planned.blocks[*number];
                if cache.runs_ahead(nodes, block) {
                    ready = Some(cache.stage(&BlockRun { block, number: *number, ..run })?);
                }
            }
            let outcome = cache.answer(&run, &operands)?;
            state.counters.note(&outcome);
        }
        Ok(Status::SUCCESS)
    }

    /// Hands a block on, the nodes before it and those of ours in front of it.
    fn hand_on(
        &self,
        state: &mut State,
        graph: Graph<'_>,
        nodes: &[Tensor<'_>],
        (range, start): (&Range<usize>, usize),
        staged: &Staged<'_>,
    ) -> Result<Status, BackendError> {
        let before = nodes[range.start..start].iter().copied();
        let list: Vec<Tensor<'_>> =
            before.chain(staged.nodes()).chain(nodes[start..range.end].iter().copied()).collect();
        let uid = super::part_uid(graph.uid(), nodes, range, staged.variant ^ WITH_OURS);
        let mut part = graph.part_with(&list, uid)?;
        state.counters.segments += 1;
        self.note_run(&mut state.counters, &mut state.replays, list[0], uid);
        Ok(self.inner.compute(&mut part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cached(range: Range<usize>) -> Step {
        Step::Cached { range, products: Vec::new(), copied: Vec::new() }
    }

    #[test]
    fn blocks_take_the_segment_before_them() {
        let steps = vec![
            Step::Segment(0..4),
            cached(4..7),
            cached(7..9),
            Step::Segment(9..12),
            Step::Copied { range: 12..13, products: vec![12] },
            cached(13..15),
            Step::Segment(15..20),
        ];
        let plan = Plan { steps, blocks: 3, unrecognised: vec![12] };
        let block = |step, number, range, start| Piece::Block { step, number, range, start };
        let expected = [
            block(1, 0, 0..7, 4),
            block(2, 1, 7..9, 7),
            Piece::Step(3),
            Piece::Step(4),
            block(5, 2, 13..15, 13),
            Piece::Step(6),
        ];
        assert_eq!(pieces(&plan), expected);
    }
}
