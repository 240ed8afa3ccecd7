//! The search for nodes that run in slices: blocks as models build them, and what must not be taken for one. `random` runs them.

use super::*;
use crate::graph::slices::tests::build::{Build, E, contiguous, wide};

#[path = "slices_build.rs"]
mod build;
#[path = "slices_random.rs"]
mod random;

const TOKENS: i64 = 40;
const WIDTH: i64 = 4;
const INNER: i64 = 3;
const USED: i64 = 2;
const EXPERTS: i64 = 6;

/// A block with what stands before and behind it; each field is a tensor.
struct Block {
    all: Build,
    rows: usize,
    ids: usize,
    glu: usize,
    down: usize,
    scaled: usize,
    sum: usize,
    result: usize,
}

/// How the first products and the activation are made.
#[derive(Clone, Copy)]
enum Kind {
    Plain,
    Merged,
    Biased,
}

impl Block {
    fn new(kind: Kind) -> Self {
        let mut all = Build::default();
        let rows = all.outside([WIDTH, 1, TOKENS, 1]);
        let chosen = all.outside([EXPERTS, TOKENS, 1, 1]);
        let ids = all.outside_view(chosen, [USED, TOKENS, 1, 1], [E, wide(EXPERTS) * E], 0);
        let factors = all.outside([1, USED, TOKENS, 1]);
        let residual = all.outside([WIDTH, TOKENS, 1, 1]);
        let hidden = [INNER, USED, TOKENS, 1];
        let glu = match kind {
            Kind::Plain => {
                let [gate, up] = [0, 1].map(|_| {
                    let weights = all.outside([WIDTH, INNER, EXPERTS, 1]);
                    all.node(Work::Product, hidden, &[weights, rows, ids])
                });
                all.node(Work::Elements, hidden, &[gate, up])
            }
            Kind::Merged => {
                let weights = all.outside([WIDTH, 2 * INNER, EXPERTS, 1]);
                let both = all.node(Work::Product, [2 * INNER, USED, TOKENS, 1], &[weights, rows, ids]);
                let strides = all.nb(both);
                let [gate, up] = [0, wide(INNER) * E].map(|at| all.view(both, hidden, strides, at));
                all.node(Work::Elements, hidden, &[gate, up])
            }
            Kind::Biased => {
                let [gate, up] = [0, 1].map(|_| {
                    let weights = all.outside([WIDTH, INNER, EXPERTS, 1]);
                    let product = all.node(Work::Product, hidden, &[weights, rows, ids]);
                    let table = all.outside([INNER, EXPERTS, 1, 1]);
                    all.node(Work::AddId, hidden, &[product, table, ids])
                });
                let limit = all.node(Work::Elements, hidden, &[gate]);
                all.node(Work::Elements, hidden, &[limit, up])
            }
        };
        let results = [WIDTH, USED, TOKENS, 1];
        let weights = all.outside([INNER, WIDTH, EXPERTS, 1]);
        let down = all.node(Work::Product, results, &[weights, glu, ids]);
        let last = if matches!(kind, Kind::Biased) {
            let table = all.outside([WIDTH, EXPERTS, 1, 1]);
            all.node(Work::AddId, results, &[down, table, ids])
        } else {
            down
        };
        let scaled = all.node(Work::Elements, results, &[last, factors]);
        let [_, row, token, _] = contiguous(results);
        let parts = [0, row].map(|at| all.view(scaled, [WIDTH, TOKENS, 1, 1], [E, token, token, token], at));
        let sum = all.node(Work::Elements, [WIDTH, TOKENS, 1, 1], &parts);
        let result = all.node(Work::Elements, [WIDTH, TOKENS, 1, 1], &[sum, residual]);
        let norm = all.node(Work::Other, [WIDTH, TOKENS, 1, 1], &[result]);
        all.node(Work::Elements, [WIDTH, TOKENS, 1, 1], &[norm, result]);
        Self { all, rows, ids, glu, down, scaled, sum, result }
    }

    fn find(&self) -> Option<Sliced> {
        let (flows, numbers) = self.all.flows();
        find(&flows, self.all.count(), numbers[self.down] + 1, TOKENS)
    }

    /// The number of the result, and of nodes in slices; nothing if the block is not cut.
    fn found(&self) -> Option<(usize, usize)> {
        self.find().map(|sliced| (sliced.result, sliced.count))
    }

    fn number(&self, tensor: usize) -> usize {
        self.all.flows().1[tensor]
    }

    /// The block up to and with a tensor.
    fn up_to(&self, tensor: usize) -> Option<(usize, usize)> {
        Some((self.number(tensor), self.number(tensor) + 1))
    }
}

#[test]
fn blocks_run_up_to_the_residual() {
    for kind in [Kind::Plain, Kind::Merged, Kind::Biased] {
        let block = Block::new(kind);
        let sliced = block.find().expect("it can be cut");
        assert_eq!(Some((sliced.result, sliced.count)), block.up_to(block.result));
        let cut = |tensor| sliced.cuts.iter().find(|cut| cut.tensor == block.number(tensor)).copied();
        let part = |tensor| cut(tensor).map(|cut| (cut.dim, cut.inside));
        assert_eq!(part(block.rows), Some((2, None)));
        assert_eq!(part(block.ids), Some((1, None)));
        assert_eq!(part(block.result), Some((1, None)));
        assert_eq!(part(block.glu), Some((2, Some(block.number(block.glu)))));
        assert_eq!(part(block.sum), Some((1, Some(block.number(block.sum)))));
        let inside: Vec<usize> = sliced.spans.iter().map(|span| span.tensor).collect();
        let (flows, _) = block.all.flows();
        for cut in &sliced.cuts {
            let owner = flows[cut.tensor].root.filter(|_| cut.tensor < sliced.count).unwrap_or(cut.tensor);
            assert_eq!(cut.inside, inside.contains(&owner).then_some(owner), "views lie in what they are views of");
        }
        let weights = flows[0].sources[0];
        assert!(sliced.cuts.iter().all(|cut| cut.tensor != weights), "weights are read whole");
    }
}

#[test]
fn a_stranger_ends_the_slices_and_inside_it_forbids_them() {
    let mut block = Block::new(Kind::Plain);
    *block.all.work(block.result) = Work::Other;
    assert_eq!(block.found(), block.up_to(block.sum));
    *block.all.work(block.glu) = Work::Other;
    assert_eq!(block.found(), None);
}

#[test]
fn what_is_read_elsewhere_stays() {
    // A second result that stays forbids what lies behind it; the sum alone would be one result, if nothing else stays.
    let mut block = Block::new(Kind::Plain);
    *block.all.more_uses(block.sum) = Some(1);
    assert_eq!(block.found(), block.up_to(block.sum), "the sum is the one result then");
    for (tensor, rest) in [(block.glu, None), (block.scaled, block.up_to(block.scaled))] {
        for uses in [Some(1), None] {
            let mut block = Block::new(Kind::Plain);
            *block.all.more_uses(tensor) = uses;
            assert_eq!(block.found(), rest);
        }
        let mut block = Block::new(Kind::Plain);
        block.all.make_output(tensor);
        assert_eq!(block.found(), rest);
    }
    let mut block = Block::new(Kind::Plain);
    *block.all.more_uses(block.down) = Some(1);
    assert_eq!(block.found(), block.up_to(block.down), "nothing but the last product's result is read later");
    let mut block = Block::new(Kind::Plain);
    block.all.make_output(block.result);
    assert_eq!(block.found(), block.up_to(block.result), "an output may be the result");
}

#[test]
fn what_nobody_reads_and_the_last_node_stay() {
    let mut block = Block::new(Kind::Plain);
    let unread = block.all.node_after(block.glu, Work::Elements, [INNER, USED, TOKENS, 1], &[block.glu]);
    assert_eq!(block.found(), None, "{unread} is read by whoever made the graph");
    let block = Block::new(Kind::Plain);
    let (flows, _) = block.all.flows();
    let numbers = [block.down, block.sum, block.result].map(|tensor| block.number(tensor));
    // The graph as a host would cut it, with the uses of the whole.
    for (end, result) in [(numbers[0], numbers[0]), (numbers[2], numbers[2])] {
        let sliced = find(&flows, end + 1, numbers[0] + 1, TOKENS).expect("up to the last node");
        assert_eq!((sliced.result, sliced.count), (result, end + 1));
    }
    // Cut in front of the sum: the views are what is read later, so that they are not in.
    let sliced = find(&flows, numbers[1], numbers[0] + 1, TOKENS).expect("up to the scaled rows");
    assert_eq!(Some((sliced.result, sliced.count)), block.up_to(block.scaled));
    // As many as are asked for at least.
    assert_eq!(find(&flows, block.all.count(), numbers[2] + 2, TOKENS), None);
}

#[test]
fn tokens_are_one_dimension() {
    // As many tokens as elements per row, as experts used, or as experts: dimensions follow from the nodes, not from their size.
    for other in [WIDTH, INNER, USED, EXPERTS] {
        let mut block = Block::new(Kind::Merged);
        block.all.resize(TOKENS, other);
        let (flows, numbers) = block.all.flows();
        let sliced = find(&flows, block.all.count(), numbers[block.down] + 1, other).expect("it can be cut");
        assert_eq!(sliced.result, numbers[block.result], "{other} tokens");
        assert_eq!(sliced.cuts.iter().find(|cut| cut.tensor == sliced.result).map(|cut| cut.dim), Some(1));
    }
    let block = Block::new(Kind::Plain);
    let (flows, _) = block.all.flows();
    assert_eq!(find(&flows, block.all.count(), 1, TOKENS + 1), None, "of other tokens");
}

/// Adds a node over the scaled rows, read by the sum, and says whether slices get behind it.
fn takes(node: impl FnOnce(&mut Build, usize) -> Option<usize>) -> bool {
    let mut block = Block::new(Kind::Plain);
    let Some(added) = node(&mut block.all, block.scaled) else { panic!("no node") };
    block.all.read_instead(block.scaled, added);
    block.found() == block.up_to(block.result)
}

#[test]
fn sources_are_of_all_tokens_or_of_none() {
    let shape = [WIDTH, USED, TOKENS, 1];
    let with = |ne: [i64; 4]| {
        takes(|all, scaled| {
            let other = all.outside(ne);
            Some(all.node_after(scaled, Work::Elements, shape, &[scaled, other]))
        })
    };
    for ne in [[1; 4], [WIDTH, 1, 1, 1], [WIDTH, USED, 1, 1], [1, 1, TOKENS, 1], shape] {
        assert!(with(ne), "{ne:?}");
    }
    assert!(!with([WIDTH, USED, TOKENS / 2, 1]), "repeated along the tokens");
    let mut block = Block::new(Kind::Plain);
    let down_weights = block.all.sources(block.down)[0];
    block.all.sources_mut(block.scaled)[1] = down_weights;
    assert_eq!(block.found(), block.up_to(block.down), "weights are read whole, and are no rows of tokens");
    // As many experts as tokens: a table that is read by id, and as rows of tokens.
    let mut block = Block::new(Kind::Biased);
    block.all.resize(EXPERTS, TOKENS);
    let bias = block.all.sources(block.scaled)[0];
    block.all.sources_mut(block.result)[1] = block.all.sources(bias)[1];
    assert_eq!(block.found(), block.up_to(block.sum), "whole for one node, cut for another");
    // What is a view of a result in here, and no node.
    let leaf = takes(|all, scaled| {
        let view = all.outside_view(scaled, shape, [E, all.nb(scaled)[1]], 0);
        Some(all.node_after(scaled, Work::Elements, shape, &[scaled, view]))
    });
    assert!(!leaf);
}

#[test]
fn views_are_of_rows_of_each_token() {
    let token = contiguous([WIDTH, USED, TOKENS, 1])[2];
    let row = contiguous([WIDTH, USED, TOKENS, 1])[1];
    let shows = |ne: [i64; 4], nb: [usize; 4], at: usize, copied: [i64; 4]| {
        let mut block = Block::new(Kind::Plain);
        let view = block.all.view_after(block.scaled, block.scaled, ne, nb, at);
        let copy = block.all.node_after(view, Work::Elements, copied, &[view]);
        block.all.sources_mut(block.result).push(copy);
        block.found() == block.up_to(block.result)
    };
    let (nb, rows) = ([E, token, token, token], [WIDTH, TOKENS, 1, 1]);
    assert!(shows(rows, nb, row, rows));
    assert!(!shows(rows, nb, row + E, rows), "it reaches over the token");
    assert!(!shows([WIDTH, TOKENS - 1, 1, 1], nb, token, [WIDTH, TOKENS - 1, 1, 1]), "of fewer tokens");
    assert!(!shows(rows, [E, row, row, row], 0, rows), "tokens are nearer to each other");
    // Rows of all tokens, expert by expert, written one behind the other: they hold elements of several tokens.
    assert!(
        !shows([WIDTH, TOKENS, USED, 1], [E, token, row, row], 0, [WIDTH * USED, TOKENS, 1, 1]),
        "matrices of tokens"
    );
}

#[test]
fn the_result_spares_what_later_slices_read() {
    let block = Block::new(Kind::Plain);
    let place = |tensor: usize, at: i64| {
        let mut moved = Block::new(Kind::Plain);
        let start = moved.all.start(block.result).saturating_add_signed(isize::try_from(at).expect("small"));
        moved.all.put(tensor, start);
        moved.found()
    };
    let row = isize::try_from(contiguous([WIDTH, TOKENS, 1, 1])[1]).expect("small") as i64;
    let all = block.up_to(block.result);
    assert_eq!(place(block.rows, 0), all, "written over token by token, as it was read");
    assert_eq!(place(block.rows, row), all, "behind what is written");
    assert_ne!(place(block.rows, -row), all, "ahead of what is read");
    assert_eq!(place(block.rows, -row * TOKENS), all, "in front of all of it");
    // Other steps from token to token: the ids, and a table that is read whole.
    assert_ne!(place(block.all.root(block.ids), row), all);
    assert_ne!(place(block.all.sources(block.down)[0], row), all);
}

#[test]
fn slices_cover_all_tokens_evenly() {
    for tokens in (1..300).chain([511, 512, 513, 4096, 8191]) {
        for most in [1, 2, 31, 32, 33, 100, 512, 10_000] {
            let all = slices(tokens, most);
            assert_eq!((all[0].start, all[all.len() - 1].end), (0, tokens));
            assert!(all.windows(2).all(|pair| pair[0].end == pair[1].start));
            let lengths: Vec<u64> = all.iter().map(|slice| slice.end - slice.start).collect();
            let (last, others) = lengths.split_last().expect("one at least");
            assert!(*last > 0 && lengths.iter().all(|length| *length <= most), "{lengths:?}");
            assert!(others.iter().all(|length| *length == lengths[0] && length >= last), "{lengths:?}");
            if most >= STEP {
                assert!(others.iter().all(|length| length % STEP == 0), "{lengths:?}");
            }
            if most % STEP == 0 {
                assert_eq!(lengths.len() as u64, tokens.div_ceil(lengths[0]).min(tokens.div_ceil(most).max(1)));
            }
        }
    }
    assert_eq!(slices(0, 0), []);
}

#[test]
fn the_most_tokens_follow_the_experts() {
    assert_eq!(most_tokens(128, 8), 4096);
    assert_eq!(most_tokens(4, 2), 512, "no fewer");
    assert_eq!(most_tokens(100_000, 1), 1 << 14, "no more");
    assert_eq!(most_tokens(60, 7), 2208, "2194 rounded up");
    assert_eq!((most_tokens(0, 0), most_tokens(u64::from(u32::MAX), 0)), (512, 1 << 14));
}

#[test]
fn nothing_lies_on_what_is_still_read() {
    for kind in [Kind::Plain, Kind::Merged, Kind::Biased] {
        let sliced = Block::new(kind).find().expect("it can be cut");
        for tokens in [1, 7, 32, 40] {
            let layout = sliced.layout(tokens);
            let range = |number: usize| {
                let (tensor, start) = layout.places[number];
                assert_eq!(tensor, sliced.spans[number].tensor);
                start..start + sliced.spans[number].row * tokens
            };
            for (number, span) in sliced.spans.iter().enumerate() {
                assert!(range(number).end <= layout.bytes && range(number).start % ALIGNMENT == 0);
                for (earlier, other) in sliced.spans[..number].iter().enumerate() {
                    let is_apart =
                        range(number).end <= range(earlier).start || range(earlier).end <= range(number).start;
                    let is_over = span.over == Some(other.tensor) && other.to == span.from;
                    assert!(is_apart || is_over || other.to < span.from, "{span:?} on {other:?}");
                }
            }
            let sum: usize = sliced.spans.iter().map(|span| span.row * tokens).sum();
            assert!(tokens < 7 || layout.bytes < sum, "memory is used again");
        }
    }
}

#[test]
fn what_lies_between_is_free_but_for_what_is_needed() {
    let mut block = Block::new(Kind::Plain);
    // The router's results in the memory of the last product, which is written when they were read; the result where the activation was.
    let (down, glu) = (block.all.start(block.down), block.all.start(block.glu));
    let rows = block.rows;
    block.all.put(rows, down);
    block.all.put(block.result, glu);
    let (flows, numbers) = block.all.flows();
    let sliced = block.find().expect("it can be cut");
    let free = sliced.free(&flows);
    let range = |tensor: usize| {
        let flow = &flows[numbers[tensor]];
        Ranges::from(flow.start..flow.start + flow.bytes)
    };
    assert!(free.within(&range(rows)).is_empty() && free.within(&range(block.result)).is_empty());
    let expected = sliced.spans.iter().fold(Ranges::default(), |sum, span| {
        let flow = &flows[span.tensor];
        sum.with(&Ranges::from(flow.start..flow.start + flow.bytes))
    });
    assert_eq!(free, expected.without(&range(rows)).without(&range(block.result)));
    assert!(free.bytes() > 0);
}
