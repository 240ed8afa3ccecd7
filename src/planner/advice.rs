//! What is decided when a host is about to load a model: whether to help, and what is set that the user left alone.
//!
//! Owns: [`Advice`]. A model is helped unless everything, its context and buffers included, fits the cards as llama.cpp alone would place it.
//! Invariants: nothing is measured; the work is that of two plans. What the user set is never advised otherwise.
//! Threads: none. Does not: read files, or set anything (`preload` does).

use super::choose::{LoadMode, Plan, plan};
use super::flags::HOST_BATCH;
use super::memory::compute_bytes;
use super::model::Model;
use super::room::{rooms, taken};
use super::usage::Usage;
use super::{MIB, Machine};

/// Beside what formulas say: they were off by less.
const SLACK: u64 = 64 * MIB;

/// What to do.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// The plugin is to take part.
    pub helps: bool,
    /// Everything fits the cards without us.
    pub fits: bool,
    /// Why it stays out although not everything fits, as a sentence.
    pub reason: Option<String>,
    /// Bytes of everything on the cards: weights, context, computing, a draft model.
    pub need: u64,
    /// Tokens of context for which that is.
    pub context: u64,
    /// A micro-batch, and why; `None` leaves the host's.
    pub batch: Option<(u64, String)>,
    /// Why the file should be mapped, if so.
    pub mapped: Option<String>,
    /// Bytes of each card beside dense weights that the host may plan with: with less, its fitting would move layers off.
    pub beside: Vec<u64>,
}

/// The advice for a model on a machine: what its plan says. `None` if the header does not say enough.
pub fn advise(model: &Model, machine: &Machine, usage: &Usage) -> Option<Advice> {
    let (cards, _) = machine.cards_and_others();
    if cards.is_empty() || model.layers.is_empty() || model.width == 0 || !model.has_experts() {
        return None;
    }
    if usage.context.is_none() && model.train_context == 0 {
        return None;
    }
    let chosen = plan(model, machine, usage);
    let experts = chosen.choices.iter().find(|choice| choice.what == "experts");
    let mut advice = Advice {
        helps: chosen.helps,
        fits: chosen.fits,
        reason: experts.map(|choice| choice.reason.clone()).filter(|_| !chosen.helps && !chosen.fits),
        need: chosen.need,
        context: chosen.context,
        batch: None,
        mapped: None,
        beside: Vec::new(),
    };
    if !chosen.helps {
        return Some(advice);
    }
    let context = chosen.context;
    let prompt = Usage { context: Some(context), ..usage.clone() }.request().0;
    advice.mapped = mapped(&chosen);
    advice.batch = pass(&chosen, usage, prompt);
    // The host makes a buffer for computing on each card.
    let host_batch = usage.batch.unwrap_or(HOST_BATCH);
    let kept = taken(model, usage, (0, model.layers.len()), true, context, host_batch).context;
    let draft = rooms(&cards, usage, context, |_| 0).iter().map(|room| room.draft).fold(0, u64::saturating_add);
    let compute = compute_bytes(model, usage, context, chosen.batch.max(host_batch), true);
    let beside = |number: usize| {
        let kept = kept.saturating_add(draft) / cards.len() as u64;
        let kept = if cards.len() > 1 { kept.saturating_add(kept / 8) } else { kept };
        [kept, compute, compute / 4, usage.target(number), SLACK].into_iter().fold(0, u64::saturating_add)
    };
    advice.beside = (0..cards.len()).map(beside).collect();
    Some(advice)
}

fn mapped(plan: &Plan) -> Option<String> {
    let choice = plan.choices.iter().find(|choice| choice.what == "load")?;
    (plan.load == LoadMode::Mapped).then(|| choice.reason.clone())
}

/// The plan's micro-batch, where it is longer than the host's.
fn pass(plan: &Plan, usage: &Usage, prompt: u64) -> Option<(u64, String)> {
    if usage.batch.is_some() || plan.batch <= HOST_BATCH {
        return None;
    }
    let lent: u64 = plan.cards.iter().map(|card| card.lent).max().unwrap_or(0);
    let memory =
        if lent > 0 { format!(", with {} MiB that the cache lends them", lent.div_ceil(MIB)) } else { String::new() };
    let time = match &plan.prompt {
        Some(speed) => format!("a prompt of {prompt} should take {:.1} s so", prompt as f64 / speed.rate.max(1e-9)),
        None => format!("for a prompt of {prompt}"),
    };
    Some((plan.batch, format!("{time}{memory}")))
}

#[cfg(test)]
mod tests {
    use super::super::{Card, samples};
    use super::*;

    fn machine(free: u64, link_gbs: f64) -> Machine {
        let card = Card {
            name: "CUDA0".into(),
            description: "NVIDIA H200".into(),
            total: 1 << 38,
            free: free * MIB,
            link_gbs,
            ..Card::default()
        };
        let ram = 120 << 30;
        Machine { ram, available: ram, cores: 16, nodes: 1, cpu_gbs: 90.0, cards: vec![card], ..Machine::default() }
    }

    fn of(free: u64, link_gbs: f64, usage: &Usage) -> Advice {
        advise(&samples::qwen(), &machine(free, link_gbs), usage).unwrap()
    }

    /// Weights are 16,655 MiB, a context of 8,192 tokens 768, computing 96.
    #[test]
    fn what_fits_with_its_context_needs_no_help() {
        let with = |context: u64| Usage { context: Some(context), ..Usage::default() };
        let short = of(19_000, 53.0, &with(8192));
        assert!(short.fits && short.beside.is_empty(), "{short:?}");
        assert!((17_400..17_700).contains(&(short.need / MIB)), "{}", short.need / MIB);
        assert!(!of(19_000, 53.0, &with(32_768)).fits, "three GiB of context");
        assert!(!of(18_300, 53.0, &with(8192)).fits, "the margin of --fit-target");
        assert!(of(18_300, 53.0, &Usage { fit: false, ..with(8192) }).fits, "no margin");
        let draft = super::super::usage::Draft { model: samples::dense() };
        assert!(!of(19_000, 53.0, &Usage { draft: Some(draft), ..with(8192) }).fits, "the draft model takes the rest");
        let open = of(19_000, 53.0, &Usage::default());
        assert!(!open.fits && open.context > 8192, "what ctx-share gives it: {open:?}");
    }

    /// The H200 at 45%: 12,288 tokens were fastest at -ub 4096, and over links of 13 and 6 GB/s at 12288.
    #[test]
    fn passes_are_as_long_as_measured_to_be_best() {
        let batch = |free: u64, link: f64, context: u64| {
            let usage = Usage { context: Some(context), ..Usage::default() };
            of(free, link, &usage).batch.map(|(tokens, _)| tokens)
        };
        assert_eq!(batch(11_000, 53.0, 16_384), Some(4096));
        assert_eq!(batch(11_000, 13.0, 16_384), Some(12_288));
        assert_eq!(batch(11_000, 6.0, 16_384), Some(12_288));
        assert!(batch(11_000, 6.0, 2048).is_some_and(|tokens| tokens <= 2048), "no longer than the context");
        assert_eq!(of(11_000, 6.0, &Usage { batch: Some(256), ..Usage::default() }).batch, None, "the user's own");
    }

    /// What llama.cpp's fitting compares with what the device reports has room, so that no layer leaves the card.
    #[test]
    fn the_host_sees_room_for_passes() {
        let advice = of(11_000, 6.0, &Usage { context: Some(16_384), ..Usage::default() });
        let batch = advice.batch.clone().unwrap().0;
        let usage = Usage::default();
        let compute = compute_bytes(&samples::qwen(), &usage, 16_384, batch, true);
        assert!(advice.beside[0] > compute + 1536 * MIB + 1024 * MIB, "{advice:?}");
    }

    #[test]
    fn what_is_larger_than_the_ram_is_mapped() {
        let mut small = machine(11_000, 53.0);
        assert_eq!(advise(&samples::qwen(), &small, &Usage::default()).unwrap().mapped, None);
        small.available = 10_000 * MIB;
        let told = advise(&samples::qwen(), &small, &Usage::default()).unwrap().mapped.unwrap();
        assert!(told.contains("more than the RAM"), "{told}");
    }

    #[test]
    fn without_cards_or_experts_there_is_no_advice() {
        let none = Machine { cards: Vec::new(), ..machine(11_000, 53.0) };
        assert_eq!(advise(&samples::qwen(), &none, &Usage::default()), None);
        assert_eq!(advise(&samples::dense(), &machine(11_000, 53.0), &Usage::default()), None);
    }
}
