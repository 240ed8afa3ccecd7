//! The command beside the plugin: tells what the plugin understands, remembers and does, simulates its cache, compares it with stock, plans
//! for a model, and checks the machine.

mod bench;
mod child;
mod doctor;
mod elf;
mod host;
mod plan;
mod ppl;
mod run;
mod sim;
mod state;
mod top;

use std::io::Write as _;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use ggml_moe::config::{KEYS, markdown};

use host::{Answer, CommandError};

/// Tells about the ggml-moe plugin.
#[derive(Parser)]
#[command(name = "ggml-moe", version, about = "Companion of the ggml-moe plugin for llama.cpp")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the keys of GGML_MOE.
    Keys {
        /// Print the page docs/keys.md.
        #[arg(long)]
        markdown: bool,
    },
    /// Simulate the expert cache on a trace of routing: hits and uploads per token.
    Sim(sim::SimArguments),
    /// Show, reset or merge what the plugin remembers of models.
    State(state::StateArguments),
    /// Show the counters of running processes.
    Top(top::TopArguments),
    /// Measure speed against stock llama.cpp with the same device memory: llama-bench with the plugin and without, in turns.
    Bench(Box<bench::BenchArguments>),
    /// Compare perplexity with stock llama.cpp chunk by chunk: llama-perplexity with the plugin and without.
    Ppl(Box<ppl::PplArguments>),
    /// Plan for a model: what goes where on this machine, why, and how fast it should run, beside stock's best placement.
    Plan(Box<plan::PlanArguments>),
    /// Start a program of llama.cpp with the plugin, with the plan printed first.
    Run(run::RunArguments),
    /// Check host, driver, cards, links, RAM and folders: what is wrong, and what to do.
    Doctor(doctor::DoctorArguments),
    /// Print the version.
    Version,
}

fn main() -> ExitCode {
    let (name, answer) = match Arguments::parse_from(host::spelled(std::env::args_os())).command {
        Command::Keys { markdown: true } => ("keys", Ok(good(markdown()))),
        Command::Keys { markdown: false } => ("keys", Ok(good(keys()))),
        Command::Sim(arguments) => ("sim", sim::run(&arguments).map(good).map_err(CommandError::Failed)),
        Command::State(arguments) => ("state", state::run(&arguments).map(good).map_err(CommandError::Failed)),
        Command::Top(arguments) => ("top", top::run(&arguments).map(good).map_err(CommandError::Failed)),
        Command::Bench(arguments) => ("bench", bench::run(&arguments)),
        Command::Ppl(arguments) => ("ppl", ppl::run(&arguments)),
        Command::Plan(arguments) => ("plan", plan::run(&arguments)),
        Command::Run(arguments) => ("run", run::run(&arguments)),
        Command::Doctor(arguments) => ("doctor", doctor::run(&arguments)),
        Command::Version => ("version", Ok(good(format!("ggml-moe {}\n", env!("CARGO_PKG_VERSION"))))),
    };
    let answer = match answer {
        Ok(answer) => answer,
        Err(error) => {
            let (code, reason) = match error {
                CommandError::Usage(reason) => (2, reason),
                CommandError::Failed(reason) => (1, reason),
            };
            // Standard error may be closed; the exit code says it, too.
            let _ = writeln!(std::io::stderr(), "ggml-moe {name}: {reason}");
            return ExitCode::from(code);
        }
    };
    // A reader that closed the pipe (`| head`) is no failure of ours.
    match std::io::stdout().write_all(answer.text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => ExitCode::FAILURE,
        _ if answer.good => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

fn good(text: String) -> Answer {
    Answer { text, good: true }
}

fn keys() -> String {
    let users = KEYS.iter().filter(|key| !key.test_only).map(|key| {
        let unit = if key.unit == "-" { String::new() } else { format!("unit: {}; ", key.unit) };
        format!(
            "{}\n    {}\n    default: {} ({unit}accepted: {})\n    why: {}\n",
            key.name, key.effect, key.default, key.range, key.reason
        )
    });
    users
        .chain(["Keys for the project's tests (debug-...) are listed by `ggml-moe keys --markdown`.\n".to_owned()])
        .collect()
}
