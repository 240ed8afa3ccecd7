//! Recognition of MoE blocks.
//!
//! A block is the set of pair-wise nodes that lie, by data flow, between expert products with the same ids: gate, up,
//! activation, biases, scales, down. It is a set, not a run: ggml-cuda's graph_optimize moves the shared expert between its
//! nodes, so foreign nodes may stand inside its range. They must not read one of its inner results, and no node may write over
//! the ids, which are read once, before the block runs.
//! A candidate that breaks a rule is not a block; its products run one by one.

use std::ops::Range;

use super::{IdsKey, Kind, Node};

/// A recognised block: the expert products in node order, and the nodes from the first to the last of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) products: Vec<usize>,
    pub(super) range: Range<usize>,
}

/// All blocks of a graph, ordered, with ranges that do not overlap; products that are in none are left out.
pub(super) fn find(nodes: &[Node]) -> Vec<Block> {
    let mut candidates = Vec::new();
    for ids in distinct_ids(nodes) {
        let members = between(nodes, ids);
        candidates.extend(components(nodes, &members).into_iter().filter_map(|set| recognise(nodes, ids, &set)));
    }
    candidates.sort_by_key(|block| block.range.start);
    without_overlaps(candidates)
}

fn distinct_ids(nodes: &[Node]) -> Vec<IdsKey> {
    let mut all: Vec<IdsKey> = nodes
        .iter()
        .filter_map(|node| match node.kind {
            Kind::ExpertProduct { ids, .. } => Some(ids),
            _ => None,
        })
        .collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Marks the nodes that are products with these ids, or pair-wise nodes both fed by one and feeding one.
fn between(nodes: &[Node], ids: IdsKey) -> Vec<bool> {
    let is_product = |node: &Node| matches!(node.kind, Kind::ExpertProduct { ids: own, .. } if own == ids);
    let mut fed = vec![false; nodes.len()];
    for (index, node) in nodes.iter().enumerate() {
        fed[index] = is_product(node) || (node.kind == Kind::PairWise && node.reads.iter().any(|&read| fed[read]));
    }
    let mut feeds = vec![false; nodes.len()];
    for (index, node) in nodes.iter().enumerate().rev() {
        let member = fed[index] && (is_product(node) || feeds[index]);
        if member {
            for &read in &node.reads {
                feeds[read] = true;
            }
        }
        fed[index] = member;
    }
    fed
}

/// Splits a member set into its connected parts: two layers may share one routing result.
fn components(nodes: &[Node], members: &[bool]) -> Vec<Vec<usize>> {
    let mut label: Vec<usize> = (0..nodes.len()).collect();
    fn root(label: &mut [usize], mut index: usize) -> usize {
        while label[index] != index {
            label[index] = label[label[index]];
            index = label[index];
        }
        index
    }
    for (index, node) in nodes.iter().enumerate().filter(|(index, _)| members[*index]) {
        for &read in node.reads.iter().filter(|&&read| members[read]) {
            let (a, b) = (root(&mut label, index), root(&mut label, read));
            label[a.max(b)] = a.min(b);
        }
    }
    let mut sets: Vec<Vec<usize>> = Vec::new();
    let mut set_of: Vec<Option<usize>> = vec![None; nodes.len()];
    for index in (0..nodes.len()).filter(|&index| members[index]) {
        let root = root(&mut label, index);
        let set = *set_of[root].get_or_insert_with(|| {
            sets.push(Vec::new());
            sets.len() - 1
        });
        sets[set].push(index);
    }
    sets
}

/// A connected set is a block when a product is fed by another one, no foreign node in its range reads an inner result, no other
/// product stands in its range, and nothing in its range writes over the ids.
fn recognise(nodes: &[Node], ids: IdsKey, set: &[usize]) -> Option<Block> {
    let is_product = |index: usize| matches!(nodes[index].kind, Kind::ExpertProduct { .. });
    let products: Vec<usize> = set.iter().copied().filter(|&index| is_product(index)).collect();
    let range = *products.first()?..*products.last()? + 1;
    let mut member = vec![false; range.len()];
    for &index in set {
        *member.get_mut(index.checked_sub(range.start)?)? = true;
    }
    // A graph that ends inside the block holds no product that another one feeds.
    let fed = |index: usize| nodes[index].reads.iter().any(|read| set.binary_search(read).is_ok());
    if !products.iter().any(|&index| fed(index)) {
        return None;
    }
    let reads_inner =
        |index: usize| nodes[index].reads.iter().any(|&read| range.contains(&read) && member[read - range.start]);
    let mut strangers = range.clone().filter(|index| !member[index - range.start]);
    let writes_ids = range.clone().any(|index| nodes[index].writes == Some(ids.owner));
    let spoilt = writes_ids || strangers.any(|index| is_product(index) || reads_inner(index));
    (!spoilt).then_some(Block { products, range })
}

/// Drops every block whose range overlaps another's: neither can run as one piece.
fn without_overlaps(blocks: Vec<Block>) -> Vec<Block> {
    let overlaps = |a: &Block, b: &Block| a.range.start < b.range.end && b.range.start < a.range.end;
    let alone = |index: usize| {
        blocks.iter().enumerate().all(|(other, block)| other == index || !overlaps(block, &blocks[index]))
    };
    let keep: Vec<bool> = (0..blocks.len()).map(alone).collect();
    blocks.into_iter().zip(keep).filter_map(|(block, keep)| keep.then_some(block)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{ExpertWeight, TensorKey};

    fn ids(owner: usize) -> IdsKey {
        IdsKey { owner: TensorKey(owner), offset: 0, used: 4, tokens: 1, id_stride: 4, token_stride: 16 }
    }

    fn product(owner: usize, reads: &[usize]) -> Node {
        let kind = Kind::ExpertProduct { weight: ExpertWeight::Copied, ids: ids(owner) };
        Node { kind, reads: reads.to_vec(), writes: None }
    }

    fn pair(reads: &[usize]) -> Node {
        Node { kind: Kind::PairWise, reads: reads.to_vec(), writes: None }
    }

    fn foreign(reads: &[usize]) -> Node {
        Node { kind: Kind::Foreign, reads: reads.to_vec(), writes: None }
    }

    fn ranges(nodes: &[Node]) -> Vec<Range<usize>> {
        find(nodes).into_iter().map(|block| block.range).collect()
    }

    #[test]
    fn gate_up_glu_down() {
        let nodes = [foreign(&[]), product(1, &[0]), product(1, &[0]), pair(&[1, 2]), product(1, &[3]), foreign(&[4])];
        assert_eq!(find(&nodes), [Block { products: vec![1, 2, 4], range: 1..5 }]);
    }

    #[test]
    fn merged_gate_up_with_views_and_bias() {
        let nodes =
            [foreign(&[]), product(1, &[0]), pair(&[1]), pair(&[2]), pair(&[2]), pair(&[3, 4]), product(1, &[5])];
        assert_eq!(ranges(&nodes), vec![1..7]);
    }

    #[test]
    fn shared_expert_inside_the_range() {
        // 1 gate, 2 up, 3 glu, 4..6 shared expert, 7 down
        let nodes = [
            foreign(&[]),
            product(1, &[0]),
            product(1, &[0]),
            pair(&[1, 2]),
            foreign(&[0]),
            foreign(&[0]),
            pair(&[4, 5]),
            product(1, &[3]),
        ];
        assert_eq!(find(&nodes), [Block { products: vec![1, 2, 7], range: 1..8 }]);
    }

    #[test]
    fn foreign_reader_of_an_inner_result_spoils_it() {
        let nodes = [foreign(&[]), product(1, &[0]), foreign(&[1]), pair(&[1]), product(1, &[3])];
        assert_eq!(ranges(&nodes), []);
    }

    #[test]
    fn writer_of_the_ids_spoils_it() {
        let writer = |owner| Node { writes: Some(TensorKey(owner)), ..foreign(&[]) };
        let nodes = |owner| [product(1, &[]), writer(owner), pair(&[0]), product(1, &[2])];
        assert_eq!(ranges(&nodes(1)), []);
        assert_eq!(ranges(&nodes(2)), vec![0..4], "another tensor may be written");
        let before_and_behind = [writer(1), product(1, &[]), pair(&[1]), product(1, &[2]), writer(1)];
        assert_eq!(ranges(&before_and_behind), vec![1..4]);
    }

    #[test]
    fn reader_of_an_inner_result_behind_the_range_is_fine() {
        let nodes = [foreign(&[]), product(1, &[0]), pair(&[1]), product(1, &[2]), foreign(&[1, 3])];
        assert_eq!(ranges(&nodes), vec![1..4]);
    }

    #[test]
    fn cut_graph_has_no_block() {
        assert_eq!(ranges(&[product(1, &[]), product(1, &[]), pair(&[0, 1])]), []);
        assert_eq!(ranges(&[pair(&[]), product(1, &[0])]), []);
    }

    #[test]
    fn two_layers_with_one_routing_result() {
        let nodes = [
            product(1, &[]),
            pair(&[0]),
            product(1, &[1]),
            foreign(&[2]),
            product(1, &[3]),
            pair(&[4]),
            product(1, &[5]),
        ];
        assert_eq!(ranges(&nodes), [0..3, 4..7]);
    }

    #[test]
    fn interleaved_blocks_are_dropped() {
        let nodes = [product(1, &[]), product(2, &[]), pair(&[0]), pair(&[1]), product(1, &[2]), product(2, &[3])];
        assert_eq!(ranges(&nodes), []);
    }

    #[test]
    fn two_blocks_in_one_layer() {
        let nodes = [product(1, &[]), pair(&[0]), product(1, &[1]), product(2, &[]), pair(&[3]), product(2, &[4])];
        assert_eq!(ranges(&nodes), [0..3, 3..6]);
    }
}
