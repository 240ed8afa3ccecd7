//! `ggml-moe run -- llama-server ...`: the plan, then the program itself, with the plugin in it.
//!
//! The program takes our place (exec), so that its exit code, its signals and its terminal are its own. Where the plugin cannot help, it is
//! started as it is, without our arguments.

use std::ffi::OsString;
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use ggml_moe::planner::{flags, table};
use ggml_moe::{arguments, config};

use crate::elf::{self, Kind};
use crate::host::{Answer, CommandError, Failed, Usage, plugin, program};
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
    let (_, notices) = config::parse(&asked.moe.join(";"));
    if let Some(notice) = notices.first() {
        return Err(Usage(notice.to_string().replacen("GGML_MOE", "--moe", 1)));
    }
    let library = helped(&path, asked.plugin.as_deref());
    let mut text = String::new();
    match &library {
        Err(reason) => {
            text.push_str(&format!("the plugin cannot help {}: {reason}; it is started as it is\n", path.display()))
        }
        Ok(_) if asked.no_plan => {}
        Ok(_) => {
            text.push_str(&plan_of(&path, &words(asked, rest)).unwrap_or_else(|reason| format!("no plan: {reason}\n")))
        }
    }
    if asked.plan_only {
        return Ok(Answer { text, good: library.is_ok() });
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
    Err(Failed(format!("{}: {}", path.display(), command.exec())))
}

/// The program's arguments as text, with the keys that were given to us.
fn words(asked: &RunArguments, rest: &[OsString]) -> Vec<String> {
    let own = rest.iter().map(|word| word.to_string_lossy().into_owned());
    own.chain(asked.moe.iter().flat_map(|pair| ["--moe".to_owned(), pair.clone()])).collect()
}

/// The program's file: a path, or a name in PATH.
fn found(name: &OsString) -> Result<PathBuf, CommandError> {
    let path = Path::new(name);
    if path.components().count() > 1 {
        let there = path.is_file().then(|| path.to_owned());
        return there.ok_or_else(|| Usage(format!("{}: no such program", path.display())));
    }
    let name = name.to_string_lossy();
    program(&name, None, None).map_err(|_| Usage(format!("no {name} in PATH; name it with its folder")))
}

/// The plugin's file, if it can be loaded into this program; Err says why not.
fn helped(path: &Path, named: Option<&Path>) -> Result<PathBuf, String> {
    match elf::kind(path) {
        Err(error) => return Err(format!("it cannot be read: {error}")),
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
    if matches!(elf::kind(&library), Ok(Kind::Foreign)) {
        return Err(format!("{} is no library of this system", library.display()));
    }
    // The loader takes both for the end of a name.
    if library.to_string_lossy().contains([' ', ':']) {
        let path = library.display();
        return Err(format!("the path of the plugin has a space or a colon, which LD_PRELOAD cannot carry: {path}"));
    }
    Ok(library)
}

/// The short plan for what the program is asked to do.
fn plan_of(path: &Path, words: &[String]) -> Result<String, String> {
    let all: Vec<String> = std::iter::once(path.display().to_string()).chain(words.iter().cloned()).collect();
    let flags = flags::of_program(&all, |name| std::env::var(name).ok());
    let told = |error: CommandError| match error {
        Usage(reason) | Failed(reason) => reason,
    };
    if flags.off {
        return Ok("the plugin is off (--moe off)\n".to_owned());
    }
    if flags.model.is_none() {
        let reason = if flags.fetched { "the program fetches the model itself" } else { "no model is named (-m)" };
        return Err(format!("{reason}; the plugin decides when it is loaded"));
    }
    let planned = plan::with(flags, plan::machine_of(path).map_err(told)?).map_err(told)?;
    Ok(table::short(&planned.plan))
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
