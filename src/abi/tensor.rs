//! Tensors of the host, read through checked views.
//!
//! Invariants: a [`Tensor`] is a valid tensor of the host for the lifetime that its maker vouched for; only metadata is read
//! through it, never its data. Two things write: [`Patch`], which puts another source into a node and takes it back, and
//! [`Tensor::move_to`], for a weight while it is loaded.
//! Threads: the thread that runs the slot; the host does not touch a graph meanwhile.

use core::marker::PhantomData;
use core::ptr::NonNull;

use super::gen_api3 as api3;
use super::host::{host, text};
use super::ops::OpClass;
use crate::graph::slices::Work;
use crate::graph::{IdsKey, TensorKey};

/// Identity of a buffer type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferTypeKey(pub(super) usize);

/// A tensor of the host.
#[derive(Clone, Copy)]
pub(crate) struct Tensor<'a> {
    pointer: NonNull<api3::ggml_tensor>,
    life: PhantomData<&'a api3::ggml_tensor>,
}

/// The buffer that holds a tensor's data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BufferInfo {
    /// The type of the buffer.
    pub(crate) type_: BufferTypeKey,
    /// Whether it holds no memory and was given no use: the loader's question whether a weight could lie there.
    pub(crate) is_probe: bool,
}

impl<'a> Tensor<'a> {
    /// Wraps a tensor; `None` for null.
    ///
    /// # Safety
    /// `pointer` is null or a valid tensor of the host for `'a`, as are its sources, and nobody writes their metadata during `'a`
    /// except through [`Patch`].
    pub(super) unsafe fn new(pointer: *const api3::ggml_tensor) -> Option<Self> {
        NonNull::new(pointer.cast_mut()).map(|pointer| Self { pointer, life: PhantomData })
    }

    /// A tensor that is known to be complete.
    ///
    /// # Safety
    /// As for [`Tensor::new`].
    pub(super) unsafe fn from_ref(tensor: &'a api3::ggml_tensor) -> Self {
        Self { pointer: NonNull::from(tensor), life: PhantomData }
    }

    fn raw(&self) -> &api3::ggml_tensor {
        // SAFETY: valid for `'a` by the constructor's contract; the borrow ends before any Patch can write.
        unsafe { self.pointer.as_ref() }
    }

    pub(super) fn as_ptr(&self) -> *mut api3::ggml_tensor {
        self.pointer.as_ptr()
    }

    /// A copy of the metadata, for a private variant of the tensor.
    pub(super) fn clone_raw(&self) -> api3::ggml_tensor {
        *self.raw()
    }

    pub(crate) fn key(&self) -> TensorKey {
        TensorKey(self.pointer.addr().get())
    }

    /// The name; at most 63 bytes.
    pub(crate) fn name(&self) -> String {
        let name = &self.raw().name;
        let bytes: Vec<u8> = name.iter().take_while(|&&c| c != 0).map(|&c| c.to_ne_bytes()[0]).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub(crate) fn op_class(&self) -> OpClass {
        host().ops.class(self.raw().op)
    }

    /// What the op does to the rows of its sources.
    pub(crate) fn work(&self) -> Work {
        host().ops.work(self.raw().op)
    }

    /// The op's name, or that of the function that the op applies (`UNARY` and `GLU`).
    pub(crate) fn description(&self) -> String {
        // SAFETY: a valid tensor.
        let description = unsafe { (host().api.ggml_op_desc)(self.as_ptr()) };
        // SAFETY: descriptions are static C strings of the host.
        unsafe { text(description) }
    }

    /// A parameter of the op.
    pub(crate) fn parameter(&self, index: usize) -> i32 {
        self.raw().op_params.get(index).copied().unwrap_or(0)
    }

    /// A parameter of the op that is a float.
    pub(crate) fn parameter_f32(&self, index: usize) -> f32 {
        f32::from_bits(self.parameter(index).cast_unsigned())
    }

    /// Bytes from the start of the viewed tensor.
    pub(crate) fn view_offset(&self) -> usize {
        self.raw().view_offs
    }

    /// Whether its elements lie one behind the other, in order.
    pub(crate) fn is_contiguous(&self) -> bool {
        // SAFETY: a valid tensor; a pure function.
        unsafe { (host().api.ggml_is_contiguous)(self.as_ptr()) }
    }

    pub(crate) fn type_(&self) -> u32 {
        self.raw().type_
    }

    /// Whether it has no elements.
    pub(crate) fn is_empty(&self) -> bool {
        self.ne().contains(&0)
    }

    /// Elements per dimension.
    pub(crate) fn ne(&self) -> [i64; 4] {
        self.raw().ne
    }

    /// Bytes from one element, row, matrix to the next.
    pub(crate) fn nb(&self) -> [usize; 4] {
        self.raw().nb
    }

    /// Whether a backend has to run this node at all.
    pub(crate) fn is_computed(&self) -> bool {
        let flagged = self.raw().flags.cast_unsigned() & api3::GGML_TENSOR_FLAG_COMPUTE != 0;
        flagged || !host().graph_facts.has_compute_flag
    }

    /// Whether the host means to read it after the graph.
    pub(crate) fn is_output(&self) -> bool {
        self.raw().flags.cast_unsigned() & api3::GGML_TENSOR_FLAG_OUTPUT != 0
    }

    /// Bytes from the first to behind the last element, strides included.
    pub(crate) fn bytes(&self) -> usize {
        // SAFETY: a valid tensor; a pure function.
        unsafe { (host().api.ggml_nbytes)(self.as_ptr()) }
    }

    /// Address of the data; 0 when it has none. Meaningful to the device that owns the buffer only.
    pub(crate) fn data(&self) -> usize {
        self.raw().data.addr()
    }

    /// Gives the tensor another place in its buffer.
    ///
    /// # Safety
    /// `address` lies in the tensor's buffer with room for all of it; no view of it was placed yet, and nobody else reads it meanwhile.
    pub(super) unsafe fn move_to(&self, address: *mut core::ffi::c_void) {
        // SAFETY: a valid tensor; no reference to it is held here.
        unsafe { (*self.pointer.as_ptr()).data = address };
    }

    /// A source of the op.
    pub(crate) fn source(&self, index: usize) -> Option<Tensor<'a>> {
        let source = self.raw().src.get(index).copied()?;
        // SAFETY: sources are null or valid for `'a` by the constructor's contract.
        unsafe { Tensor::new(source) }
    }

    /// All sources that are set.
    pub(crate) fn sources(&self) -> impl Iterator<Item = Tensor<'a>> + use<'a> {
        let this = *self;
        (0..api3::GGML_MAX_SRC as usize).filter_map(move |index| this.source(index))
    }

    /// The tensor that owns the data, if this is a view.
    pub(crate) fn viewed(&self) -> Option<Tensor<'a>> {
        // SAFETY: null or valid for `'a` by the constructor's contract.
        unsafe { Tensor::new(self.raw().view_src) }
    }

    /// The tensor that owns the data: what is viewed, or itself.
    pub(crate) fn owner(&self) -> Tensor<'a> {
        self.viewed().unwrap_or(*self)
    }

    /// Identity of this tensor as an id operand.
    pub(crate) fn ids_key(&self) -> IdsKey {
        let offset = if self.viewed().is_some() { self.raw().view_offs } else { 0 };
        let [used, tokens, ..] = self.ne();
        let [id_stride, token_stride, ..] = self.nb();
        IdsKey { owner: self.owner().key(), offset, used, tokens, id_stride, token_stride }
    }

    pub(super) fn raw_buffer(&self) -> *mut api3::ggml_backend_buffer {
        self.owner().raw().buffer
    }

    /// What is known of the buffer that holds the data; `None` before the tensor is placed.
    pub(crate) fn buffer(&self) -> Option<BufferInfo> {
        let buffer = self.raw_buffer();
        if buffer.is_null() {
            return None;
        }
        let api = &host().api;
        // SAFETY: the buffer of a placed tensor is valid.
        let type_ = BufferTypeKey(unsafe { (api.ggml_backend_buffer_get_type)(buffer) }.addr());
        // SAFETY: as above.
        let is_empty = unsafe { (api.ggml_backend_buffer_get_size)(buffer) } == 0;
        // SAFETY: as above.
        let usage = unsafe { (api.ggml_backend_buffer_get_usage)(buffer) };
        let is_probe = is_empty && usage == api3::GGML_BACKEND_BUFFER_USAGE_ANY;
        Some(BufferInfo { type_, is_probe })
    }

    /// The object behind the buffer, if it is one of ours.
    pub(crate) fn our_buffer(&self) -> Option<&'a crate::buffer::Buffer> {
        super::slots::buffer::of_raw(self.raw_buffer())
    }
}

impl core::fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        // SAFETY: op names are static C strings of the host; the op came from a tensor of the host.
        let op = unsafe { (host().api.ggml_op_name)(self.raw().op) };
        // SAFETY: as above.
        let op = unsafe { text(op) };
        write!(f, "{op} \"{}\" {:?}", self.name(), self.ne())
    }
}

/// A private weight tensor that a node reads instead of the host's, until dropped.
///
/// Dropping restores the host's node, so no error path can leave a node patched.
pub(crate) struct Patch<'a> {
    node: Tensor<'a>,
    index: usize,
    original: *mut api3::ggml_tensor,
    // Boxed because the node points to it while the patch lives; taken when it is retired.
    replacement: Option<Box<api3::ggml_tensor>>,
}

/// Where a patched source lies and how it is laid out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Replacement {
    pub(crate) address: usize,
    pub(crate) buffer: super::inner::Passport,
    /// Elements per dimension.
    pub(crate) ne: [i64; 4],
    /// Bytes from one element, row, matrix to the next.
    pub(crate) nb: [usize; 4],
}

/// What a node read while it was patched. No node points to it any more, but an inner backend may (Vulkan's does) until it is synchronized.
pub(crate) struct Retired {
    _tensor: Box<api3::ggml_tensor>,
}

impl Retired {
    pub(super) fn new(tensor: Box<api3::ggml_tensor>) -> Self {
        Self { _tensor: tensor }
    }
}

// SAFETY: only kept to be freed; its pointers are not followed.
unsafe impl Send for Retired {}

impl core::fmt::Debug for Retired {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Retired")
    }
}

impl<'a> Patch<'a> {
    /// Makes `node` read a copy of its source `index` whose data lies at `address` in memory with that passport; shape and strides stay.
    pub(crate) fn new(node: Tensor<'a>, index: usize, address: usize, buffer: super::inner::Passport) -> Option<Self> {
        let source = node.source(index)?;
        Self::with(node, index, Replacement { address, buffer, ne: source.ne(), nb: source.nb() })
    }

    /// Restores the node, and keeps what it read for as long as the result lives.
    pub(crate) fn retire(mut self) -> Option<Retired> {
        self.replacement.take().map(|tensor| Retired { _tensor: tensor })
    }

    /// Makes `node` read a tensor of ours as its source `index`; it must live until the node is restored.
    pub(crate) fn to(node: Tensor<'a>, index: usize, own: &super::own::OwnTensor) -> Option<Self> {
        let original = node.source(index)?.as_ptr();
        let patch = Self { node, index, original, replacement: None };
        patch.put(own.tensor().as_ptr());
        Some(patch)
    }

    /// Makes `node` read other memory as its source `index`: a weight with another number of matrices, or ids.
    pub(crate) fn with(node: Tensor<'a>, index: usize, replacement: Replacement) -> Option<Self> {
        let source = node.source(index)?;
        let mut copy = source.clone_raw();
        copy.data = core::ptr::without_provenance_mut(replacement.address);
        copy.buffer = replacement.buffer.as_ptr();
        copy.view_src = core::ptr::null_mut();
        copy.view_offs = 0;
        copy.op = host().ops.none;
        copy.src = [core::ptr::null_mut(); api3::GGML_MAX_SRC as usize];
        copy.ne = replacement.ne;
        copy.nb = replacement.nb;
        let tensor = Box::new(copy);
        let pointer = core::ptr::from_ref(&*tensor).cast_mut();
        let patch = Self { node, index, original: source.as_ptr(), replacement: Some(tensor) };
        patch.put(pointer);
        Some(patch)
    }

    fn put(&self, source: *mut api3::ggml_tensor) {
        let node = self.node.as_ptr();
        // SAFETY: the node is valid, `index` was accepted by `source`, and the slot's thread is the only one that touches the
        // graph while the slot runs; no reference to the node is held here.
        unsafe { (*node).src[self.index] = source };
    }
}

impl Drop for Patch<'_> {
    fn drop(&mut self) {
        self.put(self.original);
    }
}

/// Reads a tensor list as the host passes it.
///
/// # Safety
/// `tensors` points to `count` valid tensor pointers for `'a` (or `count` is not positive).
pub(super) unsafe fn list<'a>(tensors: *mut *mut api3::ggml_tensor, count: i32) -> Vec<Tensor<'a>> {
    let count = usize::try_from(count).unwrap_or(0);
    if tensors.is_null() {
        return Vec::new();
    }
    (0..count)
        .filter_map(|index| {
            // SAFETY: inside the list by the caller's contract.
            let pointer = unsafe { tensors.wrapping_add(index).read() };
            // SAFETY: a valid tensor by the caller's contract.
            unsafe { Tensor::new(pointer) }
        })
        .collect()
}
