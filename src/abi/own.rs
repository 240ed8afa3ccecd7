//! Tensors of our own: operands that nodes of the host are made to read, and nodes that the inner backend runs among the host's.
//!
//! Invariants: a node of ours reads what its maker named, which must live for as long as the node is handed on; it is in none of the host's
//! tables, so no kernel is fused with it.
//! Threads: the thread that runs the slot. Does not: allocate data.

use super::gen_api3 as api3;
use super::host::host;
use super::inner::Passport;
use super::tensor::{Retired, Tensor};

/// Numbers of four bytes, as ids are.
pub(crate) const I32: u32 = api3::GGML_TYPE_I32;
/// Activations.
pub(crate) const F32: u32 = api3::GGML_TYPE_F32;

/// What a tensor is made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    pub(crate) type_: u32,
    pub(crate) address: usize,
    pub(crate) buffer: Passport,
    /// Elements per dimension.
    pub(crate) ne: [i64; 4],
    /// Bytes from one element, row, matrix to the next.
    pub(crate) nb: [usize; 4],
}

impl Form {
    /// Rows one behind the other: `row` elements of four bytes each, as many rows and matrices.
    pub(crate) fn rows(type_: u32, address: usize, buffer: Passport, [row, rows, matrices]: [usize; 3]) -> Self {
        let count = |number: usize| i64::try_from(number).unwrap_or(0);
        let (bytes, matrix) = (row * 4, row * rows * 4);
        let nb = [4, bytes, matrix, matrix * matrices];
        Self { type_, address, buffer, ne: [count(row), count(rows), count(matrices), 1], nb }
    }
}

/// A tensor of our own.
pub(crate) struct OwnTensor(Box<api3::ggml_tensor>);

// SAFETY: its pointers are followed only by the thread that runs a slot.
unsafe impl Send for OwnTensor {}

impl OwnTensor {
    fn new(form: Form, op: u32) -> Self {
        // SAFETY: integers, floats and pointers, for all of which zeros are a value.
        let mut tensor = unsafe { core::mem::zeroed::<api3::ggml_tensor>() };
        tensor.type_ = form.type_;
        tensor.buffer = form.buffer.as_ptr();
        tensor.data = core::ptr::without_provenance_mut(form.address);
        tensor.ne = form.ne;
        tensor.nb = form.nb;
        tensor.op = op;
        Self(Box::new(tensor))
    }

    /// An operand.
    pub(crate) fn operand(form: Form) -> Self {
        Self::new(form, host().ops.none)
    }

    /// A node that picks rows: `result[.., i, t] = table[.., ids[i, t], t]`. `None` if the host has no such op.
    pub(crate) fn pick(form: Form, table: Tensor<'_>, ids: Tensor<'_>) -> Option<Self> {
        let mut node = Self::new(form, host().ops.get_rows?);
        if host().graph_facts.has_compute_flag {
            node.0.flags |= api3::GGML_TENSOR_FLAG_COMPUTE.cast_signed();
        }
        node.0.src[0] = table.as_ptr();
        node.0.src[1] = ids.as_ptr();
        Some(node)
    }

    /// The tensor, to be read by nodes or handed on.
    pub(crate) fn tensor(&self) -> Tensor<'_> {
        // SAFETY: a complete tensor that lives as long as `self`, whose sources the maker vouched for.
        unsafe { Tensor::from_ref(&self.0) }
    }

    /// Keeps it for as long as the result lives.
    pub(crate) fn retire(self) -> Retired {
        Retired::new(self.0)
    }
}

impl core::fmt::Debug for OwnTensor {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("OwnTensor")
    }
}
