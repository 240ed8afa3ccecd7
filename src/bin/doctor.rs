//! `ggml-moe doctor`: host, driver, cards, links, RAM and folders: what is wrong, and what to do.

mod environment;
mod machine;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::Args;
use ggml_moe::bench::output::{self, Plugin};
use ggml_moe::machine::cuda::{self, Survey};
use ggml_moe::machine::rates::{FILE_NAME, Rates};
use ggml_moe::machine::slots::{self, Slot};
use ggml_moe::machine::system;
use ggml_moe::planner::machine::slot_gbs;
use serde_json::json;

use crate::child;
use crate::host::{Answer, CommandError, Failed, Usage, plain_command, plugin, program};
use crate::plan;

/// How long a program may take to answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// The least compute capability that the kernels are made for.
const LEAST_COMPUTE: u32 = 75;

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
    let folder = of_host(&mut checks, library.as_deref(), asked.host_dir.as_deref());
    environment::of_environment(&mut checks, folder.as_deref(), &|name| std::env::var(name).ok());
    let survey = cuda::survey();
    let slots = slots::read(root);
    of_driver(&mut checks, &survey, &slots, system::driver_release(root).as_deref());
    of_links(&mut checks, &survey, &slots);
    of_others(&mut checks, &survey);
    let found = system::read(root);
    machine::of_ram(&mut checks, root, &found);
    machine::of_processors(&mut checks, root, &found);
    machine::of_folder(&mut checks);
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
    let counted = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    out.push_str(&match (faults, warnings) {
        (0, 0) => "doctor: nothing is wrong\n".to_owned(),
        (0, _) => format!("doctor: nothing must be mended; {}\n", counted(warnings, "warning")),
        _ => format!("doctor: {} must be mended; {}\n", counted(faults, "fault"), counted(warnings, "warning")),
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

/// Loads the plugin into a program of the host, in front of its processor, which needs no card. Returns the program's folder.
fn of_host(checks: &mut Checks, library: Option<&Path>, folder: Option<&Path>) -> Option<PathBuf> {
    let names = ["llama-server", "llama-bench", "llama-cli"];
    let Some(path) = names.into_iter().find_map(|name| program(name, None, folder).ok()) else {
        let place = folder.map_or_else(|| "PATH".to_owned(), |folder| folder.display().to_string());
        let words = format!("no program of llama.cpp in {place}");
        let help =
            "name the folder of your llama.cpp with --host-dir; it must be built with shared libraries (docs/hosts.md)";
        // A folder that was named must have one.
        checks.add("host", if folder.is_some() { State::Bad } else { State::Warn }, words, Some(help));
        return None;
    };
    let place = path.parent().map(Path::to_owned);
    let Some(library) = library else { return place };
    let mut command = plain_command(&path);
    command.arg("--list-devices").env("GGML_BACKEND_PATH", library).env("GGML_MOE", "inner=CPU;log=debug");
    let done = match child::run(&mut command, PATIENCE) {
        Ok(done) => done,
        Err(error) => {
            checks.bad("host", format!("{}: {error}", path.display()), "it does not start on this system");
            return place;
        }
    };
    let lines = Plugin::read(&done.log()).lines;
    let offered = output::devices(&done.stdout).iter().any(|(name, _)| name == "MoE0");
    let version = lines.iter().find(|line| line.starts_with("version ")).cloned();
    match (offered, version) {
        (true, version) => {
            let release = release(&path).map_or_else(String::new, |release| format!(" ({release})"));
            let words = version.as_deref().unwrap_or("it does not tell its version");
            let words = format!("{}{release} loads the plugin: {words}", path.display());
            let own = format!("version {},", env!("CARGO_PKG_VERSION"));
            if version.is_some_and(|version| !version.starts_with(&own)) {
                checks.warn("host", words, "this command is of another version: build both with `make`");
            } else {
                checks.ok("host", words);
            }
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
            let help = if is_plugin(library) {
                "use a release of docs/hosts.md, built with -DBUILD_SHARED_LIBS=ON -DGGML_BACKEND_DL=ON -DGGML_NATIVE=OFF"
            } else {
                "the file is not the plugin: build it with `make`, or name it with --plugin"
            };
            checks.bad("host", format!("{} does not take the plugin: {why}", path.display()), help);
        }
    }
    place
}

/// What a program of llama.cpp says of its release.
fn release(program: &Path) -> Option<String> {
    let done = child::run(plain_command(program).arg("--version"), PATIENCE).ok()?;
    let log = done.log();
    let line = log.lines().find(|line| line.starts_with("version: "))?;
    Some(line.chars().filter(|sign| !sign.is_control()).take(80).collect())
}

/// Whether a file holds what each build of the plugin does.
fn is_plugin(path: &Path) -> bool {
    const MARK: &[u8] = b"ggml-moe: ";
    std::fs::read(path).is_ok_and(|bytes| bytes.windows(MARK.len()).any(|window| window == MARK))
}

fn of_driver(checks: &mut Checks, survey: &Survey, slots: &[Slot], named: Option<&str>) {
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
    let named = named.map_or_else(String::new, |named| format!("release {named}, "));
    let release = format!("{named}CUDA {}.{}", survey.version / 1000, survey.version % 1000 / 10);
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
                "the plugin's kernels need 7.5 (Turing) or later; leave the card to llama.cpp alone",
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

#[cfg(test)]
mod tests {
    use super::*;
    use ggml_moe::machine::cuda::SurveyCard;

    fn card() -> SurveyCard {
        let (name, bus) = ("A card".to_owned(), "0000:01:00.0".to_owned());
        SurveyCard { name, bus, total: 24 << 30, compute: 89, maps: true, reads_host: true }
    }

    fn slot() -> Slot {
        let bus = "0000:01:00.0".to_owned();
        Slot { bus, vendor: 0x10de, link: Some((16.0, 16)), most_lanes: Some(16), ..Slot::default() }
    }

    fn of_cards(survey: &Survey, slots: &[Slot]) -> Vec<Check> {
        let mut checks = Checks::default();
        of_driver(&mut checks, survey, slots, Some("550.1"));
        of_links(&mut checks, survey, slots);
        checks.0
    }

    #[test]
    fn cards_and_their_links_are_told() {
        let survey = |cards| Survey { present: true, version: 12040, fault: None, cards };
        let states = |cards, slots: &[Slot]| -> Vec<&'static str> {
            of_cards(&survey(cards), slots).iter().map(|check| check.state.name()).collect()
        };
        let good = of_cards(&survey(vec![card()]), &[slot()]);
        assert_eq!(good[0].words, "release 550.1, CUDA 12.4");
        assert!(good[2].words.starts_with("16 GT/s, 16 lanes: about 26"), "{}", good[2].words);
        assert!(good.iter().all(|check| check.state == State::Ok && check.help.is_none()));
        assert_eq!(states(vec![SurveyCard { compute: 70, ..card() }], &[slot()]), ["ok", "bad", "ok"]);
        assert_eq!(states(vec![SurveyCard { maps: false, ..card() }], &[slot()]), ["ok", "warn", "ok"]);
        assert_eq!(states(vec![SurveyCard { reads_host: false, ..card() }], &[slot()]), ["ok", "warn", "ok"]);
        assert_eq!(states(vec![card()], &[Slot { link: Some((16.0, 4)), ..slot() }]), ["ok", "ok", "warn"]);
        assert_eq!(states(vec![card()], &[]), ["ok", "ok", "ok"], "a virtual machine may not tell");
        assert_eq!(states(Vec::new(), &[slot()]), ["bad"], "a card that the driver does not show");
        let old = Survey { fault: Some("the driver is too old".to_owned()), ..survey(Vec::new()) };
        assert_eq!(of_cards(&old, &[slot()])[0].state.name(), "bad");
        assert_eq!(of_cards(&old, &[])[0].state.name(), "ok");
        assert_eq!(of_cards(&Survey::default(), &[Slot { vendor: 0x1002, ..slot() }])[0].state.name(), "ok");
    }

    #[test]
    fn the_last_line_counts() {
        let mut checks = Checks::default();
        assert_eq!(text(&checks), "doctor: nothing is wrong\n");
        checks.warn("a", "b", "c");
        assert!(text(&checks).ends_with("c\ndoctor: nothing must be mended; 1 warning\n"));
        checks.bad("d", "e", "f");
        assert!(text(&checks).ends_with("doctor: 1 fault must be mended; 1 warning\n"));
    }
}
