//! Lifetime heat: how often each block was used since anybody counted, with old use fading.
//!
//! Owns: one number per block and the number of tokens it rests on. Both fade alike, so their quotient is the block's rate of use
//! per token. Fading is lazy: instead of shrinking all numbers, what is added grows.
//! Invariants: rates are finite and not negative; `merge` adds what two tables saw, so the order of merging does not matter.
//! Threads: none. Does not: know files (`statefile`) or decide anything (`policy`).

use super::shape::Block;

/// Tokens until use counts half.
pub const HALF_LIFE_TOKENS: f64 = 16_384.0;

/// Above this, the lazily growing unit is brought back to 1.
const LARGEST_UNIT: f32 = 1.0e18;

/// Heat of every block of one model.
#[derive(Clone, Debug)]
pub struct Heat {
    uses: Vec<f32>,
    /// What one use adds now.
    unit: f32,
    /// Tokens seen, faded like the uses.
    tokens: f64,
    /// From a number of the table to a rate.
    scale: f32,
    /// What is left of the numbers with which the table began.
    kept: f64,
}

impl Heat {
    /// A table that has seen nothing.
    pub fn new(blocks: usize) -> Self {
        Self { uses: vec![0.0; blocks], unit: 1.0, tokens: 0.0, scale: 1.0, kept: 1.0 }
    }

    /// A table with given rates, as if learned from `tokens` tokens.
    pub fn from_rates(rates: impl IntoIterator<Item = f32>, tokens: f64) -> Self {
        let tokens = if tokens.is_finite() { tokens.clamp(0.0, Self::most_tokens()) } else { 0.0 };
        #[expect(clippy::cast_possible_truncation, reason = "rounded to the precision of the table")]
        let scale = tokens as f32;
        let uses = rates.into_iter().map(|rate| if rate > 0.0 && rate.is_finite() { rate * scale } else { 0.0 });
        let mut heat = Self { uses: uses.collect(), unit: 1.0, tokens, scale: 1.0, kept: 1.0 };
        heat.rescale();
        heat
    }

    /// The number of tokens that fading converges to: the weight of a table that has learned all it can.
    pub fn most_tokens() -> f64 {
        HALF_LIFE_TOKENS / std::f64::consts::LN_2
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.uses.len()
    }

    /// Tokens that the table rests on, faded.
    pub fn tokens(&self) -> f64 {
        self.tokens
    }

    /// One use of a block.
    pub fn add(&mut self, block: Block) {
        if let Some(uses) = self.uses.get_mut(block.index()) {
            *uses += self.unit;
        }
    }

    /// Some tokens have passed: everything older fades. Returns whether all numbers were scaled, so that orders made by
    /// them are to be made again.
    pub fn advance(&mut self, tokens: u32) -> bool {
        let tokens = f64::from(tokens);
        let fade = (tokens / HALF_LIFE_TOKENS).exp2();
        self.tokens = self.tokens / fade + tokens;
        self.kept /= fade;
        #[expect(clippy::cast_possible_truncation, reason = "rounded to the precision of the table")]
        let fade = fade as f32;
        self.unit *= fade;
        if self.unit.is_finite() && self.unit < LARGEST_UNIT {
            self.rescale();
            return false;
        }
        let scale = 1.0 / self.unit;
        self.uses.iter_mut().for_each(|uses| *uses *= scale);
        self.unit = 1.0;
        self.rescale();
        true
    }

    fn rescale(&mut self) {
        #[expect(clippy::cast_possible_truncation, reason = "rounded to the precision of the table")]
        let tokens = self.tokens.max(1.0) as f32;
        self.scale = 1.0 / (self.unit * tokens);
    }

    /// Uses per token, 0 for a block that does not exist.
    pub fn rate(&self, block: Block) -> f32 {
        self.raw(block) * self.scale
    }

    /// A number that orders blocks by rate and changes only when a block is used.
    pub(super) fn raw(&self, block: Block) -> f32 {
        self.uses.get(block.index()).copied().unwrap_or(0.0)
    }

    /// What this table saw since it was a copy of `start`; `None` if it never was.
    pub fn since(&self, start: &Self) -> Option<Self> {
        if self.uses.len() != start.uses.len() {
            return None;
        }
        #[expect(clippy::cast_possible_truncation, reason = "rounded to the precision of the table")]
        let kept = (self.kept / start.kept) as f32;
        let (now, then) = (1.0 / self.unit, kept / start.unit);
        let uses =
            self.uses.iter().zip(&start.uses).map(|(uses, before)| (uses * now - before * then).max(0.0)).collect();
        let tokens = (self.tokens - start.tokens * f64::from(kept)).max(0.0);
        let mut seen = Self { uses, unit: 1.0, tokens, scale: 1.0, kept: 1.0 };
        seen.rescale();
        Some(seen)
    }

    /// Adds what another table saw. Tables of other lengths do not fit and are left out; says whether it was added.
    pub fn merge(&mut self, other: &Self) -> bool {
        if self.uses.len() != other.uses.len() {
            return false;
        }
        let scale = self.unit / other.unit;
        for (uses, more) in self.uses.iter_mut().zip(&other.uses) {
            *uses += more * scale;
        }
        self.tokens += other.tokens;
        self.rescale();
        true
    }

    /// Blocks that were ever used, the hottest first; equals in the order of their numbers.
    pub fn hottest(&self) -> Vec<Block> {
        let numbers = 0..u32::try_from(self.uses.len()).unwrap_or(u32::MAX);
        let mut order: Vec<Block> = numbers.map(Block).filter(|&block| self.raw(block) > 0.0).collect();
        order.sort_by(|&a, &b| self.raw(b).total_cmp(&self.raw(a)));
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn learned(uses: &[(u32, u32)], tokens: u32) -> Heat {
        let mut heat = Heat::new(4);
        for token in 0..tokens {
            uses.iter().filter(|(every, _)| token % every == 0).for_each(|&(_, block)| heat.add(Block(block)));
            heat.advance(1);
        }
        heat
    }

    #[test]
    fn rates_are_uses_per_token() {
        let heat = learned(&[(1, 0), (4, 2)], 1000);
        let rates: Vec<f32> = (0..5).map(|block| heat.rate(Block(block))).collect();
        assert!((rates[0] - 1.0).abs() < 0.001 && (rates[2] - 0.25).abs() < 0.001, "{rates:?}");
        assert_eq!((rates[1], rates[4]), (0.0, 0.0));
        assert_eq!(heat.hottest(), [Block(0), Block(2)]);
    }

    #[test]
    fn old_use_fades_and_the_unit_never_overflows() {
        let mut heat = learned(&[(1, 0)], 2000);
        let mut scaled = 0;
        for _ in 0..1200 {
            heat.add(Block(1));
            scaled += u32::from(heat.advance(1024));
        }
        assert!(scaled > 0);
        assert!(heat.rate(Block(0)) < 1e-9 && heat.rate(Block(0)).is_finite());
        assert!((heat.rate(Block(1)) * 1024.0 - 1.0).abs() < 0.1, "{}", heat.rate(Block(1)));
        assert!((heat.tokens() / Heat::most_tokens() - 1.0).abs() < 0.05);
    }

    #[test]
    fn a_table_from_rates_goes_on_learning() {
        let mut heat = Heat::from_rates([0.5, 0.0, f32::NAN, -1.0], 1000.0);
        assert_eq!(heat.hottest(), [Block(0)]);
        for _ in 0..1000 {
            heat.add(Block(1));
            heat.advance(1);
        }
        assert!((heat.rate(Block(0)) - 0.25).abs() < 0.01 && (heat.rate(Block(1)) - 0.5).abs() < 0.02);
        assert!(Heat::from_rates([1.0], f64::NAN).rate(Block(0)).is_finite());
        assert!(Heat::from_rates([1.0], 1e300).rate(Block(0)) < 1.01);
    }

    #[test]
    fn what_was_seen_since_is_told_apart() {
        let start = learned(&[(1, 0), (2, 1)], 500);
        let mut heat = start.clone();
        for token in 0..3000 {
            if token % 4 == 0 {
                heat.add(Block(1));
            }
            heat.advance(1);
        }
        let seen = heat.since(&start).unwrap();
        assert!((seen.rate(Block(1)) - 0.25).abs() < 0.002, "{}", seen.rate(Block(1)));
        assert!(seen.rate(Block(0)) < 1e-4);
        assert!((seen.tokens() - 3000.0).abs() < 200.0, "a little has faded: {}", seen.tokens());
        let mut sum = start.clone();
        sum.merge(&seen);
        for block in (0..4).map(Block) {
            assert!((sum.rate(block) - heat.rate(block)).abs() < 0.02);
        }
        assert!(heat.since(&Heat::new(5)).is_none());
    }

    #[test]
    fn other_models_are_not_merged() {
        assert!(!Heat::new(4).merge(&Heat::new(5)));
    }

    proptest! {
        #[test]
        fn merging_adds_whatever_the_order(a in 1_u32..50, b in 1_u32..50, first in 1_u32..5, second in 1_u32..5) {
            let (one, two) = (learned(&[(first, 0)], a), learned(&[(second, 0), (1, 3)], b));
            let (mut left, mut right) = (one.clone(), two.clone());
            prop_assert!(left.merge(&two) && right.merge(&one));
            for block in (0..4).map(Block) {
                prop_assert!((left.rate(block) - right.rate(block)).abs() < 1e-4);
            }
            let uses = f64::from(a.div_ceil(first) + b.div_ceil(second));
            prop_assert!((f64::from(left.rate(Block(0))) * left.tokens() - uses).abs() < 0.5);
        }
    }
}
