//! Blocks in order of a level, with every operation in constant time.
//!
//! Owns: for each row (a pool's held or absent blocks) one list per level, and a bit per level that says whether the list has
//! members. Moving a block costs two unlinked and two linked neighbours; the lowest and the highest level are found in two words.
//! It carries a small record of its user per block, in the same cache line as the links: tables over all blocks do not fit the caches
//! of a core, and every line counts.
//! Invariants: a block is in exactly one list; the bit of a level is set if and only if its list has members.
//! Threads: none. Does not: know what a level means.

use super::super::shape::Block;

/// Number of levels.
pub(super) const LEVELS: u16 = 2048;
const WORDS: usize = LEVELS as usize / 64;

/// Which end of a level's list a block joins.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The first to leave when held, the last to be chosen when absent.
    Front,
    /// The other.
    Back,
}

#[derive(Clone, Copy, Debug)]
struct Link<T> {
    next: u32,
    previous: u32,
    /// Where a block is; of no meaning in a head.
    row: u16,
    level: u16,
    record: T,
}

#[derive(Clone, Debug)]
struct Row {
    members: [u64; WORDS],
    /// Which words have bits.
    words: u32,
    count: u32,
}

/// All lists.
#[derive(Clone, Debug)]
pub(super) struct Ranking<T> {
    /// One link per block, then one per row and level that heads its list.
    links: Vec<Link<T>>,
    blocks: u32,
    rows: Vec<Row>,
}

impl<T: Copy + Default> Ranking<T> {
    /// All blocks at level 0 in the even row of their pool.
    pub(super) fn new(pool_of: &[u16], pools: usize) -> Self {
        let rows = 2 * pools;
        let blocks = u32::try_from(pool_of.len()).unwrap_or(u32::MAX);
        let heads = u32::try_from(rows * usize::from(LEVELS)).unwrap_or(u32::MAX);
        let head = |own| Link { next: own, previous: own, row: 0, level: 0, record: T::default() };
        let empty = Row { members: [0; WORDS], words: 0, count: 0 };
        let links = (0..blocks + heads).map(head).collect();
        let mut ranking = Self { links, blocks, rows: vec![empty; rows] };
        for (block, &pool) in (0..blocks).map(Block).zip(pool_of) {
            ranking.link(block, 2 * pool, 0, End::Back);
        }
        ranking
    }

    fn head(&self, row: u16, level: u16) -> u32 {
        self.blocks + u32::from(row) * u32::from(LEVELS) + u32::from(level)
    }

    fn link(&mut self, block: Block, row: u16, level: u16, end: End) {
        let head = self.head(row, level);
        let (previous, next) = match end {
            End::Front => (head, self.links[head as usize].next),
            End::Back => (self.links[head as usize].previous, head),
        };
        let link = &mut self.links[block.index()];
        *link = Link { next, previous, row, level, record: link.record };
        self.links[previous as usize].next = block.0;
        self.links[next as usize].previous = block.0;
        let row = &mut self.rows[usize::from(row)];
        row.members[usize::from(level / 64)] |= 1 << (level % 64);
        row.words |= 1 << (level / 64);
        row.count += 1;
    }

    fn unlink(&mut self, block: Block) {
        let Link { next, previous, row, level, .. } = self.links[block.index()];
        self.links[previous as usize].next = next;
        self.links[next as usize].previous = previous;
        let row = &mut self.rows[usize::from(row)];
        if next == previous {
            let word = &mut row.members[usize::from(level / 64)];
            *word &= !(1 << (level % 64));
            if *word == 0 {
                row.words &= !(1 << (level / 64));
            }
        }
        row.count -= 1;
    }

    /// Moves a block.
    pub(super) fn place(&mut self, block: Block, row: u16, level: u16, end: End) {
        self.unlink(block);
        self.link(block, row, level, end);
    }

    /// Row of a block.
    pub(super) fn row(&self, block: Block) -> u16 {
        self.links[block.index()].row
    }

    /// Level of a block.
    pub(super) fn level(&self, block: Block) -> u16 {
        self.links[block.index()].level
    }

    /// The record of a block.
    pub(super) fn record(&self, block: Block) -> T {
        self.links[block.index()].record
    }

    /// The record of a block, to change it.
    pub(super) fn record_mut(&mut self, block: Block) -> &mut T {
        &mut self.links[block.index()].record
    }

    /// Members of a row.
    pub(super) fn count(&self, row: u16) -> u32 {
        self.rows[usize::from(row)].count
    }

    /// The block of a row that is first to leave and passes `fits`, among the first few of its lowest level.
    pub(super) fn lowest(&self, row: u16, tries: usize, fits: impl Fn(Block) -> bool) -> Option<Block> {
        let lists = &self.rows[usize::from(row)];
        let word = Some(lists.words).filter(|&words| words != 0)?.trailing_zeros();
        let bit = lists.members[word as usize].trailing_zeros();
        self.walk(row, word * 64 + bit, tries, |link| link.next, fits)
    }

    /// The block of a row that is first to be chosen and passes `fits`, among the first few of its highest level.
    pub(super) fn highest(&self, row: u16, tries: usize, fits: impl Fn(Block) -> bool) -> Option<Block> {
        let lists = &self.rows[usize::from(row)];
        let word = 31 - Some(lists.words).filter(|&words| words != 0)?.leading_zeros();
        let bit = 63 - lists.members[word as usize].leading_zeros();
        self.walk(row, word * 64 + bit, tries, |link| link.previous, fits)
    }

    fn walk(
        &self,
        row: u16,
        level: u32,
        tries: usize,
        step: impl Fn(&Link<T>) -> u32,
        fits: impl Fn(Block) -> bool,
    ) -> Option<Block> {
        let head = self.head(row, u16::try_from(level).unwrap_or(0));
        let mut at = head;
        for _ in 0..tries {
            at = step(&self.links[at as usize]);
            if at == head {
                return None;
            }
            if fits(Block(at)) {
                return Some(Block(at));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against lists that are searched.
        #[test]
        fn lists_agree_with_a_search(moves in proptest::collection::vec((0_u32..9, 0_u16..4, 0_u16..70, any::<bool>()), 0..200)) {
            let mut ranking: Ranking<()> = Ranking::new(&[0, 0, 0, 0, 0, 1, 1, 1, 1], 2);
            let mut rows: Vec<Vec<(u16, Block)>> = vec![Vec::new(); 4];
            for block in (0..9).map(Block) {
                rows[if block.0 < 5 { 0 } else { 2 }].push((0, block));
            }
            for (block, row, level, front) in moves {
                let (block, level) = (Block(block), level * 29);
                rows.iter_mut().for_each(|row| row.retain(|&(_, own)| own != block));
                let row_list = &mut rows[usize::from(row)];
                let at = if front {
                    row_list.partition_point(|&(own, _)| own < level)
                } else {
                    row_list.partition_point(|&(own, _)| own <= level)
                };
                row_list.insert(at, (level, block));
                ranking.place(block, row, level, if front { End::Front } else { End::Back });
                for (row, list) in (0_u16..).zip(&rows) {
                    prop_assert_eq!(ranking.count(row) as usize, list.len());
                    prop_assert_eq!(ranking.lowest(row, 1, |_| true), list.first().map(|&(_, block)| block));
                    prop_assert_eq!(ranking.highest(row, 1, |_| true), list.last().map(|&(_, block)| block));
                    // A block that may not leave is passed over within its level only.
                    let first = list.first().copied();
                    let next = list.iter().skip(1).find(|own| Some(own.0) == first.map(|first| first.0));
                    prop_assert_eq!(
                        ranking.lowest(row, 9, |block| Some(block) != first.map(|first| first.1)),
                        next.map(|&(_, block)| block)
                    );
                }
            }
        }
    }
}
