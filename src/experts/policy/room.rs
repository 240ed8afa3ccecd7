//! What free slots are filled with.
//!
//! Owns: the order in which blocks come where nobody has to leave: by recent use (`next_admission`), by lifetime heat, evenly.
//! Invariants: never more held than slots; in the background the budget of the step is kept to.
//! Threads: one at a time. Does not: replace anything.

use super::super::shape::{Block, GroupId};
use super::{Admission, Order, Policy, absent_row};

/// Tokens after which the list by lifetime heat is made anew before it is gone through again.
const OLD_TOKENS: u32 = 256;

impl Policy {
    /// Up to `limit` blocks to upload in the background while there is room and what the step before left of its budget lasts: the hottest
    /// of earlier runs first, or the layers of stock mode.
    pub fn preload(&mut self, limit: usize) -> &[Admission] {
        self.out.clear();
        self.preload_within(limit, true);
        &self.out
    }

    pub(super) fn renew_preload(&mut self) {
        (self.preload, self.preload_age) = ((self.heat.hottest(), 0), 0);
    }

    fn preload_within(&mut self, limit: usize, budget: bool) {
        for pool in self.pool_numbers() {
            while self.order(pool) == Order::Layers && self.out.len() < limit && self.has_room(pool) {
                let Some(admission) = self.next_admission(pool) else { break };
                if budget && !self.budget.take_room(self.pools[usize::from(pool)].pool.block_bytes) {
                    return;
                }
                self.carry_out(pool, admission);
            }
        }
        if self.preload.1 == 0 && self.preload_age >= OLD_TOKENS {
            self.renew_preload();
        }
        while self.out.len() < limit && self.pool_numbers().any(|pool| self.has_room(pool)) {
            let Some(&block) = self.preload.0.get(self.preload.1) else { break };
            let pool = self.pool_of[block.index()];
            let absent = self.ranking.row(block) == absent_row(pool);
            if absent && self.order(pool) != Order::Layers && self.has_room(pool) {
                if budget && !self.budget.take_room(self.pools[usize::from(pool)].pool.block_bytes) {
                    return;
                }
                self.carry_out(pool, Admission { block, evicts: None });
            }
            self.preload.1 += 1;
        }
    }

    /// All blocks pass by: takes as many as there is room for, those of recent use first, then the hottest of earlier runs, then evenly
    /// over the layers.
    pub fn fill(&mut self) -> &[Admission] {
        self.out.clear();
        for pool in self.pool_numbers() {
            while self.has_room(pool) {
                let Some(admission) = self.next_admission(pool) else { break };
                self.carry_out(pool, admission);
            }
        }
        self.preload.1 = 0;
        self.preload_within(usize::MAX, false);
        let groups = self.shape.groups();
        let most = groups.iter().map(|group| group.experts).max().unwrap_or(0);
        let numbers = || 0..u32::try_from(groups.len()).unwrap_or(u32::MAX);
        let order: Vec<Block> = (0..most)
            .flat_map(|expert| numbers().map(move |group| (GroupId(group), expert)))
            .filter_map(|(group, expert)| self.shape.block(group, expert))
            .collect();
        for block in order {
            let pool = self.pool_of[block.index()];
            let absent = self.ranking.row(block) == absent_row(pool);
            if absent && self.order(pool) != Order::Layers && self.has_room(pool) {
                self.carry_out(pool, Admission { block, evicts: None });
            }
        }
        &self.out
    }
}
