//! The experts of a block by stock's own CPU graph: what the thread team is compared with.
//!
//! Owns: nothing that lasts; each call builds a graph in a context of its own and computes it with ggml's CPU backend.
//! Does not: use anything of the plugin but its view of ggml's tensors.

use core::ffi::{CStr, c_int};

use super::gen_api3 as api3;
use super::imports::host_symbol;
use crate::cpu::activation::Activation;

pub(crate) const F32: u32 = api3::GGML_TYPE_F32;

/// Types of weights, those that need an importance matrix among them.
pub(crate) const TYPES: [u32; 26] = [
    api3::GGML_TYPE_F32,
    api3::GGML_TYPE_F16,
    api3::GGML_TYPE_BF16,
    api3::GGML_TYPE_Q1_0,
    api3::GGML_TYPE_Q2_0,
    api3::GGML_TYPE_Q4_0,
    api3::GGML_TYPE_Q4_1,
    api3::GGML_TYPE_Q5_0,
    api3::GGML_TYPE_Q5_1,
    api3::GGML_TYPE_Q8_0,
    api3::GGML_TYPE_Q2_K,
    api3::GGML_TYPE_Q3_K,
    api3::GGML_TYPE_Q4_K,
    api3::GGML_TYPE_Q5_K,
    api3::GGML_TYPE_Q6_K,
    api3::GGML_TYPE_IQ2_XXS,
    api3::GGML_TYPE_IQ2_XS,
    api3::GGML_TYPE_IQ2_S,
    api3::GGML_TYPE_IQ3_XXS,
    api3::GGML_TYPE_IQ3_S,
    api3::GGML_TYPE_IQ1_S,
    api3::GGML_TYPE_IQ1_M,
    api3::GGML_TYPE_IQ4_NL,
    api3::GGML_TYPE_IQ4_XS,
    api3::GGML_TYPE_MXFP4,
    api3::GGML_TYPE_NVFP4,
];

pub(crate) const Q4_K: u32 = api3::GGML_TYPE_Q4_K;
pub(crate) const Q6_K: u32 = api3::GGML_TYPE_Q6_K;
pub(crate) const Q8_0: u32 = api3::GGML_TYPE_Q8_0;
pub(crate) const MXFP4: u32 = api3::GGML_TYPE_MXFP4;
pub(crate) const IQ4_XS: u32 = api3::GGML_TYPE_IQ4_XS;
pub(crate) const TQ2_0: u32 = api3::GGML_TYPE_TQ2_0;

type Tensor = *mut api3::ggml_tensor;
type Context = *mut api3::ggml_context;

/// A function of the host.
///
/// # Safety
/// `F` is the type of the function of this name.
unsafe fn function<F: Copy>(name: &CStr) -> F {
    let address = host_symbol(name);
    assert!(!address.is_null(), "{name:?}");
    assert_eq!(size_of::<F>(), size_of_val(&address));
    // SAFETY: the caller's contract; both are addresses.
    unsafe { core::mem::transmute_copy(&address) }
}

/// The name of a type.
pub(crate) fn type_name(type_: u32) -> String {
    // SAFETY: a type of the host.
    let name = unsafe { (super::host().api.ggml_type_name)(type_) };
    // SAFETY: a static string.
    unsafe { super::host::text(name) }
}

/// Bytes of `count` values.
pub(crate) fn row_bytes(type_: u32, count: usize) -> usize {
    super::host().row_size(type_, i64::try_from(count).unwrap())
}

/// Types whose quantization takes the host seconds to prepare, and where the scale of a block lies: in its first two bytes, or in the
/// upper halves of the odd ones of the last eight.
const SLOW: [(u32, bool); 7] = [
    (api3::GGML_TYPE_IQ2_XXS, true),
    (api3::GGML_TYPE_IQ2_XS, true),
    (api3::GGML_TYPE_IQ2_S, true),
    (api3::GGML_TYPE_IQ3_XXS, true),
    (api3::GGML_TYPE_IQ3_S, true),
    (api3::GGML_TYPE_IQ1_S, true),
    (api3::GGML_TYPE_IQ1_M, false),
];

/// Blocks of arbitrary bytes with a sane scale.
fn arbitrary(type_: u32, scale_first: bool, blocks: usize) -> Vec<u8> {
    let block = row_bytes(type_, 256);
    let mut bytes: Vec<u8> = (0..blocks * block).map(|index| u8::try_from(index * index % 251).unwrap()).collect();
    for block in bytes.chunks_mut(block) {
        if scale_first {
            block[1] = 0x2c;
        } else {
            let last = block.len() - 8;
            block[last..].iter_mut().skip(1).step_by(2).for_each(|byte| *byte = 0x20 | *byte & 0x0f);
        }
    }
    bytes
}

/// Rows of `count` values in a type, by the host's own quantization, or of arbitrary values where that would take long.
pub(crate) fn quantize(type_: u32, values: &[f32], count: usize) -> Vec<u8> {
    type Chunk = unsafe extern "C" fn(u32, *const f32, *mut u8, i64, i64, i64, *const f32) -> usize;
    if let Some(&(_, scale_first)) = SLOW.iter().find(|slow| slow.0 == type_) {
        return arbitrary(type_, scale_first, values.len() / 256);
    }
    // SAFETY: the type of the function in ggml.h.
    let chunk: Chunk = unsafe { function(c"ggml_quantize_chunk") };
    let rows = values.len() / count;
    let mut bytes = vec![0; rows * row_bytes(type_, count)];
    let importance = vec![1.0_f32; count];
    let (rows, count) = (i64::try_from(rows).unwrap(), i64::try_from(count).unwrap());
    // SAFETY: the values are there, the bytes have room for them, and the matrix has a value for each column.
    let written = unsafe { chunk(type_, values.as_ptr(), bytes.as_mut_ptr(), 0, rows, count, importance.as_ptr()) };
    assert_eq!(written, bytes.len());
    bytes
}

/// The experts of a block, for all pairs of a batch.
#[derive(Clone)]
pub(crate) struct Block {
    pub(crate) n_embd: usize,
    pub(crate) n_ff: usize,
    pub(crate) n_expert: usize,
    pub(crate) n_used: usize,
    pub(crate) n_tokens: usize,
    pub(crate) activation: Activation,
    /// Gate and up lie in one matrix of twice the rows, which is `up`.
    pub(crate) merged: bool,
    /// Type and bytes of all experts; gate where there is one of its own.
    pub(crate) gate: Option<(u32, Vec<u8>)>,
    pub(crate) up: (u32, Vec<u8>),
    pub(crate) down: (u32, Vec<u8>),
    /// A row for each expert; of twice the length for merged matrices.
    pub(crate) biases: [Option<Vec<f32>>; 3],
    /// A value for each expert.
    pub(crate) scales: [Option<Vec<f32>>; 3],
    /// A row for each token, or for each pair.
    pub(crate) x: Vec<f32>,
    /// The experts of each token.
    pub(crate) ids: Vec<i32>,
}

/// A graph under construction.
struct Builder {
    context: Context,
    /// Of the batch: used experts and tokens.
    pairs: (usize, usize),
    ids: Vec<i32>,
    ids_tensor: Tensor,
}

impl Builder {
    fn tensor<T: Copy>(&self, type_: u32, shape: [usize; 3], data: &[T]) -> Tensor {
        let [a, b, c] = shape.map(|value| i64::try_from(value).unwrap());
        // SAFETY: a context with memory for tensors and their data.
        let tensor = unsafe { (super::host().api.ggml_new_tensor_3d)(self.context, type_, a, b, c) };
        // SAFETY: a new tensor.
        assert_eq!(size_of_val(data), unsafe { (super::host().api.ggml_nbytes)(tensor) });
        // SAFETY: as above.
        let target = unsafe { (*tensor).data };
        // SAFETY: the tensor's data has the size that was just compared.
        unsafe { core::ptr::copy_nonoverlapping(data.as_ptr().cast::<u8>(), target.cast(), size_of_val(data)) };
        tensor
    }

    fn one(&self, name: &CStr, a: Tensor) -> Tensor {
        // SAFETY: the names below are functions of this type.
        let function: unsafe extern "C" fn(Context, Tensor) -> Tensor = unsafe { function(name) };
        // SAFETY: tensors of this context.
        unsafe { function(self.context, a) }
    }

    fn two(&self, name: &CStr, a: Tensor, b: Tensor) -> Tensor {
        // SAFETY: the names below are functions of this type.
        let function: unsafe extern "C" fn(Context, Tensor, Tensor) -> Tensor = unsafe { function(name) };
        // SAFETY: tensors of this context.
        unsafe { function(self.context, a, b) }
    }

    fn three(&self, name: &CStr, a: Tensor, b: Tensor, c: Tensor) -> Tensor {
        type Three = unsafe extern "C" fn(Context, Tensor, Tensor, Tensor) -> Tensor;
        // SAFETY: the names below are functions of this type.
        let function: Three = unsafe { function(name) };
        // SAFETY: tensors of this context.
        unsafe { function(self.context, a, b, c) }
    }

    fn clamp(&self, a: Tensor, least: f32, most: f32) -> Tensor {
        type Clamp = unsafe extern "C" fn(Context, Tensor, f32, f32) -> Tensor;
        // SAFETY: the type of the function in ggml.h.
        let function: Clamp = unsafe { function(c"ggml_clamp") };
        // SAFETY: a tensor of this context.
        unsafe { function(self.context, a, least, most) }
    }

    /// A product with the experts' matrices, and what follows it.
    fn product(
        &self,
        weights: &(u32, Vec<u8>),
        shape: [usize; 3],
        x: Tensor,
        scale: Option<&Vec<f32>>,
        bias: Option<&Vec<f32>>,
    ) -> Tensor {
        let matrix = self.tensor(weights.0, shape, &weights.1);
        let mut result = self.three(c"ggml_mul_mat_id", matrix, x, self.ids_tensor);
        if let Some(scale) = scale {
            let of_pairs: Vec<f32> = self.ids.iter().map(|&id| scale[usize::try_from(id).unwrap()]).collect();
            let scale = self.tensor(F32, [1, self.pairs.0, self.pairs.1], &of_pairs);
            result = self.two(c"ggml_mul", result, scale);
        }
        if let Some(bias) = bias {
            let bias = self.tensor(F32, [shape[1], shape[2], 1], bias);
            result = self.three(c"ggml_add_id", result, bias, self.ids_tensor);
        }
        result
    }

    fn activation(&self, activation: Activation, gate: Tensor, up: Tensor) -> Tensor {
        match activation {
            Activation::Swiglu => self.two(c"ggml_swiglu_split", gate, up),
            Activation::Geglu => self.two(c"ggml_geglu_split", gate, up),
            Activation::GegluErf => self.two(c"ggml_geglu_erf_split", gate, up),
            Activation::GegluQuick => self.two(c"ggml_geglu_quick_split", gate, up),
            Activation::Reglu => self.two(c"ggml_reglu_split", gate, up),
            Activation::SwigluOai { alpha, limit } => {
                type Oai = unsafe extern "C" fn(Context, Tensor, Tensor, f32, f32) -> Tensor;
                // SAFETY: the type of the function in ggml.h.
                let function: Oai = unsafe { function(c"ggml_swiglu_oai") };
                // SAFETY: tensors of this context.
                unsafe { function(self.context, gate, up, alpha, limit) }
            }
            Activation::SwigluClamp { limit } => {
                type Clamp = unsafe extern "C" fn(Context, Tensor, Tensor, f32) -> Tensor;
                // SAFETY: the type of the function in ggml.h.
                let function: Clamp = unsafe { function(c"ggml_swiglu_clamp") };
                // SAFETY: tensors of this context.
                unsafe { function(self.context, gate, up, limit) }
            }
            Activation::SwigluLimited { limit } => {
                let up = self.clamp(up, -limit, limit);
                let gate = self.clamp(self.one(c"ggml_silu", gate), f32::NEG_INFINITY, limit);
                self.two(c"ggml_mul", gate, up)
            }
            Activation::Silu => self.one(c"ggml_silu", up),
            Activation::Gelu => self.one(c"ggml_gelu", up),
            Activation::GeluErf => self.one(c"ggml_gelu_erf", up),
            Activation::GeluQuick => self.one(c"ggml_gelu_quick", up),
            Activation::Relu => self.one(c"ggml_relu", up),
            Activation::ReluSqr => self.one(c"ggml_sqr", self.one(c"ggml_relu", up)),
        }
    }

    /// Half of the rows of merged gate and up.
    fn half(&self, merged: Tensor, n_ff: usize, second: bool) -> Tensor {
        type View = unsafe extern "C" fn(Context, Tensor, i64, i64, i64, usize, usize, usize) -> *mut api3::ggml_tensor;
        // SAFETY: the type of the function in ggml.h.
        let view: View = unsafe { function(c"ggml_view_3d") };
        // SAFETY: a tensor of this context.
        let api3::ggml_tensor { ne, nb, .. } = unsafe { merged.read() };
        let (width, offset) = (i64::try_from(n_ff).unwrap(), if second { n_ff * size_of::<f32>() } else { 0 });
        // SAFETY: the view lies within the tensor.
        unsafe { view(self.context, merged, width, ne[1], ne[2], nb[1], nb[2], offset) }
    }
}

impl Block {
    /// The outputs of all pairs, token by token, by a graph on ggml's CPU backend.
    pub(crate) fn compute(&self) -> Vec<f32> {
        let tensors = 64 * 1024 + self.x.len() * 64 + self.up.1.len() + self.down.1.len();
        let biases = self.biases.iter().flatten().map(|bias| bias.len() * 4).sum::<usize>();
        let values = self.ids.len() * (self.n_ff * 8 + self.n_embd * 4) * 4;
        let mem_size = (tensors + biases + values) * 2 + self.gate.as_ref().map_or(0, |gate| gate.1.len()) + (4 << 20);
        let api = &super::host().api;
        let params = api3::ggml_init_params { mem_size, mem_buffer: core::ptr::null_mut(), no_alloc: false };
        // SAFETY: plain parameters; the context takes its own memory.
        let context = unsafe { (api.ggml_init)(params) };
        assert!(!context.is_null());
        let pairs = (self.n_used, self.n_tokens);
        let mut build = Builder { context, pairs, ids: self.ids.clone(), ids_tensor: core::ptr::null_mut() };
        build.ids_tensor = build.tensor(api3::GGML_TYPE_I32, [self.n_used, self.n_tokens, 1], &self.ids);
        let rows = self.x.len() / self.n_embd / self.n_tokens;
        let x = build.tensor(F32, [self.n_embd, rows, self.n_tokens], &self.x);
        let [b_gate, b_up, b_down] = self.biases.each_ref().map(Option::as_ref);
        let [s_gate, s_up, s_down] = self.scales.each_ref().map(Option::as_ref);
        let shape = [self.n_embd, self.n_ff * if self.merged { 2 } else { 1 }, self.n_expert];
        let up = build.product(&self.up, shape, x, s_up, b_up);
        let (gate, up) = if self.merged {
            (build.half(up, self.n_ff, false), build.half(up, self.n_ff, true))
        } else {
            let gate = self.gate.as_ref().map(|gate| build.product(gate, shape, x, s_gate, b_gate));
            (gate.unwrap_or(up), up)
        };
        let hidden = build.activation(self.activation, gate, up);
        let result = build.product(&self.down, [self.n_ff, self.n_embd, self.n_expert], hidden, s_down, b_down);
        // SAFETY: a context with room for a graph.
        let graph = unsafe { (api.ggml_new_graph_custom)(context, 64, false) };
        // SAFETY: a tensor of the same context.
        unsafe { (api.ggml_build_forward_expand)(graph, result) };
        type Compute = unsafe extern "C" fn(Context, *mut api3::ggml_cgraph, c_int) -> c_int;
        // SAFETY: the type of the function in ggml-cpu.h.
        let compute: Compute = unsafe { function(c"ggml_graph_compute_with_ctx") };
        // SAFETY: a graph of this context.
        assert_eq!(unsafe { compute(context, graph, 1) }, api3::GGML_STATUS_SUCCESS);
        let mut out = vec![0.0; self.ids.len() * self.n_embd];
        // SAFETY: the graph's result.
        let data = unsafe { (*result).data };
        // SAFETY: the result is contiguous and has this many values.
        unsafe { core::ptr::copy_nonoverlapping(data.cast(), out.as_mut_ptr(), out.len()) };
        // SAFETY: nothing of the context is used any more.
        unsafe { (api.ggml_free)(context) };
        out
    }
}
