//! What a prompt's last tokens say.
//!
//! Owns: how they are counted. A prompt is computed in passes that use nearly all blocks, so only its end tells something of what follows. Its last
//! tokens go through the window as if they had been decoded, one by one, and each counts in the lifetime heat as one token: a prompt of any
//! length weighs no more there than its last tokens.
//! Invariants: no hit or miss is counted, no order is judged, nothing is moved; the next step moves blocks, within its budget.
//! Threads: one at a time. Does not: know how ids come to the host, or where the prompt ends (`experts::cache` does).

use super::super::shape::{Block, GroupId};
use super::Policy;

/// The last tokens of a prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptTail {
    /// How many there are.
    pub tokens: u32,
    /// Of each group, how many experts a token uses and which ones, token by token, the oldest first; what is no expert is passed over. Empty where
    /// they are not known: in the last layer mostly the very last token is computed.
    pub groups: Vec<(usize, Vec<u32>)>,
}

impl PromptTail {
    fn experts(&self, group: GroupId, token: u32) -> &[u32] {
        let Some((used, experts)) = self.groups.get(group.0 as usize) else { return &[] };
        let start = token as usize * used;
        experts.get(start..start + used).unwrap_or(&[])
    }

    fn covers(&self, group: GroupId) -> bool {
        self.groups.get(group.0 as usize).is_some_and(|(_, experts)| !experts.is_empty())
    }
}

impl Policy {
    /// A prompt was computed that ended with these tokens; what follows is expected to use the same experts.
    pub fn note_prompt(&mut self, tail: &PromptTail) {
        let window = tail.tokens.min(self.settings.window);
        let groups: Vec<(GroupId, bool)> =
            (0_u32..).map(GroupId).zip(self.shape.groups()).map(|(group, _)| (group, tail.covers(group))).collect();
        // Of what is not known, recent use stays what it is: it is not older than the rest because of the prompt.
        let kept: Vec<(Block, u32)> = groups
            .iter()
            .filter(|(_, covered)| !covered)
            .flat_map(|(group, _)| self.shape.blocks_of(*group))
            .map(|block| (block, u32::from(self.ranking.record(block).long).min(window)))
            .filter(|(_, uses)| *uses > 0)
            .collect();
        for token in 0..tail.tokens {
            let age = tail.tokens - token;
            for &(group, _) in groups.iter().filter(|(_, covered)| *covered) {
                for &expert in tail.experts(group, token) {
                    let Some(block) = self.shape.block(group, expert) else { continue };
                    // What has left the window by the end need not go through it.
                    if age > window || self.add_to_window(block).is_some() {
                        self.add_to_heat(block);
                        self.place_anew(block);
                    }
                }
            }
            if age <= window {
                let turn = window - age;
                for &(block, uses) in &kept {
                    if (turn + 1) * uses / window > turn * uses / window && self.add_to_window(block).is_some() {
                        self.place_anew(block);
                    }
                }
                self.close_window(1);
            }
            if self.heat.advance(1) {
                self.recount_heat();
            }
        }
        self.renew_preload();
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::heat::Heat;
    use super::super::super::shape::{Group, Shape};
    use super::super::{Pool, Settings};
    use super::*;
    use proptest::prelude::*;

    const EXPERTS: u32 = 16;

    fn policy(groups: usize, slots: u32, settings: Settings) -> Policy {
        let shape = Shape::new(vec![Group { experts: EXPERTS, used: 2, pool: 0 }; groups]).unwrap();
        let heat = Heat::new(shape.blocks());
        Policy::new(shape, &[Pool { slots, block_bytes: 1 }], settings, heat)
    }

    fn block(policy: &Policy, group: u32, expert: u32) -> Block {
        policy.shape().block(GroupId(group), expert).unwrap()
    }

    fn step(policy: &mut Policy, uses: &[(u32, [u32; 2])]) -> Vec<Block> {
        uses.iter().for_each(|&(group, experts)| policy.note_use(GroupId(group), experts));
        let admitted: Vec<Block> = policy.end_of_step(1).iter().map(|admission| admission.block).collect();
        admitted.iter().for_each(|&block| policy.loaded(block));
        admitted
    }

    /// So many tokens that use the same two experts in each group that is known.
    fn tail(tokens: u32, experts: [u32; 2], known: &[bool]) -> PromptTail {
        let all: Vec<u32> = (0..tokens).flat_map(|_| experts).collect();
        PromptTail {
            tokens,
            groups: known.iter().map(|&known| (2, if known { all.clone() } else { Vec::new() })).collect(),
        }
    }

    #[test]
    fn what_the_prompt_used_last_comes_first() {
        let mut policy = policy(1, 4, Settings::default());
        for _ in 0..30 {
            step(&mut policy, &[(0, [0, 1])]);
        }
        let tally = policy.tally();
        let mut end = tail(200, [4, 5], &[true]);
        // The last two tokens used others.
        let used = &mut end.groups[0].1;
        let at = used.len() - 4;
        used[at..].copy_from_slice(&[6, 7, 6, 7]);
        policy.note_prompt(&end);
        assert_eq!(policy.tally(), tally, "nothing was looked for");
        assert!(policy.holds(block(&policy, 0, 0)), "nothing moves before the next step");
        let admitted: Vec<Block> = policy.end_of_step(1).iter().map(|admission| admission.block).collect();
        let first: Vec<Block> = [4, 5].map(|expert| block(&policy, 0, expert)).into();
        assert!(first.iter().all(|block| admitted[..2].contains(block)), "{admitted:?}");
        assert!(policy.holds(first[0]) && policy.holds(first[1]));
    }

    #[test]
    fn a_prompt_weighs_what_its_end_weighs() {
        let mut policy = policy(1, 4, Settings::default());
        for _ in 0..1024 {
            step(&mut policy, &[(0, [0, 1])]);
        }
        policy.note_prompt(&tail(256, [4, 5], &[true]));
        let rate = |expert| policy.heat().rate(block(&policy, 0, expert));
        assert!((policy.heat().tokens() - 1280.0).abs() < 40.0);
        assert!((rate(0) - 0.8).abs() < 0.02 && (rate(4) - 0.2).abs() < 0.02, "{} {}", rate(0), rate(4));
        assert_eq!(
            policy.preload.0[0],
            block(&policy, 0, 0),
            "what is loaded in the background begins with the hottest"
        );
    }

    #[test]
    fn what_is_not_known_of_the_prompt_stays_recent() {
        let mut policy = policy(2, 4, Settings::default());
        for _ in 0..64 {
            step(&mut policy, &[(0, [0, 1]), (1, [2, 3])]);
        }
        policy.note_prompt(&tail(300, [4, 5], &[true, false]));
        step(&mut policy, &[]);
        let held = |group, expert| policy.holds(block(&policy, group, expert));
        assert!(held(1, 2) && held(1, 3), "of the last layer nothing is known");
        assert!(held(0, 4) && held(0, 5) && !held(0, 0) && !held(0, 1));
    }

    #[test]
    fn after_memory_came_back_the_hottest_are_loaded_by_and_by() {
        let mut policy = policy(2, 32, Settings::default());
        for expert in (0..EXPERTS).rev() {
            for _ in 0..=expert {
                step(&mut policy, &[(0, [expert, (expert + 1) % EXPERTS]), (1, [expert, (expert + 1) % EXPERTS])]);
            }
        }
        (0..200).for_each(|_| drop(step(&mut policy, &[(0, [0, 1]), (1, [0, 1])])));
        policy.resize(0, 4);
        policy.resize(0, 32);
        let loaded: Vec<Block> = policy.preload(8).iter().map(|admission| admission.block).collect();
        assert_eq!(loaded.len(), 8, "what was evicted is loaded again");
        let all: usize = 8 + (0..20).map(|_| policy.preload(8).len()).sum::<usize>();
        assert_eq!(all, 28);
    }

    proptest! {
        /// Whatever a tail holds: the policy's own books stay right (they panic otherwise), and never more is held than there are slots.
        #[test]
        fn any_tail_is_taken(steps in proptest::collection::vec(
            (0_u32..200, proptest::collection::vec(0_u32..20, 0..60), any::<bool>(), 0_u32..=40), 1..12)) {
            let mut policy = policy(2, 20, Settings { payback: 0.5, ..Settings::default() });
            for (tokens, experts, known, slots) in steps {
                let groups = vec![(2, experts.clone()), (2, if known { experts.clone() } else { Vec::new() })];
                policy.note_prompt(&PromptTail { tokens, groups });
                policy.resize(0, slots);
                for pair in experts.chunks_exact(2) {
                    step(&mut policy, &[(0, [pair[0], pair[1]]), (1, [pair[1], pair[0]])]);
                }
                let loaded: Vec<Block> = policy.preload(3).iter().map(|admission| admission.block).collect();
                loaded.into_iter().for_each(|block| policy.loaded(block));
                prop_assert!(policy.held(0) <= slots);
            }
        }
    }
}
