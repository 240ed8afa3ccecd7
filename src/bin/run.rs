//! `ggml-moe run -- llama-server ...`: the plan, then the program itself, with the plugin in it.
//!
//! The program takes our place (exec), so that its exit code, its signals and its terminal are its own. Where the plugin cannot help, it is
//! started as it is, without our arguments. What is wrong with the plugin's keys is told by the plugin, once, and ends nothing.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::num::NonZero;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use ggml_moe::planner::flags::{self, Flags};
use ggml_moe::planner::{Mode, table};
use ggml_moe::{arguments, config};

use crate::elf::{self, Kind};
use crate::host::{Answer, CommandError, Failed, Usage, plugin};
use crate::plan;

/// Options of `run`.
#[derive(Args)]
pub(crate) struct RunArguments {
    /// Print the plan and start nothing.
    #[arg(long)]
    plan_only: bool,
    /// Start it without printing a plan.
    #[arg(long, conflicts_with = "plan_only")]
    no_plan: bool,
    /// A key of the plugin, as in GGML_MOE.
    #[arg(long, value_name = "KEY=VALUE")]
    moe: Vec<String>,
    /// The plugin; by default the library beside this command.
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,
    /// The program with its arguments.
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    words: Vec<OsString>,
}

/// Runs the command; returns only if the program was not started.
pub(crate) fn run(asked: &RunArguments) -> Result<Answer, CommandError> {
    let Some((name, rest)) = asked.words.split_first() else { return Err(Usage("no program".to_owned())) };
    let path = found(name)?;
    if matches!(elf::kind(&path), Ok(Kind::Other)) {
        // The system's shell would be given it to read.
        let what = "it is made for another kind of machine; name the program of a build of llama.cpp for this one";
        return Err(Usage(format!("{}: {what}", path.display())));
    }
    let library = helped(&path, asked.plugin.as_deref());
    let words: Vec<String> = [path.display().to_string()].into_iter().chain(words(asked, rest)).collect();
    let mut flags = flags::of_program(&words, |name| std::env::var(name).ok());
    let config = flags.config();
    flags.usage.preload(&config, std::thread::available_parallelism().map_or(1, NonZero::get));
    let mut text = String::new();
    if asked.plan_only {
        // Nobody else will tell them.
        flags.faults.iter().for_each(|fault| text.push_str(&format!("{fault}\n")));
    }
    let mut good = library.is_ok();
    match &library {
        Err(reason) => {
            text.push_str(&format!("the plugin cannot help {}: {reason}; it is started as it is\n", path.display()))
        }
        Ok(_) if asked.no_plan => {}
        Ok(_) => match plan_of(&path, flags) {
            Ok((plan, fits)) => {
                text.push_str(&plan);
                good &= fits;
            }
            Err(reason) => {
                text.push_str(&format!("no plan: {reason}\n"));
                good = false;
            }
        },
    }
    if asked.plan_only {
        return Ok(Answer { text, good });
    }
    // Standard output is the program's; where standard error is closed, the plan is lost and nothing else.
    for line in text.lines() {
        let _ = writeln!(std::io::stderr(), "ggml-moe: {line}");
    }
    let mut command = Command::new(&path);
    command.arg0(name);
    match library {
        Ok(library) => {
            let before = std::env::var_os("LD_PRELOAD").filter(|before| !before.is_empty());
            let mut preload = library.into_os_string();
            if let Some(before) = before {
                preload.push(":");
                preload.push(before);
            }
            command.env("LD_PRELOAD", preload).args(rest);
            command.args(asked.moe.iter().flat_map(|pair| ["--moe", pair]));
        }
        Err(_) => {
            command.args(stripped(rest));
        }
    }
    Err(Failed(format!("{}: {}", path.display(), why_not_started(&command.exec()))))
}

/// Why a program that is there did not start, and what to do.
fn why_not_started(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            format!("{error}; is its file system mounted without permission to execute?")
        }
        io::ErrorKind::NotFound => {
            format!("{error}: the loader or interpreter that it names is missing; build it on this system")
        }
        io::ErrorKind::ArgumentListTooLong => format!("{error}; shorten the command line"),
        _ => error.to_string(),
    }
}

/// The program's arguments as text, with the keys that were given to us.
fn words(asked: &RunArguments, rest: &[OsString]) -> Vec<String> {
    let own = rest.iter().map(|word| word.to_string_lossy().into_owned());
    own.chain(asked.moe.iter().flat_map(|pair| ["--moe".to_owned(), pair.clone()])).collect()
}

/// The program's file: a path, or a name in PATH.
fn found(name: &OsString) -> Result<PathBuf, CommandError> {
    let path = Path::new(name);
    if path.components().count() > 1 || path.is_absolute() {
        return match path.metadata() {
            Ok(known) if known.is_file() && may_run(path) => Ok(path.to_owned()),
            Ok(known) if known.is_file() => {
                Err(Usage(format!("{}: it may not be executed; allow it (chmod +x) or name another", path.display())))
            }
            Ok(_) => Err(Usage(format!("{}: it is no file; name the program in it", path.display()))),
            Err(error) => Err(Usage(format!("{}: no such program ({error}); name it with its folder", path.display()))),
        };
    }
    let folders = std::env::var_os("PATH").unwrap_or_default();
    // As a shell looks: what may not be executed is passed over.
    std::env::split_paths(&folders)
        .map(|folder| folder.join(name))
        .find(|path| path.is_file() && may_run(path))
        .ok_or_else(|| Usage(format!("no {} in PATH; name it with its folder", path.display())))
}

fn may_run(path: &Path) -> bool {
    path.metadata().is_ok_and(|known| known.permissions().mode() & 0o111 != 0)
}

/// The plugin's file, if it can be loaded into this program; Err says why not.
fn helped(path: &Path, named: Option<&Path>) -> Result<PathBuf, String> {
    match elf::kind(path) {
        Err(error) => return Err(format!("it cannot be read: {error}")),
        // `run` has refused it.
        Ok(Kind::Other) => return Err("it is made for another kind of machine".to_owned()),
        Ok(Kind::Foreign) => {
            return Err("it is no program of this system (a script?); name the program itself".to_owned());
        }
        Ok(Kind::Static) => {
            return Err("it is linked statically; build llama.cpp with -DBUILD_SHARED_LIBS=ON".to_owned());
        }
        Ok(Kind::Dynamic(libraries)) => {
            let of_host = |name: &String| name.starts_with("libggml") || name.starts_with("libllama");
            if !libraries.iter().any(of_host) {
                return Err(
                    "it uses no shared library of llama.cpp; it is none of its programs, or built without -DBUILD_SHARED_LIBS=ON"
                        .to_owned(),
                );
            }
        }
    }
    let library = plugin(named).map_err(|error| match error {
        Usage(reason) | Failed(reason) => reason,
    })?;
    if matches!(elf::kind(&library), Ok(Kind::Foreign | Kind::Other)) {
        return Err(format!("{} is no library of this system", library.display()));
    }
    // The loader takes both for the end of a name.
    if library.to_string_lossy().contains([' ', ':']) {
        let path = library.display();
        return Err(format!("the path of the plugin has a space or a colon, which LD_PRELOAD cannot carry: {path}"));
    }
    Ok(library)
}

/// The short plan for what the program is asked to do, and whether it can be done.
fn plan_of(path: &Path, flags: Flags) -> Result<(String, bool), String> {
    let told = |error: CommandError| match error {
        Usage(reason) | Failed(reason) => reason,
    };
    if flags.off {
        return Ok(("the plugin is off (--moe off)\n".to_owned(), true));
    }
    let file = flags.model_file(&|name| std::env::var_os(name)).map_err(|missing| {
        let missing = config::shown(&missing);
        let reason = if missing.is_empty() {
            "no model is named (-m)".to_owned()
        } else {
            format!("{missing} is not downloaded yet")
        };
        format!("{reason}; the plugin decides when it is loaded")
    })?;
    let of_download = flags.fetched.as_ref().map(|download| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let (name, download) = (config::shown(&name), config::shown(download.name()));
        format!("plan for {name}, which {download} was when it was downloaded\n")
    });
    let planned = plan::with(flags, plan::machine_of(path).map_err(told)?).map_err(told)?;
    Ok((of_download.unwrap_or_default() + &table::short(&planned.plan), planned.plan.mode != Mode::Refused))
}

/// The arguments without ours. What is wrong with ours goes as well: the program would not know it.
fn stripped(words: &[OsString]) -> Vec<OsString> {
    // The first one is taken for the program's name.
    let all: Vec<&[u8]> = std::iter::once(b"".as_slice()).chain(words.iter().map(|word| word.as_bytes())).collect();
    let kept = arguments::read(&all).kept;
    kept.into_iter().skip(1).filter_map(|at| words.get(at - 1).cloned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_arguments_are_taken_out() {
        let words = |text: &str| text.split_whitespace().map(OsString::from).collect::<Vec<_>>();
        let left =
            stripped(&words("-m M --moe cache=5 -c 7 --moe off --moe cache 9 --moe=x=1 --moe-expert-cache 3 -t 2"));
        assert_eq!(left, words("-m M -c 7 -t 2"));
        // As the preloaded library takes them out, whatever is wrong with them.
        assert_eq!(stripped(&words("--moe cache -m M --fork off -lm pin --moe")), words("-m M"));
        assert_eq!(stripped(&[]), words(""));
    }
}
