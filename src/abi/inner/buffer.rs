//! Buffer types and buffers of the inner device, and the passports that its code accepts.

use core::ffi::{CStr, c_char, c_void};
use core::ptr::NonNull;

use super::super::exceptions;
use super::super::gen_api3 as api3;
use super::super::host::host;
use super::super::layout::{Words, field};
use super::super::tensor::Tensor;
use crate::gpu::Rows;

/// A buffer type of the inner device. Buffer types live as long as the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferType(pub(super) NonNull<api3::ggml_backend_buffer_type>);

// SAFETY: immutable and immortal, called from any thread by ggml's contract.
unsafe impl Send for BufferType {}
// SAFETY: as above.
unsafe impl Sync for BufferType {}

impl BufferType {
    pub(in crate::abi) fn as_ptr(&self) -> *mut api3::ggml_backend_buffer_type {
        self.0.as_ptr()
    }

    /// Its name.
    pub(crate) fn name(&self) -> String {
        type GetName = unsafe extern "C" fn(*mut api3::ggml_backend_buffer_type) -> *const c_char;
        let layout = host().layout;
        let Some(slot) = layout.buffer_type_slots.get_name else { return String::new() };
        // SAFETY: a buffer type of the host's layout holds a function there, which every type has.
        let function = unsafe { field::<Option<GetName>>(self.as_ptr().cast(), layout.buffer_type.iface + slot) };
        // SAFETY: the type's own function, asked of the type.
        let name = function.map_or(core::ptr::null(), |function| unsafe { function(self.as_ptr()) });
        if name.is_null() {
            return String::new();
        }
        // SAFETY: names are C strings that live as long as the type.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    /// Alignment of tensors in bytes; at least 1.
    pub(crate) fn alignment(&self) -> usize {
        // SAFETY: a valid buffer type.
        unsafe { (host().api.ggml_backend_buft_get_alignment)(self.as_ptr()) }.max(1)
    }

    /// Whether the memory is the host's, so that the device reaches all of the host's.
    pub(crate) fn is_host(&self) -> bool {
        // SAFETY: a valid buffer type.
        unsafe { (host().api.ggml_backend_buft_is_host)(self.as_ptr()) }
    }

    /// Largest buffer in bytes.
    pub(crate) fn max_size(&self) -> usize {
        // SAFETY: a valid buffer type.
        unsafe { (host().api.ggml_backend_buft_get_max_size)(self.as_ptr()) }
    }

    /// Bytes that a tensor takes, padding and scratch included.
    pub(crate) fn alloc_size(&self, tensor: Tensor<'_>) -> usize {
        // SAFETY: a valid buffer type and a valid tensor.
        unsafe { (host().api.ggml_backend_buft_get_alloc_size)(self.as_ptr(), tensor.as_ptr()) }
    }

    /// An immortal buffer object of this type without memory, for memory that is not ggml's.
    pub(crate) fn passport(&self) -> Option<Passport> {
        let host = host();
        let table = Words::zeroed(host.layout.buffer.iface_size);
        let function = host.api.ggml_backend_buffer_init;
        // SAFETY: the host's function, called through the row of the host's layout with an empty table; nothing is freed by it.
        let buffer =
            unsafe { (host.layout.buffer_init)(function, self.as_ptr().cast(), &table, core::ptr::null_mut(), 0) };
        (!buffer.is_null()).then(|| Passport(buffer.cast()))
    }

    /// Allocates; `None` when there is no memory or for zero bytes.
    pub(crate) fn alloc(&self, bytes: usize) -> Option<Buffer> {
        if bytes == 0 {
            return None;
        }
        // SAFETY: a valid buffer type.
        let pointer = NonNull::new(unsafe { exceptions::alloc_buffer(self.as_ptr(), bytes) })?;
        // SAFETY: a valid buffer of more than zero bytes.
        let base = unsafe { (host().api.ggml_backend_buffer_get_base)(pointer.as_ptr()) }.addr();
        Some(Buffer { pointer, base, bytes })
    }
}

/// Memory of the inner device.
#[derive(Debug)]
pub(crate) struct Buffer {
    pointer: NonNull<api3::ggml_backend_buffer>,
    base: usize,
    bytes: usize,
}

// SAFETY: the pointer is owned; ggml's buffer functions are called from any thread by its contract.
unsafe impl Send for Buffer {}
// SAFETY: as above; concurrent accesses to the same bytes are the host's to order, as for its own buffers.
unsafe impl Sync for Buffer {}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: owned, freed once.
        unsafe { (host().api.ggml_backend_buffer_free)(self.pointer.as_ptr()) };
    }
}

impl Buffer {
    pub(in crate::abi) fn as_ptr(&self) -> *mut api3::ggml_backend_buffer {
        self.pointer.as_ptr()
    }

    /// Address of the first byte, in the inner device's own terms.
    pub(crate) fn base(&self) -> usize {
        self.base
    }

    /// Size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// What the inner backend's code accepts as the place of this memory.
    pub(crate) fn passport(&self) -> Passport {
        Passport(self.as_ptr())
    }
}

/// A buffer object of the inner backend, shown to its code as the place of a tensor. Its code looks at the type of the buffer and, for
/// some devices, at its context; never at its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Passport(*mut api3::ggml_backend_buffer);

// SAFETY: a name for a buffer object whose owner outlives every use (a buffer of the inner device, or an immortal empty one).
unsafe impl Send for Passport {}
// SAFETY: as above.
unsafe impl Sync for Passport {}

impl Passport {
    /// No buffer: for drivers that the inner backend never sees.
    #[cfg(test)]
    pub(crate) fn none() -> Self {
        Self(core::ptr::null_mut())
    }

    pub(in crate::abi) fn as_ptr(self) -> *mut api3::ggml_backend_buffer {
        self.0
    }

    /// A byte tensor at an address, for the inner backend's eyes only.
    pub(super) fn shim(self, address: usize, bytes: usize) -> api3::ggml_tensor {
        let extent = i64::try_from(bytes).unwrap_or(i64::MAX);
        api3::ggml_tensor {
            type_: api3::GGML_TYPE_I8,
            buffer: self.0,
            ne: [extent, 1, 1, 1],
            nb: [1, bytes, bytes, bytes],
            op: host().ops.none,
            op_params: [0; 16],
            flags: 0,
            src: [core::ptr::null_mut(); 10],
            view_src: core::ptr::null_mut(),
            view_offs: 0,
            data: core::ptr::without_provenance_mut(address),
            name: [0; 64],
            extra: core::ptr::null_mut(),
            padding: [0; 8],
        }
    }

    /// A copy of a tensor of the host that lies in memory with this passport.
    pub(super) fn tensor_shim(self, tensor: Tensor<'_>) -> api3::ggml_tensor {
        let mut shim = tensor.clone_raw();
        shim.buffer = self.0;
        shim.view_src = core::ptr::null_mut();
        shim.view_offs = 0;
        shim
    }

    /// Copies rows from the host through ggml.
    ///
    /// # Safety
    /// This names a real buffer of the inner device and every row of the target lies in it; every row of the source is readable.
    pub(crate) unsafe fn write(self, address: usize, source: *const c_void, rows: Rows) {
        let mut shim = self.shim(address, rows.extent());
        let api = &host().api;
        if let Some(set) = api.ggml_backend_tensor_set_2d {
            // SAFETY: the shim spans exactly the rows; the rest is the caller's contract.
            return unsafe { set(&raw mut shim, source, 0, rows.size, rows.count, rows.stride, rows.host_stride) };
        }
        for row in 0..rows.count {
            let source = source.wrapping_byte_add(row * rows.host_stride);
            // SAFETY: as above, row by row.
            unsafe { (api.ggml_backend_tensor_set)(&raw mut shim, source, row * rows.stride, rows.size) };
        }
    }

    /// Copies rows to the host through ggml.
    ///
    /// # Safety
    /// As for [`Passport::write`], the other way round.
    pub(crate) unsafe fn read(self, address: usize, target: *mut c_void, rows: Rows) {
        let shim = self.shim(address, rows.extent());
        let api = &host().api;
        if let Some(get) = api.ggml_backend_tensor_get_2d {
            // SAFETY: the shim spans exactly the rows; the rest is the caller's contract.
            return unsafe { get(&raw const shim, target, 0, rows.size, rows.count, rows.stride, rows.host_stride) };
        }
        for row in 0..rows.count {
            let target = target.wrapping_byte_add(row * rows.host_stride);
            // SAFETY: as above, row by row.
            unsafe { (api.ggml_backend_tensor_get)(&raw const shim, target, row * rows.stride, rows.size) };
        }
    }

    /// Sets bytes through ggml.
    ///
    /// # Safety
    /// This names a real buffer of the inner device and the range lies in it.
    pub(crate) unsafe fn fill(self, address: usize, value: u8, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let mut shim = self.shim(address, bytes);
        // SAFETY: the shim spans exactly the bytes; the rest is the caller's contract.
        unsafe { (host().api.ggml_backend_tensor_memset)(&raw mut shim, value, 0, bytes) };
    }

    /// Copies between two buffers of the inner device, on the device; false if it cannot.
    ///
    /// # Safety
    /// Both name real buffers of the inner device and the ranges lie in them.
    pub(crate) unsafe fn copy(from: (Self, usize), to: (Self, usize), bytes: usize) -> bool {
        let source = from.0.shim(from.1, bytes);
        let mut target = to.0.shim(to.1, bytes);
        // SAFETY: valid shims by the caller's contract.
        unsafe { (host().api.ggml_backend_buffer_copy_tensor)(&raw const source, &raw mut target) }
    }
}
