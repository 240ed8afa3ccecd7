//! Builds the C host (`host/*.c`) against one release of ggml and runs its cases, each in a process of its own.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use crate::toolchain::{compiler, root, run, scratch};

/// A case takes some seconds, with sanitizers half a minute, and more than five minutes on one core that twenty others want; one that hangs is a
/// deadlock.
const LIMIT_SECONDS: &str = "1500";

/// A backend of ggml that computes in any memory of its device.
pub const ANY_MEMORY: &str = "MUSA";
/// The stand-in for a GPU (host/fake.c): it has what the CPU lacks and is as strict as CUDA.
pub const FAKE: &str = "FAKE0";

/// The stand-in for a GPU that is late (host/late.c).
pub const LATE: &str = "LATE0";

/// The plugin under test: `GGML_MOE_LIBRARY`, or the release build.
pub fn plugin() -> PathBuf {
    let path = std::env::var_os("GGML_MOE_LIBRARY")
        .map_or_else(|| root().join("target/release/libggml-moe.so"), PathBuf::from);
    assert!(path.exists(), "there is no plugin at {}: build it first (make), or set GGML_MOE_LIBRARY", path.display());
    path
}

/// Runs a compiler whose output is still to be named, unless the same command has made it out of the same files before.
fn build_if_changed(mut command: Command, program: &Path) {
    let time = |path: &Path| path.metadata().and_then(|data| data.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    let headers = std::fs::read_dir(root().join("tests/host")).unwrap().map(|entry| time(&entry.unwrap().path()));
    let arguments = command.get_args().map(Path::new).filter(|path| path.is_absolute()).map(time);
    let newest = headers.chain(arguments).max().unwrap();
    let (made_by, line) = (program.with_extension("command"), format!("{command:?}"));
    if time(program) > newest && std::fs::read_to_string(&made_by).is_ok_and(|text| text == line) {
        return;
    }
    // Under another name first: a run beside this one may be using the program.
    let new = program.with_extension(std::process::id().to_string());
    run(command.arg(&new));
    std::fs::rename(&new, program).unwrap();
    std::fs::write(made_by, line).unwrap();
}

/// The C host, built against one release.
pub struct Host {
    program: PathBuf,
    libraries: PathBuf,
    /// A folder whose libraries are taken first.
    instead: Option<PathBuf>,
}

impl Host {
    /// Builds it in the folder `name` against the headers of `source` (a ggml folder) and the libraries of a folder, with these
    /// flags and those of `GGML_MOE_HOST_CFLAGS` (tests/asan.sh has some).
    /// What is there already is kept while the sources, the libraries and the command stay the same.
    pub fn build(name: &str, source: &Path, libraries: &Path, instead: Option<PathBuf>, flags: &[&str]) -> Self {
        let more = std::env::var("GGML_MOE_HOST_CFLAGS").unwrap_or_default();
        // A host with other flags is another program, so that two runs side by side do not take each other's.
        let folder = if more.is_empty() { name.to_owned() } else { format!("{name}-flags") };
        let program = scratch(&folder).join("moe-host");
        let files = |folder: &Path| -> Vec<PathBuf> {
            let mut files: Vec<PathBuf> =
                std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
            files.sort();
            files
        };
        let sources =
            files(&root().join("tests/host")).into_iter().filter(|path| path.extension().is_some_and(|it| it == "c"));
        // By path, because one host's libraries carry a version in their names.
        let library = |stem: &str| {
            let name = |path: &PathBuf| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let exact = format!("{stem}.so");
            let all = files(libraries);
            let found = all.iter().find(|path| name(path) == exact);
            let versioned = || all.iter().find(|path| name(path).starts_with(&format!("{stem}.v")));
            found.or_else(versioned).unwrap_or_else(|| panic!("no {stem} in {}", libraries.display())).clone()
        };
        let mut command = compiler(source);
        command.args(["-Werror", "-O1", "-g"]).args(flags).args(sources).args(more.split_whitespace());
        command.arg(library("libggml")).arg(library("libggml-base"));
        command.arg(format!("-Wl,-rpath,{}", libraries.display())).arg("-Wl,--allow-shlib-undefined");
        command.args(["-lm", "-lpthread", "-o"]);
        build_if_changed(command, &program);
        Self { program, libraries: libraries.to_owned(), instead }
    }

    /// Runs one case with these keys in `GGML_MOE`; what it printed, or how it failed.
    pub fn try_case(&self, case: &[&str], keys: &str, variables: &[(&str, &str)]) -> Result<String, String> {
        let mut command = Command::new("timeout");
        command
            .args(["--kill-after=5", LIMIT_SECONDS])
            .arg(&self.program)
            .arg(&self.libraries)
            .arg(plugin())
            .args(case);
        command.env("GGML_MOE", keys).env_remove("GGML_BACKEND_PATH").env_remove("LLAMA_ARG_DEVICE");
        // What is learned of these models is of no use to the user's own file.
        command.env("LLAMA_CACHE", concat!(env!("CARGO_TARGET_TMPDIR"), "/state"));
        if let Some(folder) = &self.instead {
            command.env("LD_LIBRARY_PATH", folder);
        }
        if keys.contains(FAKE) {
            command.env("MOE_HOST_FAKE", ANY_MEMORY);
        }
        if keys.contains(LATE) {
            command.env("MOE_HOST_LATE", ANY_MEMORY);
        }
        // Two cases share the cores: waiting threads must sleep. Panics are expected: no need to unwind the stack for each.
        command.env("RUST_BACKTRACE", "0");
        command.env("OMP_WAIT_POLICY", "passive");
        // Where a debugger is installed, ggml's abort starts one, which may take minutes to say what nobody reads here.
        command.env("GGML_NO_BACKTRACE", "1");
        command.envs(variables.iter().copied());
        let output = command.output().expect("coreutils' timeout runs");
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if output.status.success() && out.contains(&format!("ok: {}", case[0])) {
            return Ok(out.into_owned());
        }
        let tail: Vec<&str> = err.lines().rev().take(40).collect();
        let tail: Vec<&str> = tail.into_iter().rev().collect();
        Err(format!("{case:?} with GGML_MOE={keys:?} ended with {}\n{out}{}", output.status, tail.join("\n")))
    }

    /// The slots that the plugin says can be made to panic over this inner device.
    pub fn slots(&self, inner: &str) -> Vec<String> {
        let printed =
            self.try_case(&["slots"], &format!("inner={inner}"), &[]).unwrap_or_else(|report| panic!("{report}"));
        printed.lines().filter_map(|line| line.strip_prefix("slot ")).map(str::to_owned).collect()
    }

    /// Makes each slot panic, and reports those where that did more than give a failure.
    pub fn panic_in_each_slot(&self) -> Vec<String> {
        let (over_cpu, over_gpu) = (self.slots("CPU"), self.slots(FAKE));
        assert!(over_cpu.len() > 35, "only {} slots: {over_cpu:?}", over_cpu.len());
        // Over the CPU backend some optional slots are empty; over the stand-in for a GPU only those are left to try.
        let only_gpu = over_gpu.iter().filter(|slot| !over_cpu.contains(slot)).map(|slot| (FAKE, slot));
        let all = over_cpu.iter().map(|slot| ("CPU", slot)).chain(only_gpu);
        all.filter_map(|(inner, slot)| {
            self.try_case(&["panic", slot], &format!("inner={inner};debug-panic={slot}"), &[]).err()
        })
        .collect()
    }
}
