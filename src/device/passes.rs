//! How a device takes passes of more than 8 tokens.
//!
//! Owns: what the keys say of them, the rates that the cost model is asked with, and how long the ring outlives the last pass that used it.
//! Invariants: with `fixed` no measured rate is used. The ring is kept while passes keep coming: between two of them lie fewer than
//! [`IDLE_GRAPHS`] graphs of single tokens.
//! Threads: any. A lock is held to copy the rates. Does not: know graphs (`backend` does).

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::Device;
use crate::config::{MiddlePasses, SliceTokens};
use crate::experts::cache::{Cache, MOST_MIDDLE_TOKENS, MOST_TOKENS};
use crate::experts::cost::{Layer, Rates, Way};
use crate::gpu;
use crate::planner::cards::ability;
use crate::planner::prompts::{SLICED, computing_us};
use crate::telemetry::log;

/// The fewest tokens of a pass whose experts may be brought.
const LEAST_TOKENS: u32 = 9;
/// Tokens from which on all experts are brought where there is no link to weigh.
const WITHOUT_LINK: u32 = 32;
/// Graphs that the cache serves until the ring is given back: a fraction of a second, in which a server that answers several requests begins
/// another prompt.
const IDLE_GRAPHS: u32 = 32;

/// What slices must save, in bytes, where nobody asked for them and there is memory without them.
const LEAST_SAVED: usize = 64 << 20;

/// The state behind it.
#[derive(Default)]
pub(super) struct Passes {
    rates: Mutex<Rates>,
    /// Graphs that the cache served since the ring was used.
    idle_graphs: AtomicU32,
    told: AtomicBool,
    /// The tokens of the pass of which it was told last that it runs in slices, and that it does not.
    told_slices: AtomicU64,
    told_whole: AtomicU64,
}

/// What a pass that may run in slices computes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PassLoad {
    /// Its tokens, those of a slice, and the bytes that slices save.
    pub(crate) tokens: u64,
    pub(crate) each: u64,
    pub(crate) saved: usize,
    /// Bytes of the experts that it uses, and of those of a block.
    pub(crate) expert_bytes: f64,
    pub(crate) layer_bytes: f64,
    /// Operations of products, with the rows that tiles are filled with, and of attention.
    pub(crate) operations: f64,
    pub(crate) attention: f64,
}

/// What the keys leave open.
#[derive(Clone, Copy, Debug)]
struct Choice {
    /// `None` leaves it to the model.
    stream_min: Option<u64>,
    middle: MiddlePasses,
    /// Whether experts lie where the device computes, so that nothing is gained by bringing a few.
    is_near: bool,
}

impl Choice {
    /// Whether experts of a pass may be brought.
    fn may_bring(self, tokens: u32) -> bool {
        let stream_min = self.stream_min.unwrap_or(WITHOUT_LINK.into());
        let places = match self.middle {
            MiddlePasses::Place => true,
            MiddlePasses::Auto => self.is_near,
            MiddlePasses::Fetch | MiddlePasses::Cpu => false,
        };
        tokens >= LEAST_TOKENS && (!places || u64::from(tokens) >= stream_min)
    }

    /// The way of a pass whose experts may be brought. `in_ram`: the cache could compute it.
    fn way(self, tokens: u32, layer: &Layer, rates: &Rates, in_ram: bool) -> Way {
        let must_stream = match self.stream_min {
            Some(least) => u64::from(tokens) >= least,
            None => (self.is_near || self.middle == MiddlePasses::Place) && tokens >= WITHOUT_LINK,
        };
        if must_stream {
            return Way::Stream;
        }
        let may_stream = self.stream_min.is_none() && !self.is_near;
        match self.middle {
            MiddlePasses::Cpu if in_ram => Way::InRam,
            MiddlePasses::Auto => layer.way(tokens, rates, in_ram, may_stream),
            MiddlePasses::Fetch | MiddlePasses::Cpu | MiddlePasses::Place => {
                layer.way(tokens, rates, false, may_stream)
            }
        }
    }
}

impl Device {
    fn choice(&self) -> Choice {
        Choice { stream_min: self.config.stream_min_tokens, middle: self.config.middle_passes, is_near: !self.is_gpu() }
    }

    /// Whether blocks of so many tokens are to be cut out of a graph, so that their experts can be brought.
    pub(crate) fn may_bring(&self, tokens: i64) -> bool {
        self.choice().may_bring(u32::try_from(tokens).unwrap_or(0))
    }

    /// The way of a pass for which [`Device::may_bring`] holds.
    pub(crate) fn way(&self, tokens: u32, layer: &Layer, in_ram: bool) -> Way {
        self.choice().way(tokens, layer, &self.rates(), in_ram)
    }

    /// Share of the experts that the cache holds, and whether there is one that nobody has.
    pub(crate) fn resident_share(&self) -> (f64, bool) {
        let Some(slot) = self.take_cache() else { return (0.0, false) };
        let share = slot.as_ref().map(Cache::resident_share);
        self.put_cache(slot);
        (share.unwrap_or(0.0), share.is_some())
    }

    /// What is known of the speed of the link and of the processor.
    pub(crate) fn rates(&self) -> Rates {
        Rates { threads: self.team_options().threads, ..*self.passes.rates.lock() }
    }

    /// Rates were measured.
    pub(crate) fn note_rates(&self, cpu: Option<f32>, link: Option<f32>) {
        let mut rates = self.passes.rates.lock();
        (rates.cpu, rates.link) = (cpu.or(rates.cpu), link.or(rates.link));
    }

    /// Tells once how long passes go which way, and why. `layer` is one of the model's, `cached` whether there is a cache.
    pub(crate) fn tell_passes(&self, layer: &Layer, cached: bool) {
        if self.choice().is_near || self.passes.told.swap(true, Ordering::Relaxed) {
            return;
        }
        if !cached && self.expert_settings().measures() {
            self.note_rates(None, gpu::link_rate(self.driver()));
        }
        log::notice(&format!("{}: {}", self.label(), words(self.choice(), layer, &self.rates(), cached)));
    }

    /// The most tokens that a block computes at once.
    pub(crate) fn slice_tokens(&self) -> SliceTokens {
        self.config.slice_tokens
    }

    /// Why a pass that may run in slices is to do so, if it is: where the link is what it waits for, and so what the cache holds counts for more than
    /// how fast kernels are. `lacks` is what must come for it at once and in slices, in bytes.
    pub(crate) fn wants_slices(&self, load: &PassLoad, lacks: [usize; 2]) -> Option<String> {
        match self.config.slice_tokens {
            SliceTokens::Off => return None,
            SliceTokens::Most(_) => return Some("slice-tokens".to_owned()),
            SliceTokens::Auto if self.choice().is_near || load.saved < LEAST_SAVED => return None,
            SliceTokens::Auto => {}
        }
        if self.rates().link.is_none() && self.expert_settings().measures() {
            self.note_rates(None, gpu::link_rate(self.driver()));
        }
        let rates = self.rates();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes of two layers")]
        let ring = if self.has_ring() { 0 } else { (2.0 * load.layer_bytes) as usize };
        let [whole, sliced] = lacks.map(|lacks| {
            let held = self.room_beside(lacks.saturating_add(ring)) as f64;
            (load.expert_bytes - held).max(0.0) / rates.link_bytes_per_us() / 1e3
        });
        let computing = computing_us(&ability(&self.inner_description()), load.operations, load.attention) / 1e3;
        let rate = rates.link_bytes_per_us() / 1e3;
        let why = format!(
            "slice-tokens=auto: experts come in {whole:.0} ms at {rate:.1} GB/s, in slices in {sliced:.0}; computing takes about {computing:.0}"
        );
        if (computing * SLICED).max(sliced) < computing.max(whole) {
            return Some(why);
        }
        if self.passes.told_whole.swap(load.tokens, Ordering::Relaxed) != load.tokens {
            let tokens = load.tokens;
            log::info(&format!(
                "{}: a pass of {tokens} tokens computes its experts for all of them at once ({why})",
                self.label()
            ));
        }
        None
    }

    /// Tells that experts are computed in slices, and why: the first time, and in more detail when the length is another than before.
    pub(crate) fn tell_slices(&self, load: &PassLoad, why: &str) {
        let PassLoad { tokens, each, saved, .. } = *load;
        let before = self.passes.told_slices.swap(tokens, Ordering::Relaxed);
        if before == tokens {
            return;
        }
        let line = format!(
            "{}: a pass of {tokens} tokens computes its experts in slices of {each} tokens, which leaves {} MiB more to the cache ({why})",
            self.label(),
            saved >> 20
        );
        if before == 0 { log::notice(&line) } else { log::debug(&line) }
    }

    /// A pass takes the ring.
    pub(super) fn note_ring_use(&self) {
        self.passes.idle_graphs.store(0, Ordering::Relaxed);
    }

    /// A graph of single tokens begins: whether the ring has been idle for so long that its memory is better used by the cache.
    pub(crate) fn ring_is_idle(&self) -> bool {
        self.has_ring() && self.passes.idle_graphs.fetch_add(1, Ordering::Relaxed) >= IDLE_GRAPHS
    }
}

/// How passes of 9 tokens and more go.
fn words(choice: Choice, layer: &Layer, rates: &Rates, cached: bool) -> String {
    let expert = format!("an expert has {:.1} MiB", layer.expert_bytes as f64 / f64::from(1 << 20));
    let reason = format!("{}, {expert}", rates.words());
    let ways = |tokens: u32| {
        let most = u32::try_from(MOST_MIDDLE_TOKENS).unwrap_or(0);
        choice.way(tokens, layer, rates, cached && tokens <= most)
    };
    let (threshold, why) = match choice.stream_min {
        Some(least) => (u32::try_from(least).unwrap_or(u32::MAX), "stream-min-tokens".to_owned()),
        None if choice.middle == MiddlePasses::Place => (WITHOUT_LINK, "stream-min-tokens=auto".to_owned()),
        None => (layer.threshold(LEAST_TOKENS, rates), format!("stream-min-tokens=auto: {reason}")),
    };
    let line = format!("passes of {threshold} tokens and more bring all experts of a layer ({why})");
    let decode = u32::try_from(MOST_TOKENS).unwrap_or(0);
    if threshold <= decode + 1 {
        return line;
    }
    if !choice.may_bring(LEAST_TOKENS) {
        return format!("{line}; shorter ones read experts in RAM");
    }
    let in_ram = (LEAST_TOKENS..threshold.min(1000)).take_while(|&tokens| ways(tokens) == Way::InRam).last();
    match in_ram {
        Some(last) if last + 1 >= threshold => format!("{line}; shorter ones are computed where experts lie"),
        Some(last) => format!(
            "{line}; up to {last} tokens are computed where experts lie, those between bring the experts that they use"
        ),
        None => format!("{line}; shorter ones bring the experts that they use"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYER: Layer = Layer { experts: 128, used: 8, expert_bytes: 2_654_208, resident: 0.2 };

    fn choice(stream_min: Option<u64>, middle: MiddlePasses, is_near: bool) -> Choice {
        Choice { stream_min, middle, is_near }
    }

    fn fast() -> Rates {
        Rates { cpu: Some(75e3), link: Some(53e3), threads: 16 }
    }

    #[test]
    fn a_number_streams_from_there_on_and_never_computes_in_ram() {
        for middle in [MiddlePasses::Auto, MiddlePasses::Cpu, MiddlePasses::Fetch, MiddlePasses::Place] {
            let choice = choice(Some(9), middle, false);
            for tokens in [9, 31, 512] {
                assert!(choice.may_bring(tokens));
                assert_eq!(choice.way(tokens, &LAYER, &fast(), true), Way::Stream);
            }
            assert!(!choice.may_bring(8), "decoding");
        }
        let above = choice(Some(100), MiddlePasses::Fetch, false);
        assert_eq!([99, 100].map(|tokens| above.way(tokens, &LAYER, &fast(), true)), [Way::Fetch, Way::Stream]);
    }

    #[test]
    fn keys_choose_the_middle() {
        let way = |middle, in_ram| choice(None, middle, false).way(16, &LAYER, &fast(), in_ram);
        assert_eq!(way(MiddlePasses::Cpu, true), Way::InRam);
        assert_eq!(way(MiddlePasses::Cpu, false), Way::Fetch);
        assert_eq!(way(MiddlePasses::Fetch, true), Way::Fetch);
        let slow = Rates { link: Some(6e3), ..fast() };
        assert_eq!(choice(None, MiddlePasses::Auto, false).way(16, &LAYER, &slow, true), Way::InRam);
    }

    #[test]
    fn in_place_stays_whole_up_to_the_threshold() {
        for (middle, is_near) in [(MiddlePasses::Place, false), (MiddlePasses::Auto, true)] {
            let choice = choice(None, middle, is_near);
            assert_eq!([9, 31, 32].map(|tokens| choice.may_bring(tokens)), [false, false, true]);
            assert_eq!(choice.way(32, &LAYER, &fast(), true), Way::Stream);
        }
        let near = choice(None, MiddlePasses::Fetch, true);
        assert!(near.may_bring(9));
        assert_eq!([9, 32].map(|tokens| near.way(tokens, &LAYER, &fast(), true)), [Way::Fetch, Way::Stream]);
    }

    #[test]
    fn the_threshold_is_told_with_its_reason() {
        let auto = words(choice(None, MiddlePasses::Auto, false), &LAYER, &Rates { link: Some(6e3), ..fast() }, true);
        assert!(
            auto.contains("stream-min-tokens=auto: the link moves 6.0 GB/s, experts in RAM are read at 75.0"),
            "{auto}"
        );
        assert!(auto.contains("up to 32 tokens are computed where experts lie"), "{auto}");
        let nine = words(choice(Some(9), MiddlePasses::Auto, false), &LAYER, &fast(), true);
        assert_eq!(nine, "passes of 9 tokens and more bring all experts of a layer (stream-min-tokens)");
        let fetch = words(choice(Some(64), MiddlePasses::Fetch, false), &LAYER, &fast(), true);
        assert!(fetch.ends_with("shorter ones bring the experts that they use"), "{fetch}");
    }
}
