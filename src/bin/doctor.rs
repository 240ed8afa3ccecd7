//! `ggml-moe doctor`: host, driver, cards, links, RAM and folders: what is wrong, and what to do.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::Args;
use ggml_moe::bench::output::{self, Plugin};
use ggml_moe::config;
use ggml_moe::machine::cuda::{self, Survey};
use ggml_moe::machine::rates::{FILE_NAME, Rates};
use ggml_moe::machine::slots::{self, Slot};
use ggml_moe::machine::system;
use ggml_moe::planner::Machine;
use ggml_moe::planner::machine::slot_gbs;
use serde_json::json;

use crate::child;
use crate::host::{Answer, CommandError, Failed, Usage, plain_command, plugin, program};
use crate::plan;

/// How long a program may take to answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// The least compute capability that the kernels are made for.
const LEAST_COMPUTE: u32 = 75;
const GIB: u64 = 1 << 30;

/// Options of `doctor`.
#[derive(Args)]
pub(crate) struct DoctorArguments {
    /// The folder of the host's programs; by default they are looked for in PATH.
    #[arg(long, value_name = "FOLDER")]
    host_dir: Option<PathBuf>,
    /// The plugin; by default the library beside this command.
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ok,
    /// Something costs speed, or may.
    Warn,
    /// The plugin cannot do its work.
    Bad,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Bad => "bad",
        }
    }
}

/// One line.
struct Check {
    what: String,
    state: State,
    words: String,
    /// What to do.
    help: Option<String>,
}

#[derive(Default)]
struct Checks(Vec<Check>);

impl Checks {
    fn ok(&mut self, what: &str, words: impl Into<String>) {
        self.add(what, State::Ok, words, None);
    }

    fn warn(&mut self, what: &str, words: impl Into<String>, help: &str) {
        self.add(what, State::Warn, words, Some(help));
    }

    fn bad(&mut self, what: &str, words: impl Into<String>, help: &str) {
        self.add(what, State::Bad, words, Some(help));
    }

    fn add(&mut self, what: &str, state: State, words: impl Into<String>, help: Option<&str>) {
        self.0.push(Check { what: what.to_owned(), state, words: words.into(), help: help.map(str::to_owned) });
    }
}

/// Runs the command.
pub(crate) fn run(asked: &DoctorArguments) -> Result<Answer, CommandError> {
    let root = Path::new("/");
    let mut checks = Checks::default();
    let library = of_plugin(&mut checks, asked.plugin.as_deref());
    of_host(&mut checks, library.as_deref(), asked.host_dir.as_deref());
    let survey = cuda::survey();
    let slots = slots::read(root);
    of_driver(&mut checks, &survey, &slots);
    of_links(&mut checks, &survey, &slots);
    of_others(&mut checks, &survey);
    let machine = system::read(root);
    of_ram(&mut checks, root, &machine);
    of_processors(&mut checks, root, &machine);
    of_folder(&mut checks);
    of_settings(&mut checks);
    let good = checks.0.iter().all(|check| check.state != State::Bad);
    Ok(Answer { text: if asked.json { json(&checks) } else { text(&checks) }, good })
}

fn text(checks: &Checks) -> String {
    let mut out = String::new();
    for check in &checks.0 {
        out.push_str(&format!("{:<5} {:<14} {}\n", check.state.name(), check.what, check.words));
        if let Some(help) = &check.help {
            out.push_str(&format!("{:<20} {help}\n", ""));
        }
    }
    let count = |state: State| checks.0.iter().filter(|check| check.state == state).count();
    let (warnings, faults) = (count(State::Warn), count(State::Bad));
    out.push_str(&match (faults, warnings) {
        (0, 0) => "doctor: nothing is wrong\n".to_owned(),
        (0, _) => format!("doctor: it works; {warnings} things may cost speed\n"),
        _ => format!("doctor: {faults} things must be mended, {warnings} may cost speed\n"),
    });
    out
}

fn json(checks: &Checks) -> String {
    let list: Vec<_> = checks
        .0
        .iter()
        .map(|check| json!({"what": check.what, "state": check.state.name(), "words": check.words, "help": check.help}))
        .collect();
    format!("{:#}\n", json!({"version": env!("CARGO_PKG_VERSION"), "checks": list}))
}

/// The settings of the environment.
fn of_settings(checks: &mut Checks) {
    let Some(text) = std::env::var_os("GGML_MOE") else { return };
    let (config, notices) = config::parse(&text.to_string_lossy());
    if notices.is_empty() {
        checks.ok("settings", format!("GGML_MOE sets {}", config.given.join(", ")));
    }
    for notice in notices {
        checks.warn("settings", notice.to_string(), "`ggml-moe keys` lists the keys; the others of GGML_MOE hold");
    }
}

fn of_plugin(checks: &mut Checks, named: Option<&Path>) -> Option<PathBuf> {
    match plugin(named) {
        Ok(path) => {
            checks.ok("plugin", format!("{}; this command is version {}", path.display(), env!("CARGO_PKG_VERSION")));
            Some(path)
        }
        Err(Usage(reason) | Failed(reason)) => {
            checks.bad("plugin", reason, "build it with `make`, or name it with --plugin");
            None
        }
    }
}

/// Loads the plugin into a program of the host, in front of its processor, which needs no card.
fn of_host(checks: &mut Checks, library: Option<&Path>, folder: Option<&Path>) {
    let names = ["llama-server", "llama-bench", "llama-cli"];
    let Some(path) = names.into_iter().find_map(|name| program(name, None, folder).ok()) else {
        let place = folder.map_or_else(|| "PATH".to_owned(), |folder| folder.display().to_string());
        let words = format!("no program of llama.cpp in {place}");
        let help =
            "name the folder of your llama.cpp with --host-dir; it must be built with shared libraries (docs/hosts.md)";
        // A folder that was named must have one.
        checks.add("host", if folder.is_some() { State::Bad } else { State::Warn }, words, Some(help));
        return;
    };
    let Some(library) = library else { return };
    let mut command = plain_command(&path);
    command.arg("--list-devices").env("GGML_BACKEND_PATH", library).env("GGML_MOE", "inner=CPU;log=debug");
    let done = match child::run(&mut command, PATIENCE) {
        Ok(done) => done,
        Err(error) => {
            checks.bad("host", format!("{}: {error}", path.display()), "it does not start on this system");
            return;
        }
    };
    let lines = Plugin::read(&done.log()).lines;
    let offered = output::devices(&done.stdout).iter().any(|(name, _)| name == "MoE0");
    let version = lines.iter().find(|line| line.starts_with("version ")).cloned();
    match (offered, version) {
        (true, version) => {
            let words = version.unwrap_or_else(|| "it loads the plugin".to_owned());
            checks.ok("host", format!("{} loads the plugin: {words}", path.display()));
        }
        (false, _) if done.status.is_none_or(|status| !status.success()) => checks.bad(
            "host",
            format!(
                "{} did not list its devices: {}",
                path.display(),
                output::reason(&done.log()).unwrap_or("it printed nothing")
            ),
            "it does not work by itself either, or the plugin ends it: try it without GGML_BACKEND_PATH",
        ),
        (false, _) => {
            let why = lines.iter().rfind(|line| !line.starts_with("version ")).cloned();
            let why = why.unwrap_or_else(|| "it loaded no backend from GGML_BACKEND_PATH".to_owned());
            checks.bad(
                "host",
                format!("{} does not take the plugin: {why}", path.display()),
                "use a release of docs/hosts.md, built with -DBUILD_SHARED_LIBS=ON -DGGML_BACKEND_DL=ON",
            );
        }
    }
}

fn of_driver(checks: &mut Checks, survey: &Survey, slots: &[Slot]) {
    let nvidia = slots.iter().filter(|slot| slot.vendor == 0x10de).count();
    let others = slots.iter().filter(|slot| matches!(slot.vendor, 0x1002 | 0x8086)).count();
    if !survey.present && nvidia == 0 {
        let words = match others {
            0 => "there is no GPU: the processors compute everything, and the plugin has nothing to add".to_owned(),
            _ => "there is no NVIDIA card; over other cards the plugin works through Vulkan, and keeps no cache unless asked to".to_owned(),
        };
        checks.ok("gpu", words);
        return;
    }
    let release = format!("CUDA {}.{}", survey.version / 1000, survey.version % 1000 / 10);
    match &survey.fault {
        Some(fault) if survey.cards.is_empty() && survey.present && nvidia == 0 => {
            checks.ok("gpu", format!("there is no NVIDIA card that can be used ({fault})"));
        }
        Some(fault) => {
            let help = "install NVIDIA's driver of release 550 or later, and restart";
            checks.bad("driver", format!("{fault} ({nvidia} NVIDIA cards in slots)"), help);
        }
        None if survey.cards.is_empty() => {
            checks.bad(
                "driver",
                format!("{release}, but it shows no card"),
                "see nvidia-smi, and CUDA_VISIBLE_DEVICES",
            );
        }
        None => checks.ok("driver", release),
    }
    for (number, card) in survey.cards.iter().enumerate() {
        let what = format!("card {number}");
        let words = format!(
            "{}, {} MiB, compute capability {}.{}",
            card.name,
            card.total >> 20,
            card.compute / 10,
            card.compute % 10
        );
        if card.compute < LEAST_COMPUTE {
            checks.bad(
                &what,
                words,
                "the plugin's kernels need 7.5 (Turing) or later; use --device CUDA without the plugin on it",
            );
        } else if !card.maps {
            let help = "its memory cannot be mapped piece by piece, so the cache cannot change its size; a virtual machine's settings may hide it";
            checks.warn(&what, format!("{words}; no virtual memory management"), help);
        } else if !card.reads_host {
            checks.warn(
                &what,
                format!("{words}; it cannot read pinned RAM in place"),
                "experts are copied instead, which is slower",
            );
        } else {
            checks.ok(&what, format!("{words}; maps memory, reads pinned RAM"));
        }
    }
}

fn of_links(checks: &mut Checks, survey: &Survey, slots: &[Slot]) {
    let kept = plan::cache_folder().map(|folder| Rates::read(&folder.join(FILE_NAME))).unwrap_or_default();
    for (number, card) in survey.cards.iter().enumerate() {
        let what = format!("link {number}");
        let as_card = ggml_moe::planner::Card {
            name: format!("CUDA{number}"),
            description: card.name.clone(),
            bus: Some(card.bus.clone()),
            ..Default::default()
        };
        let measured = kept.link(&as_card).map_or_else(
            || "; not measured (ggml-moe plan --measure)".to_owned(),
            |rate| format!("; {rate:.1} GB/s were measured"),
        );
        let slot = slots.iter().find(|slot| slot.bus.eq_ignore_ascii_case(&card.bus));
        let Some((slot, (transfers, lanes))) = slot.and_then(|slot| Some((slot, slot.link?))) else {
            checks.ok(&what, format!("the system does not tell its speed (a virtual machine?){measured}"));
            continue;
        };
        let words = format!("{transfers} GT/s, {lanes} lanes: about {:.1} GB/s{measured}", slot_gbs(transfers, lanes));
        match slot.most_lanes {
            Some(most) if lanes < most && lanes <= 8 => checks.warn(
                &what,
                format!("{words}; the card has {most} lanes"),
                "prompts and loading the cache are slower: put it into a slot with more lanes, or see whether another card takes them",
            ),
            _ => checks.ok(&what, words),
        }
    }
}

/// Programs that have memory of the cards.
fn of_others(checks: &mut Checks, survey: &Survey) {
    if survey.cards.is_empty() {
        return;
    }
    let mut command = Command::new("nvidia-smi");
    command.args(["--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]);
    let Ok(done) = child::run(&mut command, PATIENCE) else { return };
    let programs: Vec<&str> = done.stdout.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    match programs[..] {
        [] => checks.ok("other programs", "none uses the cards"),
        _ => checks.warn(
            "other programs",
            format!(
                "{} use the cards: {}",
                programs.len(),
                programs.iter().take(3).copied().collect::<Vec<_>>().join("; ")
            ),
            "the cache gets what they leave, and gives memory back when they take more",
        ),
    }
}

fn of_ram(checks: &mut Checks, root: &Path, machine: &Machine) {
    let words = format!("{} MiB, {} free", machine.ram >> 20, machine.available >> 20);
    match machine.limit {
        Some(limit) if limit < machine.ram / 2 => checks.warn(
            "ram",
            format!("{words}; the control group allows {} MiB", limit >> 20),
            "experts must fit it: raise the limit of the container, or take a smaller model",
        ),
        Some(limit) => checks.ok("ram", format!("{words}; the control group allows {} MiB", limit >> 20)),
        None if machine.available < 4 * GIB => {
            checks.warn("ram", words, "experts lie in RAM: close other programs");
        }
        None => checks.ok("ram", words),
    }
    let pinned = (machine.usable() / 4 * 3) >> 20;
    let locked =
        system::locked_limit(root).map_or_else(|| "no limit".to_owned(), |bytes| format!("{} KiB", bytes >> 10));
    checks.ok(
        "pinning",
        format!("up to {pinned} MiB (three quarters of the RAM; pin-budget-mb); ulimit -l is {locked}, which the CUDA driver is not bound by, but -lm mlock is"),
    );
    let huge = system::text(root, "/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    match huge.split(['[', ']']).nth(1) {
        Some("never") => checks.warn(
            "huge pages",
            "off: reading experts misses the processor's address caches more often",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root",
        ),
        Some(mode) => checks.ok("huge pages", mode.to_owned()),
        None => checks.ok("huge pages", "the system does not tell"),
    }
}

fn of_processors(checks: &mut Checks, root: &Path, machine: &Machine) {
    let info = system::text(root, "/proc/cpuinfo").unwrap_or_default();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags")).unwrap_or_default();
    let words = format!("{} cores that this process may use", machine.cores);
    if !flags.is_empty() && !flags.split_whitespace().any(|flag| flag == "avx2") {
        checks.warn("processor", format!("{words}, without AVX2"), "experts that are not on a card will be slow");
    } else {
        checks.ok("processor", words);
    }
    if machine.nodes > 1 {
        checks.warn(
            "memory nodes",
            format!("{}: threads of one read the memory of another at a fraction of the rate", machine.nodes),
            "start the host with numactl --interleave=all, or on the card's node with --cpunodebind and --membind",
        );
    } else {
        checks.ok("memory nodes", "one");
    }
}

/// The folder in which the state file lies.
fn of_folder(checks: &mut Checks) {
    let Some(folder) = plan::cache_folder() else {
        checks.warn("cache folder", "there is none: HOME is not set", "set HOME, LLAMA_CACHE or XDG_CACHE_HOME");
        return;
    };
    let probe = folder.join(format!(".moe-doctor.{}", std::process::id()));
    let written = std::fs::create_dir_all(&folder)
        .and_then(|()| std::fs::write(&probe, ""))
        .and_then(|()| std::fs::remove_file(&probe));
    match written {
        Ok(()) => checks.ok("cache folder", folder.display().to_string()),
        Err(error) => checks.warn(
            "cache folder",
            format!("{}: {error}: what a model uses most is not remembered", folder.display()),
            "make it writable, or name another with LLAMA_CACHE or the key state-file",
        ),
    }
}
