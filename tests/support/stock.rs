//! The stock programs and the plugin: where they are, and a command line for each side of a comparison.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, SystemTime};

use super::{kept_folder, package, process, text};

/// Which device runs the model.
#[derive(Clone, Copy, Debug)]
pub enum Side<'a> {
    /// Stock alone: the CPU.
    Stock,
    /// The plugin with these keys, and the devices of ours that the host is asked to use.
    Plugin {
        /// The value of `GGML_MOE`.
        keys: &'a str,
        /// The value of `--device`; empty to name none.
        device: &'a str,
    },
}

/// The plugin over ggml's CPU backend, reporting its counters at the end.
pub const OVER_CPU: Side<'static> = Side::Plugin { keys: "inner=CPU;log=debug", device: "MoE0" };

/// The inner device that computes late (`tests/host/late.c`). A side whose keys name it has it; the seed of its delays is that of `debug-late`,
/// and with odd seeds it keeps pointers as the Vulkan backend does.
pub const LATE: &str = "inner=LATE0";

fn be_late(command: &mut Command, keys: &str) {
    let seed = keys.split(';').find_map(|key| key.strip_prefix("debug-late=")).unwrap_or("1");
    // A provider whose code computes in any memory of its device.
    preload(command, "host/late").env("MOE_HOST_LATE", "MUSA").env("MOE_HOST_SEED", seed).env("MOE_HOST_FINITE", "1");
    let seed = seed.parse::<u32>().unwrap_or(0);
    if seed & 1 != 0 {
        command.env("MOE_HOST_KEEP", "1");
    }
    // Two kinds of devices: blocks run ahead of the host where the device reaches its memory.
    if seed & 2 != 0 {
        command.env("MOE_HOST_REACH", "1");
    }
}

/// The folder of the stock programs; panics with what to do when they are not built.
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| ask_stock("path"))
}

/// The folder of the stock sources, for headers.
pub fn sources() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| ask_stock("source"))
}

fn ask_stock(what: &str) -> PathBuf {
    let script = package().join("tests/stock/stock.sh");
    let done = process::run(Command::new(script).arg(what), Duration::from_secs(120));
    assert!(done.status.success(), "{}", done.report("no stock llama.cpp; run 'make stock'"));
    PathBuf::from(done.stdout.trim_end())
}

/// The release library. Built here if need be, so that no test can run on a stale one; `GGML_MOE_PLUGIN` names another.
pub fn plugin() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        if let Some(path) = std::env::var_os("GGML_MOE_PLUGIN") {
            return PathBuf::from(path);
        }
        let mut build = Command::new(env!("CARGO"));
        build.current_dir(package()).args(["build", "--release", "--locked", "--quiet", "--lib"]);
        process::run(&mut build, Duration::from_secs(900)).success();
        // Cargo's folder for the files of tests lies beside the one of each profile.
        Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("release").join("libggml_moe.so")
    })
}

/// A stock program with the environment of one side, and no arguments.
pub fn program(name: &str, side: Side<'_>) -> Command {
    command(&folder().join(name), side)
}

/// Any program with the environment of one side. Nothing of the caller's own ggml or llama.cpp settings gets in.
pub fn command(path: &Path, side: Side<'_>) -> Command {
    let mut command = Command::new(path);
    for (name, _) in std::env::vars() {
        if name.starts_with("GGML_") || name.starts_with("LLAMA_") {
            command.env_remove(name);
        }
    }
    command.env("LD_PRELOAD", preloaded("support/flush_log"));
    // Two busy OpenMP teams on two cores spin against each other; waiting threads that sleep give the same results.
    command.env("OMP_WAIT_POLICY", "passive");
    // Where a debugger is installed, ggml's abort starts one, which may take minutes to say what nobody reads here.
    command.env("GGML_NO_BACKTRACE", "1");
    if let Side::Plugin { keys, .. } = side {
        // What one run learned must not change the next one, nor a file of whoever runs the tests.
        let remembers = if keys.contains("state-file") { "" } else { ";state-file=off" };
        command.env("GGML_BACKEND_PATH", plugin()).env("GGML_MOE", format!("{keys}{remembers}"));
        if keys.contains(LATE) {
            be_late(&mut command, keys);
        }
    }
    command
}

/// The environment that makes a program load all of ggml's backends before its `main`: several stock test programs look a
/// device up by name before anything has loaded it.
pub fn load_all_backends(command: &mut Command) -> &mut Command {
    preload(command, "load_all")
}

/// Puts the library of `tests/NAME.c` before all others of a program.
pub fn preload<'a>(command: &'a mut Command, name: &str) -> &'a mut Command {
    let libraries = [preloaded(name), preloaded("support/flush_log")].map(|path| path.display().to_string());
    command.env("LD_PRELOAD", libraries.join(" "))
}

/// A library for `LD_PRELOAD` out of `tests/NAME.c`, or of `tests/NAME` if that says C++.
pub fn preloaded(name: &str) -> PathBuf {
    let source = if name.ends_with(".cpp") { name.to_owned() } else { format!("{name}.c") };
    compile(&source, &format!("{}.so", name.replace('/', "-")), &["-shared", "-fPIC"])
}

/// A stock program with what every comparison needs: the model, no repacking, the side's devices.
pub fn tool(name: &str, side: Side<'_>, model: &Path, threads: u32) -> Command {
    let mut command = program(name, side);
    with_model(&mut command, side, model, threads);
    command
}

/// The same arguments for a program of any release.
pub fn with_model(command: &mut Command, side: Side<'_>, model: &Path, threads: u32) {
    command.args(["-m", text(model), "-nr", "-t", &threads.to_string(), "-ngl", "99"]);
    if let Side::Plugin { device, .. } = side
        && !device.is_empty()
    {
        command.args(["--device", device]);
    }
}

/// The small host of our own over stock libllama (`tests/hosts/model_host.c`).
pub fn model_host() -> PathBuf {
    compile("hosts/model_host.c", "model_host", &[&format!("-DBACKENDS=\"{}\"", folder().display())])
}

/// Compiles a C file of the tests against the stock headers and libraries, unless a newer result is there.
pub fn compile(source: &str, output: &str, flags: &[&str]) -> PathBuf {
    // Tests that run side by side want the same files.
    static COMPILING: Mutex<()> = Mutex::new(());
    let _compiling = COMPILING.lock().expect("a compiler failed");
    let source = package().join("tests").join(source);
    let output = kept_folder("c").join(output);
    let time = |path: &Path| path.metadata().and_then(|data| data.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    let beside = source.parent().and_then(|folder| std::fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    let headers = beside.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|it| it == "h"));
    let newest = headers.map(|path| time(&path)).chain([time(&source), time(&folder().join("libllama.so"))]).max();
    let newest = newest.unwrap_or(SystemTime::UNIX_EPOCH);
    if time(&output) <= newest {
        let (bin, headers) = (folder(), sources());
        let is_cpp = source.extension().is_some_and(|extension| extension == "cpp");
        let (compiler, standard) = if is_cpp { ("c++", "-std=c++17") } else { ("cc", "-std=c11") };
        let mut cc = Command::new(compiler);
        cc.args([standard, "-O1", "-Wall", "-Wextra", "-Werror"]).args(flags).arg("-o").arg(&output).arg(&source);
        cc.arg("-I").arg(headers.join("include")).arg("-I").arg(headers.join("ggml/include"));
        cc.arg("-isystem").arg(headers.join("ggml/src")).arg("-isystem").arg(headers.join("src"));
        cc.arg("-Wl,--as-needed").arg("-L").arg(bin).arg(format!("-Wl,-rpath,{}", bin.display())).args([
            "-lllama",
            "-lggml",
            "-lggml-base",
        ]);
        process::run(&mut cc, Duration::from_secs(60)).success();
    }
    output
}
