//! `ggml-moe sim --prompt`: decoding after a prompt, as a table or JSON.

use std::fmt::Write as _;
use std::ops::Range;

use ggml_moe::experts::policy::Settings;
use ggml_moe::sim::{Outcome, Preset, Prompt, Redraw, Told, Trace, slots_per_layer, trace};

use super::{MOST_USES, SimArguments, redraw};

/// Tokens decoded after the prompt.
const AFTER: usize = 512;
/// The parts of them that are told apart.
const PARTS: [Range<usize>; 7] = [0..8, 8..32, 32..64, 64..128, 128..256, 256..384, 384..512];

/// Runs it and returns what to print.
pub(super) fn run(preset: &Preset, tokens: usize, arguments: &SimArguments) -> Result<String, String> {
    let settings = super::settings(arguments)?;
    let left = arguments.prompt_left / 100.0;
    if !(0.0..=1.0).contains(&left) {
        return Err(format!("--prompt-left {}: 0 to 100 percent", arguments.prompt_left));
    }
    if !(arguments.link_uploads > 0.0 && arguments.link_uploads.is_finite()) {
        return Err(format!("--link-uploads {}: more than 0", arguments.link_uploads));
    }
    let traces = traces(preset, tokens, arguments)?;
    let [first, ..] = &traces[..] else { return Err("--seeds 0 leaves nothing to replay".to_owned()) };
    let prompt = Prompt { before: arguments.tokens, tokens, left, uploads_per_token: arguments.link_uploads };
    let mut rows = Vec::new();
    for &share in &arguments.share {
        let slots = slots_per_layer(first, share / 100.0);
        for (name, told) in Told::ALL {
            let mut parts = vec![Outcome::default(); PARTS.len()];
            for trace in &traces {
                let series = prompt.replay(trace, slots, &settings, told).map_err(|error| error.to_string())?;
                let start = arguments.tokens + tokens;
                for (sum, part) in parts.iter_mut().zip(PARTS) {
                    sum.add(series.sum(start + part.start..start + part.end));
                }
            }
            rows.push((share, name, parts));
        }
    }
    Ok(if arguments.json { json(preset, tokens, &rows) } else { table(preset, arguments, (tokens, &settings), &rows) })
}

fn traces(preset: &Preset, tokens: usize, arguments: &SimArguments) -> Result<Vec<Trace>, String> {
    let layers = arguments.layers.unwrap_or(preset.layers);
    let all = arguments.tokens.saturating_add(tokens).saturating_add(AFTER);
    let uses = all.saturating_mul(layers as usize).saturating_mul(usize::from(preset.used));
    if layers == 0 || uses > MOST_USES {
        return Err(format!("a trace of {uses} uses; 1 to {MOST_USES} are possible"));
    }
    let changed: Option<Redraw> = arguments.redraw.map(redraw);
    let seeds = arguments.seed..arguments.seed.saturating_add(arguments.seeds);
    let changed = changed.map(|what| (arguments.tokens, what));
    Ok(seeds.map(|seed| trace(preset, all, layers, seed, changed)).collect())
}

type Line = (f64, &'static str, Vec<Outcome>);

fn table(preset: &Preset, arguments: &SimArguments, (tokens, settings): (usize, &Settings), rows: &[Line]) -> String {
    let mut out = format!(
        "{}: {} tokens decoded, a prompt of {tokens} that leaves {}% of the slots, {AFTER} tokens decoded; {} uploads per token, payback {}\n\
         hits, % (and uploads per token), by tokens after the prompt\n\nshare             ",
        preset.name, arguments.tokens, arguments.prompt_left, arguments.link_uploads, settings.payback
    );
    for part in PARTS {
        let _ = write!(out, "  {:>13}", format!("{}-{}", part.start, part.end));
    }
    out.push('\n');
    for (share, name, parts) in rows {
        let _ = write!(out, "{share:>4.0}%  {name:<11}");
        for part in parts {
            let _ = write!(out, "  {:>6.1} ({:>4.1})", part.hit_percent(), part.uploads_per_token());
        }
        out.push('\n');
    }
    out
}

fn json(preset: &Preset, tokens: usize, rows: &[Line]) -> String {
    let rows: Vec<String> = rows
        .iter()
        .map(|(share, name, parts)| {
            let parts: Vec<String> = PARTS
                .iter()
                .zip(parts)
                .map(|(part, outcome)| {
                    format!(
                        "{{\"from\":{},\"to\":{},\"hit_percent\":{:.3},\"uploads_per_token\":{:.3}}}",
                        part.start,
                        part.end,
                        outcome.hit_percent(),
                        outcome.uploads_per_token()
                    )
                })
                .collect();
            format!("{{\"share\":{},\"prompt\":\"{name}\",\"parts\":[{}]}}", share / 100.0, parts.join(","))
        })
        .collect();
    format!("{{\"trace\":\"{}\",\"prompt_tokens\":{tokens},\"results\":[{}]}}\n", preset.name, rows.join(","))
}
