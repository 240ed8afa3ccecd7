//! Functions that this library defines under names of glibc, ggml and llama.cpp, for the case that it is preloaded.
//!
//! Owns: the exports, and the way from each to the function that it stands before.
//! Invariants: a function here ends in a jump to the real one with the arguments where the caller put them, so that it needs no type of
//! llama.cpp's and no frame of ours lies above the host's; what it changes are arguments alone. Without a call of `start` that found
//! a llama.cpp, nothing is changed. A library that a program opens (`GGML_BACKEND_PATH`) stands behind all others: nobody's calls come here.
//! Threads: any. Does not: decide anything (`preload` does).
#![cfg_attr(test, expect(dead_code, reason = "a test program must not export these names to itself"))]

use core::arch::naked_asm;
use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use super::imports::loaded_objects;
use crate::preload;
use params::{ContextParams, ModelParams};

/// The registers that hold a call's first arguments, in memory while ours runs. What is written to them is what the real function gets.
#[repr(C)]
struct Registers {
    rdi: u64,
    rsi: u64,
    rdx: u64,
    rcx: u64,
    r8: u64,
    r9: u64,
    rax: u64,
}

/// Defines an exported function that saves the registers of arguments, calls `$prepare` with them and with the address of the arguments on
/// the stack, restores them and jumps to what `$prepare` returned; if that is null, it returns null.
macro_rules! before {
    ($($(#[$doc:meta])* $name:ident: $prepare:path,)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// Called as the function of this name is, by the host only.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() {
            naked_asm!(
                "push rax",
                "push r9",
                "push r8",
                "push rcx",
                "push rdx",
                "push rsi",
                "push rdi",
                // Seven registers and the return address: the stack is aligned for the call.
                "mov rdi, rsp",
                "lea rsi, [rsp + 64]",
                "call {prepare}",
                "mov r11, rax",
                "pop rdi",
                "pop rsi",
                "pop rdx",
                "pop rcx",
                "pop r8",
                "pop r9",
                "pop rax",
                "test r11, r11",
                "jz 2f",
                "jmp r11",
                "2:",
                "xor eax, eax",
                "ret",
                prepare = sym $prepare,
            )
        }
    )*};
}

mod equal;
mod mask;
pub(crate) mod params;

pub(crate) use mask::shares_masks;

before! {
    /// Takes our arguments out of the program's before its `main` runs.
    __libc_start_main: start,
    /// Chooses devices for a model file, if it is to be helped.
    llama_model_load_from_file: load_file,
    /// The same for a model whose files are listed.
    llama_model_load_from_splits: load_splits,
    /// The same for an open file.
    llama_model_load_from_file_ptr: load_open_file,
    /// Sets the length of passes of a context, where the user left it open.
    llama_init_from_model: init_context,
}

/// Runs `body` where nothing may unwind.
fn contained(body: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(body)).is_err() {
        // The panic was printed by the hook; the host goes on as if nothing had been asked.
    }
}

unsafe extern "C" fn start(registers: *mut Registers, _stack: *mut u8) -> *mut c_void {
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    contained(|| {
        // SAFETY: the caller saved them there; nobody else knows them.
        let registers = unsafe { &mut *registers };
        if in_order(c"llama_model_load_from_file").is_null() || in_order(c"ggml_backend_load").is_null() {
            return;
        }
        let argv: *mut *mut c_char = core::ptr::with_exposed_provenance_mut(address(registers.rdx));
        let count = usize::try_from(registers.count()).unwrap_or(0);
        // SAFETY: the arguments of a process are an array of so many pointers to C strings, which live as long as it.
        let words: Vec<*mut c_char> = (0..count).map(|index| unsafe { argv.wrapping_add(index).read() }).collect();
        // SAFETY: as above.
        let texts: Vec<&[u8]> = words.iter().map(|word| unsafe { CStr::from_ptr(*word) }.to_bytes()).collect();
        let Some(kept) = preload::start(&texts) else { return };
        let mut kept: Vec<*mut c_char> = kept.into_iter().filter_map(|index| words.get(index).copied()).collect();
        registers.rsi = kept.len() as u64;
        kept.push(null_mut());
        // The arguments of a process are never freed.
        registers.rdx = kept.leak().as_mut_ptr().expose_provenance() as u64;
    });
    next(&REAL, c"__libc_start_main")
}

impl Registers {
    /// The second argument of `__libc_start_main`, which is an int.
    fn count(&self) -> c_int {
        #[expect(clippy::cast_possible_truncation, reason = "an argument of type int fills half of the register")]
        let count = self.rsi as c_int;
        count
    }
}

fn address(register: u64) -> usize {
    usize::try_from(register).unwrap_or(0)
}

unsafe extern "C" fn load_file(registers: *mut Registers, stack: *mut u8) -> *mut c_void {
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    contained(|| {
        // SAFETY: as in `start`.
        let registers = unsafe { &*registers };
        let path: *const c_char = core::ptr::with_exposed_provenance(address(registers.rdi));
        let files = || {
            // SAFETY: the caller passes a C string or null.
            Some(vec![unsafe { path_of(path) }?])
        };
        // SAFETY: the parameters are passed by value.
        unsafe { load(&files, stack) };
    });
    next(&REAL, c"llama_model_load_from_file")
}

unsafe extern "C" fn load_splits(registers: *mut Registers, stack: *mut u8) -> *mut c_void {
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    contained(|| {
        // SAFETY: as in `start`.
        let registers = unsafe { &*registers };
        let paths: *const *const c_char = core::ptr::with_exposed_provenance(address(registers.rdi));
        let count = address(registers.rsi);
        let file = |at: usize| {
            // SAFETY: one of as many pointers as the caller said.
            let path = unsafe { paths.wrapping_add(at).read() };
            // SAFETY: a C string.
            unsafe { path_of(path) }
        };
        let files = || (!paths.is_null()).then(|| (0..count).map_while(file).collect());
        // SAFETY: the parameters are passed by value.
        unsafe { load(&files, stack) };
    });
    next(&REAL, c"llama_model_load_from_splits")
}

unsafe extern "C" fn load_open_file(registers: *mut Registers, stack: *mut u8) -> *mut c_void {
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    contained(|| {
        // SAFETY: as in `start`.
        let registers = unsafe { &*registers };
        let file: *mut libc::FILE = core::ptr::with_exposed_provenance_mut(address(registers.rdi));
        let files = || {
            // SAFETY: the caller passes an open file or null.
            let number = (!file.is_null()).then(|| unsafe { libc::fileno(file) })?;
            Some(vec![PathBuf::from(format!("/proc/self/fd/{number}"))])
        };
        // SAFETY: the parameters are passed by value.
        unsafe { load(&files, stack) };
    });
    next(&REAL, c"llama_model_load_from_file_ptr")
}

/// # Safety
/// `params` are a host's parameters of a model.
unsafe fn load(files: &dyn Fn() -> Option<Vec<PathBuf>>, params: *mut u8) {
    if !preload::is_active() {
        return;
    }
    // SAFETY: the caller's contract.
    let Some(mut params) = (unsafe { ModelParams::of(params) }) else { return preload::tell_unknown_host() };
    if let Some(files) = files() {
        preload::load(&files, &mut params);
    }
}

unsafe extern "C" fn init_context(_registers: *mut Registers, stack: *mut u8) -> *mut c_void {
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    let mut watched = None;
    contained(|| {
        if preload::is_active()
            // SAFETY: the caller passes parameters of a context by value.
            && let Some(mut params) = unsafe { ContextParams::of(stack) }
        {
            let equal = preload::wants_equal_passes() && params::is_whole_context() && equal::functions().is_some();
            preload::init(&mut params, equal);
            if equal && !params.reads_more() {
                watched = Some(equal::making());
            }
        }
    });
    watched.unwrap_or_else(|| next(&REAL, c"llama_init_from_model"))
}

/// # Safety
/// `path` is a C string or null.
unsafe fn path_of(path: *const c_char) -> Option<PathBuf> {
    // SAFETY: the caller's contract.
    (!path.is_null())
        .then(|| Path::new(std::ffi::OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes())).to_owned())
}

/// Loads the host's backends, and then ours if the process asks for one of our devices.
///
/// # Safety
/// Called as the function of this name is, by the host only.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn ggml_backend_load_all() {
    type Function = unsafe extern "C-unwind" fn();
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    let real = next(&REAL, c"ggml_backend_load_all");
    if !real.is_null() {
        // SAFETY: the exported function of this name has this type.
        let real = unsafe { core::mem::transmute::<*mut c_void, Function>(real) };
        // SAFETY: no preconditions.
        unsafe { real() };
    }
    contained(preload::backends_loaded);
}

/// The same for backends of one folder.
///
/// # Safety
/// Called as the function of this name is, by the host only.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn ggml_backend_load_all_from_path(folder: *const c_char) {
    type Function = unsafe extern "C-unwind" fn(*const c_char);
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    let real = next(&REAL, c"ggml_backend_load_all_from_path");
    if !real.is_null() {
        // SAFETY: the exported function of this name has this type.
        let real = unsafe { core::mem::transmute::<*mut c_void, Function>(real) };
        // SAFETY: what the caller passed.
        unsafe { real(folder) };
    }
    contained(preload::backends_loaded);
}

/// Registers this library with the host, as `GGML_BACKEND_PATH` does: the host opens the file that is loaded already. False if it refused.
pub(crate) fn register() -> bool {
    type Load = unsafe extern "C" fn(*const c_char) -> *mut c_void;
    let load = in_order(c"ggml_backend_load");
    let Some(path) = own_path().filter(|_| !load.is_null()) else { return false };
    // SAFETY: the exported function of this name has this type.
    let load = unsafe { core::mem::transmute::<*mut c_void, Load>(load) };
    // SAFETY: a C string.
    !unsafe { load(path.as_ptr()) }.is_null()
}

/// The file of this library, as the loader knows it.
pub(crate) fn own_path() -> Option<CString> {
    let file = object_of(core::ptr::from_ref(&OWN).cast())?.0;
    let path = std::fs::canonicalize(Path::new(std::ffi::OsStr::from_bytes(file.to_bytes()))).ok()?;
    CString::new(path.into_os_string().into_encoded_bytes()).ok()
}

/// Something of this library with an address.
static OWN: u8 = 0;

/// File and first address of the loaded object that holds an address.
fn object_of(address: *const c_void) -> Option<(CString, usize)> {
    let mut found = core::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: an address and a place to write to.
    if unsafe { libc::dladdr(address, found.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: zeroed before and filled by dladdr.
    let found = unsafe { found.assume_init() };
    // SAFETY: the loader's name of a loaded object is a C string that lives as long as it.
    (!found.dli_fname.is_null())
        .then(|| (unsafe { CStr::from_ptr(found.dli_fname) }.to_owned(), found.dli_fbase.addr()))
}

/// The definition of a function behind ours in the loader's order; null if there is none.
fn in_order(name: &CStr) -> *mut c_void {
    // SAFETY: a C string; the caller is this library, behind which the search begins.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }
}

/// The function that the program would have reached without us, looked up once. A library that was opened later is in no order; it is
/// found by looking through all that are loaded.
fn next(known: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    let found = known.load(Ordering::Relaxed);
    if !found.is_null() {
        return found;
    }
    let mut found = in_order(name);
    if found.is_null() {
        let own = object_of(core::ptr::from_ref(&OWN).cast()).map(|(_, base)| base);
        let others = loaded_objects().into_iter().map(|object| symbol_of(&object, name));
        found = others
            .filter(|address| !address.is_null())
            .find(|address| object_of(*address).map(|(_, base)| base) != own)
            .unwrap_or(null_mut());
    }
    known.store(found, Ordering::Relaxed);
    found
}

fn symbol_of(object: &CStr, name: &CStr) -> *mut c_void {
    if object.is_empty() {
        return null_mut();
    }
    // SAFETY: a C string; NOLOAD only returns a handle to what is loaded already.
    let handle = unsafe { libc::dlopen(object.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return handle;
    }
    // SAFETY: an open handle and a C string.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    // SAFETY: balances the dlopen above; whoever loaded the object keeps it.
    unsafe { libc::dlclose(handle) };
    found
}

/// Sets a variable of this process's environment.
pub(crate) fn set_variable(name: &str, value: &str) {
    // SAFETY: called before `main`, when there is no other thread.
    unsafe { std::env::set_var(name, value) };
}

/// Takes this library out of what programs that this one starts preload.
pub(crate) fn stop_preloading() {
    const NAME: &str = "LD_PRELOAD";
    let as_path = |path: CString| PathBuf::from(std::ffi::OsStr::from_bytes(path.to_bytes()));
    let own = own_path().map(as_path);
    // A name without a folder was found by the loader.
    let found = object_of(core::ptr::from_ref(&OWN).cast()).map(|(path, _)| as_path(path));
    let bare = found.as_deref().and_then(Path::file_name);
    let Ok(list) = std::env::var(NAME) else { return };
    let is_other = |part: &&str| {
        let is_bare = bare == Some(std::ffi::OsStr::new(part));
        !part.is_empty() && !is_bare && std::fs::canonicalize(part).ok() != own
    };
    let others: Vec<&str> = list.split([':', ' ']).filter(is_other).collect();
    if others.is_empty() {
        // SAFETY: as in `set_variable`.
        unsafe { std::env::remove_var(NAME) };
    } else {
        set_variable(NAME, &others.join(":"));
    }
}

/// Prints a text and ends the process, before its `main`.
pub(crate) fn leave(text: &str) -> ! {
    use std::io::Write as _;
    // A reader that closed the pipe is no failure of ours.
    let _ = std::io::stdout().write_all(text.as_bytes());
    let _ = std::io::stdout().flush();
    // SAFETY: no preconditions.
    unsafe { libc::_exit(0) }
}

/// Prints a text when the process ends, behind what it printed itself.
pub(crate) fn at_exit(text: String) {
    static TEXT: std::sync::OnceLock<CString> = std::sync::OnceLock::new();
    extern "C" fn print() {
        if let Some(text) = TEXT.get() {
            // SAFETY: a C string. C's own buffer, because the program's output may still lie in it.
            unsafe { libc::puts(text.as_ptr()) };
        }
    }
    let Ok(text) = CString::new(text.trim_end()) else { return };
    if TEXT.set(text).is_ok() {
        // SAFETY: the library is never unmapped.
        unsafe { libc::atexit(print) };
    }
}
