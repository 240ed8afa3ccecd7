//! What a replay counted, token by token.
//!
//! Owns: [`Series`] and its sums, [`Outcome`].
//! Threads: none. Does not: replay.

use std::ops::Range;

use super::trace::Trace;

/// Sums over some tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Uses of experts.
    pub uses: u64,
    /// Uses that found their expert in the cache.
    pub hits: u64,
    /// Experts brought in.
    pub uploads: u64,
    /// Tokens.
    pub tokens: u64,
}

impl Outcome {
    /// Share of uses that hit, in percent.
    pub fn hit_percent(&self) -> f64 {
        100.0 * self.hits as f64 / self.uses.max(1) as f64
    }

    /// Uploads per token.
    pub fn uploads_per_token(&self) -> f64 {
        self.uploads as f64 / self.tokens.max(1) as f64
    }

    /// Adds another sum.
    pub fn add(&mut self, other: Self) {
        self.uses += other.uses;
        self.hits += other.hits;
        self.uploads += other.uploads;
        self.tokens += other.tokens;
    }
}

/// One count per token.
#[derive(Clone, Debug, PartialEq)]
pub struct Series(Vec<Outcome>);

impl Series {
    pub(super) fn new(trace: &Trace) -> Self {
        Self(vec![Outcome { tokens: 1, ..Outcome::default() }; trace.tokens()])
    }

    pub(super) fn add(&mut self, token: usize, uses: usize, hits: usize, uploads: usize) {
        let (uses, hits, uploads) = (uses as u64, hits as u64, uploads as u64);
        self.0[token].add(Outcome { uses, hits, uploads, tokens: 0 });
    }

    /// The sum over a range of tokens, as far as there are tokens.
    pub fn sum(&self, tokens: Range<usize>) -> Outcome {
        let mut sum = Outcome::default();
        let end = tokens.end.min(self.0.len());
        self.0.get(tokens.start..end).unwrap_or_default().iter().for_each(|&one| sum.add(one));
        sum
    }

    /// The sum over the second half: the first one warms up.
    pub fn second_half(&self) -> Outcome {
        self.sum(self.0.len() / 2..self.0.len())
    }
}
