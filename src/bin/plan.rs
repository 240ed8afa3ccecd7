//! `ggml-moe plan`: what goes where for a model on this machine, or on a recorded one.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::Args;
use ggml_moe::config::{self, StateFile};
use ggml_moe::experts::{statefolder, statestore};
use ggml_moe::machine::{self, rates::Rates};
use ggml_moe::planner::flags::{self, Flags};
use ggml_moe::planner::machine::Card;
use ggml_moe::planner::usage::Draft;
use ggml_moe::planner::{Machine, Mode, Model, Plan, arguments, json, learned, plan, table};

use crate::child;
use crate::host::{Answer, CommandError, Failed, Usage, plain_command, program, refuse_faults};

/// How long a program may take to tell its devices.
const PATIENCE: Duration = Duration::from_secs(30);
/// Memory of a card that a program's own CUDA context takes, where another program said what is free.
const CONTEXT_BYTES: u64 = 400 << 20;

/// Options of `plan`.
#[derive(Args)]
pub(crate) struct PlanArguments {
    /// The model (.gguf; any file of a split model).
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Tokens of context; by default what a share of the memory allows.
    #[arg(short, long = "ctx-size", visible_alias = "ctx", value_name = "TOKENS")]
    ctx: Option<u64>,
    /// Slots.
    #[arg(long, value_name = "SLOTS")]
    parallel: Option<u64>,
    /// Micro-batch (-ub); by default the one that serves a request soonest.
    #[arg(long = "ubatch-size", value_name = "TOKENS")]
    ubatch: Option<u64>,
    /// Threads.
    #[arg(short, long, value_name = "THREADS")]
    threads: Option<u64>,
    /// A draft model that runs beside it (-md).
    #[arg(long = "model-draft", value_name = "FILE")]
    draft: Option<PathBuf>,
    /// A key of the plugin, as in GGML_MOE.
    #[arg(long, value_name = "KEY=VALUE")]
    moe: Vec<String>,
    /// Tokens of the prompt for which speed is weighed against memory; by default 12288, or what the context holds. A preloaded
    /// program is planned with the defaults.
    #[arg(long, value_name = "TOKENS")]
    prompt: Option<u64>,
    /// Tokens of the answer for which speed is weighed against memory; by default 512.
    #[arg(long, value_name = "TOKENS")]
    answer: Option<u64>,
    /// The folder of the host's programs, which tell the devices; by default they are looked for in PATH.
    #[arg(long, value_name = "FOLDER")]
    host_dir: Option<PathBuf>,
    /// Plan for the machine that this file describes.
    #[arg(long, value_name = "FILE")]
    machine: Option<PathBuf>,
    /// Write what this machine is to a file for --machine.
    #[arg(long, value_name = "FILE", conflicts_with = "machine")]
    write_machine: Option<PathBuf>,
    /// Measure the rates of RAM and links, and keep them.
    #[arg(long, conflicts_with = "machine")]
    measure: bool,
    /// Print the plan as JSON.
    #[arg(long)]
    json: bool,
    /// Print arguments of llama.cpp only: for stock's best placement, for the plugin, or for the one that the plan chose.
    #[arg(long, value_name = "WHOSE", num_args = 0..=1, default_missing_value = "stock", value_parser = ["stock", "plugin", "chosen"],
        conflicts_with = "json")]
    args: Option<String>,
    /// More flags of llama.cpp (-ngl, -ncmoe, -ctk, --fit-target, --device, ...).
    #[arg(last = true, value_name = "FLAGS")]
    flags: Vec<String>,
}

/// What is planned with: the model, the machine, and what is wanted.
pub(crate) struct Planned {
    pub(crate) model: Model,
    pub(crate) machine: Machine,
    pub(crate) flags: Flags,
    pub(crate) plan: Plan,
}

/// Runs the command.
pub(crate) fn run(asked: &PlanArguments) -> Result<Answer, CommandError> {
    let mut words = asked.flags.clone();
    let mut add =
        |name: &str, value: Option<String>| words.extend(value.into_iter().flat_map(|value| [name.to_owned(), value]));
    add("-m", asked.model.as_ref().map(|path| path.display().to_string()));
    add("-md", asked.draft.as_ref().map(|path| path.display().to_string()));
    add("-c", asked.ctx.map(|number| number.to_string()));
    add("-np", asked.parallel.map(|number| number.to_string()));
    add("-ub", asked.ubatch.map(|number| number.to_string()));
    add("-t", asked.threads.map(|number| number.to_string()));
    asked.moe.iter().for_each(|pair| add("--moe", Some(pair.clone())));
    refuse_faults(&asked.moe)?;
    let mut flags = flags::read(&words, false, |name| std::env::var(name).ok());
    let faults = std::mem::take(&mut flags.faults);
    if asked.prompt.is_some() || asked.answer.is_some() {
        let (prompt, answer) = flags.usage.request();
        flags.usage.request = Some((asked.prompt.unwrap_or(prompt).max(1), asked.answer.unwrap_or(answer)));
    }
    let (machine, mut notes) = match &asked.machine {
        Some(path) => (recorded(path)?, Vec::new()),
        None => this_machine(asked.host_dir.as_deref(), asked.measure)?,
    };
    if let Some(path) = &asked.write_machine {
        let text = format!("{:#}\n", machine.value());
        write(path, &text).map_err(|error| Failed(format!("{}: {error}", path.display())))?;
    }
    let mut planned = with(flags, machine)?;
    notes.append(&mut planned.plan.warnings);
    // Among the flags of a program they end nothing, as when it runs.
    planned.plan.warnings = faults.into_iter().chain(notes).collect();
    let good = planned.plan.mode != Mode::Refused;
    let text = match asked.args.as_deref() {
        Some(whose) => {
            let line = arguments_of(&planned.plan, whose);
            format!("{}\n", line.ok_or_else(|| Failed(why_none(&planned.plan, whose)))?)
        }
        None if asked.json => format!("{:#}\n", json::value(&planned.model, &planned.plan)),
        None => table::full(&planned.model, &planned.machine, &planned.flags.usage, &planned.plan),
    };
    Ok(Answer { text, good })
}

fn arguments_of(plan: &Plan, whose: &str) -> Option<String> {
    match whose {
        "plugin" => (plan.mode == Mode::Cache).then(|| arguments::ours(plan)),
        "chosen" => arguments::chosen(plan),
        _ => plan.stock.as_ref().filter(|stock| stock.fits).map(|stock| arguments::stock(plan, stock)),
    }
}

fn why_none(plan: &Plan, whose: &str) -> String {
    let chosen = plan.choices.iter().find(|choice| choice.what == "experts" && whose == "plugin");
    let reason = match &plan.refusal {
        Some(refusal) => refusal.clone(),
        None => chosen.map_or_else(|| plan.no_room(), |choice| choice.reason.clone()),
    };
    format!("there are no such arguments: {reason}")
}

/// A file is written whole or not at all; what is no file (a pipe, /dev/stdout) is written to.
fn write(path: &Path, text: &str) -> std::io::Result<()> {
    match path.metadata() {
        Ok(known) if !known.is_file() => std::fs::write(path, text),
        _ => statestore::replace(path, text),
    }
}

fn recorded(path: &Path) -> Result<Machine, CommandError> {
    let text = statestore::text(path).map_err(|error| Usage(format!("{}: {error}", path.display())))?;
    Machine::parse(&text).map_err(|error| Usage(format!("{}: {error}", path.display())))
}

/// The plan for flags on a machine.
pub(crate) fn with(mut flags: Flags, machine: Machine) -> Result<Planned, CommandError> {
    let open = |path: &Path| Model::open(path).map_err(|error| Usage(format!("{}: {error}", path.display())));
    let variable = |name: &str| std::env::var_os(name);
    let path = flags.model_file(&variable).map_err(|missing| {
        Usage(match missing.as_str() {
            "" => "no model; name it with -m FILE".to_owned(),
            missing => {
                format!("{} is not downloaded yet; start a program of llama.cpp with it once", config::shown(missing))
            }
        })
    })?;
    let model = open(&path)?;
    flags.stand(Some(model.layers.len() as u64));
    if let Some(path) = flags.draft_file(&variable) {
        flags.usage.draft = Some(Draft { model: open(&path)? });
    }
    flags.usage.learned = learned::curve(&state(&flags), &model.shape);
    let machine = machine::for_flags(machine, &flags);
    let plan = plan(&model, &machine, &flags.usage);
    Ok(Planned { model, machine, flags, plan })
}

fn state(flags: &Flags) -> ggml_moe::experts::statefile::State {
    let settings = flags.config();
    if !settings.experts.remembers() {
        return ggml_moe::experts::statefile::State::default();
    }
    let own = settings.experts.state_file;
    let path = cache_file(own.as_ref());
    path.map(|path| statestore::text(&path).unwrap_or_default())
        .and_then(|text| ggml_moe::experts::statefile::State::parse(&text).ok())
        .unwrap_or_default()
}

/// The state file.
fn cache_file(setting: Option<&StateFile>) -> Option<PathBuf> {
    statefolder::path(setting, |name| std::env::var_os(name))
}

/// The folder in which things are kept.
pub(crate) fn cache_folder() -> Option<PathBuf> {
    Some(cache_file(None)?.parent()?.to_owned())
}

/// This machine, with the cards that this program lists.
pub(crate) fn machine_of(program: &Path) -> Result<Machine, CommandError> {
    let path = cache_folder().map(|folder| folder.join(machine::rates::FILE_NAME));
    let kept = path.as_deref().map(Rates::read).unwrap_or_default();
    Ok(machine::look(Path::new("/"), listed(program)?, &kept))
}

/// This machine, and what could not be found out.
fn this_machine(host_dir: Option<&Path>, measured: bool) -> Result<(Machine, Vec<String>), CommandError> {
    let (cards, mut notes) = cards(host_dir)?;
    let path = cache_folder().map(|folder| folder.join(machine::rates::FILE_NAME));
    let mut kept = path.as_deref().map(Rates::read).unwrap_or_default();
    let mut found = machine::look(Path::new("/"), cards, &kept);
    if measured {
        notes.extend(machine::measure(&mut found, &mut kept, true));
        if let Some(path) = path {
            let told = |error| format!("the measured rates were not kept: {}: {error}", path.display());
            notes.extend(kept.write(&path).map_err(told).err());
        }
    }
    Ok((found, notes))
}

/// The cards as a program of the host lists them; without one, as nvidia-smi does.
fn cards(host_dir: Option<&Path>) -> Result<(Vec<Card>, Vec<String>), CommandError> {
    let host = ["llama-server", "llama-bench", "llama-cli"].into_iter().map(|name| program(name, None, host_dir));
    let mut first = None;
    for found in host {
        match found {
            Ok(path) => return Ok((listed(&path)?, Vec::new())),
            Err(error) => first = first.or(Some(error)),
        }
    }
    if host_dir.is_some() {
        return Err(first.unwrap_or_else(|| Usage("no program".to_owned())));
    }
    let cards = nvidia_smi();
    let note = if cards.is_empty() {
        "no program of llama.cpp was found in PATH to ask for devices, and no NVIDIA card: name the folder of your llama.cpp with --host-dir"
    } else {
        "no program of llama.cpp was found in PATH: cards are those that nvidia-smi lists; --host-dir names the folder of your llama.cpp"
    };
    Ok((cards, vec![note.to_owned()]))
}

/// The cards that this program lists.
pub(crate) fn listed(program: &Path) -> Result<Vec<Card>, CommandError> {
    let told = |error: String| Failed(format!("{} --list-devices: {error}", program.display()));
    let mut command = plain_command(program);
    let done = child::run(command.arg("--list-devices"), PATIENCE).map_err(|error| told(error.to_string()))?;
    match done.status {
        Some(status) if status.success() => Ok(machine::host_cards(&done.stdout)),
        Some(status) => Err(told(format!("it ended with {status}"))),
        None => Err(told(format!("no answer in {} s", PATIENCE.as_secs()))),
    }
}

fn nvidia_smi() -> Vec<Card> {
    let mut command = Command::new("nvidia-smi");
    command.args(["--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]);
    let Ok(done) = child::run(&mut command, PATIENCE) else { return Vec::new() };
    let card = |(number, line): (usize, &str)| {
        let mut fields = line.rsplitn(3, ", ");
        let free: u64 = fields.next()?.trim().parse().ok()?;
        let total: u64 = fields.next()?.trim().parse().ok()?;
        Some(Card {
            name: format!("CUDA{number}"),
            description: fields.next()?.to_owned(),
            total: total << 20,
            free: (free << 20).saturating_sub(CONTEXT_BYTES),
            link_gbs: ggml_moe::planner::machine::LINK_GBS,
            ..Card::default()
        })
    };
    done.stdout.lines().enumerate().filter_map(card).collect()
}
