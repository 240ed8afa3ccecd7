//! Devices of the host.

use core::ffi::{CStr, c_void};
use core::ptr::NonNull;

use super::super::exceptions;
use super::super::gen_api3 as api3;
use super::super::host::{host, text};
use super::super::layout::field;
use super::super::tensor::Tensor;
use super::{Backend, BufferType, Event};

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
pub(crate) struct Device(pub(super) NonNull<api3::ggml_backend_device>);

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
    pub(in crate::abi) fn as_ptr(&self) -> *mut api3::ggml_backend_device {
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

    pub(in crate::abi) fn raw_props(&self) -> api3::ggml_backend_dev_props {
        let mut props = core::mem::MaybeUninit::zeroed();
        // SAFETY: a valid device; the host fills the struct, whose extent the probe measured.
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

    /// Keeps the library of the device's backend mapped for good: the host may unload a backend that ours still stands in front of.
    pub(crate) fn keep_loaded(&self) {
        let layout = host().layout;
        // SAFETY: a valid device.
        let reg = unsafe { (host().api.ggml_backend_dev_backend_reg)(self.as_ptr()) };
        let Some(slot) = layout.reg_slots.get_name.filter(|_| !reg.is_null()) else {
            return;
        };
        // SAFETY: a reg of the host's layout holds a function there, which every reg has.
        let function = unsafe { field::<*const c_void>(reg.cast(), layout.reg.iface + slot) };
        let mut found = core::mem::MaybeUninit::<libc::Dl_info>::zeroed();
        // SAFETY: an address and a place to write to.
        if unsafe { libc::dladdr(function, found.as_mut_ptr()) } == 0 {
            return;
        }
        // SAFETY: zeroed before and filled by dladdr.
        let library = unsafe { found.assume_init() }.dli_fname;
        if !library.is_null() {
            // SAFETY: the loader's name of a loaded object. The handle is kept on purpose.
            unsafe { libc::dlopen(library, libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE) };
        }
    }

    /// A function that the device's backend offers by name; null if it does not.
    pub(in crate::abi) fn proc_address(&self, name: &CStr) -> *mut c_void {
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

    /// The type of host memory that suits the device, if it has one.
    pub(in crate::abi) fn host_buffer_type(&self) -> Option<BufferType> {
        // SAFETY: a valid device.
        NonNull::new(unsafe { (host().api.ggml_backend_dev_host_buffer_type)(self.as_ptr()) }).map(BufferType)
    }

    /// Whether the device can run this node.
    pub(crate) fn supports_op(&self, node: Tensor<'_>) -> bool {
        // SAFETY: a valid device and a valid tensor.
        unsafe { (host().api.ggml_backend_dev_supports_op)(self.as_ptr(), node.as_ptr()) }
    }

    /// Whether the device can compute on buffers of this type.
    pub(in crate::abi) fn supports_buffer_type(&self, type_: *mut api3::ggml_backend_buffer_type) -> bool {
        // SAFETY: a valid device and a valid buffer type.
        unsafe { (host().api.ggml_backend_dev_supports_buft)(self.as_ptr(), type_) }
    }

    /// Opens a stream on the device.
    pub(crate) fn open(&self) -> Option<Backend> {
        // SAFETY: a valid device.
        let backend = NonNull::new(unsafe { exceptions::dev_init(self.as_ptr()) })?;
        Some(Backend(backend))
    }

    /// A new event, where the device has events.
    pub(crate) fn event(&self) -> Option<Event> {
        // SAFETY: a valid device.
        NonNull::new(unsafe { (host().api.ggml_backend_event_new)(self.as_ptr()) }).map(Event)
    }
}
