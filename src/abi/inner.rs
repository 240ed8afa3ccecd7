//! The inner device's objects: what the plugin stands in front of.
//!
//! Owns: safe wrappers of foreign devices, buffer types, buffers, backends and events.
//! Invariants: an owned object is freed exactly once, by its wrapper. Data is reached through *shims*: short-lived byte tensors
//! that name the inner buffer, so that the inner code sees only what belongs to it, whoever owns the host's tensor.
//! Threads: devices and buffer types are usable from any thread by ggml's contract; a backend by one thread at a time, which the
//! host guarantees for the backend of ours that owns it.
//! Does not: decide where anything lies.

use core::ffi::{CStr, c_int, c_void};
use core::ptr::NonNull;

use super::gen_api3 as api3;
use super::graph::{Graph, Part};
use super::host::{host, text};
use super::layout::{Words, field};
use super::tensor::Tensor;
use crate::gpu::Rows;

/// Upstream's kinds of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceKind {
    Cpu,
    Gpu,
    IntegratedGpu,
    /// Accelerators and meta devices: never put behind a proxy unless named.
    Other,
}

/// A device of the host. Devices live as long as the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Device(NonNull<api3::ggml_backend_device>);

// SAFETY: a device is an immutable, immortal object whose functions ggml calls from any thread.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// Every device that is registered now, in order.
pub(crate) fn devices() -> Vec<Device> {
    let api = &host().api;
    // SAFETY: no preconditions.
    let count = unsafe { (api.ggml_backend_dev_count)() };
    // SAFETY: the index is below the count.
    (0..count).filter_map(|index| NonNull::new(unsafe { (api.ggml_backend_dev_get)(index) })).map(Device).collect()
}

impl Device {
    pub(super) fn as_ptr(&self) -> *mut api3::ggml_backend_device {
        self.0.as_ptr()
    }

    pub(crate) fn name(&self) -> String {
        // SAFETY: a valid device; device names are C strings that live as long as it.
        let name = unsafe { (host().api.ggml_backend_dev_name)(self.as_ptr()) };
        // SAFETY: as above.
        unsafe { text(name) }
    }

    pub(crate) fn description(&self) -> String {
        // SAFETY: as for `name`.
        let name = unsafe { (host().api.ggml_backend_dev_description)(self.as_ptr()) };
        // SAFETY: as above.
        unsafe { text(name) }
    }

    /// Free and total memory in bytes.
    pub(crate) fn memory(&self) -> (usize, usize) {
        let (mut free, mut total) = (0, 0);
        // SAFETY: a valid device and two places to write to.
        unsafe { (host().api.ggml_backend_dev_memory)(self.as_ptr(), &raw mut free, &raw mut total) };
        (free, total)
    }

    pub(crate) fn kind(&self) -> DeviceKind {
        // SAFETY: a valid device.
        match unsafe { (host().api.ggml_backend_dev_type)(self.as_ptr()) } {
            api3::GGML_BACKEND_DEVICE_TYPE_CPU => DeviceKind::Cpu,
            api3::GGML_BACKEND_DEVICE_TYPE_GPU => DeviceKind::Gpu,
            api3::GGML_BACKEND_DEVICE_TYPE_IGPU => DeviceKind::IntegratedGpu,
            _ => DeviceKind::Other,
        }
    }

    pub(super) fn raw_props(&self) -> api3::ggml_backend_dev_props {
        let mut props = core::mem::MaybeUninit::zeroed();
        // SAFETY: a valid device; the host fills the struct, whose size the layout check confirmed.
        unsafe { (host().api.ggml_backend_dev_get_props)(self.as_ptr(), props.as_mut_ptr()) };
        // SAFETY: zeroed before, so every field is a valid value even where the host wrote nothing.
        unsafe { props.assume_init() }
    }

    /// Whether it has an id that llama.cpp compares to find one card twice.
    pub(crate) fn has_id(&self) -> bool {
        !self.raw_props().device_id.is_null()
    }

    /// That id, usually a PCI address.
    pub(crate) fn id(&self) -> Option<String> {
        let id = self.raw_props().device_id;
        // SAFETY: ids are C strings that live as long as the device.
        (!id.is_null()).then(|| unsafe { text(id) })
    }

    /// Name of the backend that provides the device.
    pub(crate) fn provider(&self) -> String {
        let api = &host().api;
        // SAFETY: a valid device.
        let reg = unsafe { (api.ggml_backend_dev_backend_reg)(self.as_ptr()) };
        if reg.is_null() {
            return String::new();
        }
        // SAFETY: a valid reg, whose name is a C string.
        let name = unsafe { (api.ggml_backend_reg_name)(reg) };
        // SAFETY: as above.
        unsafe { text(name) }
    }

    /// A function that the device's backend offers by name; null if it does not.
    pub(super) fn proc_address(&self, name: &CStr) -> *mut c_void {
        let api = &host().api;
        // SAFETY: a valid device.
        let reg = unsafe { (api.ggml_backend_dev_backend_reg)(self.as_ptr()) };
        if reg.is_null() {
            return core::ptr::null_mut();
        }
        // SAFETY: a valid reg and a C string.
        unsafe { (api.ggml_backend_reg_get_proc_address)(reg, name.as_ptr()) }
    }

    /// The preferred buffer type.
    pub(crate) fn buffer_type(&self) -> Option<BufferType> {
        // SAFETY: a valid device.
        NonNull::new(unsafe { (host().api.ggml_backend_dev_buffer_type)(self.as_ptr()) }).map(BufferType)
    }

    pub(super) fn host_buffer_type(&self) -> *mut api3::ggml_backend_buffer_type {
        // SAFETY: a valid device.
        unsafe { (host().api.ggml_backend_dev_host_buffer_type)(self.as_ptr()) }
    }

    /// Whether the device can run this node.
    pub(crate) fn supports_op(&self, node: Tensor<'_>) -> bool {
        // SAFETY: a valid device and a valid tensor.
        unsafe { (host().api.ggml_backend_dev_supports_op)(self.as_ptr(), node.as_ptr()) }
    }

    /// Opens a stream on the device.
    pub(crate) fn open(&self) -> Option<Backend> {
        // SAFETY: a valid device; null parameters mean the defaults.
        let backend = NonNull::new(unsafe { (host().api.ggml_backend_dev_init)(self.as_ptr(), core::ptr::null()) })?;
        Some(Backend(backend))
    }

    /// A new event, where the device has events.
    pub(crate) fn event(&self) -> Option<Event> {
        // SAFETY: a valid device.
        NonNull::new(unsafe { (host().api.ggml_backend_event_new)(self.as_ptr()) }).map(Event)
    }
}

/// A buffer type of the inner device. Buffer types live as long as the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferType(NonNull<api3::ggml_backend_buffer_type>);

// SAFETY: immutable and immortal, called from any thread by ggml's contract.
unsafe impl Send for BufferType {}
// SAFETY: as above.
unsafe impl Sync for BufferType {}

impl BufferType {
    pub(super) fn as_ptr(&self) -> *mut api3::ggml_backend_buffer_type {
        self.0.as_ptr()
    }

    /// Alignment of tensors in bytes; at least 1.
    pub(crate) fn alignment(&self) -> usize {
        // SAFETY: a valid buffer type.
        unsafe { (host().api.ggml_backend_buft_get_alignment)(self.as_ptr()) }.max(1)
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
        let pointer = NonNull::new(unsafe { (host().api.ggml_backend_buft_alloc_buffer)(self.as_ptr(), bytes) })?;
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
    pub(super) fn as_ptr(&self) -> *mut api3::ggml_backend_buffer {
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
#[derive(Clone, Copy, Debug)]
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

    pub(super) fn as_ptr(self) -> *mut api3::ggml_backend_buffer {
        self.0
    }

    /// A byte tensor at an address, for the inner backend's eyes only.
    fn shim(self, address: usize, bytes: usize) -> api3::ggml_tensor {
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
    fn tensor_shim(self, tensor: Tensor<'_>) -> api3::ggml_tensor {
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
        let set = host().api.ggml_backend_tensor_set_2d;
        // SAFETY: the shim spans exactly the rows; the rest is the caller's contract.
        unsafe { set(&raw mut shim, source, 0, rows.size, rows.count, rows.stride, rows.host_stride) };
    }

    /// Copies rows to the host through ggml.
    ///
    /// # Safety
    /// As for [`Passport::write`], the other way round.
    pub(crate) unsafe fn read(self, address: usize, target: *mut c_void, rows: Rows) {
        let shim = self.shim(address, rows.extent());
        let get = host().api.ggml_backend_tensor_get_2d;
        // SAFETY: the shim spans exactly the rows; the rest is the caller's contract.
        unsafe { get(&raw const shim, target, 0, rows.size, rows.count, rows.stride, rows.host_stride) };
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

/// How a graph ended, in upstream's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status(pub(super) c_int);

impl Status {
    pub(crate) const SUCCESS: Self = Self(api3::GGML_STATUS_SUCCESS);
    pub(crate) const FAILED: Self = Self(api3::GGML_STATUS_FAILED);
    pub(crate) const ALLOC_FAILED: Self = Self(api3::GGML_STATUS_ALLOC_FAILED);
}

/// A stream of the inner device.
#[derive(Debug)]
pub(crate) struct Backend(NonNull<api3::ggml_backend>);

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
    pub(super) fn as_ptr(&self) -> *mut api3::ggml_backend {
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
        Status(unsafe { (host().api.ggml_backend_graph_compute_async)(self.as_ptr(), part.as_ptr()) })
    }

    /// Runs the host's graph as it is.
    pub(crate) fn compute_whole(&self, graph: Graph<'_>) -> Status {
        // SAFETY: a valid backend and a valid graph.
        Status(unsafe { (host().api.ggml_backend_graph_compute_async)(self.as_ptr(), graph.as_ptr()) })
    }

    /// Queues a copy from the host.
    ///
    /// # Safety
    /// The range lies in memory that the passport stands for; `source` is readable and stays valid until the backend is synchronized.
    pub(super) unsafe fn write_async(&self, buffer: Passport, address: usize, source: *const c_void, bytes: usize) {
        let mut shim = buffer.shim(address, bytes);
        // SAFETY: the caller's contract; the shim is read during the call only.
        unsafe { (host().api.ggml_backend_tensor_set_async)(self.as_ptr(), &raw mut shim, source, 0, bytes) };
    }

    /// Queues a copy to the host.
    ///
    /// # Safety
    /// The range lies in memory that the passport stands for; `target` is writable and stays valid until the backend is synchronized.
    pub(super) unsafe fn read_async(&self, buffer: Passport, address: usize, target: *mut c_void, bytes: usize) {
        let shim = buffer.shim(address, bytes);
        // SAFETY: the caller's contract; the shim is read during the call only.
        unsafe { (host().api.ggml_backend_tensor_get_async)(self.as_ptr(), &raw const shim, target, 0, bytes) };
    }

    /// Queues a copy between two streams of inner devices; false if the device cannot.
    pub(crate) fn copy_async(&self, from: (&Backend, Passport, Tensor<'_>), to: (Passport, Tensor<'_>)) -> bool {
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
        let source = from.1.tensor_shim(from.2);
        let mut target = to.0.tensor_shim(to.1);
        // SAFETY: valid backends and shims over inner buffers, read during the call only.
        unsafe { copy(from.0.as_ptr(), self.as_ptr(), &raw const source, &raw mut target) }
    }

    /// Lets the inner backend reorder the graph and ask for longer lifetimes.
    ///
    /// # Safety
    /// `params` is what the host passed for this graph, valid during the call.
    pub(super) unsafe fn optimize(&self, graph: Graph<'_>, params: *mut api3::ggml_backend_graph_optimize_params) {
        if let Some(slot) = self.slot(host().layout.backend_slots.graph_optimize) {
            // SAFETY: the slot of this name has this type in layout api 3, the only one with this entry so far.
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
    pub(super) unsafe fn set_abort(&self, device: &Device, callback: api3::ggml_abort_callback, data: *mut c_void) {
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

    /// Makes this stream wait for a marked place.
    pub(crate) fn wait(&self, event: &Event) {
        // SAFETY: as for `record`.
        unsafe { (host().api.ggml_backend_event_wait)(self.as_ptr(), event.as_ptr()) };
    }
}

/// An event of the inner device.
#[derive(Debug)]
pub(crate) struct Event(NonNull<api3::ggml_backend_event>);

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
