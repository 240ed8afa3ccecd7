//! What the plugin does with the cards: its cache beside everything else.
//!
//! Owns: [`CachePlan`] for one context and one micro-batch: room, slots, expected hits and speed.
//! Invariants: a card never gives more than it has free less the reserve, in a long pass neither: what such a pass borrows is part of the cache.
//! Threads: none. Does not: compare with stock, or choose.

use std::collections::BTreeMap;

use super::machine::Machine;
use super::memory::{compute_bytes, sliced_bytes};
use super::model::Model;
use super::prompts::{Ways, prompt};
use super::room::{divided, rooms, taken};
use super::speed::{Engine, Place, Setting, Speed, decode, expert_gbs, hits_on_link};
use super::usage::Usage;
use super::{Card, CardPlan, MIB, cards, whole};
use crate::config::{CacheSize, SliceTokens};
use crate::experts::heat::Heat;
use crate::experts::policy::{Ground, expected_hits};
use crate::experts::shape::{Group, Shape};
use crate::experts::stage::unit::{Needs, shapes};
use crate::model::moe::ExpertLayer;

/// Slots of zeros that a cache keeps for each kind of experts.
const ZERO_SLOTS: u64 = 16;
/// Tokens of a pass whose memory for computing stays: those of decoding, whose results lie scattered over the pages of a long pass.
const STANDING_BATCH: u64 = 64;
/// Zeros behind slots, and rounding.
const PADDING: f64 = 1.003;

/// The plugin at work.
#[derive(Clone, Debug, PartialEq)]
pub struct CachePlan {
    /// What each card has.
    pub cards: Vec<CardPlan>,
    /// Micro-batch.
    pub batch: u64,
    /// Expected hits, of all uses.
    pub hits: f64,
    /// What that rests on.
    pub ground: Ground,
    /// Predicted.
    pub decode: Speed,
    /// Predicted.
    pub prompt: Speed,
}

/// A kind of experts: those that fit each other's slots.
struct Kind<'a> {
    layers: Vec<&'a ExpertLayer>,
    slot: u64,
}

/// What a cache of so many bytes holds of these layers.
struct Held {
    slots: u64,
    blocks: u64,
    hits: f64,
    ground: Ground,
}

/// The plugin with this context and micro-batch; `None` where the rest does not fit beside the reserve. Long passes compute experts in slices where
/// that is faster.
pub fn cache(
    model: &Model,
    machine: &Machine,
    used: &[&Card],
    usage: &Usage,
    (context, batch): (u64, u64),
    threads: u64,
) -> Option<CachePlan> {
    let at_once = Usage { slices: SliceTokens::Off, ..usage.clone() };
    let whole = with(model, machine, used, &at_once, (context, batch), threads);
    // A prompt that is no longer than a slice has none, whatever passes may be.
    let longest = batch.min(usage.request().0);
    let bytes = |usage: &Usage| sliced_bytes(model, usage, context, longest);
    if !usage.lends || bytes(usage) >= bytes(&at_once) {
        return whole;
    }
    let sliced = with(model, machine, used, usage, (context, batch), threads);
    match (whole, sliced) {
        (Some(whole), Some(sliced)) if usage.slices == SliceTokens::Auto && whole.prompt.rate >= sliced.prompt.rate => {
            Some(whole)
        }
        (whole, sliced) => sliced.or(whole),
    }
}

fn with(
    model: &Model,
    machine: &Machine,
    used: &[&Card],
    usage: &Usage,
    (context, batch): (u64, u64),
    threads: u64,
) -> Option<CachePlan> {
    let sliced = usage.lends && usage.slices != SliceTokens::Off;
    let rooms = rooms(used, usage, context, |_| usage.reserve);
    let divided = divided(model, usage, &rooms, context, batch)?;
    let last = rooms.len().checked_sub(1)?;
    let mut places = vec![Place { card: None, found: 0.0, held: 0.0 }; model.layers.len()];
    let (mut plans, mut found, mut uses, mut ground) = (Vec::new(), 0.0, 0.0, Ground::Share);
    for (number, (room, &(from, to))) in rooms.iter().zip(&divided).enumerate() {
        let own = taken(model, usage, (from, to), number == last, context, batch);
        let own_experts: Vec<&ExpertLayer> =
            model.shape.expert_layers.iter().filter(|layer| (from..to).contains(&(layer.layer as usize))).collect();
        let size = if room.card.may_cache(usage) { usage.cache } else { CacheSize::Off };
        let standing = compute_bytes(model, usage, context, batch.min(STANDING_BATCH), number == last);
        // A pass touches what it computes; the host's buffer has room for results of all of its tokens, of which a prompt wants one.
        let (pass, lent) = if usage.lends && size != CacheSize::Off {
            let pass = sliced_bytes(model, usage, context, batch).max(standing).min(own.compute);
            (pass, pass.saturating_sub(standing))
        } else {
            (own.compute, 0)
        };
        let in_pass = room
            .bytes
            .saturating_sub(own.dense.saturating_add(own.context).saturating_add(pass).saturating_add(room.draft));
        let arena = arena_bytes(&own_experts, size, in_pass.saturating_add(lent));
        let held = held(&own_experts, model, usage, arena);
        let slowest = model.layers[from..to].iter().filter(|layer| layer.experts > 0);
        let cpu = slowest.map(|layer| expert_gbs(layer, machine, threads, Engine::Ours)).fold(f64::MAX, f64::min);
        let all = held.slots >= held.blocks;
        let hits = match held.ground {
            _ if all => 1.0,
            Ground::Layers => held.hits,
            Ground::Share | Ground::Learned => hits_on_link(held.hits, cpu, room.card.link_gbs),
        };
        let share = held.slots as f64 / held.blocks.max(1) as f64;
        // A pass has the cache without what it borrows, for computing and for the experts that it brings.
        let staging = staging_bytes(model, (from, to), in_pass.saturating_add(lent));
        let share = share * arena.min(in_pass.saturating_sub(staging)) as f64 / arena.max(1) as f64;
        for place in places.get_mut(from..to).unwrap_or_default() {
            *place = Place { card: Some(number), found: hits, held: share };
        }
        let card_uses: f64 = model.layers[from..to].iter().map(|layer| layer.used as f64).sum();
        found += hits * card_uses;
        uses += card_uses;
        if held.ground != Ground::Share && held.blocks > 0 {
            ground = held.ground;
        }
        plans.push(CardPlan {
            name: room.card.name.clone(),
            layers: (from, to),
            total: room.card.total,
            free: room.card.free,
            dense: own.dense,
            context: own.context,
            compute: pass - lent,
            lent,
            draft: room.draft,
            arena,
            experts: own_experts.iter().map(|layer| layer.bytes).fold(0, u64::saturating_add),
            slots: held.slots,
            blocks: held.blocks,
            hits,
        });
    }
    let abilities: Vec<_> = used.iter().map(|card| (cards::ability(&card.description), card.link_gbs)).collect();
    let setting = Setting {
        model,
        machine,
        cards: &abilities,
        places: &places,
        output: Some(last),
        threads,
        engine: Engine::Ours,
        touched: usage.touched,
        ways: Ways { stream_from: usage.stream_from.or(usage.ways.stream_from), sliced, ..usage.ways },
    };
    Some(CachePlan {
        cards: plans,
        batch,
        hits: if uses > 0.0 { found / uses } else { 0.0 },
        ground,
        decode: decode(&setting),
        prompt: prompt(&setting, usage.request().0, batch),
    })
}

/// What a pass brings its experts into, by the plugin's own rule: buffers of a layer, or of a weight where the cache has little to lend.
fn staging_bytes(model: &Model, (from, to): (usize, usize), lendable: u64) -> u64 {
    let layers = model.layers.get(from..to).unwrap_or_default();
    let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    // Of the three matrices of a layer the largest is a third, or more where they have other types.
    let layer = layers.iter().map(|layer| layer.expert_bytes).max().unwrap_or(0);
    let needs = Needs { layer: bytes(layer), tensor: bytes(layer.div_ceil(3)) };
    shapes(needs, bytes(lendable), None).first().map_or(0, |shape| shape.total() as u64)
}

fn kinds<'a>(layers: &[&'a ExpertLayer]) -> Vec<Kind<'a>> {
    let mut kinds: BTreeMap<_, Vec<&ExpertLayer>> = BTreeMap::new();
    for layer in layers {
        kinds.entry((&layer.kind, layer.expert_bytes())).or_default().push(layer);
    }
    kinds.into_iter().map(|((_, slot), layers)| Kind { layers, slot: slot.max(1) }).collect()
}

/// What a cache takes of so many free bytes: no more than all experts with what belongs to them.
fn arena_bytes(layers: &[&ExpertLayer], size: CacheSize, free: u64) -> u64 {
    let kinds = kinds(layers);
    let zeros = kinds.iter().map(|kind| kind.slot.saturating_mul(ZERO_SLOTS)).fold(0, u64::saturating_add);
    let all = layers.iter().map(|layer| layer.bytes).fold(0, u64::saturating_add);
    let most = whole((all as f64 * PADDING).ceil()).saturating_add(zeros);
    let wanted = match size {
        CacheSize::Off => 0,
        CacheSize::Auto => most,
        CacheSize::Mib(mib) => (mib as u64).saturating_mul(MIB).min(most),
        CacheSize::SlotsPerLayer(slots) => {
            let slots = |layer: &&ExpertLayer| layer.expert_bytes().saturating_mul(u64::from(slots).min(layer.experts));
            layers.iter().map(slots).fold(zeros, u64::saturating_add).min(most)
        }
    };
    if all == 0 { 0 } else { wanted.min(free) / MIB * MIB }
}

/// Slots of each kind: the cache is divided by what all experts of a kind take.
fn held(layers: &[&ExpertLayer], model: &Model, usage: &Usage, arena: u64) -> Held {
    let kinds = kinds(layers);
    let all: f64 = layers.iter().map(|layer| layer.bytes as f64).sum();
    let (mut groups, mut slots) = (Vec::new(), Vec::new());
    for (pool, kind) in (0_u16..).zip(&kinds) {
        let bytes: f64 = kind.layers.iter().map(|layer| layer.bytes as f64).sum();
        let part = whole(arena as f64 * bytes / all.max(1.0) / PADDING);
        let blocks: u64 = kind.layers.iter().map(|layer| layer.experts).sum();
        let count = (part / kind.slot).saturating_sub(ZERO_SLOTS);
        // All of them fit where the cache is as large as it can be; rounding to whole MiB must not cost the last one.
        let count = if count + ZERO_SLOTS.min(blocks / 64 + 1) >= blocks { blocks } else { count };
        slots.push(u32::try_from(count).unwrap_or(u32::MAX));
        groups.extend(kind.layers.iter().map(|layer| {
            let used = model.layers.get(layer.layer as usize).map_or(1, |layer| layer.used);
            let experts = u32::try_from(layer.experts).unwrap_or(u32::MAX);
            Group { experts, used: u32::try_from(used.max(1)).unwrap_or(1).min(experts.max(1)), pool }
        }));
    }
    let blocks: u64 = groups.iter().map(|group| u64::from(group.experts)).sum();
    let count: u64 = slots.iter().map(|slots| u64::from(*slots)).sum();
    let none = Held { slots: count, blocks, hits: 0.0, ground: Ground::Layers };
    let Ok(shape) = Shape::new(groups) else { return none };
    if count == 0 || blocks == 0 {
        return none;
    }
    if usage.whole_layers {
        return Held { hits: count as f64 / blocks as f64, ..none };
    }
    let expected = expected_hits(&shape, &slots, &Heat::new(shape.blocks()));
    let learned = at_share(&usage.learned, count as f64 / blocks as f64).filter(|hits| *hits > expected.hits);
    match (expected.ground, learned) {
        (Ground::Share | Ground::Learned, Some(hits)) => Held { hits, ground: Ground::Learned, ..none },
        _ => Held { hits: expected.hits, ground: expected.ground, ..none },
    }
}

/// The value of a curve of pairs at a share.
fn at_share(curve: &[(f64, f64)], share: f64) -> Option<f64> {
    let above = curve.iter().position(|(known, _)| *known >= share)?;
    let (high, many) = *curve.get(above)?;
    let (low, few) = above.checked_sub(1).and_then(|below| curve.get(below)).copied().unwrap_or((0.0, 0.0));
    Some(if high > low { few + (many - few) * (share - low) / (high - low) } else { many })
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;
    use proptest::prelude::*;

    fn card(free: u64) -> Card {
        Card {
            name: "CUDA0".into(),
            description: "RTX 3090".into(),
            total: 1 << 37,
            free: free * MIB,
            link_gbs: 25.0,
            ..Card::default()
        }
    }

    fn of(free: &[u64], usage: &Usage) -> Option<CachePlan> {
        let machine = Machine { ram: 1 << 37, available: 1 << 37, cores: 8, cpu_gbs: 40.0, ..Machine::default() };
        let cards: Vec<Card> = free.iter().map(|free| card(*free)).collect();
        cache(&samples::qwen(), &machine, &cards.iter().collect::<Vec<_>>(), usage, (8192, 512), 8)
    }

    #[test]
    fn the_arena_is_what_the_rest_leaves() {
        let plan = of(&[8000], &Usage::default()).unwrap();
        let card = &plan.cards[0];
        assert_eq!((card.free - 384 * MIB - card.beside()) / MIB, card.arena / MIB);
        let share = card.slots as f64 / card.blocks as f64;
        assert!((share - card.arena as f64 / card.experts as f64).abs() < 0.01);
        assert!(plan.hits > share && plan.ground == Ground::Share);
        let learned = Usage { learned: vec![(0.2, 0.97), (1.0, 1.0)], ..Usage::default() };
        let known = of(&[8000], &learned).unwrap();
        assert!(known.hits > plan.hits && known.ground == Ground::Learned && known.decode.rate > plan.decode.rate);
    }

    #[test]
    fn sizes_that_are_asked_for() {
        let with = |cache| of(&[30_000], &Usage { cache, ..Usage::default() }).unwrap();
        assert_eq!(with(CacheSize::Mib(1000)).cards[0].arena, 1000 * MIB);
        assert_eq!(with(CacheSize::Off).cards[0].arena, 0);
        let slots = with(CacheSize::SlotsPerLayer(16)).cards[0].slots;
        assert!(slots.abs_diff(16 * 48) < 8, "{slots}");
        let all = with(CacheSize::Auto);
        assert_eq!((all.cards[0].slots, all.hits), (48 * 128, 1.0));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn more_memory_is_never_worse(free in 2300_u64..30_000, more in 0_u64..5000) {
            let usage = Usage::default();
            let (Some(one), Some(two)) = (of(&[free], &usage), of(&[free + more], &usage)) else { return Ok(()) };
            prop_assert!(two.cards[0].arena >= one.cards[0].arena && two.hits >= one.hits - 1e-9);
            prop_assert!(two.decode.rate >= one.decode.rate * 0.9999);
            let card = &one.cards[0];
            prop_assert!(card.beside() + card.arena + usage.reserve <= card.free);
        }

        #[test]
        fn cards_are_used_alike(one in 4000_u64..20_000, two in 4000_u64..20_000) {
            let Some(plan) = of(&[one, two], &Usage::default()) else { return Ok(()) };
            let shares: Vec<f64> = plan.cards.iter().map(|card| card.slots as f64 / card.blocks.max(1) as f64).collect();
            // Layers are whole, so a few percent are left.
            prop_assert!((shares[0] - shares[1]).abs() < 0.12, "{:?} {:?}", shares, plan.cards);
        }
    }
}
