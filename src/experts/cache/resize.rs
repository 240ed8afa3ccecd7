//! The arena grows and shrinks between graphs.
//!
//! Owns: what happens to blocks when slots close and open. The least useful blocks of a pool lose their place; what keeps its place and lies in
//! a slot that closes moves to an open one, on the device.
//! Invariants: slots close only when nobody reads or writes them: no graph has the cache, and the device was waited for. After each change the
//! policy, the residency and the planes agree on the number of slots of every pool. Closed slots are at the end of the planes.
//! Threads: whoever has the cache. Does not: decide about sizes (`memory` does) or read from RAM: the model may be on its way out.

use std::collections::VecDeque;

use super::super::policy::Policy;
use super::super::residency::{Residency, State};
use super::super::shape::Block;
use super::arena::PoolMemory;
use super::{Cache, pools};
use crate::config::AllocationKind;
use crate::device::Device;
use crate::gpu::{Driver, DriverError};

/// The arena keeps its size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ResizeError {
    /// Memory of one size, or a size at which nothing can be held.
    #[error("its memory has one size, or nothing would be left")]
    Whole,
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl Cache {
    /// Bytes of the arena.
    pub(crate) fn arena_bytes(&self) -> usize {
        self.pools.iter().map(PoolMemory::bytes).sum()
    }

    /// Bytes that the arena can have at most.
    pub(crate) fn most_bytes(&self) -> usize {
        self.pools.iter().map(|pool| pool.bytes_for(pool.slots)).sum()
    }

    /// Open slots, and experts of the model.
    pub(crate) fn slots(&self) -> (u32, usize) {
        (self.pools.iter().map(PoolMemory::opened).sum(), self.policy.shape().blocks())
    }

    /// Whether its arena can change its size.
    pub(crate) fn is_elastic(&self) -> bool {
        self.pools.iter().all(PoolMemory::is_elastic)
    }

    /// Gives memory back until the arena has at most `bytes`. On failure the cache is to be dropped, which gives everything back.
    pub(crate) fn shrink(&mut self, device: &Device, bytes: usize) -> Result<(), ResizeError> {
        if !self.is_elastic() {
            return Err(ResizeError::Whole);
        }
        let slots = self.slots_for(bytes).ok_or(ResizeError::Whole)?;
        device.driver().settle()?;
        // Nobody has the cache but this thread, and what the device was given is done.
        if let Some(reader) = self.reader.take() {
            self.residency.finish(reader);
        }
        for upload in self.uploads.drain(..) {
            if self.residency.loaded(upload.block) {
                self.policy.loaded(upload.block);
                self.changed.push(upload.block);
            }
        }
        self.poisoned.clear(); // slots change hands
        let mut change = Change {
            pools: &mut self.pools,
            policy: &mut self.policy,
            residency: &mut self.residency,
            waiting: &mut self.waiting,
            changed: &mut self.changed,
        };
        let done = change.close(device.driver(), &slots);
        self.renew_whole_table();
        self.lease.resize(self.arena_bytes());
        Ok(done?)
    }

    /// Takes memory until the arena has about `bytes`, never more. On failure nothing is lost.
    pub(crate) fn grow(&mut self, device: &Device, bytes: usize) -> Result<(), ResizeError> {
        if !self.is_elastic() {
            return Err(ResizeError::Whole);
        }
        let slots = self.slots_for(bytes).ok_or(ResizeError::Whole)?;
        if self.pools.iter().zip(&slots).all(|(pool, slots)| *slots <= pool.opened()) {
            return Ok(());
        }
        if device.allocation_fails(AllocationKind::Device) {
            return Err(DriverError::OutOfMemory.into());
        }
        let mut change = Change {
            pools: &mut self.pools,
            policy: &mut self.policy,
            residency: &mut self.residency,
            waiting: &mut self.waiting,
            changed: &mut self.changed,
        };
        let done = change.open(device.driver(), &slots);
        self.lease.resize(self.arena_bytes());
        Ok(done?)
    }

    pub(super) fn slots_for(&self, bytes: usize) -> Option<Vec<u32>> {
        let zeros: Vec<usize> = self.pools.iter().map(|pool| pool.bytes_for(0)).collect();
        let blocks =
            self.pools.iter().zip(&zeros).map(|(pool, zeros)| pool.bytes_for(pool.slots).saturating_sub(*zeros));
        let whole: Vec<usize> = blocks.collect();
        self.pools.iter().zip(pools::parts(bytes, &whole, &zeros)).map(|(pool, bytes)| pool.slots_for(bytes)).collect()
    }
}

/// What changes together.
struct Change<'c> {
    pools: &'c mut [PoolMemory],
    policy: &'c mut Policy,
    residency: &'c mut Residency,
    waiting: &'c mut VecDeque<Block>,
    /// Blocks that lost their place or have another one.
    changed: &'c mut Vec<Block>,
}

impl Change<'_> {
    /// Leaves at most so many slots open in each pool. The device is idle, no graph has started, no upload is under way.
    fn close(&mut self, driver: &dyn Driver, slots: &[u32]) -> Result<(), DriverError> {
        let mut moved = Vec::new();
        for (number, &slots) in (0_u16..).zip(slots) {
            let pool = &self.pools[usize::from(number)];
            let slots = slots.min(pool.opened());
            for &block in self.policy.resize(number, slots) {
                self.residency.leave(block);
                self.changed.push(block);
                self.waiting.retain(|waiting| *waiting != block);
            }
            self.residency.set_slots(number, slots);
            let beyond: Vec<Block> = self.residency.beyond(number).collect();
            for block in beyond {
                self.changed.push(block);
                let State::Resident(from) = self.residency.state(block) else {
                    self.residency.leave(block);
                    continue;
                };
                self.residency.leave(block); // no graph sees it, so it is gone at once
                match self.residency.load(block) {
                    Ok(to) if copy(driver, pool, to.0, from.0) => moved.push(block),
                    _ => {
                        self.residency.failed(block);
                        self.policy.failed(block);
                    }
                }
            }
        }
        driver.synchronize()?;
        for block in moved {
            if self.residency.loaded(block) {
                self.policy.loaded(block);
            }
        }
        for (pool, &slots) in self.pools.iter_mut().zip(slots) {
            let slots = slots.min(pool.opened());
            pool.open(driver, slots)?;
        }
        Ok(())
    }

    /// Opens at least so many slots in each pool. Blocks keep their places.
    fn open(&mut self, driver: &dyn Driver, slots: &[u32]) -> Result<(), DriverError> {
        for (number, &slots) in (0_u16..).zip(slots) {
            let pool = &mut self.pools[usize::from(number)];
            if slots <= pool.opened() {
                continue;
            }
            pool.open(driver, slots)?;
            self.residency.set_slots(number, pool.opened());
            self.policy.resize(number, pool.opened());
        }
        Ok(())
    }
}

/// Copies a block to another slot; false if the driver cannot.
fn copy(driver: &dyn Driver, pool: &PoolMemory, to: u32, from: u32) -> bool {
    pool.planes.iter().all(|plane| driver.copy(plane.place(to), plane.place(from), plane.matrix.bytes).unwrap_or(false))
}

#[cfg(test)]
mod tests {
    use super::super::super::heat::Heat;
    use super::super::super::policy::{Pool, Settings};
    use super::super::super::residency::LoadError;
    use super::super::super::shape::{Group, GroupId, Shape};
    use super::super::arena::tests::matrices;
    use super::*;
    use crate::gpu::fake::Fake;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// A cache without a model: two pools, blocks that carry their number.
    struct Model {
        driver: Fake,
        pools: Vec<PoolMemory>,
        policy: Policy,
        residency: Residency,
        waiting: VecDeque<Block>,
        changed: Vec<Block>,
    }

    const SLOTS: u32 = 24;

    impl Model {
        fn new(start: u32) -> Self {
            let driver = Fake::default();
            let group = |pool| Group { experts: 16, used: 2, pool };
            let shape = Shape::new(vec![group(0), group(1), group(0)]).unwrap();
            let mut pools: Vec<PoolMemory> =
                (0..2).map(|_| PoolMemory::reserve(&driver, &matrices(), SLOTS, 0, true).unwrap()).collect();
            let mut residency = Residency::new(&shape);
            for (number, pool) in (0_u16..).zip(&mut pools) {
                pool.open(&driver, start).unwrap();
                residency.set_slots(number, start);
            }
            let sizes = vec![Pool { slots: start, block_bytes: 15_000 }; 2];
            let settings = Settings { payback: 0.1, admit: 1, ..Settings::default() };
            let heat = Heat::new(shape.blocks());
            let policy = Policy::new(shape, &sizes, settings, heat);
            Self { driver, pools, policy, residency, waiting: VecDeque::new(), changed: Vec::new() }
        }

        fn change(&mut self) -> Change<'_> {
            Change {
                pools: &mut self.pools,
                policy: &mut self.policy,
                residency: &mut self.residency,
                waiting: &mut self.waiting,
                changed: &mut self.changed,
            }
        }

        fn all(&self) -> Vec<Block> {
            let shape = self.policy.shape();
            (0..3).flat_map(|group| shape.blocks_of(GroupId(group))).collect()
        }

        fn pool_of(&self, block: Block) -> usize {
            let (group, _) = self.policy.shape().key(block);
            usize::from(self.policy.shape().groups()[group.0 as usize].pool)
        }

        /// A token uses these experts; what is admitted is loaded, or waits.
        fn token(&mut self, uses: &[(u32, u32)]) {
            for &(group, expert) in uses {
                self.policy.note_use(GroupId(group % 3), [expert % 16]);
            }
            let mut loads: Vec<Block> = self.waiting.drain(..).collect();
            for admission in self.policy.end_of_step(1).to_vec() {
                if let Some(evicted) = admission.evicts {
                    self.residency.leave(evicted);
                }
                loads.push(admission.block);
            }
            for block in loads {
                match self.residency.load(block) {
                    Ok(slot) => {
                        for plane in &self.pools[self.pool_of(block)].planes {
                            let value = u8::try_from(block.index() + 1).unwrap();
                            self.driver.fill(plane.place(slot.0), value, plane.matrix.bytes).unwrap();
                        }
                        self.driver.synchronize().unwrap();
                        self.residency.loaded(block);
                        self.policy.loaded(block);
                    }
                    Err(LoadError::NoSlot | LoadError::Leaving) => self.waiting.push_back(block),
                    Err(LoadError::Present) => {}
                }
            }
        }

        /// The three agree, and every block's bytes are its own.
        fn check(&self) {
            let mut places = BTreeSet::new();
            for block in self.all() {
                let pool = self.pool_of(block);
                match self.residency.state(block) {
                    State::Resident(slot) => {
                        assert!(self.policy.holds(block), "{block:?} is resident and not held");
                        assert!(slot.0 < self.pools[pool].opened(), "{block:?} lies in a closed slot");
                        assert!(places.insert((pool, slot)));
                        for plane in &self.pools[pool].planes {
                            let bytes = self.driver.read(plane.place(slot.0), plane.matrix.bytes);
                            assert!(bytes.iter().all(|byte| usize::from(*byte) == block.index() + 1), "{block:?}");
                        }
                    }
                    State::Absent => {
                        let waits = self.waiting.contains(&block);
                        assert_eq!(self.policy.holds(block), waits, "{block:?} is held and nowhere");
                    }
                    state => panic!("{state:?}"),
                }
            }
            for (number, pool) in (0_u16..).zip(&self.pools) {
                assert!(self.policy.held(number) <= pool.opened());
                assert_eq!(self.residency.beyond(number).count(), 0);
            }
        }
    }

    #[test]
    fn the_best_stay_wherever_they_lie() {
        let mut model = Model::new(8);
        let used = |count: u32| (0..count).map(|expert| (1, expert)).collect::<Vec<_>>();
        model.token(&used(8));
        let shape = model.policy.shape().clone();
        let slot = |model: &Model, expert| match model.residency.state(shape.block(GroupId(1), expert).unwrap()) {
            State::Resident(slot) => slot.0,
            state => panic!("{state:?}"),
        };
        // Those in the last slots are used most.
        let hot: Vec<u32> = (0..8).filter(|&expert| slot(&model, expert) >= 6).collect();
        (0..10).for_each(|_| model.token(&hot.iter().map(|&expert| (1, expert)).collect::<Vec<_>>()));
        assert_eq!((hot.len(), model.policy.held(1)), (2, 8));
        let driver = model.driver.clone();
        let before = driver.mapped();
        model.change().close(&driver, &[0, 2]).unwrap();
        model.check();
        assert!(hot.iter().all(|&expert| slot(&model, expert) < 2));
        assert!(driver.mapped() < before);
        model.change().open(&driver, &[8, 8]).unwrap();
        model.token(&used(8));
        assert_eq!(model.policy.held(1), 8);
        model.check();
    }

    #[test]
    fn growing_without_memory_changes_nothing() {
        let mut model = Model::new(4);
        model.token(&[(0, 1), (1, 2)]);
        let driver = model.driver.clone();
        driver.limit_mapping(driver.mapped());
        assert_eq!(model.change().open(&driver, &[20, 20]), Err(DriverError::OutOfMemory));
        assert_eq!(model.pools[0].opened(), 4);
        model.check();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn slots_residency_and_policy_agree(steps in proptest::collection::vec(
            (0_u8..5, proptest::collection::vec((0_u32..3, 0_u32..16), 1..6), 0_u32..=SLOTS, 0_u32..=SLOTS), 1..50)) {
            let mut model = Model::new(6);
            let driver = model.driver.clone();
            for (choice, uses, first, second) in steps {
                let before: Vec<State> = model.all().iter().map(|block| model.residency.state(*block)).collect();
                model.changed.clear();
                match choice {
                    0 => model.change().close(&driver, &[first, second]).unwrap(),
                    1 => model.change().open(&driver, &[first, second]).unwrap(),
                    _ => model.token(&uses),
                }
                model.check();
                for (block, state) in model.all().into_iter().zip(before).filter(|_| choice < 2) {
                    let told = model.changed.contains(&block);
                    prop_assert!(told || model.residency.state(block) == state, "{:?} changed its place untold", block);
                }
                let bytes: usize = model.pools.iter().map(PoolMemory::bytes).sum();
                prop_assert_eq!(driver.mapped(), bytes);
            }
        }
    }
}
