//! Slots of a backend. See `ggml_backend_i` in ggml-backend-impl.h.
//!
//! Optional slots are set only where the inner backend has them, so that the host's own defaults apply otherwise.

use core::ffi::{c_char, c_void};
use core::fmt::Display;

use super::super::boundary::{Slot, guard};
use super::super::gen_api3 as api3;
use super::super::graph::Graph;
use super::super::handle::{self, Kind, NotOurs};
use super::super::host::host;
use super::super::layout::{Words, field};
use super::super::tensor::Tensor;
use super::{behind, event, put};
use crate::backend::{Backend, BackendError};
use crate::buffer::{Buffer, BufferError, Place};
use crate::device::Device;
use crate::gpu::Rows;
use crate::telemetry::{Busy, log};

impl Kind for Backend {
    const TAG: u64 = 0x4d6f_4542_6163_0006;
    const NAME: &'static str = "backend";
}

/// Identity of our backends among the host's, by its address.
static GUID: [u8; 16] = *b"ggml-moe backend";

#[derive(Debug, thiserror::Error)]
enum CallError {
    #[error(transparent)]
    NotOurs(#[from] NotOurs),
    #[error(transparent)]
    Buffer(#[from] BufferError),
    #[error("the host passed a tensor that does not lie in a buffer of this device")]
    ForeignTensor,
}

/// Opens a backend on a device whose C object is `owner`; null if that fails.
pub(super) fn make(device: &'static Device, owner: *mut c_void) -> *mut api3::ggml_backend {
    let Some(backend) = Backend::open(device) else {
        return core::ptr::null_mut();
    };
    let layout = host().layout;
    let (shape, slots) = (&layout.backend, &layout.backend_slots);
    let mut words = Words::zeroed(shape.size);
    words.set(layout.backend_guid, (&raw const GUID).expose_provenance());
    put!(words, shape, slots.get_name, get_name);
    put!(words, shape, slots.free, free);
    if backend.inner.has_async_copies() {
        put!(words, shape, slots.set_tensor_async, set_tensor_async);
        put!(words, shape, slots.get_tensor_async, get_tensor_async);
    }
    if backend.inner.has_async_tensor_copy() {
        put!(words, shape, slots.cpy_tensor_async, cpy_tensor_async);
    }
    put!(words, shape, slots.synchronize, synchronize);
    put!(words, shape, slots.graph_compute, graph_compute);
    if backend.inner.has_events() {
        put!(words, shape, slots.event_record, event_record);
        put!(words, shape, slots.event_wait, event_wait);
    }
    if backend.inner.has_graph_optimize() {
        put!(words, shape, slots.graph_optimize, graph_optimize);
    }
    words.set(shape.owner.unwrap_or(0), owner.expose_provenance());
    words.set(shape.context, handle::new(backend).expose_provenance());
    words.leak().cast()
}

/// The backend behind a C object.
///
/// # Safety
/// `backend` is null or a live backend of ours.
pub(super) unsafe fn of<'a>(backend: *mut api3::ggml_backend) -> Result<&'a Backend, NotOurs> {
    // SAFETY: the caller's contract.
    unsafe { behind(backend.cast(), &host().layout.backend) }
}

/// Runs a slot that cannot report failure: a failure runs `on_failure` and poisons the device.
///
/// # Safety
/// As for [`of`].
unsafe fn guarded<E: Display>(
    slot: Slot,
    backend: *mut api3::ggml_backend,
    on_failure: impl FnOnce(),
    body: impl FnOnce(&Backend) -> Result<(), E>,
) {
    // SAFETY: the caller's contract.
    let known = unsafe { of(backend) };
    let poison = || {
        on_failure();
        if let Ok(backend) = known {
            backend.device.poison();
        }
    };
    guard(slot, poison, || match known {
        Ok(backend) => body(backend).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    });
}

unsafe extern "C" fn get_name(backend: *mut api3::ggml_backend) -> *const c_char {
    // SAFETY: the host passes a live backend of ours to its slot.
    guard(Slot::BackendGetName, || c"MoE".as_ptr(), || unsafe { of(backend) }.map(|it| it.device.name.as_ptr()))
}

unsafe extern "C" fn free(backend: *mut api3::ggml_backend) {
    guard(
        Slot::BackendFree,
        || (),
        || {
            // SAFETY: as in `get_name`.
            unsafe { of(backend) }?;
            let layout = host().layout;
            // SAFETY: `of` proved that `make` made the object, so its context lies there.
            let context = unsafe { field::<*mut c_void>(backend.cast(), layout.backend.context) };
            // SAFETY: the host frees a backend once and uses it no more.
            drop(unsafe { handle::free::<Backend>(context) }?);
            let words = layout.backend.size.div_ceil(size_of::<usize>());
            let object = core::ptr::slice_from_raw_parts_mut(backend.cast::<usize>(), words);
            // SAFETY: `make` leaked exactly this boxed slice.
            drop(unsafe { Box::from_raw(object) });
            Ok::<_, NotOurs>(())
        },
    );
}

/// Part of a tensor that a backend is asked to copy.
enum Part<'a> {
    /// In a buffer of ours, at this place.
    Ours(&'a Buffer, Place),
    /// In a buffer that the inner device made.
    Inner(Tensor<'a>),
}

/// Where part of a tensor lies.
///
/// # Safety
/// `tensor` is null or valid during `'a`.
unsafe fn part<'a>(
    backend: &Backend,
    tensor: *const api3::ggml_tensor,
    offset: usize,
    size: usize,
) -> Result<Part<'a>, CallError> {
    // SAFETY: the caller's contract.
    let tensor = unsafe { Tensor::new(tensor) }.ok_or(CallError::ForeignTensor)?;
    match tensor.our_buffer() {
        Some(buffer) => Ok(Part::Ours(buffer, buffer.place(tensor, offset, size)?)),
        None if backend.device.lends_inner_types() => Ok(Part::Inner(tensor)),
        None => Err(CallError::ForeignTensor),
    }
}

unsafe extern "C" fn set_tensor_async(
    backend: *mut api3::ggml_backend,
    tensor: *mut api3::ggml_tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    let body = |backend: &Backend| {
        backend.order_uploads()?;
        // SAFETY: the host passes a tensor that is valid during the call.
        match unsafe { part(backend, tensor, offset, size) }? {
            Part::Ours(buffer, place) if !buffer.makes_writable(place)? => {}
            Part::Ours(buffer, Place { address, .. }) => {
                if let Some(memory) = buffer.memory() {
                    // SAFETY: the host passes `size` readable bytes that stay until it synchronizes.
                    unsafe { backend.inner.write_async(memory.passport(), address, data, size) };
                } else if let Some(memory) = buffer.host() {
                    backend.inner.synchronize();
                    // SAFETY: the host passes `size` readable bytes.
                    unsafe { memory.write(address, data, size) }
                        .map_err(|error| CallError::from(buffer.no_host_memory(size, &error)))?;
                }
            }
            // SAFETY: as above.
            Part::Inner(tensor) => unsafe { backend.inner.write_own(tensor, data, offset, size) },
        }
        backend.note_use().map_err(CallError::from)
    };
    // SAFETY: as in `get_name`.
    unsafe { guarded(Slot::BackendSetTensorAsync, backend, || (), body) };
}

unsafe extern "C" fn get_tensor_async(
    backend: *mut api3::ggml_backend,
    tensor: *const api3::ggml_tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    let body = |backend: &Backend| {
        backend.order_uploads()?;
        // SAFETY: the host passes a tensor that is valid during the call.
        match unsafe { part(backend, tensor, offset, size) }? {
            Part::Ours(buffer, place) => {
                let address = place.address;
                buffer.holds(place, Rows::one(size))?;
                if let Some(memory) = buffer.memory() {
                    // SAFETY: the host passes `size` writable bytes that stay until it synchronizes.
                    unsafe { backend.inner.read_async(memory.passport(), address, data, size) };
                } else if let Some(memory) = buffer.host() {
                    // SAFETY: the host passes `size` writable bytes.
                    unsafe { memory.read(address, data, size) };
                }
            }
            // SAFETY: as above.
            Part::Inner(tensor) => unsafe { backend.inner.read_own(tensor, data, offset, size) },
        }
        backend.note_use().map_err(CallError::from)
    };
    // Zeros, never what happened to lie there.
    // SAFETY: the host passes `size` writable bytes.
    let zero = || unsafe { super::buffer::zero(data, size) };
    // SAFETY: as in `get_name`.
    unsafe { guarded(Slot::BackendGetTensorAsync, backend, zero, body) };
}

/// False lets the host wait for both backends and copy by itself.
unsafe extern "C" fn cpy_tensor_async(
    backend_src: *mut api3::ggml_backend,
    backend_dst: *mut api3::ggml_backend,
    src: *const api3::ggml_tensor,
    dst: *mut api3::ggml_tensor,
) -> bool {
    guard(
        Slot::BackendCpyTensorAsync,
        || false,
        || {
            // SAFETY: as in `get_name`: the slot of the target is called.
            let target = unsafe { of(backend_dst) }?;
            // SAFETY: the host passes a live backend of any kind.
            if !unsafe { is_ours(backend_src) } {
                return Ok(false);
            }
            // SAFETY: the identity says that it is one of ours.
            let source = unsafe { of(backend_src) }?;
            // SAFETY: the host passes tensors that are valid during the call.
            let pair = (unsafe { Tensor::new(src) }, unsafe { Tensor::new(dst) });
            Ok::<_, NotOurs>(match pair {
                (Some(from), Some(to)) => target.copy_async(source, from, to),
                _ => false,
            })
        },
    )
}

/// Whether a backend of the host is one of ours.
///
/// # Safety
/// `backend` is null or a live backend of the host.
unsafe fn is_ours(backend: *mut api3::ggml_backend) -> bool {
    if backend.is_null() {
        return false;
    }
    // SAFETY: the identity lies inside a backend of this layout.
    let guid = unsafe { field::<*const [u8; 16]>(backend.cast(), host().layout.backend_guid) };
    core::ptr::eq(guid, &raw const GUID)
}

unsafe extern "C" fn synchronize(backend: *mut api3::ggml_backend) {
    let body = |backend: &Backend| {
        let _busy = Busy::new();
        backend.synchronize();
        Ok::<_, CallError>(())
    };
    // SAFETY: as in `get_name`.
    unsafe { guarded(Slot::BackendSynchronize, backend, || (), body) };
}

unsafe extern "C" fn graph_compute(
    backend: *mut api3::ggml_backend,
    cgraph: *mut api3::ggml_cgraph,
) -> api3::ggml_status {
    guard(
        Slot::BackendGraphCompute,
        || api3::GGML_STATUS_FAILED,
        || {
            // SAFETY: as in `get_name`.
            let backend = unsafe { of(backend) }?;
            // SAFETY: the host passes a graph that it does not touch during the call.
            let Some(graph) = (unsafe { Graph::new(cgraph) }) else {
                log::error("graph failed: the host passed none");
                return Ok::<_, NotOurs>(api3::GGML_STATUS_FAILED);
            };
            Ok(match backend.compute(graph) {
                Ok(status) => status.0,
                Err(error) => failed(backend, &error),
            })
        },
    )
}

/// Reports why a graph failed; the host gets the status that upstream defines for it.
fn failed(backend: &Backend, error: &BackendError) -> api3::ggml_status {
    let repeated = matches!(error, BackendError::Poisoned(_)) && !backend.device.tells_poison();
    if !repeated {
        log::error(&format!("graph failed: {error}"));
    }
    error.status().0
}

unsafe extern "C" fn event_record(backend: *mut api3::ggml_backend, event: *mut api3::ggml_backend_event) {
    // SAFETY: the host passes a live event of ours.
    let body = |backend: &Backend| unsafe { event::of(event) }.map(|event| backend.inner.record(event));
    // SAFETY: as in `get_name`.
    unsafe { guarded(Slot::BackendEventRecord, backend, || (), body) };
}

unsafe extern "C" fn event_wait(backend: *mut api3::ggml_backend, event: *mut api3::ggml_backend_event) {
    // SAFETY: the host passes a live event of ours.
    let body = |backend: &Backend| unsafe { event::of(event) }.map(|event| backend.inner.wait(event));
    // SAFETY: as in `get_name`.
    unsafe { guarded(Slot::BackendEventWait, backend, || (), body) };
}

/// The whole graph is forwarded once; it is cut into parts only when it runs.
///
/// Releases with api version 2 call this with two arguments, later ones with three, and no number tells which. The third is only passed
/// on to the inner backend, which is of the same release and reads it only if it was passed (SAFETY.md).
unsafe extern "C" fn graph_optimize(
    backend: *mut api3::ggml_backend,
    cgraph: *mut api3::ggml_cgraph,
    params: *mut api3::ggml_backend_graph_optimize_params,
) {
    let body = |backend: &Backend| {
        // SAFETY: the host passes a graph that it does not touch during the call.
        if let Some(graph) = unsafe { Graph::new(cgraph) } {
            // SAFETY: the host's own parameters for this graph.
            unsafe { backend.inner.optimize(graph, params) };
        }
        Ok::<_, CallError>(())
    };
    // SAFETY: as in `get_name`.
    unsafe { guarded(Slot::BackendGraphOptimize, backend, || (), body) };
}
