//! The policy as a whole: invariants and modes. What it finds and uploads is tested in `sim`; what it costs is measured by
//! `cargo bench --bench policy`.

use std::collections::BTreeSet;

use super::*;
use crate::experts::shape::Group;
use proptest::prelude::*;

fn shape(layers: usize, experts: u32, used: u32) -> Shape {
    Shape::new(vec![Group { experts, used, pool: 0 }; layers]).unwrap()
}

fn policy(shape: &Shape, slots: u32, settings: Settings) -> Policy {
    let heat = Heat::new(shape.blocks());
    Policy::new(shape.clone(), &[Pool { slots, block_bytes: 1000 }], settings, heat)
}

/// One step; its uploads are complete afterwards.
fn step(policy: &mut Policy, uses: &[(u32, &[u32])]) -> Vec<Admission> {
    for &(group, experts) in uses {
        policy.note_use(GroupId(group), experts.iter().copied());
    }
    let admissions = policy.end_of_step(1).to_vec();
    admissions.iter().for_each(|admission| policy.loaded(admission.block));
    admissions
}

#[test]
fn free_slots_are_filled_by_first_use_and_full_ones_by_repeated_use() {
    let shape = shape(1, 8, 2);
    let block = |expert| shape.block(GroupId(0), expert).unwrap();
    let mut policy = policy(&shape, 2, Settings { payback: 0.5, ..Settings::default() });
    let first = step(&mut policy, &[(0, &[0, 1])]);
    assert!(first.iter().all(|admission| admission.evicts.is_none()) && first.len() == 2);
    assert_eq!(step(&mut policy, &[(0, &[0, 5])]), [], "one use is not enough");
    let third = step(&mut policy, &[(0, &[0, 5])]);
    assert_eq!(third, [Admission { block: block(5), evicts: Some(block(1)) }]);
    assert!(policy.holds(block(0)) && policy.holds(block(5)) && !policy.holds(block(1)));
    assert_eq!(policy.tally(), Tally { uses: 6, hits: 2 });
}

#[test]
fn what_passed_by_is_spread_over_layers_and_leaves_for_the_first_use() {
    let shape = shape(2, 8, 2);
    let block = |group, expert| shape.block(GroupId(group), expert).unwrap();
    let mut policy = policy(&shape, 4, Settings { payback: 0.5, ..Settings::default() });
    let filled: Vec<Block> = policy.fill().iter().map(|admission| admission.block).collect();
    assert_eq!(filled, [block(0, 0), block(1, 0), block(0, 1), block(1, 1)]);
    filled.iter().for_each(|&block| policy.loaded(block));
    assert_eq!(policy.fill(), [], "it is full");
    let first = step(&mut policy, &[(0, &[0, 5]), (1, &[1, 7])]);
    let evicted: BTreeSet<_> = first.iter().filter_map(|admission| admission.evicts).collect();
    assert_eq!(evicted, BTreeSet::from([block(0, 1), block(1, 0)]), "those that were not used");
    assert!(policy.holds(block(0, 5)) && policy.holds(block(1, 7)));
    assert_eq!(step(&mut policy, &[(0, &[0, 6]), (1, &[1, 7])]), [], "the others have a use of their own");
}

#[test]
fn one_use_does_not_replace_even_a_forgotten_block() {
    let shape = shape(1, 8, 1);
    for (admit, at) in [(1, 1), (2, 2), (5, 5)] {
        let mut policy = policy(&shape, 1, Settings { payback: 0.1, admit, ..Settings::default() });
        step(&mut policy, &[(0, &[0])]);
        (0..100).for_each(|_| assert_eq!(step(&mut policy, &[]), []));
        let swap = (1..9).find(|_| !step(&mut policy, &[(0, &[3])]).is_empty());
        assert_eq!(swap, Some(at));
    }
}

#[test]
fn a_swap_must_bring_more_than_it_costs() {
    let shape = shape(1, 8, 1);
    let swaps_after = |payback: f32| {
        let mut policy = policy(&shape, 1, Settings { payback, ..Settings::default() });
        step(&mut policy, &[(0, &[0])]);
        (1..60).find(|_| step(&mut policy, &[(0, &[3])]).iter().any(|admission| admission.evicts.is_some()))
    };
    // Uses of the newcomer count twice while they are fresh; 64 and 24 tokens make 88.
    assert_eq!(swaps_after(0.5), Some(2), "admission");
    assert!(swaps_after(4.0) > swaps_after(2.0) && swaps_after(60.0).is_none());
}

#[test]
fn a_block_that_loads_is_no_hit_and_is_not_evicted() {
    let shape = shape(1, 8, 1);
    let mut policy = policy(&shape, 1, Settings { payback: 0.1, ..Settings::default() });
    policy.note_use(GroupId(0), [0]);
    let first = policy.end_of_step(1)[0].block;
    for _ in 0..20 {
        policy.note_use(GroupId(0), [1]);
        assert_eq!(policy.end_of_step(1), []);
    }
    policy.note_use(GroupId(0), [0]);
    assert_eq!(policy.tally().hits, 0);
    policy.failed(first);
    assert!(!policy.holds(first));
    policy.note_use(GroupId(0), [1]);
    assert_eq!(policy.end_of_step(1).len(), 1, "its place is free again");
}

#[test]
fn preload_takes_the_hottest_while_there_is_room() {
    let shape = shape(2, 4, 1);
    let heat = Heat::from_rates([0.1, 0.9, 0.0, 0.3, 0.8, 0.2, 0.0, 0.0], 1000.0);
    let mut policy = Policy::new(shape, &[Pool { slots: 3, block_bytes: 1 }], Settings::default(), heat);
    let blocks = |admissions: &[Admission]| admissions.iter().map(|a| a.block.index()).collect::<Vec<_>>();
    assert_eq!(blocks(policy.preload(2)), [1, 4]);
    assert_eq!(blocks(policy.preload(5)), [3]);
    assert_eq!(policy.preload(5), []);
}

#[test]
fn below_one_tokens_cycle_whole_layers_are_held() {
    let shape = shape(4, 4, 2);
    let mut policy = policy(&shape, 7, Settings::default());
    assert!(policy.below_floor(0));
    let loaded: BTreeSet<usize> = policy.preload(100).iter().map(|admission| admission.block.index()).collect();
    assert!((12..16).all(|block| loaded.contains(&block)) && loaded.len() == 7, "{loaded:?}");
    for _ in 0..200 {
        assert_eq!(step(&mut policy, &[(0, &[0, 1])]), [], "and nothing moves");
    }
    policy.resize(0, 8);
    assert!(!policy.below_floor(0));
}

#[test]
fn stock_mode_moves_to_whole_layers_and_back_within_the_budget() {
    let shape = shape(4, 4, 1);
    let mut policy = policy(&shape, 8, Settings { swaps_per_step: Some(2), ..Settings::default() });
    let use_first = |policy: &mut Policy| step(policy, &[(0, &[0, 1, 2, 3]), (1, &[0, 1, 2, 3])]);
    for _ in 0..10 {
        use_first(&mut policy);
    }
    let held = |policy: &Policy| (0..16).filter(|&block| policy.holds(Block(block))).collect::<Vec<_>>();
    assert_eq!(held(&policy), (0..8).collect::<Vec<_>>());
    policy.set_mode(Mode::Stock);
    let moved: Vec<usize> = (0..10).map(|_| use_first(&mut policy).len()).collect();
    assert_eq!(moved, [2, 2, 2, 2, 0, 0, 0, 0, 0, 0]);
    assert_eq!(held(&policy), (8..16).collect::<Vec<_>>());
    policy.set_mode(Mode::Cache);
    for _ in 0..10 {
        use_first(&mut policy);
    }
    assert_eq!(held(&policy), (0..8).collect::<Vec<_>>());
}

#[test]
fn a_smaller_pool_loses_its_least_useful_blocks() {
    let shape = shape(1, 8, 4);
    let mut policy = policy(&shape, 6, Settings::default());
    for experts in [[0, 1, 2, 3], [2, 3, 4, 5], [2, 3, 4, 5]] {
        step(&mut policy, &[(0, &experts)]);
    }
    let left: Vec<usize> = policy.resize(0, 4).iter().map(|block| block.index()).collect();
    assert_eq!(left, [1, 0]);
    assert_eq!((policy.held(0), policy.held(1)), (4, 0));
    assert_eq!(policy.resize(7, 4), []);
}

#[test]
fn pools_do_not_share_slots() {
    let group = |pool| Group { experts: 8, used: 2, pool };
    let shape = Shape::new(vec![group(0), group(1), group(0)]).unwrap();
    let pools = [Pool { slots: 4, block_bytes: 10 }, Pool { slots: 2, block_bytes: 30 }];
    let mut policy = Policy::new(shape.clone(), &pools, Settings::default(), Heat::new(shape.blocks()));
    for token in 0..300_u32 {
        let experts = [token / 40 % 8, (token / 40 + 1) % 8];
        let moved = step(&mut policy, &[(0, &experts), (1, &experts), (2, &experts)]);
        let pool = |block: Block| shape.groups()[shape.key(block).0.0 as usize].pool;
        assert!(moved.iter().all(|a| a.evicts.is_none_or(|victim| pool(victim) == pool(a.block))));
    }
    assert_eq!((policy.held(0), policy.held(1)), (4, 2));
}

proptest! {
    /// Whatever is noted: held blocks fit, victims were held and loaded, newcomers were absent, and the same calls give the same
    /// answers.
    #[test]
    fn answers_are_consistent(
        steps in proptest::collection::vec((1_u32..5, proptest::collection::vec((0_u32..3, 0_u32..9), 0..9)), 1..120),
        slots in 0_u32..20,
        swaps in proptest::option::of(0_u32..3),
        late in any::<bool>(),
    ) {
        let shape = shape(3, 8, 2);
        let settings = Settings { window: 16, swaps_per_step: swaps, payback: 0.5, ..Settings::default() };
        let mut policies = [policy(&shape, slots, settings), policy(&shape, slots, settings)];
        let mut held: BTreeSet<Block> = BTreeSet::new();
        let mut loading: Vec<Block> = Vec::new();
        for (number, (tokens, uses)) in steps.iter().enumerate() {
            if number % 31 == 30 {
                let mode = if number % 2 == 0 { Mode::Stock } else { Mode::Cache };
                policies.iter_mut().for_each(|policy| policy.set_mode(mode));
            }
            let [first, second] = &mut policies;
            for policy in [&mut *first, &mut *second] {
                uses.iter().for_each(|&(group, expert)| policy.note_use(GroupId(group), [expert]));
            }
            let admissions = first.end_of_step(*tokens).to_vec();
            prop_assert_eq!(&admissions[..], second.end_of_step(*tokens));
            prop_assert!(admissions.len() <= swaps.unwrap_or(u32::MAX) as usize);
            for admission in &admissions {
                if let Some(victim) = admission.evicts {
                    prop_assert!(held.remove(&victim) && !loading.contains(&victim));
                }
                prop_assert!(held.insert(admission.block));
                loading.push(admission.block);
            }
            prop_assert!(held.len() <= slots as usize);
            prop_assert!(held.iter().all(|&block| first.holds(block)));
            prop_assert_eq!(first.held(0) as usize, held.len());
            if !late || number % 3 == 0 {
                for block in loading.drain(..) {
                    policies.iter_mut().for_each(|policy| policy.loaded(block));
                }
            }
        }
    }
}
