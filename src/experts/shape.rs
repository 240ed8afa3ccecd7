//! Names of expert blocks.
//!
//! Owns: the numbering. A *group* is the weight tensors that one MoE block of the graph reads together (gate, up, down); a *block*
//! is what one expert has of one group. The key of a block is (group, expert), never (layer, expert): a layer may have two
//! groups. A *pool* is a set of groups whose blocks can take each other's slots: equal sizes, same arena.
//! Invariants: blocks are numbered without gaps, group by group, so a table over all blocks is a vector.
//! Threads: none. Does not: know tensors, bytes in memory, or what is resident.

/// One group of weight tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Experts of the group.
    pub experts: u32,
    /// Experts that one token uses.
    pub used: u32,
    /// The pool that its blocks belong to.
    pub pool: u16,
}

/// The number of a group, in the order in which a graph runs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u32);

/// The number of a block among all blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block(pub(super) u32);

impl Block {
    /// The number as an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Why groups cannot be numbered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// A group without experts, or one whose tokens use more experts than there are.
    #[error("group {group} has {experts} experts and uses {used}")]
    Group {
        /// Its number.
        group: usize,
        /// Its experts.
        experts: u32,
        /// What a token uses.
        used: u32,
    },
    /// More blocks than the numbering is made for.
    #[error("more than {} expert blocks", Shape::MOST_BLOCKS)]
    TooMany,
}

/// The groups of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    groups: Vec<Group>,
    /// The number of each group's first block; one more at the end.
    first: Vec<u32>,
}

impl Shape {
    /// The largest number of blocks: beyond any model, and small enough for tables.
    pub const MOST_BLOCKS: u32 = 1 << 24;

    /// Numbers the blocks of `groups`.
    pub fn new(groups: Vec<Group>) -> Result<Self, ShapeError> {
        let mut first = vec![0];
        let mut blocks = 0_u32;
        for (at, group) in groups.iter().enumerate() {
            if group.experts == 0 || group.used == 0 || group.used > group.experts {
                return Err(ShapeError::Group { group: at, experts: group.experts, used: group.used });
            }
            blocks = blocks
                .checked_add(group.experts)
                .filter(|&blocks| blocks <= Self::MOST_BLOCKS)
                .ok_or(ShapeError::TooMany)?;
            first.push(blocks);
        }
        Ok(Self { groups, first })
    }

    /// The groups, in graph order.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Number of all blocks.
    pub fn blocks(&self) -> usize {
        self.first.last().map_or(0, |&count| count as usize)
    }

    /// Number of pools: one more than the largest number of a pool.
    pub fn pools(&self) -> usize {
        self.groups.iter().map(|group| usize::from(group.pool) + 1).max().unwrap_or(0)
    }

    /// The block of an expert, if both exist.
    pub fn block(&self, group: GroupId, expert: u32) -> Option<Block> {
        let at = group.0 as usize;
        let known = self.groups.get(at).is_some_and(|group| expert < group.experts);
        known.then(|| Block(self.first[at] + expert))
    }

    /// The blocks of a group.
    pub fn blocks_of(&self, group: GroupId) -> impl DoubleEndedIterator<Item = Block> + use<> {
        let at = group.0 as usize;
        let ends = self.first.get(at).zip(self.first.get(at + 1));
        ends.map_or(0..0, |(&first, &end)| first..end).map(Block)
    }

    /// Group and expert of a block.
    pub fn key(&self, block: Block) -> (GroupId, u32) {
        let at = self.first.partition_point(|&first| first <= block.0).saturating_sub(1);
        (GroupId(u32::try_from(at).unwrap_or(u32::MAX)), block.0 - self.first[at])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_numbered_group_by_group() {
        let group = |experts, pool| Group { experts, used: 1, pool };
        let shape = Shape::new(vec![group(4, 0), group(2, 1), group(3, 0)]).unwrap();
        assert_eq!((shape.blocks(), shape.pools()), (9, 2));
        let numbers = (0..3).map(GroupId).flat_map(|group| shape.blocks_of(group).collect::<Vec<_>>());
        for (at, block) in numbers.enumerate() {
            assert_eq!(block.index(), at);
            let (group, expert) = shape.key(block);
            assert_eq!(shape.block(group, expert), Some(block));
        }
        assert_eq!(shape.block(GroupId(1), 2), None);
        assert_eq!(shape.block(GroupId(3), 0), None);
        assert_eq!(shape.blocks_of(GroupId(3)).count(), 0);
    }

    #[test]
    fn shapes_that_make_no_sense_are_refused() {
        let shape = |experts, used| Shape::new(vec![Group { experts, used, pool: 0 }]);
        assert_eq!(shape(0, 0), Err(ShapeError::Group { group: 0, experts: 0, used: 0 }));
        assert_eq!(shape(4, 5), Err(ShapeError::Group { group: 0, experts: 4, used: 5 }));
        assert_eq!(shape(Shape::MOST_BLOCKS + 1, 8), Err(ShapeError::TooMany));
        assert_eq!(Shape::new(vec![]).map(|shape| shape.blocks()), Ok(0));
    }
}
