//! `ggml-moe bench`: runs llama-bench with the plugin and without, in turns. The figures are made in `ggml_moe::bench`.

mod curve;
mod kept;
mod prompts;
mod server;
mod timeline;

use std::io::Write as _;
use std::path::{Path, PathBuf};

use clap::Args;
use ggml_moe::bench::output::{HostInfo, Plugin, Samples, Wanted, device_mib, results};
use ggml_moe::bench::placement::cpu_layers;
use ggml_moe::bench::report::{Case, Phase, Report, Test};
use ggml_moe::bench::stats::median;
use ggml_moe::model::moe::MoeShape;

use crate::host::{self, Answer, CommandError, Failed, Host, HostArguments, MemoryArguments, Side, Usage};

/// What `ggml-moe bench` understands.
#[derive(Args)]
pub(crate) struct BenchArguments {
    #[command(flatten)]
    host: HostArguments,
    #[command(flatten)]
    memory: MemoryArguments,
    #[command(flatten)]
    table: prompts::TableArguments,
    #[command(flatten)]
    curve: curve::CurveArguments,
    /// llama-bench; by default the one of --host-dir or PATH.
    #[arg(long, value_name = "FILE")]
    llama_bench: Option<PathBuf>,
    /// Sizes of prompts (512); 0 measures none.
    #[arg(short = 'p', long, value_name = "TOKENS", value_delimiter = ',')]
    n_prompt: Vec<u32>,
    /// Tokens to decode; 0 measures none.
    #[arg(short = 'n', long, value_name = "TOKENS", default_value_t = 128)]
    n_gen: u32,
    /// The micro-batch of both sides (-ub).
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    ubatch_size: u32,
    /// Pairs of stock and ours, in turns.
    #[arg(long, value_name = "PAIRS", default_value_t = 3)]
    repeats: usize,
    /// Samples of each test in one process.
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    samples: usize,
    /// The first samples of each process that do not count: caches and clocks still warm up.
    #[arg(long, value_name = "COUNT", default_value_t = 2)]
    skip: usize,
    /// Try neighbouring flags for stock (-ncmoe, and -ub for prompts) and take the best.
    #[arg(long)]
    search: bool,
    /// The routing of this preset takes the place of the model's on our side: for models with random weights (ggml-moe sim).
    #[arg(long, value_name = "PRESET")]
    replay: Option<String>,
    /// Write the report as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a bar chart.
    #[arg(long, value_name = "FILE.svg")]
    chart: Option<PathBuf>,
    /// The file of kept runs, one JSON object a line; "none" keeps none. By default bench-runs.jsonl in the cache folder.
    #[arg(long, value_name = "FILE")]
    runs: Option<PathBuf>,
    /// Print the kept runs.
    #[arg(long)]
    list: bool,
}

/// What one process of llama-bench gave.
struct Sampled {
    host: Option<HostInfo>,
    samples: Vec<Samples>,
    log: String,
}

/// Stock's best flags, and all that were tried, with their rates.
type Found = (Vec<String>, Vec<(String, f64)>);

/// One phase of one case, before it runs.
struct Job<'a> {
    arguments: &'a BenchArguments,
    host: &'a Host,
    shape: &'a MoeShape,
    model: &'a Path,
    label: String,
    decodes: bool,
    keys: String,
    cache_mib: u64,
    wanted: Wanted,
}

/// Runs the comparison and returns what to print.
pub(crate) fn run(arguments: &BenchArguments) -> Result<Answer, CommandError> {
    if arguments.list {
        return kept::list(arguments);
    }
    if let Some(file) = &arguments.table.draw_timeline {
        return timeline::draw(file, arguments.chart.as_deref());
    }
    if arguments.repeats == 0 || arguments.skip >= arguments.samples {
        return Err(Usage("--repeats must be 1 or more, and --samples more than --skip".to_owned()));
    }
    if let Some(path) = &arguments.curve.curve {
        return curve::run(arguments, path);
    }
    if arguments.table.prompt_table {
        return prompts::run(arguments);
    }
    let model = arguments.host.model()?;
    let shape = host::shape(model)?;
    let sizes = arguments.memory.sizes(&shape)?;
    let mut keys = Vec::new();
    if let Some(name) = &arguments.replay {
        keys.push(format!("replay={}", host::preset(name, &shape)?.name));
    }
    let prompts = arguments.prompts().next().is_some();
    let phases: Vec<bool> =
        [(false, prompts), (true, arguments.n_gen > 0)].iter().filter(|phase| phase.1).map(|phase| phase.0).collect();
    if phases.is_empty() {
        return Err(Usage("-p 0 -n 0 leaves nothing to measure".to_owned()));
    }
    let host = Host::find(&arguments.host, "llama-bench", arguments.llama_bench.as_deref())?;
    let mut report = header(&shape, model);
    let mut dry = String::new();
    for (share, cache_mib) in sizes {
        let mut own = keys.clone();
        if cache_mib > 0 {
            own.insert(0, format!("cache={cache_mib}"));
        }
        let keys = host.keys_with(&own);
        let mut case = Case { share, cache_mib, keys: keys.clone(), phases: Vec::new() };
        for &decodes in &phases {
            let label = format!("{:.0}%, {}", 100.0 * share, if decodes { "decode" } else { "prompt" });
            let wanted = Host::wanted(&shape, share, cache_mib, &keys);
            // Prompts do not use the cache: it is for a few tokens at a time.
            let wanted = Wanted { cache: wanted.cache && decodes, ..wanted };
            let keys = keys.clone();
            let job = Job { arguments, host: &host, shape: &shape, model, label, decodes, keys, cache_mib, wanted };
            if arguments.host.dry_run {
                dry.push_str(&job.dry());
            } else {
                match job.run(&mut report.host) {
                    Ok(phase) => case.phases.push(phase),
                    Err(error) => {
                        // What was measured before is kept.
                        report.cases.extend(Some(case).filter(|case| !case.phases.is_empty()));
                        if !report.cases.is_empty() {
                            kept::keep(arguments, &report)?;
                        }
                        return Err(error);
                    }
                }
            }
        }
        report.cases.push(case);
    }
    if arguments.host.dry_run {
        return Ok(Answer { text: dry, good: true });
    }
    let (not_kept, good) = kept::answer(arguments, &report);
    let good = good && report.void().is_none();
    Ok(Answer { text: format!("{}\n{not_kept}{}", report.table(), report.verdict()), good })
}

impl BenchArguments {
    /// Sizes of prompts.
    fn prompts(&self) -> impl Iterator<Item = u32> {
        let given = if self.n_prompt.is_empty() { &[512][..] } else { &self.n_prompt };
        given.iter().copied().filter(|size| *size > 0)
    }
}

/// A report without figures.
fn header(shape: &MoeShape, model: &Path) -> Report {
    Report {
        command: std::env::args().collect(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        processors: std::thread::available_parallelism().map_or(0, usize::from),
        ram_mib: ram_mib(),
        model: words(shape),
        model_file: model.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        ..Report::default()
    }
}

impl Job<'_> {
    /// Stock's flags for the same memory.
    fn placement(&self) -> Vec<String> {
        match &self.arguments.host.stock_args {
            Some(flags) => host::words(flags),
            None if self.host.is_over_cpu() => Vec::new(),
            None => vec!["-ncmoe".to_owned(), cpu_layers(self.shape, self.cache_mib).to_string()],
        }
    }

    fn side(&self, ours: bool) -> Side<'_> {
        if ours { Side::Ours(&self.keys) } else { Side::Stock }
    }

    /// All flags of a side; `samples` of each test.
    fn flags(&self, side: Side<'_>, samples: usize, own: &[String]) -> Vec<String> {
        let prompts: Vec<String> = self.arguments.prompts().map(|size| size.to_string()).collect();
        let [prompt, tokens] = if self.decodes {
            ["0".to_owned(), self.arguments.n_gen.to_string()]
        } else {
            [prompts.join(","), "0".to_owned()]
        };
        let ubatch = largest(own, &["-ub", "--ubatch-size"]).unwrap_or(self.arguments.ubatch_size);
        let defaults: [(&[&str], String); 10] = [
            (&["-m", "--model"], self.model.display().to_string()),
            (&["-dev", "--device"], self.host.device(side, "/")),
            (&["-ngl", "--n-gpu-layers"], "99".to_owned()),
            (&["-p", "--n-prompt"], prompt),
            (&["-n", "--n-gen"], tokens),
            (&["-ub", "--ubatch-size"], self.arguments.ubatch_size.to_string()),
            (&["-b", "--batch-size"], ubatch.max(2048).to_string()),
            (&["-r", "--repetitions"], samples.to_string()),
            (&["-o", "--output"], "jsonl".to_owned()),
            // Otherwise llama-bench hides the plugin's lines; it prints nothing for each token.
            (&["-v", "--verbose"], String::new()),
        ];
        self.host.flags(&defaults, own)
    }

    fn dry(&self) -> String {
        let (stock, ours) = self.commands(&self.placement());
        let search = if self.searches() { " (to be searched from here)" } else { "" };
        format!("# {}: {} pairs{search}\n{stock}\n{ours}\n", self.label, self.arguments.repeats)
    }

    fn commands(&self, placement: &[String]) -> (String, String) {
        let samples = self.arguments.samples;
        let ours = self.side(true);
        (
            self.host.shown(Side::Stock, &self.flags(Side::Stock, samples, placement)),
            self.host.shown(ours, &self.flags(ours, samples, &host::words(&self.arguments.host.our_args))),
        )
    }

    fn searches(&self) -> bool {
        self.arguments.search && self.arguments.host.stock_args.is_none() && !self.host.is_over_cpu()
    }

    fn sample(&self, side: Side<'_>, samples: usize, own: &[String], what: &str) -> Result<Sampled, CommandError> {
        let done = self.host.completed(side, &self.flags(side, samples, own))?;
        let (host, samples) = results(&done.stdout);
        let rates: Vec<String> = samples
            .iter()
            .map(|row| format!("{} {:.1} t/s", row.test, median(self.counted(&row.rates)).unwrap_or(0.0)))
            .collect();
        tell(&format!("{}: {what}, {}: {} ({:.0} s)", self.label, side.name(), rates.join(", "), done.seconds));
        Ok(Sampled { host, samples, log: done.log() })
    }

    /// Samples without the first ones.
    fn counted<'s>(&self, rates: &'s [f64]) -> &'s [f64] {
        rates.get(self.arguments.skip..).filter(|rest| !rest.is_empty()).unwrap_or(rates)
    }

    fn run(&self, told: &mut HostInfo) -> Result<Phase, CommandError> {
        let (placement, tried) = if self.searches() { self.search()? } else { (self.placement(), Vec::new()) };
        let mut phase = Phase {
            decodes: self.decodes,
            stock_arguments: placement.join(" "),
            commands: self.commands(&placement),
            tried,
            tests: self.names().into_iter().map(|name| Test { name, pairs: Vec::new() }).collect(),
            ..Phase::default()
        };
        let own = host::words(&self.arguments.host.our_args);
        let samples = self.arguments.samples;
        for pair in 1..=self.arguments.repeats {
            let what = format!("pair {pair} of {}", self.arguments.repeats);
            let stock = self.sample(Side::Stock, samples, &placement, &what)?;
            let ours = self.sample(self.side(true), samples, &own, &what)?;
            // The inner device's name stands in stock's; ours is a device before it.
            if let Some(host) = stock.host {
                *told = HostInfo { time: ours.host.map_or(host.time, |host| host.time), ..host };
            }
            phase.device_mib = (
                device_mib(&stock.log, &self.host.first_device(Side::Stock)),
                device_mib(&ours.log, &self.host.first_device(self.side(true))),
            );
            let plugin = Plugin::read(&ours.log);
            phase.held = plugin.held.filter(|_| self.decodes).or(phase.held);
            phase.counts.add(&plugin.counts.unwrap_or_default());
            phase.tokens += self.tokens();
            phase.void = plugin.void(self.wanted);
            for test in &mut phase.tests {
                let find = |all: &[Samples], side: &str| {
                    let row = all.iter().find(|row| row.test == test.name);
                    let rates = row.map(|row| self.counted(&row.rates).to_vec());
                    rates.ok_or_else(|| Failed(format!("{side}: llama-bench printed no result for {}", test.name)))
                };
                test.pairs.push((find(&stock.samples, "stock")?, find(&ours.samples, "ours")?));
            }
            if let Some(reason) = &phase.void {
                tell(&format!("{}: void: {reason}", self.label));
                break;
            }
        }
        Ok(phase)
    }

    /// Names of the tests.
    fn names(&self) -> Vec<String> {
        if self.decodes {
            return vec![format!("tg{}", self.arguments.n_gen)];
        }
        self.arguments.prompts().map(|size| format!("pp{size}")).collect()
    }

    /// Tokens of one process: each test warms up once, decoding with a single token.
    fn tokens(&self) -> u64 {
        let samples = self.arguments.samples as u64;
        if self.decodes {
            return samples * u64::from(self.arguments.n_gen) + 1;
        }
        self.arguments.prompts().map(|size| (samples + 1) * u64::from(size)).sum()
    }

    /// The best of stock's flags near those that the memory asks for. One layer more on the device would take more memory than ours.
    fn search(&self) -> Result<Found, CommandError> {
        let first = cpu_layers(self.shape, self.cache_mib);
        let last = if first == 0 { 0 } else { self.shape.layers.max(first).min(first.saturating_add(2)) };
        let longest = self.arguments.prompts().max().unwrap_or(0);
        let mut ubatches = vec![self.arguments.ubatch_size];
        if !self.decodes {
            let larger = [512, 1024, 2048, 4096, 12288].into_iter().filter(|size| *size < 2 * longest.max(512));
            ubatches.extend(larger.filter(|size| *size != self.arguments.ubatch_size));
        }
        let mut tried: Vec<(Vec<String>, f64)> = Vec::new();
        let mut failure = None;
        for layers in first..=last {
            let list: Vec<String> = ubatches.iter().map(ToString::to_string).collect();
            let placement = vec!["-ncmoe".to_owned(), layers.to_string()];
            let all = [placement.clone(), vec!["-ub".to_owned(), list.join(",")]].concat();
            match self.sample(Side::Stock, 2, &all, &format!("trying {}", all.join(" "))) {
                Ok(found) => tried.extend(ubatches.iter().filter_map(|ubatch| {
                    let rows = found.samples.iter().filter(|row| row.ubatch == u64::from(*ubatch));
                    let rates: Option<Vec<f64>> = rows.map(|row| row.rates.last().map(|rate| rate.ln())).collect();
                    let rates = rates.filter(|rates| rates.len() == self.names().len())?;
                    let flags = [placement.clone(), vec!["-ub".to_owned(), ubatch.to_string()]].concat();
                    Some((flags, (rates.iter().sum::<f64>() / rates.len() as f64).exp()))
                })),
                // Too little memory for this one, perhaps.
                Err(Failed(reason)) => failure = Some(reason),
                Err(error) => return Err(error),
            }
        }
        let best = tried.iter().max_by(|a, b| a.1.total_cmp(&b.1)).map(|(flags, _)| flags.clone());
        let why = || Failed(failure.unwrap_or_else(|| "no flags of stock gave a result".to_owned()));
        let told = tried.iter().map(|(flags, rate)| (flags.join(" "), *rate)).collect();
        Ok((best.ok_or_else(why)?, told))
    }
}

/// The largest number of a flag's list.
fn largest(flags: &[String], names: &[&str]) -> Option<u32> {
    let place = flags.iter().position(|flag| names.contains(&flag.as_str()))?;
    flags.get(place + 1)?.split(',').filter_map(|size| size.parse().ok()).max()
}

fn words(shape: &MoeShape) -> String {
    let most = shape.expert_layers.iter().map(|layer| layer.experts).max().unwrap_or(0);
    format!(
        "{}, {} layers, {} with experts, {} of {most} used, {} MiB of experts, {} MiB of dense weights",
        shape.architecture,
        shape.layers,
        shape.expert_layers.len(),
        shape.used,
        shape.expert_bytes() >> 20,
        shape.dense_bytes >> 20
    )
}

fn ram_mib() -> usize {
    ggml_moe::ram::machine_bytes(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default()) >> 20
}

/// Progress, apart from the answer.
fn tell(line: &str) {
    // Nobody has to read it.
    let _ = writeln!(std::io::stderr(), "bench: {line}");
}
