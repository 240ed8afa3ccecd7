//! What `bench` and `ppl` share: their options for the host, the programs and devices, and the command line of each side.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::Args;
use ggml_moe::bench::output::{self, Plugin, Wanted};
use ggml_moe::bench::placement::{cache_mib, cache_of_total, share_of};
use ggml_moe::model::moe::MoeShape;
use ggml_moe::sim::{PRESETS, Preset};

use crate::child::{self, Finished};

/// Why a command ends without its answer.
pub(crate) enum CommandError {
    /// What the user asked for cannot be: exit code 2.
    Usage(String),
    /// It was tried and failed: exit code 1.
    Failed(String),
}

pub(crate) use CommandError::{Failed, Usage};

/// What a command prints, and whether that is good news.
pub(crate) struct Answer {
    pub(crate) text: String,
    pub(crate) good: bool,
}

/// Options for the host.
#[derive(Args)]
pub(crate) struct HostArguments {
    /// The model (.gguf; any file of a split model).
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// The device that the plugin stands in front of and that stock uses (--list-devices of the host); by default the host's first, or
    /// CPU where it has none.
    #[arg(long, value_name = "NAME[,NAME]")]
    inner: Option<String>,
    /// Threads of the processor, on both sides.
    #[arg(short, long)]
    threads: Option<u32>,
    /// A key of the plugin, as in GGML_MOE.
    #[arg(long, value_name = "KEY=VALUE")]
    moe: Vec<String>,
    /// The plugin; by default the library beside this command.
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,
    /// The folder of the host's programs; by default they are looked for in PATH.
    #[arg(long, value_name = "FOLDER")]
    host_dir: Option<PathBuf>,
    /// Flags for stock's side in place of the ones that are chosen (-ncmoe).
    #[arg(long, value_name = "FLAGS", allow_hyphen_values = true)]
    pub(crate) stock_args: Option<String>,
    /// More flags for the plugin's side.
    #[arg(long, value_name = "FLAGS", allow_hyphen_values = true, default_value = "")]
    pub(crate) our_args: String,
    /// The most seconds that one program may run.
    #[arg(long, value_name = "SECONDS", default_value_t = 900)]
    timeout: u64,
    /// Print the commands and run nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// More flags for both sides.
    #[arg(last = true, value_name = "FLAGS")]
    both: Vec<String>,
}

impl HostArguments {
    /// The model's file.
    pub(crate) fn model(&self) -> Result<&Path, CommandError> {
        self.model.as_deref().ok_or_else(|| Usage("no model; name it with -m FILE".to_owned()))
    }
}

/// Keys that are ours to read must be right: nothing has been started yet.
pub(crate) fn refuse_faults(keys: &[String]) -> Result<(), CommandError> {
    let (_, notices) = ggml_moe::config::parse(&keys.join(";"));
    let fault = notices.iter().find(|notice| notice.is_fault());
    fault.map_or(Ok(()), |notice| Err(Usage(notice.to_string().replacen("GGML_MOE", "--moe", 1))))
}

/// How much of the device's memory experts get, on both sides.
#[derive(Args)]
pub(crate) struct MemoryArguments {
    /// Share of the experts that fit, in percent; 30 if nothing else is said.
    #[arg(long, value_name = "PERCENT", value_delimiter = ',')]
    share: Vec<f64>,
    /// The same in MiB; 0 is no cache.
    #[arg(long, value_name = "MIB", value_delimiter = ',', conflicts_with = "share")]
    cache_mib: Vec<u64>,
    /// Memory for everything: experts get what dense weights and --beside-mib leave.
    #[arg(long, value_name = "MIB", value_delimiter = ',', conflicts_with_all = ["share", "cache_mib"])]
    vram_mib: Vec<u64>,
    /// Memory that --vram-mib leaves for context and computing.
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    beside_mib: u64,
}

impl MemoryArguments {
    /// Shares (0 to 1) with the cache in MiB.
    pub(crate) fn sizes(&self, shape: &MoeShape) -> Result<Vec<(f64, u64)>, CommandError> {
        let of_mib = |mib: u64| (if mib == 0 { 0.0 } else { share_of(shape, mib) }, mib);
        if !self.vram_mib.is_empty() {
            let size = |total: &u64| {
                cache_of_total(shape, *total, self.beside_mib).map(of_mib).ok_or_else(|| {
                    Usage(format!(
                        "--vram-mib {total} leaves nothing to experts: dense weights take {} MiB, --beside-mib {}",
                        shape.dense_bytes.div_ceil(1 << 20),
                        self.beside_mib
                    ))
                })
            };
            return self.vram_mib.iter().map(size).collect();
        }
        if !self.cache_mib.is_empty() {
            return Ok(self.cache_mib.iter().map(|mib| of_mib(*mib)).collect());
        }
        let shares = if self.share.is_empty() { &[30.0][..] } else { &self.share };
        let size = |share: &f64| match share {
            share if *share > 0.0 && *share <= 100.0 => Ok((share / 100.0, cache_mib(shape, share / 100.0))),
            share => Err(Usage(format!("--share {share}: a share lies above 0 and at most at 100 percent"))),
        };
        shares.iter().map(size).collect()
    }
}

/// The shape of the model; without experts there is nothing to compare.
pub(crate) fn shape(model: &Path) -> Result<MoeShape, CommandError> {
    let shape = MoeShape::open(model).map_err(|error| Usage(format!("{}: {error}", model.display())))?;
    if shape.expert_bytes() == 0 {
        return Err(Usage(format!(
            "{}: a model without experts; the plugin has nothing to do for it",
            model.display()
        )));
    }
    Ok(shape)
}

/// The preset whose routing replaces the model's.
pub(crate) fn preset(name: &str, shape: &MoeShape) -> Result<&'static Preset, CommandError> {
    let Some(preset) = PRESETS.iter().find(|preset| preset.name == name) else {
        let known: Vec<&str> = PRESETS.iter().map(|preset| preset.name).collect();
        return Err(Usage(format!("--replay {name}: no such preset; presets: {}", known.join(", "))));
    };
    let fits = shape.expert_layers.iter().all(|layer| layer.experts == u64::from(preset.experts));
    if !fits || shape.used != u64::from(preset.used) {
        let experts = shape.expert_layers.first().map_or(0, |layer| layer.experts);
        return Err(Usage(format!(
            "--replay {name} routes to {} of {} experts, the model to {} of {experts}",
            preset.used, preset.experts, shape.used
        )));
    }
    Ok(preset)
}

/// Which side a command line is for.
#[derive(Clone, Copy)]
pub(crate) enum Side<'a> {
    Stock,
    /// With these keys.
    Ours(&'a str),
}

impl Side<'_> {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Stock => "stock",
            Self::Ours(_) => "ours",
        }
    }
}

/// One program of the host, and the plugin.
pub(crate) struct Host {
    program: PathBuf,
    plugin: PathBuf,
    inner: Vec<String>,
    keys: String,
    threads: Option<u32>,
    limit: Duration,
    both: Vec<String>,
}

impl Host {
    /// Finds the program and the plugin, and looks at the devices of both sides.
    pub(crate) fn find(arguments: &HostArguments, name: &str, named: Option<&Path>) -> Result<Self, CommandError> {
        let program = program(name, named, arguments.host_dir.as_deref())?;
        let plugin = plugin(arguments.plugin.as_deref())?;
        let inner = arguments.inner.iter().flat_map(|names| names.split([',', '+'])).map(|name| name.trim().to_owned());
        let inner: Vec<String> = inner.filter(|name| !name.is_empty()).collect();
        let keys = arguments.moe.join(";");
        refuse_faults(&arguments.moe)?;
        let limit = Duration::from_secs(arguments.timeout.max(1));
        let mut host =
            Self { program, plugin, inner, keys, threads: arguments.threads, limit, both: arguments.both.clone() };
        if !arguments.dry_run || host.inner.is_empty() {
            host.look_at_devices()?;
        }
        Ok(host)
    }

    /// The host must have the inner device, and the plugin must offer its own in front of it.
    fn look_at_devices(&mut self) -> Result<(), CommandError> {
        let list = ["--list-devices".to_owned()];
        let stock = self.run(Side::Stock, &list)?;
        let names: Vec<String> = output::devices(&stock.stdout).into_iter().map(|(name, _)| name).collect();
        if self.inner.is_empty() {
            self.inner = vec![names.first().cloned().unwrap_or_else(|| "CPU".to_owned())];
        }
        if let Some(missing) = self.inner.iter().find(|name| !is_cpu(name) && !names.contains(name)) {
            let known = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            return Err(Failed(format!("{} has no device {missing}; its devices: {known}", self.program.display())));
        }
        let ours = self.run(Side::Ours(&self.keys_with(&[])), &list)?;
        let log = ours.log();
        let found = output::devices(&ours.stdout);
        let told = Plugin::read(&log);
        let needed: Vec<String> = (0..self.inner.len()).map(|number| format!("MoE{number}")).collect();
        let offered =
            |name: &String| found.iter().any(|(known, words)| known == name && !words.contains("passes through"));
        if needed.iter().all(offered) {
            return Ok(());
        }
        let why = told.lines.iter().rfind(|line| !line.starts_with("version ")).map_or_else(
            || "it loaded no backend from GGML_BACKEND_PATH (is it built with shared libraries, and with GGML_BACKEND_DL?)".to_owned(),
            Clone::clone,
        );
        Err(Failed(format!("{} does not offer {}: {why}", self.program.display(), needed.join(", "))))
    }

    /// The keys of our side: what every run needs, these, and the user's, who has the last word.
    pub(crate) fn keys_with(&self, more: &[String]) -> String {
        let mut keys = vec![format!("inner={}", self.inner.join("+")), "log=debug;state-file=off".to_owned()];
        keys.extend(more.iter().cloned());
        keys.extend(Some(self.keys.clone()).filter(|keys| !keys.is_empty()));
        keys.join(";")
    }

    /// The device for a side's `--device`.
    pub(crate) fn device(&self, side: Side<'_>, separator: &str) -> String {
        match side {
            Side::Ours(_) => (0..self.inner.len()).map(|n| format!("MoE{n}")).collect::<Vec<_>>().join(separator),
            Side::Stock if self.is_over_cpu() => "none".to_owned(),
            Side::Stock => self.inner.join(separator),
        }
    }

    /// The first device of a side, as the host's account of memory names it.
    pub(crate) fn first_device(&self, side: Side<'_>) -> String {
        self.device(side, ",").split(',').next().unwrap_or_default().to_owned()
    }

    /// Stock computes on the processor, so that flags for placement mean nothing.
    pub(crate) fn is_over_cpu(&self) -> bool {
        self.inner.iter().all(|name| is_cpu(name))
    }

    /// Defaults (flags, the value) that `more` does not override, with `-t` and what is for both sides; flags that a program takes twice
    /// would mean two tests.
    pub(crate) fn flags(&self, defaults: &[(&[&str], String)], more: &[String]) -> Vec<String> {
        let more: Vec<String> = more.iter().chain(&self.both).cloned().collect();
        let mut all: Vec<(&[&str], String)> = defaults.to_vec();
        if let Some(threads) = self.threads {
            all.push((&["-t", "--threads"], threads.to_string()));
        }
        let kept = all.into_iter().filter(|(names, _)| !more.iter().any(|word| names.contains(&word.as_str())));
        let mut flags = Vec::new();
        for (names, value) in kept {
            flags.extend(names.first().map(|name| (*name).to_owned()));
            flags.extend(Some(value).filter(|value| !value.is_empty()));
        }
        flags.extend(more);
        flags
    }

    /// The command line of a side, as a shell takes it.
    pub(crate) fn shown(&self, side: Side<'_>, flags: &[String]) -> String {
        let mut words = Vec::new();
        if let Side::Ours(keys) = side {
            words.push(format!("GGML_MOE={}", quoted(keys)));
            words.push(format!("GGML_BACKEND_PATH={}", quoted(&self.plugin.display().to_string())));
        }
        words.push(quoted(&self.program.display().to_string()));
        words.extend(flags.iter().map(|flag| quoted(flag)));
        words.join(" ")
    }

    /// The most that one program may run.
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// The program with a side's environment.
    pub(crate) fn command(&self, side: Side<'_>, flags: &[String]) -> Command {
        let mut command = plain_command(&self.program);
        command.args(flags);
        if let Side::Ours(keys) = side {
            command.env("GGML_BACKEND_PATH", &self.plugin).env("GGML_MOE", keys);
        }
        command
    }

    /// Runs the program; its failure is not an error here.
    fn run(&self, side: Side<'_>, flags: &[String]) -> Result<Finished, CommandError> {
        let mut command = self.command(side, flags);
        child::run(&mut command, self.limit).map_err(|error| Failed(format!("{}: {error}", self.program.display())))
    }

    /// Runs the program; an end with an error, or none in time, is an error.
    pub(crate) fn completed(&self, side: Side<'_>, flags: &[String]) -> Result<Finished, CommandError> {
        let done = self.run(side, flags)?;
        let name = self.program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        match done.status {
            Some(status) if status.success() => Ok(done),
            Some(status) => {
                let log = done.log();
                let reason = output::reason(&log).unwrap_or("it printed nothing");
                Err(Failed(format!("{}: {name} ended with {status}: {reason}", side.name())))
            }
            None => {
                Err(Failed(format!("{}: {name} was stopped after {} s (--timeout)", side.name(), self.limit.as_secs())))
            }
        }
    }

    /// What a run with a cache of so many MiB must show.
    pub(crate) fn wanted(shape: &MoeShape, share: f64, cache_mib: u64, keys: &str) -> Wanted {
        let off = cache_mib == 0 || ggml_moe::config::parse(keys).0.cache == ggml_moe::config::CacheSize::Off;
        Wanted { cache: !off, slots: slots(shape, share) }
    }
}

/// Experts of a share, less than whole ones.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a count; the cast saturates")]
fn slots(shape: &MoeShape, share: f64) -> u64 {
    (share * shape.experts() as f64).floor() as u64
}

fn is_cpu(name: &str) -> bool {
    name.eq_ignore_ascii_case("CPU")
}

/// A word for a shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./,:=+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

/// A program of the host with none of the caller's settings for it. Where a debugger is installed, ggml's abort starts one, which may take
/// minutes.
pub(crate) fn plain_command(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let name_text = name.to_string_lossy();
        if name_text.starts_with("GGML_MOE") || name_text == "GGML_BACKEND_PATH" || name_text.starts_with("LLAMA_ARG_")
        {
            command.env_remove(&name);
        }
    }
    command.env("GGML_NO_BACKTRACE", "1");
    command
}

/// Words of a text of flags.
pub(crate) fn words(flags: &str) -> Vec<String> {
    flags.split_whitespace().map(str::to_owned).collect()
}

pub(crate) fn program(name: &str, named: Option<&Path>, folder: Option<&Path>) -> Result<PathBuf, CommandError> {
    if let Some(path) = named {
        let there = path.is_file().then(|| path.to_owned());
        return there.ok_or_else(|| Usage(format!("--{name} {}: no such program", path.display())));
    }
    if let Some(folder) = folder {
        let path = folder.join(name);
        let there = path.is_file().then(|| path.clone());
        return there.ok_or_else(|| Usage(format!("{}: no such program (--host-dir)", path.display())));
    }
    let paths = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&paths)
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())
        .ok_or_else(|| Usage(format!("no {name} in PATH; name it with --{name} or its folder with --host-dir")))
}

pub(crate) fn plugin(named: Option<&Path>) -> Result<PathBuf, CommandError> {
    if let Some(path) = named {
        return path.canonicalize().map_err(|error| Usage(format!("--plugin {}: {error}", path.display())));
    }
    let command = std::env::current_exe().unwrap_or_default();
    let folder = command.parent().unwrap_or(Path::new("."));
    ["libggml-moe.so", "libggml_moe.so", "../lib/libggml-moe.so"]
        .iter()
        .find_map(|name| folder.join(name).canonicalize().ok())
        .ok_or_else(|| Usage(format!("no libggml-moe.so in {}; name it with --plugin", folder.display())))
}

/// Arguments in llama.cpp's spelling, which has short names of several letters, as clap understands them.
pub(crate) fn spelled(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut passed_on = false;
    arguments
        .map(|argument| {
            passed_on |= argument == "--";
            let spelled = match argument.to_str() {
                Some("-ub") => "--ubatch-size",
                Some("-np") => "--parallel",
                Some("-md") => "--model-draft",
                _ => return argument,
            };
            if passed_on { argument } else { spelled.into() }
        })
        .collect()
}
