//! What the programs print: results of llama-bench as JSON lines, llama.cpp's own account of memory, and the plugin's lines.
//!
//! Owns: their reading, and the judgement whether the plugin did its work ([`Plugin::void`]).
//! Invariants: any text is accepted; what is not understood is left out, and what is missing then makes a run void.
//! Threads: none. Does not: start a program.

use serde_json::Value;

/// What the host says of itself and its machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostInfo {
    /// Build number and commit.
    pub build: String,
    /// The processor.
    pub cpu: String,
    /// The GPUs.
    pub gpu: String,
    /// When the last test ran (UTC, RFC 3339).
    pub time: String,
}

/// The samples of one test.
#[derive(Clone, Debug, PartialEq)]
pub struct Samples {
    /// `pp512` or `tg128`, as llama-bench calls them.
    pub test: String,
    /// The micro-batch.
    pub ubatch: u64,
    /// Tokens per second.
    pub rates: Vec<f64>,
}

/// Results in what llama-bench printed with `-o jsonl`. Lines that are no result are left out.
pub fn results(stdout: &str) -> (Option<HostInfo>, Vec<Samples>) {
    let (mut host, mut samples) = (None, Vec::new());
    for line in stdout.lines().filter(|line| line.starts_with('{')) {
        let Ok(row) = serde_json::from_str::<Value>(line) else { continue };
        let count = |name: &str| row[name].as_u64().unwrap_or(0);
        let text = |name: &str| row[name].as_str().unwrap_or_default().to_owned();
        let rates: Option<Vec<f64>> =
            row["samples_ts"].as_array().map(|all| all.iter().filter_map(Value::as_f64).collect());
        let test = match (count("n_prompt"), count("n_gen")) {
            (0, 0) => continue,
            (prompt, 0) => format!("pp{prompt}"),
            (0, tokens) => format!("tg{tokens}"),
            (prompt, tokens) => format!("pp{prompt}+tg{tokens}"),
        };
        let Some(rates) = rates.filter(|rates| rates.iter().all(|rate| *rate > 0.0)) else { continue };
        samples.push(Samples { test, ubatch: count("n_ubatch"), rates });
        let build = format!("{} ({})", count("build_number"), text("build_commit"));
        host = Some(HostInfo { build, cpu: text("cpu_info"), gpu: text("gpu_info"), time: text("test_time") });
    }
    (host, samples)
}

/// Devices in what `--list-devices` printed: names with their descriptions.
pub fn devices(stdout: &str) -> Vec<(String, String)> {
    stdout
        .lines()
        .filter_map(|line| line.strip_prefix("  ")?.split_once(": "))
        .filter(|(name, _)| !name.is_empty() && !name.contains(' '))
        .map(|(name, rest)| (name.to_owned(), rest.to_owned()))
        .collect()
}

/// MiB that the host says to have taken of a device: weights, context and computing (the largest of several contexts).
pub fn device_mib(log: &str, device: &str) -> Option<f64> {
    let mut weights = None;
    let mut context: Vec<(&str, f64)> = Vec::new();
    for line in log.lines() {
        let Some((before, size)) = line.split_once(" buffer size =") else { continue };
        let mib: Option<f64> = size.trim().strip_suffix("MiB").and_then(|size| size.trim().parse().ok());
        let words: Vec<&str> = before.split_whitespace().collect();
        let (Some(mib), Some(place)) = (mib, words.iter().position(|word| *word == device)) else { continue };
        match words.get(place + 1).copied() {
            Some("model") => weights = Some(weights.unwrap_or(0.0) + mib),
            Some(kind) => match context.iter_mut().find(|(known, _)| *known == kind) {
                Some((_, largest)) => *largest = largest.max(mib),
                None => context.push((kind, mib)),
            },
            None => {}
        }
    }
    weights.map(|weights| weights + context.iter().map(|(_, mib)| mib).sum::<f64>())
}

/// What the plugin counted, summed over its contexts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// MoE blocks run.
    pub blocks: u64,
    /// Expert products outside any block.
    pub unrecognised: u64,
    /// Uses of experts that lay on the device.
    pub hits: u64,
    /// Uses of those that the processor computed.
    pub misses: u64,
    /// Bytes of weights that the processor read.
    pub cpu_bytes: u64,
    /// Bytes of weights that went to the device: into the cache, or copied for one use.
    pub link_bytes: u64,
}

impl Counts {
    /// Adds another process's.
    pub fn add(&mut self, other: &Self) {
        self.blocks += other.blocks;
        self.unrecognised += other.unrecognised;
        self.hits += other.hits;
        self.misses += other.misses;
        self.cpu_bytes += other.cpu_bytes;
        self.link_bytes += other.link_bytes;
    }

    /// Hits in percent; `None` where the cache computed nothing.
    pub fn hit_percent(&self) -> Option<f64> {
        let uses = self.hits.saturating_add(self.misses);
        (uses > 0).then(|| 100.0 * self.hits as f64 / uses as f64)
    }
}

/// What the plugin told in one process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plugin {
    /// Its lines, without prefix.
    pub lines: Vec<String>,
    /// Its counters; `None` if it reported none.
    pub counts: Option<Counts>,
    /// Experts that the cache has slots for, and experts that it knows.
    pub held: Option<(u64, u64)>,
}

/// What a run of the plugin must show.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wanted {
    /// The cache must have computed.
    pub cache: bool,
    /// Experts that it must have slots for, less a tenth.
    pub slots: u64,
}

const PREFIX: &str = "ggml-moe: ";

impl Plugin {
    /// Reads the output of a process.
    pub fn read(log: &str) -> Self {
        let mut plugin = Self::default();
        for line in log.lines() {
            let Some((_, told)) = line.split_once(PREFIX) else { continue };
            let told = told.trim_end_matches("\u{1b}[0m");
            if let Some(json) = told.strip_prefix("summary ") {
                plugin.count(json);
            } else {
                plugin.held = slots(told).or(plugin.held);
                plugin.lines.push(told.to_owned());
            }
        }
        plugin
    }

    fn count(&mut self, json: &str) {
        let Ok(summary) = serde_json::from_str::<Value>(json) else { return };
        let count = |name: &str| summary[name].as_u64().unwrap_or(0);
        self.counts.get_or_insert_default().add(&Counts {
            blocks: count("blocks"),
            unrecognised: count("unrecognised"),
            hits: count("hits"),
            misses: count("misses"),
            cpu_bytes: count("cpu_bytes"),
            link_bytes: count("upload_bytes").saturating_add(count("expert_bytes")),
        });
    }

    /// Why this run says nothing about the plugin; `None` if it did its work.
    pub fn void(&self, wanted: Wanted) -> Option<String> {
        if let Some(line) = self.fault() {
            return Some(line.to_owned());
        }
        let Some(counts) = &self.counts else {
            return Some(match self.lines.last() {
                None => "the plugin told nothing: the program did not load it (GGML_BACKEND_PATH)".to_owned(),
                Some(last) => format!("the plugin reported no counters; its last line: {last}"),
            });
        };
        if counts.blocks == 0 {
            return Some("no MoE block ran on the plugin's device".to_owned());
        }
        if !wanted.cache {
            return None;
        }
        if counts.hits == 0 && counts.misses == 0 {
            return Some(match self.line_with("no cache: ") {
                Some(line) => line.to_owned(),
                None => "the cache computed nothing (0 hits, 0 misses)".to_owned(),
            });
        }
        match self.held {
            Some((slots, known)) if slots < wanted.slots - wanted.slots / 10 => Some(format!(
                "the cache had slots for {slots} of {known} experts where {} were wanted: less memory was free",
                wanted.slots
            )),
            _ => None,
        }
    }

    /// The first line that says that the plugin did not do its work.
    fn fault(&self) -> Option<&str> {
        ["passes everything through", "keeps no experts in RAM", "the cache is dropped", "NOT REPLACED"]
            .iter()
            .find_map(|words| self.line_with(words))
    }

    fn line_with(&self, words: &str) -> Option<&str> {
        self.lines.iter().find(|line| line.contains(words)).map(String::as_str)
    }
}

/// `... expert cache of 6 MiB on CPU (as cache= says): room for 52 of 192 experts (27%); ...`: 52 and 192.
fn slots(line: &str) -> Option<(u64, u64)> {
    let (_, rest) = line.split_once("expert cache of ")?;
    let (_, rest) = rest.split_once(": room for ")?;
    let (rest, _) = rest.split_once(" experts")?;
    let (slots, known) = rest.split_once(" of ")?;
    Some((slots.parse().ok()?, known.parse().ok()?))
}

/// The line of a program's output that says best what went wrong.
pub fn reason(log: &str) -> Option<&str> {
    let told = |line: &&str| {
        let line = line.to_lowercase();
        ["error", "fail", "abort", "assert", "invalid", "cannot"].iter().any(|word| line.contains(word))
    };
    let lines = || log.lines().map(str::trim).filter(|line| !line.is_empty());
    lines().rfind(told).or_else(|| lines().next_back())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_llama_bench() {
        let text = "junk\n{\"broken\n{\"build_commit\": \"abc\", \"build_number\": 7, \"cpu_info\": \"C\", \"gpu_info\": \"G\", \
            \"n_prompt\": 64, \"n_gen\": 0, \"n_ubatch\": 512, \"test_time\": \"T\", \"samples_ts\": [ 1.5, 2 ]}\n\
            {\"n_prompt\": 0, \"n_gen\": 16, \"samples_ts\": [ 3 ]}\n{\"n_prompt\": 0, \"n_gen\": 8, \"samples_ts\": [ 0 ]}\n";
        let (host, samples) = results(text);
        assert_eq!(host.unwrap().build, "0 ()");
        let pp = Samples { test: "pp64".into(), ubatch: 512, rates: vec![1.5, 2.0] };
        assert_eq!(samples, [pp, Samples { test: "tg16".into(), ubatch: 0, rates: vec![3.0] }]);
        assert_eq!(results(""), (None, Vec::new()));
    }

    #[test]
    fn names_of_devices() {
        let text = "Available devices:\n  CUDA0: NVIDIA H200 (1 MiB, 1 MiB free)\n  MoE0: MoE over CUDA0 (1 MiB)\n";
        let names: Vec<String> = devices(text).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["CUDA0", "MoE0"]);
        assert!(devices("Available devices:\n  (none)\n").is_empty());
    }

    #[test]
    fn the_hosts_account_of_memory() {
        let log = "load_tensors:        MoE0 model buffer size =     1.67 MiB\n\
            load_tensors: MoE0_Experts model buffer size =    11.62 MiB\n\
            llama_kv_cache:       MoE0 KV buffer size =     0.75 MiB\nllama_kv_cache:       MoE0 KV buffer size =     0.50 MiB\n\
            sched_reserve:       MoE0 compute buffer size =     1.28 MiB\nsched_reserve:        CPU compute buffer size =     9 MiB\n\
            ~llama_context:       MoE0 compute buffer size is   1.2832 MiB, matches expectation of   1.2832 MiB\n";
        assert!((device_mib(log, "MoE0").unwrap() - 3.70).abs() < 1e-9);
        assert_eq!(device_mib(log, "CUDA0"), None);
    }

    const LOG: &str = "0.00.055.760 W ggml-moe: MoE0: expert cache of 4 MiB on CPU (as cache= says): room for 32 of 192 experts (17%)\u{1b}[0m\n\
        ggml-moe: summary {\"blocks\":18,\"hits\":30,\"misses\":10,\"cpu_bytes\":5,\"upload_bytes\":6,\"expert_bytes\":7}\n\
        ggml-moe: summary {\"blocks\":2,\"hits\":0,\"misses\":0}\n";

    #[test]
    fn lines_of_the_plugin() {
        let plugin = Plugin::read(LOG);
        let counts = plugin.counts.unwrap();
        assert_eq!((counts.blocks, counts.hits, counts.misses), (20, 30, 10));
        assert_eq!((counts.cpu_bytes, counts.link_bytes), (5, 13));
        assert_eq!((counts.hit_percent(), Counts::default().hit_percent()), (Some(75.0), None));
        assert_eq!(plugin.held, Some((32, 192)));
        assert_eq!(
            plugin.lines,
            ["MoE0: expert cache of 4 MiB on CPU (as cache= says): room for 32 of 192 experts (17%)"]
        );
    }

    #[test]
    fn a_run_without_the_plugins_work_is_void() {
        let void = |log: &str, cache, slots| Plugin::read(log).void(Wanted { cache, slots });
        assert_eq!(void(LOG, true, 35), None, "within a tenth");
        assert!(void(LOG, true, 40).unwrap().contains("32 of 192 experts where 40"));
        assert_eq!(void(LOG, false, 1000), None);
        assert!(void("", true, 0).unwrap().contains("did not load it"));
        assert!(void("ggml-moe: hello\n", true, 0).unwrap().contains("no counters; its last line: hello"));
        let with = |line: &str| void(&format!("ggml-moe: {line}\n{LOG}"), true, 0);
        assert_eq!(with("all is well"), None);
        assert!(with("MoE0 passes everything through to CPU: x").unwrap().contains("to CPU: x"));
        assert!(with("MoE0: the cache is dropped: x").unwrap().ends_with("dropped: x"));
        assert!(with("MoE0: ROUTING IS NOT REPLACED (OTHER SHAPE) BY x").unwrap().contains("NOT REPLACED"));
        let idle = "ggml-moe: MoE0: no cache: too small\nggml-moe: summary {\"blocks\":3}\n";
        assert_eq!(void(idle, true, 0).unwrap(), "MoE0: no cache: too small");
        assert_eq!(void(idle, false, 0), None);
        assert!(void("ggml-moe: summary {\"blocks\":3}\n", true, 0).unwrap().contains("0 hits"));
        assert!(void("ggml-moe: summary {\"blocks\":0}\n", false, 0).unwrap().contains("no MoE block"));
        assert!(void("ggml-moe: summary {broken\n", false, 0).unwrap().contains("did not load"));
    }

    #[test]
    fn the_line_that_says_why() {
        assert_eq!(reason("a\n  error: bad\nb\n"), Some("error: bad"));
        assert_eq!(reason("a\nb\n\n"), Some("b"));
        assert_eq!(reason(""), None);
    }
}
