//! The choice: the plugin's cache, or stock as it is; with which context, micro-batch, threads and memory. Each with its reason.
//!
//! Owns: [`plan`] and what it returns.
//! Invariants: what the user set holds; where it cannot, the plan is refused or the stock placement says so. A cache is planned only where it
//! is predicted to serve a request faster than stock's best placement, or was asked for by name.
//! Threads: none. Does not: print.

use super::cache::{CachePlan, cache};
use super::flags::HOST_BATCH;
use super::machine::{HOST, Machine, Source};
use super::memory::compute_bytes;
use super::model::Model;
use super::room::{rooms, taken};
use super::speed::Speed;
use super::stock::{BATCHES, StockPlan, request_seconds, stock};
use super::usage::Usage;
use super::{Card, MIB, whole};
use crate::experts::policy::Ground;

/// RAM that stays free beside weights.
const RAM_SLACK: u64 = 1024 * MIB;
/// Contexts are chosen in steps of so many tokens per slot.
const CONTEXT_STEP: u64 = 256;

/// Who places the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// llama.cpp alone.
    Stock,
    /// The plugin's cache.
    Cache,
    /// It cannot run so.
    Refused,
}

/// How weights get into RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadMode {
    /// Read.
    Read,
    /// Mapped from the file.
    Mapped,
}

/// What one card holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CardPlan {
    /// The host's name of it.
    pub name: String,
    /// Its first layer, and the one behind its last.
    pub layers: (usize, usize),
    /// Bytes of memory.
    pub total: u64,
    /// Bytes free before.
    pub free: u64,
    /// Weights that are no experts.
    pub dense: u64,
    /// Keys, values and states.
    pub context: u64,
    /// The part of the buffer for computing that has memory while decoding.
    pub compute: u64,
    /// What a pass of a prompt takes for it from the cache, and gives back.
    pub lent: u64,
    /// The draft model.
    pub draft: u64,
    /// Experts.
    pub arena: u64,
    /// Bytes of all experts of its layers.
    pub experts: u64,
    /// Experts that there is room for.
    pub slots: u64,
    /// Experts of its layers.
    pub blocks: u64,
    /// Expected hits.
    pub hits: f64,
}

impl CardPlan {
    /// Bytes of everything but experts.
    pub fn beside(&self) -> u64 {
        self.dense.saturating_add(self.context).saturating_add(self.compute).saturating_add(self.draft)
    }

    /// The part of the card's memory that is in use then, others' included.
    pub fn utilisation(&self) -> f64 {
        let others = self.total.saturating_sub(self.free);
        others.saturating_add(self.beside()).saturating_add(self.arena) as f64 / self.total.max(1) as f64
    }
}

/// One choice.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// Of what.
    pub what: &'static str,
    /// The value.
    pub value: String,
    /// Why, as a sentence.
    pub reason: String,
}

/// A plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Who places the experts.
    pub mode: Mode,
    /// Whether the plugin takes part: what a preloaded library decides.
    pub helps: bool,
    /// Everything fits the cards as llama.cpp would place it by itself.
    pub fits: bool,
    /// Bytes of everything on the cards: weights, context, computing, a draft model.
    pub need: u64,
    /// The cards.
    pub cards: Vec<CardPlan>,
    /// Tokens of context.
    pub context: u64,
    /// Micro-batch.
    pub batch: u64,
    /// Threads.
    pub threads: u64,
    /// Bytes of RAM that are pinned at most.
    pub pin_budget: u64,
    /// How weights are loaded.
    pub load: LoadMode,
    /// Expected hits, and what they rest on; none without a cache.
    pub hits: Option<(f64, Ground)>,
    /// Predicted.
    pub decode: Option<Speed>,
    /// Predicted.
    pub prompt: Option<Speed>,
    /// Stock's best.
    pub stock: Option<StockPlan>,
    /// Whether llama.cpp's fitting must be off so that the context that is set does not move layers off the cards.
    pub fit_off: bool,
    /// Choices.
    pub choices: Vec<Choice>,
    /// What the user should know.
    pub warnings: Vec<String>,
    /// Why the model cannot be run here, if the mode says so; one of the warnings.
    pub refusal: Option<String>,
}

fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(MIB)
}

/// The plan for a model on a machine.
pub fn plan(model: &Model, machine: &Machine, usage: &Usage) -> Plan {
    let (cards, others) = machine.cards_and_others();
    let threads = usage.threads.unwrap_or(machine.cores).max(1);
    let host_batch = usage.batch.unwrap_or(HOST_BATCH);
    let mut usage = usage.clone();
    if !usage.fit {
        // Nobody keeps a margin then; the formula for computing may be off by so much.
        let context = usage.context.unwrap_or(model.train_context);
        usage.fit_target = vec![compute_bytes(model, &usage, context, host_batch, true) / 4];
    }
    let (context, why) = context(model, &cards, &usage);
    usage.request = Some(Usage { context: Some(context), ..usage.clone() }.request());
    let usage = &usage;
    let mut out = Plan {
        mode: Mode::Stock,
        helps: false,
        fits: false,
        need: 0,
        cards: Vec::new(),
        context,
        batch: host_batch,
        threads,
        pin_budget: 0,
        load: LoadMode::Read,
        hits: None,
        decode: None,
        prompt: None,
        stock: None,
        fit_off: false,
        choices: Vec::new(),
        refusal: None,
        warnings: others,
    };
    out.choose_ram(model, machine, usage);
    let refused = out.mode == Mode::Refused;
    // What llama.cpp would do by itself, with its own micro-batch.
    let as_host = Usage { batch: Some(host_batch), ..usage.clone() };
    let alone = stock(model, machine, &cards, &as_host, context, threads);
    out.fits = !cards.is_empty() && alone.is_some_and(|alone| alone.fits && alone.is_whole(model));
    out.need = need(model, &cards, usage, context, host_batch);
    let on_cards: &[&Card] = if cards.iter().any(|card| card.is_host()) { &[] } else { &cards };
    out.stock = stock(model, machine, on_cards, usage, context, threads);
    let best = best_cache(model, machine, &cards, usage, context, threads);
    out.choose_mode(model, machine, usage, best);
    out.choose("context", format!("{context} tokens"), why);
    out.choose_rest(model, machine, &cards, usage);
    if refused {
        (out.mode, out.decode, out.prompt, out.stock) = (Mode::Refused, None, None, None);
        out.cards.clear();
    }
    out
}

/// Bytes of everything on the cards.
fn need(model: &Model, cards: &[&Card], usage: &Usage, context: u64, batch: u64) -> u64 {
    let own = taken(model, usage, (0, model.layers.len()), true, context, batch).sum();
    let draft = rooms(cards, usage, context, |_| 0).iter().map(|room| room.draft).fold(0, u64::saturating_add);
    [own, model.expert_bytes(), draft].into_iter().fold(0, u64::saturating_add)
}

/// The micro-batch that serves a request soonest.
fn best_cache(
    model: &Model,
    machine: &Machine,
    cards: &[&Card],
    usage: &Usage,
    context: u64,
    threads: u64,
) -> Option<CachePlan> {
    // Passes that are longer than the prompt are not filled.
    let most = usage.request().0.next_multiple_of(HOST_BATCH);
    let open = || BATCHES.into_iter().filter(|batch| *batch <= most).collect();
    let batches: Vec<u64> = usage.batch.map_or_else(open, |batch| vec![batch]);
    let plans = batches.into_iter().filter_map(|batch| cache(model, machine, cards, usage, (context, batch), threads));
    let seconds = |plan: &CachePlan| request_seconds(usage, &plan.prompt, &plan.decode);
    plans.min_by(|one, other| seconds(one).total_cmp(&seconds(other)))
}

/// The context and why it is that. The rule of an unset one is llama.cpp's, with the room that the plugin reports.
pub(super) fn context(model: &Model, cards: &[&Card], usage: &Usage) -> (u64, String) {
    if let Some(context) = usage.context {
        return (context, "It was asked for.".to_owned());
    }
    let streams = usage.streams();
    let most = model.train_context.saturating_mul(streams);
    if cards.is_empty() || !usage.fit {
        return (most, "The model was trained for it.".to_owned());
    }
    let batch = usage.batch.unwrap_or(HOST_BATCH);
    let all = model.layers.len();
    // What a context takes in all, and what it may take: the part of the memory beside dense weights that the plugin reports, less the margin.
    let need = |context: u64| {
        let draft: u64 = rooms(cards, usage, context, |_| 0).iter().map(|room| room.draft).sum();
        let own = taken(model, usage, (0, all), true, context, batch);
        own.context.saturating_add(own.compute.saturating_mul(cards.len() as u64)).saturating_add(draft)
    };
    let dense = usize::try_from(model.dense_bytes() / cards.len() as u64).unwrap_or(usize::MAX);
    let may: u64 = (0..cards.len())
        .map(|number| {
            let free = cards[number].free.min(usage.budget.unwrap_or(u64::MAX)).saturating_sub(usage.reserve);
            let reported =
                crate::device::reported_free(usize::try_from(free).unwrap_or(usize::MAX), dense, usage.context_share);
            ((reported - dense) as u64).saturating_sub(usage.target(number))
        })
        .sum();
    if need(most) <= may {
        let share = 100.0 * usage.context_share;
        return (
            most,
            format!(
                "All that the model was trained for fits the {share:.0}% of the memory that a context may take (ctx-share)."
            ),
        );
    }
    let least = usage.fit_context.saturating_mul(streams).min(most);
    let step = CONTEXT_STEP * streams;
    let (mut low, mut high) = (0, (most - least) / step + 1);
    while high - low > 1 {
        let middle = u64::midpoint(low, high);
        if need(least + middle * step) <= may { low = middle } else { high = middle }
    }
    let context = least + low * step;
    let reason = format!(
        "It is not set: of {most} tokens so many fit the {} MiB that a context may take: {:.0}% of what dense weights leave (ctx-share), or 2 GiB, less the margin (fit-target); set -c for more.",
        mib(may),
        100.0 * usage.context_share
    );
    (context, reason)
}

/// The longest context with which the rest fits the cards.
pub fn longest_context(model: &Model, machine: &Machine, usage: &Usage) -> u64 {
    let (cards, _) = machine.cards_and_others();
    let batch = usage.batch.unwrap_or(HOST_BATCH);
    let fits = |context: u64| cache(model, machine, &cards, usage, (context, batch), 1).is_some();
    let (mut low, mut high) = (0_u64, model.train_context.saturating_mul(usage.streams()) / CONTEXT_STEP + 1);
    while high - low > 1 {
        let middle = u64::midpoint(low, high);
        if fits(middle * CONTEXT_STEP) { low = middle } else { high = middle }
    }
    low * CONTEXT_STEP
}

impl Plan {
    pub(super) fn choose(&mut self, what: &'static str, value: impl Into<String>, reason: impl Into<String>) {
        self.choices.push(Choice { what, value: value.into(), reason: reason.into() });
    }

    /// RAM: whether the model fits it, how it is loaded, and how much of it is pinned.
    fn choose_ram(&mut self, model: &Model, machine: &Machine, usage: &Usage) {
        let (need, room) =
            (model.expert_bytes().saturating_add(model.input_bytes).saturating_add(RAM_SLACK), machine.room());
        let limit = match machine.limit {
            Some(limit) if limit < machine.available => " (the limit of the control group)",
            _ => "",
        };
        let sizes = format!(
            "experts and tables of {} MiB with 1024 MiB beside them do not fit the {} MiB of RAM that are free{limit}",
            mib(need - RAM_SLACK),
            room / MIB
        );
        let short = need > room && model.has_experts();
        match (usage.load, short) {
            (Some(LoadMode::Read), true) => {
                self.mode = Mode::Refused;
                self.refusal = Some(format!(
                    "{sizes}, and the file is not to be mapped: allow it (-lm mmap), take a smaller quantization, or close other programs"
                ));
                self.warnings.extend(self.refusal.clone());
            }
            (None | Some(LoadMode::Mapped), true) => {
                self.load = LoadMode::Mapped;
                self.warnings.push(format!("{sizes}: they will be read from the disk again and again"));
                self.choose(
                    "load",
                    "mmap",
                    format!("{} MiB are more than the RAM has room for.", mib(need - RAM_SLACK)),
                );
            }
            (Some(load), false) => {
                self.load = load;
                self.choose("load", if load == LoadMode::Mapped { "mmap" } else { "none" }, "It was asked for.");
            }
            (None, false) => {
                self.choose("load", "none", "Everything fits the RAM, and experts that are read can be pinned.")
            }
        }
        let most = usage.pin_budget.unwrap_or(machine.usable() / 4 * 3);
        let in_file = self.load == LoadMode::Mapped && (short || usage.from_file);
        self.pin_budget = if in_file { 0 } else { most.min(model.expert_bytes()) };
    }

    pub(super) fn take(&mut self, cache: CachePlan) {
        self.mode = Mode::Cache;
        self.batch = cache.batch;
        self.hits = Some((cache.hits, cache.ground));
        // Nobody predicts how fast processors are in the place of a card.
        if cache.cards.iter().all(|card| card.name != HOST) {
            self.decode = Some(cache.decode);
            self.prompt = Some(cache.prompt);
        }
        self.cards = cache.cards;
    }

    pub(super) fn take_stock(&mut self) {
        self.mode = Mode::Stock;
        self.hits = None;
        if let Some(stock) = &self.stock {
            self.batch = stock.batch;
            self.decode = Some(stock.decode.clone());
            self.prompt = Some(stock.prompt.clone());
        }
    }

    fn choose_rest(&mut self, model: &Model, machine: &Machine, cards: &[&Card], usage: &Usage) {
        let batch = if usage.batch.is_some() {
            "It was asked for.".to_owned()
        } else if cards.is_empty() {
            "It is llama.cpp's default.".to_owned()
        } else {
            let most = |bytes: fn(&CardPlan) -> u64| self.cards.iter().map(bytes).max().unwrap_or(0);
            let (compute, lent) = (most(|card| card.compute), most(|card| card.lent));
            let room = match (compute, lent) {
                (0, 0) => String::new(),
                (_, 0) => format!(" with {} MiB of a card for computing", mib(compute)),
                _ => format!(
                    " with {} MiB of a card for computing, and {} that the cache lends to a pass",
                    mib(compute),
                    mib(lent)
                ),
            };
            format!(
                "Of {BATCHES:?} it serves a request of {} and {} tokens soonest{room}: longer passes bring experts to the card less often, but compute slower from 4096 tokens on and take memory of experts.",
                usage.request().0,
                usage.request().1
            )
        };
        self.choose("micro-batch", self.batch.to_string(), batch);
        let threads = match usage.threads {
            Some(_) => "It was asked for.".to_owned(),
            None => format!("One for each of {} cores; more only wait for the RAM.", machine.cores),
        };
        self.choose("threads", self.threads.to_string(), threads);
        if self.mode == Mode::Cache {
            let pinned = mib(self.pin_budget);
            let reason = if self.pin_budget == 0 {
                "Experts in a mapped file cannot be pinned, so copies of them are slower.".to_owned()
            } else if self.pin_budget < model.expert_bytes() {
                format!(
                    "Three quarters of the RAM, or pin-budget-mb: less than the {} MiB of experts.",
                    mib(model.expert_bytes())
                )
            } else {
                "All experts: copies of pinned memory run at the link's full rate, beside computing.".to_owned()
            };
            self.choose("pinned", format!("{pinned} MiB"), reason);
            self.warn_of_fit(model, cards, usage);
        }
        if model.missing > 0 {
            let missing = mib(model.missing);
            self.warnings.push(format!("{missing} MiB of the model's data are not in its file: no program of llama.cpp starts with it; fetch it again, or wait until it is whole"));
        }
        if self.context > model.train_context.saturating_mul(usage.streams()) {
            self.warnings.push(format!("the model was trained for a context of {} tokens", model.train_context));
        }
        let unmeasured = machine.cpu != Source::Measured || cards.iter().any(|card| card.link != Source::Measured);
        if unmeasured && !cards.is_empty() {
            self.warnings.push("speeds rest on rates that were not measured on this machine (--measure)".to_owned());
        }
    }

    /// llama.cpp's own fitting looks at what the plugin reports as free: a context that was set and is larger than that moves layers.
    fn warn_of_fit(&mut self, model: &Model, cards: &[&Card], usage: &Usage) {
        let reported = |card: &CardPlan| {
            let dense = usize::try_from(card.dense).unwrap_or(usize::MAX);
            let free = usize::try_from(card.free.saturating_sub(usage.reserve)).unwrap_or(usize::MAX);
            crate::device::reported_free(free, dense, usage.context_share) as u64
        };
        let over = |(number, card): (usize, &CardPlan)| {
            card.beside().saturating_add(card.lent).saturating_add(usage.target(number)) > reported(card)
        };
        self.fit_off = usage.fit && self.cards.iter().enumerate().any(over) && !cards.is_empty() && model.has_experts();
        if self.fit_off {
            self.choose(
                "fit",
                "off",
                "The context is larger than what the plugin reports for it (ctx-share), and fitting would move layers off the cards.",
            );
        }
    }
}

/// The longest context for a message: rounded down to thousands where it is long.
pub fn told_context(context: u64) -> u64 {
    if context > 10_000 { whole(context as f64 / 1000.0) * 1000 } else { context }
}
