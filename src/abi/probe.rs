//! Which layout does this host have?
//!
//! The api version does not tell layouts apart (version 2 grew slots in mid-table), so each known layout is tried against
//! objects that every host has: the CPU buffer type that lives in ggml's base library, a small buffer of it, a registered
//! device, tensors and a graph. Nothing is guessed: a host that fits no row is refused.
//! Does not: start threads, open devices, or change anything in the host.

use core::ffi::{CStr, c_int, c_void};
use core::mem::offset_of;
use core::ptr::NonNull;

use super::gen_api3 as api3;
use super::graph::examine;
use super::host::Host;
use super::imports::{Imports, ggml_libraries, host_symbol};
use super::layout::{LAYOUTS, Layout, field};
use super::ops::Ops;
use crate::config::GraphMode;

/// Why a host cannot be served at all.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    /// Functions are missing: not ggml, a static build, or a release we do not know.
    #[error("this host does not export {}: it is not a shared build of ggml that this plugin knows", .0.join(", "))]
    MissingFunctions(Vec<&'static str>),
    /// None of the functions is there.
    #[error("this host exports none of ggml's functions: it is a static build, or not ggml")]
    NoFunctions,
    /// Several ggml libraries: which of them loaded us cannot be told.
    #[error("this process holds {} ggml libraries, which cannot be told apart ({})", .0.len(), .0.join(", "))]
    SeveralLibraries(Vec<String>),
    /// No row of the layout table fits.
    #[error("the binary layout of this host is not known ({0})")]
    UnknownLayout(String),
    /// An op that the plugin needs has no number.
    #[error("this host has no op named {0}")]
    MissingOps(String),
    /// The host has registered no device to stand in front of.
    #[error("the host has registered no device yet that the plugin could stand in front of")]
    NoDevices,
}

impl Refusal {
    /// What the user can do.
    pub(crate) fn advice(&self) -> &'static str {
        match self {
            Self::NoDevices => "load the plugin after the host's own backends (GGML_BACKEND_PATH does)",
            _ => "the plugin stays off: remove --device MoE0, or use a host listed in docs/hosts.md",
        }
    }
}

/// Finds out everything about the host that loaded us.
pub(crate) fn probe(graphs: Option<GraphMode>) -> Result<Host, Refusal> {
    let libraries = ggml_libraries();
    if libraries.len() > 1 {
        return Err(Refusal::SeveralLibraries(libraries));
    }
    let missing = |names: Vec<&'static str>| {
        if names.len() >= Imports::REQUIRED { Refusal::NoFunctions } else { Refusal::MissingFunctions(names) }
    };
    let api = Imports::resolve(&host_symbol).map_err(missing)?;
    if !type_numbers(&api) {
        return Err(Refusal::UnknownLayout("type numbers differ".to_owned()));
    }
    if !tensor_layout(&api) {
        return Err(Refusal::UnknownLayout("tensors differ".to_owned()));
    }
    let layout = choose(&api)?;
    let ops = Ops::resolve(&|number| op_name(&api, number)).map_err(Refusal::MissingOps)?;
    let graph_facts = examine(&api);
    let known = if graph_facts.fits { GraphMode::View } else { GraphMode::AddNode };
    // A view of a graph whose struct is not known would be read wrong, so the test key chooses only downwards.
    let graphs = if graphs == Some(GraphMode::AddNode) { GraphMode::AddNode } else { known };
    Ok(Host { api, layout, ops, graphs, graph_facts })
}

fn op_name(api: &Imports, number: u32) -> Option<&'static CStr> {
    // SAFETY: `Ops::resolve` asks upwards and stops at the last op, so the number is inside the host's table.
    let name = unsafe { (api.ggml_op_name)(number) };
    // SAFETY: op names are static C strings; null is checked first.
    (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) })
}

/// Type numbers are those of GGUF files and never change; the few that we use are checked by name all the same.
fn type_numbers(api: &Imports) -> bool {
    let known = [
        (api3::GGML_TYPE_F32, c"f32"),
        (api3::GGML_TYPE_F16, c"f16"),
        (api3::GGML_TYPE_I8, c"i8"),
        (api3::GGML_TYPE_I32, c"i32"),
    ];
    known.into_iter().all(|(number, expected)| {
        // SAFETY: numbers below 32 have been in the host's table since these types exist.
        let name = unsafe { (api.ggml_type_name)(number) };
        // SAFETY: type names are static C strings; null is checked first.
        !name.is_null() && unsafe { CStr::from_ptr(name) } == expected
    })
}

fn choose(api: &Imports) -> Result<&'static Layout, Refusal> {
    // SAFETY: no preconditions; the type lives in the base library for good.
    let buft = unsafe { (api.ggml_backend_cpu_buffer_type)() };
    let Some(buft) = NonNull::new(buft) else {
        return Err(Refusal::UnknownLayout("no CPU buffer type".to_owned()));
    };
    let version = registered_version(api);
    let fits = |layout: &&&'static Layout| {
        version.is_none_or(|version| version == layout.api_version)
            && buffer_type_fits(layout, buft.as_ptr().cast())
            && buffer_fits(api, layout, buft)
            && device_fits(api, layout)
            && properties_fit(api)
    };
    LAYOUTS.iter().find(fits).copied().ok_or_else(|| {
        let known: Vec<&str> = LAYOUTS.iter().map(|layout| layout.name).collect();
        let known = known.join(", ");
        let is_known = |version: &c_int| LAYOUTS.iter().any(|layout| layout.api_version == *version);
        Refusal::UnknownLayout(match version {
            Some(version) if is_known(&version) => {
                format!(
                    "backend api version {version}, but its objects look otherwise than those of the layouts {known}"
                )
            }
            Some(version) => format!("backend api version {version}; this plugin knows the layouts {known}"),
            None => format!("its objects look otherwise than those of the layouts {known}"),
        })
    })
}

/// The api version of a backend that the host has accepted; it is the first int of every reg in every version.
fn registered_version(api: &Imports) -> Option<c_int> {
    // SAFETY: no preconditions.
    if unsafe { (api.ggml_backend_reg_count)() } == 0 {
        return None;
    }
    // SAFETY: the index is below the count.
    let reg = NonNull::new(unsafe { (api.ggml_backend_reg_get)(0) })?;
    // SAFETY: a valid reg starts with its version.
    Some(unsafe { reg.cast::<c_int>().read() })
}

/// The CPU buffer type: which slots are set tells where the optional ones are.
fn buffer_type_fits(layout: &Layout, buft: *const c_void) -> bool {
    let slots = &layout.buffer_type_slots;
    let set = |slot: Option<usize>| {
        slot.is_some_and(|offset| {
            // SAFETY: every known layout of a buffer type is at most as large as the largest row; a static object in the
            // library's data section is followed by more of it.
            unsafe { field::<usize>(buft, layout.buffer_type.iface + offset) != 0 }
        })
    };
    let words = layout.buffer_type.iface_size / size_of::<usize>();
    let used = (0..words)
        // SAFETY: as above.
        .filter(|index| unsafe { field::<usize>(buft, layout.buffer_type.iface + index * size_of::<usize>()) } != 0)
        .count();
    let required = [slots.get_name, slots.alloc_buffer, slots.get_alignment, slots.is_host];
    let optional = [slots.get_max_size, slots.get_alloc_size, slots.get_alloc_size_n];
    required.into_iter().all(set) && !optional.into_iter().any(set) && used == required.len()
}

/// A small CPU buffer: type and size must be where the layout says, and the optional slots empty.
fn buffer_fits(api: &Imports, layout: &Layout, buft: NonNull<api3::ggml_backend_buffer_type>) -> bool {
    const BYTES: usize = 4096;
    // SAFETY: a valid buffer type.
    let Some(buffer) = NonNull::new(unsafe { (api.ggml_backend_buft_alloc_buffer)(buft.as_ptr(), BYTES) }) else {
        return false;
    };
    let object: *const c_void = buffer.as_ptr().cast();
    let slots = &layout.buffer_slots;
    let at = |offset: usize| {
        // SAFETY: a buffer object is heap memory of at least the smallest known layout (13 words), and the offsets of the rows
        // are checked in order: the type comes before the size.
        unsafe { field::<usize>(object, offset) }
    };
    let set = |slot: Option<usize>| slot.is_some_and(|offset| at(layout.buffer.iface + offset) != 0);
    let fits = at(layout.buffer_buft) == buft.addr().get()
        && at(layout.buffer_size) == BYTES
        && set(slots.free_buffer)
        && set(slots.get_base)
        && set(slots.set_tensor)
        && set(slots.get_tensor)
        && set(slots.clear)
        && !set(slots.init_tensor)
        && !set(slots.reset);
    // SAFETY: allocated above, freed once.
    unsafe { (api.ggml_backend_buffer_free)(buffer.as_ptr()) };
    fits
}

/// A registered device: its reg must be where the layout says.
fn device_fits(api: &Imports, layout: &Layout) -> bool {
    // SAFETY: no preconditions.
    if unsafe { (api.ggml_backend_dev_count)() } == 0 {
        return true;
    }
    // SAFETY: the index is below the count.
    let Some(device) = NonNull::new(unsafe { (api.ggml_backend_dev_get)(0) }) else {
        return false;
    };
    // SAFETY: a valid device.
    let reg = unsafe { (api.ggml_backend_dev_backend_reg)(device.as_ptr()) };
    let Some(owner) = layout.device.owner else { return false };
    // SAFETY: device objects are at least as large as the table of the row that is tried; they are static or heap objects of the
    // backend, and known layouts differ by no slot here.
    unsafe { field::<usize>(device.as_ptr().cast(), owner) == reg.addr() }
}

/// The properties of a device: no byte behind the known struct is written (its own padding is, by the host). Asked of the CPU device
/// only, because others may open a context to answer.
fn properties_fit(api: &Imports) -> bool {
    const ROOM: usize = 512;
    const KNOWN: usize = size_of::<api3::ggml_backend_dev_props>();
    const CAPS: usize = offset_of!(api3::ggml_backend_dev_props, caps);
    // SAFETY: no preconditions.
    let count = unsafe { (api.ggml_backend_dev_count)() };
    let is_cpu = |device: &NonNull<api3::ggml_backend_device>| {
        // SAFETY: a valid device.
        unsafe { (api.ggml_backend_dev_type)(device.as_ptr()) == api3::GGML_BACKEND_DEVICE_TYPE_CPU }
    };
    // SAFETY: the index is below the count.
    let mut devices = (0..count).filter_map(|index| NonNull::new(unsafe { (api.ggml_backend_dev_get)(index) }));
    let Some(device) = devices.find(is_cpu) else {
        return true;
    };
    let written = |pattern: u8| {
        let mut room = vec![u64::from_ne_bytes([pattern; 8]); ROOM / 8];
        // SAFETY: a valid device; the room is aligned and larger than any such struct has been.
        unsafe { (api.ggml_backend_dev_get_props)(device.as_ptr(), room.as_mut_ptr().cast()) };
        room.iter().flat_map(|word| word.to_ne_bytes()).map(|byte| byte != pattern).collect::<Vec<bool>>()
    };
    // Two patterns, since a byte may be written with the value that was there.
    let (first, second) = (written(0xa5), written(0x5a));
    let touched: Vec<bool> = first.iter().zip(&second).map(|(a, b)| *a || *b).collect();
    touched[CAPS] && !touched[KNOWN..].contains(&true)
}

/// Tensors: every field that we read is set through a public function and read back through the mirror.
fn tensor_layout(api: &Imports) -> bool {
    // SAFETY: a pure function.
    let overhead = unsafe { (api.ggml_tensor_overhead)() };
    // The overhead is an object header and the tensor; a header of another size would be a ggml that we do not know.
    const OBJECT_HEADER: usize = 32;
    if overhead != OBJECT_HEADER + size_of::<api3::ggml_tensor>() {
        return false;
    }
    let params =
        api3::ggml_init_params { mem_size: 8 * overhead + 1024, mem_buffer: core::ptr::null_mut(), no_alloc: true };
    // SAFETY: no preconditions; null on failure.
    let context = unsafe { (api.ggml_init)(params) };
    if context.is_null() {
        return false;
    }
    let good = tensor_fields(api, context).unwrap_or(false);
    // SAFETY: made above, freed once.
    unsafe { (api.ggml_free)(context) };
    good
}

fn tensor_fields(api: &Imports, context: *mut api3::ggml_context) -> Option<bool> {
    // SAFETY: a valid context with room for it.
    let tensor = NonNull::new(unsafe { (api.ggml_new_tensor_3d)(context, api3::GGML_TYPE_F16, 7, 5, 3) })?;
    // SAFETY: as above; 9 elements at byte 4 lie inside the tensor.
    let view = NonNull::new(unsafe { (api.ggml_view_1d)(context, tensor.as_ptr(), 9, 4) })?;
    // SAFETY: as above; two tensors of one shape.
    let sum = NonNull::new(unsafe { (api.ggml_add)(context, tensor.as_ptr(), tensor.as_ptr()) })?;
    // SAFETY: a valid tensor.
    unsafe { (api.ggml_set_input)(tensor.as_ptr()) };
    // SAFETY: a valid tensor and a C string.
    unsafe { (api.ggml_set_name)(tensor.as_ptr(), c"probe".as_ptr()) };
    // SAFETY: a valid tensor.
    let name = unsafe { (api.ggml_get_name)(tensor.as_ptr()) };
    // SAFETY: the overhead says that a tensor has the mirror's size; a new tensor is initialised whole.
    let t = unsafe { tensor.as_ref() };
    // SAFETY: as above.
    let v = unsafe { view.as_ref() };
    // SAFETY: as above.
    let s = unsafe { sum.as_ref() };
    let letters = c"probe".to_bytes_with_nul();
    let named = t.name.iter().zip(letters).all(|(have, want)| have.to_ne_bytes()[0] == *want);
    Some(
        t.type_ == api3::GGML_TYPE_F16
            && t.ne == [7, 5, 3, 1]
            && t.nb == [2, 14, 70, 210]
            && t.flags == api3::GGML_TENSOR_FLAG_INPUT.cast_signed()
            && t.buffer.is_null()
            && t.data.is_null()
            && core::ptr::eq(t.name.as_ptr(), name)
            && named
            && v.view_src == tensor.as_ptr()
            && v.view_offs == 4
            && v.src[0] == tensor.as_ptr()
            && s.src[..3] == [tensor.as_ptr(), tensor.as_ptr(), core::ptr::null_mut()]
            && s.op != v.op,
    )
}
