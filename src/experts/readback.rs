//! The one read-back of a pass that brings what it uses: the ids of a block.
//!
//! Owns: their way to the host, with one wait. Invariants: the ids are those that the block will use: they were computed by what was handed to
//! the stream before.
//! Threads: the one that drives the backend. Does not: keep them.
// UNSAFETY: memory for the ids is handed to a copy, which is waited for here.
#![expect(unsafe_code, reason = "memory for the ids is handed to a copy, which is waited for here")]

use std::ops::Range;

use super::PlainError;
use super::ids::{BadId, Ids};
use crate::abi::inner;
use crate::abi::tensor::Tensor;

/// The experts that a product is about to use.
#[derive(Debug)]
pub(crate) struct Used {
    /// As runs of neighbours, in ascending order.
    pub(crate) runs: Vec<Range<usize>>,
    /// Each use.
    pub(crate) each: Vec<u32>,
}

/// Waits for the inner stream; the experts that a product is about to use.
pub(crate) fn used(inner: &inner::Backend, product: Tensor<'_>) -> Result<Used, PlainError> {
    let operand = || PlainError::Operand(product.name());
    let (weight, ids) = product.source(0).zip(product.source(2)).ok_or_else(operand)?;
    let experts = usize::try_from(weight.ne()[2]).unwrap_or(0);
    let bytes = match ids.our_buffer().and_then(|buffer| buffer.memory()) {
        Some(memory) if memory.contains(ids.data(), ids.bytes()) => {
            let mut bytes = vec![0_u8; ids.bytes()];
            // SAFETY: the range lies in the memory; the vector holds as many bytes and stays until the stream was waited for.
            unsafe { inner.read_async(memory.passport(), ids.data(), bytes.as_mut_ptr().cast(), bytes.len()) };
            inner.synchronize();
            bytes
        }
        _ => {
            inner.synchronize();
            crate::abi::slots::buffer::download(ids).ok_or_else(operand)?
        }
    };
    let extent = |dimension: usize| usize::try_from(ids.ne()[dimension]).unwrap_or(0);
    let view =
        Ids { bytes: &bytes, used: extent(0), tokens: extent(1), id_stride: ids.nb()[0], token_stride: ids.nb()[1] };
    let bad = |bad: BadId| PlainError::BadId { node: product.name(), id: bad.id, experts };
    let mut each = Vec::with_capacity(view.used * view.tokens);
    view.each(experts, |id| each.extend(u32::try_from(id))).map_err(bad)?;
    Ok(Used { runs: view.runs(experts).map_err(bad)?, each })
}
