//! Random blocks, laid out as an allocator does that uses memory again, run as they are and in slices: whoever reads later must find the same.
//!
//! What lies in memory that is dead when a block begins differs between the two runs, so that whatever of it were read would show.

use super::build::{Build, E, wide};
use super::*;

/// A stream of numbers that look random.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.0)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    fn count(&mut self, from: u64, to: u64) -> i64 {
        (from + self.below(to + 1 - from)).cast_signed()
    }

    fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        all[usize::try_from(self.below(all.len() as u64)).expect("an index")]
    }
}

fn mixed(value: u64) -> u64 {
    let value = (value ^ value >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 33
}

/// A random graph: a block, what stands beside it, and who reads its results.
struct Case {
    all: Build,
    tokens: i64,
    /// The last product.
    down: usize,
    /// Tensors from outside that somebody reads later.
    kept: Vec<usize>,
}

impl Case {
    fn new(random: &mut Random) -> Self {
        let mut all = Build::default();
        let [width, inner, used, tokens] = [(1, 5), (1, 4), (1, 3), (2, 20)].map(|(from, to)| random.count(from, to));
        let experts = random.count(used.cast_unsigned(), 4);
        let mut kept = Vec::new();
        let rows = if random.one_in(3) { used } else { 1 };
        let rows = outside_rows(&mut all, random, [width, rows, tokens, 1], 2);
        let ids = if random.one_in(2) {
            let chosen = all.outside([experts, tokens, 1, 1]);
            all.outside_view(chosen, [used, tokens, 1, 1], [E, wide(experts) * E], 0)
        } else {
            all.outside([used, tokens, 1, 1])
        };
        let product = |all: &mut Build, random: &mut Random, rows: usize, [from, to]: [i64; 2]| {
            let weights = all.outside([from, to, experts, 1]);
            let mut made = all.node(Work::Product, [to, used, tokens, 1], &[weights, rows, ids]);
            if random.one_in(3) {
                let table = all.outside([to, experts, 1, 1]);
                made = all.node(Work::AddId, [to, used, tokens, 1], &[made, table, ids]);
            }
            made
        };
        let hidden = [inner, used, tokens, 1];
        let mut now = if random.one_in(3) {
            let both = product(&mut all, random, rows, [width, 2 * inner]);
            let nb = all.nb(both);
            if random.one_in(3) {
                all.node(Work::Elements, hidden, &[both])
            } else {
                let [gate, up] = [0, wide(inner) * E].map(|at| all.view(both, hidden, nb, at));
                all.node(Work::Elements, hidden, &[gate, up])
            }
        } else {
            let gate = product(&mut all, random, rows, [width, inner]);
            let gate = if random.one_in(3) { all.node(Work::Elements, hidden, &[gate]) } else { gate };
            let up = product(&mut all, random, rows, [width, inner]);
            all.node(Work::Elements, hidden, &[gate, up])
        };
        if random.one_in(4) {
            now = scaled(&mut all, random, now, 2);
        }
        let down = product(&mut all, random, now, [inner, width]);
        let last = all.tensors[down].sources[0];
        let last_product = if all.tensors[down].work == Work::Product { down } else { last };
        now = down;
        for _ in 0..random.below(3) {
            now = scaled(&mut all, random, now, 2);
        }
        now = summed(&mut all, random, now, [width, used, tokens]);
        for _ in 0..random.below(3) {
            now = if random.one_in(2) {
                let residual = outside_rows(&mut all, random, [width, tokens, 1, 1], 1);
                all.node(Work::Elements, [width, tokens, 1, 1], &[now, residual])
            } else {
                scaled(&mut all, random, now, 1)
            };
        }
        disturb(&mut all, random, tokens);
        if !random.one_in(8) {
            all.node(Work::Other, [width, tokens, 1, 1], &[now]);
        }
        // Readers behind the block, and what lies beside it untouched.
        for _ in 0..random.below(3) {
            kept.push(all.outside([width, tokens, 1, 1]));
        }
        let outside: Vec<usize> = (0..all.tensors.len()).filter(|tensor| !all.nodes.contains(tensor)).collect();
        kept.extend(outside.into_iter().filter(|_| random.one_in(4)));
        Self { all, tokens, down: last_product, kept }
    }
}

/// Rows of each token from outside, now and then with gaps between tokens.
fn outside_rows(all: &mut Build, random: &mut Random, ne: [i64; 4], dim: usize) -> usize {
    if !random.one_in(4) {
        return all.outside(ne);
    }
    let mut whole = ne;
    whole[dim - 1] += random.count(0, 2);
    let root = all.outside(whole);
    let nb = all.nb(root);
    if dim == 2 {
        all.outside_view(root, ne, [E, nb[1]], 0);
        let made = all.tensors.len() - 1;
        all.tensors[made].nb = nb;
        all.tensors[made].bytes = E + ne.iter().zip(nb).map(|(count, step)| (wide(*count) - 1) * step).sum::<usize>();
        made
    } else {
        all.outside_view(root, ne, [E, nb[1]], 0)
    }
}

/// Rows with something done to each element, with what is from outside, if with anything.
fn scaled(all: &mut Build, random: &mut Random, rows: usize, dim: usize) -> usize {
    let ne = all.tensors[rows].ne;
    let mut factors = ne;
    for (at, count) in factors.iter_mut().enumerate() {
        if at != dim && random.one_in(2) {
            *count = 1;
        }
    }
    match random.below(4) {
        0 => all.node(Work::Elements, ne, &[rows]),
        1 => {
            factors[dim] = 1;
            let factors = all.outside(factors);
            all.node(Work::Elements, ne, &[rows, factors])
        }
        _ => {
            let factors = outside_rows(all, random, factors, dim);
            // In either order where both have one shape.
            let other_first = all.tensors[factors].ne == ne && random.one_in(2);
            all.node(Work::Elements, ne, &if other_first { [factors, rows] } else { [rows, factors] })
        }
    }
}

/// The sum over the experts used.
fn summed(all: &mut Build, random: &mut Random, rows: usize, [width, used, tokens]: [i64; 3]) -> usize {
    let [_, row, token, _] = all.nb(rows);
    let ne = [width, tokens, 1, 1];
    let at_once = random.one_in(2);
    let view = |all: &mut Build, expert: i64| all.view(rows, ne, [E, token, token, token], wide(expert) * row);
    let mut views: Vec<usize> = if at_once { (0..used).map(|expert| view(all, expert)).collect() } else { Vec::new() };
    let mut now = if at_once { views[0] } else { view(all, 0) };
    for expert in 1..used {
        let part = if at_once { views[wide(expert)] } else { view(all, expert) };
        now = all.node(Work::Elements, ne, &[now, part]);
    }
    views.clear();
    if used == 1 { all.node(Work::Elements, ne, &[now]) } else { now }
}

/// Something that no block has, now and then: it is either no hindrance, or forbids slices.
fn disturb(all: &mut Build, random: &mut Random, tokens: i64) {
    let node = random.pick(&all.nodes.clone());
    let ne = all.tensors[node].ne;
    match random.below(12) {
        0 => all.make_output(node),
        1 => *all.more_uses(node) = None,
        // A reader behind the block.
        2 => {
            all.node(Work::Other, ne, &[node]);
        }
        3 => *all.work(node) = Work::Other,
        4 => {
            all.node_after(node, Work::Elements, ne, &[node]);
        }
        // Rows of all tokens, expert by expert.
        5 if ne[2] == tokens => {
            let nb = all.nb(node);
            let view = all.view_after(node, node, [ne[0], tokens, ne[1], 1], [nb[0], nb[2], nb[1], nb[3]], 0);
            let copy = all.node_after(view, Work::Elements, [ne[0] * ne[1], tokens, 1, 1], &[view]);
            all.node(Work::Other, ne, &[copy]);
        }
        _ => {}
    }
}

/// What is live, by bytes and tensor, before each node, and at the end.
type Live = Vec<(Range<usize>, usize)>;

/// Lays a graph out: memory is free again behind the last reader, and results may take the place of what they are made of.
fn lay_out(case: &mut Case, random: &mut Random) -> Vec<Live> {
    let all = &mut case.all;
    let last = |all: &Build, tensor: usize| {
        let of = |source: &usize| all.root(*source) == tensor;
        let reads =
            |node: &usize| all.tensors[*node].sources.iter().any(of) || all.root(*node) == tensor && *node != tensor;
        let own = all.nodes.iter().rposition(reads);
        let views = (0..all.tensors.len()).any(|view| all.root(view) == tensor && all.tensors[view].is_output);
        let is_unread = all.nodes.iter().position(|node| *node == tensor).is_some() && own.is_none();
        let is_kept = case.kept.iter().any(|kept| all.root(*kept) == tensor);
        let stays = all.tensors[tensor].is_output || views || is_unread || is_kept;
        if stays { usize::MAX } else { own.unwrap_or(0) }
    };
    let owners: Vec<usize> = (0..all.tensors.len()).filter(|tensor| all.root(*tensor) == *tensor).collect();
    let until: Vec<usize> = (0..all.tensors.len()).map(|tensor| last(all, tensor)).collect();
    // Uses that nobody knows of may come later.
    let until = |all: &mut Build, tensor: usize| {
        let views: Vec<usize> = (0..all.tensors.len()).filter(|view| all.root(*view) == tensor).collect();
        if views.iter().all(|view| all.more_uses(*view).is_some()) { until[tensor] } else { usize::MAX }
    };
    let mut live: Live = Vec::new();
    let place = |live: &mut Live, random: &mut Random, tensor: usize, bytes: usize| {
        live.sort_unstable_by_key(|(range, _)| range.start);
        let mut gaps = Vec::new();
        let mut from = 0;
        for (range, _) in live.iter() {
            if from + bytes <= range.start {
                gaps.push((range.start - from, from));
            }
            from = range.end;
        }
        let start = match random.below(4) {
            _ if gaps.is_empty() => from + if random.one_in(3) { E * 4 } else { 0 },
            0 => from,
            1 => gaps.iter().min().expect("a gap").1,
            2 => gaps[0].1,
            _ => random.pick(&gaps).1,
        };
        live.push((start..start + bytes, tensor));
        start
    };
    let outside: Vec<usize> = owners.into_iter().filter(|tensor| !case.all.nodes.contains(tensor)).collect();
    for tensor in outside {
        // Dead memory between what lives.
        let gap = random.below(3);
        let bytes = case.all.tensors[tensor].bytes;
        let hole = (gap > 0).then(|| place(&mut live, random, usize::MAX, wide(gap.cast_signed()) * 8 * E));
        let start = place(&mut live, random, tensor, bytes);
        case.all.put(tensor, start);
        live.retain(|(range, tensor)| *tensor != usize::MAX || Some(range.start) != hole);
    }
    let mut states = Vec::new();
    for (position, node) in case.all.nodes.clone().into_iter().enumerate() {
        states.push(live.clone());
        let flow = case.all.tensors[node].clone();
        if flow.root.is_none() {
            let parent = flow.sources.iter().copied().find(|&source| {
                let root = case.all.root(source);
                let other = &case.all.tensors[source];
                let same = (other.ne, other.nb, other.start) == (flow.ne, flow.nb, case.all.start(root));
                flow.work == Work::Elements && same && until(&mut case.all, root) == position
            });
            let start = match parent.filter(|_| !random.one_in(4)) {
                Some(parent) => {
                    let root = case.all.root(parent);
                    live.iter_mut().filter(|(_, tensor)| *tensor == root).for_each(|(_, tensor)| *tensor = node);
                    case.all.start(root)
                }
                None => place(&mut live, random, node, flow.bytes),
            };
            case.all.put(node, start);
        }
        live.retain(|(_, tensor)| until(&mut case.all, *tensor) > position || *tensor == node);
    }
    states.push(live);
    states
}

/// One number for each [`E`] bytes.
struct Memory(Vec<u64>);

impl Memory {
    fn new(live: &Live, bytes: usize, poison: u64) -> Self {
        let is_live = |at: usize| live.iter().any(|(range, _)| range.contains(&(at * E)));
        Self((0..bytes.div_ceil(E)).map(|at| mixed(at as u64 ^ if is_live(at) { 0 } else { poison })).collect())
    }

    fn get(&self, flow: &Flow, at: [i64; 4]) -> u64 {
        self.0[Self::place(flow, at)]
    }

    fn place(flow: &Flow, at: [i64; 4]) -> usize {
        let steps = at.iter().zip(flow.ne).zip(flow.nb).map(|((at, count), step)| wide(at % count) * step);
        let address = flow.start + steps.sum::<usize>();
        assert!(address.is_multiple_of(E));
        address / E
    }

    /// Runs a node, element by element as a kernel does.
    fn run(&mut self, flows: &[Flow], node: usize) {
        let flow = &flows[node];
        let source = |number: usize| &flows[flow.sources[number]];
        let [a, b, c, d] = flow.ne;
        let places = (0..d)
            .flat_map(move |l| (0..c).flat_map(move |k| (0..b).flat_map(move |j| (0..a).map(move |i| [i, j, k, l]))));
        for (count, at) in places.enumerate() {
            let [i, j, k, _] = at;
            let value = match flow.work {
                Work::View => return,
                Work::Product => {
                    let [weights, rows, ids] = [0, 1, 2].map(source);
                    let expert = (self.get(ids, [j, k, 0, 0]) % weights.ne[2].cast_unsigned()).cast_signed();
                    let pair =
                        |at: i64| self.get(weights, [at, i, expert, 0]).wrapping_mul(self.get(rows, [at, j, k, 0]));
                    (0..weights.ne[0]).map(pair).fold(0, u64::wrapping_add)
                }
                Work::AddId => {
                    let [rows, table, ids] = [0, 1, 2].map(source);
                    let expert = (self.get(ids, [j, k, 0, 0]) % table.ne[1].cast_unsigned()).cast_signed();
                    self.get(rows, at).wrapping_add(self.get(table, [i, expert, 0, 0]))
                }
                Work::Elements | Work::Other => {
                    let all = flow.sources.iter().enumerate().map(|(number, source)| {
                        let source = &flows[*source];
                        let is_same =
                            source.ne == flow.ne || source.ne.iter().zip(flow.ne).all(|(own, all)| all % own == 0);
                        let wide_rows = source.ne[0] == 2 * flow.ne[0] && source.ne[1..] == flow.ne[1..];
                        let read = if is_same {
                            self.get(source, at)
                        } else if wide_rows {
                            self.get(source, at) ^ self.get(source, [i + flow.ne[0], j, k, 0])
                        } else {
                            // A copy into another shape: in order.
                            self.get(source, unfolded(count, source.ne))
                        };
                        read.wrapping_mul(2 * number as u64 + 3)
                    });
                    mixed(all.fold(node as u64, u64::wrapping_add))
                }
            };
            self.0[Self::place(flow, at)] = value;
        }
    }

    fn of(&self, range: &Range<usize>) -> &[u64] {
        &self.0[range.start / E..range.end / E]
    }
}

fn unfolded(mut count: usize, ne: [i64; 4]) -> [i64; 4] {
    ne.map(|own| {
        let at = count % wide(own);
        count /= wide(own);
        i64::try_from(at).expect("small")
    })
}

/// What a slice makes of its tensors, as `abi::slice` does.
fn shown(flow: &Flow, cut: &Cut, inside: Option<usize>, tokens: &Range<usize>) -> Flow {
    let mut part = flow.clone();
    let stride = flow.nb[cut.dim];
    part.ne[cut.dim] = i64::try_from(tokens.len()).expect("small");
    part.nb[cut.dim + 1..].fill(stride * tokens.len());
    part.start = inside.unwrap_or(flow.start + tokens.start * stride);
    part
}

/// What became of a case.
#[derive(PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Outcome {
    NotCut,
    NoPlace,
    Equal { is_last: bool, over: bool, on_source: bool },
}

fn tried(seed: u64) -> Outcome {
    let mut random = Random(seed);
    let mut case = Case::new(&mut random);
    let states = lay_out(&mut case, &mut random);
    let (flows, numbers) = case.all.flows();
    let count = case.all.count();
    let Some(sliced) = find(&flows, count, numbers[case.down] + 1, case.tokens) else { return Outcome::NotCut };
    let most = random.count(1, (case.tokens - 1).cast_unsigned()).cast_unsigned();
    let tokens = slices(case.tokens.cast_unsigned(), most);
    let layout = sliced.layout(usize::try_from(tokens[0].end).expect("small"));
    let free = sliced.free(&flows);
    // Any place that is free.
    let fits: Vec<usize> = free
        .iter()
        .flat_map(|run| (run.start..run.end).step_by(E))
        .filter(|start| free.covers(&(*start..*start + layout.bytes)))
        .collect();
    if fits.is_empty() {
        return Outcome::NoPlace;
    }
    let place = random.pick(&fits);
    let bytes = flows.iter().map(|flow| flow.start + flow.bytes).max().unwrap_or(0);
    let [mut whole, mut parts] = [1, 2].map(|poison| Memory::new(&states[0], bytes, mixed(poison)));
    (0..sliced.count).for_each(|node| whole.run(&flows, node));
    for tokens in &tokens {
        let tokens = usize::try_from(tokens.start).expect("small")..usize::try_from(tokens.end).expect("small");
        let mut now = flows.clone();
        for cut in &sliced.cuts {
            let inside = cut.inside.map(|owner| {
                let (_, offset) = layout.places.iter().find(|(tensor, _)| *tensor == owner).expect("a place");
                place + offset + flows[cut.tensor].start - flows[owner].start
            });
            now[cut.tensor] = shown(&flows[cut.tensor], cut, inside, &tokens);
        }
        (0..sliced.count).for_each(|node| parts.run(&now, node));
    }
    for (range, tensor) in &states[sliced.count] {
        assert_eq!(parts.of(range), whole.of(range), "seed {seed}: tensor {tensor} of {sliced:?}, {flows:#?}");
    }
    let result = &flows[sliced.result];
    let reads_there = |source: &usize| {
        let other = &flows[*source];
        other.start < result.start + result.bytes && result.start < other.start + other.bytes
    };
    Outcome::Equal {
        is_last: sliced.count == count,
        over: sliced.spans.iter().any(|span| span.over.is_some()),
        on_source: flows[..sliced.count]
            .iter()
            .flat_map(|flow| &flow.sources)
            .any(|source| *source >= count && reads_there(source)),
    }
}

#[test]
fn slices_leave_what_the_whole_leaves() {
    const CASES: u64 = 2_500;
    let mut counts = std::collections::BTreeMap::new();
    (0..CASES).for_each(|seed| *counts.entry(tried(seed)).or_insert(0_u64) += 1);
    let sum = |of: &dyn Fn(&Outcome) -> bool| {
        counts.iter().filter(|(outcome, _)| of(outcome)).map(|(_, count)| count).sum::<u64>()
    };
    // The test is worth something only while it sees all of them.
    assert!(sum(&|outcome| *outcome == Outcome::NotCut) > CASES / 40, "{counts:?}");
    assert!(sum(&|outcome| matches!(outcome, Outcome::Equal { .. })) > CASES / 3, "{counts:?}");
    assert!(sum(&|outcome| matches!(outcome, Outcome::Equal { is_last: true, .. })) > CASES / 100, "{counts:?}");
    assert!(sum(&|outcome| matches!(outcome, Outcome::Equal { over: true, .. })) > CASES / 40, "{counts:?}");
    assert!(sum(&|outcome| matches!(outcome, Outcome::Equal { on_source: true, .. })) > CASES / 40, "{counts:?}");
}
