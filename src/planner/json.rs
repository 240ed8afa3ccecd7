//! A plan as JSON.
//!
//! Owns: the names of the fields. Sizes are in MiB, speeds in tokens per second, times in microseconds.
//! Threads: none. Does not: choose.

use serde_json::{Value, json};

use super::choose::{LoadMode, Mode, Plan};
use super::model::Model;
use super::speed::Speed;
use super::{MIB, arguments};
use crate::experts::policy::Ground;

/// Its name.
pub fn mode(mode: Mode) -> &'static str {
    match mode {
        Mode::Stock => "stock",
        Mode::Cache => "cache",
        Mode::Refused => "refused",
    }
}

/// What hits rest on.
pub fn ground(ground: Ground) -> &'static str {
    match ground {
        Ground::Learned => "learned",
        Ground::Share => "share",
        Ground::Layers => "layers",
    }
}

fn speed(speed: &Speed) -> Value {
    let parts: serde_json::Map<String, Value> =
        speed.parts.iter().map(|(bound, us)| (bound.words().to_owned(), json!(us.round()))).collect();
    json!({"tokens_per_second": (speed.rate * 10.0).round() / 10.0, "bound": speed.bound.words(), "microseconds": parts})
}

/// The plan as one object.
pub fn value(model: &Model, plan: &Plan) -> Value {
    let mib = |bytes: u64| bytes / MIB;
    let cards: Vec<Value> = plan
        .cards
        .iter()
        .map(|card| {
            json!({
                "name": card.name, "first_layer": card.layers.0, "layers": card.layers.1 - card.layers.0,
                "total_mib": mib(card.total), "free_mib": mib(card.free), "dense_mib": mib(card.dense),
                "context_mib": mib(card.context), "compute_mib": mib(card.compute), "draft_mib": mib(card.draft),
                "cache_mib": mib(card.arena), "lent_to_passes_mib": mib(card.lent), "experts_mib": mib(card.experts), "slots": card.slots, "experts": card.blocks,
                "expected_hits": card.hits, "utilisation": card.utilisation(),
            })
        })
        .collect();
    let stock = plan.stock.as_ref().map(|stock| {
        json!({
            "fits": stock.fits, "gpu_layers": stock.gpu_layers, "cpu_expert_layers": stock.cpu_experts.len(), "batch": stock.batch,
            "card_mib": stock.cards.iter().map(|card| mib(card.bytes)).collect::<Vec<_>>(), "decode": speed(&stock.decode),
            "prompt": speed(&stock.prompt), "arguments": arguments::stock(plan, stock),
        })
    });
    let choices: Vec<Value> = plan
        .choices
        .iter()
        .map(|choice| json!({"what": choice.what, "value": choice.value, "reason": choice.reason}))
        .collect();
    json!({
        "model": {
            "architecture": model.shape.architecture, "layers": model.layers.len(), "experts_mib": mib(model.expert_bytes()),
            "dense_mib": mib(model.dense_bytes()), "tables_mib": mib(model.input_bytes), "train_context": model.train_context,
        },
        "mode": mode(plan.mode), "plugin": plan.helps, "fits": plan.fits, "context": plan.context, "batch": plan.batch, "threads": plan.threads,
        "pin_budget_mib": mib(plan.pin_budget), "load": if plan.load == LoadMode::Mapped { "mmap" } else { "none" },
        "expected_hits": plan.hits.map(|(hits, _)| hits), "hits_rest_on": plan.hits.map(|(_, rest)| ground(rest)),
        "cards": cards, "decode": plan.decode.as_ref().map(speed), "prompt": plan.prompt.as_ref().map(speed), "stock": stock,
        "arguments": arguments::chosen(plan), "choices": choices, "warnings": plan.warnings,
    })
}
