//! What a device knows of the computing of experts: its cache, and with how many threads.
//!
//! Owns: the place where the cache lies between graphs, the reasons for which there is none, the host's number of threads.
//! Invariants: one backend at a time has the cache; it is void once experts that it knows were freed (`model_epoch`).
//! Threads: any. The lock is held to take and put, never across a call.
//! Does not: make a cache (`backend` does) or compute with it (`experts::cache` does).

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::Device;
use super::held::Held;
use crate::abi::inner::DeviceKind;
use crate::config::{CacheSize, ExpertSettings, Socket, Staging};
use crate::cpu::{team, threads};
use crate::experts::cache::Cache;
use crate::experts::stage::{self, Needs, Ring, Shape, Unit};
use crate::telemetry::log;

/// The state behind it.
pub(super) struct Experts {
    cache: Held<Cache>,
    told_no_cache: AtomicBool,
    told_no_ring: AtomicBool,
    told_staging: Mutex<Option<Shape>>,
    model_epoch: AtomicU64,
    /// The model for which no cache could be made.
    gave_up: AtomicU64,
    /// Threads that the host was told to compute with: for the graph that comes, for one token, for several.
    threads: AtomicUsize,
    threads_one: AtomicUsize,
    threads_several: AtomicUsize,
    /// Backends that are open.
    backends: AtomicUsize,
    /// The ring for long passes.
    ring: Held<Ring>,
}

impl Default for Experts {
    fn default() -> Self {
        Self {
            cache: Held::default(),
            told_no_cache: AtomicBool::new(false),
            told_no_ring: AtomicBool::new(false),
            told_staging: Mutex::new(None),
            model_epoch: AtomicU64::new(1),
            gave_up: AtomicU64::new(0),
            threads: AtomicUsize::new(0),
            threads_one: AtomicUsize::new(0),
            threads_several: AtomicUsize::new(0),
            backends: AtomicUsize::new(0),
            ring: Held::default(),
        }
    }
}

impl Device {
    /// Takes the cache, if there is one, for one graph; `None` while another backend has it.
    pub(crate) fn take_cache(&self) -> Option<Option<Cache>> {
        self.experts.cache.take()
    }

    /// As [`Device::take_cache`], but waits for whoever has it, unless that is this thread.
    pub(crate) fn take_cache_within(&self, patience: Duration) -> Option<Option<Cache>> {
        self.experts.cache.take_within(patience)
    }

    /// Puts the cache back.
    pub(crate) fn put_cache(&self, cache: Option<Cache>) {
        self.experts.cache.put(cache);
    }

    /// Counts [`Device::drop_cache`].
    pub(crate) fn model_epoch(&self) -> u64 {
        self.experts.model_epoch.load(Ordering::Acquire)
    }

    /// Experts are about to be freed: nothing may be loaded from them any more. No graph runs on a model that is freed; a cache that a
    /// backend has at this moment is of another model, or finds by the epoch that it is void.
    pub(crate) fn drop_cache(&self) {
        self.experts.model_epoch.fetch_add(1, Ordering::Release);
        self.board.clear_cache(None);
        let cache = self.experts.cache.remove();
        self.drop_ring();
        // Also when a backend has the cache: what it began to load may come from the memory that goes.
        if let Some(driver) = self.opened_driver()
            && driver.synchronize().is_err()
        {
            self.poison();
        }
        drop(cache);
    }

    /// A backend ends, and maybe the process: what the cache learned is brought into its file. The backend is idle, and where there are others
    /// none leaves a long pass under way.
    pub(crate) fn remember(&self) {
        if let Some(mut cache) = self.take_cache() {
            if let Some(cache) = &mut cache {
                cache.learn_tail();
                cache.remember();
            }
            self.put_cache(cache);
        }
    }

    /// Whether graphs are to be cut for a cache.
    pub(crate) fn may_cache(&self) -> bool {
        match self.config.cache {
            CacheSize::Off => false,
            CacheSize::Mib(_) | CacheSize::SlotsPerLayer(_) => true,
            // A budget makes a small card of anything.
            CacheSize::Auto => self.captures_graphs && self.is_gpu() || self.budget_mib().is_some(),
        }
    }

    /// What the user wants of the cache.
    pub(crate) fn cache_size(&self) -> CacheSize {
        self.config.cache
    }

    /// What the user set about the cache beside its size.
    pub(crate) fn expert_settings(&self) -> &ExpertSettings {
        &self.config.experts
    }

    /// Whether the link is made to look slow (benchmarks only): then nothing is read over it in place.
    pub(crate) fn slows_link(&self) -> bool {
        self.config.experts.link_gbs.is_some()
    }

    /// Whose routing replaces the model's (benchmarks only).
    pub(crate) fn replay(&self) -> Option<&'static crate::sim::Preset> {
        self.config.replay
    }

    /// Whether memory of the cache that nobody may read is filled with what is not a number (tests only).
    pub(crate) fn poisons(&self) -> bool {
        self.config.debug_poison
    }

    /// Whether the inner device is a GPU.
    pub(crate) fn is_gpu(&self) -> bool {
        matches!(self.inner.kind(), DeviceKind::Gpu | DeviceKind::IntegratedGpu)
    }

    /// Whether a cache is to be made for the model now: not after it failed once, and not soon after there was no room for it.
    pub(crate) fn wants_cache(&self) -> bool {
        self.experts.gave_up.load(Ordering::Relaxed) != self.model_epoch() && !self.waits_for_room()
    }

    /// No cache for this model.
    pub(crate) fn give_up_cache(&self) {
        self.experts.gave_up.store(self.model_epoch(), Ordering::Relaxed);
    }

    /// Tells once why there is no cache.
    pub(crate) fn tell_no_cache(&self, reason: &str) {
        self.board.clear_cache(Some(reason));
        if !self.experts.told_no_cache.swap(true, Ordering::Relaxed) {
            log::notice(&format!("{}: no cache: {reason}", self.label()));
        }
    }

    /// Takes the ring for long passes, made anew where it has no room for what they bring; `None` while another backend has it, or without memory.
    pub(crate) fn take_ring(&self, needs: Needs) -> Option<Ring> {
        self.note_ring_use();
        if let Some(ring) = self.experts.ring.take()?.filter(|ring| ring.shape().serves(needs)) {
            return Some(ring);
        }
        // The old one is gone: both may not fit.
        let lendable = self.lendable();
        let only = self.config.debug_staging.map(|only| match only {
            Staging::Layer => (Unit::Layer, 2),
            Staging::ThreeTensors => (Unit::Tensor, 3),
            Staging::TwoTensors => (Unit::Tensor, 2),
        });
        let mut why = "no memory for two of their tensors".to_owned();
        for shape in stage::shapes(needs, lendable, only) {
            match Ring::new(self, shape) {
                Ok(ring) => {
                    log::info(&format!("{}: staging of {shape} is made", self.label()));
                    self.tell_staging(shape, &stage::reason(shape, needs, lendable));
                    return Some(ring);
                }
                Err(error) => why = error.to_string(),
            }
        }
        self.experts.ring.put(None);
        if !self.experts.told_no_ring.swap(true, Ordering::Relaxed) {
            log::notice(&format!(
                "{}: long prompts read experts as short ones do: {} MiB of staging are not to be had ({why})",
                self.label(),
                needs.tensor.saturating_mul(2).div_ceil(1 << 20)
            ));
        }
        None
    }

    /// Tells how long passes bring experts, when that is another way than before.
    fn tell_staging(&self, shape: Shape, reason: &str) {
        let before = self.experts.told_staging.lock().replace(shape);
        if before != Some(shape) {
            let line = format!("{}: long prompts bring experts by {shape}: {reason}", self.label());
            if before.is_none() { log::notice(&line) } else { log::info(&line) }
        }
    }

    /// Where the times of long passes are written (benchmarks only).
    pub(crate) fn timeline(&self) -> Option<&std::path::Path> {
        self.config.timeline.as_deref()
    }

    /// Whether there is a ring that nobody has.
    pub(crate) fn has_ring(&self) -> bool {
        self.experts.ring.is_there()
    }

    /// Gives the ring back.
    pub(crate) fn put_ring(&self, ring: Ring) {
        self.experts.ring.put(Some(ring));
    }

    /// Frees the ring, if nobody has it. What read it is waited for, or was before it was put back. Returns its bytes.
    pub(crate) fn drop_ring(&self) -> u64 {
        let ring = self.experts.ring.remove();
        let bytes = ring.as_ref().map_or(0, |ring| ring.depth() * ring.shape().bytes);
        drop(ring);
        if bytes > 0 {
            self.note_returned();
        }
        bytes as u64
    }

    /// A backend was opened.
    pub(crate) fn note_backend_opened(&self) {
        self.experts.backends.fetch_add(1, Ordering::Relaxed);
    }

    /// A backend is idle and ends.
    pub(crate) fn note_backend_closed(&self) {
        self.experts.backends.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether more than one stream may run graphs.
    pub(crate) fn has_several_backends(&self) -> bool {
        self.experts.backends.load(Ordering::Relaxed) > 1
    }

    /// The host said with how many threads it computes the graph that comes: those of `-t` for one token, those of `-tb` for several.
    pub(crate) fn note_threads(&self, threads: usize) {
        self.experts.threads.store(threads, Ordering::Relaxed);
    }

    /// A graph of so many tokens comes: its threads are those that the host was told last.
    pub(crate) fn begin_pass(&self, tokens: u32) {
        let told = self.experts.threads.load(Ordering::Relaxed);
        let own = if tokens > 1 { &self.experts.threads_several } else { &self.experts.threads_one };
        own.store(told, Ordering::Relaxed);
        team::use_threads(self.team_threads(tokens));
    }

    /// Threads that compute experts in RAM in graphs of so many tokens.
    fn team_threads(&self, tokens: u32) -> usize {
        threads::team_threads(self.wanted_threads(tokens).0.max(1), usize::from(self.is_gpu()))
    }

    /// What the user wants for such graphs, and how he said so.
    fn wanted_threads(&self, tokens: u32) -> (usize, &'static str) {
        let several = self.config.prompt_threads.filter(|_| tokens > 1).map(|threads| (threads, "prompt-threads="));
        let set = several.or_else(|| self.config.threads.map(|threads| (threads, "threads=")));
        if let Some((threads, why)) = set {
            return (threads as usize, why);
        }
        let Experts { threads, threads_one, threads_several, .. } = &self.experts;
        let mut told =
            [(threads_one, "the host's -t"), (threads_several, "the host's -tb"), (threads, "the host's -t")];
        if tokens > 1 {
            told.swap(0, 1);
        }
        let known = told.into_iter().map(|(own, why)| (own.load(Ordering::Relaxed), why));
        known.into_iter().find(|(threads, _)| *threads > 0).unwrap_or((1, "the host's -t"))
    }

    /// Where counters can be read.
    pub(crate) fn socket(&self) -> &Socket {
        &self.config.socket
    }

    /// Why a team has so many threads.
    pub(crate) fn team_words(&self, threads: usize) -> String {
        let (wanted, why) = self.wanted_threads(1);
        let noun = if threads == 1 { "thread" } else { "threads" };
        let mut words = match threads {
            _ if threads != self.team_options().threads => format!("{threads} {noun} (shared with an earlier device)"),
            _ if threads == wanted => format!("{threads} {noun} ({why})"),
            _ => format!("{threads} {noun} ({why} is {wanted}, of which the processors allow no more)"),
        };
        let several = self.team_threads(2);
        if several != self.team_threads(1) {
            words.push_str(&format!(", {several} for passes of several tokens ({})", self.wanted_threads(2).1));
        }
        words
    }

    /// How the team that computes experts in RAM is made: for single tokens.
    pub(crate) fn team_options(&self) -> team::Options {
        team::Options { threads: self.team_threads(1), pin: false, spin_us: 200 }
    }
}
