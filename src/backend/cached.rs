//! Graphs whose blocks the cache computes.
//!
//! Owns: when a backend makes and takes the cache of its device, and what happens when it cannot.
//! Invariants: the cache is back in its device when a graph ends, unless it was dropped because something failed.
//! Threads: the one that drives the backend. Another backend of the device finds no cache meanwhile and takes the plain path.
//! Does not: compute a block (`experts::cache` does).

use super::{Backend, BackendError, State};
use crate::abi::graph::Graph;
use crate::abi::inner::{self, Status};
use crate::abi::tensor::Tensor;
use crate::buffer::BufferError;
use crate::experts::cache::{BlockRun, Cache, Candidate, NoCache};
use crate::experts::residency::Reader;
use crate::graph::Step;
use crate::telemetry::log;

/// The cache while one graph runs.
pub(super) struct Session {
    cache: Cache,
    reader: Option<Reader>,
    tokens: u32,
}

impl Session {
    /// Whether blocks of this device may run before the host knows their ids.
    pub(super) fn may_run_ahead(&self) -> bool {
        self.cache.may_run_blocks_ahead()
    }

    pub(super) fn runs_ahead(&self, nodes: &[Tensor<'_>], block: &Candidate) -> bool {
        self.cache.runs_ahead(nodes, block)
    }

    /// The graph's first part is about to be handed on.
    pub(super) fn begin_ahead(&mut self, inner: &inner::Backend, nodes: &[Tensor<'_>], blocks: &[Candidate]) {
        self.cache.begin_ahead(inner, nodes, blocks);
    }

    /// The cache, and the graph's view of it.
    pub(super) fn parts(&mut self) -> Result<(&mut Cache, &Reader), BackendError> {
        let reader = self.reader.as_ref().ok_or(BackendError::NoReader)?;
        Ok((&mut self.cache, reader))
    }
}

impl Backend {
    /// Takes the device's cache for a graph with these blocks; makes it at the first such graph. `None`: the plain path.
    pub(super) fn begin_cached(&self, nodes: &[Tensor<'_>], blocks: &[Candidate]) -> Option<Session> {
        if blocks.is_empty() {
            return None;
        }
        let mut cache = self.take_cache_for(nodes, blocks)?;
        if cache.has_tail() {
            self.inner.synchronize();
            cache.learn_tail();
        }
        let known = blocks.iter().all(|block| cache.knows(nodes, block));
        let reader =
            if known { cache.catch_up(self.device, &self.inner).and_then(|()| cache.start()).ok() } else { None };
        let Some(reader) = reader else {
            self.device.put_cache(Some(cache));
            return None;
        };
        let tokens = blocks.first().and_then(|block| nodes[block.pattern.down].source(2)).map_or(1, |ids| ids.ne()[1]);
        Some(Session { cache, reader: Some(reader), tokens: u32::try_from(tokens).unwrap_or(1) })
    }

    /// Takes the device's cache, made for at least so many blocks; makes it if there is none. `None` if there is none then, too, or another backend
    /// has it.
    pub(super) fn take_cache_for(&self, nodes: &[Tensor<'_>], blocks: &[Candidate]) -> Option<Cache> {
        let mut slot = self.device.take_cache()?;
        if slot.as_ref().is_some_and(|cache| !cache.is_current(self.device)) {
            slot = None; // a model was freed: nothing of it may be read any more
        }
        if slot.as_ref().is_some_and(|cache| cache.blocks() < blocks.len()) {
            // It was made for a graph in which few blocks were for the cache: of a prompt, only the last layer has few tokens.
            self.inner.synchronize();
            if self.device.opened_driver().is_some_and(|driver| driver.synchronize().is_err()) {
                self.device.poison();
            }
            slot = None;
        }
        if slot.is_none() && self.device.wants_cache() {
            slot = self.make_cache(nodes, blocks);
        }
        if slot.is_none() {
            self.device.put_cache(None);
        }
        slot
    }

    fn make_cache(&self, nodes: &[Tensor<'_>], blocks: &[Candidate]) -> Option<Cache> {
        match Cache::new(self.device, nodes, blocks) {
            Ok(cache) => Some(cache),
            Err(reason @ (NoCache::NoRoom | NoCache::Buffer(BufferError::NoDeviceMemory { .. }))) => {
                self.device.tell_no_cache(&reason.to_string());
                self.device.postpone_cache();
                None
            }
            Err(reason) => {
                self.device.tell_no_cache(&reason.to_string());
                self.device.give_up_cache();
                None
            }
        }
    }

    /// Runs a block of the graph.
    pub(super) fn run_cached(
        &self,
        state: &mut State,
        session: &mut Session,
        graph: Graph<'_>,
        nodes: &[Tensor<'_>],
        step: &Step,
        block: (usize, &Candidate),
    ) -> Result<Status, BackendError> {
        let (cache, reader) = session.parts()?;
        let (number, block) = block;
        let run = BlockRun { device: self.device, inner: &self.inner, nodes, block, number, reader };
        let mut retired = state.plain.take_retired();
        let range = step.range();
        let compute = |variant| {
            let uid = super::part_uid(graph.uid(), nodes, &range, variant);
            let mut part = graph.part(nodes, range.clone(), uid)?;
            state.counters.segments += 1;
            self.note_run(&mut state.counters, &mut state.replays, nodes[range.start], uid);
            Ok(self.inner.compute(&mut part))
        };
        let outcome = cache.run(&run, &mut retired, compute);
        state.plain.keep_retired(retired);
        let (status, outcome) = outcome?;
        state.counters.note(&outcome);
        state.counters.waits += 1;
        Ok(status)
    }

    /// Gives the cache back; `None` drops it, because a graph failed in the middle.
    pub(super) fn end_cached(&self, state: &mut State, session: Session, good: bool) {
        let Session { mut cache, reader, tokens } = session;
        let ended = match reader {
            Some(reader) if good => Ok(cache.end(reader, tokens)),
            _ => Err("a graph failed".to_owned()),
        };
        match ended {
            Ok(bytes) => {
                state.counters.upload_bytes += bytes;
                let moved = cache.take_moved();
                state.counters.uploads += moved.uploads;
                state.counters.evictions += moved.evictions;
                state.reporter.cache = Some(cache.state());
                // Whoever gets the cache next may take memory from it: what reads it must be known, or done.
                if !self.device.driver().waits_for_uses() || self.device.has_several_backends() {
                    self.inner.synchronize();
                }
                let cache = if self.note_use().is_ok() { self.device.step_cache(cache, tokens) } else { None };
                self.device.put_cache(cache);
            }
            Err(error) if self.device.take_owed() => {
                // It is made again, smaller, when there is room.
                log::info(&format!("{}: the cache is dropped: {error}, for lack of memory", self.device.label()));
                self.inner.synchronize();
                drop(cache);
                self.device.postpone_cache();
                self.device.put_cache(None);
            }
            Err(error) => {
                log::notice(&format!("{}: the cache is dropped: {error}", self.device.label()));
                self.device.board.clear_cache(Some(&error));
                self.inner.synchronize();
                drop(cache);
                self.device.postpone_cache();
                self.device.put_cache(None);
            }
        }
    }
}
