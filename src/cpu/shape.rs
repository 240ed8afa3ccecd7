//! What one block's experts compute, and one job of it.
//!
//! Owns: the description of gate, up, activation and down with their kernels; the lists of a job.
//! Invariants: a [`Shape`] that was made has rows that all of its kernels can take.
//! Threads: any; these are descriptions.
//! Does not: look at memory. Addresses are kept as they came and are used in `work` alone.

use super::activation::Activation;
use crate::abi::cpu_kernels::{Kernel, Values};

/// One of the matrices of an expert: rows of weights of one type.
#[derive(Clone, Copy)]
pub(crate) struct Matrix {
    pub(crate) kernel: Kernel,
    /// Bytes from one row to the next.
    pub(crate) stride: usize,
}

/// A table in host memory with one row of `f32` for each expert: biases, or single values as scales.
#[derive(Clone, Copy)]
pub(crate) struct Table {
    pub(crate) data: *const f32,
    /// Bytes from one expert's row to the next.
    pub(crate) stride: usize,
}

/// What follows a product, in this order: times the expert's scale, plus the expert's bias.
#[derive(Clone, Copy, Default)]
pub(crate) struct After {
    pub(crate) scale: Option<Table>,
    pub(crate) bias: Option<Table>,
}

/// The block's computation for one pair: `down * activation(gate * x, up * x)`, or `down * activation(up * x)` without a gate.
///
/// Merged gate and up are two matrices of the same stride, the second behind the first; so are their biases.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) n_embd: usize,
    pub(crate) n_ff: usize,
    pub(crate) gate: Option<Matrix>,
    pub(crate) up: Matrix,
    pub(crate) down: Matrix,
    pub(crate) activation: Activation,
    pub(crate) values: Values,
    pub(crate) after_gate: After,
    pub(crate) after_up: After,
    pub(crate) after_down: After,
}

/// One expert of a job, with so many of the job's pairs: the next ones of its list.
#[derive(Clone, Copy)]
pub(crate) struct Group {
    /// The row of this expert in the tables.
    pub(crate) expert: u32,
    /// First byte of its gate; not looked at where the shape has none.
    pub(crate) gate: *const u8,
    pub(crate) up: *const u8,
    pub(crate) down: *const u8,
    pub(crate) pairs: u32,
}

/// A row of the inputs that goes through an expert into a row of the outputs. Inputs may be rows of tokens, named by several pairs, or
/// rows of pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) input: u32,
    pub(crate) output: u32,
}

/// Work for the team. Each expert's weights are read once for all of its pairs.
pub(crate) struct Job<'a> {
    pub(crate) shape: &'a Shape,
    pub(crate) groups: &'a [Group],
    pub(crate) pairs: &'a [Pair],
    /// Rows of `n_embd` values, and the bytes from one to the next.
    pub(crate) inputs: (*const f32, usize),
    /// Rows of `n_embd` values, and the bytes from one to the next.
    pub(crate) outputs: (*mut f32, usize),
}

/// Why a job cannot be computed, or was not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum JobError {
    #[error("{0}")]
    Unsupported(&'static str),
    #[error("out of memory for intermediate results")]
    OutOfMemory,
    #[error("as many jobs are running as the team takes at once")]
    Busy,
    #[error("a thread of the team failed; its message stands in the program's error output")]
    Failed,
}

impl Shape {
    /// Whether the kernels can take the rows.
    pub(crate) fn check(&self) -> Result<(), JobError> {
        let refuse = |reason| Err(JobError::Unsupported(reason));
        let takes = |matrix: &Matrix, count: usize| {
            let packed = matrix.kernel.block().max(matrix.kernel.form.block());
            count > 0 && count.is_multiple_of(packed) && matrix.stride >= matrix.kernel.bytes(count)
        };
        if self.activation.is_gated() != self.gate.is_some() {
            return refuse("the activation does not fit the matrices");
        }
        if !self.gate.iter().chain([&self.up]).all(|matrix| takes(matrix, self.n_embd)) {
            return refuse("rows of gate or up are not whole blocks of their type");
        }
        if !takes(&self.down, self.n_ff) {
            return refuse("rows of down are not whole blocks of its type");
        }
        if self.n_embd.max(self.n_ff) > MOST_VALUES {
            return refuse("rows are longer than any model's");
        }
        Ok(())
    }

    /// Whether gate needs the inputs in another form than up does.
    pub(crate) fn gate_form_differs(&self) -> bool {
        self.gate.is_some_and(|gate| !gate.kernel.form.is(&self.up.kernel.form))
    }
}

/// More than any model has, small enough that sizes do not overflow.
const MOST_VALUES: usize = 1 << 20;

impl Job<'_> {
    /// Whether the lists fit each other. What the addresses hold is the caller's word.
    pub(crate) fn check(&self) -> Result<(), JobError> {
        self.shape.check()?;
        let pairs: usize = self.groups.iter().map(|group| group.pairs as usize).sum();
        if pairs != self.pairs.len() || self.groups.iter().any(|group| group.pairs == 0) {
            return Err(JobError::Unsupported("the groups do not cover the pairs"));
        }
        if pairs > MOST_PAIRS || self.pairs.iter().any(|pair| pair.input as usize >= MOST_PAIRS) {
            return Err(JobError::Unsupported("more pairs than a job takes"));
        }
        Ok(())
    }
}

/// The most pairs of a job, and rows of its inputs.
const MOST_PAIRS: usize = 1 << 16;
