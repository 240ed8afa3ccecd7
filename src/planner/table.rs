//! A plan as text for a terminal.
//!
//! Owns: the tables. Threads: none. Does not: choose.

use std::fmt::Write as _;

use super::choose::{Mode, Plan};
use super::model::Model;
use super::speed::Speed;
use super::usage::Usage;
use super::{MIB, Machine, arguments};
use crate::experts::policy::Ground;

/// A plan in a few lines.
pub fn short(plan: &Plan) -> String {
    let mut out = String::new();
    for choice in &plan.choices {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{}: {}. {}", choice.what, choice.value, choice.reason);
    }
    if let (Some(decode), Some(prompt)) = (&plan.decode, &plan.prompt) {
        let _ = writeln!(out, "predicted: {}; {}", speed("decoding", decode), speed("prompts", prompt));
    }
    warnings(&mut out, plan);
    out
}

/// A plan in full.
pub fn full(model: &Model, machine: &Machine, usage: &Usage, plan: &Plan) -> String {
    let mut out = String::new();
    let mib = |bytes: u64| bytes.div_ceil(MIB);
    let _ = writeln!(
        out,
        "model    {}: {} layers, experts {} MiB, dense {} MiB, tables {} MiB",
        model.shape.architecture,
        model.layers.len(),
        mib(model.expert_bytes()),
        mib(model.dense_bytes()),
        mib(model.input_bytes)
    );
    let limit = machine.limit.map_or_else(String::new, |limit| format!(", limit {} MiB", limit / MIB));
    let _ = writeln!(
        out,
        "machine  {} cores reading {:.0} GB/s ({}), RAM {} MiB, {} free{limit}",
        machine.cores,
        machine.cpu_gbs,
        machine.cpu.name(),
        machine.ram / MIB,
        machine.available / MIB
    );
    for card in &machine.cards {
        let _ = writeln!(
            out,
            "         {} {}: {} of {} MiB free, link {:.1} GB/s ({})",
            card.name,
            card.description,
            card.free / MIB,
            card.total / MIB,
            card.link_gbs,
            card.link.name()
        );
    }
    if !plan.cards.is_empty() {
        let _ = writeln!(
            out,
            "\n{:<8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}  in use  experts held       expected hits",
            "card", "layers", "dense", "context", "compute", "draft", "cache", "(lends)", "left"
        );
        for card in &plan.cards {
            let left = card.free.saturating_sub(card.beside()).saturating_sub(card.arena);
            let _ = writeln!(
                out,
                "{:<8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}  {:>5.0}%  {:>5} of {:<8}  {:>10.0}%",
                card.name,
                format!("{}-{}", card.layers.0, card.layers.1.saturating_sub(1)),
                mib(card.dense),
                mib(card.context),
                mib(card.compute),
                mib(card.draft),
                mib(card.arena),
                mib(card.lent),
                mib(left),
                100.0 * card.utilisation(),
                card.slots,
                card.blocks,
                100.0 * card.hits
            );
        }
    }
    out.push('\n');
    for choice in &plan.choices {
        let _ = writeln!(out, "{:<12} {:<14} {}", choice.what, choice.value, choice.reason);
    }
    if let Some((_, ground)) = plan.hits {
        let words = match ground {
            Ground::Learned => "learned from earlier runs of this model",
            Ground::Share => "a guess from the share; nothing better is learned yet",
            Ground::Layers => "whole layers: there is no room for one token's experts",
        };
        let _ = writeln!(
            out,
            "{:<12} {:<14} {words}.",
            "hits",
            format!("{:.0}%", 100.0 * plan.hits.map_or(0.0, |hits| hits.0))
        );
    }
    let _ = writeln!(
        out,
        "\n{:<10} {:>12} {:<32} {:>12} {:<20}",
        "predicted", "decode t/s", "bound by", "prompt t/s", "bound by"
    );
    let mut row = |name: &str, decode: &Speed, prompt: &Speed| {
        let _ = writeln!(
            out,
            "{name:<10} {:>12.1} {:<32} {:>12.0} {:<20}",
            decode.rate,
            decode.bound.words(),
            prompt.rate,
            prompt.bound.words()
        );
    };
    if let (Mode::Cache, Some(decode), Some(prompt)) = (plan.mode, &plan.decode, &plan.prompt) {
        row("cache", decode, prompt);
    }
    if let Some(stock) = &plan.stock {
        row("stock", &stock.decode, &stock.prompt);
    }
    let _ = writeln!(
        out,
        "(prompts of {} tokens, short context; how far such predictions were off: docs/planner.md)",
        Usage { context: Some(plan.context), ..usage.clone() }.request().0
    );
    if let Some(stock) = plan.stock.as_ref().filter(|stock| stock.fits) {
        let _ = writeln!(out, "\nstock's best placement: {}", arguments::stock(plan, stock));
    }
    if plan.mode == Mode::Cache {
        let _ = writeln!(out, "with the plugin:        {}", arguments::ours(plan));
    }
    if !plan.warnings.is_empty() {
        out.push('\n');
    }
    warnings(&mut out, plan);
    out
}

fn warnings(out: &mut String, plan: &Plan) {
    for warning in &plan.warnings {
        let _ = writeln!(out, "note: {warning}");
    }
}

fn speed(what: &str, speed: &Speed) -> String {
    format!("{what} {:.0} tokens per second, bound by {}", speed.rate, speed.bound.words())
}
