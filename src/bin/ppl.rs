//! `ggml-moe ppl`: runs llama-perplexity with the plugin and without, and compares chunk by chunk. The figures are made in
//! `ggml_moe::bench::ppl`.

use std::io::Write as _;
use std::path::PathBuf;

use clap::Args;
use ggml_moe::bench::output::{Plugin, Wanted};
use ggml_moe::bench::ppl::{Comparison, Running, running};

use crate::host::{self, Answer, CommandError, Failed, Host, HostArguments, MemoryArguments, Side, Usage};

/// What `ggml-moe ppl` understands.
#[derive(Args)]
pub(crate) struct PplArguments {
    #[command(flatten)]
    host: HostArguments,
    #[command(flatten)]
    memory: MemoryArguments,
    /// llama-perplexity; by default the one of --host-dir or PATH.
    #[arg(long, value_name = "FILE")]
    llama_perplexity: Option<PathBuf>,
    /// The text.
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Chunks of the text, 2 or more; by default all.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(2..))]
    chunks: Option<u32>,
    /// Tokens of a chunk; the second half counts.
    #[arg(short, long, value_name = "TOKENS", default_value_t = 512)]
    ctx_size: u32,
    /// Tokens of a call. One is how a model decodes: the path of the cache.
    #[arg(short, long, value_name = "TOKENS", default_value_t = 1)]
    batch_size: u32,
    /// Tokens of a pass (-ub); by default those of a call, at most 512.
    #[arg(long, value_name = "TOKENS")]
    ubatch_size: Option<u32>,
    /// The largest mean difference of the logarithms that is not a failure, in percent.
    #[arg(long, value_name = "PERCENT", default_value_t = 0.2)]
    limit: f64,
}

/// How often a side is run again when its last lines were lost: llama.cpp's tools print through a thread that they do not wait for.
const ATTEMPTS: usize = 3;

/// Tokens of a call up to which the cache computes.
const MOST_CACHED: u32 = 8;

/// Runs the comparison and returns what to print.
pub(crate) fn run(arguments: &PplArguments) -> Result<Answer, CommandError> {
    let model = arguments.host.model()?;
    if !arguments.file.is_file() {
        return Err(Usage(format!("{}: no such text", arguments.file.display())));
    }
    if !(arguments.limit.is_finite() && arguments.limit >= 0.0) {
        return Err(Usage(format!("--limit {}: 0 or more", arguments.limit)));
    }
    let shape = host::shape(model)?;
    let [(share, cache_mib)] = arguments.memory.sizes(&shape)?[..] else {
        return Err(Usage("ppl compares one size of the cache at a time".to_owned()));
    };
    let host = Host::find(&arguments.host, "llama-perplexity", arguments.llama_perplexity.as_deref())?;
    let cache = (cache_mib > 0).then(|| format!("cache={cache_mib}"));
    let keys = host.keys_with(&cache.into_iter().collect::<Vec<_>>());
    let ours = Side::Ours(&keys);
    let stock_flags = flags(arguments, &host, Side::Stock, arguments.host.stock_args.as_deref().unwrap_or_default())?;
    let our_flags = flags(arguments, &host, ours, &arguments.host.our_args)?;
    if arguments.host.dry_run {
        let text = format!("{}\n{}\n", host.shown(Side::Stock, &stock_flags), host.shown(ours, &our_flags));
        return Ok(Answer { text, good: true });
    }
    let wanted = Host::wanted(&shape, share, cache_mib, &keys);
    let wanted = Wanted { cache: wanted.cache && arguments.batch_size <= MOST_CACHED, ..wanted };
    let (stock, _) = side(&host, Side::Stock, &stock_flags, None)?;
    let (ours, plugin) = side(&host, ours, &our_flags, Some(wanted))?;
    let comparison = Comparison::new(&stock, &ours).map_err(Failed)?;
    let counts = plugin.counts.unwrap_or_default();
    let work = match counts.hit_percent() {
        Some(percent) => {
            format!("cache of {cache_mib} MiB: {} hits, {} misses ({percent:.1}%)", counts.hits, counts.misses)
        }
        None => format!("{} MoE blocks, none by a cache", counts.blocks),
    };
    let text = format!("{}\n{work}\n{}", comparison.table(), comparison.verdict(arguments.limit));
    Ok(Answer { text, good: comparison.passes(arguments.limit) })
}

fn flags(arguments: &PplArguments, host: &Host, side: Side<'_>, own: &str) -> Result<Vec<String>, CommandError> {
    let ubatch = arguments.ubatch_size.unwrap_or(arguments.batch_size.min(512));
    let defaults: [(&[&str], String); 10] = [
        (&["-m", "--model"], arguments.host.model()?.display().to_string()),
        (&["-f", "--file"], arguments.file.display().to_string()),
        (&["-c", "--ctx-size"], arguments.ctx_size.to_string()),
        (&["-b", "--batch-size"], arguments.batch_size.to_string()),
        (&["-ub", "--ubatch-size"], ubatch.to_string()),
        (&["--chunks"], arguments.chunks.map_or("-1".to_owned(), |chunks| chunks.to_string())),
        (&["-ngl", "--gpu-layers", "--n-gpu-layers"], "99".to_owned()),
        (&["-dev", "--device"], host.device(side, ",")),
        // Repacked weights round differently, on either side.
        (&["-nr", "--no-repack"], String::new()),
        (&["--ppl-output-type"], "1".to_owned()),
    ];
    Ok(host.flags(&defaults, &host::words(own)))
}

/// One side's figures, whole. `wanted`: what the plugin must show.
fn side(
    host: &Host,
    side: Side<'_>,
    flags: &[String],
    wanted: Option<Wanted>,
) -> Result<(Vec<Running>, Plugin), CommandError> {
    let mut lost = String::new();
    for _ in 0..ATTEMPTS {
        let done = host.completed(side, flags)?;
        let log = done.log();
        let (figures, announced) = running(&log).map_err(|error| Failed(format!("{}: {error}", side.name())))?;
        let plugin = Plugin::read(&log);
        // Nobody has to read the progress.
        let _ = writeln!(std::io::stderr(), "ppl: {}: {} chunks ({:.0} s)", side.name(), figures.len(), done.seconds);
        if announced.is_some_and(|count| count != figures.len()) {
            lost = format!("{}: only {} of {} chunks were printed", side.name(), figures.len(), announced.unwrap_or(0));
            continue;
        }
        if figures.is_empty() {
            let reason = ggml_moe::bench::output::reason(&log).unwrap_or("it printed nothing").to_owned();
            return Err(Failed(format!("{}: llama-perplexity printed no chunk: {reason}", side.name())));
        }
        match wanted.and_then(|wanted| plugin.void(wanted)) {
            None => return Ok((figures, plugin)),
            // The counters are the last line.
            Some(_) if plugin.counts.is_none() && !plugin.lines.is_empty() => {
                lost = "ours: the plugin's counters were not printed, so that nothing shows what it did".to_owned();
            }
            Some(reason) => return Err(Failed(format!("void: {reason}"))),
        }
    }
    Err(Failed(format!("{lost}, {ATTEMPTS} times")))
}
