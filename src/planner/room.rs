//! What the cards have room for.
//!
//! Owns: what each card may be given ([`CardRoom`]), how layers are divided among cards, and what a draft model takes of them.
//! Invariants: layers go to cards in order, each layer to one card; what is taken never exceeds what a card may be given.
//! Threads: none. Does not: predict speed.

use super::memory::{compute_bytes, context_bytes};
use super::model::Model;
use super::usage::Usage;
use super::{Card, whole};

/// Passes for which a draft model's memory is reckoned.
const DRAFT_BATCH: u64 = 512;

/// One card.
#[derive(Clone, Debug, PartialEq)]
pub struct CardRoom<'a> {
    /// Which.
    pub card: &'a Card,
    /// Bytes that may be taken, what stays free already left out.
    pub bytes: u64,
    /// Bytes of the draft model on it.
    pub draft: u64,
}

/// The cards with what may be taken of each, when `left(number)` bytes stay free.
pub fn rooms<'a>(cards: &[&'a Card], usage: &Usage, context: u64, left: impl Fn(usize) -> u64) -> Vec<CardRoom<'a>> {
    let draft = usage.draft.as_ref().map_or(0, |draft| {
        let model = &draft.model;
        let kept = context_bytes(model, 0, model.layers.len(), usage, context, DRAFT_BATCH);
        let weights = model.dense_bytes().saturating_add(model.expert_bytes());
        kept.saturating_add(weights).saturating_add(compute_bytes(model, usage, context, DRAFT_BATCH, true))
    });
    let all: f64 = cards.iter().map(|card| card.free as f64).sum();
    let room = |(number, card): (usize, &&'a Card)| {
        let free = card.free.min(usage.budget.unwrap_or(u64::MAX));
        let part = whole((draft as f64 * card.free as f64 / all.max(1.0)).ceil());
        CardRoom { card, bytes: free.saturating_sub(left(number)), draft: part }
    };
    cards.iter().enumerate().map(room).collect()
}

/// What layers take of a card without their experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Weights.
    pub dense: u64,
    /// Keys, values, states.
    pub context: u64,
    /// The buffer for computing.
    pub compute: u64,
}

impl Taken {
    /// All of it.
    pub fn sum(self) -> u64 {
        self.dense.saturating_add(self.context).saturating_add(self.compute)
    }
}

/// What the layers `from..to` take, without experts; the output with the last ones.
pub fn taken(
    model: &Model,
    usage: &Usage,
    (from, to): (usize, usize),
    output: bool,
    context: u64,
    batch: u64,
) -> Taken {
    if from >= to && !output {
        return Taken::default();
    }
    let layers = model.layers.get(from..to).unwrap_or_default();
    let dense = layers.iter().map(|layer| layer.dense_bytes).fold(0, u64::saturating_add);
    Taken {
        dense: dense.saturating_add(if output { model.output_bytes } else { 0 }),
        context: context_bytes(model, from, to, usage, context, batch),
        compute: compute_bytes(model, usage, context, batch, output),
    }
}

/// Layers in order to cards, so that each card has room for the same part of the experts of its layers, as far as layers allow it. Returns
/// where each card's layers begin and end; `None` if the rest of the layers does not fit.
pub fn divided(
    model: &Model,
    usage: &Usage,
    rooms: &[CardRoom<'_>],
    context: u64,
    batch: u64,
) -> Option<Vec<(usize, usize)>> {
    let count = model.layers.len();
    let last = rooms.len().checked_sub(1)?;
    let fits = |number: usize, from: usize, to: usize| {
        let need = taken(model, usage, (from, to), number == last, context, batch).sum();
        need.saturating_add(rooms[number].draft) <= rooms[number].bytes
    };
    // Room of each card, less what it takes whatever layers it has.
    let net: Vec<f64> = rooms
        .iter()
        .enumerate()
        .map(|(number, room)| {
            let fixed = taken(model, usage, (0, 0), true, context, batch).compute.saturating_add(room.draft);
            let output = if number == last { model.output_bytes } else { 0 };
            room.bytes.saturating_sub(fixed.saturating_add(output)) as f64
        })
        .collect();
    let all: f64 = net.iter().sum();
    let mut out = Vec::new();
    let (mut from, mut before) = (0, 0.0);
    for (number, room) in net.iter().enumerate() {
        before += room;
        let wanted = if all > 0.0 { count as f64 * before / all } else { 0.0 };
        let mut to = usize::try_from(whole(wanted.round())).unwrap_or(count).clamp(from, count);
        if number == last {
            to = count;
        }
        while to > from && number != last && !fits(number, from, to) {
            to -= 1;
        }
        if !fits(number, from, to) && (to > from || number == last) {
            return None;
        }
        out.push((from, to));
        from = to;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::super::{MIB, samples};
    use super::*;
    use proptest::prelude::*;

    fn card(free: u64) -> Card {
        Card { name: "CUDA0".into(), total: 96 * 1024 * MIB, free: free * MIB, ..Card::default() }
    }

    #[test]
    fn two_equal_cards_share_evenly() {
        let cards = [card(8000), card(8000)];
        let model = samples::qwen();
        let usage = Usage::default();
        let rooms = rooms(&cards.iter().collect::<Vec<_>>(), &usage, 8192, |_| 384 * MIB);
        let divided = divided(&model, &usage, &rooms, 8192, 512).unwrap();
        assert!(divided[0].1.abs_diff(24) <= 1, "{divided:?}");
    }

    #[test]
    fn what_does_not_fit_is_told() {
        let model = samples::qwen();
        let cards = [card(1500)];
        let usage = Usage::default();
        let rooms = rooms(&[&cards[0]], &usage, 8192, |_| 384 * MIB);
        assert_eq!(divided(&model, &usage, &rooms, 8192, 512), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn layers_are_divided_without_gaps(free in proptest::collection::vec(0_u64..30_000, 1..5), context in 512_u64..65_536) {
            let model = samples::qwen();
            let cards: Vec<Card> = free.iter().map(|free| card(*free)).collect();
            let usage = Usage::default();
            let rooms = rooms(&cards.iter().collect::<Vec<_>>(), &usage, context, |_| 384 * MIB);
            let Some(divided) = divided(&model, &usage, &rooms, context, 512) else { return Ok(()) };
            let mut at = 0;
            for (number, (from, to)) in divided.iter().enumerate() {
                prop_assert_eq!(*from, at);
                at = *to;
                let output = number + 1 == divided.len();
                prop_assert!(taken(&model, &usage, (*from, *to), output, context, 512).sum() <= rooms[number].bytes);
            }
            prop_assert_eq!(at, 48);
        }
    }
}
