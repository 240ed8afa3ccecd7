//! Streams of the inner device, their status and their events.

use core::ffi::{c_int, c_void};
use core::ptr::NonNull;

use super::super::exceptions;
use super::super::gen_api3 as api3;
use super::super::graph::{Graph, Part};
use super::super::host::host;
use super::super::layout::field;
use super::super::tensor::Tensor;
use super::{Device, Passport};

/// How a graph ended, in upstream's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status(pub(in crate::abi) c_int);

impl Status {
    pub(crate) const SUCCESS: Self = Self(api3::GGML_STATUS_SUCCESS);
    pub(crate) const FAILED: Self = Self(api3::GGML_STATUS_FAILED);
    pub(crate) const ALLOC_FAILED: Self = Self(api3::GGML_STATUS_ALLOC_FAILED);
}

/// A stream of the inner device.
#[derive(Debug)]
pub(crate) struct Backend(pub(super) NonNull<api3::ggml_backend>);

// SAFETY: owned; the host drives a backend from one thread at a time and may move it between threads.
unsafe impl Send for Backend {}
// SAFETY: as above; ours is reached only through the host's calls on the backend that owns it.
unsafe impl Sync for Backend {}

impl Drop for Backend {
    fn drop(&mut self) {
        // SAFETY: owned, freed once.
        unsafe { (host().api.ggml_backend_free)(self.0.as_ptr()) };
    }
}

type OptimizeFn = unsafe extern "C" fn(
    *mut api3::ggml_backend,
    *mut api3::ggml_cgraph,
    *mut api3::ggml_backend_graph_optimize_params,
);
type SetThreadsFn = unsafe extern "C" fn(*mut api3::ggml_backend, c_int);
type SetAbortFn = unsafe extern "C" fn(*mut api3::ggml_backend, api3::ggml_abort_callback, *mut c_void);
/// A slot whose type is not known yet.
type AnyFn = unsafe extern "C" fn();

impl Backend {
    pub(in crate::abi) fn as_ptr(&self) -> *mut api3::ggml_backend {
        self.0.as_ptr()
    }

    /// Whether the object has the layout that the probe chose: its device must be where the layout says.
    pub(crate) fn has_known_layout(&self, device: &Device) -> bool {
        let owner = host().layout.backend.owner.unwrap_or(0);
        // SAFETY: the field lies inside the object for every known layout; objects are at least that large.
        let found = unsafe { field::<usize>(self.as_ptr().cast(), owner) };
        found == device.0.addr().get()
    }

    /// A slot of the inner vtable; `None` if the layout or the backend lacks it.
    fn slot(&self, offset: Option<usize>) -> Option<AnyFn> {
        let place = self.as_ptr().wrapping_byte_add(host().layout.backend.iface).wrapping_byte_add(offset?);
        // SAFETY: the slot lies inside the vtable of the layout, which `has_known_layout` confirmed for this object.
        unsafe { place.cast::<Option<AnyFn>>().read() }
    }

    pub(crate) fn has_events(&self) -> bool {
        let slots = &host().layout.backend_slots;
        self.slot(slots.event_record).is_some() && self.slot(slots.event_wait).is_some()
    }

    pub(crate) fn has_graph_optimize(&self) -> bool {
        self.slot(host().layout.backend_slots.graph_optimize).is_some()
    }

    /// Whether copies to and from tensors run asynchronously.
    pub(crate) fn has_async_copies(&self) -> bool {
        let slots = &host().layout.backend_slots;
        self.slot(slots.set_tensor_async).is_some() && self.slot(slots.get_tensor_async).is_some()
    }

    /// Whether the backend copies between two of its kind asynchronously.
    pub(crate) fn has_async_tensor_copy(&self) -> bool {
        self.slot(host().layout.backend_slots.cpy_tensor_async).is_some()
    }

    /// Waits for everything that was queued.
    pub(crate) fn synchronize(&self) {
        // SAFETY: a valid backend.
        unsafe { (host().api.ggml_backend_synchronize)(self.as_ptr()) };
    }

    /// Runs a part of a graph, asynchronously where the inner device can.
    pub(crate) fn compute(&self, part: &mut Part<'_>) -> Status {
        // SAFETY: a valid backend and a valid graph.
        Status(unsafe { exceptions::graph_compute(self.as_ptr(), part.as_ptr()) })
    }

    /// Runs the host's graph as it is.
    pub(crate) fn compute_whole(&self, graph: Graph<'_>) -> Status {
        // SAFETY: a valid backend and a valid graph.
        Status(unsafe { exceptions::graph_compute(self.as_ptr(), graph.as_ptr()) })
    }

    /// Queues a copy from the host.
    ///
    /// # Safety
    /// The range lies in memory that the passport stands for; `source` is readable and stays valid until the backend is synchronized.
    pub(crate) unsafe fn write_async(&self, buffer: Passport, address: usize, source: *const c_void, bytes: usize) {
        let mut shim = buffer.shim(address, bytes);
        // SAFETY: the caller's contract; the shim is read during the call only.
        unsafe { (host().api.ggml_backend_tensor_set_async)(self.as_ptr(), &raw mut shim, source, 0, bytes) };
    }

    /// Queues a copy to the host.
    ///
    /// # Safety
    /// The range lies in memory that the passport stands for; `target` is writable and stays valid until the backend is synchronized.
    pub(crate) unsafe fn read_async(&self, buffer: Passport, address: usize, target: *mut c_void, bytes: usize) {
        let shim = buffer.shim(address, bytes);
        // SAFETY: the caller's contract; the shim is read during the call only.
        unsafe { (host().api.ggml_backend_tensor_get_async)(self.as_ptr(), &raw const shim, target, 0, bytes) };
    }

    /// Queues a copy into a tensor that lies in the inner device's own buffer.
    ///
    /// # Safety
    /// `source` is readable for `bytes` and stays valid until the backend is synchronized; the range lies in the tensor.
    pub(in crate::abi) unsafe fn write_own(
        &self,
        tensor: Tensor<'_>,
        source: *const c_void,
        offset: usize,
        bytes: usize,
    ) {
        // SAFETY: the caller's contract.
        unsafe { (host().api.ggml_backend_tensor_set_async)(self.as_ptr(), tensor.as_ptr(), source, offset, bytes) };
    }

    /// Queues a copy out of a tensor that lies in the inner device's own buffer.
    ///
    /// # Safety
    /// `target` is writable for `bytes` and stays valid until the backend is synchronized; the range lies in the tensor.
    pub(in crate::abi) unsafe fn read_own(&self, tensor: Tensor<'_>, target: *mut c_void, offset: usize, bytes: usize) {
        // SAFETY: the caller's contract.
        unsafe { (host().api.ggml_backend_tensor_get_async)(self.as_ptr(), tensor.as_ptr(), target, offset, bytes) };
    }

    /// Queues a copy between two streams of inner devices; false if the device cannot. A tensor without passport lies in the inner
    /// device's own buffer.
    pub(crate) fn copy_async(
        &self,
        from: (&Backend, Option<Passport>, Tensor<'_>),
        to: (Option<Passport>, Tensor<'_>),
    ) -> bool {
        type CopyFn = unsafe extern "C" fn(
            *mut api3::ggml_backend,
            *mut api3::ggml_backend,
            *const api3::ggml_tensor,
            *mut api3::ggml_tensor,
        ) -> bool;
        let Some(slot) = self.slot(host().layout.backend_slots.cpy_tensor_async) else {
            return false;
        };
        // SAFETY: the slot of this name has this type in every known layout.
        let copy = unsafe { core::mem::transmute::<AnyFn, CopyFn>(slot) };
        let source = shown(from.1, from.2);
        let mut target = shown(to.0, to.1);
        // SAFETY: valid backends and shims over inner buffers, read during the call only.
        unsafe { copy(from.0.as_ptr(), self.as_ptr(), &raw const source, &raw mut target) }
    }

    /// Lets the inner backend reorder the graph and ask for longer lifetimes.
    ///
    /// # Safety
    /// `params` is what the host passed for this graph, valid during the call.
    pub(in crate::abi) unsafe fn optimize(
        &self,
        graph: Graph<'_>,
        params: *mut api3::ggml_backend_graph_optimize_params,
    ) {
        if let Some(slot) = self.slot(host().layout.backend_slots.graph_optimize) {
            // SAFETY: the slot of this name has this type, or this type without the last parameter, which the C calling conventions
            // of all supported machines then ignore.
            let optimize = unsafe { core::mem::transmute::<AnyFn, OptimizeFn>(slot) };
            // SAFETY: a valid backend and graph; the rest is the caller's contract.
            unsafe { optimize(self.as_ptr(), graph.as_ptr(), params) };
        }
    }

    /// Tells the inner backend how many threads to use, if it has threads.
    pub(crate) fn set_threads(&self, device: &Device, threads: c_int) {
        let function = device.proc_address(c"ggml_backend_set_n_threads");
        if !function.is_null() {
            // SAFETY: the function that goes by this name has this type.
            let set = unsafe { core::mem::transmute::<*mut c_void, SetThreadsFn>(function) };
            // SAFETY: a backend of the device whose reg gave the function.
            unsafe { set(self.as_ptr(), threads) };
        }
    }

    /// Passes the host's abort callback on, if the inner backend takes one.
    ///
    /// # Safety
    /// `callback` and `data` are what the host passed, valid until it passes others or the backend is freed.
    pub(in crate::abi) unsafe fn set_abort(
        &self,
        device: &Device,
        callback: api3::ggml_abort_callback,
        data: *mut c_void,
    ) {
        let function = device.proc_address(c"ggml_backend_set_abort_callback");
        if !function.is_null() {
            // SAFETY: the function that goes by this name has this type.
            let set = unsafe { core::mem::transmute::<*mut c_void, SetAbortFn>(function) };
            // SAFETY: a backend of the device whose reg gave the function; the caller's contract covers the rest.
            unsafe { set(self.as_ptr(), callback, data) };
        }
    }

    /// Marks a place in this stream.
    pub(crate) fn record(&self, event: &Event) {
        // SAFETY: valid objects of one device; `has_events` was asked before the slot was offered.
        unsafe { (host().api.ggml_backend_event_record)(event.as_ptr(), self.as_ptr()) };
    }

    /// Marks the present end of this stream with an event that is not ggml's.
    ///
    /// # Safety
    /// As for [`Backend::wait_foreign`].
    pub(crate) unsafe fn record_foreign(&self, context: *mut c_void) {
        // SAFETY: a valid backend.
        let device = unsafe { field(self.as_ptr().cast(), host().layout.backend.owner.unwrap_or(0)) };
        let mut event = api3::ggml_backend_event { device, context };
        // SAFETY: the event is read during the call only; the caller vouches for what it carries.
        unsafe { (host().api.ggml_backend_event_record)(&raw mut event, self.as_ptr()) };
    }

    /// Identity of the stream while it lives.
    pub(crate) fn key(&self) -> usize {
        self.0.addr().get()
    }

    /// Makes this stream wait for an event that is not ggml's: `context` is what the inner device's events carry (a `CUevent` for CUDA).
    ///
    /// # Safety
    /// `context` is such an event of the inner device, and `has_events` is true.
    pub(crate) unsafe fn wait_foreign(&self, context: *mut c_void) {
        // SAFETY: a valid backend.
        let device = unsafe { field(self.as_ptr().cast(), host().layout.backend.owner.unwrap_or(0)) };
        let mut event = api3::ggml_backend_event { device, context };
        // SAFETY: the event is read during the call only; the caller vouches for what it carries.
        unsafe { (host().api.ggml_backend_event_wait)(self.as_ptr(), &raw mut event) };
    }

    /// Makes this stream wait for a marked place.
    pub(crate) fn wait(&self, event: &Event) {
        // SAFETY: as for `record`.
        unsafe { (host().api.ggml_backend_event_wait)(self.as_ptr(), event.as_ptr()) };
    }
}

/// A tensor as the inner backend's code may see it.
fn shown(passport: Option<Passport>, tensor: Tensor<'_>) -> api3::ggml_tensor {
    passport.map_or_else(|| tensor.clone_raw(), |passport| passport.tensor_shim(tensor))
}

/// An event of the inner device.
#[derive(Debug)]
pub(crate) struct Event(pub(super) NonNull<api3::ggml_backend_event>);

// SAFETY: owned; ggml's event functions are called from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    fn as_ptr(&self) -> *mut api3::ggml_backend_event {
        self.0.as_ptr()
    }

    /// Waits for it on the host.
    pub(crate) fn synchronize(&self) {
        // SAFETY: a valid event.
        unsafe { (host().api.ggml_backend_event_synchronize)(self.as_ptr()) };
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: owned, freed once.
        unsafe { (host().api.ggml_backend_event_free)(self.as_ptr()) };
    }
}
