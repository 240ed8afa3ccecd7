//! The library as it is preloaded (`LD_PRELOAD`): takes our settings out of the arguments of a llama.cpp program, and helps a model that is about
//! to be loaded where it can.
//!
//! Owns: what the process was asked for, and what was decided about each model.
//! Invariants: nothing happens before [`start`] found a llama.cpp; the host registers our devices only when a model is helped or one of them is
//! named, so that everything else is stock. Every decision is one line. Threads: any. No lock is held across a call into the host.
//! Does not: know how llama.cpp passes things (`abi::llama` does).

#[cfg(test)]
mod agreement;
mod decision;
pub(crate) mod equal;
mod help;
pub(crate) mod masks;
mod planned;

use std::collections::HashMap;
use std::num::NonZero;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use parking_lot::Mutex;

use crate::abi::llama::{
    self,
    params::{ContextParams, DeviceList, ModelParams},
};
use crate::abi::slots::reg;
use crate::arguments;
use crate::config;
use crate::device::Mode;
use crate::entry;
use crate::explicit::{self, Call};
use crate::model::gguf::{self, GgufError, Header};
use crate::model::moe::MoeShape;
use crate::planner::Advice;
use crate::planner::flags::{self, Flags};
use crate::request::read_request;
use crate::telemetry::log;

use decision::{Decision, Room, Wishes};

/// What the process was asked for; only if this is a llama.cpp that was not told to do without us.
static ASKED: OnceLock<Asked> = OnceLock::new();

struct Asked {
    wishes: Wishes,
    flags: Flags,
    /// One of our devices is named, or devices are listed.
    named: bool,
    equal_passes: bool,
    /// Threads that fill the mask of a long pass.
    mask_threads: usize,
}

/// Decisions about models whose load was tried without loading; taken by the load that follows.
static TRIED: Mutex<Option<HashMap<Vec<PathBuf>, Decision>>> = Mutex::new(None);
/// A model of this process was given devices of ours.
static HELPED: AtomicBool = AtomicBool::new(false);
/// Tokens of a pass of the model that was loaded last; 0 is the host's choice.
static PASS_TOKENS: AtomicU32 = AtomicU32::new(0);

/// Passes of a batch: what is cut into equal passes is a batch, and this is how the host's own lengths are to each other.
const PASSES_OF_BATCH: u32 = 4;

/// Whether this process is helped at all.
pub(crate) fn is_active() -> bool {
    ASKED.get().is_some()
}

/// The program is about to run with these arguments. Returns which of them it gets; `None` if all.
pub(crate) fn start(arguments: &[&[u8]]) -> Option<Vec<usize>> {
    let found = arguments::read(arguments);
    if found.help {
        llama::leave(&help::page());
    }
    for fault in &found.faults {
        log::error(&format!("{fault}; it is ignored"));
    }
    if found.off {
        // What the program starts is not to be helped either.
        llama::stop_preloading();
        return Some(found.kept);
    }
    if !found.settings.is_empty() {
        let settings = std::env::var_os("GGML_MOE").unwrap_or_default();
        let settings = config::merged(&settings.to_string_lossy(), &found.settings);
        // The models of a router are loaded by programs that it starts: they read it there.
        llama::set_variable("GGML_MOE", &settings);
    }
    let kept: Vec<&[u8]> = found.kept.iter().filter_map(|at| arguments.get(*at).copied()).collect();
    let variable = |name: &str| std::env::var(name).ok();
    if explicit::names_model(&kept, &variable) {
        // This is no router: what it starts is none of our business.
        llama::stop_preloading();
    }
    if found.host_help {
        llama::at_exit(help::section());
    }
    let config = entry::settings_of_process();
    let words: Vec<String> = kept.iter().map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    let mut flags = flags::of_program(&words, variable);
    flags.usage.preload(config, std::thread::available_parallelism().map_or(1, NonZero::get));
    let asked = Asked {
        wishes: Wishes::of(words.first().map_or("", String::as_str), &flags, config),
        mask_threads: flags.usage.ways.mask_threads.map_or(1, |threads| threads as usize),
        flags,
        named: read_request(&kept.join(&0), variable("LLAMA_ARG_DEVICE").as_deref(), None).named,
        equal_passes: config.equal_passes,
    };
    // Nobody else sets it: a process starts once.
    let _ = ASKED.set(asked);
    Some(found.kept)
}

/// The host loaded its backends: ours follow if they are named, because the host looks for the names next.
pub(crate) fn backends_loaded() {
    if ASKED.get().is_some_and(|asked| asked.named) {
        llama::register();
    }
}

/// The host's parameters are not known.
pub(crate) fn tell_unknown_host() {
    static TOLD: AtomicBool = AtomicBool::new(false);
    if !TOLD.swap(true, Ordering::Relaxed) {
        log::tell("off: the parameters of this llama.cpp are not known; name the device instead: --device MoE0");
    }
}

/// A model is about to be loaded, or to be laid out on trial.
pub(crate) fn load(files: &[PathBuf], params: &mut ModelParams) {
    let Some(asked) = ASKED.get().filter(|_| !params.is_vocabulary()) else { return };
    let trial = params.is_trial();
    let known = {
        let mut tried = TRIED.lock();
        let tried = tried.get_or_insert_default();
        if trial { tried.get(files).cloned() } else { tried.remove(files) }
    };
    let decision = match known {
        Some(decision) => decision,
        None => {
            let call = Call {
                names_devices: params.names_devices(),
                places_weights: params.layers_on_devices() >= 0 || params.overrides_tensors(),
                splits_tensors: !params.splits_layers_or_nothing(),
                // A layout on trial has a mode of its own.
                sets_load: !trial && !params.leaves_load_mode(),
            };
            let Some(decision) = decide(files, asked, call) else { return };
            tell(&decision);
            if trial {
                TRIED.lock().get_or_insert_default().insert(files.to_vec(), decision.clone());
            }
            decision
        }
    };
    let devices = if decision.helps { devices() } else { None };
    PASS_TOKENS.store(devices.and(decision.pass_tokens).unwrap_or(0), Ordering::Relaxed);
    if let Some(devices) = devices {
        HELPED.store(true, Ordering::Relaxed);
        params.set_devices(devices);
        for (number, device) in reg::all().into_iter().enumerate() {
            device.plan_room(decision.beside.get(number).copied().unwrap_or(0));
        }
        if decision.maps && !trial && params.leaves_load_mode() {
            params.map_file();
        }
    }
}

/// Each line once: a model may be loaded many times.
fn tell(decision: &Decision) {
    static TOLD: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let mut told = TOLD.lock();
    if !told.contains(&decision.line) {
        log::tell(&decision.line);
        told.push(decision.line.clone());
    }
}

/// `None` if the files cannot be read, which the host will find and say.
fn decide(files: &[PathBuf], asked: &Asked, call: Call) -> Option<Decision> {
    let headers = headers(files).ok()?;
    let shape = MoeShape::of(&headers).ok()?;
    let name = files.first()?.file_name()?.to_string_lossy();
    let name = config::shown(&name);
    let settled = Decision::of_settings(&name, &shape, &asked.wishes, call);
    if settled.is_some() && !asked.named {
        return settled;
    }
    let room = room();
    if let Some(decision) = settled {
        return match &room {
            Room::None(reason) => Decision::named_in_vain(&asked.wishes, reason).or(Some(decision)),
            Room::Free(..) => Some(decision),
        };
    }
    let advice = advice(&headers, asked, call, &room);
    Some(Decision::of_room((&name, &shape), &asked.wishes, call, &room, advice.as_ref()))
}

fn headers(files: &[PathBuf]) -> Result<Vec<Header>, GgufError> {
    match files {
        [file] => gguf::open_all(file),
        files => files.iter().map(|file| Header::open(file)).collect(),
    }
}

/// What the planner says, where there are devices to plan with.
fn advice(headers: &[Header], asked: &Asked, call: Call, room: &Room) -> Option<Advice> {
    let Room::Free(..) = room else { return None };
    let devices = reg::all();
    planned::advice(headers, &asked.flags, call, entry::settings_of_process(), &devices)
}

/// What our devices have. Makes them, but does not register them.
fn room() -> Room {
    if let Err(reason) = entry::prepare() {
        return Room::None(reason);
    }
    let devices = reg::all();
    let refused = devices.iter().find_map(|device| match &device.mode {
        Mode::PassThrough(reason) | Mode::Lend(reason) => Some(reason.clone()),
        Mode::Proxy => None,
    });
    if let Some(reason) = refused {
        return Room::None(reason);
    }
    if devices.is_empty() {
        return Room::None("no device of this host can be helped".to_owned());
    }
    let names: Vec<String> =
        devices.iter().map(|device| format!("{} ({})", device.label(), device.inner_name)).collect();
    let free = devices.iter().map(|device| device.free_and_total().0 as u64).fold(0, u64::saturating_add);
    Room::Free(names.join(", "), free)
}

/// Our devices, known to the host.
fn devices() -> Option<&'static DeviceList> {
    static DEVICES: OnceLock<DeviceList> = OnceLock::new();
    if DEVICES.get().is_none() && !llama::register() {
        log::error("the host refused the plugin; it runs as without it");
        return None;
    }
    Some(DEVICES.get_or_init(reg::list))
}

/// Whether passes are to be of equal length, where they can.
pub(crate) fn wants_equal_passes() -> bool {
    ASKED.get().is_some_and(|asked| asked.equal_passes)
}

/// A context of the model that was loaded last is about to be made. `equal`: its batches can be cut by us.
pub(crate) fn init(params: &mut ContextParams, equal: bool) {
    let tokens = PASS_TOKENS.load(Ordering::Relaxed);
    if tokens > 0 && params.has_host_lengths() {
        params.set_pass(tokens, if equal { PASSES_OF_BATCH } else { 1 });
    }
}
