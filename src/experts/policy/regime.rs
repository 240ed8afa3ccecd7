//! Recency or frequency: which order of blocks finds more experts.
//!
//! Owns: two *shadows*, each asking of every use whether the block was among the best N by one order (score of recent use, lifetime
//! heat), N being the slots; and the decision with its hysteresis. A shadow needs no list: the number of blocks per level gives
//! the level that the N-th best block has. The order in force is judged by the hits that it really has; how far its shadow was off
//! then corrects the shadow later.
//! Invariants: both shadows see the same uses at the same time, before the use is counted; thresholds are at most
//! [`CHECK_TOKENS`] tokens old.
//! Threads: none. Does not: move blocks.

use super::ranking::LEVELS;

/// The order of blocks by which a pool decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Regime {
    /// By recent use.
    Recency,
    /// By lifetime heat.
    Frequency,
}

/// Tokens between two looks.
const CHECK_TOKENS: u32 = 32;
/// Of an older average, what is kept at each look.
const KEPT: f32 = 0.875;
/// Tokens before the first decision for frequency: a list by the heat of fewer tokens is only a longer window.
const LEARNING_TOKENS: u32 = 1024;
/// Uploads run beside the computation, so of their price only this part counts against recency, and at most so much.
const UPLOAD_WEIGHT: f32 = 0.25;
const MOST_PRICE: f32 = 0.02;
/// Of the last known uploads of recency, what is kept at each look under frequency.
const FORGOTTEN: f32 = 0.98;
/// What the other order must be better by, as a share of uses, and at how many looks in a row.
const MARGIN: f32 = 0.01;
const LOOKS: u32 = 4;

/// One order, and how well it would do.
#[derive(Clone, Debug)]
struct Shadow {
    members: Vec<u32>,
    /// Blocks above this level are in; of those at it, this share.
    threshold: (u16, f32),
    hits: f32,
}

impl Shadow {
    fn new(blocks: u32) -> Self {
        let mut members = vec![0; LEVELS.into()];
        members[0] = blocks;
        Self { members, threshold: (0, 0.0), hits: 0.0 }
    }

    fn ask(&mut self, level: u16) {
        let (threshold, share) = self.threshold;
        self.hits += match level.cmp(&threshold) {
            std::cmp::Ordering::Greater => 1.0,
            std::cmp::Ordering::Equal => share,
            std::cmp::Ordering::Less => 0.0,
        };
    }

    fn shift(&mut self, from: u16, to: u16) {
        self.members[usize::from(from)] -= 1;
        self.members[usize::from(to)] += 1;
    }

    fn renew(&mut self, slots: u32) {
        let mut left = slots;
        for (level, &members) in self.members.iter().enumerate().rev() {
            let level = u16::try_from(level).unwrap_or(0);
            if members >= left {
                // A block that was never used is in no list.
                let share = if level == 0 || members == 0 { 0.0 } else { left as f32 / members as f32 };
                self.threshold = (level, share);
                return;
            }
            left -= members;
        }
        self.threshold = (0, 0.0);
    }
}

/// Averages, all as shares of the uses.
#[derive(Clone, Copy, Debug)]
struct Average {
    recency: f32,
    frequency: f32,
    /// What really was found.
    found: f32,
    /// What recency uploads.
    uploads: f32,
}

/// The comparison for one pool.
#[derive(Clone, Debug)]
pub(super) struct Comparison {
    recency: Shadow,
    frequency: Shadow,
    uses: f32,
    found: f32,
    uploads: f32,
    tokens: u32,
    tokens_seen: u32,
    average: Option<Average>,
    /// How much more each order found while it was in force than its shadow.
    correction: [f32; 2],
    against: u32,
}

impl Comparison {
    pub(super) fn new(blocks: u32) -> Self {
        Self {
            recency: Shadow::new(blocks),
            frequency: Shadow::new(blocks),
            uses: 0.0,
            found: 0.0,
            uploads: 0.0,
            tokens: 0,
            tokens_seen: 0,
            average: None,
            correction: [0.0; 2],
            against: 0,
        }
    }

    /// A use of a block with this score and this level of heat, before it is counted, and whether the block was there.
    pub(super) fn ask(&mut self, score: u16, heat: u16, found: bool) {
        self.uses += 1.0;
        self.found += f32::from(u8::from(found));
        self.recency.ask(score);
        self.frequency.ask(heat);
    }

    pub(super) fn shift_score(&mut self, from: u16, to: u16) {
        self.recency.shift(from, to);
    }

    pub(super) fn shift_heat(&mut self, from: u16, to: u16) {
        self.frequency.shift(from, to);
    }

    /// All heat levels changed.
    pub(super) fn recount_heat(&mut self, levels: impl Iterator<Item = u16>) {
        self.frequency.members.fill(0);
        levels.for_each(|level| self.frequency.members[usize::from(level)] += 1);
    }

    pub(super) fn count_upload(&mut self) {
        self.uploads += 1.0;
    }

    /// Some tokens have passed. Returns the regime to change to, if it is time.
    pub(super) fn look(&mut self, now: Regime, tokens: u32, slots: u32, payback: f32) -> Option<Regime> {
        self.tokens += tokens;
        self.tokens_seen = self.tokens_seen.saturating_add(tokens);
        if self.tokens < CHECK_TOKENS {
            return None;
        }
        self.tokens = 0;
        self.recency.renew(slots);
        self.frequency.renew(slots);
        let average = self.renew_average(now);
        let Average { recency, frequency, found, uploads } = average;
        let price = (UPLOAD_WEIGHT * payback * uploads).min(MOST_PRICE);
        let (better, learning) = match now {
            Regime::Recency => {
                self.correction[0] = found - recency;
                (frequency + self.correction[1] > found - price + MARGIN, self.tokens_seen < LEARNING_TOKENS)
            }
            Regime::Frequency => {
                self.correction[1] = found - frequency;
                (recency + self.correction[0] - price > found + MARGIN, false)
            }
        };
        self.against = if better && !learning { self.against + 1 } else { 0 };
        (self.against >= LOOKS).then(|| {
            self.against = 0;
            match now {
                Regime::Recency => Regime::Frequency,
                Regime::Frequency => Regime::Recency,
            }
        })
    }

    fn renew_average(&mut self, now: Regime) -> Average {
        let uses = std::mem::take(&mut self.uses).max(1.0);
        let share = |count: &mut f32| std::mem::take(count) / uses;
        let new = Average {
            recency: share(&mut self.recency.hits),
            frequency: share(&mut self.frequency.hits),
            found: share(&mut self.found),
            uploads: share(&mut self.uploads),
        };
        let before = self.average.unwrap_or(new);
        let mix = |before: f32, new: f32| KEPT * before + (1.0 - KEPT) * new;
        let average = Average {
            recency: mix(before.recency, new.recency),
            frequency: mix(before.frequency, new.frequency),
            found: mix(before.found, new.found),
            // Under frequency nobody sees what recency would upload: the last figure stands and loses its weight.
            uploads: match now {
                Regime::Recency => mix(before.uploads, new.uploads),
                Regime::Frequency => before.uploads * FORGOTTEN,
            },
        };
        self.average = Some(average);
        average
    }
}
