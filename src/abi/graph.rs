//! Graphs of the host: read through ggml's functions, handed on in parts.
//!
//! Owns: the mirror of ggml's private graph struct, its self-check, and the two ways to hand a part of a graph to the inner
//! backend: a view that shares the host's tables (fusion works), or a graph built by public functions (it does not).
//! Invariants: the mirror is used only if [`examine`] passed; a part never outlives the host's graph.
//! Threads: the thread that runs the slot.

use core::ffi::c_int;
use core::marker::PhantomData;
use core::mem::offset_of;
use core::ops::Range;
use core::ptr::NonNull;

use super::gen_api3 as api3;
use super::host::host;
use super::imports::Imports;
use super::ops::OpClass;
use super::tensor::Tensor;
use crate::config::GraphMode;
use crate::graph::{ExpertWeight, KeyMap, Kind, Node, PlanKey};

/// A graph of the host.
#[derive(Clone, Copy)]
pub(crate) struct Graph<'a> {
    pointer: NonNull<api3::ggml_cgraph>,
    life: PhantomData<&'a api3::ggml_cgraph>,
}

impl<'a> Graph<'a> {
    /// Wraps a graph; `None` for null.
    ///
    /// # Safety
    /// `pointer` is null or a valid graph of the host for `'a`, with valid nodes, touched by nobody else during `'a`.
    pub(super) unsafe fn new(pointer: *mut api3::ggml_cgraph) -> Option<Self> {
        NonNull::new(pointer).map(|pointer| Self { pointer, life: PhantomData })
    }

    pub(super) fn as_ptr(&self) -> *mut api3::ggml_cgraph {
        self.pointer.as_ptr()
    }

    fn count(&self) -> c_int {
        // SAFETY: a valid graph; a pure function.
        unsafe { (host().api.ggml_graph_n_nodes)(self.as_ptr()) }
    }

    /// A node; `None` past the end.
    fn node(&self, index: c_int) -> Option<Tensor<'a>> {
        if index >= self.count() {
            return None;
        }
        // SAFETY: the index is below the node count.
        let node = unsafe { (host().api.ggml_graph_node)(self.as_ptr(), index) };
        // SAFETY: nodes of a valid graph are valid for its life.
        unsafe { Tensor::new(node) }
    }

    /// The first node; `None` if there is none.
    pub(crate) fn first(&self) -> Option<Tensor<'a>> {
        self.node(0)
    }

    /// The nodes, in order.
    pub(crate) fn nodes(&self) -> Vec<Tensor<'a>> {
        (0..self.count()).filter_map(|index| self.node(index)).collect()
    }

    /// The host's id of the graph; 0 if it has none or if graphs are not read through the mirror.
    pub(crate) fn uid(&self) -> u64 {
        let host = host();
        if host.graphs == GraphMode::AddNode || !host.graph_facts.has_uid {
            return 0;
        }
        // SAFETY: the mirror passed its check at start and this host's graphs have the field; a valid graph.
        unsafe { (*self.as_ptr()).uid }
    }

    /// The key under which a plan of this graph may be kept.
    pub(crate) fn key(&self) -> PlanKey {
        let first = self.first().map_or(0, |node| node.key().0);
        PlanKey { uid: self.uid(), first, count: usize::try_from(self.count()).unwrap_or(0) }
    }

    /// A part of the graph to hand to the inner backend. `nodes` are this graph's nodes.
    ///
    /// `uid` is 0 or a number that stands for exactly these nodes with exactly these sources.
    pub(crate) fn part(&self, nodes: &[Tensor<'a>], range: Range<usize>, uid: u64) -> Result<Part<'a>, GraphError> {
        match host().graphs {
            GraphMode::View => Ok(self.view(&range, uid)),
            GraphMode::AddNode => build(nodes.get(range).unwrap_or_default()),
        }
    }

    /// A part made of nodes of this graph, in order, with nodes of ours among them. `uid` as for [`Graph::part`].
    pub(crate) fn part_with<'b>(&self, nodes: &[Tensor<'b>], uid: u64) -> Result<Part<'b>, GraphError>
    where
        'a: 'b,
    {
        if host().graphs == GraphMode::AddNode {
            return build(nodes);
        }
        let mut list: Vec<*mut api3::ggml_tensor> = nodes.iter().map(Tensor::as_ptr).collect();
        let graph = Box::new(self.shared(list.as_mut_ptr(), list.len(), uid));
        Ok(Part { graph: PartGraph::View { graph, _nodes: list }, life: PhantomData })
    }

    /// How often nodes of the host's whole graph read each of these; `None` where that is not known, as in a graph that a caller built of parts.
    pub(crate) fn uses(&self, nodes: &[Tensor<'_>]) -> Vec<Option<usize>> {
        if host().graphs == GraphMode::AddNode {
            return vec![None; nodes.len()];
        }
        // SAFETY: the mirror passed its check; a valid graph.
        let whole = unsafe { read_mirror(self.as_ptr(), host().graph_facts.has_uid) };
        let set = &whole.visited_hash_set;
        if set.size == 0 || set.keys.is_null() || set.used.is_null() || whole.use_counts.is_null() {
            return vec![None; nodes.len()];
        }
        let count = |node: &Tensor<'_>| usize::try_from(use_count(&whole, NonNull::new(node.as_ptr())?)?).ok();
        nodes.iter().map(count).collect()
    }

    fn view(&self, range: &Range<usize>, uid: u64) -> Part<'a> {
        // SAFETY: a valid graph.
        let nodes = unsafe { (host().api.ggml_graph_nodes)(self.as_ptr()) };
        let graph = Box::new(self.shared(nodes.wrapping_add(range.start), range.len(), uid));
        Part { graph: PartGraph::View { graph, _nodes: Vec::new() }, life: PhantomData }
    }

    /// A graph of these nodes that shares the host's tables.
    fn shared(&self, nodes: *mut *mut api3::ggml_tensor, count: usize, uid: u64) -> api3::ggml_cgraph {
        // SAFETY: the mirror passed its check; a valid graph.
        let whole = unsafe { read_mirror(self.as_ptr(), host().graph_facts.has_uid) };
        api3::ggml_cgraph {
            size: 0,
            n_nodes: c_int::try_from(count).unwrap_or(0),
            n_leafs: 0,
            nodes,
            grads: core::ptr::null_mut(),
            grad_accs: core::ptr::null_mut(),
            leafs: core::ptr::null_mut(),
            uid,
            ..whole
        }
    }
}

/// A graph could not be handed on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GraphError {
    /// ggml had no memory for the graph.
    #[error("ggml could not make a graph of {0} nodes: out of memory; use a smaller batch (-ub)")]
    NoMemory(usize),
}

/// A part of a host graph, as a graph of its own.
pub(crate) struct Part<'a> {
    graph: PartGraph,
    life: PhantomData<&'a api3::ggml_cgraph>,
}

enum PartGraph {
    View {
        graph: Box<api3::ggml_cgraph>,
        /// The list that the graph points to, if it is not the host's.
        _nodes: Vec<*mut api3::ggml_tensor>,
    },
    Built {
        context: *mut api3::ggml_context,
        graph: *mut api3::ggml_cgraph,
    },
}

impl Part<'_> {
    pub(super) fn as_ptr(&mut self) -> *mut api3::ggml_cgraph {
        match &mut self.graph {
            PartGraph::View { graph, .. } => &raw mut **graph,
            PartGraph::Built { graph, .. } => *graph,
        }
    }
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        if let PartGraph::Built { context, .. } = self.graph {
            // SAFETY: made by ggml_init in `build`, freed once.
            unsafe { (host().api.ggml_free)(context) };
        }
    }
}

/// Builds a graph of these nodes through public functions: no use counts, so no fusion, and no id.
fn build<'a>(nodes: &[Tensor<'a>]) -> Result<Part<'a>, GraphError> {
    let api = &host().api;
    let no_memory = || GraphError::NoMemory(nodes.len());
    let size = nodes.len().max(1);
    // SAFETY: a pure function.
    let graph_bytes = unsafe { (api.ggml_graph_overhead_custom)(size, false) };
    let params =
        api3::ggml_init_params { mem_size: graph_bytes + 1024, mem_buffer: core::ptr::null_mut(), no_alloc: true };
    // SAFETY: no preconditions; null on failure.
    let context = unsafe { (api.ggml_init)(params) };
    if context.is_null() {
        return Err(no_memory());
    }
    // SAFETY: a valid context with room for exactly this graph.
    let graph = unsafe { (api.ggml_new_graph_custom)(context, size, false) };
    let part = Part { graph: PartGraph::Built { context, graph }, life: PhantomData };
    if graph.is_null() {
        return Err(no_memory());
    }
    for node in nodes {
        // SAFETY: the graph was made for this many nodes; the node is valid.
        unsafe { (api.ggml_graph_add_node)(graph, node.as_ptr()) };
    }
    Ok(part)
}

/// What the planner needs to know of each node. `expert_weight` tells which weights lie in an expert buffer of ours, and how the device
/// gets at them.
pub(crate) fn describe(nodes: &[Tensor<'_>], expert_weight: &dyn Fn(Tensor<'_>) -> Option<ExpertWeight>) -> Vec<Node> {
    let index: KeyMap<usize> = nodes.iter().enumerate().map(|(index, node)| (node.key(), index)).collect();
    nodes
        .iter()
        .enumerate()
        .map(|(at, node)| {
            let mut reads: Vec<usize> = node
                .sources()
                .chain(node.viewed())
                .filter_map(|tensor| index.get(&tensor.key()).copied())
                .filter(|&read| read < at)
                .collect();
            reads.sort_unstable();
            reads.dedup();
            let writes = node.viewed().filter(|_| node.op_class() != OpClass::View).map(|owner| owner.key());
            Node { kind: kind(*node, expert_weight), reads, writes }
        })
        .collect()
}

fn kind(node: Tensor<'_>, expert_weight: &dyn Fn(Tensor<'_>) -> Option<ExpertWeight>) -> Kind {
    match node.op_class() {
        OpClass::ExpertProduct => {
            let weight = node.source(0).filter(|_| node.is_computed()).and_then(expert_weight);
            match (weight, node.source(2)) {
                (Some(weight), Some(ids)) => Kind::ExpertProduct { weight, ids: ids.ids_key() },
                _ => Kind::Foreign,
            }
        }
        OpClass::View | OpClass::PairWise => Kind::PairWise,
        OpClass::Other => Kind::Foreign,
    }
}

/// What a host's graphs are like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GraphFacts {
    /// The mirror fits, so that parts can be handed on as views.
    pub(super) fits: bool,
    /// Graphs have an id (since 2026-04-16).
    pub(super) has_uid: bool,
    /// Nodes that are to be computed carry a flag; in older releases every node is computed.
    pub(super) has_compute_flag: bool,
}

/// The private struct of a graph. Without an id it ends before that field.
///
/// # Safety
/// `graph` is a valid graph whose layout the mirror has, with or without the id.
unsafe fn read_mirror(graph: *const api3::ggml_cgraph, has_uid: bool) -> api3::ggml_cgraph {
    if has_uid {
        // SAFETY: the caller's contract.
        return unsafe { graph.read() };
    }
    let mut mirror = core::mem::MaybeUninit::<api3::ggml_cgraph>::zeroed();
    let bytes = offset_of!(api3::ggml_cgraph, uid);
    // SAFETY: the caller's contract: everything in front of the id is there; the target is larger.
    unsafe { core::ptr::copy_nonoverlapping(graph.cast::<u8>(), mirror.as_mut_ptr().cast::<u8>(), bytes) };
    // SAFETY: pointers and integers, for which zeros are a value.
    unsafe { mirror.assume_init() }
}

/// What this host's graphs are like, tried on a graph of our own: `c = a + b`.
///
/// Checks the counts, the node array, the hash set and the use counts, that is every field that a view shares, and the size of
/// the struct.
pub(super) fn examine(api: &Imports) -> GraphFacts {
    const NODES: usize = 5;
    // SAFETY: a pure function.
    let graph_bytes = unsafe { (api.ggml_graph_overhead_custom)(NODES, false) };
    // SAFETY: a pure function.
    let tensor_bytes = unsafe { (api.ggml_tensor_overhead)() };
    let params = api3::ggml_init_params {
        mem_size: graph_bytes + 4 * tensor_bytes + 1024,
        mem_buffer: core::ptr::null_mut(),
        no_alloc: true,
    };
    // SAFETY: no preconditions; null on failure.
    let context = unsafe { (api.ggml_init)(params) };
    if context.is_null() {
        return GraphFacts::default();
    }
    let facts = examine_in(api, context, NODES).unwrap_or_default();
    // SAFETY: made above, freed once.
    unsafe { (api.ggml_free)(context) };
    facts
}

fn examine_in(api: &Imports, context: *mut api3::ggml_context, size: usize) -> Option<GraphFacts> {
    // SAFETY: a valid context with room for it.
    let a = NonNull::new(unsafe { (api.ggml_new_tensor_3d)(context, api3::GGML_TYPE_F32, 4, 1, 1) })?;
    // SAFETY: as above.
    let b = NonNull::new(unsafe { (api.ggml_new_tensor_3d)(context, api3::GGML_TYPE_F32, 4, 1, 1) })?;
    // SAFETY: as above; both tensors are valid.
    let c = NonNull::new(unsafe { (api.ggml_add)(context, a.as_ptr(), b.as_ptr()) })?;
    // SAFETY: as above.
    let graph = NonNull::new(unsafe { (api.ggml_new_graph_custom)(context, size, false) })?;
    // SAFETY: a valid graph with room for the node, and a valid tensor.
    unsafe { (api.ggml_build_forward_expand)(graph.as_ptr(), c.as_ptr()) };
    // SAFETY: a valid tensor; the probe has checked the place of its flags.
    let flags = unsafe { (*c.as_ptr()).flags };
    let has_compute_flag = flags.cast_unsigned() & api3::GGML_TENSOR_FLAG_COMPUTE != 0;
    let unknown = GraphFacts { has_compute_flag, ..GraphFacts::default() };
    // SAFETY: a valid graph.
    let nodes = unsafe { (api.ggml_graph_nodes)(graph.as_ptr()) };
    // SAFETY: a valid graph.
    let real_size = unsafe { (api.ggml_graph_size)(graph.as_ptr()) };
    // The arrays of a graph lie behind its struct, the nodes first, so that their place tells how large the struct is.
    let struct_bytes = nodes.addr().wrapping_sub(graph.addr().get());
    let has_uid = struct_bytes == size_of::<api3::ggml_cgraph>();
    if !has_uid && struct_bytes != offset_of!(api3::ggml_cgraph, uid) {
        return Some(unknown);
    }
    // SAFETY: the struct has one of the two sizes that the mirror knows.
    let mirror = unsafe { read_mirror(graph.as_ptr(), has_uid) };
    let head = mirror.size == real_size && mirror.n_nodes == 1 && mirror.n_leafs == 2 && mirror.nodes == nodes;
    let tail = mirror.order == api3::GGML_CGRAPH_EVAL_ORDER_LEFT_TO_RIGHT && mirror.uid == 0;
    let set = &mirror.visited_hash_set;
    if !(head && tail && (3..=4096).contains(&set.size) && !set.keys.is_null() && !mirror.use_counts.is_null()) {
        return Some(unknown);
    }
    let uses = |tensor: NonNull<api3::ggml_tensor>| use_count(&mirror, tensor);
    let fits = uses(a) == Some(1) && uses(b) == Some(1) && uses(c) == Some(0);
    Some(GraphFacts { fits, has_uid: fits && has_uid, has_compute_flag })
}

/// The use count of a tensor, found the way ggml does: address / 16 modulo the size, then linear probing.
fn use_count(mirror: &api3::ggml_cgraph, tensor: NonNull<api3::ggml_tensor>) -> Option<i32> {
    let set = &mirror.visited_hash_set;
    let start = (tensor.addr().get() >> 4) % set.size;
    for step in 0..set.size {
        let slot = (start + step) % set.size;
        let word = set.used.wrapping_add(slot / 32);
        // SAFETY: `examine_in` found the tables to be set and the size to be plausible; the bit set has a bit per slot.
        let used = unsafe { word.read() } >> (slot % 32) & 1 == 1;
        if !used {
            return None;
        }
        // SAFETY: as above; keys has `size` entries.
        let key = unsafe { set.keys.wrapping_add(slot).read() };
        if key == tensor.as_ptr() {
            // SAFETY: as above; use_counts has `size` entries.
            return Some(unsafe { mirror.use_counts.wrapping_add(slot).read() });
        }
    }
    None
}
