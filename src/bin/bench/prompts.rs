//! `ggml-moe bench --prompt-table`: prompts of several sizes, ours with each of its micro-batches against all that stock can do. The figures are
//! made in `ggml_moe::bench::prompts`.

use std::path::PathBuf;

use clap::Args;
use ggml_moe::bench::memory::{Account, Computing, equal_layers};
use ggml_moe::bench::output::{HostInfo, Plugin, Wanted, results};
use ggml_moe::bench::placement::{cpu_layers, device_bytes};
use ggml_moe::bench::prompts::{Entry, PromptTable, Who};
use ggml_moe::bench::stats::median;
use ggml_moe::model::moe::MoeShape;

use super::{BenchArguments, kept, tell, timeline};
use crate::host::{self, Answer, CommandError, Failed, Host, Side, Usage};

/// What `--prompt-table` understands.
#[derive(Args)]
pub(crate) struct TableArguments {
    /// Compare prompts (-p; by default 512, 2048, 4096, 12288 and 30000 tokens) with stock's best at the same device memory, its default passes,
    /// all experts in RAM and everything on the device, and nothing else.
    #[arg(long, conflicts_with = "curve")]
    pub(super) prompt_table: bool,
    /// Micro-batches of our side.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_values_t = [2048, 4096, 12288])]
    our_ubatch: Vec<u32>,
    /// Micro-batches of stock at the same memory: what a larger one takes for computing is taken from stock's experts.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_values_t = [512, 2048, 4096, 12288])]
    stock_ubatch: Vec<u32>,
    /// Draw copy, compute and idle of our longest pass; the plugin's lines stay beside it (.jsonl).
    #[arg(long, value_name = "FILE.svg", requires = "prompt_table")]
    timeline: Option<PathBuf>,
    /// Draw the longest pass of a file that the key `timeline` made (to --chart), and nothing else.
    #[arg(long, value_name = "FILE.jsonl")]
    pub(super) draw_timeline: Option<PathBuf>,
}

/// The micro-batch that the memory is counted with: stock's default.
const BASE: u64 = 512;
/// Micro-batches of stock with everything on the device.
const DEVICE_UBATCHES: [u32; 2] = [2048, 4096];
/// Sizes of prompts if none are given.
const PROMPTS: [u32; 5] = [512, 2048, 4096, 12288, 30000];

/// One share, before it runs.
struct Runner<'a> {
    arguments: &'a BenchArguments,
    host: &'a Host,
    shape: &'a MoeShape,
    prompts: Vec<u32>,
    cache_mib: u64,
}

/// What one process of llama-bench gave, by micro-batch.
struct Run {
    entries: Vec<Entry>,
    log: String,
    host: Option<HostInfo>,
}

/// Runs the tables of all shares.
pub(super) fn run(arguments: &BenchArguments) -> Result<Answer, CommandError> {
    let model = arguments.host.model()?;
    let shape = host::shape(model)?;
    let sizes = arguments.memory.sizes(&shape)?;
    let own = &arguments.table;
    if own.our_ubatch.iter().chain(&own.stock_ubatch).any(|size| *size == 0) {
        return Err(Usage("a micro-batch has one token or more".to_owned()));
    }
    let mut prompts: Vec<u32> = arguments.n_prompt.iter().copied().filter(|size| *size > 0).collect();
    if arguments.n_prompt.is_empty() {
        prompts = PROMPTS.to_vec();
    }
    if prompts.is_empty() {
        return Err(Usage("-p 0 leaves no prompt to measure".to_owned()));
    }
    let host = Host::find(&arguments.host, "llama-bench", arguments.llama_bench.as_deref())?;
    let mut report = super::header(&shape, model);
    let (mut text, mut last, mut dry) = (String::new(), String::new(), String::new());
    for (share, cache_mib) in sizes {
        let runner = Runner { arguments, host: &host, shape: &shape, prompts: prompts.clone(), cache_mib };
        if arguments.host.dry_run {
            dry.push_str(&runner.dry()?);
            continue;
        }
        let table = runner.table(share, &mut report.host)?;
        text.push_str(&format!("{}\n", table.table()));
        if let Some(chart) = own.timeline.as_ref().filter(|_| table.void.is_none()) {
            match timeline::draw(&timeline::lines_file(chart)?, Some(chart)) {
                Ok(drawn) => text.push_str(&drawn.text),
                Err(Usage(why) | Failed(why)) => text.push_str(&format!("bench: no timeline: {why}\n")),
            }
        }
        last.push_str(&table.verdict());
        report.prompt_tables.push(table);
    }
    if arguments.host.dry_run {
        return Ok(Answer { text: dry, good: true });
    }
    let (not_kept, good) = kept::answer(arguments, &report);
    let good = good && report.prompt_tables.iter().all(|table| table.void.is_none());
    Ok(Answer { text: format!("{}{text}{not_kept}{last}", report.head()), good })
}

impl Runner<'_> {
    fn own(&self, who: Who, layers: u32) -> Vec<String> {
        let words = |flags: &[&str]| -> Vec<String> { flags.iter().map(|flag| (*flag).to_owned()).collect() };
        let given = &self.arguments.host.stock_args;
        match (who, given) {
            (Who::Ours, _) => host::words(&self.arguments.host.our_args),
            (Who::Equal, Some(flags)) => host::words(flags),
            (Who::Equal, None) if self.host.is_over_cpu() => words(&["-lm", "none"]),
            // llama.cpp itself says that mapped experts are slower.
            (Who::Equal, None) => words(&["-lm", "none", "-ncmoe", &layers.to_string()]),
            (_, _) if self.host.is_over_cpu() => Vec::new(),
            (_, _) => words(&["-ncmoe", &layers.to_string()]),
        }
    }

    /// All flags; without micro-batches they are llama-bench's own.
    fn flags(
        &self,
        side: Side<'_>,
        prompts: &[u32],
        ubatches: &[u32],
        samples: usize,
        own: &[String],
    ) -> Result<Vec<String>, CommandError> {
        let list = |numbers: &[u32]| numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let mut defaults: Vec<(&[&str], String)> = vec![
            (&["-m", "--model"], self.arguments.host.model()?.display().to_string()),
            (&["-dev", "--device"], self.host.device(side, "/")),
            (&["-ngl", "--n-gpu-layers"], "99".to_owned()),
            (&["-p", "--n-prompt"], list(prompts)),
            (&["-n", "--n-gen"], "0".to_owned()),
            (&["-r", "--repetitions"], samples.to_string()),
            (&["-o", "--output"], "jsonl".to_owned()),
            (&["-v", "--verbose"], String::new()),
        ];
        if let Some(largest) = ubatches.iter().max() {
            defaults.push((&["-ub", "--ubatch-size"], list(ubatches)));
            defaults.push((&["-b", "--batch-size"], (*largest).max(2048).to_string()));
        }
        Ok(self.host.flags(&defaults, own))
    }

    fn keys(&self, budget_mib: Option<u64>) -> Result<String, CommandError> {
        let mut keys = vec![format!("cache={}", self.cache_mib)];
        if let Some(mib) = budget_mib {
            keys.push(format!("vram-budget-mb={mib};vram-reserve-mb=0"));
        }
        if let Some(name) = &self.arguments.replay {
            keys.push(format!("replay={}", host::preset(name, self.shape)?.name));
        }
        if let Some(chart) = &self.arguments.table.timeline {
            keys.push(format!("timeline={}", timeline::lines_file(chart)?.display()));
        }
        Ok(self.host.keys_with(&keys))
    }

    fn process(&self, side: Side<'_>, who: Who, ubatches: &[u32], own: &[String]) -> Result<Run, CommandError> {
        let flags = self.flags(side, &self.prompts, ubatches, self.arguments.samples, own)?;
        let done = self.host.completed(side, &flags)?;
        let (host, samples) = results(&done.stdout);
        let log = done.log();
        let account = Account::read(&log, &self.host.first_device(side));
        let mut entries: Vec<Entry> = Vec::new();
        for row in samples {
            let Some(prompt) = row.test.strip_prefix("pp").and_then(|size| size.parse().ok()) else { continue };
            let counted = row.rates.get(self.arguments.skip..).filter(|rest| !rest.is_empty()).unwrap_or(&row.rates);
            let known = entries.iter_mut().find(|entry| entry.ubatch == row.ubatch);
            match known {
                Some(entry) => entry.rates.push((prompt, counted.to_vec())),
                None => entries.push(Entry {
                    who,
                    ubatch: row.ubatch,
                    arguments: own.join(" "),
                    device_mib: account.total_mib(row.ubatch),
                    rates: vec![(prompt, counted.to_vec())],
                }),
            }
        }
        if entries.is_empty() {
            return Err(Failed(format!("{}: llama-bench printed no result", side.name())));
        }
        let told = entries.iter().flat_map(|entry| {
            entry
                .rates
                .iter()
                .map(|(prompt, rates)| format!("pp{prompt}/{} {:.0}", entry.ubatch, median(rates).unwrap_or(0.0)))
        });
        tell(&format!("{}: {} t/s ({:.0} s)", who.name(), told.collect::<Vec<_>>().join(", "), done.seconds));
        Ok(Run { entries, log, host })
    }

    /// What computing takes by micro-batch, and everything that stock takes with one of [`BASE`] beside experts.
    fn measured(&self, layers: u32) -> Result<(Computing, f64), CommandError> {
        let longest = self.prompts.iter().copied().max().unwrap_or(512);
        let own = [self.own(Who::Equal, layers), vec!["--no-warmup".to_owned()]].concat();
        let flags = self.flags(Side::Stock, &[longest], &[512, 2048], 1, &own)?;
        let done = self.host.completed(Side::Stock, &flags)?;
        let account = Account::read(&done.log(), &self.host.first_device(Side::Stock));
        let computing = Computing::through(&account.computing)
            .ok_or_else(|| Failed("stock's log does not say what computing takes".to_owned()))?;
        let experts = device_bytes(self.shape, layers) as f64 / f64::from(1 << 20);
        let beside = (account.weights_mib - experts).max(0.0) + account.context_mib + computing.mib(BASE);
        tell(&format!(
            "memory beside experts {beside:.0} MiB; computing takes {:.0} MiB at -ub 512, {:.0} at 12288",
            computing.mib(BASE),
            computing.mib(12288)
        ));
        Ok((computing, beside))
    }

    fn table(&self, share: f64, told: &mut HostInfo) -> Result<PromptTable, CommandError> {
        let mut table = PromptTable {
            share,
            cache_mib: self.cache_mib,
            prompts: self.prompts.iter().map(|size| u64::from(*size)).collect(),
            ..PromptTable::default()
        };
        let base = cpu_layers(self.shape, self.cache_mib);
        let mut computing = None;
        if !self.host.is_over_cpu() {
            match self.measured(base) {
                Ok((line, beside)) => {
                    computing = Some(line);
                    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a size")]
                    let beside = beside.ceil() as u64;
                    table.budget_mib = Some(beside + self.cache_mib);
                }
                Err(Failed(why)) => table.missing.push(format!("the same memory: {why}")),
                Err(error) => return Err(error),
            }
        }
        table.keys = self.keys(table.budget_mib)?;
        if let Some(chart) = &self.arguments.table.timeline {
            // Lines of an earlier run would be taken for this one's.
            let _ = std::fs::remove_file(timeline::lines_file(chart)?);
        }
        let own = &self.arguments.table;
        let ours = self.process(Side::Ours(&table.keys), Who::Ours, &own.our_ubatch, &self.own(Who::Ours, 0))?;
        table.void = Plugin::read(&ours.log).void(Wanted { cache: false, slots: 0 });
        table.entries.extend(ours.entries);
        if table.void.is_some() {
            return Ok(table);
        }
        let device: &[u32] = &DEVICE_UBATCHES;
        let mut stock: Vec<(Who, Vec<u32>, u32)> = own
            .stock_ubatch
            .iter()
            .map(|ubatch| {
                let equal = |line: &Computing| equal_layers(self.shape, self.cache_mib, line, BASE, u64::from(*ubatch));
                (Who::Equal, vec![*ubatch], computing.as_ref().map_or(base, equal))
            })
            .collect();
        stock.push((Who::Default, Vec::new(), base));
        if !self.host.is_over_cpu() {
            stock.push((Who::Ram, Vec::new(), self.shape.layers));
            stock.push((Who::Device, device.to_vec(), 0));
        }
        for (who, ubatches, layers) in stock {
            match self.process(Side::Stock, who, &ubatches, &self.own(who, layers)) {
                Ok(run) => {
                    *told = run.host.unwrap_or_else(|| told.clone());
                    table.entries.extend(run.entries);
                }
                // Too little memory for this one, perhaps.
                Err(Failed(why)) => table.missing.push(format!("{}: {why}", who.name())),
                Err(error) => return Err(error),
            }
        }
        if table.entries.iter().all(|entry| entry.who == Who::Ours) {
            return Err(Failed(table.missing.pop().unwrap_or_else(|| "stock ran nothing".to_owned())));
        }
        Ok(table)
    }

    fn dry(&self) -> Result<String, CommandError> {
        let own = &self.arguments.table;
        let samples = self.arguments.samples;
        let keys = self.keys(None)?;
        let layers = cpu_layers(self.shape, self.cache_mib);
        let ours = self.flags(Side::Ours(&keys), &self.prompts, &own.our_ubatch, samples, &self.own(Who::Ours, 0))?;
        let mut out = format!("# {} MiB of experts\n{}\n", self.cache_mib, self.host.shown(Side::Ours(&keys), &ours));
        for ubatch in &own.stock_ubatch {
            let flags = self.flags(Side::Stock, &self.prompts, &[*ubatch], samples, &self.own(Who::Equal, layers))?;
            out.push_str(&format!("{}\n", self.host.shown(Side::Stock, &flags)));
        }
        out.push_str(
            "# -ncmoe of larger micro-batches, and vram-budget-mb, come of what the first run says of memory\n",
        );
        Ok(out)
    }
}
