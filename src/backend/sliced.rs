//! Blocks of a long pass that run in slices of their tokens, so that what lies between their products takes the memory of one slice.
//!
//! Owns: which blocks of a graph run so, and the order of their slices. Invariants: as those of the backend; every tensor that stood for a part of
//! its tokens is restored before anything else happens, also on errors. A block's experts stay in their buffer until its last slice.
//! Threads: the one that drives the backend. Does not: find the nodes that may (`graph::slices` does) or bring experts (`streamed` does).

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use super::lent::{self, Touch};
use super::streamed::Pass;
use super::{Backend, BackendError, Planned, State};
use crate::abi::graph::Graph;
use crate::abi::inner::Status;
use crate::abi::slice::Window;
use crate::abi::tensor::{Patch, Tensor};
use crate::buffer::BufferError;
use crate::config::SliceTokens;
use crate::device::PassLoad;
use crate::graph::slices::{self, Flow, Layout, Sliced, Work};
use crate::graph::{KeyMap, KeySet, Plan, PlanKey, Ranges, Step, TensorKey};
use crate::planner::prompts::PADDING_ROWS;

/// The blocks of a pass that run in slices.
#[derive(Debug)]
pub(super) struct SlicedPass {
    /// By step, in order.
    blocks: Vec<(usize, SlicedBlock)>,
    /// What the graph touches then.
    touches: Vec<Touch>,
    /// What it computes, for the choice between slices and all at once.
    load: PassLoad,
}

/// A block and what follows it up to its one result.
#[derive(Debug)]
pub(super) struct SlicedBlock {
    /// The nodes that were searched, from its first on.
    seen: Range<usize>,
    sliced: Sliced,
    layout: Layout,
    /// Where the memory for a slice lies: where the host keeps what lies between the products.
    place: usize,
    tokens: Vec<Range<u64>>,
}

/// That a pass is to run in slices, and why.
pub(super) struct Slices<'p> {
    pass: &'p SlicedPass,
    why: String,
}

/// A block for which no place was looked for yet.
struct Found {
    step: usize,
    block: SlicedBlock,
    /// What may be written over.
    free: Ranges,
    inner: Vec<TensorKey>,
}

impl SlicedPass {
    /// How the block of a step runs.
    pub(super) fn block(&self, step: usize) -> Option<&SlicedBlock> {
        let position = self.blocks.binary_search_by_key(&step, |(step, _)| *step).ok()?;
        self.blocks.get(position).map(|(_, block)| block)
    }
}

impl SlicedBlock {
    /// Behind its last node.
    pub(super) fn end(&self) -> usize {
        self.seen.start + self.sliced.count
    }

    fn range(&self) -> Range<usize> {
        self.seen.start..self.end()
    }
}

impl Backend {
    /// How the blocks of a long pass run in slices; `None` if they do not. `touches` is what the graph touches if not.
    pub(super) fn slice(
        &self,
        graph: Graph<'_>,
        nodes: &[Tensor<'_>],
        plan: &Plan,
        touches: &[Touch],
    ) -> Option<SlicedPass> {
        let key = self.device.slice_tokens();
        if touches.is_empty() || key == SliceTokens::Off {
            return None;
        }
        let is_long = |step: &Step| match step {
            Step::Streamed { products, .. } => length(nodes, products, key).is_some(),
            Step::Segment(_) | Step::Copied { .. } | Step::Cached { .. } => false,
        };
        if !plan.steps.iter().any(is_long) {
            return None;
        }
        let mut uses = graph.uses(nodes);
        // A host that cuts a graph at a node looks at what that node has read, too.
        let read: KeySet = nodes.last()?.sources().map(|source| source.key()).collect();
        nodes.iter().zip(&mut uses).filter(|(node, _)| read.contains(&node.key())).for_each(|(_, uses)| *uses = None);
        let steps = plan.steps.iter().enumerate().zip(plan.steps.iter().skip(1).map(Some).chain([None]));
        let found: Vec<Found> = steps
            .filter_map(|((step, own), next)| {
                let Step::Streamed { range, products, .. } = own else { return None };
                // What follows belongs to it as far as nothing mixes tokens.
                let behind = match next {
                    Some(Step::Segment(behind)) => nodes.get(behind.clone()).unwrap_or_default(),
                    _ => &[],
                };
                let end = range.end + behind.iter().take_while(|node| node.work() != Work::Other).count();
                find(nodes, &uses, (step, range.start..end, range.len()), products, key)
            })
            .collect();
        let (blocks, touched) = placed(nodes, found);
        let saved = lent::bytes(touches).saturating_sub(lent::bytes(&touched));
        if saved == 0 && key == SliceTokens::Auto {
            return None;
        }
        let (_, first) = blocks.first()?;
        let (tokens, each) = (first.tokens.last()?.end, first.tokens.first()?.end);
        let load = PassLoad { tokens, each, saved, ..load(nodes, plan) };
        Some(SlicedPass { blocks, touches: touched, load })
    }

    /// Brings memory behind all that a graph touches. With slices, if it is to run so: because that is faster, or because there is no memory for all
    /// of its tokens at once.
    pub(super) fn bring_pass<'p>(
        &self,
        state: &mut State,
        key: PlanKey,
        planned: &'p Planned,
    ) -> Result<Option<Slices<'p>>, BufferError> {
        let sliced = planned.sliced.as_ref();
        let lacks = |sliced: &SlicedPass| [lent::lacks(&planned.touches), lent::lacks(&sliced.touches)];
        let wanted =
            sliced.and_then(|pass| Some(Slices { pass, why: self.device.wants_slices(&pass.load, lacks(pass))? }));
        if let Some(slices) = wanted {
            self.bring(state, key, &slices.pass.touches)?;
            return Ok(Some(slices));
        }
        // What the host wrote where there was no memory is gone: a smaller pass would compute with something else.
        let sliced = sliced.filter(|_| !lent::has_lost(&planned.touches));
        match (self.bring(state, key, &planned.touches), sliced) {
            (Err(BufferError::NoLentMemory { .. }), Some(pass)) => {
                self.bring(state, key, &pass.touches)?;
                Ok(Some(Slices { pass, why: "there is no memory for all of them at once".to_owned() }))
            }
            (brought, _) => brought.map(|()| None),
        }
    }

    /// Brings the rest for a pass that was to run in slices and does not. It is told as another graph: the same one again would say that a whole round
    /// of graphs has gone by.
    pub(super) fn bring_rest(&self, state: &mut State, key: PlanKey, planned: &Planned) -> Result<(), BufferError> {
        self.bring(state, PlanKey { first: key.first ^ 1, ..key }, &planned.touches)
    }

    /// A pass does run in slices.
    pub(super) fn tell_slices<'p>(&self, slices: &Slices<'p>) -> &'p SlicedPass {
        self.device.tell_slices(&slices.pass.load, &slices.why);
        slices.pass
    }

    /// Hands a block on slice by slice, behind its experts.
    pub(super) fn run_sliced<'a>(
        &self,
        state: &mut State,
        graph: Graph<'a>,
        nodes: &[Tensor<'a>],
        pass: &mut Pass<'_, 'a>,
        (number, block): (usize, &SlicedBlock),
    ) -> Result<Status, BackendError> {
        let part = &pass.parts[number];
        let (patches, variant) = pass.ring.open(&self.inner, number, part)?;
        if let Some(watch) = &mut pass.watch {
            watch.compute_begins(&self.inner).map_err(BufferError::from)?;
        }
        let range = block.range();
        let tensors = tensors(nodes, &block.seen);
        let places: HashMap<usize, usize> = block.layout.places.iter().copied().collect();
        let window = |cut: &slices::Cut| {
            let inside = cut.inside.and_then(|owner| {
                let before = tensors[cut.tensor].data().wrapping_sub(tensors[owner].data());
                Some(block.place.wrapping_add(*places.get(&owner)?).wrapping_add(before))
            });
            Window::new(tensors[cut.tensor], cut.dim, inside)
        };
        let mut windows: Vec<Window<'_>> = block.sliced.cuts.iter().map(window).collect();
        let mut status = Status::SUCCESS;
        for tokens in &block.tokens {
            let narrow = |token: u64| usize::try_from(token).unwrap_or(usize::MAX);
            windows.iter_mut().for_each(|window| window.show(&(narrow(tokens.start)..narrow(tokens.end))));
            let mut hasher = DefaultHasher::new();
            (variant, tokens.start, tokens.end, block.place).hash(&mut hasher);
            let uid = super::part_uid(graph.uid(), nodes, &range, hasher.finish());
            let mut view = graph.part(nodes, range.clone(), uid)?;
            state.counters.segments += 1;
            self.note_run(&mut state.counters, &mut state.replays, nodes[range.start], uid);
            status = self.inner.compute(&mut view);
            if status != Status::SUCCESS {
                break;
            }
        }
        drop(windows);
        state.plain.retire_patches(patches.into_iter().filter_map(Patch::retire));
        state.counters.sliced_blocks += u64::from(status == Status::SUCCESS);
        if let Some(watch) = &mut pass.watch {
            watch.compute_ends(&self.inner, Some(part)).map_err(BufferError::from)?;
        }
        Ok(status)
    }
}

/// What a pass computes, and the experts that it uses.
fn load(nodes: &[Tensor<'_>], plan: &Plan) -> PassLoad {
    let volume = |tensor: Tensor<'_>| tensor.ne().iter().map(|&count| count as f64).product::<f64>();
    let mut load = PassLoad::default();
    for &node in nodes {
        let (Some(first), Some(second)) = (node.source(0), node.source(1)) else { continue };
        match (node.work(), node.description().as_str()) {
            (Work::Product, _) => {
                let padding = PADDING_ROWS * first.ne()[2] as f64 * node.ne()[0] as f64;
                load.operations += 2.0 * first.ne()[0] as f64 * (volume(node) + padding);
            }
            (_, "MUL_MAT") => load.operations += 2.0 * first.ne()[0] as f64 * volume(node),
            // Scores and sums.
            (_, "FLASH_ATTN_EXT") => load.attention += 4.0 * second.ne()[1] as f64 * volume(node),
            _ => {}
        }
    }
    let brought = plan.steps.iter().filter_map(|step| match step {
        Step::Streamed { products, .. } => Some(products),
        Step::Segment(_) | Step::Copied { .. } | Step::Cached { .. } => None,
    });
    let weights: KeyMap<usize> = brought
        .flatten()
        .filter_map(|&product| nodes[product].source(0))
        .map(|weight| (weight.key(), weight.bytes()))
        .collect();
    load.expert_bytes = weights.values().map(|&bytes| bytes as f64).sum();
    let blocks = plan.steps.iter().filter(|step| matches!(step, Step::Streamed { .. })).count();
    load.layer_bytes = load.expert_bytes / blocks.max(1) as f64;
    load
}

/// The tensors that the search sees: the nodes of a range, then what they read and what that is a view of, each once.
fn tensors<'a>(nodes: &[Tensor<'a>], range: &Range<usize>) -> Vec<Tensor<'a>> {
    let nodes = nodes.get(range.clone()).unwrap_or_default();
    let mut all = nodes.to_vec();
    let mut known: KeySet = all.iter().map(Tensor::key).collect();
    for node in nodes {
        all.extend(node.sources().chain(node.viewed()).filter(|tensor| known.insert(tensor.key())));
    }
    all
}

/// The blocks that have a place for a slice, and what the graph touches with them. One without a place stays whole.
fn placed(nodes: &[Tensor<'_>], mut found: Vec<Found>) -> (Vec<(usize, SlicedBlock)>, Vec<Touch>) {
    loop {
        let elsewhere = found.iter().flat_map(|found| &found.inner).copied().collect();
        let mut touched = lent::touches(nodes, &elsewhere);
        let mut without = None;
        for (number, Found { block, free, .. }) in found.iter_mut().enumerate() {
            match lent::reserve(&mut touched, nodes[block.seen.start], free, block.layout.bytes) {
                Some(place) => block.place = place,
                None => without = Some(number),
            }
        }
        let Some(number) = without else {
            return (found.into_iter().map(|found| (found.step, found.block)).collect(), touched);
        };
        // What it touches without slices is touched by others, too, or not: all is looked at again.
        found.remove(number);
    }
}

/// The tokens of a block, and of a slice at most; `None` where it needs no more than one.
fn length(nodes: &[Tensor<'_>], products: &[usize], key: SliceTokens) -> Option<(u64, u64)> {
    let product = nodes[*products.first()?];
    let [used, tokens, ..] = product.source(2)?.ne().map(|count| u64::try_from(count).unwrap_or(0));
    let most = match key {
        SliceTokens::Off => return None,
        SliceTokens::Auto => slices::most_tokens(u64::try_from(product.source(0)?.ne()[2]).unwrap_or(0), used),
        SliceTokens::Most(most) => most.into(),
    };
    (tokens > most).then_some((tokens, most))
}

/// The block whose nodes begin a range: at least the first `least` of them are its own.
fn find(
    nodes: &[Tensor<'_>],
    uses: &[Option<usize>],
    (step, range, least): (usize, Range<usize>, usize),
    products: &[usize],
    key: SliceTokens,
) -> Option<Found> {
    let (tokens, most) = length(nodes, products, key)?;
    let (start, count) = (range.start, range.len());
    let all = tensors(nodes, &range);
    let numbers: KeyMap<usize> = all.iter().enumerate().map(|(number, tensor)| (tensor.key(), number)).collect();
    let flow = |(number, tensor): (usize, &Tensor<'_>)| Flow {
        work: tensor.work(),
        ne: tensor.ne(),
        nb: tensor.nb(),
        start: tensor.data(),
        bytes: tensor.bytes(),
        root: tensor.viewed().and_then(|root| numbers.get(&root.key()).copied()),
        sources: if number < count {
            tensor.sources().map(|source| numbers[&source.key()]).collect()
        } else {
            Vec::new()
        },
        uses: uses.get(start + number).copied().flatten().filter(|_| number < count),
        is_output: tensor.is_output(),
    };
    let flows: Vec<Flow> = all.iter().enumerate().map(flow).collect();
    let sliced = slices::find(&flows, count, least, i64::try_from(tokens).ok()?)?;
    let tokens = slices::slices(tokens, most);
    let layout = sliced.layout(usize::try_from(tokens.first()?.end).ok()?);
    let inner = sliced.cuts.iter().filter(|cut| cut.inside.is_some()).map(|cut| all[cut.tensor].key()).collect();
    let free = sliced.free(&flows);
    Some(Found { step, block: SlicedBlock { seen: range, sliced, layout, place: 0, tokens }, free, inner })
}
