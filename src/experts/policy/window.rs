//! Recent use: how often each block was used in the last tokens.
//!
//! Owns: the uses of the last `long` tokens in order, and the rule of counting. A block has two counts: uses within `long` and within
//! `short` tokens. Their sum, the *score*, weighs fresh use more than old use.
//! Invariants: a block counts once per step, whatever the number of tokens of the step that use it: its weights are read once. The
//! newest step is always inside; in the steady state nothing is allocated.
//! Threads: none. Does not: store the counts (the user does, beside what else it has per block), or know what is held.

use std::collections::VecDeque;

use super::super::shape::Block;

/// The counts of one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// Uses in the long window.
    pub(super) long: u16,
    /// Uses in the short window.
    pub(super) short: u16,
    /// The step of the last use.
    step: u32,
}

impl Counts {
    /// Uses in the long window plus uses in the short window.
    pub(super) fn score(self) -> u16 {
        self.long + self.short
    }
}

/// A window that a use has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lost {
    Long,
    Short,
}

#[derive(Clone, Copy, Debug)]
struct Step {
    tokens: u32,
    uses: u32,
}

/// The uses of the last tokens.
#[derive(Clone, Debug)]
pub(super) struct Window {
    long: u32,
    short: u32,
    uses: VecDeque<Block>,
    steps: VecDeque<Step>,
    /// Tokens of all steps, and of those in the short window.
    tokens: (u32, u32),
    /// Steps and uses in the short window.
    short_part: (usize, usize),
    /// The number of the open step, and its uses.
    open: (u32, u32),
}

impl Window {
    /// Nothing was used so far. `long` is at most [`Window::LONGEST`].
    pub(super) fn new(long: u32, short: u32, uses_per_token: usize) -> Self {
        let uses = uses_per_token.saturating_mul(long as usize + 1).min(1 << 20);
        Self {
            long,
            short,
            uses: VecDeque::with_capacity(uses),
            steps: VecDeque::with_capacity(long as usize + 1),
            tokens: (0, 0),
            short_part: (0, 0),
            open: (1, 0),
        }
    }

    /// The longest window, so that counts and levels fit.
    pub(super) const LONGEST: u32 = 127;

    /// A use in the open step. Returns whether it is the first of the step, and then counts it.
    pub(super) fn add(&mut self, block: Block, counts: &mut Counts) -> bool {
        if counts.step == self.open.0 {
            return false;
        }
        *counts = Counts { long: counts.long + 1, short: counts.short + 1, step: self.open.0 };
        self.uses.push_back(block);
        self.open.1 += 1;
        true
    }

    /// Ends the open step. `lost` is called for each use that leaves a window, and takes it off the block's counts.
    pub(super) fn close(&mut self, tokens: u32, mut lost: impl FnMut(Block, Lost)) {
        let (number, uses) = self.open;
        self.open = (number.wrapping_add(1).max(1), 0);
        self.steps.push_back(Step { tokens, uses });
        self.tokens = (self.tokens.0.saturating_add(tokens), self.tokens.1.saturating_add(tokens));
        self.short_part = (self.short_part.0 + 1, self.short_part.1 + uses as usize);
        while self.tokens.1 > self.short && self.short_part.0 > 1 {
            let step = self.steps[self.steps.len() - self.short_part.0];
            let first = self.uses.len() - self.short_part.1;
            for at in first..first + step.uses as usize {
                lost(self.uses[at], Lost::Short);
            }
            self.tokens.1 -= step.tokens;
            self.short_part = (self.short_part.0 - 1, self.short_part.1 - step.uses as usize);
        }
        while self.tokens.0 > self.long && self.steps.len() > 1 {
            let Some(step) = self.steps.pop_front() else { break };
            for _ in 0..step.uses {
                let Some(block) = self.uses.pop_front() else { break };
                lost(block, Lost::Long);
            }
            self.tokens.0 -= step.tokens;
        }
    }

    /// What the score of a block used by every token would be.
    pub(super) fn full_score(&self) -> f32 {
        (self.long + self.short) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against counting again from the list of all steps.
        #[test]
        fn counts_are_those_of_the_last_tokens(steps in proptest::collection::vec((1_u32..7, proptest::collection::vec(0_u32..6, 0..8)), 1..60)) {
            let (long, short) = (16, 6);
            let mut window = Window::new(long, short, 4);
            let mut counted = [Counts::default(); 6];
            for (at, (tokens, uses)) in steps.iter().enumerate() {
                for &block in uses {
                    window.add(Block(block), &mut counted[block as usize]);
                }
                window.close(*tokens, |block, lost| match lost {
                    Lost::Long => counted[block.index()].long -= 1,
                    Lost::Short => counted[block.index()].short -= 1,
                });
                let within = |limit: u32| {
                    let mut left = limit;
                    let mut counts = [0_u16; 6];
                    for (age, (tokens, uses)) in steps[..=at].iter().rev().enumerate() {
                        if age > 0 && *tokens > left {
                            break;
                        }
                        left = left.saturating_sub(*tokens);
                        (0..6).filter(|block| uses.contains(block)).for_each(|block| counts[block as usize] += 1);
                    }
                    counts
                };
                let (long, short) = (within(long), within(short));
                for block in 0..6 {
                    prop_assert_eq!((counted[block].long, counted[block].short), (long[block], short[block]));
                }
            }
        }
    }

    #[test]
    fn the_steady_state_does_not_grow() {
        let mut window = Window::new(64, 24, 4);
        let mut counts = [Counts::default(); 8];
        let capacity = (window.uses.capacity(), window.steps.capacity());
        for token in 0..1000_u32 {
            for slot in 0..4 {
                let block = Block((token + slot) % 8);
                assert!(window.add(block, &mut counts[block.index()]));
            }
            let again = Block(token % 8);
            assert!(!window.add(again, &mut counts[again.index()]), "a second use in a step does not count");
            window.close(1, |block, lost| match lost {
                Lost::Long => counts[block.index()].long -= 1,
                Lost::Short => counts[block.index()].short -= 1,
            });
        }
        assert_eq!((window.uses.capacity(), window.steps.capacity()), capacity);
    }
}
