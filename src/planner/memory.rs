//! Memory that a model takes beside its weights: keys and values, and buffers for computing.
//!
//! Owns: both formulas. They follow what llama.cpp b11434 allocates; docs/planner.md names the places and the errors found.
//! Invariants: more tokens, or a larger micro-batch, never take less.
//! Threads: none. Does not: know a card.

use super::model::{Layer, Model};
use super::usage::Usage;
use crate::config::SliceTokens;
use crate::graph::slices::most_tokens;

/// Caches are padded to so many tokens.
const PAD: u64 = 256;

/// Bytes that the layers `from..to` remember with a context of so many tokens.
pub fn context_bytes(model: &Model, from: usize, to: usize, usage: &Usage, context: u64, batch: u64) -> u64 {
    let layers = model.layers.get(from..to.min(model.layers.len())).unwrap_or_default();
    layers.iter().map(|layer| layer_bytes(layer, usage, context, batch)).fold(0, u64::saturating_add)
}

fn layer_bytes(layer: &Layer, usage: &Usage, context: u64, batch: u64) -> u64 {
    let memory = &layer.memory;
    let streams = if memory.apart { usage.parallel.max(1) } else { usage.streams() };
    let each = context.div_ceil(streams).next_multiple_of(PAD);
    let cells = match memory.window {
        Some(window) if !usage.full_windows => {
            let slots = if usage.unified && !memory.apart { usage.parallel.max(1) } else { 1 };
            each.min(window.saturating_mul(slots).saturating_add(batch)).next_multiple_of(PAD)
        }
        _ => each,
    };
    let per_token = usage
        .bytes(memory.key, 0)
        .saturating_add(usage.bytes(memory.value, 1))
        .saturating_add(usage.bytes(memory.index, 0));
    let compressed = memory.compressed.iter().map(|&(ratio, values)| {
        usage.bytes(values, 0).saturating_mul(each.div_ceil(ratio.max(1)).next_multiple_of(PAD))
    });
    let states = memory.state_bytes.saturating_mul(usage.parallel.max(1));
    let each = compressed.fold(per_token.saturating_mul(cells), u64::saturating_add);
    each.saturating_mul(streams).saturating_add(states)
}

/// Bytes of the buffer in which a pass of `batch` tokens computes, on a card that has experts' layers and maybe the output.
pub fn compute_bytes(model: &Model, usage: &Usage, context: u64, batch: u64, output: bool) -> u64 {
    bytes(model, usage, context, batch, output, None)
}

/// Those of them that a pass of the plugin touches that computes experts in slices; as many as [`compute_bytes`] where it has none.
pub fn sliced_bytes(model: &Model, usage: &Usage, context: u64, batch: u64) -> u64 {
    let experts = model.layers.iter().find(|layer| layer.used > 0);
    let most = experts.and_then(|layer| match usage.slices {
        SliceTokens::Off => None,
        SliceTokens::Auto => Some(most_tokens(layer.experts, layer.used)),
        SliceTokens::Most(most) => Some(u64::from(most)),
    });
    bytes(model, usage, context, batch, false, most.filter(|&most| most < batch))
}

/// With the tokens of a slice, if experts are computed in slices.
fn bytes(model: &Model, usage: &Usage, context: u64, batch: u64, output: bool, slice: Option<u64>) -> u64 {
    let each = context.div_ceil(usage.streams()).next_multiple_of(PAD);
    let width = model.width;
    let mut experts = 0;
    let mut windows: u64 = 0;
    let mut whole = false;
    // Cells that an indexer scores: all of them, or those that are kept of several tokens together.
    let mut scored = 0;
    let mut compressed = 0;
    for layer in &model.layers {
        // Results of all experts of a token, before and after they are weighed; or what gate, up and their product take.
        let weighed = width.saturating_mul(2);
        let inner = layer.expert_width.saturating_mul(3).saturating_add(width);
        experts = experts.max(layer.used.saturating_mul(weighed.max(inner)));
        if layer.memory.index > 0 {
            scored = each;
        }
        for &(ratio, _) in &layer.memory.compressed {
            compressed = compressed.max(each / ratio.max(1));
            scored = scored.max(compressed);
        }
        match layer.memory.window {
            Some(window) if !usage.full_windows => {
                windows = windows.max(window.saturating_add(batch).next_multiple_of(PAD))
            }
            _ => whole |= layer.memory.key > 0,
        }
    }
    let floats = match slice {
        None => experts.saturating_add(width.saturating_mul(4)),
        // What attention takes may be the most then: queries and what comes of them, beside rows of the model's width.
        Some(slice) => {
            let attention = model.heads.saturating_mul(model.head_values);
            let sliced = experts.saturating_mul(slice) / batch.max(1);
            let wide = attention.saturating_add(width.saturating_mul(5));
            sliced
                .saturating_add(width.saturating_mul(4))
                .max(wide)
                .min(experts.saturating_add(width.saturating_mul(4)))
        }
    };
    let outputs = model.vocabulary.saturating_add(width.saturating_mul(5));
    let floats = if output { floats.max(outputs) } else { floats };
    let cells = windows.min(each).saturating_add(compressed).saturating_add(if whole { each } else { 0 });
    // The mask holds halves with fused attention, and floats without; then scores of all heads come to it.
    let mask = if usage.flash { cells.saturating_mul(2) } else { cells.saturating_mul(4) };
    let scores = if usage.flash { 0 } else { each.saturating_mul(model.heads).saturating_mul(4) };
    // An indexer scores every cell, and sorts the scores.
    let indexer = scored.saturating_mul(8);
    let each_token = floats.saturating_mul(4).saturating_add(mask).saturating_add(scores).saturating_add(indexer);
    each_token.saturating_mul(batch)
}

#[cfg(test)]
mod tests {
    use super::super::{MIB, samples};
    use super::*;
    use proptest::prelude::*;

    /// MiB that llama-fit-params b11434 printed for the same shapes (`--fit-print on`): context and computing.
    #[test]
    fn as_llama_cpp_says() {
        let usage = Usage::default();
        let told = [
            (samples::qwen(), 8192, 512, 768, 96),
            (samples::qwen(), 32768, 2048, 3072, 480),
            (samples::qwen(), 32768, 8192, 3072, 1920),
            (samples::gpt_oss(), 8192, 512, 70, 104),
            (samples::gpt_oss(), 32768, 2048, 274, 519),
            (samples::gpt_oss(), 32768, 8192, 322, 2174),
            (samples::deepseek(), 8192, 512, 81, 160),
            (samples::deepseek(), 32768, 2048, 324, 736),
        ];
        for (model, context, batch, kept, computing) in told {
            let name = &model.shape.architecture;
            let bytes = context_bytes(&model, 0, model.layers.len(), &usage, context, batch);
            assert_eq!(bytes / MIB, kept, "{name} {context} {batch}");
            let ratio = compute_bytes(&model, &usage, context, batch, true) as f64 / (computing * MIB) as f64;
            assert!((0.9..1.25).contains(&ratio), "{name} {context} {batch}: {ratio}");
        }
        let large = samples::grouped(&samples::Grouped { vocabulary: 151_936, ..samples::QWEN });
        assert_eq!(compute_bytes(&large, &usage, 8192, 2048, true) / MIB, 1299);
        let plain = Usage { flash: false, ..usage };
        let ratio = compute_bytes(&samples::qwen(), &plain, 32768, 2048, true) as f64 / (8600 * MIB) as f64;
        assert!((0.9..1.15).contains(&ratio), "{ratio}");
    }

    /// What passes of 12,288 tokens touched on a card: all at once, and in slices of 4,096 (docs/measurements.md, KiB in its log).
    #[test]
    fn slices_take_what_was_measured() {
        let model = samples::grouped(&samples::QWEN);
        let usage = Usage { slices: SliceTokens::Auto, ..Usage::default() };
        for (bytes, kib) in [
            (compute_bytes(&model, &usage, 12_288, 12_288, false), 2_361_344_u64),
            (sliced_bytes(&model, &usage, 12_288, 12_288), 1_351_680),
        ] {
            let ratio = bytes as f64 / (kib << 10) as f64;
            assert!((0.85..1.15).contains(&ratio), "{ratio}");
        }
        let off = Usage { slices: SliceTokens::Off, ..usage.clone() };
        assert_eq!(sliced_bytes(&model, &off, 12_288, 12_288), compute_bytes(&model, &off, 12_288, 12_288, false));
        assert_eq!(sliced_bytes(&model, &usage, 12_288, 2048), compute_bytes(&model, &usage, 12_288, 2048, false));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn more_never_takes_less(context in 0_u64..1 << 20, batch in 1_u64..12289, slots in 1_u64..9, unified: bool) {
            let usage = Usage { parallel: slots, unified, ..Usage::default() };
            for model in [samples::gpt_oss(), samples::deepseek()] {
                let all = model.layers.len();
                let bytes = |context, batch| {
                    context_bytes(&model, 0, all, &usage, context, batch) + compute_bytes(&model, &usage, context, batch, true)
                };
                prop_assert!(bytes(context, batch) <= bytes(context + 4096, batch));
                prop_assert!(bytes(context, batch) <= bytes(context, batch + 512));
                let halves = context_bytes(&model, 0, 4, &usage, context, batch) + context_bytes(&model, 4, all, &usage, context, batch);
                prop_assert_eq!(halves, context_bytes(&model, 0, all, &usage, context, batch));
            }
        }
    }
}
