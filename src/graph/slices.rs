//! Blocks of a long pass computed in slices of their tokens.
//!
//! What lies between a block's first product and the sum over its experts has as many rows as tokens times experts used: most of what a long pass
//! takes for computing. Nobody else reads it, and each token's rows depend on no other token's. So the same nodes can run once for each slice of
//! the tokens, with that memory for one slice only, and write the block's one result piece by piece.
//!
//! Owns: the search for the nodes that can run so ([`find`]), and where their results lie in the memory for one slice ([`Sliced::layout`]).
//! Invariants: a node is in a slice only if every row of it comes from rows of the same token, or from what no token changes. One result is read
//! later, by whomever; all others are read by no node outside, are no outputs of the graph, and are not its last node. Writing the result of a
//! slice spoils nothing that a later slice reads. Threads: none; pure. Does not: know a tensor of the host, or run anything.

use std::ops::Range;

use super::Ranges;

/// What a node does to the rows of its sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// `MUL_MAT_ID`: weights, rows, ids.
    Product,
    /// `ADD_ID`: rows, a table, ids.
    AddId,
    /// Element by element.
    Elements,
    /// Another view of the same memory.
    View,
    /// Anything else.
    Other,
}

/// A tensor, as the search sees it.
#[derive(Clone, Debug)]
pub struct Flow {
    /// What it does, if it is a node.
    pub work: Work,
    /// Elements per dimension.
    pub ne: [i64; 4],
    /// Bytes from one element, row, matrix to the next.
    pub nb: [usize; 4],
    /// Where it begins; only differences and overlaps count.
    pub start: usize,
    /// Bytes from its first to behind its last element.
    pub bytes: usize,
    /// What it is a view of.
    pub root: Option<usize>,
    /// What it reads, once for each time.
    pub sources: Vec<usize>,
    /// How often nodes of the host's whole graph read it; `None` if that is not known.
    pub uses: Option<usize>,
    /// The host reads it after the graph.
    pub is_output: bool,
}

/// A tensor that each slice has a part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The tensor.
    pub tensor: usize,
    /// Its dimension that counts tokens.
    pub dim: usize,
    /// The tensor in the memory for one slice that it is, or is a view of; `None` where its place is the host's.
    pub inside: Option<usize>,
}

/// Nodes that run slice by slice, and what they read and write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sliced {
    /// How many nodes, from the first on.
    pub count: usize,
    /// The one that is read later.
    pub result: usize,
    /// All tensors of which each slice has a part.
    pub cuts: Vec<Cut>,
    spans: Vec<Span>,
}

/// A tensor in the memory for one slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    tensor: usize,
    row: usize,
    /// The node that writes it, and the last that reads it.
    from: usize,
    to: usize,
    /// The tensor whose place it takes, as in the host's own layout.
    over: Option<usize>,
}

/// Where the tensors of a slice lie.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Tensor and offset.
    pub places: Vec<(usize, usize)>,
    /// Bytes of all.
    pub bytes: usize,
}

/// Rows for each expert with which kernels are nearly as fast as with any number: on an H200, products of 128 experts took 3% longer with 256
/// rows than with 768, 10% with 128 and 27% with 64 (docs/measurements.md).
const ROWS: u64 = 256;
/// Alignment of tensors in the memory for a slice.
const ALIGNMENT: usize = 256;
/// Tokens of a slice are a multiple of this, but for the last one's.
const STEP: u64 = 32;

/// The most tokens of a slice, by what is used of how many experts.
pub fn most_tokens(experts: u64, used: u64) -> u64 {
    (experts.max(1) * ROWS / used.max(1)).clamp(512, 1 << 14).next_multiple_of(STEP)
}

/// Slices of nearly the same length, none longer than `most`.
pub fn slices(tokens: u64, most: u64) -> Vec<Range<u64>> {
    let most = if most < STEP { most.max(1) } else { most / STEP * STEP };
    let count = tokens.div_ceil(most).max(1);
    let each = tokens.div_ceil(count).next_multiple_of(STEP.min(most)).clamp(1, most);
    (0..tokens.div_ceil(each)).map(|slice| slice * each..((slice + 1) * each).min(tokens)).collect()
}

/// The nodes from the first on that can run in slices of their tokens: at least `least` of the `count` nodes of the graph, with which `flows` begins.
pub fn find(flows: &[Flow], count: usize, least: usize, tokens: i64) -> Option<Sliced> {
    let mut search = Search { flows, count, tokens, dims: vec![None; flows.len()], whole: vec![false; flows.len()] };
    let most = (0..count).take_while(|&node| search.add(node)).count();
    (least.max(1)..=most).rev().find_map(|end| search.cut(end, end == count))
}

/// Whether nothing is counted behind a dimension.
fn is_flat(flow: &Flow, dim: usize) -> bool {
    flow.ne[dim + 1..].iter().all(|&count| count == 1)
}

struct Search<'f> {
    flows: &'f [Flow],
    /// Those of them that are nodes.
    count: usize,
    tokens: i64,
    /// The dimension of each tensor that counts tokens, as far as it has a part in slices.
    dims: Vec<Option<usize>>,
    /// What every slice reads as it is.
    whole: Vec<bool>,
}

impl Search<'_> {
    /// A node joins, if it may.
    fn add(&mut self, node: usize) -> bool {
        let flow = &self.flows[node];
        let dim = match flow.work {
            Work::Product | Work::AddId => self.by_ids(node),
            Work::Elements => self.elements(node),
            Work::View => self.view(node),
            Work::Other => None,
        };
        let Some(dim) = dim else { return false };
        let is_whole = flow.work == Work::View
            || flow.root.is_none()
                && is_flat(flow, dim)
                && usize::try_from(self.tokens).is_ok_and(|tokens| flow.bytes == flow.nb[dim] * tokens);
        if flow.ne[dim] != self.tokens || !is_whole {
            return false;
        }
        self.dims[node] = Some(dim);
        true
    }

    /// Takes part as a source with this dimension: a result of an earlier node, or something from outside.
    fn joins(&mut self, source: usize, dim: usize) -> bool {
        if let Some(known) = self.dims[source] {
            return known == dim;
        }
        let flow = &self.flows[source];
        let good = flow.ne[dim] == self.tokens && is_flat(flow, dim) && !self.whole[source] && self.is_outside(source);
        if good {
            self.dims[source] = Some(dim);
        }
        good
    }

    /// Is read as it is by every slice.
    fn stays_whole(&mut self, source: usize) -> bool {
        let good = self.dims[source].is_none() && self.is_outside(source);
        self.whole[source] = good;
        good
    }

    /// Whether a source is no result of these nodes. What is a view of one without being a node would have to move with it.
    fn is_outside(&self, source: usize) -> bool {
        source >= self.count && self.flows[source].root.is_none_or(|root| root >= self.count)
    }

    fn by_ids(&mut self, node: usize) -> Option<usize> {
        let flow = &self.flows[node];
        let &[first, second, ids] = flow.sources.as_slice() else { return None };
        let (rows, whole) = if flow.work == Work::Product { (second, first) } else { (first, second) };
        (self.stays_whole(whole) && self.joins(rows, 2) && self.joins(ids, 1)).then_some(2)
    }

    fn elements(&mut self, node: usize) -> Option<usize> {
        let sources = &self.flows[node].sources;
        // Without a source in here it does not belong to the block.
        let dim = sources.iter().find_map(|&source| self.dims[source].filter(|_| source < node))?;
        for &source in sources {
            let is_everywhere = self.flows[source].ne[dim] == 1 && self.dims[source].is_none();
            let good = if is_everywhere { self.stays_whole(source) } else { self.joins(source, dim) };
            if !good {
                return None;
            }
        }
        Some(dim)
    }

    /// A view of rows of each token, of a tensor that takes part.
    fn view(&self, node: usize) -> Option<usize> {
        let flow = &self.flows[node];
        let root = flow.root.filter(|&root| root < node)?;
        let stride = self.flows[root].nb[self.dims[root]?];
        let mut dims = (0..4).filter(|&dim| flow.ne[dim] == self.tokens && flow.nb[dim] == stride);
        let dim = dims.next().filter(|&dim| dims.next().is_none() && is_flat(flow, dim))?;
        let before = flow.start.checked_sub(self.flows[root].start)?;
        let others = usize::try_from(self.tokens).ok()?.checked_sub(1)?.checked_mul(stride)?;
        (before + flow.bytes.checked_sub(others)? <= stride).then_some(dim)
    }

    /// The first `end` nodes as slices, if just one of their results is read by others and writing it spoils nothing.
    fn cut(&self, end: usize, is_all: bool) -> Option<Sliced> {
        let mut inside = vec![0; self.flows.len()];
        self.flows[..end].iter().flat_map(|flow| &flow.sources).for_each(|&source| inside[source] += 1);
        let stays = |node: usize| {
            let flow = &self.flows[node];
            // What no node reads is read by whoever made the graph.
            flow.uses.is_none_or(|uses| uses == 0 || uses != inside[node])
                || flow.is_output
                || is_all && node + 1 == end
        };
        let mut staying = (0..end).filter(|&node| stays(node));
        let result = staying.next().filter(|_| staying.next().is_none())?;
        let is_viewed = self.flows[..end].iter().any(|flow| flow.root == Some(result));
        if self.flows[result].work == Work::View || is_viewed || !self.spares(end, result) {
            return None;
        }
        let last = |tensor: usize| {
            let reads = |node: &usize| {
                let of = |source: usize| source == tensor || self.flows[source].root == Some(tensor);
                self.flows[*node].sources.iter().any(|&source| of(source))
            };
            (0..end).rev().find(reads).unwrap_or(tensor)
        };
        let own = |node: usize| node < end && node != result && self.flows[node].work != Work::View;
        let mut spans: Vec<Span> = Vec::new();
        for node in (0..end).filter(|&node| own(node)) {
            let flow = &self.flows[node];
            let over = flow.sources.iter().copied().find(|&source| {
                let other = &self.flows[source];
                own(source)
                    && (other.start, other.bytes, other.nb) == (flow.start, flow.bytes, flow.nb)
                    && last(source) == node
            });
            let row = flow.nb[self.dims[node]?];
            spans.push(Span {
                tensor: node,
                row,
                from: node,
                to: last(node),
                over: over.filter(|_| flow.work == Work::Elements),
            });
        }
        let place = |tensor: usize| {
            let owner = self.flows[tensor].root.filter(|_| tensor < end).unwrap_or(tensor);
            own(owner).then_some(owner)
        };
        // Outside tensors that only nodes behind the end read take no part.
        let takes_part = |tensor: &usize| *tensor < end || inside[*tensor] > 0;
        let cut = |tensor: usize| Some(Cut { tensor, dim: self.dims[tensor]?, inside: place(tensor) });
        let cuts = (0..self.flows.len()).filter(takes_part).filter_map(cut).collect();
        Some(Sliced { count: end, result, cuts, spans })
    }

    /// Whether a slice of the result lies on nothing that a later slice reads.
    fn spares(&self, end: usize, result: usize) -> bool {
        let target = &self.flows[result];
        let Some(step) = self.dims[result].map(|dim| target.nb[dim]) else { return false };
        let outside = self.flows[..end].iter().flat_map(|flow| &flow.sources).filter(|&&source| source >= end);
        outside.copied().all(|source| {
            let other = &self.flows[source];
            let apart = other.start >= target.start + target.bytes || target.start >= other.start + other.bytes;
            // The same steps, and never ahead: whatever is written over was read by this slice or an earlier one.
            let follows = self.dims[source].is_some_and(|dim| other.nb[dim] == step) && target.start <= other.start;
            apart || follows
        })
    }
}

impl Sliced {
    /// The bytes that nobody needs while the slices run: those of the results inside, but for what is read from outside and the result.
    pub fn free(&self, flows: &[Flow]) -> Ranges {
        let range = |tensor: usize| flows[tensor].start..flows[tensor].start + flows[tensor].bytes;
        let inside: Ranges = self.spans.iter().map(|span| range(span.tensor)).collect();
        let sources = flows[..self.count].iter().flat_map(|flow| &flow.sources).copied();
        let needed = sources.filter(|&source| source >= self.count).chain([self.result]).map(range).collect();
        inside.without(&needed)
    }

    /// The places of the tensors of a slice of so many tokens.
    pub fn layout(&self, tokens: usize) -> Layout {
        let mut layout = Layout::default();
        // What is in use, until which node, and by which tensor.
        let mut taken: Vec<(Range<usize>, usize, usize)> = Vec::new();
        for span in &self.spans {
            let bytes = (span.row * tokens).next_multiple_of(ALIGNMENT);
            let over = span.over.and_then(|over| taken.iter().position(|(_, _, tensor)| *tensor == over));
            let start = if let Some(position) = over {
                let (range, ..) = taken.swap_remove(position);
                range.start
            } else {
                taken.retain(|(_, to, _)| *to >= span.from);
                taken.sort_unstable_by_key(|(range, ..)| range.start);
                let mut start = 0;
                for (range, ..) in &taken {
                    if start + bytes <= range.start {
                        break;
                    }
                    start = start.max(range.end);
                }
                start
            };
            taken.push((start..start + bytes, span.to, span.tensor));
            layout.bytes = layout.bytes.max(start + bytes);
            layout.places.push((span.tensor, start));
        }
        layout
    }
}

#[cfg(test)]
#[path = "slices_tests.rs"]
mod tests;
