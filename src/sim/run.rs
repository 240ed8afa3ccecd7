//! Replays by name: the rule, the share of the experts that the cache holds, the figures.
//!
//! Owns: the names of rules, and the replay of the plugin's own policy. An upload is complete before the next token, as with
//! `fixed=1`; the live cache may lag behind it.
//! Threads: none. Does not: format anything (`report`, `chart`).

use super::baselines::{belady, fixed_list, layers, lfu, lru};
use super::series::Series;
use super::trace::Trace;
use crate::experts::heat::Heat;
use crate::experts::policy::{Policy, Pool, Settings};
use crate::experts::shape::{Group, GroupId, Shape, ShapeError};

/// A rule that decides what the cache holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// The least recently used leaves; one cache per layer.
    Lru,
    /// The least often used leaves; one cache per layer.
    Lfu,
    /// The experts that the first half of the trace used most, never changed.
    Static,
    /// The best that anybody who knows the future can do; one cache per layer.
    Belady,
    /// Whole layers: stock's placement.
    Layers,
    /// The plugin's policy.
    Window,
}

impl Rule {
    /// Every rule with its name.
    pub const ALL: [(&'static str, Self); 6] = [
        ("lru", Self::Lru),
        ("lfu", Self::Lfu),
        ("static", Self::Static),
        ("belady", Self::Belady),
        ("layers", Self::Layers),
        ("window", Self::Window),
    ];

    /// The rule of a name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(own, _)| *own == name).map(|&(_, rule)| rule)
    }

    /// The name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, rule)| *rule == self).map_or("", |(name, _)| name)
    }

    /// Replays a trace with so many slots per layer.
    pub fn replay(self, trace: &Trace, slots: usize, settings: &Settings) -> Result<Series, ShapeError> {
        Ok(match self {
            Self::Lru => lru(trace, slots),
            Self::Lfu => lfu(trace, slots),
            Self::Static => fixed_list(trace, slots, 0..trace.tokens() / 2),
            Self::Belady => belady(trace, slots),
            Self::Layers => layers(trace, slots),
            Self::Window => window(trace, slots, settings)?,
        })
    }
}

/// Experts per layer that a share of the cache holds; never fewer than one token uses.
pub fn slots_per_layer(trace: &Trace, share: f64) -> usize {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a number of experts")]
    let slots = (share * trace.experts() as f64).round_ties_even() as usize;
    slots.clamp(trace.used(), trace.experts())
}

/// The shape of a model whose layers are all alike, with one pool.
pub fn uniform_shape(layers: usize, experts: usize, used: usize) -> Result<Shape, ShapeError> {
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    Shape::new(vec![Group { experts: count(experts), used: count(used), pool: 0 }; layers])
}

/// The plugin's policy with one pool over all layers. It begins knowing nothing.
fn window(trace: &Trace, slots: usize, settings: &Settings) -> Result<Series, ShapeError> {
    let shape = uniform_shape(trace.layers(), trace.experts(), trace.used())?;
    let slots = u32::try_from(slots * trace.layers()).unwrap_or(u32::MAX);
    let heat = Heat::new(shape.blocks());
    let mut policy = Policy::new(shape, &[Pool { slots, block_bytes: 1 }], *settings, heat);
    let mut series = Series::new(trace);
    let mut uploads = Vec::new();
    for token in 0..trace.tokens() {
        let before = policy.tally();
        for (group, layer) in (0..).map(GroupId).zip(0..trace.layers()) {
            policy.note_use(group, trace.at(token, layer).iter().map(|&expert| expert.into()));
        }
        let found = usize::try_from(policy.tally().hits - before.hits).unwrap_or(0);
        uploads.clear();
        uploads.extend(policy.end_of_step(1).iter().map(|admission| admission.block));
        series.add(token, trace.layers() * trace.used(), found, uploads.len());
        uploads.iter().for_each(|&block| policy.loaded(block));
    }
    Ok(series)
}
