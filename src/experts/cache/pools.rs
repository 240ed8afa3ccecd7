//! Which blocks share a pool, and how memory is divided among pools.
//!
//! Owns: the choice of pools. Blocks of one kind (the same matrices) share one, unless it would be larger than kernels find their way in; then
//! several pools of that kind serve fixed runs of layers.
//! Threads: none; everything here is a pure function of its input. Does not: allocate.

use super::super::shape::Group;

/// Pools of one kind of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    /// Slots that its pools could use in all.
    pub(super) wanted: u32,
    /// The most slots of one pool.
    pub(super) most: u32,
}

/// Gives each group its pool. `groups` name their kind as their pool; the result names, for each pool, its kind.
pub(super) fn split(groups: &mut [Group], kinds: &[Kind]) -> Vec<usize> {
    let mut kind_of = Vec::new();
    for (number, kind) in kinds.iter().enumerate() {
        let of_kind = |group: &Group| usize::from(group.pool) == number;
        let all: u64 = groups.iter().filter(|group| of_kind(group)).map(|group| u64::from(group.experts)).sum();
        let layers = groups.iter().filter(|group| of_kind(group)).count() as u64;
        let parts = u64::from(kind.wanted).min(all).div_ceil(u64::from(kind.most.max(1))).clamp(1, layers.max(1));
        let mut seen = 0;
        let mut current = None;
        for group in groups.iter_mut().filter(|group| of_kind(group)) {
            // By the middle of a layer's experts, so that parts are as equal as layers allow.
            let part = (2 * seen + u64::from(group.experts)) * parts / (2 * all.max(1));
            seen += u64::from(group.experts);
            if current != Some(part) {
                current = Some(part);
                kind_of.push(number);
            }
            // Marked, so that it is not taken for a group of another kind.
            group.pool = DONE | u16::try_from(kind_of.len() - 1).unwrap_or(0);
        }
    }
    groups.iter_mut().for_each(|group| group.pool &= !DONE);
    kind_of
}

/// Pools have numbers below this.
const DONE: u16 = 1 << 15;

/// Divides bytes by weights.
pub(super) fn divide(bytes: usize, weights: &[usize]) -> Vec<usize> {
    let total: u128 = weights.iter().map(|weight| *weight as u128).sum();
    let part = |weight: &usize| usize::try_from(bytes as u128 * *weight as u128 / total.max(1)).unwrap_or(usize::MAX);
    weights.iter().map(part).collect()
}

/// Gives each pool its slots of zeros first, and divides the rest by weights: otherwise a small pool would not get its own.
pub(super) fn parts(bytes: usize, weights: &[usize], zeros: &[usize]) -> Vec<usize> {
    let all: usize = zeros.iter().fold(0, |sum, zeros| sum.saturating_add(*zeros));
    if bytes < all {
        return divide(bytes, zeros);
    }
    divide(bytes - all, weights).into_iter().zip(zeros).map(|(part, zeros)| part.saturating_add(*zeros)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_small_pool_gets_its_zeros_first() {
        assert_eq!(parts(1000, &[9000, 100], &[160, 160]), [160 + 672, 160 + 7]);
        assert_eq!(parts(100, &[9000, 100], &[160, 160]), [50, 50], "too little is divided equally");
        assert_eq!(
            parts(usize::MAX, &[1, 1], &[1, 1]).iter().fold(0_u128, |sum, part| sum + *part as u128),
            usize::MAX as u128 - 1
        );
    }

    fn groups(pools: &[u16]) -> Vec<Group> {
        pools.iter().map(|&pool| Group { experts: 128, used: 8, pool }).collect()
    }

    #[test]
    fn small_pools_stay_whole() {
        let mut layers = groups(&[0, 1, 0, 0]);
        let kind = Kind { wanted: 1000, most: 1000 };
        assert_eq!(split(&mut layers, &[kind, kind]), [0, 1]);
        assert_eq!(layers, groups(&[0, 1, 0, 0]));
    }

    #[test]
    fn large_ones_serve_runs_of_layers() {
        let mut layers = groups(&[0, 1, 0, 0, 0]);
        let kinds = [Kind { wanted: 512, most: 300 }, Kind { wanted: 128, most: 300 }];
        assert_eq!(split(&mut layers, &kinds), [0, 0, 1]);
        assert_eq!(layers, groups(&[0, 2, 0, 1, 1]));
        assert_eq!(divide(1000, &[1, 3]), [250, 750]);
        assert_eq!(divide(1000, &[0, 0]), [0, 0]);
    }

    proptest! {
        /// Every pool has groups, all of its kind; runs do not overlap; no part is larger than its fair share by more than a layer.
        #[test]
        fn parts_are_fair(pools in proptest::collection::vec(0_u16..3, 1..90), wanted in 0_u32..20_000, most in 100_u32..4000) {
            let mut kinds: Vec<u16> = pools.clone();
            kinds.sort_unstable();
            kinds.dedup();
            let pools: Vec<u16> = pools.iter().map(|pool| kinds.iter().position(|kind| kind == pool).and_then(|at| u16::try_from(at).ok()).unwrap()).collect();
            let mut layers = groups(&pools);
            let kind_of = split(&mut layers, &vec![Kind { wanted, most }; kinds.len()]);
            for (layer, kind) in layers.iter().zip(&pools) {
                prop_assert_eq!(kind_of[usize::from(layer.pool)], usize::from(*kind));
            }
            for pool in 0..kind_of.len() {
                let own = layers.iter().filter(|layer| usize::from(layer.pool) == pool).count();
                let all = pools.iter().filter(|kind| usize::from(**kind) == kind_of[pool]).count();
                let parts = kind_of.iter().filter(|kind| **kind == kind_of[pool]).count();
                prop_assert!(own > 0 && own <= all.div_ceil(parts) + 1, "{} of {} in {}", own, all, parts);
            }
        }
    }
}
