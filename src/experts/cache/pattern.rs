//! What a recognised block computes, read from its nodes: gate, up, activation, down.
//!
//! Owns: the search from the last product back to the first ones.
//! Invariants: a pattern names nodes by their place in the graph; it holds for every run of the same graph.
//! Threads: the one that plans. Does not: read data, or know where weights lie.

use crate::abi::tensor::Tensor;
use crate::cpu::activation::Activation;
use crate::graph::{KeyMap, KeySet, TensorKey};

/// Where one half of the activation's operands comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    /// The product, by place in the graph.
    pub(crate) product: usize,
    /// Its second half is meant: gate and up are one tensor.
    pub(crate) second_half: bool,
    /// The node that adds the expert's bias, if one does.
    pub(crate) bias: Option<usize>,
}

/// One block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Pattern {
    pub(crate) gate: Option<Origin>,
    pub(crate) up: Origin,
    /// The last product.
    pub(crate) down: usize,
    pub(crate) activation: Activation,
}

/// Reads a block. `products` are its expert products in node order; `None` if it is none of the forms that are known here.
pub(crate) fn read(readers: &Readers<'_, '_>, products: &[usize]) -> Option<Pattern> {
    let nodes = readers.nodes;
    let place = |tensor: Tensor<'_>| readers.places.get(&tensor.key()).copied();
    let down = *products.last()?;
    let middle = behind_reshapes(nodes[down].source(1)?);
    let (activation, gate, up) = match middle.description().as_str() {
        "GLU" | "UNARY" => return None,
        name if is_glu(name) => {
            let first = middle.source(0)?;
            let swapped = middle.parameter(1) != 0;
            let (gate, up) = match middle.source(1) {
                Some(second) => (origin(first, &place)?, origin(second, &place)?),
                None => {
                    let both = origin(first, &place)?;
                    (Origin { second_half: swapped, ..both }, Origin { second_half: !swapped, ..both })
                }
            };
            (glu(name, middle)?, Some(gate), up)
        }
        "MUL" => {
            let silu = middle.source(0).map(behind_reshapes).filter(|node| node.description() == "SILU")?;
            let (gate, most) = clamped(silu.source(0)?)?;
            let (up, limit) = clamped(middle.source(1)?)?;
            // The gate is limited upwards only, up on both sides.
            if gate.parameter_f32(0) != f32::NEG_INFINITY || up.parameter_f32(0) != -limit || most != limit {
                return None;
            }
            let sides = (origin(gate.source(0)?, &place)?, origin(up.source(0)?, &place)?);
            (Activation::SwigluLimited { limit }, Some(sides.0), sides.1)
        }
        "SQR" => {
            let inner = behind_reshapes(middle.source(0)?);
            if inner.description() != "RELU" {
                return None;
            }
            (Activation::ReluSqr, None, origin(inner.source(0)?, &place)?)
        }
        name => (unary(name)?, None, origin(middle.source(0)?, &place)?),
    };
    let mut used: Vec<usize> = gate.iter().chain([&up]).map(|origin| origin.product).chain([down]).collect();
    used.sort_unstable();
    used.dedup();
    // Every product of the block has its part, and gate and up multiply the same rows.
    let one_input = |origin: Origin| nodes[origin.product].source(1).map(|input| input.key());
    let same = gate.is_none_or(|gate| one_input(gate) == one_input(up));
    (used == products && same && is_private(readers, products, down)).then_some(Pattern { gate, up, down, activation })
}

/// The nodes of a graph, where each stands, and the last that reads a tensor or is a view of it: found once for all blocks.
#[derive(Debug)]
pub(crate) struct Readers<'n, 'a> {
    nodes: &'n [Tensor<'a>],
    places: KeyMap<usize>,
    last: KeyMap<usize>,
}

impl<'n, 'a> Readers<'n, 'a> {
    pub(crate) fn new(nodes: &'n [Tensor<'a>]) -> Self {
        let places = nodes.iter().enumerate().map(|(index, node)| (node.key(), index)).collect();
        let mut last = KeyMap::with_capacity_and_hasher(2 * nodes.len(), Default::default());
        for (index, node) in nodes.iter().enumerate() {
            for tensor in node.sources().chain(node.viewed()) {
                last.insert(tensor.key(), index);
                last.insert(tensor.owner().key(), index);
            }
        }
        Self { nodes, places, last }
    }

    fn last(&self, tensor: TensorKey) -> usize {
        self.last.get(&tensor).copied().unwrap_or(0)
    }
}

/// Whether only the last product's result is read by others: for missed experts the device computes no other result of the block.
fn is_private(readers: &Readers<'_, '_>, products: &[usize], down: usize) -> bool {
    let nodes = readers.nodes;
    let first = products.first().copied().unwrap_or(down);
    let mut inner: KeySet =
        products.iter().filter(|&&product| product != down).map(|&product| nodes[product].key()).collect();
    let mut end = inner.iter().map(|&tensor| readers.last(tensor)).max().unwrap_or(0).max(down);
    let mut needed = KeySet::default();
    let mut open: Vec<Tensor<'_>> = nodes[down].source(1).into_iter().collect();
    while let Some(tensor) = open.pop() {
        if needed.insert(tensor.key()) && !inner.contains(&tensor.key()) {
            open.extend(tensor.sources());
        }
    }
    let mut index = first;
    while index <= end {
        let node = nodes[index];
        let reads = |tensor: Tensor<'_>| inner.contains(&tensor.key()) || inner.contains(&tensor.owner().key());
        let is_inner = inner.contains(&node.key()) || (index != down && (reads(node) || node.sources().any(reads)));
        if is_inner && (node.is_output() || !needed.contains(&node.key())) {
            return false;
        }
        if is_inner && inner.insert(node.key()) {
            end = end.max(readers.last(node.key()));
        }
        index += 1;
    }
    true
}

/// A `CLAMP` and its upper limit.
fn clamped(tensor: Tensor<'_>) -> Option<(Tensor<'_>, f32)> {
    let clamp = behind_reshapes(tensor);
    (clamp.description() == "CLAMP").then(|| (clamp, clamp.parameter_f32(1)))
}

fn is_glu(name: &str) -> bool {
    matches!(name, "SWIGLU" | "GEGLU" | "REGLU" | "SWIGLU_OAI" | "SWIGLU_CLAMP" | "GEGLU_ERF" | "GEGLU_QUICK")
}

fn glu(name: &str, node: Tensor<'_>) -> Option<Activation> {
    Some(match name {
        "SWIGLU" => Activation::Swiglu,
        "GEGLU" => Activation::Geglu,
        "GEGLU_ERF" => Activation::GegluErf,
        "GEGLU_QUICK" => Activation::GegluQuick,
        "REGLU" => Activation::Reglu,
        "SWIGLU_OAI" => Activation::SwigluOai { alpha: node.parameter_f32(2), limit: node.parameter_f32(3) },
        "SWIGLU_CLAMP" => Activation::SwigluClamp { limit: node.parameter_f32(3) },
        _ => return None,
    })
}

fn unary(name: &str) -> Option<Activation> {
    Some(match name {
        "SILU" => Activation::Silu,
        "GELU" => Activation::Gelu,
        "GELU_ERF" => Activation::GeluErf,
        "GELU_QUICK" => Activation::GeluQuick,
        "RELU" => Activation::Relu,
        _ => return None,
    })
}

fn behind_reshapes(mut tensor: Tensor<'_>) -> Tensor<'_> {
    while tensor.description() == "RESHAPE"
        && let Some(source) = tensor.source(0)
    {
        tensor = source;
    }
    tensor
}

/// Follows an operand of the activation back to its product.
fn origin(operand: Tensor<'_>, place: &dyn Fn(Tensor<'_>) -> Option<usize>) -> Option<Origin> {
    let (mut tensor, mut bias, mut second_half) = (behind_reshapes(operand), None, false);
    if tensor.description() == "VIEW" {
        let whole = tensor.source(0)?;
        let half_bytes = usize::try_from(tensor.ne()[0]).ok()? * size_of::<f32>();
        let is_half = tensor.ne()[0] * 2 == whole.ne()[0] && tensor.nb()[1] == whole.nb()[1];
        second_half = tensor.view_offset() == half_bytes;
        if !is_half || !(second_half || tensor.view_offset() == 0) {
            return None;
        }
        tensor = behind_reshapes(whole);
    }
    if tensor.description() == "ADD_ID" {
        bias = Some(place(tensor)?);
        tensor = behind_reshapes(tensor.source(0)?);
    }
    if tensor.description() != "MUL_MAT_ID" {
        return None;
    }
    Some(Origin { product: place(tensor)?, second_half, bias })
}
