//! Tensors of the host that stand for a part of their tokens, for one part of a graph at a time.
//!
//! Owns: what is written into them, and their restoration. Invariants: a tensor is as the host made it before the first and after the last slice,
//! also on errors: dropping restores it. Only shape, strides and place are written.
//! Threads: the thread that runs the slot; the host does not touch a graph meanwhile. Does not: know which tensors may be cut (`graph::slices`
//! does), or allocate.

use core::ops::Range;

use super::gen_api3 as api3;
use super::tensor::Tensor;

/// A tensor that is cut along one dimension.
pub(crate) struct Window<'a> {
    tensor: Tensor<'a>,
    dim: usize,
    original: api3::ggml_tensor,
    /// Where the part of every slice lies, if not each where the host has it.
    inside: Option<usize>,
}

impl<'a> Window<'a> {
    /// `dim` counts the tokens. With `inside`, an address in the tensor's buffer, the parts of all slices lie there, one after the other in time.
    pub(crate) fn new(tensor: Tensor<'a>, dim: usize, inside: Option<usize>) -> Self {
        Self { original: tensor.clone_raw(), tensor, dim: dim.min(3), inside }
    }

    /// Makes it stand for these tokens.
    pub(crate) fn show(&mut self, tokens: &Range<usize>) {
        let (ne, mut nb) = (self.original.ne, self.original.nb);
        let stride = nb[self.dim];
        for (dim, step) in nb.iter_mut().enumerate().skip(self.dim + 1) {
            *step = stride * tokens.len() * usize::from(ne[dim] > 0);
        }
        let tensor = self.tensor.as_ptr();
        // SAFETY: a valid tensor of the graph that runs; only this thread touches it, and no reference to it is held here.
        unsafe { (*tensor).ne[self.dim] = i64::try_from(tokens.len()).unwrap_or(0) };
        // SAFETY: as above.
        unsafe { (*tensor).nb = nb };
        let address = self.inside.unwrap_or(self.original.data.addr() + tokens.start * stride);
        // SAFETY: as above.
        unsafe { (*tensor).data = core::ptr::without_provenance_mut(address) };
    }
}

impl Drop for Window<'_> {
    fn drop(&mut self) {
        let tensor = self.tensor.as_ptr();
        // SAFETY: as in `show`; the fields are given back what they held.
        unsafe { (*tensor).ne = self.original.ne };
        // SAFETY: as above.
        unsafe { (*tensor).nb = self.original.nb };
        // SAFETY: as above.
        unsafe { (*tensor).data = self.original.data };
    }
}
