//! What ggml-cuda does with the parts it is given: run directly, capture as a CUDA graph, replay.
//!
//! The inner backend does not tell, so its rule is followed here: graphs are known by their first node; the second run in a row of an
//! unchanged graph is captured, later ones are replayed, and a change starts over. Parts are taken as unchanged only when they carry the
//! same non-zero id, as ggml-cuda itself does without looking further; a graph with a new id that happens to be equal counts as changed,
//! so the numbers are a lower bound. (ggml-cuda.cu, ggml_backend_cuda_graph_compute; checked against the CUDA calls by tests/gpu.)

use std::collections::HashMap;

/// What one run of a part was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// Launched kernel by kernel.
    Direct,
    /// Captured as a CUDA graph.
    Captured,
    /// Replayed from a CUDA graph.
    Replayed,
    /// A captured graph changed: launched kernel by kernel, and captured anew later.
    Reset,
}

/// Follows the runs of one backend.
#[derive(Debug, Default)]
pub struct ReplayLedger {
    parts: HashMap<usize, Part>,
}

#[derive(Debug)]
struct Part {
    uid: u64,
    warm: bool,
}

impl ReplayLedger {
    /// The most parts that are followed; beyond it everything starts over, as if all were new.
    const CAPACITY: usize = 4096;

    /// Notes a run of the part with this first node (its address) and id.
    pub fn note(&mut self, first: usize, uid: u64) -> Run {
        if self.parts.len() >= Self::CAPACITY && !self.parts.contains_key(&first) {
            self.parts.clear();
        }
        let part = self.parts.entry(first).or_insert(Part { uid: 0, warm: false });
        let unchanged = uid != 0 && part.uid == uid;
        part.uid = uid;
        let was_warm = std::mem::replace(&mut part.warm, unchanged);
        match (was_warm, unchanged) {
            (false, false) => Run::Direct,
            (false, true) => Run::Captured,
            (true, true) => Run::Replayed,
            (true, false) => Run::Reset,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_run_is_captured_then_replayed() {
        let mut ledger = ReplayLedger::default();
        let runs: Vec<Run> = [5, 5, 5, 6, 6, 6].into_iter().map(|uid| ledger.note(1, uid)).collect();
        assert_eq!(runs, [Run::Direct, Run::Captured, Run::Replayed, Run::Reset, Run::Captured, Run::Replayed]);
    }

    #[test]
    fn two_variants_on_one_first_node_are_never_captured() {
        let mut ledger = ReplayLedger::default();
        assert!((0..10).all(|run| ledger.note(1, 5 + run % 2) == Run::Direct));
    }

    #[test]
    fn parts_without_id_run_directly() {
        let mut ledger = ReplayLedger::default();
        assert!((0..10).all(|_| ledger.note(1, 0) == Run::Direct));
    }

    #[test]
    fn bounded() {
        let mut ledger = ReplayLedger::default();
        for first in 0..100_000 {
            ledger.note(first, 7);
        }
        assert!(ledger.parts.len() <= ReplayLedger::CAPACITY);
    }
}
