//! The best placement with llama.cpp's own flags.
//!
//! Owns: [`StockPlan`]: which layers lie on which card, which of them keep their experts in RAM, and one layer of which a part does. The
//! meanings are those of llama.cpp's own fitting (`--fit`, `--fit-target`, `--fit-ctx`): dense weights first, then whole layers of experts
//! from the first layer on, then a part of one more; a margin stays free on each card.
//! Invariants: no card is given more than it has free less its margin, unless flags of the user's ask for it; then `fits` is false.
//! Threads: none. Does not: choose a context.

use super::choose::LoadMode;
use super::machine::Machine;
use super::memory::{compute_bytes, context_bytes};
use super::model::Model;
use super::prompts::{Ways, prompt};
use super::room::{CardRoom, rooms};
use super::speed::{Engine, Place, Setting, Speed, decode};
use super::usage::Usage;
use super::{Card, cards};

/// Micro-batches that are tried.
pub const BATCHES: [u64; 6] = [512, 1024, 2048, 4096, 8192, 12288];

/// One card.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StockCard {
    /// Its first layer and the one behind its last.
    pub layers: (usize, usize),
    /// Bytes taken.
    pub bytes: u64,
}

/// A placement.
#[derive(Clone, Debug, PartialEq)]
pub struct StockPlan {
    /// Layers on cards, with the output as one (`-ngl`).
    pub gpu_layers: u64,
    /// For each card.
    pub cards: Vec<StockCard>,
    /// Layers on cards whose experts stay in RAM.
    pub cpu_experts: Vec<usize>,
    /// A layer whose experts lie on the card in part, and how many of their three matrices do.
    pub partial: Option<(usize, u64)>,
    /// Micro-batch.
    pub batch: u64,
    /// Whether everything fits.
    pub fits: bool,
    /// Predicted.
    pub decode: Speed,
    /// Predicted.
    pub prompt: Speed,
}

impl StockPlan {
    /// Whether everything lies on cards.
    pub fn is_whole(&self, model: &Model) -> bool {
        self.cpu_experts.is_empty() && self.partial.is_none() && self.gpu_layers > model.layers.len() as u64
    }
}

/// What is asked in one try.
struct Try<'a> {
    model: &'a Model,
    usage: &'a Usage,
    rooms: &'a [CardRoom<'a>],
    context: u64,
    batch: u64,
}

/// Where layers went.
struct Assigned {
    cards: Vec<StockCard>,
    /// The first layer on a card.
    first: usize,
}

impl Try<'_> {
    /// Bytes of a layer on a card.
    fn layer(&self, layer: usize, with_experts: bool) -> u64 {
        let kept = context_bytes(self.model, layer, layer + 1, self.usage, self.context, self.batch);
        let own = &self.model.layers[layer];
        kept.saturating_add(own.dense_bytes).saturating_add(if with_experts { own.expert_bytes } else { 0 })
    }

    /// Layers from `first` on to cards in order, with experts where `full` says so. `forced` gives the last card what fits nowhere.
    fn assign(&self, first: usize, full: &dyn Fn(usize) -> bool, forced: bool) -> Option<Assigned> {
        let count = self.model.layers.len();
        let last = self.rooms.len().checked_sub(1)?;
        let mut cards = vec![StockCard::default(); self.rooms.len()];
        let mut at = first;
        for (number, room) in self.rooms.iter().enumerate() {
            let output = number == last;
            let fixed = compute_bytes(self.model, self.usage, self.context, self.batch, output)
                .saturating_add(if output { self.model.output_bytes } else { 0 })
                .saturating_add(room.draft);
            let mut bytes = fixed;
            let from = at;
            while at < count {
                let more = bytes.saturating_add(self.layer(at, full(at)));
                if more > room.bytes && !(output && forced) {
                    break;
                }
                bytes = more;
                at += 1;
            }
            let empty = at == from && !output;
            cards[number] = StockCard { layers: (from, at), bytes: if empty { 0 } else { bytes } };
            if bytes > room.bytes && !empty && !(output && forced) {
                return None;
            }
        }
        (at == count).then_some(Assigned { cards, first })
    }

    /// The best that fits.
    fn best(&self) -> Option<(Assigned, usize)> {
        let count = self.model.layers.len();
        // Whole layers of experts, from the first layer on, as many as fit: fewer always fit where more do.
        let (mut low, mut high) = (0, count + 1);
        let with = |number: usize| self.assign(0, &|layer| layer < number, false);
        if let Some(found) = with(0) {
            let mut best = found;
            while high - low > 1 {
                let middle = usize::midpoint(low, high);
                match with(middle) {
                    Some(found) => (low, best) = (middle, found),
                    None => high = middle,
                }
            }
            return Some((best, low.min(count)));
        }
        // Not even the dense weights fit: the last layers only.
        (1..=count).find_map(|first| Some((self.assign(first, &|_| false, false)?, first)))
    }

    fn plan(&self, machine: &Machine, used: &[&Card], threads: u64) -> Option<StockPlan> {
        let count = self.model.layers.len();
        let asked = self.usage.layers.is_some() || self.usage.cpu_experts.is_some();
        let (assigned, full, fits): (_, Box<dyn Fn(usize) -> bool>, _) = if asked {
            let layers = usize::try_from(self.usage.layers.unwrap_or(u64::MAX)).unwrap_or(usize::MAX);
            let first = (count + 1).saturating_sub(layers).min(count);
            let on_cpu = usize::try_from(self.usage.cpu_experts.unwrap_or(0)).unwrap_or(usize::MAX);
            let full = move |layer: usize| layer >= on_cpu;
            let free = self.assign(first, &full, false);
            let fits = free.is_some();
            (free.or_else(|| self.assign(first, &full, true))?, Box::new(full), fits)
        } else {
            let (assigned, number) = self.best()?;
            let first = assigned.first;
            (assigned, Box::new(move |layer: usize| first == 0 && layer < number), true)
        };
        let has_experts = |layer: usize| self.model.layers[layer].expert_bytes > 0;
        let mut cpu_experts: Vec<usize> =
            (assigned.first..count).filter(|layer| has_experts(*layer) && !full(*layer)).collect();
        let Assigned { mut cards, first } = assigned;
        let partial = if asked || first > 0 { None } else { self.partial(&mut cards, &cpu_experts) };
        if let Some((layer, _)) = partial {
            cpu_experts.retain(|number| *number != layer);
        }
        let place = |layer: usize| {
            let card = cards.iter().position(|card| (card.layers.0..card.layers.1).contains(&layer));
            let on_card = match partial {
                Some((number, parts)) if number == layer => parts as f64 / 3.0,
                _ if card.is_none() || cpu_experts.contains(&layer) => 0.0,
                _ => 1.0,
            };
            Place { card, found: on_card, held: on_card }
        };
        let places: Vec<Place> = (0..count).map(place).collect();
        let abilities: Vec<_> = used.iter().map(|card| (cards::ability(&card.description), card.link_gbs)).collect();
        let setting = Setting {
            model: self.model,
            machine,
            cards: &abilities,
            places: &places,
            output: self.rooms.len().checked_sub(1).filter(|_| first < count || asked),
            threads,
            engine: Engine::Stock,
            touched: self.usage.touched,
            ways: Ways { pageable: self.usage.load == Some(LoadMode::Mapped), ..Ways::default() },
        };
        Some(StockPlan {
            gpu_layers: (count - first) as u64 + 1,
            cpu_experts,
            partial,
            batch: self.batch,
            fits,
            decode: decode(&setting),
            prompt: prompt(&setting, self.usage.request().0, self.batch),
            cards,
        })
    }

    /// A part of one more layer's experts: its two first matrices, or one.
    fn partial(&self, cards: &mut [StockCard], cpu_experts: &[usize]) -> Option<(usize, u64)> {
        let layer = *cpu_experts.first()?;
        let number = cards.iter().position(|card| (card.layers.0..card.layers.1).contains(&layer))?;
        let experts = self.model.layers[layer].expert_bytes;
        let parts = [2, 1]
            .into_iter()
            .find(|parts| cards[number].bytes.saturating_add(experts / 3 * parts) <= self.rooms[number].bytes)?;
        cards[number].bytes = cards[number].bytes.saturating_add(experts / 3 * parts);
        Some((layer, parts))
    }
}

/// Seconds that a request takes.
pub fn request_seconds(usage: &Usage, prompt: &Speed, decode: &Speed) -> f64 {
    usage.request().0 as f64 / prompt.rate.max(1e-9) + usage.request().1 as f64 / decode.rate.max(1e-9)
}

/// Everything on the processors.
fn without_cards(model: &Model, machine: &Machine, usage: &Usage, threads: u64) -> StockPlan {
    let places = vec![Place { card: None, found: 0.0, held: 0.0 }; model.layers.len()];
    let setting = Setting {
        model,
        machine,
        cards: &[],
        places: &places,
        output: None,
        threads,
        engine: Engine::Stock,
        touched: usage.touched,
        ways: Ways::default(),
    };
    let batch = usage.batch.unwrap_or(512);
    StockPlan {
        gpu_layers: 0,
        cards: Vec::new(),
        cpu_experts: Vec::new(),
        partial: None,
        batch,
        fits: true,
        decode: decode(&setting),
        prompt: prompt(&setting, usage.request().0, batch),
    }
}

/// The best placement with this context; `None` if not even the buffers for computing fit.
pub fn stock(
    model: &Model,
    machine: &Machine,
    used: &[&Card],
    usage: &Usage,
    context: u64,
    threads: u64,
) -> Option<StockPlan> {
    if used.is_empty() {
        return Some(without_cards(model, machine, usage, threads));
    }
    let rooms = rooms(used, usage, context, |card| usage.target(card));
    let batches = usage.batch.map_or_else(|| BATCHES.to_vec(), |batch| vec![batch]);
    let plans = batches.into_iter().filter_map(|batch| {
        let tried = Try { model, usage, rooms: &rooms, context, batch };
        tried.plan(machine, used, threads)
    });
    let score = |plan: &StockPlan| (!plan.fits, request_seconds(usage, &plan.prompt, &plan.decode));
    plans.min_by(|one, other| {
        let (one, other) = (score(one), score(other));
        one.0.cmp(&other.0).then(one.1.total_cmp(&other.1))
    })
}

#[cfg(test)]
mod tests {
    use super::super::{MIB, samples};
    use super::*;
    use proptest::prelude::*;

    fn card(free: u64) -> Card {
        Card { name: "CUDA0".into(), total: 1 << 38, free: free * MIB, link_gbs: 25.0, ..Card::default() }
    }

    fn machine() -> Machine {
        Machine { ram: 1 << 37, available: 1 << 37, cores: 8, cpu_gbs: 40.0, ..Machine::default() }
    }

    #[test]
    fn whole_layers_first_then_a_part_of_one() {
        let model = samples::qwen();
        let usage = Usage { batch: Some(512), ..Usage::default() };
        let full = stock(&model, &machine(), &[&card(30_000)], &usage, 8192, 8).unwrap();
        assert!(full.is_whole(&model) && full.fits);
        let some = stock(&model, &machine(), &[&card(9000)], &usage, 8192, 8).unwrap();
        // 9000 less 1024, 1035 of dense weights, 768 of keys and values and about 100: 18 layers of 324 MiB, and two thirds.
        assert_eq!(
            (some.gpu_layers, some.cpu_experts.len() + usize::from(some.partial.is_some())),
            (49, 30),
            "{some:?}"
        );
        assert!(some.decode.rate < full.decode.rate);
        let tight = stock(&model, &machine(), &[&card(2400)], &usage, 8192, 8).unwrap();
        assert!(tight.gpu_layers < 49 && tight.gpu_layers > 1, "{tight:?}");
        assert_eq!(stock(&model, &machine(), &[&card(1000)], &usage, 8192, 8), None);
    }

    #[test]
    fn two_cards_are_filled_in_order() {
        let model = samples::qwen();
        let usage = Usage { batch: Some(512), ..Usage::default() };
        let plan = stock(&model, &machine(), &[&card(6000), &card(6000)], &usage, 8192, 8).unwrap();
        assert_eq!(plan.gpu_layers, 49);
        assert!(plan.cpu_experts.iter().all(|layer| *layer >= plan.cards[1].layers.0), "{plan:?}");
        assert!(plan.cards.iter().all(|card| card.bytes > 0 && card.bytes <= 4976 * MIB));
    }

    #[test]
    fn flags_of_the_user_hold() {
        let model = samples::qwen();
        let usage = Usage { batch: Some(512), cpu_experts: Some(20), ..Usage::default() };
        let plan = stock(&model, &machine(), &[&card(30_000)], &usage, 8192, 8).unwrap();
        assert_eq!((plan.cpu_experts.len(), plan.gpu_layers, plan.fits), (20, 49, true));
        let plan = stock(&model, &machine(), &[&card(5000)], &usage, 8192, 8).unwrap();
        assert!(!plan.fits, "it would not start");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn nothing_is_given_twice_or_beyond(free in proptest::collection::vec(0_u64..20_000, 1..4), context in 512_u64..40_000) {
            let model = samples::qwen();
            let cards: Vec<Card> = free.iter().map(|free| card(*free)).collect();
            let used: Vec<&Card> = cards.iter().collect();
            let usage = Usage { batch: Some(512), ..Usage::default() };
            let Some(plan) = stock(&model, &machine(), &used, &usage, context, 8) else { return Ok(()) };
            for (given, card) in plan.cards.iter().zip(&cards) {
                prop_assert!(given.bytes <= card.free.saturating_sub(1024 * MIB));
            }
            let layers: usize = plan.cards.iter().map(|card| card.layers.1 - card.layers.0).sum();
            prop_assert_eq!(layers as u64 + 1, plan.gpu_layers);
        }
    }
}
