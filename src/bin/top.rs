//! `ggml-moe top`: reads the counters of running processes and shows them.

use std::fmt::Write as _;
use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use ggml_moe::telemetry::json::Value;
use ggml_moe::telemetry::service;

/// What `ggml-moe top` understands.
#[derive(Args)]
pub(crate) struct TopArguments {
    /// Print the table once and end. So does an output that is no terminal.
    #[arg(long)]
    once: bool,
    /// Print what each process answers, one line of JSON each, and end.
    #[arg(long)]
    json: bool,
    /// The socket of one process, where the key `socket` names a file.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Seconds between two looks.
    #[arg(long, default_value_t = 1.0)]
    interval: f64,
}

/// Runs until the user ends it, or once. Returns what to print at the end.
pub(crate) fn run(arguments: &TopArguments) -> Result<String, String> {
    if !(0.1..=3600.0).contains(&arguments.interval) {
        return Err(format!("--interval {}: 0.1 to 3600 seconds", arguments.interval));
    }
    if arguments.json {
        let mut out = String::new();
        for answer in answers(arguments)?.into_iter().filter_map(|(_, answer)| answer.ok()) {
            out.push_str(answer.trim_end());
            out.push('\n');
        }
        return Ok(out);
    }
    if arguments.once || !std::io::stdout().is_terminal() {
        return Ok(page(&answers(arguments)?));
    }
    let mut clear = "\x1b[2J";
    loop {
        // Home, then clear what is left of each line and of the screen: nothing flickers.
        let page = page(&answers(arguments)?).replace('\n', "\x1b[K\n");
        let written = write!(std::io::stdout(), "{clear}\x1b[H{page}\x1b[J").and_then(|()| std::io::stdout().flush());
        if written.is_err() {
            return Ok(String::new());
        }
        clear = "";
        std::thread::sleep(Duration::from_secs_f64(arguments.interval));
    }
}

type Answer = (PathBuf, Result<String, String>);

fn answers(arguments: &TopArguments) -> Result<Vec<Answer>, String> {
    let ask = |path: &Path| service::ask(path).map_err(|error| error.to_string());
    if let Some(path) = &arguments.socket {
        return match ask(path) {
            Ok(answer) => Ok(vec![(path.clone(), Ok(answer))]),
            Err(error) => Err(format!("{}: {error}", path.display())),
        };
    }
    Ok(service::sockets().into_iter().map(|path| (path.clone(), ask(&path))).collect())
}

fn page(answers: &[Answer]) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let mut line = |text: String| {
        let _ = writeln!(out, "{}", plain(&text));
    };
    for (path, answer) in answers {
        match answer.as_ref().map(|text| Value::read(text)) {
            Ok(Some(process)) => show(&process, &mut line),
            Ok(None) => line(format!("{}: the answer is not understood", path.display())),
            Err(error) => line(format!("{}: no answer ({error}); the process may be gone", path.display())),
        }
    }
    if answers.is_empty() {
        line(
            "No process of this user tells its counters. They are told once there is a cache (GGML_MOE key `socket`)."
                .to_owned(),
        );
    }
    out
}

/// What another process says must not control the terminal.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn show(process: &Value, line: &mut impl FnMut(String)) {
    let number = |value: &Value, name: &str| value.get(name).number().unwrap_or(0.0);
    line(format!(
        "{} (pid {:.0}), ggml-moe {}, {} since the first graph",
        process.get("program").text(),
        number(process, "pid"),
        process.get("version").text(),
        time(number(process, "uptime_s"))
    ));
    for device in process.get("devices").items() {
        line(format!("  {} over {}: {}", device.get("name").text(), device.get("inner").text(), cache(device)));
        let counters = device.get("counters");
        line(format!(
            "    all time: {:.0} prompt tokens, {:.0} decoded; {}; {:.0} uploads; {} computed by the CPU, {} over the link",
            number(counters, "prompt_tokens"),
            number(counters, "tokens"),
            hits(hit_share(counters)),
            number(counters, "uploads"),
            bytes(number(counters, "cpu_bytes")),
            bytes(number(counters, "upload_bytes") + number(counters, "expert_bytes")),
        ));
        let rates = device.get("rates");
        line(format!(
            "    last {:.0} s: {:.1} tokens decoded/s; {}; {:.1} uploads/s; {}/s computed by the CPU, {}/s over the link",
            number(rates, "window_s"),
            number(rates, "tokens"),
            hits(rates.get("hit_share").number()),
            number(rates, "uploads"),
            bytes(number(rates, "cpu_bytes")),
            bytes(number(rates, "link_bytes")),
        ));
        for request in device.get("requests").items().iter().rev().take(4) {
            let rate =
                request.get("tokens_per_second").number().map_or(String::new(), |rate| format!(" at {rate:.1}/s"));
            line(format!(
                "    request {:.0}{}: {:.0} prompt tokens, {:.0} decoded{rate}; {}; {:.0} uploads",
                number(request, "number"),
                if *request.get("open") == Value::Flag(true) { " (runs)" } else { "" },
                number(request, "prompt_tokens"),
                number(request, "tokens"),
                hits(request.get("hit_share").number()),
                number(request, "uploads"),
            ));
        }
    }
}

fn cache(device: &Value) -> String {
    let cache = device.get("cache");
    let number = |name: &str| cache.get(name).number().unwrap_or(0.0);
    if *cache == Value::Null {
        let reason = device.get("no_cache").text();
        return if reason.is_empty() { "no cache".to_owned() } else { format!("no cache: {reason}") };
    }
    format!(
        "cache of {} for {:.0} of {:.0} experts ({:.0}%), {:.0} there, {:.0} on their way, by {}; {:.0} threads for the others",
        bytes(number("bytes")),
        number("slots"),
        number("experts"),
        100.0 * number("share"),
        number("resident"),
        number("loading"),
        match cache.get("mode").text() {
            "recency" => "recent use",
            "frequency" => "lifetime use",
            "layers" => "whole layers",
            other => other,
        },
        number("threads")
    )
}

fn hit_share(counters: &Value) -> Option<f64> {
    let (hits, misses) = (counters.get("hits").number()?, counters.get("misses").number()?);
    (hits + misses > 0.0).then(|| hits / (hits + misses))
}

fn hits(share: Option<f64>) -> String {
    share.map_or("no use of the cache".to_owned(), |share| format!("{:.1}% hits", 100.0 * share))
}

fn bytes(bytes: f64) -> String {
    if bytes >= 1e9 { format!("{:.1} GB", bytes / 1e9) } else { format!("{:.1} MB", bytes / 1e6) }
}

fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 7200.0 => format!("{:.1} hours", s / 3600.0),
        s if s >= 120.0 => format!("{:.0} minutes", s / 60.0),
        s => format!("{s:.0} seconds"),
    }
}
