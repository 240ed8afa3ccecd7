//! Slots of a buffer. See `ggml_backend_buffer_i` in ggml-backend-impl.h.
//!
//! Uploads and fills cannot report a failure to the host, so a failure poisons the device: its next graph fails. A failed
//! read-back leaves zeros, never what happened to lie there.

use core::ffi::c_void;

use super::super::boundary::{Slot, guard};
use super::super::gen_api3 as api3;
use super::super::handle::{self, Kind, NotOurs};
use super::super::host::host;
use super::super::layout::{Words, field};
use super::super::tensor::{BufferTypeKey, Tensor};
use super::{behind, borrowed, buffer_type, put, reg};
use crate::buffer::{Buffer, BufferError, Place};
use crate::experts::mapped::will_need;
use crate::gpu::{self, Rows};

impl Kind for Buffer {
    const TAG: u64 = 0x4d6f_4542_7566_0004;
    const NAME: &'static str = "buffer";
}

#[derive(Debug, thiserror::Error)]
enum AccessError {
    #[error(transparent)]
    NotOurs(#[from] NotOurs),
    #[error(transparent)]
    Buffer(#[from] BufferError),
    #[error("the host passed no tensor")]
    NoTensor,
}

/// Hands memory of ours to the host. ggml allocates and frees the C object itself.
pub(super) fn make(
    memory: Buffer,
    buft: *mut api3::ggml_backend_buffer_type,
    size: usize,
) -> *mut api3::ggml_backend_buffer {
    let host = host();
    let (shape, slots) = (&host.layout.buffer, &host.layout.buffer_slots);
    let mut table = Words::zeroed(shape.iface_size);
    // The table goes by value, so its slots are at their own offsets, not behind the object's.
    let alone = super::ObjectShape { iface: 0, ..*shape };
    put!(table, alone, slots.free_buffer, free_buffer);
    put!(table, alone, slots.get_base, get_base);
    put!(table, alone, slots.init_tensor, init_tensor);
    put!(table, alone, slots.memset_tensor, memset_tensor);
    put!(table, alone, slots.set_tensor, set_tensor);
    put!(table, alone, slots.get_tensor, get_tensor);
    put!(table, alone, slots.set_tensor_2d, set_tensor_2d);
    put!(table, alone, slots.get_tensor_2d, get_tensor_2d);
    put!(table, alone, slots.cpy_tensor, cpy_tensor);
    put!(table, alone, slots.clear, clear);
    put!(table, alone, slots.reset, reset);
    let lent = inner_context(&memory);
    let handle = handle::new(memory);
    let context = lent.unwrap_or(handle);
    let function = host.api.ggml_backend_buffer_init;
    // SAFETY: the host's function, called through the row of the host's layout with a table of that layout.
    let buffer = unsafe { (host.layout.buffer_init)(function, buft.cast(), &table, context, size) }.cast();
    if lent.is_some() {
        borrowed::insert(buffer, handle);
    }
    buffer
}

/// The context of the inner buffer behind a buffer, where the inner backend's code needs to find it in ours.
fn inner_context(memory: &Buffer) -> Option<*mut c_void> {
    let inner = memory.memory().filter(|_| memory.device().lends_contexts())?.passport().as_ptr();
    // SAFETY: the passport of memory names a live buffer of the inner device, of the host's layout.
    Some(unsafe { field(inner.cast(), host().layout.buffer.context) })
}

/// The buffer behind a C object.
///
/// # Safety
/// `buffer` is null or a live buffer whose type is ours.
unsafe fn of<'a>(buffer: *mut api3::ggml_backend_buffer) -> Result<&'a Buffer, NotOurs> {
    // SAFETY: the caller's contract. A context that is the inner backend's own is readable and carries no tag of ours.
    let tagged = unsafe { behind(buffer.cast(), &host().layout.buffer) };
    match (tagged, borrowed::find(buffer)) {
        // SAFETY: the table holds handles of live buffers.
        (Err(_), Some(context)) => unsafe { handle::get(context) },
        (tagged, _) => tagged,
    }
}

/// The buffer behind any buffer of the host, if it is one of ours and holds memory.
pub(in crate::abi) fn of_raw<'a>(buffer: *mut api3::ggml_backend_buffer) -> Option<&'a Buffer> {
    if buffer.is_null() {
        return None;
    }
    // SAFETY: a tensor's buffer is valid while the tensor is.
    let type_ = unsafe { (host().api.ggml_backend_buffer_get_type)(buffer) };
    // SAFETY: a buffer of our type carries our handle, or none if it holds no memory. ggml may make a buffer of buffers with our type;
    // its context is ggml's own, readable, and carries no tag of ours.
    reg::owns(BufferTypeKey(type_.addr())).then(|| unsafe { of(buffer) }.ok()).flatten()
}

/// All bytes of a tensor, strides included, brought to the host; `None` if it does not lie in a buffer of ours or of the host's
/// own kind. The stream that computes it must be idle.
pub(crate) fn download(tensor: Tensor<'_>) -> Option<Vec<u8>> {
    let mut bytes = vec![0_u8; tensor.bytes()];
    if bytes.is_empty() {
        return Some(bytes);
    }
    let target = bytes.as_mut_ptr().cast();
    if let Some(buffer) = tensor.our_buffer() {
        let place = buffer.place(tensor, 0, bytes.len()).ok()?;
        // SAFETY: the vector holds the place's bytes.
        unsafe { read(buffer, place, target, Rows::one(bytes.len())) }.ok()?;
    } else if tensor.raw_buffer().is_null() || tensor.data() == 0 {
        return None;
    } else {
        // SAFETY: a placed tensor of the host, read whole into a vector of its size.
        unsafe { (host().api.ggml_backend_tensor_get)(tensor.as_ptr(), target, 0, bytes.len()) };
    }
    Some(bytes)
}

/// Copies rows out of a buffer. The place spans them.
///
/// # Safety
/// Every row of the target is writable.
unsafe fn read(buffer: &Buffer, place: Place, target: *mut c_void, rows: Rows) -> Result<(), BufferError> {
    buffer.holds(place, rows)?;
    if let Some(memory) = buffer.memory() {
        let driver = buffer.device().driver();
        // SAFETY: a `Place` lies in its buffer; the target is the caller's, and is waited for here.
        unsafe { driver.download(target, gpu::Place { memory, address: place.address }, rows) }?;
        driver.synchronize()?;
    } else if let Some(memory) = buffer.host() {
        for row in 0..rows.count {
            let target = target.wrapping_byte_add(row * rows.host_stride);
            // SAFETY: the target is the caller's.
            unsafe { memory.read(place.address + row * rows.stride, target, rows.size) };
        }
    }
    Ok(())
}

/// Copies rows into a buffer. The place spans them.
///
/// # Safety
/// Every row of the source is readable.
unsafe fn write(buffer: &Buffer, place: Place, source: *const c_void, rows: Rows) -> Result<(), BufferError> {
    if !buffer.makes_writable(place)? {
        return Ok(());
    }
    if let Some(memory) = buffer.memory() {
        let driver = buffer.device().driver();
        // SAFETY: a `Place` lies in its buffer; the source is the caller's.
        unsafe { driver.upload_taking(gpu::Place { memory, address: place.address }, source, rows) }?;
    } else if let Some(memory) = buffer.host() {
        for row in 0..rows.count {
            let source = source.wrapping_byte_add(row * rows.host_stride);
            // SAFETY: the source is the caller's.
            unsafe { memory.write(place.address + row * rows.stride, source, rows.size) }
                .map_err(|error| buffer.no_host_memory(rows.size, &error))?;
        }
    }
    Ok(())
}

/// Sets bytes of a tensor: copies them, or lets it show the file that they are part of.
///
/// # Safety
/// The source is readable for the place; nobody reads the tensor meanwhile.
unsafe fn set(buffer: &Buffer, tensor: Tensor<'_>, place: Place, source: *const c_void) -> Result<(), BufferError> {
    let shown = buffer.show_file(tensor, place, source.addr());
    let Some((address, memory)) = shown.zip(buffer.host()) else {
        if buffer.loads(tensor, place) {
            // A mapped file has experts in front of it and behind it, which page faults would read as well.
            will_need(source.addr(), place.bytes);
        }
        // SAFETY: the caller's contract.
        return unsafe { write(buffer, place, source, Rows::one(place.bytes)) };
    };
    let base = memory.as_ptr();
    // SAFETY: the address lies in the buffer, and `show_file` refuses tensors with views.
    unsafe { tensor.move_to(base.wrapping_byte_add(address - memory.address())) };
    Ok(())
}

/// Poisons the device of a buffer whose content the host can no longer trust.
///
/// # Safety
/// As for [`of`].
unsafe fn poison(buffer: *mut api3::ggml_backend_buffer) {
    // SAFETY: the caller's contract.
    if let Ok(buffer) = unsafe { of(buffer) } {
        buffer.device().poison();
    }
}

/// A tensor that the host passed.
///
/// # Safety
/// `tensor` is null or valid during `'a`.
unsafe fn given<'a>(tensor: *const api3::ggml_tensor) -> Result<Tensor<'a>, AccessError> {
    // SAFETY: the caller's contract.
    unsafe { Tensor::new(tensor) }.ok_or(AccessError::NoTensor)
}

unsafe extern "C" fn free_buffer(buffer: *mut api3::ggml_backend_buffer) {
    guard(
        Slot::BufferFreeBuffer,
        || (),
        || {
            // SAFETY: as in `get_base`; null and foreign buffers are refused here.
            unsafe { of(buffer) }?;
            let context = borrowed::remove(buffer).unwrap_or_else(|| {
                // SAFETY: `of` read the same field.
                unsafe { field(buffer.cast(), host().layout.buffer.context) }
            });
            // SAFETY: the host frees a buffer once and uses it no more.
            let memory = unsafe { handle::free::<Buffer>(context) }?;
            memory.device().bump_layout_epoch();
            Ok::<_, NotOurs>(())
        },
    );
}

unsafe extern "C" fn get_base(buffer: *mut api3::ggml_backend_buffer) -> *mut c_void {
    let known = || {
        // SAFETY: the host passes a live buffer of ours to its slot.
        let buffer = unsafe { of(buffer) }?;
        Ok::<_, NotOurs>(match buffer.host() {
            Some(memory) => memory.as_ptr(),
            None => core::ptr::without_provenance_mut(buffer.base()),
        })
    };
    // The host asserts that a buffer has a base, so a failure falls back to the same answer without the boundary.
    guard(Slot::BufferGetBase, || known().unwrap_or(core::ptr::null_mut()), known)
}

unsafe extern "C" fn init_tensor(
    buffer: *mut api3::ggml_backend_buffer,
    tensor: *mut api3::ggml_tensor,
) -> api3::ggml_status {
    guard(
        Slot::BufferInitTensor,
        || api3::GGML_STATUS_FAILED,
        || {
            // SAFETY: as in `get_base`.
            let memory = unsafe { of(buffer) }?;
            // SAFETY: the host passes a tensor that is valid during the call.
            let tensor = unsafe { given(tensor) }?;
            let api = &host().api;
            // SAFETY: a live buffer.
            let usage = unsafe { (api.ggml_backend_buffer_get_usage)(buffer) };
            // SAFETY: as above.
            let type_ = unsafe { (api.ggml_backend_buffer_get_type)(buffer) };
            // SAFETY: the type of a buffer of ours is ours.
            let role = unsafe { buffer_type::of(type_) }?.role;
            memory.init_tensor(tensor, role, usage == api3::GGML_BACKEND_BUFFER_USAGE_COMPUTE)?;
            Ok::<_, AccessError>(api3::GGML_STATUS_SUCCESS)
        },
    )
}

unsafe extern "C" fn memset_tensor(
    buffer: *mut api3::ggml_backend_buffer,
    tensor: *mut api3::ggml_tensor,
    value: u8,
    offset: usize,
    size: usize,
) {
    // SAFETY: as in `get_base`.
    guard(
        Slot::BufferMemsetTensor,
        || unsafe { poison(buffer) },
        || {
            // SAFETY: as in `get_base`.
            let memory = unsafe { of(buffer) }?;
            // SAFETY: as in `init_tensor`.
            let place = memory.place(unsafe { given(tensor) }?, offset, size)?;
            memory.fill(place, value)?;
            Ok::<_, AccessError>(())
        },
    );
}

unsafe extern "C" fn set_tensor(
    buffer: *mut api3::ggml_backend_buffer,
    tensor: *mut api3::ggml_tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    // SAFETY: as in `get_base`.
    guard(
        Slot::BufferSetTensor,
        || unsafe { poison(buffer) },
        || {
            // SAFETY: as in `get_base`.
            let memory = unsafe { of(buffer) }?;
            // SAFETY: as in `init_tensor`.
            let tensor = unsafe { given(tensor) }?;
            let place = memory.place(tensor, offset, size)?;
            // SAFETY: the host passes `size` readable bytes, and sets a tensor that nobody reads meanwhile.
            unsafe { set(memory, tensor, place, data) }?;
            Ok::<_, AccessError>(())
        },
    );
}

unsafe extern "C" fn get_tensor(
    buffer: *mut api3::ggml_backend_buffer,
    tensor: *const api3::ggml_tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    let failed = || {
        // SAFETY: the host passes `size` writable bytes.
        unsafe { zero(data, size) };
        // SAFETY: as in `get_base`.
        unsafe { poison(buffer) };
    };
    guard(Slot::BufferGetTensor, failed, || {
        // SAFETY: as in `get_base`.
        let memory = unsafe { of(buffer) }?;
        // SAFETY: as in `init_tensor`.
        let place = memory.place(unsafe { given(tensor) }?, offset, size)?;
        // SAFETY: the host passes `size` writable bytes.
        unsafe { read(memory, place, data, Rows::one(size)) }?;
        Ok::<_, AccessError>(())
    });
}

/// Zeroes memory of the host.
///
/// # Safety
/// `data` is null or writable for `size` bytes.
pub(super) unsafe fn zero(data: *mut c_void, size: usize) {
    if !data.is_null() {
        // SAFETY: the caller's contract.
        unsafe { data.cast::<u8>().write_bytes(0, size) };
    }
}

unsafe extern "C" fn set_tensor_2d(
    buffer: *mut api3::ggml_backend_buffer,
    tensor: *mut api3::ggml_tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
    copies: usize,
    stride_tensor: usize,
    stride_data: usize,
) {
    // SAFETY: as in `get_base`.
    guard(
        Slot::BufferSetTensor2d,
        || unsafe { poison(buffer) },
        || {
            // SAFETY: as in `get_base`.
            let memory = unsafe { of(buffer) }?;
            // SAFETY: as in `init_tensor`.
            let tensor = unsafe { given(tensor) }?;
            let rows = Rows { size, count: copies, stride: stride_tensor, host_stride: stride_data };
            if !rows.is_empty() {
                let place = memory.place(tensor, offset, rows.extent())?;
                // SAFETY: the host passes rows of `size` readable bytes, `stride_data` apart.
                unsafe { write(memory, place, data, rows) }?;
            }
            Ok::<_, AccessError>(())
        },
    );
}

unsafe extern "C" fn get_tensor_2d(
    buffer: *mut api3::ggml_backend_buffer,
    tensor: *const api3::ggml_tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
    copies: usize,
    stride_tensor: usize,
    stride_data: usize,
) {
    let failed = || {
        for row in 0..if data.is_null() { 0 } else { copies } {
            // SAFETY: the host passes rows of `size` writable bytes, `stride_data` apart.
            unsafe { zero(data.wrapping_byte_add(row.wrapping_mul(stride_data)), size) };
        }
        // SAFETY: as in `get_base`.
        unsafe { poison(buffer) };
    };
    guard(Slot::BufferGetTensor2d, failed, || {
        // SAFETY: as in `get_base`.
        let memory = unsafe { of(buffer) }?;
        // SAFETY: as in `init_tensor`.
        let tensor = unsafe { given(tensor) }?;
        let rows = Rows { size, count: copies, stride: stride_tensor, host_stride: stride_data };
        if !rows.is_empty() {
            let place = memory.place(tensor, offset, rows.extent())?;
            // SAFETY: the host passes rows of `size` writable bytes, `stride_data` apart.
            unsafe { read(memory, place, data, rows) }?;
        }
        Ok::<_, AccessError>(())
    });
}

/// False lets the host copy by way of its own memory.
unsafe extern "C" fn cpy_tensor(
    buffer: *mut api3::ggml_backend_buffer,
    src: *const api3::ggml_tensor,
    dst: *mut api3::ggml_tensor,
) -> bool {
    guard(
        Slot::BufferCpyTensor,
        || false,
        || {
            // SAFETY: as in `get_base`.
            let memory = unsafe { of(buffer) }?;
            // SAFETY: as in `init_tensor`.
            let (source, target) = (unsafe { given(src) }?, unsafe { given(dst) }?);
            copy_on_device(memory, source, target)
        },
    )
}

fn copy_on_device(memory: &Buffer, source: Tensor<'_>, target: Tensor<'_>) -> Result<bool, AccessError> {
    let bytes = source.bytes();
    let Some(from) = source.our_buffer() else {
        return Ok(false);
    };
    let from_device = from.device();
    if from_device.driver().name() != memory.device().driver().name() {
        return Ok(false);
    }
    let (Some(from_memory), Some(to_memory)) = (from.memory(), memory.memory()) else {
        return Ok(false);
    };
    let (to, at) = (memory.place(target, 0, bytes)?, from.place(source, 0, bytes)?);
    from.holds(at, Rows::one(bytes))?;
    if !memory.makes_writable(to)? {
        return Ok(true);
    }
    let to = gpu::Place { memory: to_memory, address: to.address };
    let from = gpu::Place { memory: from_memory, address: at.address };
    // What the source's device was given and has not finished yet belongs to the source.
    from_device.driver().synchronize().map_err(BufferError::from)?;
    let driver = memory.device().driver();
    let copied = driver.copy(to, from, bytes).map_err(BufferError::from)?;
    driver.synchronize().map_err(BufferError::from)?;
    Ok(copied)
}

unsafe extern "C" fn clear(buffer: *mut api3::ggml_backend_buffer, value: u8) {
    guard(
        Slot::BufferClear,
        // SAFETY: as in `get_base`.
        || unsafe { poison(buffer) },
        || {
            // SAFETY: as in `get_base`.
            unsafe { of(buffer) }?.clear(value)?;
            Ok::<_, AccessError>(())
        },
    );
}

unsafe extern "C" fn reset(buffer: *mut api3::ggml_backend_buffer) {
    // SAFETY: as in `get_base`.
    guard(
        Slot::BufferReset,
        || unsafe { poison(buffer) },
        || {
            // SAFETY: as in `get_base`.
            let memory = unsafe { of(buffer) }?;
            memory.reset();
            memory.device().bump_layout_epoch();
            Ok::<_, NotOurs>(())
        },
    );
}
