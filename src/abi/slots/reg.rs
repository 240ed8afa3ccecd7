//! The reg: what `ggml_backend_init` returns, and the one way from a buffer type to whether it is ours.

use core::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;

use super::super::boundary::{Slot, guard};
use super::super::gen_api3 as api3;
use super::super::handle::{self, Kind, NotOurs};
use super::super::host::host;
use super::super::layout::Words;
use super::super::tensor::BufferTypeKey;
use super::device::{self, DeviceObject};
use super::{behind, procs, put};
use crate::device::Device;

/// The name of our backend among the host's. A static, because its address is compared.
static NAME: &CStr = c"MoE";

/// What the reg's handle holds.
struct Reg;

impl Kind for Reg {
    const TAG: u64 = 0x4d6f_4552_6567_0001;
    const NAME: &'static str = "reg";
}

/// An immortal object of ours that the host holds by address.
#[derive(Clone, Copy)]
struct Immortal(*mut c_void);

// SAFETY: the object is never freed and, once published, never written.
unsafe impl Send for Immortal {}
// SAFETY: as above.
unsafe impl Sync for Immortal {}

static REG: OnceLock<Immortal> = OnceLock::new();
static DEVICES: OnceLock<Vec<&'static DeviceObject>> = OnceLock::new();

/// The reg as the host takes it. The same pointer at every call: each load of the plugin calls again.
pub(crate) fn object() -> *mut c_void {
    REG.get_or_init(|| Immortal(make())).0
}

fn make() -> *mut c_void {
    let layout = host().layout;
    let (shape, slots) = (&layout.reg, &layout.reg_slots);
    let mut words = Words::zeroed(shape.size);
    words.set_int(0, layout.api_version);
    put!(words, shape, slots.get_name, get_name);
    put!(words, shape, slots.get_device_count, get_device_count);
    put!(words, shape, slots.get_device, get_device);
    put!(words, shape, slots.get_proc_address, get_proc_address);
    words.set(shape.context, handle::new(Reg).expose_provenance());
    words.leak()
}

/// Makes these the devices of the reg, once; later calls change nothing.
pub(crate) fn publish_devices(devices: Vec<&'static Device>) {
    DEVICES.get_or_init(|| devices.into_iter().map(|device| device::make(device, object())).collect());
}

/// Whether the host finds in our objects what we put there: its own getters, asked on a reg, devices and buffer types of ours, must give
/// back the same objects. A layout that the probe took for another fails here, before the host uses it.
pub(crate) fn reads_back() -> bool {
    let api = &host().api;
    let reg: *mut api3::ggml_backend_reg = object().cast();
    // SAFETY: a reg of ours.
    let name = unsafe { (api.ggml_backend_reg_name)(reg) };
    // The name may be asked in vain when the tests make that slot fail; the answer is the same.
    let named = core::ptr::eq(name, NAME.as_ptr());
    named
        && devices().iter().all(|device| {
            // SAFETY: a device of ours.
            let owner = unsafe { (api.ggml_backend_dev_backend_reg)(device.pointer.cast()) };
            let buft: *mut api3::ggml_backend_buffer_type = core::ptr::without_provenance_mut(device.types.default.0);
            // SAFETY: the default buffer type of a device of ours.
            let of_type = unsafe { (api.ggml_backend_buft_get_device)(buft) };
            let lent = device.device.lends_inner_types();
            core::ptr::eq(owner, reg) && (lent || of_type.addr() == device.pointer.addr())
        })
}

/// Whether devices were published, if only none.
pub(crate) fn has_devices() -> bool {
    DEVICES.get().is_some()
}

fn devices() -> &'static [&'static DeviceObject] {
    DEVICES.get().map_or(&[], Vec::as_slice)
}

/// Whether a buffer type is one of ours.
pub(super) fn owns(type_: BufferTypeKey) -> bool {
    let is_of = |device: &&'static DeviceObject| {
        let lent = device.device.lends_inner_types();
        (!lent && device.types.default == type_) || device.types.experts == Some(type_)
    };
    devices().iter().any(is_of)
}

/// Whether a device is one of ours.
pub(crate) fn owns_device(device: super::super::inner::Device) -> bool {
    devices().iter().any(|object| object.pointer == device.as_ptr().cast())
}

/// Our devices, in order.
pub(crate) fn all() -> Vec<&'static Device> {
    devices().iter().map(|object| object.device).collect()
}

/// Our devices as the host takes them.
#[cfg(all(target_arch = "x86_64", target_os = "linux", target_env = "gnu"))]
pub(crate) fn list() -> super::super::llama::params::DeviceList {
    super::super::llama::params::DeviceList::new(devices().iter().map(|object| object.pointer.cast()).collect())
}

unsafe fn of<'a>(reg: *mut api3::ggml_backend_reg) -> Result<&'a Reg, NotOurs> {
    // SAFETY: the host passes a reg to a reg's slot.
    unsafe { behind(reg.cast(), &host().layout.reg) }
}

unsafe extern "C" fn get_name(reg: *mut api3::ggml_backend_reg) -> *const c_char {
    // SAFETY: the host passes a reg to a reg's slot.
    guard(Slot::RegGetName, || NAME.as_ptr(), || unsafe { of(reg) }.map(|_| NAME.as_ptr()))
}

unsafe extern "C" fn get_device_count(reg: *mut api3::ggml_backend_reg) -> usize {
    // SAFETY: as in `get_name`.
    guard(Slot::RegGetDeviceCount, || 0, || unsafe { of(reg) }.map(|_| devices().len()))
}

unsafe extern "C" fn get_device(reg: *mut api3::ggml_backend_reg, index: usize) -> *mut api3::ggml_backend_device {
    guard(Slot::RegGetDevice, core::ptr::null_mut, || {
        // SAFETY: as in `get_name`.
        unsafe { of(reg) }?;
        Ok::<_, NotOurs>(devices().get(index).map_or(core::ptr::null_mut(), |device| device.pointer.cast()))
    })
}

unsafe extern "C" fn get_proc_address(reg: *mut api3::ggml_backend_reg, name: *const c_char) -> *mut c_void {
    guard(Slot::RegGetProcAddress, core::ptr::null_mut, || {
        // SAFETY: as in `get_name`.
        unsafe { of(reg) }?;
        if name.is_null() {
            return Ok::<_, NotOurs>(core::ptr::null_mut());
        }
        // SAFETY: not null; the host passes a C string.
        Ok(procs::address(unsafe { CStr::from_ptr(name) }))
    })
}
