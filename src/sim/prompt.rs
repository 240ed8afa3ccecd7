//! Decoding after a prompt: what the plugin's policy finds when a long pass took memory of the cache, and gave it back.
//!
//! Owns: the replay of a trace of which a part is a prompt. While it is computed the pool has fewer slots, which the pass fills on its way; then
//! they come back by steps. Uploads are complete before the next token, as in [`super::Rule::replay`], and bounded by a share of the link.
//! Threads: none. Does not: know memory or time.

use std::ops::Range;

use super::run::uniform_shape;
use super::series::Series;
use super::trace::Trace;
use crate::experts::heat::Heat;
use crate::experts::policy::{Policy, Pool, PromptTail, Rates, Settings};
use crate::experts::shape::{GroupId, ShapeError};

/// The most tokens of a prompt's end that the policy is told.
pub const TAIL_TOKENS: usize = 256;
/// Blocks loaded in the background with a token, at most.
const PRELOAD_PER_STEP: usize = 24;
/// The part of the slots that comes back with each token.
const RETURN_PART: usize = 32;

/// A prompt within a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prompt {
    /// Tokens decoded before.
    pub before: usize,
    /// Its tokens.
    pub tokens: usize,
    /// The part of the slots that is left while it is computed.
    pub left: f64,
    /// Uploads that a token's share of the link allows.
    pub uploads_per_token: f32,
}

/// What is done with the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// It is no prompt: its tokens are decoded, and the slots stay.
    Decoded,
    /// The policy is told nothing of it.
    Nothing,
    /// The policy is told what its last tokens used.
    Tail,
}

impl Told {
    /// Every way with its name.
    pub const ALL: [(&'static str, Self); 3] =
        [("no prompt", Self::Decoded), ("not told", Self::Nothing), ("preheated", Self::Tail)];
}

/// Of the last layer the very last token is computed only.
fn tail(trace: &Trace, tokens: Range<usize>) -> PromptTail {
    let layers = trace.layers();
    let experts = |layer: usize| {
        let uses = tokens.clone().flat_map(move |token| trace.at(token, layer));
        uses.map(|&expert| u32::from(expert)).collect::<Vec<_>>()
    };
    let known = |layer: usize| layer + 1 < layers || layers == 1;
    PromptTail {
        tokens: u32::try_from(tokens.len()).unwrap_or(0),
        groups: (0..layers)
            .map(|layer| (trace.used(), if known(layer) { experts(layer) } else { Vec::new() }))
            .collect(),
    }
}

impl Prompt {
    /// Replays a trace with so many slots per layer. Tokens of the prompt count as neither hits nor uploads unless they are decoded.
    pub fn replay(&self, trace: &Trace, slots: usize, settings: &Settings, told: Told) -> Result<Series, ShapeError> {
        let shape = uniform_shape(trace.layers(), trace.experts(), trace.used())?;
        let all = u32::try_from(slots * trace.layers()).unwrap_or(u32::MAX);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a number of slots")]
        let left = (self.left * f64::from(all)) as u32;
        let heat = Heat::new(shape.blocks());
        let mut policy = Policy::new(shape, &[Pool { slots: all, block_bytes: 1 }], *settings, heat);
        let link = self.uploads_per_token / settings.upload_share;
        let rates = Rates { cpu_bytes_per_us: settings.payback * link, link_bytes_per_us: link, step_us: 1.0 };
        policy.set_rates(rates);
        let mut series = Series::new(trace);
        let end = self.before + self.tokens;
        let mut open = all;
        for token in 0..trace.tokens() {
            if (self.before..end).contains(&token) && told != Told::Decoded {
                if token == self.before {
                    policy.resize(0, left);
                    open = left;
                    let loaded: Vec<_> = policy.fill().iter().map(|admission| admission.block).collect();
                    loaded.into_iter().for_each(|block| policy.loaded(block));
                }
                if token + 1 == end && told == Told::Tail {
                    policy.note_prompt(&tail(trace, end.saturating_sub(TAIL_TOKENS).max(self.before)..end));
                }
                continue;
            }
            let before = policy.tally();
            for (group, layer) in (0..).map(GroupId).zip(0..trace.layers()) {
                policy.note_use(group, trace.at(token, layer).iter().map(|&expert| expert.into()));
            }
            let found = usize::try_from(policy.tally().hits - before.hits).unwrap_or(0);
            let mut loads: Vec<_> = policy.end_of_step(1).iter().map(|admission| admission.block).collect();
            loads.extend(policy.preload(PRELOAD_PER_STEP).iter().map(|admission| admission.block));
            series.add(token, trace.layers() * trace.used(), found, loads.len());
            loads.into_iter().for_each(|block| policy.loaded(block));
            if open < all {
                open = all.min(open + (all / u32::try_from(RETURN_PART).unwrap_or(1)).max(1));
                policy.resize(0, open);
            }
        }
        Ok(series)
    }
}
