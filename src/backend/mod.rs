//! Backends: one stream of a device of ours, over one stream of the inner device.
//!
//! Owns: the inner stream, the plans of the graphs seen, the plain path's scratch, the counters.
//! Invariants: the nodes of a graph run in the host's order, each exactly once; a node of the host that was made to read
//! another source is restored before the call returns, also on errors.
//! Threads: the host drives a backend from one thread at a time. The state is taken out of its lock while a graph runs, so no
//! lock is held across a call into the host or the inner device.
//! Does not: know how experts get to the device (`experts` does).

mod ahead;
mod cached;
mod fetched;
mod lent;
mod sliced;
mod streamed;
mod tell;
mod watch;

use std::cell::Cell;
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::atomic::AtomicU64;

use parking_lot::Mutex;

use crate::abi::OpClass;
use crate::abi::graph::{Graph, GraphError, describe};
use crate::abi::inner::{self, Passport, Status};
use crate::abi::tensor::Tensor;
use crate::buffer::BufferError;
use crate::config::LogDetail;
use crate::device::Device;
use crate::experts::cache::{self, Candidate, EngineError};
use crate::experts::{PlainError, PlainPath};
use crate::gpu::Rows;
use crate::graph::{ExpertWeight, KeySet, Plan, PlanCache, ReplayLedger, Run, Step, Treatment, plan};
use crate::telemetry::{Busy, Counters, PassShape, Reporter, log};

/// A backend of ours.
pub(crate) struct Backend {
    pub(crate) device: &'static Device,
    // Dropped before the inner stream, which is idle by then: the scratch belongs to it.
    state: Mutex<Option<Box<State>>>,
    pub(crate) inner: inner::Backend,
    /// The uploads that the inner stream already waits for.
    seen_uploads: AtomicU64,
}

#[derive(Default)]
struct State {
    plans: PlanCache<Planned>,
    plain: PlainPath,
    counters: Counters,
    replays: ReplayLedger,
    told: HashSet<String>,
    reporter: Reporter,
    watches: watch::Watches,
    layout_epoch: u64,
}

/// A graph that was cut, and what its cacheable blocks compute, in order.
#[derive(Debug, Default)]
struct Planned {
    plan: Plan,
    blocks: Vec<Candidate>,
    /// All blocks of a long pass, in order, if the cache could compute each of them for single tokens.
    all: Vec<Candidate>,
    /// The same steps, as they are handed on when blocks run ahead.
    pieces: Vec<ahead::Piece>,
    /// What it touches in compute buffers whose memory comes and goes.
    touches: Vec<lent::Touch>,
    /// How its blocks run in slices of their tokens, if they do.
    sliced: Option<sliced::SlicedPass>,
    /// Bytes of scratch that its steps may need.
    scratch_bytes: usize,
    /// Some blocks' experts may be brought.
    is_streamed: bool,
    /// What the cost model is asked about such a pass.
    middle: Option<fetched::Middle>,
    /// Its tokens, if it holds experts.
    pass: Option<PassShape>,
}

/// A graph could not be run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BackendError {
    /// An earlier failure left data of the host wrong.
    #[error("{0} failed earlier and computes nothing more; restart the program")]
    Poisoned(String),
    /// A block was to run in a graph that did not start.
    #[error("a block was to run outside a graph")]
    NoReader,
    /// The device's driver refused an operation.
    #[error(transparent)]
    Buffer(#[from] BufferError),
    /// Experts could not be made ready.
    #[error(transparent)]
    Plain(#[from] PlainError),
    /// A part of the graph could not be made.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// A block could not be computed by the cache.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl BackendError {
    /// The status that upstream defines for this failure.
    pub(crate) fn status(&self) -> Status {
        match self {
            Self::Plain(PlainError::Buffer(BufferError::NoDeviceMemory { .. }))
            | Self::Buffer(BufferError::NoLentMemory { .. })
            | Self::Graph(GraphError::NoMemory(_)) => Status::ALLOC_FAILED,
            _ => Status::FAILED,
        }
    }
}

thread_local! {
    static GRAPHS_WITH_EXPERTS: Cell<u64> = const { Cell::new(0) };
}

/// How many graphs with experts this thread gave to devices of ours.
pub(crate) fn graphs_with_experts() -> u64 {
    GRAPHS_WITH_EXPERTS.get()
}

impl Backend {
    /// Opens a stream; `None` if the inner device cannot, or if its objects are not laid out as the probe found.
    pub(crate) fn open(device: &'static Device) -> Option<Self> {
        let inner = device.inner.open()?;
        if !inner.has_known_layout(&device.inner) {
            log::error(&format!(
                "{}: the backend of {} has another binary layout than its library; remove --device {}",
                device.label(),
                device.inner_name,
                device.label()
            ));
            return None;
        }
        device.note_backend_opened();
        Some(Self { device, state: Mutex::new(None), inner, seen_uploads: AtomicU64::new(0) })
    }

    /// Runs a graph of the host.
    pub(crate) fn compute(&self, graph: Graph<'_>) -> Result<Status, BackendError> {
        // The dry load of llama.cpp's fit step runs no graph and hides what is logged, so the first graph is the time to tell.
        self.device.announce();
        if self.device.is_poisoned() {
            return Err(BackendError::Poisoned(self.device.label().to_owned()));
        }
        self.order_uploads()?;
        if self.device.passes_through() {
            let status = self.inner.compute_whole(graph);
            self.note_use()?;
            return Ok(status);
        }
        self.device.tend_cache();
        let busy = Busy::new();
        let mut state = self.state.lock().take().unwrap_or_default();
        state.watches.write(self.device);
        let outcome = self.run(&mut state, graph);
        self.device.board.publish(&mut state.reporter, &mut state.counters, &busy);
        *self.state.lock() = Some(state);
        self.note_use()?;
        outcome
    }

    fn run(&self, state: &mut State, graph: Graph<'_>) -> Result<Status, BackendError> {
        let epoch = self.device.layout_epoch();
        if state.layout_epoch != epoch {
            state.plans.clear();
            state.layout_epoch = epoch;
        }
        let Some(first) = graph.first() else {
            return Ok(Status::SUCCESS); // inner backends look at the first node
        };
        let key = graph.key();
        let plan = state.plans.get(key, || {
            let nodes = graph.nodes();
            let planned = self.plan(graph, &nodes);
            tell::plan(self.device, &mut state.told, &nodes, &planned.plan);
            planned
        });
        let planned = &*plan;
        let Planned { plan, blocks, .. } = planned;
        let sliced = self.bring_pass(state, key, planned)?;
        let is_sliced = sliced.is_some();
        state.reporter.pass = planned.pass;
        if let Some(pass) = &planned.pass {
            self.device.begin_pass(pass.tokens);
            tell::pass(self.device, pass);
        }
        let counters = &mut state.counters;
        counters.graphs += 1;
        counters.nodes += key.count as u64;
        counters.blocks += plan.blocks as u64;
        counters.blocks_max = counters.blocks_max.max(plan.blocks as u64);
        counters.unrecognised += plan.unrecognised.len() as u64;
        if plan.blocks > 0 {
            GRAPHS_WITH_EXPERTS.set(GRAPHS_WITH_EXPERTS.get() + 1);
        }
        if let [Step::Segment(_)] = plan.steps.as_slice() {
            // Nothing to cut, as in most tokens: the graph is not even walked.
            counters.segments += 1;
            self.note_run(&mut state.counters, &mut state.replays, first, graph.uid());
            return Ok(self.inner.compute_whole(graph));
        }
        if state.plain.is_crowded() {
            self.inner.synchronize();
            state.plain.forget_retired();
        }
        let nodes = graph.nodes();
        self.make_ready(state, planned);
        if planned.is_streamed
            && let Some(outcome) = self.run_long(state, graph, &nodes, planned, sliced)
        {
            return outcome;
        }
        if is_sliced {
            self.bring_rest(state, key, planned)?;
        }
        let mut session = self.begin_cached(&nodes, blocks);
        let outcome = match session.as_mut() {
            Some(session) if session.may_run_ahead() => self.run_pieces(state, session, graph, &nodes, planned),
            session => self.run_steps(state, session, graph, &nodes, (plan, blocks)),
        };
        if let Some(session) = session {
            self.end_cached(state, session, matches!(outcome, Ok(Status::SUCCESS)));
        }
        outcome
    }

    fn run_steps(
        &self,
        state: &mut State,
        mut session: Option<&mut cached::Session>,
        graph: Graph<'_>,
        nodes: &[Tensor<'_>],
        (plan, blocks): (&Plan, &[Candidate]),
    ) -> Result<Status, BackendError> {
        let mut number = 0;
        for step in &plan.steps {
            let is_cached = matches!(step, Step::Cached { .. });
            let status = match (session.as_deref_mut(), blocks.get(number)) {
                (Some(session), Some(block)) if is_cached => {
                    self.run_cached(state, session, graph, nodes, step, (number, block))?
                }
                _ => self.run_step(state, graph, nodes, step)?,
            };
            number += usize::from(is_cached);
            if status != Status::SUCCESS {
                return Ok(status);
            }
        }
        Ok(Status::SUCCESS)
    }

    /// Cuts a graph, and reads its blocks where a cache may compute them.
    fn plan(&self, graph: Graph<'_>, nodes: &[Tensor<'_>]) -> Planned {
        let (mut blocks, mut all, mut number) = (Vec::new(), Vec::new(), 0);
        let readers = self.device.may_cache().then(|| cache::pattern::Readers::new(nodes));
        let plan = plan(&describe(nodes, &expert_weight), &mut |products| {
            number += 1;
            let pattern = readers.as_ref().and_then(|readers| cache::pattern::read(readers, products));
            let candidate = pattern.map(|pattern| Candidate { products: products.to_vec(), pattern });
            all.extend(candidate.clone());
            let tokens = products.first().and_then(|&product| nodes[product].source(2)).map_or(0, |ids| ids.ne()[1]);
            if self.device.may_bring(tokens) && !products.iter().any(|&product| stays_in_file(nodes[product])) {
                return Treatment::Streamed;
            }
            let Some(candidate) = candidate.filter(|candidate| cache::suits(nodes, candidate)) else {
                return Treatment::Plain;
            };
            blocks.push(candidate);
            Treatment::Cached
        });
        if all.len() < number {
            all.clear(); // a cache is made for all blocks of a graph or for those that it can compute
        }
        // Blocks are offered in the order of the graph.
        let pieces = ahead::pieces(&plan);
        let is_streamed = plan.steps.iter().any(|step| matches!(step, Step::Streamed { .. }));
        let all = if is_streamed { all } else { Vec::new() };
        let middle = fetched::Middle::new(nodes, &plan, &all);
        let touches = if self.device.lends() { lent::touches(nodes, &KeySet::default()) } else { Vec::new() };
        let sliced = if is_streamed { self.slice(graph, nodes, &plan, &touches) } else { None };
        let scratch_bytes = lent::scratch_bytes(self.device, nodes, &plan, is_streamed);
        let pass = pass_shape(nodes);
        Planned { plan, blocks, all, pieces, touches, sliced, scratch_bytes, is_streamed, middle, pass }
    }

    fn run_step(
        &self,
        state: &mut State,
        graph: Graph<'_>,
        nodes: &[Tensor<'_>],
        step: &Step,
    ) -> Result<Status, BackendError> {
        let products: Vec<Tensor<'_>> = match step {
            Step::Segment(_) => Vec::new(),
            Step::Copied { products, .. }
            | Step::Cached { copied: products, .. }
            | Step::Streamed { copied: products, .. } => {
                // Of a prompt that goes on, the last layer has no tokens: nobody waits for its ids, and nothing is copied.
                products.iter().map(|&index| nodes[index]).filter(|product| !product.is_empty()).collect()
            }
        };
        let prepared = if products.is_empty() {
            None
        } else {
            Some(state.plain.prepare(self.device, &self.inner, &products, &mut state.counters)?)
        };
        let variant = prepared.as_ref().map_or(0, |prepared| prepared.variant);
        let range = step.range();
        let uid = part_uid(graph.uid(), nodes, &range, variant);
        let mut part = graph.part(nodes, range.clone(), uid)?;
        state.counters.segments += 1;
        self.note_run(&mut state.counters, &mut state.replays, nodes[range.start], uid);
        let status = self.inner.compute(&mut part);
        // The nodes are restored here, after the inner backend has taken them in.
        if let Some(prepared) = prepared {
            state.plain.retire(prepared);
        }
        Ok(status)
    }

    fn note_run(&self, counters: &mut Counters, replays: &mut ReplayLedger, first: Tensor<'_>, uid: u64) {
        if self.device.captures_graphs {
            match replays.note(first.key().0, uid) {
                Run::Direct => {}
                Run::Captured => counters.graphs_captured += 1,
                Run::Replayed => counters.graphs_replayed += 1,
                Run::Reset => counters.graphs_reset += 1,
            }
        }
    }

    /// Waits for everything that was queued; nothing is kept for it any more.
    pub(crate) fn synchronize(&self) {
        self.inner.synchronize();
        if let Some(state) = self.state.lock().as_mut() {
            state.plain.forget_retired();
        }
    }

    /// What this backend did so far.
    pub(crate) fn counters(&self) -> Counters {
        self.state.lock().as_ref().map(|state| state.counters).unwrap_or_default()
    }

    /// Makes the inner stream wait for what was uploaded to the device's memory so far.
    pub(crate) fn order_uploads(&self) -> Result<(), BufferError> {
        match self.device.opened_driver() {
            Some(driver) => driver.order_before(&self.inner, &self.seen_uploads).map_err(BufferError::from),
            None => Ok(()),
        }
    }

    /// Work was queued on the inner stream that may use the device's memory.
    pub(crate) fn note_use(&self) -> Result<(), BufferError> {
        match self.device.opened_driver() {
            Some(driver) => driver.note_use(&self.inner).map_err(BufferError::from),
            None => Ok(()),
        }
    }

    /// Copies a tensor between backends of ours on the device; false if the inner device cannot.
    pub(crate) fn copy_async(&self, from: &Self, source: Tensor<'_>, target: Tensor<'_>) -> bool {
        let both_ours = passport(source).is_some() && passport(target).is_some();
        let neither_ours = source.our_buffer().is_none() && target.our_buffer().is_none();
        if self.order_uploads().is_err() || from.order_uploads().is_err() {
            return false;
        }
        if !holds(source) || !is_writable(target) {
            return false; // the host's own copy tells what is wrong
        }
        let on_device = both_ours || (neither_ours && self.device.lends_inner_types());
        let pair = ((&from.inner, passport(source), source), (passport(target), target));
        if !on_device || !self.inner.copy_async(pair.0, pair.1) {
            return false;
        }
        // Either stream may do it, and the memory on both sides is in use until then.
        if self.note_use().is_err() || from.note_use().is_err() {
            self.device.poison();
        }
        true
    }
}

impl Counters {
    fn note(&mut self, outcome: &cache::Outcome) {
        self.hits += outcome.hits;
        self.misses += outcome.misses;
        self.cpu_bytes += outcome.cpu_bytes;
        self.upload_bytes += outcome.upload_bytes;
        self.wait_ns += outcome.wait_ns;
        self.team_ns += outcome.team_ns;
    }
}

/// Whether all of a tensor can be read.
fn holds(tensor: Tensor<'_>) -> bool {
    let Some(buffer) = tensor.our_buffer() else { return true };
    let place = buffer.place(tensor, 0, tensor.bytes());
    place.and_then(|place| buffer.holds(place, Rows::one(place.bytes))).is_ok()
}

/// Whether there is memory behind all of a tensor, which is about to be written.
fn is_writable(tensor: Tensor<'_>) -> bool {
    let Some(buffer) = tensor.our_buffer() else { return true };
    buffer.place(tensor, 0, tensor.bytes()).and_then(|place| buffer.makes_writable(place)).is_ok_and(|there| there)
}

fn passport(tensor: Tensor<'_>) -> Option<Passport> {
    tensor.our_buffer()?.memory().map(|memory| memory.passport())
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.inner.synchronize();
        if let Some(state) = self.state.get_mut() {
            state.watches.write(self.device);
        }
        self.device.note_backend_closed();
        if let Some(driver) = self.device.opened_driver() {
            driver.forget(&self.inner);
        }
        self.device.remember();
        self.device.board.finish();
        if log::shows(LogDetail::Debug) {
            let summary = self.counters().json(self.device.label(), &self.device.inner_name);
            log::debug(&format!("summary {summary}"));
        }
    }
}

/// The tokens of a graph, by its first and last expert product; `None` without any, and for a warm-up that uses all experts.
fn pass_shape(nodes: &[Tensor<'_>]) -> Option<PassShape> {
    let is_product =
        |node: &&Tensor<'_>| node.op_class() == OpClass::ExpertProduct && node.source(0).is_some_and(|w| w.ne()[2] > 1);
    let first = nodes.iter().find(is_product)?;
    let last = nodes.iter().rev().find(is_product)?;
    let tokens = |node: &Tensor<'_>| node.source(2).map_or(0, |ids| u32::try_from(ids.ne()[1]).unwrap_or(0));
    let weight = first.source(0)?;
    if first.source(2)?.ne()[0] == weight.ne()[2] {
        return None;
    }
    Some(PassShape { tokens: tokens(first), outputs: tokens(last), leader: weight.key().0 as u64 })
}

/// Whether a weight lies in an expert buffer of ours, and then whether the device reads it there.
fn expert_weight(weight: Tensor<'_>) -> Option<ExpertWeight> {
    let buffer = weight.our_buffer().filter(|buffer| buffer.host().is_some())?;
    Some(if buffer.reads_in_place(weight) { ExpertWeight::InPlace } else { ExpertWeight::Copied })
}

/// Whether a product's weight is read where the model's file is mapped: a copy of it would cost and serve nothing.
fn stays_in_file(product: Tensor<'_>) -> bool {
    let weight = product.source(0);
    weight.is_some_and(|weight| weight.our_buffer().is_some_and(|buffer| buffer.stays_in_file(weight)))
}

/// Identity of a part for the inner backend: it may skip all comparison of two parts with the same id, so the id stands for the
/// host's graph, the nodes and everything that was patched. The top bit keeps it apart from the host's own ids.
fn part_uid(host_uid: u64, nodes: &[Tensor<'_>], range: &Range<usize>, variant: u64) -> u64 {
    const OURS: u64 = 1 << 63;
    if host_uid == 0 {
        return 0;
    }
    let ends = (nodes.get(range.start).map(Tensor::key), range.end.checked_sub(1).map(|last| nodes[last].key()));
    let mut hasher = DefaultHasher::new();
    (host_uid, ends, range.len(), variant).hash(&mut hasher);
    let uid = hasher.finish() | OURS;
    if uid == host_uid { uid ^ 1 } else { uid }
}
