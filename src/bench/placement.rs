//! How much memory a share of the experts is, and what stock puts there with the same memory.
//!
//! Owns: the size of the cache for a share, and the number of layers whose experts stock keeps in RAM (`-ncmoe`).
//! Invariants: stock's experts on the device never take more than our cache; with one layer more they would.
//! Threads: none. Does not: measure.

use std::collections::BTreeMap;

use crate::model::moe::{ExpertLayer, MoeShape};

/// Slots of zeros that the cache keeps for each kind of experts.
const ZERO_SLOTS: u64 = 16;
/// Zeros behind the slots, and rounding.
const PADDING: f64 = 1.003;
const MIB: u64 = 1 << 20;

/// The cache in MiB that holds this share (0 to 1) of a model's experts, with what belongs to it.
pub fn cache_mib(shape: &MoeShape, share: f64) -> u64 {
    let kinds: BTreeMap<_, u64> = shape.expert_layers.iter().map(|layer| (&layer.kind, layer.expert_bytes())).collect();
    let zeros: u64 = kinds.values().map(|bytes| ZERO_SLOTS.saturating_mul(*bytes)).fold(0, u64::saturating_add);
    let bytes = share.clamp(0.0, 1.0) * shape.expert_bytes() as f64 * PADDING + zeros as f64;
    whole((bytes / MIB as f64).ceil()).max(1)
}

/// The share of the experts that a cache of so many MiB is made for: the reverse of [`cache_mib`], within rounding.
pub fn share_of(shape: &MoeShape, mib: u64) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..40 {
        let middle = f64::midpoint(low, high);
        if cache_mib(shape, middle) <= mib {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}

/// What `-ncmoe` is for stock, so that the experts of the other layers take at most so many MiB.
pub fn cpu_layers(shape: &MoeShape, mib: u64) -> u32 {
    let budget = mib.saturating_mul(MIB);
    let mut used = 0_u64;
    for layer in shape.expert_layers.iter().rev() {
        used = used.saturating_add(layer.bytes);
        if used > budget {
            return layer.layer.saturating_add(1);
        }
    }
    0
}

/// Bytes of experts that `-ncmoe` leaves on the device.
pub fn device_bytes(shape: &MoeShape, cpu_layers: u32) -> u64 {
    let stays = |layer: &&ExpertLayer| layer.layer >= cpu_layers;
    shape.expert_layers.iter().filter(stays).map(|layer| layer.bytes).sum()
}

/// What is left for experts of so many MiB in all, beside the dense weights and `beside_mib` for context and computing.
pub fn cache_of_total(shape: &MoeShape, vram_mib: u64, beside_mib: u64) -> Option<u64> {
    let dense = shape.dense_bytes.div_ceil(MIB);
    vram_mib.checked_sub(dense)?.checked_sub(beside_mib).filter(|mib| *mib > 0)
}

/// A number that is known to be whole and not negative.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the cast saturates, and the value is a size"
)]
fn whole(value: f64) -> u64 {
    value as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shape(layers: &[u64]) -> MoeShape {
        let expert_layers = layers
            .iter()
            .zip(0_u32..)
            .filter(|(bytes, _)| **bytes > 0)
            .map(|(bytes, layer)| ExpertLayer { layer, experts: 128, bytes: *bytes, kind: vec![(12, 1, 1)] })
            .collect();
        MoeShape {
            architecture: "x".into(),
            layers: u32::try_from(layers.len()).unwrap(),
            used: 8,
            expert_layers,
            dense_bytes: 700 * MIB + 1,
            input_bytes: 0,
        }
    }

    /// 48 layers of 324 MiB, as in a 30B-A3B model.
    #[test]
    fn a_model_of_48_layers() {
        let shape = shape(&[324 * MIB; 48]);
        let mib = cache_mib(&shape, 0.2);
        assert_eq!(mib, 3161, "3110.4 MiB, 0.3% of padding and 16 experts of 2.53 MiB");
        assert_eq!(cpu_layers(&shape, mib), 39, "nine layers fit, ten take 3240 MiB");
        assert_eq!(device_bytes(&shape, 39), 9 * 324 * MIB);
        assert_eq!(cpu_layers(&shape, cache_mib(&shape, 1.0)), 0);
        assert_eq!((cpu_layers(&shape, 323), cpu_layers(&shape, 324)), (48, 47));
        assert!((share_of(&shape, mib) - 0.2).abs() < 0.001);
        assert_eq!(cache_of_total(&shape, 4096, 512), Some(4096 - 701 - 512));
        assert_eq!(cache_of_total(&shape, 1000, 512), None);
    }

    proptest! {
        #[test]
        fn stock_gets_as_much_as_fits(layers in proptest::collection::vec(0_u64..1 << 32, 1..60), mib in 0_u64..200_000) {
            let shape = shape(&layers);
            let number = cpu_layers(&shape, mib);
            prop_assert!(device_bytes(&shape, number) <= mib * MIB);
            prop_assert!(number == 0 || device_bytes(&shape, number - 1) > mib * MIB);
        }

        #[test]
        fn more_share_is_more_memory(layers in proptest::collection::vec(0_u64..1 << 32, 1..60), a in 0.0_f64..1.0, b in 0.0_f64..1.0) {
            let shape = shape(&layers);
            prop_assert!(cache_mib(&shape, a.min(b)) <= cache_mib(&shape, a.max(b)));
            prop_assert!(cache_mib(&shape, 1.0) * MIB >= shape.expert_bytes());
        }
    }
}
