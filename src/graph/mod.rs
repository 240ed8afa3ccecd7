//! Graphs as the planner sees them: which nodes exist, what each reads, which are expert products.
//!
//! Owns: the description of a graph ([`Node`]), the recognition of MoE blocks (`block`), the cut of a graph into steps
//! ([`plan()`]), the nodes that can run in slices of their tokens ([`slices`]) and the account of what the inner backend replays
//! ([`ReplayLedger`]).
//! Invariants: node order is never changed; the steps of a plan cover every node exactly once, in order.
//! Threads: none; everything here is a pure function of its input.
//! Does not: know a host type, read tensor data or run anything.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

mod block;
mod plan;
mod ranges;
mod replay;
pub mod slices;

pub use plan::{Plan, PlanCache, PlanKey, Step, Treatment, plan};
pub use ranges::{Ranges, Span, walk};
pub use replay::{ReplayLedger, Run};

/// Identity of a tensor: equal for the same tensor, meaningless otherwise. Never dereferenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorKey(pub usize);

/// A map by tensor.
pub type KeyMap<V> = HashMap<TensorKey, V, BuildHasherDefault<KeyHasher>>;
/// A set of tensors.
pub type KeySet = HashSet<TensorKey, BuildHasherDefault<KeyHasher>>;

/// Hashes keys of tensors. A graph of a large model has thousands of nodes and is read anew for each prompt, and keys are addresses that nobody
/// outside chooses, so one multiplication is enough.
#[derive(Clone, Copy, Debug, Default)]
pub struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_usize(byte.into()));
    }

    fn write_usize(&mut self, value: usize) {
        let spread = (self.0 ^ value as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // Addresses end with zeros, and a product's lower half does too.
        self.0 = spread ^ (spread >> 32);
    }
}

/// What a node does, as far as the planner cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A product with expert weights that lie in an expert buffer (`MUL_MAT_ID`).
    ExpertProduct {
        /// How the device gets at the weights.
        weight: ExpertWeight,
        /// The tensor that names the experts of each token, with views resolved to the viewed tensor and `offset`.
        ids: IdsKey,
    },
    /// Works row by row on (token, expert) pairs, or only changes the view of them.
    PairWise,
    /// Anything else.
    Foreign,
}

/// How the inner device gets at expert weights in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertWeight {
    /// The used experts are copied to the device before the product runs.
    Copied,
    /// Its kernels read them where they lie; the product runs like any node.
    InPlace,
}

/// Identity of an id operand. Several views of one routing result with the same place and shape are the same operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IdsKey {
    /// The tensor that owns the memory.
    pub owner: TensorKey,
    /// Byte offset of the view.
    pub offset: usize,
    /// Ids per token.
    pub used: i64,
    /// Tokens.
    pub tokens: i64,
    /// Bytes from one id of a token to the next.
    pub id_stride: usize,
    /// Bytes from one token's ids to the next's.
    pub token_stride: usize,
}

/// One node of a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// What it does.
    pub kind: Kind,
    /// The nodes of this graph that it reads (sources, and what it is a view of), by index; all smaller than its own.
    pub reads: Vec<usize>,
    /// The tensor whose memory it writes to, if that is not its own: in-place ops, copies into a view, rows set in a cache.
    pub writes: Option<TensorKey>,
}
