//! The layouts of ggml's private structs that the plugin knows: one row per layout.
//!
//! ggml's vtables are arrays of function pointers, so a layout is data: where each slot of each object is. Slots are filled
//! and read through these tables; nothing else in the crate depends on the place of a slot. A new layout is one more header
//! set in `ggml-headers/`, its bindings in `gen/`, and one more row here.
//! Does not: decide which layout the host has (`probe` does).

use core::ffi::{c_int, c_void};
use core::mem::{offset_of, size_of};

use super::gen_api2 as api2;
use super::gen_api2_2025 as api2_2025;
use super::gen_api3 as api3;

macro_rules! tables {
    ($($(#[$doc:meta])* $name:ident { $($slot:ident),* $(,)? })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug)]
            pub(crate) struct $name {
                $(pub(crate) $slot: Option<usize>,)*
            }
        )*
    };
}

tables! {
    /// Slots of `ggml_backend_reg_i`, by byte offset; `None` where the layout lacks the slot.
    RegTable { get_name, get_device_count, get_device, get_proc_address }
    /// Slots of `ggml_backend_device_i`.
    DeviceTable {
        get_name, get_description, get_memory, get_type, get_props, init_backend, get_buffer_type, get_host_buffer_type,
        supports_op, supports_buft, event_new, event_free, event_synchronize,
    }
    /// Slots of `ggml_backend_buffer_type_i`.
    BufferTypeTable {
        get_name, alloc_buffer, get_alignment, get_max_size, get_alloc_size, get_alloc_size_n, is_host,
    }
    /// Slots of `ggml_backend_buffer_i`.
    BufferTable {
        free_buffer, get_base, init_tensor, memset_tensor, set_tensor, get_tensor, set_tensor_2d, get_tensor_2d, cpy_tensor,
        clear, reset,
    }
    /// Slots of `ggml_backend_i`.
    BackendTable {
        get_name, free, set_tensor_async, get_tensor_async, cpy_tensor_async, synchronize, graph_compute, event_record,
        event_wait, graph_optimize,
    }
}

/// Where an object keeps its vtable and its fields, by byte offset.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ObjectShape {
    pub(crate) size: usize,
    pub(crate) iface: usize,
    /// Size of the vtable.
    pub(crate) iface_size: usize,
    /// The owner: a device's reg, a buffer type's or a backend's device. Regs and buffers have none.
    pub(crate) owner: Option<usize>,
    pub(crate) context: usize,
}

/// Everything of one layout.
#[derive(Clone, Copy)]
pub(crate) struct Layout {
    /// Named in the log and in docs/hosts.md.
    pub(crate) name: &'static str,
    pub(crate) api_version: c_int,
    pub(crate) reg: ObjectShape,
    pub(crate) reg_slots: RegTable,
    pub(crate) device: ObjectShape,
    pub(crate) device_slots: DeviceTable,
    pub(crate) buffer_type: ObjectShape,
    pub(crate) buffer_type_slots: BufferTypeTable,
    pub(crate) buffer: ObjectShape,
    pub(crate) buffer_slots: BufferTable,
    pub(crate) buffer_buft: usize,
    pub(crate) buffer_size: usize,
    pub(crate) backend_guid: usize,
    pub(crate) backend: ObjectShape,
    pub(crate) backend_slots: BackendTable,
    /// Calls `ggml_backend_buffer_init`, which takes the vtable by value and so depends on its size.
    ///
    /// # Safety
    /// `function` is the host's `ggml_backend_buffer_init`, `iface` a table of `buffer.iface_size` bytes, the rest as there.
    pub(crate) buffer_init: unsafe fn(
        function: *const c_void,
        buft: *mut c_void,
        iface: &Words,
        context: *mut c_void,
        size: usize,
    ) -> *mut c_void,
}

/// Zeroed, pointer-aligned memory for an object or a vtable of the host's layout.
#[derive(Debug)]
pub(crate) struct Words(Box<[usize]>);

impl Words {
    /// Zeroed memory of at least `bytes` bytes.
    pub(crate) fn zeroed(bytes: usize) -> Self {
        Self(vec![0; bytes.div_ceil(size_of::<usize>())].into_boxed_slice())
    }

    /// Stores a pointer-sized value at a byte offset, which the layout tables guarantee to be aligned and inside.
    pub(crate) fn set(&mut self, offset: usize, value: usize) {
        self.0[offset / size_of::<usize>()] = value;
    }

    /// Stores a C int at a byte offset (the low half of its word; the word was zero).
    pub(crate) fn set_int(&mut self, offset: usize, value: c_int) {
        let mut bytes = self.0[offset / size_of::<usize>()].to_ne_bytes();
        bytes[offset % size_of::<usize>()..][..size_of::<c_int>()].copy_from_slice(&value.to_ne_bytes());
        self.set(offset, usize::from_ne_bytes(bytes));
    }

    /// The address of the memory.
    pub(crate) fn as_ptr(&self) -> *const c_void {
        self.0.as_ptr().cast()
    }

    /// Gives the memory to the process for good. Regs, devices and buffer types are never freed, by ggml's design.
    pub(crate) fn leak(self) -> *mut c_void {
        Box::leak(self.0).as_mut_ptr().cast()
    }
}

/// Reads a field of an object of the host.
///
/// # Safety
/// `object` is readable and holds a `T` at `offset`, aligned.
pub(super) unsafe fn field<T: Copy>(object: *const c_void, offset: usize) -> T {
    let place = object.wrapping_byte_add(offset).cast::<T>();
    // SAFETY: the caller's contract.
    unsafe { place.read() }
}

macro_rules! row {
    ($table:ident, $iface:ty { $($slot:ident),* $(,)? }) => {
        $table { $($slot: Some(offset_of!($iface, $slot)),)* }
    };
}

macro_rules! shape {
    ($object:ty, $iface:ty, $owner:expr) => {
        ObjectShape {
            size: size_of::<$object>(),
            iface: offset_of!($object, iface),
            iface_size: size_of::<$iface>(),
            owner: $owner,
            context: offset_of!($object, context),
        }
    };
}

/// Layout of llama.cpp b11434 (ggml 0.26.0).
const API3: Layout = Layout {
    name: "api 3",
    api_version: 3,
    reg: shape!(api3::ggml_backend_reg, api3::ggml_backend_reg_i, None),
    reg_slots: row!(RegTable, api3::ggml_backend_reg_i { get_name, get_device_count, get_device, get_proc_address }),
    device: shape!(
        api3::ggml_backend_device,
        api3::ggml_backend_device_i,
        Some(offset_of!(api3::ggml_backend_device, reg))
    ),
    device_slots: row!(
        DeviceTable,
        api3::ggml_backend_device_i {
            get_name,
            get_description,
            get_memory,
            get_type,
            get_props,
            init_backend,
            get_buffer_type,
            get_host_buffer_type,
            supports_op,
            supports_buft,
            event_new,
            event_free,
            event_synchronize,
        }
    ),
    buffer_type: shape!(
        api3::ggml_backend_buffer_type,
        api3::ggml_backend_buffer_type_i,
        Some(offset_of!(api3::ggml_backend_buffer_type, device))
    ),
    buffer_type_slots: row!(
        BufferTypeTable,
        api3::ggml_backend_buffer_type_i {
            get_name,
            alloc_buffer,
            get_alignment,
            get_max_size,
            get_alloc_size,
            get_alloc_size_n,
            is_host,
        }
    ),
    buffer: shape!(api3::ggml_backend_buffer, api3::ggml_backend_buffer_i, None),
    buffer_slots: row!(
        BufferTable,
        api3::ggml_backend_buffer_i {
            free_buffer,
            get_base,
            init_tensor,
            memset_tensor,
            set_tensor,
            get_tensor,
            set_tensor_2d,
            get_tensor_2d,
            cpy_tensor,
            clear,
            reset,
        }
    ),
    buffer_buft: offset_of!(api3::ggml_backend_buffer, buft),
    buffer_size: offset_of!(api3::ggml_backend_buffer, size),
    backend_guid: offset_of!(api3::ggml_backend, guid),
    backend: shape!(api3::ggml_backend, api3::ggml_backend_i, Some(offset_of!(api3::ggml_backend, device))),
    backend_slots: row!(
        BackendTable,
        api3::ggml_backend_i {
            get_name,
            free,
            set_tensor_async,
            get_tensor_async,
            cpy_tensor_async,
            synchronize,
            graph_compute,
            event_record,
            event_wait,
            graph_optimize,
        }
    ),
    buffer_init: buffer_init::<api3::ggml_backend_buffer_i>,
};

/// Layout of llama.cpp b10434 (ggml 0.20.0) and of what came after 2026-04-09 with api version 2: buffer types know no lists of
/// tensors.
const API2: Layout = Layout {
    name: "api 2",
    api_version: 2,
    buffer_type: shape!(
        api2::ggml_backend_buffer_type,
        api2::ggml_backend_buffer_type_i,
        Some(offset_of!(api2::ggml_backend_buffer_type, device))
    ),
    buffer_type_slots: BufferTypeTable {
        get_name: Some(offset_of!(api2::ggml_backend_buffer_type_i, get_name)),
        alloc_buffer: Some(offset_of!(api2::ggml_backend_buffer_type_i, alloc_buffer)),
        get_alignment: Some(offset_of!(api2::ggml_backend_buffer_type_i, get_alignment)),
        get_max_size: Some(offset_of!(api2::ggml_backend_buffer_type_i, get_max_size)),
        get_alloc_size: Some(offset_of!(api2::ggml_backend_buffer_type_i, get_alloc_size)),
        get_alloc_size_n: None,
        is_host: Some(offset_of!(api2::ggml_backend_buffer_type_i, is_host)),
    },
    backend_guid: offset_of!(api2::ggml_backend, guid),
    backend: shape!(api2::ggml_backend, api2::ggml_backend_i, Some(offset_of!(api2::ggml_backend, device))),
    backend_slots: row!(
        BackendTable,
        api2::ggml_backend_i {
            get_name,
            free,
            set_tensor_async,
            get_tensor_async,
            cpy_tensor_async,
            synchronize,
            graph_compute,
            event_record,
            event_wait,
            graph_optimize,
        }
    ),
    ..API3
};

/// Layout of ggml 0.9.4 to 0.9.11, before 2026-04-09: no copies of rows.
const API2_2025: Layout = Layout {
    name: "api 2 of 2025",
    buffer: shape!(api2_2025::ggml_backend_buffer, api2_2025::ggml_backend_buffer_i, None),
    buffer_slots: BufferTable {
        free_buffer: Some(offset_of!(api2_2025::ggml_backend_buffer_i, free_buffer)),
        get_base: Some(offset_of!(api2_2025::ggml_backend_buffer_i, get_base)),
        init_tensor: Some(offset_of!(api2_2025::ggml_backend_buffer_i, init_tensor)),
        memset_tensor: Some(offset_of!(api2_2025::ggml_backend_buffer_i, memset_tensor)),
        set_tensor: Some(offset_of!(api2_2025::ggml_backend_buffer_i, set_tensor)),
        get_tensor: Some(offset_of!(api2_2025::ggml_backend_buffer_i, get_tensor)),
        set_tensor_2d: None,
        get_tensor_2d: None,
        cpy_tensor: Some(offset_of!(api2_2025::ggml_backend_buffer_i, cpy_tensor)),
        clear: Some(offset_of!(api2_2025::ggml_backend_buffer_i, clear)),
        reset: Some(offset_of!(api2_2025::ggml_backend_buffer_i, reset)),
    },
    buffer_buft: offset_of!(api2_2025::ggml_backend_buffer, buft),
    buffer_size: offset_of!(api2_2025::ggml_backend_buffer, size),
    backend_guid: offset_of!(api2_2025::ggml_backend, guid),
    backend: shape!(
        api2_2025::ggml_backend,
        api2_2025::ggml_backend_i,
        Some(offset_of!(api2_2025::ggml_backend, device))
    ),
    backend_slots: row!(
        BackendTable,
        api2_2025::ggml_backend_i {
            get_name,
            free,
            set_tensor_async,
            get_tensor_async,
            cpy_tensor_async,
            synchronize,
            graph_compute,
            event_record,
            event_wait,
            graph_optimize,
        }
    ),
    buffer_init: buffer_init::<api2_2025::ggml_backend_buffer_i>,
    ..API2
};

/// Every layout that the plugin can serve. The older rows are tried first: a larger object can be read as a smaller one, but not the other
/// way round.
pub(crate) static LAYOUTS: &[&Layout] = &[&API2_2025, &API2, &API3];

/// Calls `ggml_backend_buffer_init` with a vtable of type `Iface` by value.
///
/// # Safety
/// As for [`Layout::buffer_init`]; `Iface` is the bindgen type of the layout's buffer vtable (pointers only).
unsafe fn buffer_init<Iface: Copy>(
    function: *const c_void,
    buft: *mut c_void,
    iface: &Words,
    context: *mut c_void,
    size: usize,
) -> *mut c_void {
    type Init<Iface> = unsafe extern "C" fn(*mut c_void, Iface, *mut c_void, usize) -> *mut c_void;
    // SAFETY: the caller passes the host's function of this name, whose signature this is for the layout of `Iface`.
    let init = unsafe { core::mem::transmute::<*const c_void, Init<Iface>>(function) };
    // SAFETY: `iface` holds at least size_of::<Iface>() bytes, pointer-aligned; any words are a valid table of optional slots
    // because the caller stored only functions of the slots' types or zero.
    let table = unsafe { iface.as_ptr().cast::<Iface>().read() };
    // SAFETY: the arguments are what the host's function asks for, by the caller's contract.
    unsafe { init(buft, table, context, size) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_hold_what_is_stored() {
        let mut words = Words::zeroed(20);
        words.set(8, 7);
        words.set_int(0, 3);
        // SAFETY: 24 bytes were allocated, the first four hold a C int.
        assert_eq!(unsafe { words.as_ptr().cast::<c_int>().read() }, 3);
        assert_eq!(&*words.0, &[usize::from_ne_bytes([3, 0, 0, 0, 0, 0, 0, 0]), 7, 0]);
    }

    #[test]
    fn rows_are_made_of_aligned_words() {
        for layout in LAYOUTS {
            for shape in [&layout.reg, &layout.device, &layout.buffer_type, &layout.buffer, &layout.backend] {
                for offset in [Some(shape.iface), shape.owner, Some(shape.context)].into_iter().flatten() {
                    assert_eq!(offset % size_of::<usize>(), 0, "{}", layout.name);
                    assert!(offset < shape.size, "{}", layout.name);
                }
            }
        }
    }
}
