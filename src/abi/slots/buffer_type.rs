//! Slots of a buffer type. See `ggml_backend_buffer_type_i` in ggml-backend-impl.h.
//!
//! A device has up to three: two of its own (`Role`), and one in front of the inner device's host buffer type, which answers as that one does
//! but for one thing: large buffers for compute are ordinary memory (see [`alloc_host`]).

use core::cell::Cell;
use core::ffi::{c_char, c_int, c_void};
use std::ffi::CString;

use super::super::boundary::{Slot, guard};
use super::super::exceptions;
use super::super::gen_api3 as api3;
use super::super::handle::{self, Kind, NotOurs};
use super::super::host::host;
use super::super::inner;
use super::super::layout::Words;
use super::super::tensor::{self, Tensor};
use super::{behind, buffer, put};
use crate::buffer::{Buffer, BufferError, alloc_size_all, room_size};
use crate::device::Device;
use crate::purpose::{Purpose, Role};
use crate::telemetry::log;

/// What a buffer type's handle holds.
pub(super) struct BufferType {
    pub(super) device: &'static Device,
    pub(super) role: Role,
    /// The host buffer type of the inner device that it stands in front of. Its buffers are never ours.
    host: Option<inner::BufferType>,
    name: CString,
}

/// Pinned memory is committed when it is given out. Compute buffers larger than this (masks for long passes over a long context) are mostly
/// never touched.
const LARGEST_PINNED_BYTES: usize = 256 << 20;

thread_local! {
    /// The host asked last for the size of a weight: what it allocates next on this thread holds weights.
    static ASKED_FOR_WEIGHT: Cell<bool> = const { Cell::new(false) };
}

impl Kind for BufferType {
    const TAG: u64 = 0x4d6f_4542_7566_0003;
    const NAME: &'static str = "buffer type";
}

/// A buffer type of `device`, whose C object is `owner`.
pub(super) fn make(device: &'static Device, role: Role, owner: *mut c_void) -> *mut c_void {
    let suffix = match role {
        Role::Default => "",
        Role::Experts => "_Experts",
    };
    let name = CString::new(format!("{}{suffix}", device.label())).unwrap_or_default();
    publish(BufferType { device, role, host: None, name }, owner)
}

/// A buffer type of `device` in front of a host buffer type of its inner device. It has that one's name: hosts print and compare it.
pub(super) fn make_host(device: &'static Device, inner: inner::BufferType, owner: *mut c_void) -> *mut c_void {
    let name = CString::new(inner.name()).unwrap_or_default();
    publish(BufferType { device, role: Role::Experts, host: Some(inner), name }, owner)
}

fn publish(type_: BufferType, owner: *mut c_void) -> *mut c_void {
    let layout = host().layout;
    let (shape, slots) = (&layout.buffer_type, &layout.buffer_type_slots);
    let mut words = Words::zeroed(shape.size);
    put!(words, shape, slots.get_name, get_name);
    put!(words, shape, slots.alloc_buffer, alloc_buffer);
    put!(words, shape, slots.get_alignment, get_alignment);
    put!(words, shape, slots.get_max_size, get_max_size);
    put!(words, shape, slots.get_alloc_size, get_alloc_size);
    put!(words, shape, slots.get_alloc_size_n, get_alloc_size_n);
    put!(words, shape, slots.is_host, is_host);
    words.set(shape.owner.unwrap_or(0), owner.expose_provenance());
    words.set(shape.context, handle::new(type_).expose_provenance());
    words.leak()
}

/// The buffer type behind a C object.
///
/// # Safety
/// `buft` is null or a buffer type of the host. Buffer types of ours are immortal.
pub(super) unsafe fn of(buft: *mut api3::ggml_backend_buffer_type) -> Result<&'static BufferType, NotOurs> {
    // SAFETY: the caller's contract.
    unsafe { behind(buft.cast(), &host().layout.buffer_type) }
}

unsafe extern "C" fn get_name(buft: *mut api3::ggml_backend_buffer_type) -> *const c_char {
    // SAFETY: the host passes a buffer type to its slot.
    guard(Slot::BufferTypeGetName, || c"MoE".as_ptr(), || unsafe { of(buft) }.map(|type_| type_.name.as_ptr()))
}

#[derive(Debug, thiserror::Error)]
enum AllocError {
    #[error(transparent)]
    NotOurs(#[from] NotOurs),
    #[error(transparent)]
    Buffer(#[from] BufferError),
}

unsafe extern "C" fn alloc_buffer(
    buft: *mut api3::ggml_backend_buffer_type,
    size: usize,
) -> *mut api3::ggml_backend_buffer {
    guard(Slot::BufferTypeAllocBuffer, core::ptr::null_mut, || {
        // SAFETY: as in `get_name`.
        let type_ = unsafe { of(buft) }?;
        if let Some(inner) = &type_.host {
            return Ok(alloc_host(type_.device, inner, size));
        }
        let memory = Buffer::new(type_.device, type_.role, size)?;
        Ok::<_, AllocError>(buffer::make(memory, buft, size))
    })
}

/// Memory of the inner device's host buffer type, or of the host's own for large buffers that hold no weights: its pages come when they are
/// written. ggml's backends give out that memory themselves where they cannot pin.
fn alloc_host(device: &Device, inner: &inner::BufferType, size: usize) -> *mut api3::ggml_backend_buffer {
    let weights = ASKED_FOR_WEIGHT.take();
    if size <= LARGEST_PINNED_BYTES || weights {
        // SAFETY: a valid buffer type.
        return unsafe { exceptions::alloc_buffer(inner.as_ptr(), size) };
    }
    log::info(&format!(
        "{}: {} MiB of RAM for compute are not pinned: what is never used of them costs nothing",
        device.label(),
        size >> 20
    ));
    // SAFETY: the host's function, without arguments.
    let plain = unsafe { (host().api.ggml_backend_cpu_buffer_type)() };
    // SAFETY: a valid buffer type.
    unsafe { exceptions::alloc_buffer(plain, size) }
}

/// Must be a power of two; upstream has no default.
unsafe extern "C" fn get_alignment(buft: *mut api3::ggml_backend_buffer_type) -> usize {
    const SAFE: usize = 256;
    guard(
        Slot::BufferTypeGetAlignment,
        || SAFE,
        // SAFETY: as in `get_name`.
        || unsafe { of(buft) }.map(|type_| type_.host.unwrap_or(type_.device.inner_buffer_type).alignment()),
    )
}

/// Upstream's default: no limit.
unsafe extern "C" fn get_max_size(buft: *mut api3::ggml_backend_buffer_type) -> usize {
    guard(
        Slot::BufferTypeGetMaxSize,
        || usize::MAX,
        || {
            // SAFETY: as in `get_name`.
            let type_ = unsafe { of(buft) }?;
            Ok::<_, NotOurs>(match (type_.host, type_.role) {
                (Some(inner), _) => inner.max_size(),
                (None, Role::Default) => type_.device.inner_buffer_type.max_size(),
                (None, Role::Experts) => usize::MAX,
            })
        },
    )
}

/// Upstream's default: the bytes of the tensor.
unsafe extern "C" fn get_alloc_size(
    buft: *mut api3::ggml_backend_buffer_type,
    tensor: *const api3::ggml_tensor,
) -> usize {
    // SAFETY: the host passes a tensor that is valid during the call.
    let tensor = unsafe { Tensor::new(tensor) };
    guard(
        Slot::BufferTypeGetAllocSize,
        || tensor.map_or(0, |tensor| tensor.bytes()),
        || {
            // SAFETY: as in `get_name`.
            let type_ = unsafe { of(buft) }?;
            let Some(tensor) = tensor else { return Ok::<_, NotOurs>(0) };
            Ok(match type_.host {
                Some(inner) => {
                    ASKED_FOR_WEIGHT.set(is_weight(tensor));
                    inner.alloc_size(tensor)
                }
                None => room_size(type_.device, type_.role, tensor),
            })
        },
    )
}

unsafe extern "C" fn get_alloc_size_n(
    buft: *mut api3::ggml_backend_buffer_type,
    tensors: *mut *mut api3::ggml_tensor,
    n_tensors: c_int,
) -> usize {
    // SAFETY: the host passes a list of valid tensors.
    let list = || unsafe { tensor::list(tensors, n_tensors) };
    const SAFE_ALIGNMENT: usize = 256;
    let fallback = || list().iter().map(|tensor| tensor.bytes().next_multiple_of(SAFE_ALIGNMENT)).sum();
    guard(Slot::BufferTypeGetAllocSizeN, fallback, || {
        // SAFETY: as in `get_name`.
        let type_ = unsafe { of(buft) }?;
        let tensors = list();
        if let Some(inner) = type_.host {
            let alignment = inner.alignment();
            ASKED_FOR_WEIGHT.set(tensors.last().is_some_and(|tensor| is_weight(*tensor)));
            return Ok(tensors.iter().map(|tensor| inner.alloc_size(*tensor).next_multiple_of(alignment)).sum());
        }
        Ok::<_, NotOurs>(alloc_size_all(type_.device, type_.role, &tensors))
    })
}

fn is_weight(tensor: Tensor<'_>) -> bool {
    Purpose::of(&tensor.name(), Role::Default) == Purpose::Dense
}

/// Expert weights can be read by any code that reads host memory; the rest belongs to the inner device.
unsafe extern "C" fn is_host(buft: *mut api3::ggml_backend_buffer_type) -> bool {
    // SAFETY: as in `get_name`.
    let known = || unsafe { of(buft) }.map(|type_| type_.role == Role::Experts);
    // A wrong answer would send device memory to host code, so a failure falls back to the same answer without the boundary.
    guard(Slot::BufferTypeIsHost, || known().unwrap_or(false), known)
}
