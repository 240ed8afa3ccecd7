//! A plan as arguments of llama.cpp.
//!
//! Owns: both lines: stock's placement, as llama-fit-params prints one, and what the plugin's host is started with.
//! Threads: none. Does not: quote for a shell; no word here needs it but the one of `-ot`, which is quoted.

use super::choose::{LoadMode, Mode, Plan};
use super::stock::StockPlan;

/// Arguments that reproduce the best placement of stock.
pub fn stock(plan: &Plan, stock: &StockPlan) -> String {
    let mut words = vec![format!("-c {}", plan.context), format!("-ngl {}", stock.gpu_layers)];
    if stock.cards.len() > 1 {
        let last = stock.cards.len() - 1;
        let counts = stock.cards.iter().enumerate().map(|(number, card)| {
            // The output counts as one more layer of the last card.
            (card.layers.1 - card.layers.0 + usize::from(number == last)).to_string()
        });
        words.push(format!("-ts {}", counts.collect::<Vec<_>>().join(",")));
    }
    let mut patterns = Vec::new();
    if let Some((layer, parts)) = stock.partial {
        let names = if parts > 1 { "down" } else { "gate|gate_up|down" };
        patterns.push(format!("blk\\.{layer}\\.ffn_({names}).*=CPU"));
    }
    if !stock.cpu_experts.is_empty() {
        let layers: Vec<String> = stock.cpu_experts.iter().map(usize::to_string).collect();
        patterns.push(format!("blk\\.({})\\.ffn_(up|down|gate_up|gate)_(ch|)exps=CPU", layers.join("|")));
    }
    if !patterns.is_empty() {
        words.push(format!("-ot \"{}\"", patterns.join(",")));
    }
    words.push(beside(plan, stock.batch));
    // Experts that are read, not mapped, lie in pinned memory, which is what their speed was predicted for.
    if plan.load == LoadMode::Read && (stock.partial.is_some() || !stock.cpu_experts.is_empty()) {
        words.push("-lm none".to_owned());
    }
    words.join(" ")
}

/// Arguments for a host with the plugin.
pub fn ours(plan: &Plan) -> String {
    let devices: Vec<String> = (0..plan.cards.len()).map(|number| format!("MoE{number}")).collect();
    let mut words = vec![format!("--device {}", devices.join(",")), format!("-c {}", plan.context)];
    if plan.cards.len() > 1 {
        let last = plan.cards.len() - 1;
        let counts = plan
            .cards
            .iter()
            .enumerate()
            .map(|(number, card)| (card.layers.1 - card.layers.0 + usize::from(number == last)).to_string());
        words.push(format!("-ngl 999 -ts {}", counts.collect::<Vec<_>>().join(",")));
    }
    if plan.fit_off {
        words.push("--fit off".to_owned());
    }
    words.push(beside(plan, plan.batch));
    words.join(" ")
}

fn beside(plan: &Plan, batch: u64) -> String {
    let load = if plan.load == LoadMode::Mapped { " -lm mmap" } else { "" };
    // A batch must hold a micro-batch; 2048 is llama.cpp's own.
    let whole = if batch > 2048 { format!(" -b {batch}") } else { String::new() };
    format!("-ub {batch}{whole} -t {}{load}", plan.threads)
}

/// The arguments of the plan itself.
pub fn chosen(plan: &Plan) -> Option<String> {
    match (plan.mode, &plan.stock) {
        (Mode::Cache, _) => Some(ours(plan)),
        (Mode::Stock, Some(placement)) => Some(stock(plan, placement)),
        (Mode::Stock, None) => Some(format!("-c {} -ngl 0 {}", plan.context, beside(plan, plan.batch))),
        (Mode::Refused, _) => None,
    }
}
