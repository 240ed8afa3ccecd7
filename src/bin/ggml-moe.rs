//! The command beside the plugin: tells what the plugin understands, remembers and does, and simulates its cache.

mod sim;
mod state;
mod top;

use std::io::Write as _;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use ggml_moe::config::{KEYS, markdown};

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
    /// Print the version.
    Version,
}

fn main() -> ExitCode {
    let text = match Arguments::parse().command {
        Command::Keys { markdown: true } => markdown(),
        Command::Keys { markdown: false } => keys(),
        Command::Sim(arguments) => match sim::run(&arguments) {
            Ok(text) => text,
            Err(error) => return failure("sim", &error),
        },
        Command::Top(arguments) => match top::run(&arguments) {
            Ok(text) => text,
            Err(error) => return failure("top", &error),
        },
        Command::State(arguments) => match state::run(&arguments) {
            Ok(text) => text,
            Err(error) => {
                let _ = writeln!(std::io::stderr(), "ggml-moe state: {error}");
                return ExitCode::FAILURE;
            }
        },
        Command::Version => format!("ggml-moe {}\n", env!("CARGO_PKG_VERSION")),
    };
    // A reader that closed the pipe (`| head`) is no failure of ours.
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn failure(command: &str, error: &str) -> ExitCode {
    // Standard error may be closed; the exit code says it, too.
    let _ = writeln!(std::io::stderr(), "ggml-moe {command}: {error}");
    ExitCode::FAILURE
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
