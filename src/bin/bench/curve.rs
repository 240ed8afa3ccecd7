//! `ggml-moe bench --curve`: decoding token by token after a long prompt, with llama-server. The figures are made in `ggml_moe::bench::curve`.

use std::path::{Path, PathBuf};

use clap::Args;
use ggml_moe::bench::curve::{AFTER, AGAIN, Answer as Decoded, Curve, WITHOUT};
use ggml_moe::bench::placement::cpu_layers;

use super::server::{self, Server};
use super::{BenchArguments, tell};
use crate::host::{self, Answer, CommandError, Failed, Host, Side, Usage};

/// What `--curve` understands.
#[derive(Args)]
pub(crate) struct CurveArguments {
    /// Measure decoding token by token after a long prompt, with llama-server, and nothing else; writes FILE.csv and FILE.svg.
    #[arg(long, value_name = "FILE")]
    pub(super) curve: Option<PathBuf>,
    /// Tokens of the prompt.
    #[arg(long, value_name = "TOKENS", default_value_t = 12000)]
    curve_prompt: u32,
    /// Tokens of each answer.
    #[arg(long, value_name = "TOKENS", default_value_t = 640)]
    curve_tokens: u32,
    /// The token from which on decoding is compared with decoding without the prompt.
    #[arg(long, value_name = "TOKEN", default_value_t = 256)]
    curve_from: u32,
    /// llama-server; by default the one of --host-dir or PATH.
    #[arg(long, value_name = "FILE")]
    llama_server: Option<PathBuf>,
}

/// Tokens of a prompt that is as good as none.
const SHORT: usize = 16;

/// Runs both sides.
pub(super) fn run(arguments: &BenchArguments, path: &Path) -> Result<Answer, CommandError> {
    let own = &arguments.curve;
    if own.curve_from + 2 > own.curve_tokens {
        return Err(Usage("--curve-tokens must be more than --curve-from".to_owned()));
    }
    let model = arguments.host.model()?;
    let shape = host::shape(model)?;
    let [(_, cache_mib)] = arguments.memory.sizes(&shape)?[..] else {
        return Err(Usage("--curve takes one size of the cache at a time".to_owned()));
    };
    let host = Host::find(&arguments.host, "llama-server", own.llama_server.as_deref())?;
    let socket = std::env::temp_dir().join(format!("ggml-moe-bench-{}.sock", std::process::id()));
    let mut more = vec![format!("cache={cache_mib}"), format!("socket={}", socket.display())];
    if let Some(name) = &arguments.replay {
        more.push(format!("replay={}", host::preset(name, &shape)?.name));
    }
    let keys = host.keys_with(&more);
    let placement = match &arguments.host.stock_args {
        Some(flags) => host::words(flags),
        None if host.is_over_cpu() => Vec::new(),
        None => vec!["-ncmoe".to_owned(), cpu_layers(&shape, cache_mib).to_string()],
    };
    let sides = [(Side::Stock, placement), (Side::Ours(&keys), host::words(&arguments.host.our_args))];
    if arguments.host.dry_run {
        let line = |(side, flags): &(Side<'_>, Vec<String>)| {
            Ok(format!("{}\n", host.shown(*side, &server_flags(arguments, &host, *side, flags, 0)?)))
        };
        return Ok(Answer { text: sides.iter().map(line).collect::<Result<_, CommandError>>()?, good: true });
    }
    let mut curve = Curve { prompt: own.curve_prompt as usize, from: own.curve_from as usize, answers: Vec::new() };
    for (side, flags) in sides {
        let port = Server::free_port().map_err(|error| Failed(format!("a port: {error}")))?;
        let flags = server_flags(arguments, &host, side, &flags, port)?;
        let log = path.with_extension(format!("{}.log", side.name()));
        let server = Server::start(host.command(side, &flags), port, &log, host.limit())?;
        curve.answers.extend(answers(&server, arguments, side)?);
        if matches!(side, Side::Ours(_)) && server::blocks(&socket) == 0 {
            return Err(Failed(format!("void: no MoE block ran on the plugin's device; see {}", log.display())));
        }
        drop(server);
        // Nobody needs what a server of good health printed.
        let _ = std::fs::remove_file(&log);
    }
    let title = format!("{}: decoding after a prompt", model.file_name().unwrap_or_default().to_string_lossy());
    for (extension, text) in [("csv", curve.csv()), ("svg", curve.svg(&title))] {
        let path = path.with_extension(extension);
        std::fs::write(&path, text).map_err(|error| Failed(format!("{}: {error}", path.display())))?;
    }
    if let Some(path) = &arguments.json {
        std::fs::write(path, format!("{:#}\n", curve.json()))
            .map_err(|error| Failed(format!("{}: {error}", path.display())))?;
    }
    let ratio = |what| curve.ratio("ours", what).map_or("?".to_owned(), |ratio| format!("{ratio:.3}"));
    let last =
        format!("bench: decoding after a prompt {} of the same context, {} of none\n", ratio(AGAIN), ratio(WITHOUT));
    Ok(Answer { text: format!("{}{last}", curve.words()), good: true })
}

fn server_flags(
    arguments: &BenchArguments,
    host: &Host,
    side: Side<'_>,
    own: &[String],
    port: u16,
) -> Result<Vec<String>, CommandError> {
    let context = arguments.curve.curve_prompt + arguments.curve.curve_tokens + 64;
    let defaults: [(&[&str], String); 11] = [
        (&["-m", "--model"], arguments.host.model()?.display().to_string()),
        (&["-dev", "--device"], host.device(side, ",")),
        (&["-ngl", "--gpu-layers", "--n-gpu-layers"], "99".to_owned()),
        (&["-c", "--ctx-size"], context.to_string()),
        (&["-np", "--parallel"], "1".to_owned()),
        (&["-ub", "--ubatch-size"], arguments.ubatch_size.to_string()),
        (&["-b", "--batch-size"], arguments.ubatch_size.max(2048).to_string()),
        // Prompts stay in the slot; copies of them in RAM would cost time.
        (&["-cram", "--cache-ram"], "0".to_owned()),
        (&["--host"], "127.0.0.1".to_owned()),
        (&["--port"], port.to_string()),
        (&["--offline"], String::new()),
    ];
    Ok(host.flags(&defaults, own))
}

/// Without a prompt, after one, and in the same context once more.
fn answers(server: &Server, arguments: &BenchArguments, side: Side<'_>) -> Result<Vec<Decoded>, CommandError> {
    let own = &arguments.curve;
    let models = server.get("/v1/models")?;
    let words =
        models["data"][0]["meta"]["n_vocab"].as_u64().and_then(|count| u32::try_from(count).ok()).unwrap_or(1024);
    let mut seed = 1_u64;
    let mut prompt = |count: usize| -> Vec<u32> { (0..count).map(|_| token(&mut seed, words)).collect() };
    // Caches and clocks warm up.
    server.complete(&prompt(SHORT), own.curve_tokens, false)?;
    let long = prompt(own.curve_prompt as usize);
    let asked = [(WITHOUT, prompt(SHORT), false), (AFTER, long.clone(), true), (AGAIN, long, true)];
    let mut found = Vec::new();
    for (what, prompt, cached) in asked {
        let answer = server.complete(&prompt, own.curve_tokens, cached)?;
        let number = |name: &str| answer.last["timings"][name].as_f64().unwrap_or(0.0);
        tell(&format!(
            "curve: {} {what}: {} tokens in {:.0} ms, then {:.1} t/s",
            side.name(),
            number("prompt_n"),
            number("prompt_ms"),
            number("predicted_per_second")
        ));
        found.push(Decoded { side: side.name().to_owned(), what: what.to_owned(), arrivals_ms: answer.arrivals_ms });
    }
    Ok(found)
}

/// A token in the middle of the vocabulary, where no special ones are.
fn token(seed: &mut u64, words: u32) -> u32 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let place = (*seed >> 33) % u64::from((words / 2).max(1));
    words / 4 + u32::try_from(place).unwrap_or(0)
}
