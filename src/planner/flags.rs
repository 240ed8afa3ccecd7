//! llama.cpp's flags, as far as they decide about memory and speed.
//!
//! Owns: their spelling (llama.cpp b11434) and the variables that stand for them; a flag beats its variable, the last of several counts.
//! Invariants: any words are accepted; a flag that is not known here is skipped, and so is a value that cannot be read.
//! Threads: none. Does not: open files: the draft model is named, not read.

use std::path::{Path, PathBuf};

use super::MIB;
use super::choose::LoadMode;
use super::usage::Usage;
use crate::arguments;
use crate::config::{self, CacheSize, Config, ExpertsFrom, PolicyOrder};
use crate::explicit::{Call, Explicit, Standing, standing, without_cache};
use crate::model::downloads::{Download, Variable};
use crate::model::types::TYPES;

/// What the flags say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Flags {
    /// The model.
    pub model: Option<PathBuf>,
    /// What the host fetches as the model (`-hf`, `-mu`, `-dr`). It beats a file that is named, which is the place of what `-mu` fetches.
    pub fetched: Option<Download>,
    /// The name of its file (`-hff`).
    pub fetched_file: Option<String>,
    /// The draft model.
    pub draft: Option<PathBuf>,
    /// What the host fetches as the draft model.
    pub fetched_draft: Option<Download>,
    /// Devices by name.
    pub devices: Vec<String>,
    /// Settings of the plugin, as `GGML_MOE` takes them.
    pub settings: String,
    /// `--moe off`.
    pub off: bool,
    /// What is wrong with the settings of the plugin.
    pub faults: Vec<String>,
    /// What the user set by hand.
    pub explicit: Explicit,
    /// A batch (`-b`), which no micro-batch is longer than.
    whole_batch: Option<u64>,
    /// What is wanted.
    pub usage: Usage,
}

/// Flags and their variables: names, the variable, whether a value follows.
const KNOWN: [(&[&str], &str, bool); 29] = [
    (&["-m", "--model"], "LLAMA_ARG_MODEL", true),
    (&["-hf", "-hfr", "--hf-repo"], "LLAMA_ARG_HF_REPO", true),
    (&["-hff", "--hf-file"], "LLAMA_ARG_HF_FILE", true),
    (&["-mu", "--model-url"], "LLAMA_ARG_MODEL_URL", true),
    (&["-dr", "--docker-repo"], "LLAMA_ARG_DOCKER_REPO", true),
    (&["-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf"], "LLAMA_ARG_SPEC_DRAFT_HF_REPO", true),
    (&["-md", "--model-draft", "--spec-draft-model"], "LLAMA_ARG_SPEC_DRAFT_MODEL", true),
    (&["-c", "--ctx-size"], "LLAMA_ARG_CTX_SIZE", true),
    (&["-np", "--parallel"], "LLAMA_ARG_N_PARALLEL", true),
    (&["-kvu", "--kv-unified"], "LLAMA_ARG_KV_UNIFIED", false),
    (&["-no-kvu", "--no-kv-unified"], "", false),
    (&["-b", "--batch-size"], "LLAMA_ARG_BATCH", true),
    (&["-ub", "--ubatch-size"], "LLAMA_ARG_UBATCH", true),
    (&["-t", "--threads"], "LLAMA_ARG_THREADS", true),
    (&["-ngl", "--gpu-layers", "--n-gpu-layers"], "LLAMA_ARG_N_GPU_LAYERS", true),
    (&["-ncmoe", "--n-cpu-moe"], "LLAMA_ARG_N_CPU_MOE", true),
    (&["-cmoe", "--cpu-moe"], "LLAMA_ARG_CPU_MOE", false),
    (&["-ncffn", "--n-cpu-ffn"], "LLAMA_ARG_N_CPU_FFN", true),
    (&["-ot", "--override-tensor"], "LLAMA_ARG_OVERRIDE_TENSOR", true),
    (&["-ctk", "--cache-type-k"], "LLAMA_ARG_CACHE_TYPE_K", true),
    (&["-ctv", "--cache-type-v"], "LLAMA_ARG_CACHE_TYPE_V", true),
    (&["-fa", "--flash-attn"], "LLAMA_ARG_FLASH_ATTN", true),
    (&["--swa-full"], "LLAMA_ARG_SWA_FULL", false),
    (&["-fit", "--fit"], "LLAMA_ARG_FIT", true),
    (&["-fitt", "--fit-target"], "LLAMA_ARG_FIT_TARGET", true),
    (&["-fitc", "--fit-ctx"], "LLAMA_ARG_FIT_CTX", true),
    (&["-lm", "--load-mode"], "LLAMA_ARG_LOAD_MODE", true),
    (&["-dev", "--device"], "LLAMA_ARG_DEVICE", true),
    (&["--no-mmap"], "", false),
];

fn is_true(value: &str) -> bool {
    matches!(value, "on" | "1" | "true" | "enabled")
}

/// llama.cpp's batch (`-b`).
const WHOLE_BATCH: u64 = 2048;
/// llama.cpp's own micro-batch.
pub const HOST_BATCH: u64 = 512;

/// Reads the command line of a program as that program means it; the first word is its name.
pub fn of_program(words: &[String], variable: impl Fn(&str) -> Option<String>) -> Flags {
    let name = words.first().and_then(|word| Path::new(word).file_name()?.to_str()).unwrap_or_default().to_owned();
    let rest = words.get(1..).unwrap_or_default();
    let mut flags = read(rest, name.contains("server"), variable);
    let usage = &mut flags.usage;
    if name.contains("bench") {
        // A bench fits nothing unless it is asked to, has a context for each test, and prints the passes that it was given.
        usage.fit = rest.iter().any(|word| word == "-fitt" || word == "--fit-target");
        usage.context = Some(bench_context(rest));
        usage.batch = usage.batch.or_else(|| Some(most(rest, ["-ub", "--ubatch-size"], HOST_BATCH)));
    } else if name.contains("perplexity") || name.contains("imatrix") {
        // Chunks of this length, as many together as a batch holds; llama.cpp rounds the context of each one up.
        let chunk = usage.context.unwrap_or(512).max(1);
        let chunks = (flags.whole_batch.unwrap_or(WHOLE_BATCH) / chunk).max(1);
        usage.context = Some(chunks.saturating_mul(chunk.checked_next_multiple_of(256).unwrap_or(chunk)));
    }
    flags
}

/// The largest number of a list behind a flag.
fn most(words: &[String], names: [&str; 2], default: u64) -> u64 {
    let value = words.iter().rposition(|word| names.contains(&word.as_str())).and_then(|at| words.get(at + 1));
    let numbers = value.map(|value| value.split(',').filter_map(|number| number.parse::<u64>().ok()).max());
    numbers.flatten().unwrap_or(default)
}

/// The longest of a bench's tests.
fn bench_context(words: &[String]) -> u64 {
    let pair = words.iter().rposition(|word| word == "-pg").and_then(|at| words.get(at + 1));
    let pair = pair.map_or(0, |value| value.split(',').filter_map(|number| number.parse::<u64>().ok()).sum());
    let tests = most(words, ["-p", "--n-prompt"], 512).max(most(words, ["-n", "--n-gen"], 128)).max(pair);
    tests.saturating_add(most(words, ["-d", "--n-depth"], 0)).max(1)
}

/// Reads flags. `server`: the program is one that takes several requests, four slots if nothing else is said. `variable` reads the
/// environment.
pub fn read(words: &[String], server: bool, variable: impl Fn(&str) -> Option<String>) -> Flags {
    let mut flags = Flags::default();
    if server {
        flags.usage.parallel = 4;
    }
    // What the environment sets for the plugin comes first, so that flags have the last word.
    flags.settings = variable("GGML_MOE").unwrap_or_default();
    for (names, name, takes) in KNOWN {
        if let Some(value) = Some(name).filter(|name| !name.is_empty()).and_then(&variable)
            && (takes || is_true(&value))
        {
            flags.set(names[0], &value);
        }
    }
    // The first one is taken for the program's name.
    let all: Vec<&[u8]> = std::iter::once("").chain(words.iter().map(String::as_str)).map(str::as_bytes).collect();
    let ours = arguments::read(&all);
    flags.off = ours.off;
    flags.settings = config::merged(&flags.settings, &ours.settings);
    flags.faults.extend(ours.faults.into_iter().map(|fault| format!("{fault}; it is ignored")));
    let own: Vec<&[u8]> = ours.kept.iter().filter_map(|at| all.get(*at).copied()).collect();
    flags.explicit = Explicit::read(&own, &variable);
    let mut kept = ours.kept.iter().skip(1).filter_map(|at| words.get(at - 1));
    while let Some(word) = kept.next() {
        // The host takes `_` for `-` in long names.
        let word = if word.starts_with("--") { word.replace('_', "-") } else { word.clone() };
        if let Some((names, _, takes)) = KNOWN.iter().find(|(names, _, _)| names.contains(&word.as_str())) {
            let value = if *takes { kept.next().map_or("", String::as_str) } else { "on" };
            flags.set(names[0], value);
        }
    }
    flags.settle();
    flags
}

impl Flags {
    /// The model's file: the one that is named, or what was fetched before. `Err` names what is not there yet, or is empty if nothing is named.
    pub fn model_file(&self, variable: Variable<'_>) -> Result<PathBuf, String> {
        match &self.fetched {
            Some(download) => download
                .file(self.fetched_file.as_deref(), self.model.as_deref(), variable)
                .ok_or_else(|| download.name().to_owned()),
            None => self.model.clone().ok_or_else(String::new),
        }
    }

    /// The draft model's file, if there is one and it is there.
    pub fn draft_file(&self, variable: Variable<'_>) -> Option<PathBuf> {
        let fetched = || self.fetched_draft.as_ref()?.file(None, None, variable);
        self.draft.clone().or_else(fetched)
    }

    fn set(&mut self, name: &str, value: &str) {
        let number = value.parse::<u64>().ok();
        let text = Some(value.to_owned()).filter(|text| !text.is_empty());
        let usage = &mut self.usage;
        let kind = || TYPES.iter().find(|kind| kind.name == value).map(|kind| (kind.values, kind.bytes));
        match name {
            "-m" => self.model = text.map(PathBuf::from),
            "-hf" => self.fetched = text.map(Download::Repository),
            "-hff" => self.fetched_file = text,
            // A repository beats both.
            "-mu" | "-dr" if matches!(self.fetched, Some(Download::Repository(_))) => {}
            "-mu" => self.fetched = text.map(Download::Address),
            "-dr" => self.fetched = text.map(Download::Image),
            "-hfd" => self.fetched_draft = text.map(Download::Repository),
            "-md" => self.draft = Some(value.into()),
            // 0 is what the model was trained for.
            "-c" => usage.context = number.filter(|number| *number > 0),
            "-np" => {
                if let Some(number) = number.filter(|number| *number > 0) {
                    usage.parallel = number;
                    usage.unified = false;
                }
            }
            "-kvu" => usage.unified = true,
            "-no-kvu" => usage.unified = false,
            "-ub" => usage.batch = number.filter(|number| *number > 0).or(usage.batch),
            "-b" => self.whole_batch = number.filter(|number| *number > 0).or(self.whole_batch),
            "-t" => usage.threads = number.filter(|number| *number > 0),
            "-ngl" => usage.layers = if value == "all" { Some(u64::MAX) } else { number },
            "-ncmoe" => usage.cpu_experts = number,
            "-cmoe" => usage.cpu_experts = Some(u64::MAX),
            "-ctk" => usage.types[0] = kind().unwrap_or(usage.types[0]),
            "-ctv" => usage.types[1] = kind().unwrap_or(usage.types[1]),
            "-fa" => usage.flash = !matches!(value, "off" | "0" | "false" | "disabled"),
            "--swa-full" => usage.full_windows = true,
            "-fit" => usage.fit = is_true(value),
            "-fitt" => {
                let sizes = value.split([',', '/']).filter_map(|mib| mib.parse::<u64>().ok());
                let sizes: Vec<u64> = sizes.map(|mib| mib.saturating_mul(MIB)).collect();
                if !sizes.is_empty() {
                    usage.fit_target = sizes;
                }
            }
            "-fitc" => usage.fit_context = number.unwrap_or(usage.fit_context),
            "-lm" => {
                usage.load = match value {
                    "none" | "mlock" | "dio" => Some(LoadMode::Read),
                    "mmap" | "mmap+mlock" => Some(LoadMode::Mapped),
                    _ => None,
                }
            }
            "--no-mmap" => usage.load = Some(LoadMode::Read),
            "-dev" => self.devices = value.split(',').map(|name| name.trim().to_owned()).collect(),
            _ => {}
        }
    }

    /// What the plugin's settings mean for the plan; settings of the environment come first.
    fn settle(&mut self) {
        let usage = &mut self.usage;
        let (config, notices) = config::parse(&self.settings);
        self.faults.extend(notices.iter().filter(|notice| notice.is_fault()).map(ToString::to_string));
        usage.cache_asked = config.asks_for_cache();
        usage.cache = if self.off { CacheSize::Off } else { config.cache };
        usage.reserve = config.vram_reserve_mb.saturating_mul(MIB);
        usage.budget = config.vram_budget_mb.map(|mib| mib.saturating_mul(MIB));
        usage.context_share = config.ctx_share;
        usage.lends = config.lend;
        usage.slices = config.slice_tokens;
        usage.pin_budget = config.pin_budget_mb.map(|mib| mib.saturating_mul(MIB));
        usage.threads = usage.threads.or(config.threads.map(u64::from));
        usage.cache_asked &= !self.off;
        usage.stream_from = config.stream_min_tokens;
        usage.from_file = config.experts.from == ExpertsFrom::File;
        usage.whole_layers = config.experts.order == PolicyOrder::Layers;
        let open = self.explicit.batch.is_none();
        usage.batch = match (usage.batch, self.whole_batch) {
            (batch, Some(whole)) => Some(batch.unwrap_or(HOST_BATCH).min(whole)),
            (None, None) if open => config.pass_tokens.map(u64::from),
            (batch, None) => batch,
        };
        self.stand(None);
    }

    /// What the flags decide before any device is asked, for a model of so many layers.
    pub fn stand(&mut self, layers: Option<u64>) {
        let cache = self.usage.cache_asked;
        self.usage.standing = match standing(&self.explicit, cache, Call::default()) {
            _ if self.off => Standing::Left("--moe off was given".to_owned()),
            // The device is used, without a cache.
            Standing::Ours(words) => match self.explicit.moved_away(&|| layers) {
                Some(flags) if !cache => Standing::Left(without_cache(&flags)),
                _ => Standing::Ours(words),
            },
            other => other,
        };
    }

    /// The plugin's settings.
    pub fn config(&self) -> Config {
        config::parse(&self.settings).0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(words: &str) -> Flags {
        let words: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
        read(&words, false, |_| None)
    }

    #[test]
    fn flags_are_read() {
        let flags = of(
            "-m M.gguf -c 8192 -np 2 -ub 1024 -ngl 20 --n-cpu-moe 7 -ctk q8_0 -fa off -fitt 512,2048 --fit off -x -t 6 -lm none",
        );
        let usage = &flags.usage;
        assert_eq!(flags.model, Some("M.gguf".into()));
        assert_eq!((usage.context, usage.parallel, usage.unified, usage.batch), (Some(8192), 2, false, Some(1024)));
        assert_eq!((usage.layers, usage.cpu_experts, usage.threads), (Some(20), Some(7), Some(6)));
        assert_eq!((usage.types, usage.flash, usage.fit), ([(32, 34), (1, 2)], false, false));
        assert_eq!((usage.target(0), usage.target(1), usage.target(7)), (512 * MIB, 2048 * MIB, 2048 * MIB));
        assert_eq!(usage.load, Some(LoadMode::Read));
        assert_eq!(of("-ngl auto").usage.layers, None);
        assert_eq!(of("-cmoe").usage.cpu_experts, Some(u64::MAX));
        assert_eq!(of("-c 0 -m").usage.context, None);
    }

    #[test]
    fn settings_of_the_plugin() {
        let flags = of("--moe cache=2000 --moe vram-reserve-mb 500 --moe=threads=3 -c 100");
        assert_eq!(
            (flags.usage.cache, flags.usage.cache_asked, flags.usage.reserve),
            (CacheSize::Mib(2000), true, 500 * MIB)
        );
        assert_eq!((flags.usage.threads, flags.usage.context), (Some(3), Some(100)));
        let variable = |name: &str| (name == "GGML_MOE").then(|| "inner=CUDA0;cache=5".to_owned());
        let set = read(&[], false, variable).usage;
        assert_eq!((set.cache, set.cache_asked), (CacheSize::Mib(5), true));
        let off = of("--moe off -c 7");
        assert!(off.off && off.usage.cache == CacheSize::Off && off.usage.context == Some(7));
        assert!(!of("").usage.cache_asked);
        // As the preloaded library reads them: a key without a value takes no flag of the host's.
        assert_eq!(of("--moe cache -c 7 --moe").usage.context, Some(7));
        assert!(of("--fork off").off);
        assert_eq!(of("--moe-expert-cache=4").settings, "moe-expert-cache=4");
        let wrong = of("--moe cache=lots --moe --moe log=error").faults;
        assert!(wrong[0].starts_with("--moe needs a setting") && wrong[1].contains("cache=lots"), "{wrong:?}");
        assert_eq!(of("--ctx_size 9").usage.context, Some(9));
    }

    #[test]
    fn what_is_fetched_is_told_apart() {
        let fetched = |words: &str| of(words).fetched;
        assert_eq!(fetched("-m x"), None);
        let repository = Some(Download::Repository("a/b:Q8_0".to_owned()));
        assert_eq!(fetched("-hf a/b:Q8_0 -mu http://x -m y"), repository);
        assert_eq!(fetched("-mu http://x -hf a/b:Q8_0"), repository);
        assert_eq!(fetched("-dr c"), Some(Download::Image("c".to_owned())));
        let flags = of("-mu http://x/z.gguf -m /no/such.gguf -hfd a/d -hff f");
        assert_eq!(flags.model_file(&|_| None), Err("http://x/z.gguf".to_owned()));
        assert_eq!(flags.fetched_draft, Some(Download::Repository("a/d".to_owned())));
        assert_eq!((flags.fetched_file.as_deref(), flags.draft_file(&|_| None)), (Some("f"), None));
        assert_eq!(of("-m x").model_file(&|_| None), Ok("x".into()));
        assert_eq!(of("-c 5").model_file(&|_| None), Err(String::new()));
    }

    #[test]
    fn programs_mean_them_differently() {
        let of = |line: &str| of_program(&line.split(' ').map(str::to_owned).collect::<Vec<_>>(), |_| None);
        let context = |line: &str| of(line).usage.context;
        assert_eq!(context("/x/llama-server -m y"), None);
        assert_eq!((of("llama-server -m y").usage.parallel, of("llama-cli -m y").usage.parallel), (4, 1));
        assert_eq!(context("llama-bench -m y"), Some(512));
        assert_eq!(context("llama-bench -p 512,4096 -n 9 -d 100,200"), Some(4296));
        assert_eq!(context("llama-bench -p 0 -n 0 -pg 3000,500"), Some(3500));
        assert_eq!((of("llama-bench").usage.fit, of("llama-bench -fitt 9").usage.fit), (false, true));
        assert_eq!(context("llama-perplexity -c 4096"), Some(4096));
        assert_eq!(context("llama-perplexity"), Some(2048));
        assert_eq!(context("llama-perplexity -c 64"), Some(32 * 256));
        assert_eq!(context("llama-perplexity -c 512 -b 1024"), Some(1024));
        assert!(of("llama-server").usage.fit);
        let batch = |line: &str| of(line).usage.batch;
        assert_eq!(
            (batch("llama-bench"), batch("llama-bench -ub 64,4096"), batch("llama-cli")),
            (Some(512), Some(4096), None)
        );
        assert_eq!(
            (batch("llama-cli -b 4096"), batch("llama-cli -b 64"), batch("llama-cli -b 64 -ub 99")),
            (Some(512), Some(64), Some(64))
        );
        assert_eq!(batch("llama-cli --moe pass-tokens=96"), Some(96));
        assert_eq!(batch("llama-cli -ub 64 --moe pass-tokens=96"), Some(64));
    }

    #[test]
    fn a_flag_beats_its_variable() {
        let variable = |name: &str| match name {
            "LLAMA_ARG_CTX_SIZE" => Some("4096".to_owned()),
            "LLAMA_ARG_CPU_MOE" => Some("0".to_owned()),
            _ => None,
        };
        assert_eq!(read(&[], true, variable).usage.context, Some(4096));
        assert_eq!(read(&["-c".to_owned(), "1".to_owned()], true, variable).usage.context, Some(1));
        let flags = read(&[], true, variable);
        assert_eq!((flags.usage.parallel, flags.usage.unified, flags.usage.cpu_experts), (4, true, None));
    }

    proptest! {
        #[test]
        fn any_words_are_accepted(words in proptest::collection::vec("-{0,2}[a-z0-9=;,-]{0,8}", 0..8)) {
            let _ = read(&words, true, |_| None);
        }
    }
}
