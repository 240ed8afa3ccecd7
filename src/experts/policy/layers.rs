//! Stock mode: whole layers on the device, as llama.cpp's `-ncmoe` places them.
//!
//! Owns: the choice of blocks. The last groups of a graph first; what is left of a pool takes the hottest experts of the next
//! group.
//! Threads: none. Does not: move anything.

use super::super::heat::Heat;
use super::super::shape::{Block, GroupId, Shape};

/// The blocks that fill `slots` (per pool) with whole groups, from the last group backwards.
pub fn whole_layers(shape: &Shape, slots: &[u32], heat: &Heat) -> Vec<Block> {
    let mut left = slots.to_vec();
    let mut chosen = Vec::new();
    for (number, group) in shape.groups().iter().enumerate().rev() {
        let number = u32::try_from(number).unwrap_or(u32::MAX);
        let Some(left) = left.get_mut(usize::from(group.pool)).filter(|left| **left > 0) else { continue };
        let mut blocks: Vec<Block> = shape.blocks_of(GroupId(number)).collect();
        if *left < group.experts {
            blocks.sort_by(|&a, &b| heat.raw(b).total_cmp(&heat.raw(a)));
            blocks.truncate(*left as usize);
        }
        *left -= group.experts.min(*left);
        chosen.extend(blocks);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::super::super::shape::Group;
    use super::*;

    #[test]
    fn whole_groups_from_the_end_then_the_hottest_of_the_next() {
        let group = |pool| Group { experts: 4, used: 2, pool };
        let shape = Shape::new(vec![group(0), group(0), group(1), group(0)]).unwrap();
        let heat = Heat::from_rates((0..16).map(|block| if block % 4 == 2 { 0.9 } else { 0.1 }), 100.0);
        let chosen = |slots: &[u32]| {
            let mut chosen: Vec<usize> = whole_layers(&shape, slots, &heat).into_iter().map(Block::index).collect();
            chosen.sort_unstable();
            chosen
        };
        assert_eq!(chosen(&[5, 0]), [6, 12, 13, 14, 15]);
        assert_eq!(chosen(&[4, 4]), [8, 9, 10, 11, 12, 13, 14, 15]);
        assert_eq!(chosen(&[0, 1]), [10]);
        assert_eq!(chosen(&[99, 99]).len(), 16);
        assert!(chosen(&[]).is_empty());
    }
}
