//! Sets of byte ranges, and those that a graph touches.
//!
//! Owns: the set ([`Ranges`]), and the walk over a graph ([`walk`]). Invariants: the runs of a set are sorted, not empty, and neither overlap nor
//! touch; a walk leaves out no node, source, or tensor that one of them is a view of. Threads: none; pure.
//! Does not: know what the ranges are for, or a tensor of the host.

use std::ops::Range;

use super::{KeySet, TensorKey};

/// A set of bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges {
    runs: Vec<Range<usize>>,
}

impl FromIterator<Range<usize>> for Ranges {
    fn from_iter<I: IntoIterator<Item = Range<usize>>>(ranges: I) -> Self {
        let mut runs: Vec<Range<usize>> = ranges.into_iter().filter(|range| !range.is_empty()).collect();
        runs.sort_unstable_by_key(|range| range.start);
        let mut joined: Vec<Range<usize>> = Vec::with_capacity(runs.len());
        for run in runs {
            match joined.last_mut() {
                Some(last) if run.start <= last.end => last.end = last.end.max(run.end),
                _ => joined.push(run),
            }
        }
        Self { runs: joined }
    }
}

impl From<Range<usize>> for Ranges {
    fn from(range: Range<usize>) -> Self {
        std::iter::once(range).collect()
    }
}

impl Ranges {
    /// The runs, in order.
    pub fn iter(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.runs.iter().cloned()
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// How many bytes are in it.
    pub fn bytes(&self) -> usize {
        self.runs.iter().map(Range::len).sum()
    }

    /// How many runs it has.
    pub fn count(&self) -> usize {
        self.runs.len()
    }

    /// The bytes of both.
    #[must_use]
    pub fn with(&self, more: &Self) -> Self {
        if self.is_empty() {
            return more.clone();
        }
        self.iter().chain(more.iter()).collect()
    }

    /// The bytes that are not in `others`.
    #[must_use]
    pub fn without(&self, others: &Self) -> Self {
        let mut left = Vec::new();
        let mut from = 0;
        for run in &self.runs {
            let mut start = run.start;
            // Those in front of this run are in front of all later ones.
            while others.runs.get(from).is_some_and(|other| other.end <= run.start) {
                from += 1;
            }
            for other in others.runs[from..].iter().take_while(|other| other.start < run.end) {
                if start < other.start {
                    left.push(start..other.start);
                }
                start = start.max(other.end);
            }
            if start < run.end {
                left.push(start..run.end);
            }
        }
        Self { runs: left }
    }

    /// The bytes that are in both.
    #[must_use]
    pub fn within(&self, other: &Self) -> Self {
        self.without(&self.without(other))
    }

    /// Whether all of a range is in it.
    pub fn covers(&self, range: &Range<usize>) -> bool {
        let behind = self.runs.partition_point(|run| run.start <= range.start);
        range.is_empty() || behind > 0 && self.runs[behind - 1].end >= range.end
    }

    /// The aligned start of so many bytes within one run of `free` of which as many as possible are in this set; the first of the best. `None` if no
    /// run is long enough.
    pub fn best_place(&self, free: &Self, bytes: usize, alignment: usize) -> Option<usize> {
        let alignment = alignment.max(1);
        // How much is held changes evenly from place to place, but for where a run begins, or ends with the place. Only there, or at the ends of
        // what is free, it can be the most.
        let turns: Vec<usize> = self.runs.iter().flat_map(|run| [run.start, run.end.saturating_sub(bytes)]).collect();
        let places = free.runs.iter().flat_map(|run| {
            let last = run.end.saturating_sub(bytes);
            let turns =
                turns.iter().copied().chain([run.start, last]).filter(move |turn| (run.start..=last).contains(turn));
            turns
                .flat_map(|turn| [turn / alignment * alignment, turn.next_multiple_of(alignment)])
                .filter(move |&start| run.start <= start && start + bytes <= run.end)
        });
        let held = |start: &usize| self.within(&Self::from(*start..*start + bytes)).bytes();
        // The first of the best: lower addresses are touched by more graphs.
        places.map(|start| (held(&start), std::cmp::Reverse(start))).max().map(|(_, start)| start.0)
    }

    /// The whole units of `unit` bytes that hold any of it, but nothing from `end` on.
    #[must_use]
    pub fn in_units(&self, unit: usize, end: usize) -> Self {
        let unit = unit.max(1);
        let whole = |run: &Range<usize>| {
            run.start / unit * unit..run.end.checked_next_multiple_of(unit).unwrap_or(usize::MAX).min(end)
        };
        self.runs.iter().map(whole).collect()
    }
}

/// Where a tensor lies: in which memory, and which bytes of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span<M> {
    /// The memory.
    pub memory: M,
    /// The bytes, with all that kernels may use behind the tensor.
    pub range: Range<usize>,
}

/// What a graph touches in each memory that `span` knows of: its nodes, their sources, and what any of them is a view of.
pub fn walk<T: Copy, M: PartialEq, S: Iterator<Item = T>>(
    nodes: &[T],
    key: impl Fn(T) -> TensorKey,
    sources: impl Fn(T) -> S,
    viewed: impl Fn(T) -> Option<T>,
    span: impl Fn(T) -> Option<Span<M>>,
) -> Vec<(M, Ranges)> {
    let mut seen = KeySet::with_capacity_and_hasher(nodes.len() * 2, Default::default());
    let mut found: Vec<(M, Vec<Range<usize>>)> = Vec::new();
    let mut note = |tensor: T| {
        if !seen.insert(key(tensor)) {
            return;
        }
        if let Some(Span { memory, range }) = span(tensor) {
            match found.iter_mut().find(|(known, _)| *known == memory) {
                Some((_, ranges)) => ranges.push(range),
                None => found.push((memory, vec![range])),
            }
        }
    };
    for &node in nodes {
        for tensor in std::iter::once(node).chain(sources(node)) {
            note(tensor);
            viewed(tensor).into_iter().for_each(&mut note);
        }
    }
    found.into_iter().map(|(memory, ranges)| (memory, ranges.into_iter().collect())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const END: usize = 200;

    fn bits(ranges: &Ranges) -> Vec<bool> {
        let mut bits = vec![false; END];
        ranges.iter().for_each(|run| bits[run].fill(true));
        bits
    }

    fn some() -> impl Strategy<Value = Ranges> {
        let range = (0..END, 0_usize..40).prop_map(|(start, bytes)| start..(start + bytes).min(END));
        proptest::collection::vec(range, 0..12).prop_map(|ranges| ranges.into_iter().collect())
    }

    fn is_tidy(ranges: &Ranges) -> bool {
        let runs: Vec<_> = ranges.iter().collect();
        runs.iter().all(|run| !run.is_empty()) && runs.windows(2).all(|pair| pair[0].end < pair[1].start)
    }

    proptest! {
        #[test]
        fn sets_of_ranges_are_sets_of_bytes(a in some(), b in some(), start in 0..END, bytes in 0_usize..60, unit in 1_usize..20) {
            let (a_bits, b_bits) = (bits(&a), bits(&b));
            let pairs = || a_bits.iter().zip(&b_bits);
            prop_assert!([&a, &a.with(&b), &a.without(&b), &a.within(&b), &a.in_units(unit, END)].into_iter().all(is_tidy));
            prop_assert_eq!(bits(&a.with(&b)), pairs().map(|(a, b)| *a || *b).collect::<Vec<_>>());
            prop_assert_eq!(bits(&a.without(&b)), pairs().map(|(a, b)| *a && !*b).collect::<Vec<_>>());
            prop_assert_eq!(bits(&a.within(&b)), pairs().map(|(a, b)| *a && *b).collect::<Vec<_>>());
            prop_assert_eq!(a.bytes(), a_bits.iter().filter(|bit| **bit).count());
            let range = start..(start + bytes).min(END);
            prop_assert_eq!(a.covers(&range), a_bits[range].iter().all(|bit| *bit));
            let units = bits(&a.in_units(unit, END));
            for (at, bit) in units.iter().enumerate() {
                let whole = at / unit * unit..(at / unit * unit + unit).min(END);
                prop_assert_eq!(*bit, a_bits[whole].iter().any(|bit| *bit));
            }
        }

        /// Beside every place that there is.
        #[test]
        fn the_best_place_is_the_first_of_the_best(held in some(), free in some(), bytes in 1_usize..50, alignment in 1_usize..9) {
            let held_at = |start: usize| held.within(&Ranges::from(start..start + bytes)).bytes();
            let fits = |start: &usize| free.covers(&(*start..*start + bytes));
            let best = (0..END).step_by(alignment).filter(fits).map(|start| (held_at(start), std::cmp::Reverse(start))).max();
            let place = held.best_place(&free, bytes, alignment);
            prop_assert_eq!(place, best.map(|(_, start)| start.0));
        }

        /// Whatever the graph: the union holds all bytes of every node, every source and every root of a view, and nothing else.
        #[test]
        fn a_walk_leaves_nothing_out(
            tensors in proptest::collection::vec((0_usize..3, 0_usize..150, 1_usize..50, proptest::collection::vec(0_usize..40, 0..4),
                                                  proptest::option::of(0_usize..40)), 1..40),
            take in proptest::collection::vec(0_usize..40, 1..20)) {
            let count = tensors.len();
            // A view is of no view, as ggml makes them; sources are any.
            let root = |at: usize| tensors[at].4.map(|root| root % count).filter(|root| tensors[*root].4.is_none());
            let sources = |at: usize| tensors[at].3.iter().map(move |source| source % count);
            let span = |at: usize| {
                let (memory, start, bytes, ..) = tensors[at];
                (memory < 2).then_some(Span { memory, range: start..start + bytes })
            };
            let nodes: Vec<usize> = take.iter().map(|at| at % count).collect();
            let found = walk(&nodes, TensorKey, sources, root, span);
            let mut needed: Vec<usize> = Vec::new();
            for &node in &nodes {
                for tensor in std::iter::once(node).chain(sources(node)) {
                    needed.push(tensor);
                    needed.extend(root(tensor));
                }
            }
            for &tensor in &needed {
                if let Some(Span { memory, range }) = span(tensor) {
                    let (_, ranges) = found.iter().find(|(known, _)| *known == memory).expect("its memory");
                    prop_assert!(ranges.covers(&range));
                }
            }
        }
    }
}
