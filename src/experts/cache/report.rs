//! What a cache says of itself: the line when it is made, and its state after each graph.
//!
//! Owns: the words. Invariants: nothing here is slow or allocates but the line at the start.
//! Threads: whoever has the cache. Does not: count (`engine` and `mod.rs` do).

use super::{Cache, PoolMemory};
use crate::config::CacheSize;
use crate::device::Device;
use crate::experts::policy::{Expectation, Ground, Mode, Regime, expected_hits};
use crate::telemetry::{CacheState, Mode as Told, log, service};

/// What moved since it was asked last.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Moved {
    pub(crate) uploads: u64,
    pub(crate) evictions: u64,
}

/// Rounded to the nearest, as people count.
fn mib(bytes: usize) -> usize {
    (bytes >> 19).div_ceil(2)
}

impl Cache {
    /// One line: what is on, and why. `may` is the memory that it may grow to now.
    pub(super) fn announce(&mut self, device: &Device, may: usize) {
        let opened: Vec<u32> = self.pools.iter().map(PoolMemory::opened).collect();
        let slots = self.slots_for(may.min(self.most_bytes())).unwrap_or(opened);
        let expected = expected_hits(self.policy.shape(), &slots, self.policy.heat());
        self.expected_hits = expected.hits;
        let state = self.state();
        let (now, then) = (self.arena_bytes(), slots.iter().sum::<u32>());
        let size = match device.cache_size() {
            CacheSize::Auto if u64::from(then) > state.slots => {
                format!("to begin with; after 64 tokens {} MiB, what is free less {}", mib(may), device.limit_words())
            }
            CacheSize::Auto => format!("what is free less {}, or all experts", device.limit_words()),
            CacheSize::SlotsPerLayer(slots) => format!("{slots} experts of each layer, as moe-expert-cache says"),
            CacheSize::Mib(wanted) if wanted > mib(now) + 1 => {
                format!("cache={wanted} allows more than there is room or use for")
            }
            CacheSize::Mib(_) | CacheSize::Off => "as cache= says".to_owned(),
        };
        let room = then.max(u32::try_from(state.slots).unwrap_or(0));
        log::notice(&format!(
            "{}: expert cache of {} MiB on {} ({size}): room for {} of {} experts ({:.0}%); the others are computed in RAM by {}; about \
             {:.0}% of uses should hit ({})",
            device.label(),
            mib(now),
            device.inner_name,
            room,
            state.blocks,
            100.0 * f64::from(room) / state.blocks.max(1) as f64,
            device.team_words(self.team.threads()),
            100.0 * expected.hits,
            self.ground_words(expected),
        ));
        log::info(&format!("{}: memory of {}: {}", device.label(), device.inner_name, device.account()));
        device.board.set_cache(state);
        service::start(device.socket(), true);
    }

    fn ground_words(&self, expected: Expectation) -> String {
        let tokens = self.policy.heat().tokens();
        match expected.ground {
            Ground::Learned => format!("learned from {tokens:.0} tokens"),
            Ground::Share if tokens >= 1.0 => format!("a guess from the share; {tokens:.0} tokens learned say no more"),
            Ground::Share => "a guess from the share, nothing is learned of this model yet".to_owned(),
            Ground::Layers => "whole layers only, too small for one token's experts".to_owned(),
        }
    }

    /// The state for counters.
    pub(crate) fn state(&self) -> CacheState {
        let numbers = || 0..u16::try_from(self.pools.len()).unwrap_or(u16::MAX);
        let held: u64 = numbers().map(|pool| u64::from(self.policy.held(pool))).sum();
        let loading = (self.uploads.len() + self.waiting.len()) as u64;
        CacheState {
            bytes: self.arena_bytes() as u64,
            slots: self.pools.iter().map(|pool| u64::from(pool.opened())).sum(),
            blocks: self.policy.shape().blocks() as u64,
            resident: held.saturating_sub(loading),
            loading,
            mode: self.told_mode(numbers()),
            heat_tokens: self.policy.heat().tokens(),
            expected_hits: self.expected_hits,
            threads: self.team.threads() as u64,
        }
    }

    fn told_mode(&self, mut pools: impl Iterator<Item = u16> + Clone) -> Told {
        if self.policy.mode() == Mode::Stock || pools.clone().all(|pool| self.policy.below_floor(pool)) {
            return Told::Layers;
        }
        let by_heat = |pool: u16| self.policy.regime(pool) == Some(Regime::Frequency);
        match (pools.clone().any(by_heat), pools.all(by_heat)) {
            (_, true) => Told::Frequency,
            (true, false) => Told::Mixed,
            (false, false) => Told::Recency,
        }
    }

    /// What moved since this was called last.
    pub(crate) fn take_moved(&mut self) -> Moved {
        std::mem::take(&mut self.moved)
    }
}
