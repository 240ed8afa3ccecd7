//! Slots of a device. See `ggml_backend_device_i` in ggml-backend-impl.h.

use core::ffi::{c_char, c_void};
use core::mem::offset_of;
use std::sync::OnceLock;

use super::super::boundary::{Slot, guard};
use super::super::gen_api3 as api3;
use super::super::handle::{self, Kind, NotOurs};
use super::super::host::host;
use super::super::inner::DeviceKind;
use super::super::layout::Words;
use super::super::tensor::{BufferTypeKey, Tensor};
use super::{backend, behind, buffer_type, event, publish, put};
use crate::device::{BufferTypes, Device};
use crate::purpose::Role;

/// What a device's handle holds: the device and the C objects that belong to it.
pub(super) struct DeviceObject {
    pub(super) device: &'static Device,
    pub(super) pointer: *mut c_void,
    default_type: *mut c_void,
    /// The expert buffer type (or none) and a terminating null.
    extra: Box<[*mut c_void; 2]>,
    /// The host buffer type in front of the inner device's, once it was asked for; null where that has none.
    host_type: OnceLock<usize>,
    pub(super) types: BufferTypes,
}

// SAFETY: constant after its making; the pointers lead to immortal objects.
unsafe impl Send for DeviceObject {}
// SAFETY: as above.
unsafe impl Sync for DeviceObject {}

impl Kind for DeviceObject {
    const TAG: u64 = 0x4d6f_4544_6576_0002;
    const NAME: &'static str = "device";
}

impl DeviceObject {
    pub(super) fn extra_types(&self) -> *mut *mut api3::ggml_backend_buffer_type {
        self.extra.as_ptr().cast_mut().cast()
    }

    fn host_type(&self) -> *mut api3::ggml_backend_buffer_type {
        let own = || {
            let Some(inner) = self.device.inner.host_buffer_type() else { return 0 };
            if self.device.passes_through() {
                return inner.as_ptr().expose_provenance();
            }
            buffer_type::make_host(self.device, inner, self.pointer).expose_provenance()
        };
        core::ptr::with_exposed_provenance_mut(*self.host_type.get_or_init(own))
    }
}

/// Makes the C objects of a device.
pub(super) fn make(device: &'static Device, reg: *mut c_void) -> &'static DeviceObject {
    let layout = host().layout;
    let (shape, slots) = (&layout.device, &layout.device_slots);
    let pointer = Words::zeroed(shape.size).leak();
    let default_type = if device.lends_inner_types() {
        device.inner_buffer_type.as_ptr().cast()
    } else {
        buffer_type::make(device, Role::Default, pointer)
    };
    let experts_type = (!device.passes_through()).then(|| buffer_type::make(device, Role::Experts, pointer));
    let types = BufferTypes {
        default: BufferTypeKey(default_type.addr()),
        experts: experts_type.map(|type_| BufferTypeKey(type_.addr())),
    };
    let extra = Box::new([experts_type.unwrap_or(core::ptr::null_mut()), core::ptr::null_mut()]);
    let context = handle::new(DeviceObject { device, pointer, default_type, extra, host_type: OnceLock::new(), types });
    let mut words = Words::zeroed(shape.size);
    put!(words, shape, slots.get_name, get_name);
    put!(words, shape, slots.get_description, get_description);
    put!(words, shape, slots.get_memory, get_memory);
    put!(words, shape, slots.get_type, get_type);
    put!(words, shape, slots.get_props, get_props);
    put!(words, shape, slots.init_backend, init_backend);
    put!(words, shape, slots.get_buffer_type, get_buffer_type);
    put!(words, shape, slots.get_host_buffer_type, get_host_buffer_type);
    put!(words, shape, slots.supports_op, supports_op);
    put!(words, shape, slots.supports_buft, supports_buft);
    put!(words, shape, slots.event_new, event::new);
    put!(words, shape, slots.event_free, event::free);
    put!(words, shape, slots.event_synchronize, event::synchronize);
    words.set(shape.owner.unwrap_or(0), reg.expose_provenance());
    words.set(shape.context, context.expose_provenance());
    // SAFETY: `pointer` was leaked above with this size; the host does not know it before this function returns.
    unsafe { publish(pointer, &words, shape.size) };
    // SAFETY: made above, never freed.
    match unsafe { handle::get::<DeviceObject>(context) } {
        Ok(object) => object,
        Err(_) => unreachable!("a handle made here carries its tag"),
    }
}

/// The device behind a C object.
///
/// # Safety
/// `dev` is null or a device of the host. Devices of ours are immortal.
pub(super) unsafe fn of(dev: *mut api3::ggml_backend_device) -> Result<&'static DeviceObject, NotOurs> {
    // SAFETY: the caller's contract.
    unsafe { behind(dev.cast(), &host().layout.device) }
}

unsafe extern "C" fn get_name(dev: *mut api3::ggml_backend_device) -> *const c_char {
    // SAFETY: the host passes a device to a device's slot.
    guard(Slot::DeviceGetName, || c"MoE".as_ptr(), || unsafe { of(dev) }.map(|object| object.device.name.as_ptr()))
}

unsafe extern "C" fn get_description(dev: *mut api3::ggml_backend_device) -> *const c_char {
    guard(
        Slot::DeviceGetDescription,
        || c"MoE".as_ptr(),
        // SAFETY: as in `get_name`.
        || unsafe { of(dev) }.map(|object| object.device.description.as_ptr()),
    )
}

/// Writes the two results of a memory question.
///
/// # Safety
/// Each pointer is null or writable.
unsafe fn put_memory(free: *mut usize, total: *mut usize, value: (usize, usize)) {
    if !free.is_null() {
        // SAFETY: writable by the caller's contract.
        unsafe { free.write(value.0) };
    }
    if !total.is_null() {
        // SAFETY: as above.
        unsafe { total.write(value.1) };
    }
}

/// 0 and 0 mean that nothing is known.
unsafe extern "C" fn get_memory(dev: *mut api3::ggml_backend_device, free: *mut usize, total: *mut usize) {
    // SAFETY: as in `get_name`.
    let memory = guard(Slot::DeviceGetMemory, || (0, 0), || unsafe { of(dev) }.map(|object| object.device.memory()));
    // SAFETY: the host passes two places to write to.
    unsafe { put_memory(free, total, memory) };
}

fn raw_kind(kind: DeviceKind) -> api3::ggml_backend_dev_type {
    match kind {
        DeviceKind::Gpu => api3::GGML_BACKEND_DEVICE_TYPE_GPU,
        DeviceKind::IntegratedGpu => api3::GGML_BACKEND_DEVICE_TYPE_IGPU,
        DeviceKind::Cpu | DeviceKind::Other => api3::GGML_BACKEND_DEVICE_TYPE_CPU,
    }
}

unsafe extern "C" fn get_type(dev: *mut api3::ggml_backend_device) -> api3::ggml_backend_dev_type {
    guard(
        Slot::DeviceGetType,
        || api3::GGML_BACKEND_DEVICE_TYPE_CPU,
        // SAFETY: as in `get_name`.
        || unsafe { of(dev) }.map(|object| raw_kind(object.device.kind())),
    )
}

unsafe extern "C" fn get_props(dev: *mut api3::ggml_backend_device, props: *mut api3::ggml_backend_dev_props) {
    let nothing = || api3::ggml_backend_dev_props {
        name: c"MoE".as_ptr(),
        description: c"MoE".as_ptr(),
        memory_free: 0,
        memory_total: 0,
        type_: api3::GGML_BACKEND_DEVICE_TYPE_CPU,
        device_id: core::ptr::null(),
        caps: api3::ggml_backend_dev_caps {
            async_: false,
            host_buffer: false,
            buffer_from_host_ptr: false,
            events: false,
            mmap_support: false,
        },
    };
    let value = guard(Slot::DeviceGetProps, nothing, || {
        // SAFETY: as in `get_name`.
        let object = unsafe { of(dev) }?;
        let device = object.device;
        let mut value = device.inner.raw_props();
        value.name = device.name.as_ptr();
        value.description = device.description.as_ptr();
        (value.memory_free, value.memory_total) = device.memory();
        value.type_ = raw_kind(device.kind());
        value.caps.buffer_from_host_ptr = false;
        // A mapped file would be read into our buffers through a second copy; without it the loader reads straight into them.
        value.caps.mmap_support &= device.passes_through();
        Ok::<_, NotOurs>(value)
    });
    if !props.is_null() {
        // The padding behind the fields stays as the host left it: a later release may keep more capabilities there.
        const FIELDS: usize = offset_of!(api3::ggml_backend_dev_props, caps) + size_of::<api3::ggml_backend_dev_caps>();
        let source = (&raw const value).cast::<u8>();
        // SAFETY: the host passes a place to write to, of the size that the probe measured; the fields lie before the padding.
        unsafe { core::ptr::copy_nonoverlapping(source, props.cast::<u8>(), FIELDS) };
    }
}

unsafe extern "C" fn init_backend(
    dev: *mut api3::ggml_backend_device,
    _params: *const c_char,
) -> *mut api3::ggml_backend {
    guard(Slot::DeviceInitBackend, core::ptr::null_mut, || {
        // SAFETY: as in `get_name`.
        let object = unsafe { of(dev) }?;
        Ok::<_, NotOurs>(backend::make(object.device, object.pointer))
    })
}

unsafe extern "C" fn get_buffer_type(dev: *mut api3::ggml_backend_device) -> *mut api3::ggml_backend_buffer_type {
    // SAFETY: as in `get_name`.
    let known = || unsafe { of(dev) }.map(|object| object.default_type.cast());
    // The host asserts that a device has a buffer type, so a failure falls back to the same answer without the boundary.
    guard(Slot::DeviceGetBufferType, || known().unwrap_or(core::ptr::null_mut()), known)
}

unsafe extern "C" fn get_host_buffer_type(dev: *mut api3::ggml_backend_device) -> *mut api3::ggml_backend_buffer_type {
    guard(
        Slot::DeviceGetHostBufferType,
        core::ptr::null_mut,
        // SAFETY: as in `get_name`.
        || unsafe { of(dev) }.map(DeviceObject::host_type),
    )
}

unsafe extern "C" fn supports_op(dev: *mut api3::ggml_backend_device, op: *const api3::ggml_tensor) -> bool {
    guard(
        Slot::DeviceSupportsOp,
        || false,
        || {
            // SAFETY: as in `get_name`.
            let object = unsafe { of(dev) }?;
            // SAFETY: the host passes a node that is valid during the call.
            let node = unsafe { Tensor::new(op) };
            Ok::<_, NotOurs>(node.is_some_and(|node| object.device.supports_op(node, object.types)))
        },
    )
}

unsafe extern "C" fn supports_buft(
    dev: *mut api3::ggml_backend_device,
    buft: *mut api3::ggml_backend_buffer_type,
) -> bool {
    guard(
        Slot::DeviceSupportsBuft,
        || false,
        || {
            // SAFETY: as in `get_name`.
            let object = unsafe { of(dev) }?;
            let asked = BufferTypeKey(buft.addr());
            if object.device.lends_inner_types() {
                return Ok::<_, NotOurs>(object.device.inner.supports_buffer_type(buft));
            }
            Ok(object.types.default == asked || object.types.experts == Some(asked))
        },
    )
}
