//! Functions that the host asks of our reg by name.

use core::ffi::{CStr, c_char, c_int, c_void};
use std::ffi::CString;
use std::sync::OnceLock;

use super::super::boundary::{Slot, guard};
use super::super::gen_api3 as api3;
use super::super::handle::NotOurs;
use super::super::host::host;
use super::{backend, device};
use crate::config::GraphMode;

/// The address of the function with this name; null if there is none.
pub(super) fn address(name: &CStr) -> *mut c_void {
    let function = match name.to_bytes() {
        b"ggml_backend_dev_get_extra_bufts" => get_extra_bufts as *const c_void,
        b"ggml_backend_set_n_threads" => set_n_threads as *const c_void,
        b"ggml_backend_set_abort_callback" => set_abort_callback as *const c_void,
        b"ggml_backend_get_features" => get_features as *const c_void,
        b"ggml_moe_slot_names" => slot_names as *const c_void,
        _ => core::ptr::null(),
    };
    function.cast_mut()
}

/// The expert buffer type of a device, as a NULL-terminated list.
unsafe extern "C" fn get_extra_bufts(dev: *mut api3::ggml_backend_device) -> *mut *mut api3::ggml_backend_buffer_type {
    guard(Slot::ProcExtraBufts, core::ptr::null_mut, || {
        // SAFETY: the host passes a device of the reg that gave the function.
        let object = unsafe { device::of(dev) }?;
        Ok::<_, NotOurs>(object.extra_types())
    })
}

/// The host's thread count, for an inner device that computes with threads: results depend on it.
unsafe extern "C" fn set_n_threads(backend: *mut api3::ggml_backend, threads: c_int) {
    guard(
        Slot::ProcSetNThreads,
        || (),
        || {
            // SAFETY: the host passes a backend of the reg that gave the function.
            let backend = unsafe { backend::of(backend) }?;
            backend.device.note_threads(usize::try_from(threads).unwrap_or(0));
            backend.inner.set_threads(&backend.device.inner, threads);
            Ok::<_, NotOurs>(())
        },
    );
}

unsafe extern "C" fn set_abort_callback(
    backend: *mut api3::ggml_backend,
    callback: api3::ggml_abort_callback,
    data: *mut c_void,
) {
    guard(
        Slot::ProcSetAbortCallback,
        || (),
        || {
            // SAFETY: as in `set_n_threads`.
            let backend = unsafe { backend::of(backend) }?;
            // SAFETY: the host's own pair, passed on as it is.
            unsafe { backend.inner.set_abort(&backend.device.inner, callback, data) };
            Ok::<_, NotOurs>(())
        },
    );
}

struct Features {
    list: Vec<api3::ggml_backend_feature>,
    _texts: Vec<CString>,
}

// SAFETY: constant after its making; the pointers lead into `_texts` and static strings.
unsafe impl Send for Features {}
// SAFETY: as above.
unsafe impl Sync for Features {}

/// What this build is, as the host prints it in its system information; NULL-terminated.
unsafe extern "C" fn get_features(_reg: *mut api3::ggml_backend_reg) -> *mut api3::ggml_backend_feature {
    static FEATURES: OnceLock<Features> = OnceLock::new();
    guard(Slot::ProcGetFeatures, core::ptr::null_mut, || {
        let features = FEATURES.get_or_init(features);
        Ok::<_, NotOurs>(features.list.as_ptr().cast_mut())
    })
}

fn features() -> Features {
    let fusion = if host().graphs == GraphMode::View { "1" } else { "0" };
    let texts: Vec<CString> = [env!("CARGO_PKG_VERSION"), host().layout_name(), fusion]
        .into_iter()
        .map(|text| CString::new(text).unwrap_or_default())
        .collect();
    let names = [c"VERSION", c"LAYOUT", c"FUSION"];
    let mut list: Vec<api3::ggml_backend_feature> = names
        .iter()
        .zip(&texts)
        .map(|(name, text)| api3::ggml_backend_feature { name: name.as_ptr(), value: text.as_ptr() })
        .collect();
    list.push(api3::ggml_backend_feature { name: core::ptr::null(), value: core::ptr::null() });
    Features { list, _texts: texts }
}

struct Names(Vec<*const c_char>);

// SAFETY: constant pointers to static strings.
unsafe impl Send for Names {}
// SAFETY: as above.
unsafe impl Sync for Names {}

/// Every slot by name, NULL-terminated: the tests of the boundary make each of them panic. Calls nothing of the host.
unsafe extern "C" fn slot_names() -> *const *const c_char {
    static NAMES: OnceLock<Names> = OnceLock::new();
    let names = NAMES.get_or_init(|| {
        let names = Slot::C_NAMES.iter().map(|name| name.as_ptr());
        Names(names.chain([core::ptr::null()]).collect())
    });
    names.0.as_ptr()
}
