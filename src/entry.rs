//! What the host's loader looks up: `ggml_backend_init` and `ggml_backend_score`.
//!
//! Invariants: no side effects: no threads, no device is opened, no memory of a device is taken. Each load of the plugin calls
//! `ggml_backend_init` again and gets the same pointer.
//! Threads: the loader's; the steps are taken under one lock.
// UNSAFETY: exported symbols must keep their names.
#![expect(unsafe_code, reason = "exported symbols must keep their names")]

use core::ffi::{c_int, c_void};
use std::path::Path;
use std::sync::{Once, OnceLock};

use parking_lot::Mutex;

use crate::abi::boundary::{Slot, guard, inject_panic};
use crate::abi::{self, Host, Refusal, slots::reg};
use crate::config::{self, CacheSize, Config, Notice};
use crate::explicit::{self, Explicit};
use crate::model::moe::MoeShape;
use crate::preload;
use crate::registry;
use crate::request::{Request, read_request};
use crate::telemetry::log;

static SETTINGS: OnceLock<(Config, Vec<Notice>)> = OnceLock::new();
static HOST: OnceLock<&'static Host> = OnceLock::new();
/// How many faults of the settings are told one by one.
const MOST_NOTICES: usize = 8;
/// The loader may be called from two threads at once. Holds the refusal that was told last.
static LOADING: Mutex<Option<Refusal>> = Mutex::new(None);

/// How well this plugin suits the machine; a loader that has several variants of one backend takes the highest. There is one.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_score() -> c_int {
    1
}

/// Registers the plugin: returns its reg, or null (with one line in the log) if this host's layout is not known, or if it has no device yet.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_init() -> *mut c_void {
    guard(Slot::EntryInit, core::ptr::null_mut, || {
        let mut told = LOADING.lock();
        match load() {
            // Hosts load their backends several times, to look a name up for one; the same refusal is told once.
            Err(refusal) if told.as_ref() == Some(&refusal) => Ok(core::ptr::null_mut()),
            Err(refusal) => {
                let line = format!("{refusal}; {}", refusal.advice());
                *told = Some(refusal);
                Err(line)
            }
            Ok(reg) => Ok(reg),
        }
    })
}

fn load() -> Result<*mut c_void, Refusal> {
    let (config, _) = SETTINGS.get_or_init(settings);
    log::set_detail(config.log);
    if HOST.get().is_none() {
        let probed = abi::probe(config.debug_graph).map(Host::install);
        if probed.is_ok() {
            log::set_sink(abi::log_to_host);
        }
        // Told after the host's log was found, or in vain.
        tell_notices();
        if let Some(slot) = config.debug_panic.as_deref().filter(|slot| !inject_panic(slot)) {
            log::error(&format!("settings: debug-panic={slot} names no slot"));
        }
        let host = probed?;
        // Nobody else sets it while the loading lock is held.
        let _ = HOST.set(host);
        let graphs = match host.graphs {
            config::GraphMode::View => "handed on as views",
            config::GraphMode::AddNode => "built anew (no fusion)",
        };
        log::info(&format!(
            "version {}, host layout {}, graphs {graphs}",
            env!("CARGO_PKG_VERSION"),
            host.layout_name()
        ));
    }
    if !reg::has_devices() {
        // A reg without devices would never get any: the host registers a reg once. Refused, it is offered again by the next load.
        let (request, config) = request(config);
        reg::publish_devices(registry::devices(config, request).ok_or(Refusal::NoDevices)?);
    }
    if !reg::reads_back() {
        return Err(Refusal::UnknownLayout("it does not find in our objects what we put there".to_owned()));
    }
    Ok(reg::object())
}

/// Tells once what is wrong with the settings.
fn tell_notices() {
    static TOLD: Once = Once::new();
    let (_, notices) = SETTINGS.get_or_init(settings);
    TOLD.call_once(|| {
        for notice in notices.iter().take(MOST_NOTICES) {
            let line = notice.to_string();
            if notice.is_fault() { log::error(&line) } else { log::notice(&line) }
        }
        if notices.len() > MOST_NOTICES {
            log::error(&format!("settings: {} more pieces are wrong", notices.len() - MOST_NOTICES));
        }
    });
}

/// The settings of this process, for what happens before the host loads us; what is wrong with them is told.
pub(crate) fn settings_of_process() -> &'static Config {
    let (config, _) = SETTINGS.get_or_init(settings);
    log::set_detail(config.log);
    tell_notices();
    config
}

/// Makes the devices of this process without registering them. The reason if there can be none, which is not told.
pub(crate) fn prepare() -> Result<(), String> {
    let mut told = LOADING.lock();
    load().map(drop).map_err(|refusal| {
        let line = format!("{refusal}; {}", refusal.advice());
        *told = Some(refusal);
        line
    })
}

fn settings() -> (Config, Vec<Notice>) {
    // Bytes that are no text become replacement characters: the pair that holds them is then reported, and the others count.
    config::parse(&std::env::var_os("GGML_MOE").unwrap_or_default().to_string_lossy())
}

/// What this process was asked for, by its arguments or llama.cpp's environment variables for them, and the settings of its devices: where the
/// user placed weights, there is no cache unless one was asked for.
fn request(config: &'static Config) -> (Request, &'static Config) {
    let arguments = std::fs::read("/proc/self/cmdline").unwrap_or_else(|error| {
        log::notice(&format!(
            "the arguments of this process cannot be read (/proc/self/cmdline: {error}); if --device MoE0 is refused, set LLAMA_ARG_DEVICE=MoE0"
        ));
        Vec::new()
    });
    let variable = |name: &str| std::env::var(name).ok();
    let (device, split_mode) = (variable("LLAMA_ARG_DEVICE"), variable("LLAMA_ARG_SPLIT_MODE"));
    let request = read_request(&arguments, device.as_deref(), split_mode.as_deref());
    if request.named && config.pass_tokens.is_some() {
        static TOLD: Once = Once::new();
        TOLD.call_once(|| {
            log::notice(
                "pass-tokens has no effect here: it is for models that the preloaded library helps of itself; give -ub and -b",
            );
        });
    }
    let words: Vec<&[u8]> = arguments.split(|byte| *byte == 0).collect();
    let models = explicit::models(&words, &variable);
    // The preloaded library decides for each model. A host that gets no model by its arguments may name devices by other ways.
    if !request.named && !models.is_empty() && !preload::is_active() {
        static TOLD: Once = Once::new();
        TOLD.call_once(|| {
            log::notice("loaded, and not used by this command: no --device names MoE0; add --device MoE0")
        });
    }
    let layers = || layers(&models);
    let Some(flags) = Explicit::read(&words, &variable).moved_away(&layers) else { return (request, config) };
    static TOLD: Once = Once::new();
    // A host that lists no device of ours and was not told to use one is none of ours to advise.
    let tells = |line: &str| {
        if request.named || preload::is_active() {
            TOLD.call_once(|| log::notice(line));
        }
    };
    if config.asks_for_cache() {
        tells(&format!(
            "{flags} was given: what it leaves to the CPU is computed there, the cache serves the rest; without it all is ours"
        ));
        return (request, config);
    }
    if config.cache == CacheSize::Off {
        return (request, config);
    }
    let how = if preload::is_active() { "--moe cache=auto" } else { "GGML_MOE=cache=auto" };
    tells(&format!(
        "{flags} was given and is left alone, so there is no cache of experts; ask for one with {how}, or leave it out"
    ));
    static WITHOUT: OnceLock<Config> = OnceLock::new();
    (request, WITHOUT.get_or_init(|| Config { cache: CacheSize::Off, ..config.clone() }))
}

/// The most layers of these models; `None` if one cannot be read, which the host will find and say, or fetches first.
fn layers(models: &[String]) -> Option<u64> {
    let layers: Option<Vec<u32>> =
        models.iter().map(|path| MoeShape::open(Path::new(path)).ok().map(|shape| shape.layers)).collect();
    layers?.into_iter().max().map(u64::from)
}
