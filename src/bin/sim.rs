//! `ggml-moe sim`: arguments, files and output of the simulator. The figures are made in `ggml_moe::sim`.

mod prompt;

use std::io::Read as _;
use std::ops::Range;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use ggml_moe::experts::policy::{Regime, Settings};
use ggml_moe::sim::{Cell, Outcome, PRESETS, Preset, Redraw, Report, Row, Rule, Trace, slots_per_layer, trace};

/// What `ggml-moe sim` understands.
#[derive(Args)]
pub(crate) struct SimArguments {
    /// A trace file (.npy, int16 [tokens][layers][experts per token]) or a preset: qwen3-30b, gemma4-26b, gpt-oss, qwen3.8-next,
    /// frequency, uniform.
    #[arg(value_name = "TRACE|PRESET")]
    source: String,
    /// Shares of the experts that the cache holds, in percent.
    #[arg(long, value_delimiter = ',', default_values_t = [10.0, 20.0, 30.0, 40.0, 50.0])]
    share: Vec<f64>,
    /// Rules: window (the plugin's policy), lru, lfu, static, belady, layers.
    #[arg(long, value_delimiter = ',', default_values_t = ["lru".to_owned(), "window".to_owned(), "belady".to_owned()])]
    policy: Vec<String>,
    /// Tokens of a preset's trace. The first half warms up and is not counted.
    #[arg(long, default_value_t = 1024)]
    tokens: usize,
    /// Layers of a preset's trace; by default as many as the model has.
    #[arg(long)]
    layers: Option<u16>,
    /// Seed of a preset's trace.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Traces of a preset to average over, with seeds from --seed on.
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// What is drawn again in the middle of a preset's trace: the ranks, or the slow process as well. The trace is then twice as long,
    /// and hits are also told by tokens from there.
    #[arg(long)]
    redraw: Option<RedrawArgument>,
    /// Put a prompt of so many tokens behind the --tokens of a preset and tell what decoding finds after it, by tokens. With --redraw the
    /// subject changes where the prompt begins.
    #[arg(long, value_name = "TOKENS", conflicts_with_all = ["policy", "svg", "write"])]
    prompt: Option<usize>,
    /// The part of the cache that is left while the prompt is computed, in percent.
    #[arg(long, default_value_t = 50.0, requires = "prompt")]
    prompt_left: f64,
    /// Uploads per token that the cache's share of the link allows after a prompt.
    #[arg(long, default_value_t = 24.0, requires = "prompt")]
    link_uploads: f32,
    /// Experts per layer of a trace file; by default one more than the largest id.
    #[arg(long)]
    experts: Option<usize>,
    /// Window of recent use, in tokens (8 to 127).
    #[arg(long, default_value_t = Settings::default().window)]
    window: u32,
    /// Uses within the window before an expert replaces another.
    #[arg(long, default_value_t = Settings::default().admit)]
    admit: u32,
    /// Uses that an upload must bring: what the CPU reads per second divided by what the link moves.
    #[arg(long, default_value_t = Settings::default().payback)]
    payback: f32,
    /// Most uploads per token.
    #[arg(long)]
    swaps_per_step: Option<u32>,
    /// Order of experts: auto chooses by measured hits.
    #[arg(long, default_value = "auto")]
    regime: RegimeArgument,
    /// Write the picture to this file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write the preset's trace (of --seed) to this file.
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RedrawArgument {
    Ranks,
    All,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RegimeArgument {
    Auto,
    Recency,
    Frequency,
}

/// The parts of a trace that are told apart after a redraw, by tokens from it.
const PARTS: [(&str, Range<isize>); 6] = [
    ("256 before", -256..0),
    ("0-64", 0..64),
    ("64-128", 64..128),
    ("128-256", 128..256),
    ("256-384", 256..384),
    ("384-512", 384..512),
];

/// Runs the simulation and returns what to print.
pub(crate) fn run(arguments: &SimArguments) -> Result<String, String> {
    let rules = rules(arguments)?;
    let settings = settings(arguments)?;
    if let Some(share) = arguments.share.iter().find(|share| !(**share > 0.0 && **share <= 100.0)) {
        return Err(format!("--share {share}: a share lies above 0 and at most at 100 percent"));
    }
    let preset = PRESETS.iter().find(|preset| preset.name == arguments.source);
    if let Some(tokens) = arguments.prompt {
        let preset = preset.ok_or("--prompt goes with a preset")?;
        return prompt::run(preset, tokens, arguments);
    }
    let traces = match preset {
        Some(preset) => synthetic(preset, arguments)?,
        None => vec![file(arguments)?],
    };
    let [first, ..] = &traces[..] else { return Err("--seeds 0 leaves nothing to replay".to_owned()) };
    if let Some(path) = &arguments.write {
        write(path, &first.write())?;
    }
    let middle = first.tokens() / 2;
    let redrawn = arguments.redraw.is_some();
    let parts = || PARTS.iter().filter(|_| redrawn);
    let mut rows = Vec::new();
    for &share in &arguments.share {
        let share = share / 100.0;
        let slots = slots_per_layer(first, share);
        let mut cells = Vec::new();
        for &rule in &rules {
            let mut cell = Cell { rule, outcome: Outcome::default(), parts: vec![Outcome::default(); parts().count()] };
            for trace in &traces {
                let series = rule.replay(trace, slots, &settings).map_err(|error| error.to_string())?;
                cell.outcome.add(series.second_half());
                for (sum, (_, tokens)) in cell.parts.iter_mut().zip(parts()) {
                    let at = |token: isize| middle.saturating_add_signed(token);
                    sum.add(series.sum(at(tokens.start)..at(tokens.end)));
                }
            }
            cells.push(cell);
        }
        rows.push(Row { share, slots, cells });
    }
    let report = Report {
        title: title(arguments, preset.is_some()),
        size: [first.tokens(), first.layers(), first.experts(), first.used()],
        parts: parts().map(|(name, _)| (*name).to_owned()).collect(),
        rows,
    };
    if let Some(path) = &arguments.svg {
        write(path, report.svg().as_bytes())?;
    }
    Ok(if arguments.json { report.json() } else { report.table() })
}

fn rules(arguments: &SimArguments) -> Result<Vec<Rule>, String> {
    let known = || Rule::ALL.map(|(name, _)| name).join(", ");
    let rule =
        |name: &String| Rule::named(name).ok_or_else(|| format!("--policy {name}: no such rule; rules: {}", known()));
    arguments.policy.iter().map(rule).collect()
}

fn settings(arguments: &SimArguments) -> Result<Settings, String> {
    if !(8..=127).contains(&arguments.window) {
        return Err(format!("--window {}: 8 to 127 tokens", arguments.window));
    }
    if !(arguments.payback.is_finite() && arguments.payback >= 0.0) {
        return Err(format!("--payback {}: 0 or more", arguments.payback));
    }
    Ok(Settings {
        window: arguments.window,
        admit: arguments.admit,
        payback: arguments.payback,
        swaps_per_step: arguments.swaps_per_step,
        regime: match arguments.regime {
            RegimeArgument::Auto => None,
            RegimeArgument::Recency => Some(Regime::Recency),
            RegimeArgument::Frequency => Some(Regime::Frequency),
        },
        ..Settings::default()
    })
}

/// Uses of experts of the longest synthetic trace.
const MOST_USES: usize = 1 << 29;
/// Bytes of the largest trace that is read.
const MOST_BYTES: u64 = 2 << 30;
/// Experts of a layer that a trace may have.
const MOST_EXPERTS: usize = 1 << 20;

fn synthetic(preset: &Preset, arguments: &SimArguments) -> Result<Vec<Trace>, String> {
    let layers = arguments.layers.unwrap_or(preset.layers);
    if layers == 0 || arguments.tokens < 2 {
        return Err("a trace needs a layer and two tokens".to_owned());
    }
    let uses = arguments.tokens.saturating_mul(layers as usize).saturating_mul(usize::from(preset.used));
    if uses > MOST_USES {
        return Err(format!("a trace of {uses} uses is too long; {MOST_USES} are the most"));
    }
    let changed = arguments.redraw.map(|what| (arguments.tokens, redraw(what)));
    let tokens = if changed.is_some() { 2 * arguments.tokens } else { arguments.tokens };
    let seeds = arguments.seed..arguments.seed.saturating_add(arguments.seeds);
    Ok(seeds.map(|seed| trace(preset, tokens, layers, seed, changed)).collect())
}

fn redraw(what: RedrawArgument) -> Redraw {
    match what {
        RedrawArgument::Ranks => Redraw::Ranks,
        RedrawArgument::All => Redraw::All,
    }
}

fn file(arguments: &SimArguments) -> Result<Trace, String> {
    let known = PRESETS.iter().map(|preset| preset.name).collect::<Vec<_>>().join(", ");
    if arguments.redraw.is_some() || arguments.write.is_some() {
        return Err(format!("--redraw and --write go with a preset: {known}"));
    }
    let path = &arguments.source;
    let told = |error: std::io::Error| format!("{path}: {error}; presets: {known}");
    let file = std::fs::File::open(path).map_err(told)?;
    if !file.metadata().map_err(told)?.is_file() {
        return Err(format!("{path}: it is no regular file"));
    }
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(told)?;
    if bytes.len() as u64 > MOST_BYTES || arguments.experts.is_some_and(|experts| experts > MOST_EXPERTS) {
        return Err(format!("{path}: a trace has {} MiB and {MOST_EXPERTS} experts at most", MOST_BYTES >> 20));
    }
    Trace::read(&bytes, arguments.experts).map_err(|error| format!("{path}: {error}"))
}

fn title(arguments: &SimArguments, preset: bool) -> String {
    let mut title = arguments.source.clone();
    if preset {
        title.push_str(&match arguments.seeds {
            1 => format!(", seed {}", arguments.seed),
            seeds => format!(", seeds {} to {}", arguments.seed, arguments.seed.saturating_add(seeds - 1)),
        });
    }
    match arguments.redraw {
        Some(RedrawArgument::Ranks) => title.push_str(", ranks redrawn in the middle"),
        Some(RedrawArgument::All) => title.push_str(", ranks and slow process redrawn in the middle"),
        None => {}
    }
    title
}

fn write(path: &PathBuf, bytes: &[u8]) -> Result<(), String> {
    std::fs::write(path, bytes).map_err(|error| format!("{}: {error}", path.display()))
}
