//! Graphs whose blocks the cache computes.
//!
//! Owns: when a backend makes and takes the cache of its device, and what happens when it cannot.
//! Invariants: the cache is back in its device when a graph ends, unless it was dropped because something failed.
//! Threads: the one that drives the backend. Another backend of the device finds no cache meanwhile and takes the plain path.
//! Does not: compute a block (`experts::cache` does).

use super::{Backend, BackendError, State};
use crate::abi::graph::Graph;
use crate::abi::inner::Status;
use crate::abi::tensor::Tensor;
use crate::config::CacheSize;
use crate::experts::cache::{BlockRun, Cache, Candidate};
use crate::experts::residency::Reader;
use crate::graph::Step;
use crate::telemetry::log;

/// The cache while one graph runs.
pub(super) struct Session {
    cache: Cache,
    reader: Option<Reader>,
    tokens: u32,
}

/// Memory that an automatic cache leaves to others, besides `vram-reserve-mb`.
const LEAST_BYTES: usize = 64 << 20;

impl Backend {
    /// Takes the device's cache for a graph with these blocks; makes it at the first such graph. `None`: the plain path.
    pub(super) fn begin_cached(&self, nodes: &[Tensor<'_>], blocks: &[Candidate]) -> Option<Session> {
        if blocks.is_empty() {
            return None;
        }
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
            if slot.is_none() {
                self.device.give_up_cache();
            }
        }
        let Some(mut cache) = slot else {
            self.device.put_cache(None);
            return None;
        };
        let known = blocks.iter().all(|block| cache.knows(nodes, block));
        let reader = if known { cache.start().ok() } else { None };
        let Some(reader) = reader else {
            self.device.put_cache(Some(cache));
            return None;
        };
        let tokens = blocks.first().and_then(|block| nodes[block.pattern.down].source(2)).map_or(1, |ids| ids.ne()[1]);
        Some(Session { cache, reader: Some(reader), tokens: u32::try_from(tokens).unwrap_or(1) })
    }

    fn make_cache(&self, nodes: &[Tensor<'_>], blocks: &[Candidate]) -> Option<Cache> {
        let bytes = match self.device.cache_size() {
            CacheSize::Off => return None,
            CacheSize::Mib(mib) => mib << 20,
            CacheSize::Auto => {
                if !self.device.is_gpu() {
                    return None;
                }
                self.device.inner.memory().0.saturating_sub(self.device.reserve_bytes())
            }
        };
        if bytes < LEAST_BYTES && self.device.cache_size() == CacheSize::Auto {
            self.device
                .tell_no_cache(&format!("only {} MiB are free beside the reserve (vram-reserve-mb)", bytes >> 20));
            return None;
        }
        match Cache::new(self.device, nodes, blocks, bytes) {
            Ok(cache) => Some(cache),
            Err(reason) => {
                self.device.tell_no_cache(&reason.to_string());
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
        let Some(reader) = session.reader.as_ref() else { return Ok(Status::FAILED) };
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
        let outcome = session.cache.run(&run, &mut retired, compute);
        state.plain.keep_retired(retired);
        let (status, outcome) = outcome?;
        let counters = &mut state.counters;
        counters.hits += outcome.hits;
        counters.misses += outcome.misses;
        counters.cpu_bytes += outcome.cpu_bytes;
        counters.upload_bytes += outcome.upload_bytes;
        Ok(status)
    }

    /// Gives the cache back; `None` drops it, because a graph failed in the middle.
    pub(super) fn end_cached(&self, state: &mut State, session: Session, good: bool) {
        let Session { mut cache, reader, tokens } = session;
        let ended = match reader {
            Some(reader) if good => cache.end(self.device, reader, tokens).map_err(|error| error.to_string()),
            _ => Err("a graph failed".to_owned()),
        };
        match ended {
            Ok(bytes) => {
                state.counters.upload_bytes += bytes;
                self.device.put_cache(Some(cache));
            }
            Err(error) => {
                log::notice(&format!("{}: the cache is dropped: {error}", self.device.label()));
                self.inner.synchronize();
                drop(cache);
                self.device.give_up_cache();
                self.device.put_cache(None);
            }
        }
    }
}
