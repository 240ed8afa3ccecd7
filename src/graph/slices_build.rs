//! Graphs for the tests of slices, with ggml's shapes and strides: every element takes [`E`] bytes, so that a row is not smaller than the alignment
//! of memory.

use super::{Flow, Work};

/// Bytes of an element.
pub(super) const E: usize = 64;

/// Strides of a tensor without gaps.
pub(super) fn contiguous(ne: [i64; 4]) -> [usize; 4] {
    let mut nb = [E; 4];
    for dim in 1..4 {
        nb[dim] = nb[dim - 1] * wide(ne[dim - 1]);
    }
    nb
}

pub(super) fn wide(count: i64) -> usize {
    usize::try_from(count).expect("a count")
}

/// Tensors by the order in which they were made; nodes by the order in which they run.
#[derive(Clone, Debug, Default)]
pub(super) struct Build {
    pub(super) tensors: Vec<Flow>,
    pub(super) nodes: Vec<usize>,
    /// Of each tensor, how often nodes that are not in the list read it; `None` if the uses are not known.
    more_uses: Vec<Option<usize>>,
    /// Of each view, where it begins in its root.
    offsets: Vec<usize>,
    end: usize,
}

impl Build {
    fn add(&mut self, mut flow: Flow, offset: usize) -> usize {
        let reach: usize = flow.ne.iter().zip(flow.nb).map(|(count, step)| (wide(*count) - 1) * step).sum();
        flow.bytes = E + reach;
        flow.start = match flow.root {
            Some(root) => self.tensors[root].start + offset,
            // Far from all others; 0 is in front of everything.
            None => (self.end + (1 << 20)).next_multiple_of(1 << 20),
        };
        self.end = self.end.max(flow.start + flow.bytes);
        self.tensors.push(flow);
        self.more_uses.push(Some(0));
        self.offsets.push(offset);
        self.tensors.len() - 1
    }

    fn flow(work: Work, ne: [i64; 4], nb: [usize; 4], sources: &[usize], root: Option<usize>) -> Flow {
        let sources = sources.to_vec();
        Flow { work, ne, nb, start: 0, bytes: 0, root, sources, uses: None, is_output: false }
    }

    /// A tensor that no node of these makes.
    pub(super) fn outside(&mut self, ne: [i64; 4]) -> usize {
        self.add(Self::flow(Work::Other, ne, contiguous(ne), &[], None), 0)
    }

    /// A view that is no node; all higher strides are the last one's.
    pub(super) fn outside_view(&mut self, root: usize, ne: [i64; 4], [first, second]: [usize; 2], at: usize) -> usize {
        let third = second * wide(ne[1]);
        self.add(Self::flow(Work::View, ne, [first, second, third, third * wide(ne[2])], &[], Some(root)), at)
    }

    pub(super) fn node(&mut self, work: Work, ne: [i64; 4], sources: &[usize]) -> usize {
        let made = self.add(Self::flow(work, ne, contiguous(ne), sources, None), 0);
        self.nodes.push(made);
        made
    }

    pub(super) fn view(&mut self, root: usize, ne: [i64; 4], nb: [usize; 4], at: usize) -> usize {
        let made = self.add(Self::flow(Work::View, ne, nb, &[root], Some(root)), at);
        self.nodes.push(made);
        made
    }

    fn move_behind(&mut self, behind: usize) {
        let made = self.nodes.pop().expect("a node");
        let position = self.nodes.iter().position(|node| *node == behind).expect("a node");
        self.nodes.insert(position + 1, made);
    }

    /// A node that runs right behind another.
    pub(super) fn node_after(&mut self, behind: usize, work: Work, ne: [i64; 4], sources: &[usize]) -> usize {
        let made = self.node(work, ne, sources);
        self.move_behind(behind);
        made
    }

    pub(super) fn view_after(&mut self, behind: usize, root: usize, ne: [i64; 4], nb: [usize; 4], at: usize) -> usize {
        let made = self.view(root, ne, nb, at);
        self.move_behind(behind);
        made
    }

    /// Whatever reads or views the first reads the second, but for that itself.
    pub(super) fn read_instead(&mut self, first: usize, second: usize) {
        for (number, flow) in self.tensors.iter_mut().enumerate().filter(|(number, _)| *number != second) {
            if flow.root == Some(first) && self.nodes.contains(&number) {
                flow.root = Some(second);
                flow.start = 0;
            }
            flow.sources.iter_mut().filter(|source| **source == first).for_each(|source| *source = second);
        }
        self.put(second, self.tensors[second].start);
    }

    /// Gives a tensor and its views another place.
    pub(super) fn put(&mut self, tensor: usize, start: usize) {
        self.tensors[tensor].start = start;
        for number in 0..self.tensors.len() {
            if self.tensors[number].root == Some(tensor) {
                self.tensors[number].start = start + self.offsets[number];
            }
        }
    }

    /// Counts of one size get another, everywhere; for graphs without gaps.
    pub(super) fn resize(&mut self, from: i64, to: i64) {
        for number in 0..self.tensors.len() {
            let flow = &mut self.tensors[number];
            let dense = contiguous(flow.ne) == flow.nb;
            flow.ne.iter_mut().filter(|count| **count == from).for_each(|count| *count = to);
            if dense {
                flow.nb = contiguous(flow.ne);
            }
            flow.bytes = E + flow.ne.iter().zip(flow.nb).map(|(count, step)| (wide(*count) - 1) * step).sum::<usize>();
        }
    }

    pub(super) fn work(&mut self, tensor: usize) -> &mut Work {
        &mut self.tensors[tensor].work
    }

    pub(super) fn more_uses(&mut self, tensor: usize) -> &mut Option<usize> {
        &mut self.more_uses[tensor]
    }

    pub(super) fn make_output(&mut self, tensor: usize) {
        self.tensors[tensor].is_output = true;
    }

    pub(super) fn sources(&self, tensor: usize) -> Vec<usize> {
        self.tensors[tensor].sources.clone()
    }

    pub(super) fn sources_mut(&mut self, tensor: usize) -> &mut Vec<usize> {
        &mut self.tensors[tensor].sources
    }

    pub(super) fn nb(&self, tensor: usize) -> [usize; 4] {
        self.tensors[tensor].nb
    }

    pub(super) fn start(&self, tensor: usize) -> usize {
        self.tensors[tensor].start
    }

    /// What a tensor is a view of, or itself.
    pub(super) fn root(&self, tensor: usize) -> usize {
        self.tensors[tensor].root.unwrap_or(tensor)
    }

    pub(super) fn count(&self) -> usize {
        self.nodes.len()
    }

    /// As the search sees them: nodes in order, then all others; and the number there of each tensor.
    pub(super) fn flows(&self) -> (Vec<Flow>, Vec<usize>) {
        let others = (0..self.tensors.len()).filter(|tensor| !self.nodes.contains(tensor));
        let order: Vec<usize> = self.nodes.iter().copied().chain(others).collect();
        let mut numbers = vec![0; order.len()];
        order.iter().enumerate().for_each(|(number, tensor)| numbers[*tensor] = number);
        let mut reads = vec![0; order.len()];
        self.nodes.iter().flat_map(|node| &self.tensors[*node].sources).for_each(|source| reads[*source] += 1);
        let flow = |&tensor: &usize| {
            let flow = &self.tensors[tensor];
            Flow {
                root: flow.root.map(|root| numbers[root]),
                sources: flow.sources.iter().map(|source| numbers[*source]).collect(),
                uses: self.more_uses[tensor].map(|more| more + reads[tensor]),
                ..flow.clone()
            }
        };
        (order.iter().map(flow).collect(), numbers)
    }
}
