//! What passes by because a pass brings it anyway.
//!
//! Owns: which of the experts that a pass of some tokens fetches are kept: as many as there is room for beside what is to be loaded there; and
//! their lifetime heat.
//! Invariants: nothing leaves for them, and never more are held than there are slots; pools of whole layers take none.
//! Threads: one at a time. Does not: count them as recent uses, hits or misses, so that no storm of uploads follows a prompt.

use super::super::shape::GroupId;
use super::{Admission, End, Order, Policy, Regime, absent_row};

impl Policy {
    /// Experts of a group are on their way to the device: takes those for which there is room.
    pub fn offer(&mut self, group: GroupId, experts: impl Iterator<Item = u32>) -> &[Admission] {
        self.out.clear();
        // What earlier runs used most keeps its room.
        let learned = self.preload.0.len().saturating_sub(self.preload.1);
        for expert in experts {
            let Some(block) = self.shape.block(group, expert) else { continue };
            let pool = self.pool_of[block.index()];
            let room = self.pools[usize::from(pool)].pool.slots.saturating_sub(self.held(pool));
            let absent = self.ranking.row(block) == absent_row(pool);
            if absent && self.order(pool) != Order::Layers && room as usize > learned {
                self.carry_out(pool, Admission { block, evicts: None });
            }
        }
        &self.out
    }

    /// A pass whose ids are known used these experts of a group.
    pub fn note_heat(&mut self, group: GroupId, experts: impl Iterator<Item = u32>) {
        for expert in experts {
            let Some(block) = self.shape.block(group, expert) else { continue };
            let row = self.ranking.row(block);
            let before = self.heat_level(block);
            self.heat.add(block);
            let after = self.heat_level(block);
            self.pools[usize::from(row / 2)].comparison.shift_heat(before, after);
            if self.order(row / 2) == Order::By(Regime::Frequency) {
                self.ranking.place(block, row, self.level(block), End::Back);
            }
        }
    }

    /// The pass had so many tokens.
    pub fn pass_heat(&mut self, tokens: u32) {
        if self.heat.advance(tokens) {
            self.recount_heat();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Pool, Settings, Tally};
    use super::*;
    use crate::experts::heat::Heat;
    use crate::experts::shape::{Group, Shape};

    fn policy(slots: u32, heat: Heat) -> Policy {
        let groups = vec![Group { experts: 8, used: 2, pool: 0 }; 2];
        let shape = Shape::new(groups).unwrap();
        Policy::new(shape, &[Pool { slots, block_bytes: 100 }], Settings::default(), heat)
    }

    #[test]
    fn what_passes_by_fills_free_room_only() {
        let mut policy = policy(5, Heat::new(16));
        assert_eq!(policy.offer(GroupId(0), [1, 3, 4].into_iter()).len(), 3);
        assert_eq!(policy.offer(GroupId(0), [1, 3].into_iter()).len(), 0, "they are held");
        let taken: Vec<_> = policy.offer(GroupId(1), 0..8).iter().map(|admission| admission.evicts).collect();
        assert_eq!(taken, [None, None]);
        assert_eq!((policy.held(0), policy.offer(GroupId(1), 0..8).len()), (5, 0));
        assert!(policy.offer(GroupId(7), 0..8).is_empty() && policy.offer(GroupId(0), 8..9).is_empty());
    }

    #[test]
    fn what_was_learned_keeps_its_room() {
        let heat = Heat::from_rates((0..16_u16).map(|block| f32::from(block % 4)), 100.0);
        let learned = heat.hottest().len();
        let mut policy = policy(14, heat);
        assert_eq!(learned, 12);
        assert_eq!(policy.offer(GroupId(0), 0..8).len(), 2);
        assert!(!policy.preload(4).is_empty());
    }

    /// What passed by is remembered as what was decoded is, but nothing moves for it.
    #[test]
    fn uses_of_a_pass_are_heat_and_no_more() {
        let [mut passed, mut decoded] = [policy(4, Heat::new(16)), policy(4, Heat::new(16))];
        for token in 0..40 {
            let used = [token % 3, 3 + token % 2];
            passed.note_heat(GroupId(1), used.into_iter());
            passed.pass_heat(1);
            decoded.note_use(GroupId(1), used);
            decoded.end_of_step(1);
        }
        for block in passed.shape().blocks_of(GroupId(1)) {
            assert_eq!(passed.heat().rate(block).to_bits(), decoded.heat().rate(block).to_bits());
        }
        assert_eq!((passed.tally(), passed.held(0)), (Tally::default(), 0));
        assert!(passed.end_of_step(1).is_empty() && decoded.held(0) > 0);
    }

    #[test]
    fn whole_layers_take_none() {
        let mut policy = policy(3, Heat::new(16));
        assert!(policy.below_floor(0));
        assert!(policy.offer(GroupId(0), 0..8).is_empty());
    }
}
