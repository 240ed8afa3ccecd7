//! What a cache does beside computing: it measures its pace, follows the governor, and remembers.
//!
//! Owns: the pace, the memory and the timing of the link of one cache, and what they tell.
//! Invariants: with `fixed` none of them is there: nothing depends on time or on earlier runs.
//! Threads: the one that drives the backend. Does not: decide (`policy`, `pace`), or know files (`learned`).

use std::time::Instant;

use super::arena::PoolMemory;
use super::identity::Identity;
use super::learned::Learned;
use super::pace::{self, Pace};
use super::rates::LinkClock;
use super::{Cache, Matrix};
use crate::buffer::BufferError;
use crate::config::PolicyOrder;
use crate::device::Device;
use crate::experts::heat::Heat;
use crate::experts::policy::{Mode, Tally};
use crate::experts::shape::{Block, Shape};
use crate::experts::statefolder;
use crate::gpu;
use crate::telemetry::log;

/// Fewer bytes are not worth timing.
const LEAST_TIMED_BYTES: u64 = 1 << 20;

/// The part of a cache that looks at clocks and files.
pub(super) struct Steering {
    label: String,
    clock: Instant,
    pace: Option<Pace>,
    link: Option<LinkClock>,
    learned: Option<Learned>,
    /// What was counted, and for how many tokens, when the load was last reckoned.
    reckoned: (Tally, u64),
    tokens: u64,
    told_rates: bool,
}

impl Steering {
    /// Reads what is remembered of the model; the heat, too.
    pub(super) fn new(device: &Device, shape: &Shape, identity: Identity, groups: Vec<String>) -> (Self, Heat) {
        let settings = device.expert_settings();
        let path = if settings.remembers() {
            statefolder::path(settings.state_file.as_ref(), |name| std::env::var_os(name))
        } else {
            None
        };
        let (learned, heat) = match path {
            Some(path) => {
                let (learned, heat) = Learned::open(device.label(), path, identity.text(), groups, shape);
                (Some(learned), heat)
            }
            None => (None, Heat::new(shape.blocks())),
        };
        let measures = settings.measures();
        let steering = Self {
            label: device.label().to_owned(),
            clock: Instant::now(),
            pace: measures.then(|| Pace::new(settings)),
            link: measures.then(LinkClock::new),
            learned,
            reckoned: (Tally::default(), 0),
            tokens: 0,
            told_rates: false,
        };
        (steering, heat)
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.clock.elapsed().as_micros()).unwrap_or(u64::MAX)
    }
}

impl Cache {
    /// The cache was made: measures the team and the link, and says what is special.
    pub(super) fn set_out(&mut self, device: &Device) {
        if self.steering.pace.is_some() {
            let rate = self.measure_team();
            let link = if device.is_gpu() { gpu::link_rate(device.driver()) } else { None };
            device.note_rates(rate, link);
            if let Some(pace) = &mut self.steering.pace {
                pace.set_team(rate);
                pace.set_link(link);
            }
        }
        if let Some(layer) = self.first_layer() {
            device.tell_passes(&layer, true);
        }
        let settings = device.expert_settings();
        if settings.order == PolicyOrder::Layers {
            self.policy.set_mode(Mode::Stock);
        }
        let floor = (0_u16..).zip(&self.pools).filter(|(pool, _)| self.policy.below_floor(*pool)).count();
        if floor > 0 && settings.order != PolicyOrder::Layers {
            log::notice(&format!(
                "{}: the cache has less room than one token uses ({floor} of {} kinds of experts): it holds whole layers, and what is left \
                 of it the experts used most",
                device.label(),
                self.pools.len()
            ));
        }
        if settings.fixed {
            log::notice(&format!(
                "{}: fixed=1: nothing is measured or remembered, and uploads are waited for: slower, and the same in every run",
                device.label()
            ));
        }
    }

    /// A graph starts.
    pub(super) fn begin_step(&mut self) {
        let now_us = self.steering.now_us();
        let Some(pace) = &mut self.steering.pace else { return };
        if let Some(verdict) = pace.begin(now_us) {
            log::notice(&format!("{}: {}", self.steering.label, pace.tell(verdict)));
            self.policy.set_mode(verdict.mode);
        }
    }

    /// A graph was handed on, and what is to be loaded next was chosen.
    pub(super) fn end_step(&mut self, tokens: u32) {
        self.graph += 1;
        self.steering.tokens += u64::from(tokens);
        let now_us = self.steering.now_us();
        if let Some(learned) = &mut self.steering.learned {
            learned.note(self.policy.heat(), self.policy.shape(), tokens, now_us);
        }
        let moving = !self.uploads.is_empty() || !self.waiting.is_empty();
        let Some(pace) = &mut self.steering.pace else { return };
        pace.end(now_us, tokens, moving);
        if let Some(rates) = pace.rates() {
            self.policy.set_rates(rates);
            if !std::mem::replace(&mut self.steering.told_rates, true) {
                log::info(&format!("{}: {}", self.steering.label, pace.rates_in_words().unwrap_or_default()));
            }
        }
        if pace.wants_prediction() {
            self.predict_stock();
        }
    }

    fn predict_stock(&mut self) {
        let sizes: Vec<u64> = self
            .pools
            .iter()
            .map(|pool| {
                let matrices: Vec<Matrix> = pool.planes.iter().map(|plane| plane.matrix).collect();
                PoolMemory::block_bytes(&matrices) as u64
            })
            .collect();
        let slots: Vec<u32> = self.pools.iter().map(PoolMemory::opened).collect();
        let shape = self.policy.shape();
        if slots.iter().sum::<u32>() as usize >= shape.blocks() {
            return; // everything fits: both modes are the same
        }
        let bytes_of = |pool: u16| sizes.get(usize::from(pool)).copied().unwrap_or(0) as f64;
        let (uses, all): (f64, f64) = shape.groups().iter().fold((0.0, 0.0), |(uses, all), group| {
            (uses + f64::from(group.used), all + f64::from(group.used) * bytes_of(group.pool))
        });
        let (tally, tokens) = (self.policy.tally(), self.steering.tokens);
        let (before, tokens_before) = std::mem::replace(&mut self.steering.reckoned, (tally, tokens));
        let counted = (tokens - tokens_before) as f64;
        let misses = ((tally.uses - before.uses) - (tally.hits - before.hits)) as f64;
        if counted <= 0.0 || uses <= 0.0 {
            return;
        }
        let stock_bytes = pace::stock_bytes(shape, &slots, &sizes, self.policy.heat());
        if let Some(pace) = &mut self.steering.pace {
            pace.expect_stock(misses / counted * all / uses, stock_bytes);
        }
    }

    /// Uploads of these blocks are about to begin. `Some` if they are timed.
    pub(super) fn time_uploads(
        &self,
        device: &Device,
        blocks: impl Iterator<Item = Block>,
    ) -> Result<Option<Instant>, BufferError> {
        let Some(link) = &self.steering.link else { return Ok(None) };
        let bytes_of = |block: Block| {
            let (group, _) = self.policy.shape().key(block);
            self.weights[group.0 as usize].matrices.iter().map(|weight| weight.expert_bytes as u64).sum::<u64>()
        };
        if blocks.map(bytes_of).sum::<u64>() < LEAST_TIMED_BYTES {
            return Ok(None);
        }
        link.start(device, self.graph)
    }

    /// They were begun.
    pub(super) fn stop_timing(
        &mut self,
        device: &Device,
        began: Option<Instant>,
        bytes: u64,
    ) -> Result<(), BufferError> {
        let (Some(began), Some(link)) = (began, &mut self.steering.link) else { return Ok(()) };
        let rate = link.stop(device, self.graph, began, bytes)?;
        if let Some(pace) = &mut self.steering.pace {
            pace.set_link(rate);
        }
        Ok(())
    }

    /// A backend or the model ends: brings what was learned into the file.
    pub(crate) fn remember(&mut self) {
        if let Some(learned) = &mut self.steering.learned {
            learned.finish(self.policy.heat(), self.policy.shape());
        }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        self.remember();
    }
}
