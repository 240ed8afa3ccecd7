//! The functions of ggml that the plugin calls, looked up by name.
//!
//! Owns: the table of required and optional names.
//! Invariants: a table exists only if every required function was found; what is missing is listed completely.
//! Threads: any; the table is constant.
//! Does not: link ggml. The library may be in the global scope (a program that links it) or not (a Python wheel), so names are
//! looked up in the process first and then in each loaded object whose file name says ggml.

use core::ffi::{CStr, c_int, c_void};
use std::ffi::CString;

use super::gen_api3 as api3;

/// The function type inside bindgen's optional one.
pub(crate) trait Present {
    type Function;
}
impl<F> Present for Option<F> {
    type Function = F;
}

macro_rules! imports {
    (required { $($name:ident: $function:ident,)* } optional { $($maybe:ident: $maybe_function:ident,)* }) => {
        /// The host's functions, under their own names.
        #[derive(Clone)]
        pub(crate) struct Imports {
            $(pub(crate) $name: <api3::$function as Present>::Function,)*
            $(pub(crate) $maybe: api3::$maybe_function,)*
            /// `ggml_backend_buffer_init` takes a vtable by value; only the layout knows how to call it.
            pub(crate) ggml_backend_buffer_init: *const c_void,
        }

        impl Imports {
            /// How many functions are required.
            pub(crate) const REQUIRED: usize = [$(stringify!($name)),*].len() + 1;

            /// Looks up every name. Err lists all required names that are missing.
            pub(crate) fn resolve(lookup: &dyn Fn(&CStr) -> *mut c_void) -> Result<Self, Vec<&'static str>> {
                let mut missing = Vec::new();
                let mut find = |name: &'static CStr| {
                    let address = lookup(name);
                    if address.is_null() {
                        missing.push(name.to_str().unwrap_or(""));
                    }
                    address
                };
                $(let $name = find(c_name(concat!(stringify!($name), "\0")));)*
                let ggml_backend_buffer_init = find(c"ggml_backend_buffer_init").cast_const();
                if !missing.is_empty() {
                    return Err(missing);
                }
                Ok(Self {
                    // SAFETY: the address is not null and belongs to the exported function of this name, whose type is checked
                    // against the real headers by tests/abi_conformance.rs.
                    $($name: unsafe {
                        core::mem::transmute::<*mut c_void, <api3::$function as Present>::Function>($name)
                    },)*
                    // SAFETY: as above; null becomes None.
                    $($maybe: unsafe {
                        core::mem::transmute::<*mut c_void, api3::$maybe_function>(
                            lookup(c_name(concat!(stringify!($maybe), "\0"))))
                    },)*
                    ggml_backend_buffer_init,
                })
            }
        }
    };
}

const fn c_name(bytes: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(bytes.as_bytes()) {
        Ok(name) => name,
        Err(_) => c"",
    }
}

imports! {
    required {
        ggml_backend_reg_count: fn_ggml_backend_reg_count,
        ggml_backend_reg_get: fn_ggml_backend_reg_get,
        ggml_backend_dev_count: fn_ggml_backend_dev_count,
        ggml_backend_dev_get: fn_ggml_backend_dev_get,
        ggml_backend_reg_name: fn_ggml_backend_reg_name,
        ggml_backend_reg_get_proc_address: fn_ggml_backend_reg_get_proc_address,
        ggml_backend_dev_name: fn_ggml_backend_dev_name,
        ggml_backend_dev_description: fn_ggml_backend_dev_description,
        ggml_backend_dev_memory: fn_ggml_backend_dev_memory,
        ggml_backend_dev_type: fn_ggml_backend_dev_type,
        ggml_backend_dev_get_props: fn_ggml_backend_dev_get_props,
        ggml_backend_dev_backend_reg: fn_ggml_backend_dev_backend_reg,
        ggml_backend_dev_init: fn_ggml_backend_dev_init,
        ggml_backend_dev_buffer_type: fn_ggml_backend_dev_buffer_type,
        ggml_backend_dev_host_buffer_type: fn_ggml_backend_dev_host_buffer_type,
        ggml_backend_dev_supports_buft: fn_ggml_backend_dev_supports_buft,
        ggml_backend_dev_supports_op: fn_ggml_backend_dev_supports_op,
        ggml_backend_buft_alloc_buffer: fn_ggml_backend_buft_alloc_buffer,
        ggml_backend_buft_get_device: fn_ggml_backend_buft_get_device,
        ggml_backend_buft_get_alignment: fn_ggml_backend_buft_get_alignment,
        ggml_backend_buft_get_max_size: fn_ggml_backend_buft_get_max_size,
        ggml_backend_buft_get_alloc_size: fn_ggml_backend_buft_get_alloc_size,
        ggml_backend_buft_is_host: fn_ggml_backend_buft_is_host,
        ggml_backend_cpu_buffer_type: fn_ggml_backend_cpu_buffer_type,
        ggml_backend_buffer_free: fn_ggml_backend_buffer_free,
        ggml_backend_buffer_get_base: fn_ggml_backend_buffer_get_base,
        ggml_backend_buffer_get_size: fn_ggml_backend_buffer_get_size,
        ggml_backend_buffer_get_usage: fn_ggml_backend_buffer_get_usage,
        ggml_backend_buffer_get_type: fn_ggml_backend_buffer_get_type,
        ggml_backend_tensor_set: fn_ggml_backend_tensor_set,
        ggml_backend_tensor_get: fn_ggml_backend_tensor_get,
        ggml_backend_tensor_memset: fn_ggml_backend_tensor_memset,
        ggml_backend_tensor_set_async: fn_ggml_backend_tensor_set_async,
        ggml_backend_tensor_get_async: fn_ggml_backend_tensor_get_async,
        ggml_backend_buffer_copy_tensor: fn_ggml_backend_buffer_copy_tensor,
        ggml_backend_free: fn_ggml_backend_free,
        ggml_backend_synchronize: fn_ggml_backend_synchronize,
        ggml_backend_graph_compute_async: fn_ggml_backend_graph_compute_async,
        ggml_backend_event_new: fn_ggml_backend_event_new,
        ggml_backend_event_free: fn_ggml_backend_event_free,
        ggml_backend_event_record: fn_ggml_backend_event_record,
        ggml_backend_event_synchronize: fn_ggml_backend_event_synchronize,
        ggml_backend_event_wait: fn_ggml_backend_event_wait,
        ggml_op_name: fn_ggml_op_name,
        ggml_op_desc: fn_ggml_op_desc,
        ggml_is_contiguous: fn_ggml_is_contiguous,
        ggml_type_name: fn_ggml_type_name,
        ggml_row_size: fn_ggml_row_size,
        ggml_is_quantized: fn_ggml_is_quantized,
        ggml_nbytes: fn_ggml_nbytes,
        ggml_tensor_overhead: fn_ggml_tensor_overhead,
        ggml_get_name: fn_ggml_get_name,
        ggml_set_name: fn_ggml_set_name,
        ggml_set_input: fn_ggml_set_input,
        ggml_init: fn_ggml_init,
        ggml_free: fn_ggml_free,
        ggml_new_tensor_3d: fn_ggml_new_tensor_3d,
        ggml_view_1d: fn_ggml_view_1d,
        ggml_add: fn_ggml_add,
        ggml_graph_overhead_custom: fn_ggml_graph_overhead_custom,
        ggml_new_graph_custom: fn_ggml_new_graph_custom,
        ggml_graph_size: fn_ggml_graph_size,
        ggml_graph_n_nodes: fn_ggml_graph_n_nodes,
        ggml_graph_node: fn_ggml_graph_node,
        ggml_graph_nodes: fn_ggml_graph_nodes,
        ggml_graph_add_node: fn_ggml_graph_add_node,
        ggml_build_forward_expand: fn_ggml_build_forward_expand,
    }
    optional {
        ggml_backend_tensor_set_2d: fn_ggml_backend_tensor_set_2d,
        ggml_backend_tensor_get_2d: fn_ggml_backend_tensor_get_2d,
        ggml_log_internal: fn_ggml_log_internal,
    }
}

// SAFETY: the table holds addresses of functions, constant for the life of the process; ggml's functions used here are callable
// from any thread (what they are called on is guarded by the wrapper of that object).
unsafe impl Send for Imports {}
// SAFETY: as above.
unsafe impl Sync for Imports {}

/// Finds a function of the host: in the process's global scope, else in a loaded object named like ggml.
pub(crate) fn host_symbol(name: &CStr) -> *mut c_void {
    // SAFETY: a valid C string; dlsym has no other requirement.
    let global = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    if global.is_null() { in_ggml_objects(name) } else { global }
}

/// The ggml libraries of this process, by a file of each: more than one cannot be told apart.
pub(crate) fn ggml_libraries() -> Vec<String> {
    let name = c"ggml_backend_dev_count";
    let mut found: Vec<(*mut c_void, String)> = Vec::new();
    for object in loaded_objects() {
        let address = symbol_of(&object, name);
        // Objects of one library find the same function through each other.
        if !address.is_null() && !found.iter().any(|(known, _)| *known == address) {
            found.push((address, object.to_string_lossy().into_owned()));
        }
    }
    found.into_iter().map(|(_, file)| file).collect()
}

fn in_ggml_objects(name: &CStr) -> *mut c_void {
    let objects = loaded_objects();
    let found = objects.iter().map(|object| symbol_of(object, name)).find(|address| !address.is_null());
    found.unwrap_or(core::ptr::null_mut())
}

/// The names are collected first and opened afterwards: the loader holds a lock while it iterates.
pub(super) fn loaded_objects() -> Vec<CString> {
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _size: usize, data: *mut c_void) -> c_int {
        // SAFETY: dl_iterate_phdr passes a valid record for the duration of the call.
        let object = unsafe { (*info).dlpi_name };
        if !object.is_null() {
            // SAFETY: the loader's names are C strings.
            let object = unsafe { CStr::from_ptr(object) };
            // SAFETY: `data` is the list that the caller below keeps alive and uses in no other way meanwhile.
            let objects = unsafe { &mut *data.cast::<Vec<CString>>() };
            objects.push(object.to_owned());
        }
        0
    }
    let mut objects: Vec<CString> = Vec::new();
    // SAFETY: `visit` does not unwind (it only copies names) and does not keep the pointer.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut objects).cast()) };
    objects
}

/// The symbol of one loaded object, if its file name starts with libggml and it is not this plugin.
fn symbol_of(object: &CStr, name: &CStr) -> *mut c_void {
    let path = object.to_bytes();
    let file = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
    let ours = file.starts_with(b"libggml-moe") || file.starts_with(b"libggml_moe");
    if !file.starts_with(b"libggml") || ours {
        return core::ptr::null_mut();
    }
    // SAFETY: a valid C string; NOLOAD only returns a handle to what is loaded already.
    let handle = unsafe { libc::dlopen(object.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return handle;
    }
    // SAFETY: an open handle and a C string.
    let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
    // SAFETY: balances the dlopen above; the host itself keeps the object loaded.
    unsafe { libc::dlclose(handle) };
    address
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_missing_name_is_listed() {
        let nothing = |_: &CStr| core::ptr::null_mut();
        let missing = Imports::resolve(&nothing).err().unwrap();
        assert!(missing.len() > 50);
        assert!(missing.contains(&"ggml_backend_buffer_init"));
        assert!(!missing.contains(&"ggml_log_internal"), "the log is optional");
        assert!(!missing.contains(&"ggml_backend_tensor_set_2d"), "older layouts have no copies of rows");
        let all_but_one = |name: &CStr| {
            if name == c"ggml_op_name" { core::ptr::null_mut() } else { core::ptr::dangling_mut::<c_void>() }
        };
        assert_eq!(Imports::resolve(&all_but_one).err().unwrap(), ["ggml_op_name"]);
    }

    #[test]
    fn process_symbols_are_found() {
        assert!(!host_symbol(c"malloc").is_null());
        assert!(host_symbol(c"ggml_moe_no_such_symbol").is_null());
    }
}
