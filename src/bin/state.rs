//! `ggml-moe state`: shows, resets and merges what the plugin remembers of models.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand};
use ggml_moe::config;
use ggml_moe::experts::statefile::{ModelState, State};
use ggml_moe::experts::{statefolder, statestore};

/// What `ggml-moe state` understands.
#[derive(Args)]
pub(crate) struct StateArguments {
    /// The state file; by default the one that the plugin would use: state-file in GGML_MOE, or moe-state.ini in llama.cpp's cache
    /// folder.
    #[arg(long, value_name = "FILE", global = true)]
    file: Option<PathBuf>,
    #[command(subcommand)]
    command: StateCommand,
}

#[derive(Subcommand)]
enum StateCommand {
    /// Tell what is remembered: per model its tokens and experts, and what share of all uses the hottest experts have.
    Show {
        /// Only this model (its name in the file, or the beginning of it).
        #[arg(value_name = "MODEL")]
        model: Option<String>,
    },
    /// Forget a model, or all of them.
    Reset {
        /// The model (its name in the file, or the beginning of it).
        #[arg(value_name = "MODEL", required_unless_present = "all", conflicts_with = "all")]
        model: Option<String>,
        /// All models.
        #[arg(long)]
        all: bool,
    },
    /// Add what other state files hold, weighed by tokens.
    Merge {
        /// The files to add.
        #[arg(value_name = "FILE", required = true)]
        files: Vec<PathBuf>,
    },
}

/// The parts of the experts, in percent, whose share of the uses is told.
const PARTS: [usize; 4] = [10, 20, 30, 50];

/// Runs the command; the text is for standard output, the error for standard error.
pub(crate) fn run(arguments: &StateArguments) -> Result<String, String> {
    let path = arguments
        .file
        .clone()
        .or_else(default_path)
        .ok_or("no state file: state-file is off, or no home folder is known; use --file")?;
    match &arguments.command {
        StateCommand::Show { model } => {
            let state = read(&path)?;
            let only = model.as_deref().map(|name| find(&state, name)).transpose()?;
            Ok(show(&path, &state, only.as_deref()))
        }
        StateCommand::Reset { model, .. } => reset(&path, model.as_deref()),
        StateCommand::Merge { files } => merge(&path, files),
    }
}

fn default_path() -> Option<PathBuf> {
    let settings = std::env::var_os("GGML_MOE").unwrap_or_default();
    let (config, _) = config::parse(&settings.to_string_lossy());
    statefolder::path(config.experts.state_file.as_ref(), |name| std::env::var_os(name))
}

/// Reads a file without setting a broken one aside: the user looks at it.
fn read(path: &Path) -> Result<State, String> {
    let told = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let text = statestore::text(path).map_err(|error| told(&error))?;
    State::parse(&text).map_err(|error| told(&error))
}

/// The one model whose name begins so.
fn find(state: &State, name: &str) -> Result<String, String> {
    let found: Vec<&String> = state.models.keys().filter(|known| known.starts_with(name)).collect();
    match found[..] {
        [only] => Ok(only.clone()),
        [] => Err(format!("no model {name}; known: {}", list(state))),
        _ if state.models.contains_key(name) => Ok(name.to_owned()),
        _ => Err(format!("{} models begin with {name}", found.len())),
    }
}

fn list(state: &State) -> String {
    let names: Vec<&str> = state.models.keys().map(String::as_str).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

fn reset(path: &Path, model: Option<&str>) -> Result<String, String> {
    let state = read(path)?;
    let only = model.map(|name| find(&state, name)).transpose()?;
    let mut forgotten = 0;
    let changed = statestore::edit(path, |state| {
        let before = state.models.len();
        state.models.retain(|name, _| only.as_ref().is_some_and(|only| only != name));
        forgotten = before - state.models.len();
    });
    changed.map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(format!("{}: {forgotten} models forgotten\n", path.display()))
}

fn merge(path: &Path, files: &[PathBuf]) -> Result<String, String> {
    // All are read before anything is written.
    let states = files.iter().map(|file| read(file)).collect::<Result<Vec<State>, String>>()?;
    let mut models = 0;
    for state in &states {
        statestore::add(path, state).map_err(|error| format!("{}: {error}", path.display()))?;
        models += state.models.len();
    }
    Ok(format!("{}: {models} models of {} files added\n", path.display(), files.len()))
}

fn show(path: &Path, state: &State, only: Option<&str>) -> String {
    let mut out = format!("{}: {} models\n", path.display(), state.models.len());
    for (name, model) in state.models.iter().filter(|(name, _)| only.is_none_or(|only| only == name.as_str())) {
        show_model(&mut out, name, model);
    }
    out
}

fn show_model(out: &mut String, name: &str, model: &ModelState) {
    let experts: usize = model.heat.values().map(Vec::len).sum();
    // Writing to a String cannot fail.
    let _ = writeln!(
        out,
        "\nmodel {name}: {} tokens, {experts} experts in {} layers, last used {}",
        model.tokens,
        model.heat.len(),
        age(model.stamp)
    );
    if experts == 0 {
        return;
    }
    let head: String = PARTS.iter().map(|part| format!("{part:>7}%")).collect();
    let _ = writeln!(out, "  {:<40} {:>7}  share of uses of the hottest{head}", "", "experts");
    let all: Vec<u32> = model.heat.values().flatten().copied().collect();
    let _ = writeln!(out, "  {:<40} {experts:>7}  {:>28}{}", "all", "", shares(&all));
    let mut tables: Vec<(&String, &Vec<u32>)> = model.heat.iter().collect();
    tables.sort_by_key(|(name, _)| numbered(name));
    for (table, rates) in tables {
        let _ = writeln!(out, "  {table:<40} {:>7}  {:>28}{}", rates.len(), "", shares(rates));
    }
}

/// What part of all uses the hottest experts have, for each part of the experts.
fn shares(rates: &[u32]) -> String {
    let mut sorted: Vec<u64> = rates.iter().map(|&rate| u64::from(rate)).collect();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let all: u64 = sorted.iter().sum();
    let share = |part: usize| {
        let count = (sorted.len() * part).div_ceil(100);
        let hottest: u64 = sorted.iter().take(count).sum();
        if all == 0 { "      -".to_owned() } else { format!("{:>7.1}", 100.0 * hottest as f64 / all as f64) }
    };
    PARTS.iter().map(|&part| format!("{}%", share(part))).collect()
}

/// A name with its numbers as numbers, so that layer 10 comes after layer 9.
fn numbered(name: &str) -> Vec<(u64, String)> {
    name.split('.').map(|part| (part.parse().unwrap_or(u64::MAX), part.to_owned())).collect()
}

fn age(stamp: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    match now.checked_sub(stamp).filter(|_| stamp > 0) {
        None => "at an unknown time".to_owned(),
        Some(seconds) if seconds < 3600 => "less than an hour ago".to_owned(),
        Some(seconds) if seconds < 2 * 86_400 => format!("{} hours ago", seconds / 3600),
        Some(seconds) => format!("{} days ago", seconds / 86_400),
    }
}
