//! How many uses a cache of some size will find, before it has run.
//!
//! Owns: a guess from what earlier runs learned, or from the share of the experts that there is room for.
//! Invariants: between 0 and 1. Threads: none. Does not: decide anything; it is told to the user.

use crate::experts::heat::Heat;
use crate::experts::shape::{Block, Shape};

/// What an expectation rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ground {
    /// The experts that were used most in earlier runs would find this many.
    Learned,
    /// Models of this kind find this many with room for such a share.
    Share,
    /// There is no room for one token's experts, so whole layers lie there, and nothing of the others.
    Layers,
}

/// Expected hits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expectation {
    /// As a share of uses.
    pub hits: f64,
    /// What it rests on.
    pub ground: Ground,
}

/// What the policy found in simulation, by share of the experts (docs/policy.md): the mean over the four presets that are models.
const BY_SHARE: [(f64, f64); 9] = [
    (0.0, 0.0),
    (0.05, 0.45),
    (0.1, 0.60),
    (0.2, 0.78),
    (0.3, 0.86),
    (0.4, 0.905),
    (0.5, 0.93),
    (0.7, 0.965),
    (1.0, 1.0),
];
/// In those models a token uses at most this part of a layer's experts. Where it uses more, one token's experts say less about the next one's:
/// in the bundled model, which uses an eighth, half of what exceeds the share is found.
const USED: f64 = 1.0 / 16.0;
/// Tokens that heat must rest on to be asked.
const LEAST_TOKENS: f64 = 256.0;

/// What to expect of pools with so many slots. `heat` is what earlier runs learned, or a table that has seen nothing.
pub fn expected_hits(shape: &Shape, slots: &[u32], heat: &Heat) -> Expectation {
    let slots = |pool: usize| slots.get(pool).copied().unwrap_or(0);
    let mut experts = vec![0_u64; shape.pools()];
    let mut uses = vec![0_u64; shape.pools()];
    for group in shape.groups() {
        experts[usize::from(group.pool)] += u64::from(group.experts);
        uses[usize::from(group.pool)] += u64::from(group.used);
    }
    let all_uses = uses.iter().sum::<u64>().max(1) as f64;
    let (mut hits, mut layers) = (0.0, 0);
    for (pool, (&experts, &used)) in experts.iter().zip(&uses).enumerate() {
        let share = (f64::from(slots(pool)) / experts.max(1) as f64).min(1.0);
        let below_floor = u64::from(slots(pool)) < used;
        layers += usize::from(below_floor);
        let trust = (USED * experts as f64 / used.max(1) as f64).min(1.0);
        let found = if below_floor { share } else { share + trust * (by_share(share) - share) };
        hits += found * used as f64 / all_uses;
    }
    if layers == experts.len() {
        return Expectation { hits, ground: Ground::Layers };
    }
    // The list of the most used experts knows nothing of what the last tokens used, so it is a bound from below.
    match list(shape, slots, heat).filter(|found| *found > hits) {
        Some(hits) => Expectation { hits, ground: Ground::Learned },
        None => Expectation { hits, ground: Ground::Share },
    }
}

fn by_share(share: f64) -> f64 {
    let above = BY_SHARE.iter().position(|&(known, _)| known >= share).unwrap_or(BY_SHARE.len() - 1);
    let ((low, few), (high, many)) = (BY_SHARE[above.saturating_sub(1)], BY_SHARE[above]);
    if high > low { few + (many - few) * (share - low) / (high - low) } else { many }
}

/// What the blocks with most lifetime heat would find.
fn list(shape: &Shape, slots: impl Fn(usize) -> u32, heat: &Heat) -> Option<f64> {
    if heat.tokens() < LEAST_TOKENS || heat.blocks() != shape.blocks() {
        return None;
    }
    let mut rates = vec![Vec::new(); shape.pools()];
    let pools = shape.groups().iter().flat_map(|group| std::iter::repeat_n(group.pool, group.experts as usize));
    for (number, pool) in (0..).zip(pools) {
        rates[usize::from(pool)].push(heat.rate(Block(number)));
    }
    let (mut found, mut all) = (0.0, 0.0);
    for (pool, rates) in rates.iter_mut().enumerate() {
        rates.sort_by(|one, other| other.total_cmp(one));
        let sum = |rates: &[f32]| rates.iter().map(|&rate| f64::from(rate)).sum::<f64>();
        found += sum(&rates[..rates.len().min(slots(pool) as usize)]);
        all += sum(rates);
    }
    (all > 0.0).then(|| found / all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experts::shape::Group;
    use proptest::prelude::*;

    fn shape(layers: usize) -> Shape {
        Shape::new(vec![Group { experts: 100, used: 4, pool: 0 }; layers]).unwrap()
    }

    #[test]
    fn nothing_learned_leaves_the_share() {
        let expected = expected_hits(&shape(10), &[200], &Heat::new(1000));
        assert_eq!(expected.ground, Ground::Share);
        assert!((expected.hits - 0.78).abs() < 1e-9, "{expected:?}");
        assert!((expected_hits(&shape(10), &[1000], &Heat::new(1000)).hits - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_model_that_uses_many_experts_is_trusted_less() {
        let shape = Shape::new(vec![Group { experts: 32, used: 4, pool: 0 }; 6]).unwrap();
        let expected = expected_hits(&shape, &[64], &Heat::new(192));
        assert!((0.55..0.65).contains(&expected.hits), "the bundled model finds half to two thirds: {expected:?}");
    }

    #[test]
    fn a_cache_below_one_tokens_experts_holds_layers() {
        let expected = expected_hits(&shape(10), &[39], &Heat::new(1000));
        assert_eq!((expected.hits, expected.ground), (0.039, Ground::Layers));
    }

    #[test]
    fn a_few_experts_that_serve_nearly_all_are_learned() {
        let heat = |tokens| Heat::from_rates((0..1000).map(|block| if block % 10 == 0 { 0.39 } else { 0.001 }), tokens);
        let expected = expected_hits(&shape(10), &[100], &heat(5000.0));
        assert_eq!(expected.ground, Ground::Learned);
        assert!((expected.hits - 39.0 / 39.9).abs() < 1e-3, "{expected:?}");
        assert_eq!(expected_hits(&shape(10), &[100], &heat(10.0)).ground, Ground::Share, "too little was seen");
    }

    proptest! {
        #[test]
        fn more_room_never_finds_less(layers in 1_usize..6, slots in 0_u32..700, hot in 1_u32..50) {
            let shape = shape(layers);
            let heat = Heat::from_rates((0..shape.blocks()).map(|block| if block % hot as usize == 0 { 0.2 } else { 0.01 }), 1e4);
            let hits = |slots: u32| expected_hits(&shape, &[slots], &heat).hits;
            prop_assert!((0.0..=1.0 + 1e-6).contains(&hits(slots)));
            prop_assert!(hits(slots + 1) >= hits(slots) - 1e-6);
        }
    }
}
