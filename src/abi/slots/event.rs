//! Slots of events. See `ggml_backend_device_i` in ggml-backend-impl.h.

use core::ffi::c_void;

use super::super::boundary::{Slot, guard};
use super::super::gen_api3 as api3;
use super::super::handle::{self, Kind, NotOurs};
use super::super::inner::Event;
use super::device;

impl Kind for Event {
    const TAG: u64 = 0x4d6f_4545_7665_0005;
    const NAME: &'static str = "event";
}

/// The inner event behind an event of ours.
///
/// # Safety
/// `event` is null or a live event that [`new`] made.
pub(super) unsafe fn of<'a>(event: *mut api3::ggml_backend_event) -> Result<&'a Event, NotOurs> {
    let context = if event.is_null() {
        core::ptr::null_mut()
    } else {
        // SAFETY: not null; an event of ours by the caller's contract.
        unsafe { (*event).context }
    };
    // SAFETY: the context of an event of ours is its handle.
    unsafe { handle::get(context) }
}

pub(super) unsafe extern "C" fn new(dev: *mut api3::ggml_backend_device) -> *mut api3::ggml_backend_event {
    guard(Slot::DeviceEventNew, core::ptr::null_mut, || {
        // SAFETY: the host passes a device to a device's slot.
        let object = unsafe { device::of(dev) }?;
        let Some(event) = object.device.inner.event() else {
            return Ok::<_, NotOurs>(core::ptr::null_mut());
        };
        let context: *mut c_void = handle::new(event);
        Ok(Box::into_raw(Box::new(api3::ggml_backend_event { device: dev, context })))
    })
}

pub(super) unsafe extern "C" fn free(_dev: *mut api3::ggml_backend_device, event: *mut api3::ggml_backend_event) {
    guard(
        Slot::DeviceEventFree,
        || (),
        || {
            // SAFETY: the host passes a live event of ours.
            unsafe { of(event) }?;
            // SAFETY: `of` proved that `new` made it; the host gives up its only use.
            let event = unsafe { Box::from_raw(event) };
            // SAFETY: as above.
            unsafe { handle::free::<Event>(event.context) }.map(drop)
        },
    );
}

pub(super) unsafe extern "C" fn synchronize(dev: *mut api3::ggml_backend_device, event: *mut api3::ggml_backend_event) {
    let poison = || {
        // SAFETY: the host passes a device to a device's slot.
        if let Ok(object) = unsafe { device::of(dev) } {
            object.device.poison();
        }
    };
    // SAFETY: the host passes a live event of ours.
    guard(Slot::DeviceEventSynchronize, poison, || unsafe { of(event) }.map(Event::synchronize));
}
