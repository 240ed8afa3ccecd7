//! The panic boundary: the one way from C into Rust.
//!
//! Owns: the list of slots and what happens when one fails.
//! Invariants: nothing unwinds out of [`guard`]; a failure is logged once with the slot's name and turned into the value
//! that upstream defines for failure.
//! Threads: any; the only state is the slot that the tests make panic, set once at start.
//! Does not: know what a slot does.

use std::any::Any;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::telemetry::log;

macro_rules! slots {
    ($($variant:ident = $name:literal),* $(,)?) => {
        /// A function that the host can call.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Slot { $($variant),* }

        impl Slot {
            /// Every slot.
            pub(crate) const ALL: &'static [Slot] = &[$(Slot::$variant),*];

            /// `object.slot`, in upstream's words.
            pub(crate) fn name(self) -> &'static str {
                match self { $(Slot::$variant => $name),* }
            }

            /// The names of every slot as C strings, for the tests of the boundary.
            pub(crate) const C_NAMES: &'static [&'static std::ffi::CStr] = &[
                $(match std::ffi::CStr::from_bytes_with_nul(concat!($name, "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => c"",
                }),*
            ];
        }
    };
}

slots! {
    EntryInit = "entry.init",
    RegGetName = "reg.get_name",
    RegGetDeviceCount = "reg.get_device_count",
    RegGetDevice = "reg.get_device",
    RegGetProcAddress = "reg.get_proc_address",
    ProcExtraBufts = "proc.get_extra_bufts",
    ProcSetNThreads = "proc.set_n_threads",
    ProcSetAbortCallback = "proc.set_abort_callback",
    ProcGetFeatures = "proc.get_features",
    DeviceGetName = "device.get_name",
    DeviceGetDescription = "device.get_description",
    DeviceGetMemory = "device.get_memory",
    DeviceGetType = "device.get_type",
    DeviceGetProps = "device.get_props",
    DeviceInitBackend = "device.init_backend",
    DeviceGetBufferType = "device.get_buffer_type",
    DeviceGetHostBufferType = "device.get_host_buffer_type",
    DeviceSupportsOp = "device.supports_op",
    DeviceSupportsBuft = "device.supports_buft",
    DeviceEventNew = "device.event_new",
    DeviceEventFree = "device.event_free",
    DeviceEventSynchronize = "device.event_synchronize",
    BufferTypeGetName = "buffer_type.get_name",
    BufferTypeAllocBuffer = "buffer_type.alloc_buffer",
    BufferTypeGetAlignment = "buffer_type.get_alignment",
    BufferTypeGetMaxSize = "buffer_type.get_max_size",
    BufferTypeGetAllocSize = "buffer_type.get_alloc_size",
    BufferTypeGetAllocSizeN = "buffer_type.get_alloc_size_n",
    BufferTypeIsHost = "buffer_type.is_host",
    BufferFreeBuffer = "buffer.free_buffer",
    BufferGetBase = "buffer.get_base",
    BufferInitTensor = "buffer.init_tensor",
    BufferMemsetTensor = "buffer.memset_tensor",
    BufferSetTensor = "buffer.set_tensor",
    BufferGetTensor = "buffer.get_tensor",
    BufferSetTensor2d = "buffer.set_tensor_2d",
    BufferGetTensor2d = "buffer.get_tensor_2d",
    BufferCpyTensor = "buffer.cpy_tensor",
    BufferClear = "buffer.clear",
    BufferReset = "buffer.reset",
    BackendGetName = "backend.get_name",
    BackendFree = "backend.free",
    BackendSetTensorAsync = "backend.set_tensor_async",
    BackendGetTensorAsync = "backend.get_tensor_async",
    BackendCpyTensorAsync = "backend.cpy_tensor_async",
    BackendSynchronize = "backend.synchronize",
    BackendGraphCompute = "backend.graph_compute",
    BackendEventRecord = "backend.event_record",
    BackendEventWait = "backend.event_wait",
    BackendGraphOptimize = "backend.graph_optimize",
}

/// No slot panics on purpose.
const NO_FAULT: usize = usize::MAX;
static FAULT: AtomicUsize = AtomicUsize::new(NO_FAULT);

/// Makes one slot panic at every call (tests only). False if no slot has that name.
pub(crate) fn inject_panic(name: &str) -> bool {
    let position = Slot::ALL.iter().position(|slot| slot.name() == name);
    FAULT.store(position.unwrap_or(NO_FAULT), Ordering::Relaxed);
    position.is_some()
}

/// Runs the body of a slot. On a panic or an error, logs it and returns what `on_failure` gives.
///
/// `on_failure` runs outside the catch: it must not panic, and should do no more than poison and make a value.
pub(crate) fn guard<R, E: Display>(
    slot: Slot,
    on_failure: impl FnOnce() -> R,
    body: impl FnOnce() -> Result<R, E>,
) -> R {
    // The state behind a slot is protected by locks that do not poison and by the device's own poison flag, so a half-done
    // body is seen by nobody: unwind safety is asserted here, once.
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        if FAULT.load(Ordering::Relaxed) == slot as usize {
            injected(slot);
        }
        body()
    }));
    let line = match outcome {
        Ok(Ok(value)) => return value,
        Ok(Err(error)) => format!("{} failed: {error}", slot.name()),
        Err(payload) => format!("panic in {}: {}", slot.name(), message(&*payload)),
    };
    // Even the report may not unwind: a host that is going down can take the log callback with it.
    if catch_unwind(|| log::error(&line)).is_err() {
        // Nothing is left to tell it with.
    }
    on_failure()
}

#[cold]
#[expect(clippy::panic, reason = "the fault that the tests of the boundary inject")]
fn injected(slot: Slot) -> ! {
    panic!("injected by debug-panic={}", slot.name())
}

fn message(payload: &(dyn Any + Send)) -> &str {
    payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_pass_through() {
        assert_eq!(guard(Slot::BufferClear, || 0, || Ok::<_, String>(7)), 7);
    }

    #[test]
    fn errors_and_panics_become_the_failure_value() {
        assert_eq!(guard(Slot::BufferClear, || -1, || Err::<i32, _>("no")), -1);
        assert_eq!(guard(Slot::BufferClear, || -1, || -> Result<i32, String> { panic!("boom {}", 1) }), -1);
    }

    #[test]
    fn names_are_unique_and_well_formed() {
        let mut names: Vec<&str> = Slot::ALL.iter().map(|slot| slot.name()).collect();
        assert!(names.iter().all(|name| name.split('.').count() == 2));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Slot::ALL.len());
        assert_eq!(Slot::C_NAMES.len(), Slot::ALL.len());
        assert!(Slot::C_NAMES.iter().zip(Slot::ALL).all(|(c, slot)| c.to_bytes() == slot.name().as_bytes()));
    }
}
