//! The host that loaded us, once the probe has accepted it.
//!
//! Owns: the one [`Host`] of the process.
//! Invariants: set once, by the first successful `ggml_backend_init`; every object that the host gets from us exists only
//! after that. Threads: any, read only.

use std::ffi::CString;
use std::io::Write as _;
use std::sync::OnceLock;

use core::ffi::CStr;

use super::gen_api3 as api3;
use super::graph::GraphFacts;
use super::imports::Imports;
use super::layout::Layout;
use super::ops::Ops;
use crate::config::GraphMode;
use crate::telemetry::log::HostLevel;

/// Everything that the probe found out about the host.
pub(crate) struct Host {
    pub(super) api: Imports,
    pub(super) layout: &'static Layout,
    pub(super) ops: Ops,
    /// How parts of a graph can be handed on; views only if the layout of graphs passed its check.
    pub(crate) graphs: GraphMode,
    pub(super) graph_facts: GraphFacts,
}

static HOST: OnceLock<Host> = OnceLock::new();

impl Host {
    /// Makes this the host of the process, or returns the one that is.
    pub(crate) fn install(self) -> &'static Host {
        HOST.get_or_init(|| self)
    }

    /// Name of the layout, for the log.
    pub(crate) fn layout_name(&self) -> &'static str {
        self.layout.name
    }

    /// Bytes of one row of `ne` elements.
    pub(crate) fn row_size(&self, type_: u32, ne: i64) -> usize {
        // SAFETY: a pure function of ggml; the type came from a tensor of the host.
        unsafe { (self.api.ggml_row_size)(type_, ne) }
    }

    /// Whether the type packs several elements into a block with scales.
    pub(crate) fn is_quantized(&self, type_: u32) -> bool {
        // SAFETY: as for `row_size`.
        unsafe { (self.api.ggml_is_quantized)(type_) }
    }

    /// Sends a line to the host's log, or to standard error where the host does not export its log.
    fn log(&self, level: HostLevel, line: &str) {
        let Some(print) = self.api.ggml_log_internal else {
            return stderr(level, line);
        };
        let level = match level {
            HostLevel::Debug => api3::GGML_LOG_LEVEL_DEBUG,
            HostLevel::Info => api3::GGML_LOG_LEVEL_INFO,
            HostLevel::Warn => api3::GGML_LOG_LEVEL_WARN,
            HostLevel::Error => api3::GGML_LOG_LEVEL_ERROR,
        };
        // An inner zero byte would cut the line; there is none in what we print but host names could hold one.
        let text = CString::new(line.replace('\0', "?")).unwrap_or_default();
        // SAFETY: the format takes exactly one C string, which lives until the call returns.
        unsafe { print(level, c"%s".as_ptr(), text.as_ptr()) };
    }
}

/// The log sink of the process: the host's log.
pub(crate) fn log_to_host(level: HostLevel, line: &str) {
    match HOST.get() {
        Some(host) => host.log(level, line),
        None => stderr(level, line),
    }
}

/// The only sink when the host exports no log. What is not meant to be seen is dropped; a closed stream is no failure of ours.
fn stderr(level: HostLevel, line: &str) {
    if matches!(level, HostLevel::Warn | HostLevel::Error) {
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}

/// The host of this process.
///
/// # Panics
/// If the probe has not accepted one: an internal error, since no object of ours exists before that.
pub(crate) fn host() -> &'static Host {
    match HOST.get() {
        Some(host) => host,
        None => missing(),
    }
}

#[cold]
#[expect(clippy::panic, reason = "a broken invariant of this crate, caught at the boundary")]
fn missing() -> ! {
    panic!("the host was used before it was probed")
}

/// Text of a C string of the host; invalid UTF-8 is replaced.
///
/// # Safety
/// `text` is null or a C string that is valid during the call.
pub(super) unsafe fn text(text: *const core::ffi::c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: not null, a C string by the caller's contract.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Loads the stock host's libraries into this process and makes it the host: for tests that run ggml without a program.
#[cfg(test)]
pub(crate) fn load_for_tests(folder: &str) -> super::inner::BufferType {
    static LOADED: OnceLock<()> = OnceLock::new();
    LOADED.get_or_init(|| {
        for library in ["libggml-base.so", "libggml.so"] {
            let path = CString::new(format!("{folder}/{library}")).unwrap();
            // SAFETY: loads a library of the stock host; its initialisers have no requirements.
            let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
            assert!(!handle.is_null(), "{folder}/{library} does not load");
        }
        type LoadAll = unsafe extern "C" fn(*const core::ffi::c_char);
        let load_all = super::imports::host_symbol(c"ggml_backend_load_all_from_path");
        assert!(!load_all.is_null(), "libggml.so has no ggml_backend_load_all_from_path");
        // SAFETY: the function of this name has this type.
        let load_all = unsafe { core::mem::transmute::<*mut core::ffi::c_void, LoadAll>(load_all) };
        let folder = CString::new(folder).unwrap();
        // SAFETY: a C string that lives until the call returns.
        unsafe { load_all(folder.as_ptr()) };
        super::probe(None).expect("the stock host's layout is known").install();
    });
    let devices = super::inner::devices();
    let cpu = devices.iter().find(|device| device.kind() == super::inner::DeviceKind::Cpu).expect("a CPU device");
    cpu.buffer_type().expect("a buffer type")
}
