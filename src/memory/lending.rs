//! Which bytes of a compute buffer have memory behind them, graph by graph.
//!
//! A graph gets what it touches before it runs. What it does not touch stays until smaller graphs follow, because the host may read results
//! of the graph before, and may run several graphs for one token, the later ones of which read what the earlier ones left.
//!
//! The rule: a graph that touches at most half of what there is begins a watch. From then on everything that is touched is noted. When
//! a graph comes that was seen in the watch, a whole round of graphs has gone by, so whatever was not touched in it is of no use to the next one
//! and may go. A graph that touches more ends the watch; so does one for which memory has to come.

use std::collections::HashSet;
use std::ops::Range;

use crate::graph::Ranges;

/// What goes is worth it if it is at least this part of what there is.
const LEAST_PART: usize = 8;

/// Identity of a graph from token to token: its first node and its length.
pub type GraphName = (usize, usize);

/// What must happen before a graph runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Need {
    /// Nothing. While the stamp stays this one, the same graph needs nothing again.
    Nothing(u64),
    /// Nothing now; it is to be asked again for the next graph.
    Watching,
    /// Memory has to come for these; then it is to be asked again.
    Memory(Ranges),
    /// Memory goes from everything but these; then it is to be asked again.
    Only(Ranges),
}

/// The mapping of one buffer. All ranges are whole units.
#[derive(Clone, Debug, Default)]
pub struct Mapping {
    mapped: Ranges,
    /// Changes whenever a graph that needed nothing may need something.
    stamp: u64,
    /// What was touched since the watch began, and by which graphs.
    watch: Option<(Ranges, HashSet<GraphName>)>,
    /// The graphs of the watch that ended last: they fit what is there.
    settled: HashSet<GraphName>,
    /// Bytes that stay while the graphs are those.
    standing: usize,
}

impl Mapping {
    /// What has memory behind it.
    pub fn mapped(&self) -> &Ranges {
        &self.mapped
    }

    /// What came for long passes and is expected to go again, in bytes.
    pub fn lent_bytes(&self) -> usize {
        self.mapped.bytes().saturating_sub(self.standing)
    }

    /// Changes whenever [`Need::Nothing`] is no longer true.
    pub fn stamp(&self) -> u64 {
        self.stamp
    }

    /// A graph that touches these is about to run.
    pub fn graph(&mut self, name: GraphName, touched: &Ranges) -> Need {
        let missing = touched.without(&self.mapped);
        if !missing.is_empty() {
            return Need::Memory(missing);
        }
        let mapped = self.mapped.bytes();
        if touched.bytes().saturating_mul(2) > mapped {
            self.watch = None;
            return Need::Nothing(self.stamp);
        }
        let Some((kept, seen)) = &mut self.watch else {
            if self.settled.contains(&name) {
                return Need::Nothing(self.stamp);
            }
            self.watch = Some((touched.clone(), HashSet::from([name])));
            self.stamp += 1; // all graphs are to be seen
            return Need::Watching;
        };
        *kept = kept.with(touched);
        if seen.insert(name) {
            return Need::Watching;
        }
        let kept = std::mem::take(kept);
        self.settled = std::mem::take(seen);
        self.watch = None;
        self.stamp += 1;
        let kept = kept.within(&self.mapped);
        if (mapped - kept.bytes()).saturating_mul(LEAST_PART) >= mapped {
            return Need::Only(kept);
        }
        self.standing = mapped;
        Need::Nothing(self.stamp)
    }

    /// The host writes these: what has to come for it.
    pub fn write(&mut self, touched: &Ranges) -> Ranges {
        if let Some((kept, _)) = &mut self.watch {
            *kept = kept.with(touched);
        }
        touched.without(&self.mapped)
    }

    /// Bytes of these that have no memory behind them.
    pub fn lacks(&self, touched: &Ranges) -> usize {
        touched.without(&self.mapped).bytes()
    }

    /// Whether the host can read a range.
    pub fn holds(&self, range: &Range<usize>) -> bool {
        self.mapped.covers(range)
    }

    /// Memory came.
    pub fn came(&mut self, ranges: &Ranges) {
        self.mapped = self.mapped.with(ranges);
        self.watch = None;
        self.settled.clear();
        self.stamp += 1;
    }

    /// Memory went from everything but these.
    pub fn went(&mut self, kept: Ranges) {
        self.mapped = kept;
        self.standing = self.mapped.bytes();
        self.stamp += 1;
    }
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "one run of bytes is meant")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Runs a graph to the end of its needs; returns the bytes that came and went.
    fn run(mapping: &mut Mapping, name: usize, touched: &Ranges) -> (usize, usize) {
        let (mut came, mut went) = (0, 0);
        loop {
            match mapping.graph((name, 1), touched) {
                Need::Nothing(_) | Need::Watching => return (came, went),
                Need::Memory(missing) => {
                    came += missing.bytes();
                    mapping.came(&missing);
                }
                Need::Only(kept) => {
                    went += mapping.mapped().bytes() - kept.bytes();
                    mapping.went(kept);
                }
            }
        }
    }

    fn pages(runs: &[Range<usize>]) -> Ranges {
        runs.iter().cloned().collect()
    }

    #[test]
    fn what_a_long_pass_took_goes_when_a_small_graph_came_twice() {
        let (long, first, second) = (pages(&[0..1000]), pages(&[0..10, 500..520]), pages(&[100..110]));
        let mut mapping = Mapping::default();
        for round in 0..3 {
            let (came, _) = run(&mut mapping, 1, &long);
            assert_eq!(came, if round == 0 { 1000 } else { 960 });
            assert_eq!(mapping.lent_bytes(), if round == 0 { 1000 } else { 960 });
            assert_eq!(run(&mut mapping, 1, &long), (0, 0), "the next part of the prompt");
            assert_eq!(run(&mut mapping, 2, &first), (0, 0));
            assert_eq!(run(&mut mapping, 3, &second), (0, 0), "the second graph of the same token");
            assert_eq!(run(&mut mapping, 2, &first), (0, 960));
            assert_eq!((mapping.mapped().bytes(), mapping.lent_bytes()), (40, 0));
            let stamp = mapping.stamp();
            for _ in 0..4 {
                assert_eq!(mapping.graph((3, 1), &second), Need::Nothing(stamp));
                assert_eq!(mapping.graph((2, 1), &first), Need::Nothing(stamp), "nothing is done per token");
            }
        }
    }

    #[test]
    fn a_graph_once_between_long_passes_takes_nothing_away() {
        let (long, small) = (pages(&[0..1000]), pages(&[0..10]));
        let mut mapping = Mapping::default();
        run(&mut mapping, 1, &long);
        for _ in 0..5 {
            assert_eq!(run(&mut mapping, 2, &small), (0, 0), "the last layers of a part, with one token");
            assert_eq!(run(&mut mapping, 1, &long), (0, 0));
        }
    }

    #[test]
    fn a_shorter_pass_gives_back_and_smaller_graphs_again() {
        let (long, middle, small) = (pages(&[0..1000]), pages(&[0..200]), pages(&[0..10]));
        let mut mapping = Mapping::default();
        run(&mut mapping, 1, &long);
        assert_eq!((run(&mut mapping, 2, &middle), run(&mut mapping, 2, &middle)), ((0, 0), (0, 800)));
        assert_eq!((run(&mut mapping, 3, &small), run(&mut mapping, 3, &small)), ((0, 0), (0, 190)));
        assert_eq!(run(&mut mapping, 2, &middle), (190, 0));
    }

    #[test]
    fn what_the_host_wrote_for_a_graph_to_come_stays() {
        let mut mapping = Mapping::default();
        run(&mut mapping, 1, &pages(&[0..1000]));
        run(&mut mapping, 2, &pages(&[0..10]));
        assert!(mapping.write(&pages(&[700..710])).is_empty());
        run(&mut mapping, 2, &pages(&[0..10]));
        assert!(mapping.holds(&(700..710)) && mapping.holds(&(0..10)) && !mapping.holds(&(10..11)));
        assert_eq!(mapping.write(&pages(&[709..720])), pages(&[710..720]));
    }

    proptest! {
        /// Whatever comes: a graph finds all that it touches; nothing goes that was touched since the same graph came last; rounds of the same
        /// graphs come to rest with no more than twice what they touch, or what is not worth giving back.
        #[test]
        fn graphs_find_what_they_need(
            shapes in proptest::collection::vec(proptest::collection::vec((0_usize..400, 1_usize..120), 1..5), 2..6),
            steps in proptest::collection::vec((0_usize..8, any::<bool>()), 1..60)) {
            let graphs: Vec<Ranges> = shapes
                .iter()
                .map(|runs| runs.iter().map(|(start, bytes)| *start..start + bytes).collect())
                .collect();
            let mut mapping = Mapping::default();
            let mut history: Vec<(Option<usize>, Ranges)> = Vec::new();
            for (choice, writes) in steps {
                let at = choice % graphs.len();
                if writes {
                    let missing = mapping.write(&graphs[at]);
                    mapping.came(&missing);
                    prop_assert!(graphs[at].without(mapping.mapped()).is_empty());
                    history.push((None, graphs[at].clone()));
                    continue;
                }
                let before = mapping.mapped().clone();
                run(&mut mapping, at, &graphs[at]);
                prop_assert!(graphs[at].without(mapping.mapped()).is_empty());
                let gone = before.without(mapping.mapped());
                if !gone.is_empty() {
                    let last = history.iter().rposition(|(name, _)| *name == Some(at));
                    prop_assert!(last.is_some());
                    for (_, touched) in &history[last.unwrap()..] {
                        prop_assert!(gone.within(touched).is_empty());
                    }
                }
                history.push((Some(at), graphs[at].clone()));
            }
            for _ in 0..4 {
                graphs.iter().enumerate().for_each(|(at, graph)| { run(&mut mapping, at, graph); });
            }
            let stamp = mapping.stamp();
            for (at, graph) in graphs.iter().enumerate() {
                prop_assert_eq!(run(&mut mapping, at, graph), (0, 0));
            }
            let small = graphs.iter().all(|graph| graph.bytes() * 2 <= mapping.mapped().bytes());
            prop_assert!(!small || mapping.stamp() == stamp);
            let union = graphs.iter().fold(Ranges::default(), |union, graph| union.with(graph));
            prop_assert!(!small || mapping.mapped().bytes() * (LEAST_PART - 1) <= union.bytes() * LEAST_PART);
        }
    }
}
