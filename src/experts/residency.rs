//! Which block lies in which slot of the arena, and who may read or write it.
//!
//! Owns: the state of every block and slot, and the rule that keeps readers and writers apart:
//!
//! - A graph takes a [`Reader`] when it starts and gives it back when it is done on the device. Its view is what was resident when it
//!   started, and does not change while it runs.
//! - A block that finished loading is seen by graphs that start afterwards only.
//! - A block that leaves is still seen by the graphs that started before. Its slot is written again only after all of them are done.
//! - So no graph ever reads a slot that is being written.
//!
//! Invariants: a slot belongs to at most one block; a block has at most one slot; a block that leaves is not loaded again before it
//! has left.
//! Threads: one at a time (the engine holds it under its lock). "Done" means done on the device, so the caller gives readers back
//! behind an event, and `loaded` likewise.
//! Does not: choose blocks (`policy`), move bytes, or know where in memory a slot is.

use std::collections::VecDeque;

use super::shape::{Block, Shape};

/// The number of a slot within its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

/// A graph that reads blocks. Not copyable: it is given back once.
#[derive(Debug, PartialEq, Eq)]
pub struct Reader {
    epoch: u64,
}

/// What a block is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Not on the device.
    Absent,
    /// Its slot is being written. Nobody reads it.
    Loading(Slot),
    /// Readable.
    Resident(Slot),
    /// Readable for graphs that started before it was told to leave.
    Leaving(Slot),
}

/// Why a block cannot be loaded now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// It has a slot already.
    #[error("the block is on the device or on its way")]
    Present,
    /// It is leaving; ask again when the graphs that still see it are done.
    #[error("the block is leaving")]
    Leaving,
    /// No slot of its pool is free; ask again when one is.
    #[error("no free slot")]
    NoSlot,
}

#[derive(Clone, Copy, Debug)]
enum Inner {
    Absent,
    Loading {
        slot: Slot,
        unwanted: bool,
    },
    /// Seen by graphs from this number on.
    Resident {
        slot: Slot,
        from: u64,
    },
    /// Seen by graphs from this number on and below that one.
    Leaving {
        slot: Slot,
        from: u64,
        until: u64,
    },
}

#[derive(Clone, Debug, Default)]
struct Slots {
    /// Who has the slot.
    owner: Vec<Option<Block>>,
    /// Slots to hand out; some may be closed or taken, which is found when they come up.
    free: Vec<Slot>,
    /// Slots below this are open.
    open: u32,
}

/// The table of one device.
#[derive(Clone, Debug)]
pub struct Residency {
    pool_of: Vec<u16>,
    blocks: Vec<Inner>,
    pools: Vec<Slots>,
    /// Number of the next graph.
    next: u64,
    /// Graphs from `next - running.len()` on, and whether each is done. The first is not.
    running: VecDeque<bool>,
    /// Blocks that leave, in the order of `until`.
    leaving: VecDeque<(u64, Block)>,
}

impl Residency {
    /// A table without slots.
    pub fn new(shape: &Shape) -> Self {
        let pool_of: Vec<u16> =
            shape.groups().iter().flat_map(|group| std::iter::repeat_n(group.pool, group.experts as usize)).collect();
        Self {
            blocks: vec![Inner::Absent; pool_of.len()],
            pool_of,
            pools: vec![Slots::default(); shape.pools()],
            next: 0,
            running: VecDeque::new(),
            leaving: VecDeque::new(),
        }
    }

    /// A graph starts.
    pub fn start(&mut self) -> Reader {
        let epoch = self.next;
        self.next += 1;
        self.running.push_back(false);
        Reader { epoch }
    }

    /// A graph is done on the device. Slots that it was the last to read become free.
    #[expect(clippy::needless_pass_by_value, reason = "a reader is given back once")]
    pub fn finish(&mut self, reader: Reader) {
        let first = self.first_running();
        let at = reader.epoch.checked_sub(first).and_then(|at| usize::try_from(at).ok());
        if let Some(done) = at.and_then(|at| self.running.get_mut(at)) {
            *done = true;
        }
        while self.running.front() == Some(&true) {
            self.running.pop_front();
        }
        self.free_left();
    }

    /// Where a graph finds a block; `None` is a miss.
    pub fn find(&self, reader: &Reader, block: Block) -> Option<Slot> {
        match self.blocks[block.index()] {
            Inner::Resident { slot, from } if reader.epoch >= from => Some(slot),
            Inner::Leaving { slot, from, until } if reader.epoch >= from && reader.epoch < until => Some(slot),
            Inner::Absent | Inner::Loading { .. } | Inner::Resident { .. } | Inner::Leaving { .. } => None,
        }
    }

    /// The state of a block, as a graph that starts now would see it.
    pub fn state(&self, block: Block) -> State {
        match self.blocks[block.index()] {
            Inner::Absent => State::Absent,
            Inner::Loading { slot, .. } => State::Loading(slot),
            Inner::Resident { slot, .. } => State::Resident(slot),
            Inner::Leaving { slot, .. } => State::Leaving(slot),
        }
    }

    /// Takes a free slot for a block. From now on the slot may be written, until [`Residency::loaded`] or [`Residency::failed`].
    pub fn load(&mut self, block: Block) -> Result<Slot, LoadError> {
        match self.blocks[block.index()] {
            Inner::Absent => {}
            Inner::Leaving { .. } => return Err(LoadError::Leaving),
            Inner::Loading { .. } | Inner::Resident { .. } => return Err(LoadError::Present),
        }
        let pool = &mut self.pools[usize::from(self.pool_of[block.index()])];
        while let Some(slot) = pool.free.pop() {
            // A slot may have been closed while it lay in the list, or stand in it twice after that.
            let owner = &mut pool.owner[slot.0 as usize];
            if slot.0 < pool.open && owner.is_none() {
                *owner = Some(block);
                self.blocks[block.index()] = Inner::Loading { slot, unwanted: false };
                return Ok(slot);
            }
        }
        Err(LoadError::NoSlot)
    }

    /// The bytes of a loading block are complete. Returns whether it is resident now; not if it was told to leave meanwhile.
    pub fn loaded(&mut self, block: Block) -> bool {
        match self.blocks[block.index()] {
            Inner::Loading { slot, unwanted: false } => {
                self.blocks[block.index()] = Inner::Resident { slot, from: self.next };
                true
            }
            Inner::Loading { unwanted: true, .. } => {
                self.release(block);
                false
            }
            Inner::Absent | Inner::Resident { .. } | Inner::Leaving { .. } => false,
        }
    }

    /// The upload of a loading block has ended without success, and nothing writes to its slot any more.
    pub fn failed(&mut self, block: Block) {
        if matches!(self.blocks[block.index()], Inner::Loading { .. }) {
            self.release(block);
        }
    }

    /// A block is to leave. A resident one stays readable for the graphs that run; a loading one leaves when its upload ends.
    pub fn leave(&mut self, block: Block) {
        match self.blocks[block.index()] {
            Inner::Resident { slot, from } => {
                self.blocks[block.index()] = Inner::Leaving { slot, from, until: self.next };
                self.leaving.push_back((self.next, block));
                self.free_left();
            }
            Inner::Loading { slot, .. } => self.blocks[block.index()] = Inner::Loading { slot, unwanted: true },
            Inner::Absent | Inner::Leaving { .. } => {}
        }
    }

    /// Opens the first `slots` slots of a pool and closes the others: they are handed out no more. Who has a closed slot stays
    /// until told to leave; see [`Residency::beyond`].
    pub fn set_slots(&mut self, pool: u16, slots: u32) {
        let Some(pool) = self.pools.get_mut(usize::from(pool)) else { return };
        let before = std::mem::replace(&mut pool.open, slots);
        if pool.owner.len() < slots as usize {
            pool.owner.resize(slots as usize, None);
        }
        // Low slots are handed out first, so that the end of the arena is the first to be given back.
        let opened = (before..slots).rev().map(Slot).filter(|slot| pool.owner[slot.0 as usize].is_none());
        let mut free: Vec<Slot> = opened.collect();
        free.append(&mut pool.free);
        pool.free = free;
        pool.free.retain(|slot| slot.0 < slots);
    }

    /// Who has a slot that is closed. When there is nobody, the memory behind the open slots can be given away.
    pub fn beyond(&self, pool: u16) -> impl Iterator<Item = Block> + '_ {
        let pool = self.pools.get(usize::from(pool));
        pool.into_iter().flat_map(|pool| pool.owner.iter().skip(pool.open as usize).filter_map(|owner| *owner))
    }

    /// Number of slots of a pool that a block could take now.
    pub fn free(&self, pool: u16) -> usize {
        self.free_slots(pool).count()
    }

    /// The slots of a pool that a block could take now: nobody reads or writes them.
    pub fn free_slots(&self, pool: u16) -> impl Iterator<Item = Slot> + '_ {
        let pool = self.pools.get(usize::from(pool));
        let slots = pool.into_iter().flat_map(|pool| pool.owner.iter().take(pool.open as usize).zip((0..).map(Slot)));
        slots.filter_map(|(owner, slot)| owner.is_none().then_some(slot))
    }

    fn first_running(&self) -> u64 {
        self.next - self.running.len() as u64
    }

    fn free_left(&mut self) {
        let first = self.first_running();
        while let Some(&(until, block)) = self.leaving.front().filter(|(until, _)| *until <= first) {
            self.leaving.pop_front();
            debug_assert!(matches!(self.blocks[block.index()], Inner::Leaving { until: own, .. } if own == until));
            self.release(block);
        }
    }

    fn release(&mut self, block: Block) {
        let state = std::mem::replace(&mut self.blocks[block.index()], Inner::Absent);
        let (Inner::Loading { slot, .. } | Inner::Leaving { slot, .. }) = state else { return };
        let pool = &mut self.pools[usize::from(self.pool_of[block.index()])];
        pool.owner[slot.0 as usize] = None;
        if slot.0 < pool.open {
            pool.free.push(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::shape::{Group, GroupId};
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn table(experts: u32, slots: u32) -> (Residency, Vec<Block>) {
        let shape = Shape::new(vec![Group { experts, used: 1, pool: 0 }]).unwrap();
        let mut table = Residency::new(&shape);
        table.set_slots(0, slots);
        (table, shape.blocks_of(GroupId(0)).collect())
    }

    #[test]
    fn a_block_is_seen_after_it_was_loaded_and_not_before() {
        let (mut table, blocks) = table(4, 2);
        let early = table.start();
        let slot = table.load(blocks[0]).unwrap();
        assert_eq!(table.state(blocks[0]), State::Loading(slot));
        let middle = table.start();
        assert_eq!(table.find(&middle, blocks[0]), None);
        assert!(table.loaded(blocks[0]));
        let late = table.start();
        assert_eq!(table.find(&early, blocks[0]), None, "its view does not change");
        assert_eq!(table.find(&middle, blocks[0]), None);
        assert_eq!(table.find(&late, blocks[0]), Some(slot));
        assert_eq!(table.load(blocks[0]), Err(LoadError::Present));
    }

    #[test]
    fn a_slot_is_free_when_the_last_reader_is_done() {
        let (mut table, blocks) = table(4, 1);
        let slot = table.load(blocks[0]).unwrap();
        table.loaded(blocks[0]);
        let (first, second) = (table.start(), table.start());
        table.leave(blocks[0]);
        let third = table.start();
        assert_eq!(table.find(&first, blocks[0]), Some(slot));
        assert_eq!(table.find(&third, blocks[0]), None);
        assert_eq!(table.load(blocks[1]), Err(LoadError::NoSlot));
        assert_eq!(table.load(blocks[0]), Err(LoadError::Leaving));
        table.finish(second);
        assert_eq!(table.load(blocks[1]), Err(LoadError::NoSlot), "the first still reads it");
        table.finish(first);
        assert_eq!(table.load(blocks[1]), Ok(slot), "the third never saw it");
        table.finish(third);
    }

    #[test]
    fn a_loading_block_that_is_told_to_leave_never_appears() {
        let (mut table, blocks) = table(2, 1);
        table.load(blocks[0]).unwrap();
        table.leave(blocks[0]);
        assert_eq!(table.load(blocks[1]), Err(LoadError::NoSlot), "its upload still writes");
        assert!(!table.loaded(blocks[0]));
        assert_eq!(table.state(blocks[0]), State::Absent);
        assert!(table.load(blocks[1]).is_ok());
    }

    #[test]
    fn closed_slots_are_told_and_not_handed_out() {
        let (mut table, blocks) = table(4, 3);
        for &block in &blocks[..3] {
            table.load(block).unwrap();
            table.loaded(block);
        }
        table.set_slots(0, 1);
        let closed: Vec<Block> = table.beyond(0).collect();
        assert_eq!(closed, blocks[1..3], "low slots are handed out first");
        closed.into_iter().for_each(|block| table.leave(block));
        assert_eq!((table.beyond(0).count(), table.free(0)), (0, 0));
        assert_eq!(table.load(blocks[3]), Err(LoadError::NoSlot));
        table.set_slots(0, 3);
        assert_eq!(table.free(0), 2);
        assert_eq!(table.load(blocks[3]), Ok(Slot(1)));
    }

    proptest! {
        /// Against a model that remembers every view: views never change, nobody sees a slot that is written, no slot is shared.
        #[test]
        fn views_hold(choices in proptest::collection::vec((0_u8..8, 0_usize..12), 1..300)) {
            let (mut table, blocks) = table(12, 5);
            let view = |table: &Residency, reader: &Reader| -> BTreeMap<Block, Slot> {
                blocks.iter().filter_map(|&block| table.find(reader, block).map(|slot| (block, slot))).collect()
            };
            let mut running: Vec<(Reader, BTreeMap<Block, Slot>)> = Vec::new();
            for (choice, number) in choices {
                let block = blocks[number];
                match choice {
                    0 | 1 => {
                        let reader = table.start();
                        let seen = view(&table, &reader);
                        running.push((reader, seen));
                    }
                    2 if !running.is_empty() => {
                        let (reader, _) = running.swap_remove(number % running.len());
                        table.finish(reader);
                    }
                    2 | 3 => { let _ = table.load(block); }
                    4 => { table.loaded(block); }
                    5 => table.leave(block),
                    6 => table.failed(block),
                    _ => table.set_slots(0, u32::try_from(number).unwrap() % 7),
                }
                let mut written = Vec::new();
                let mut owners = BTreeMap::new();
                for &block in &blocks {
                    let slot = match table.state(block) {
                        State::Absent => continue,
                        State::Loading(slot) => { written.push(slot); slot }
                        State::Resident(slot) | State::Leaving(slot) => slot,
                    };
                    prop_assert_eq!(owners.insert(slot, block), None, "two blocks in one slot");
                }
                for (reader, seen) in &running {
                    prop_assert_eq!(&view(&table, reader), seen, "a view changed");
                    prop_assert!(seen.values().all(|slot| !written.contains(slot)), "a slot is read and written");
                }
            }
            for (reader, _) in running {
                table.finish(reader);
            }
            for &block in &blocks {
                table.failed(block);
                table.leave(block);
            }
            table.set_slots(0, 7);
            prop_assert_eq!(table.free(0), 7, "no slot is lost");
        }
    }
}
