//! What a buffer of the staging holds, and how many there are: the rule, by what the device can lend.
//!
//! A whole layer for each of two buffers means the fewest parts, but takes a tenth of a small card and more. One expert tensor for each buffer
//! is a third of that and less. Memory that staging takes is taken from the cache, whose experts then come over the link, so the larger
//! rings are chosen only where most of the cache stays.
//!
//! Threads: none. Does not: allocate.

use std::fmt;

/// What one buffer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// All experts of a block.
    Layer,
    /// The experts of one weight.
    Tensor,
}

impl Unit {
    /// As it is told.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Layer => "layer",
            Self::Tensor => "tensor",
        }
    }
}

/// The sizes of what passes bring, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// The experts of the largest block.
    pub(crate) layer: usize,
    /// The experts of the largest weight.
    pub(crate) tensor: usize,
}

/// A ring: so many buffers of so many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) unit: Unit,
    pub(crate) buffers: usize,
    pub(crate) bytes: usize,
}

impl Shape {
    /// Whether it has room for what passes bring.
    pub(crate) fn serves(&self, needs: Needs) -> bool {
        match self.unit {
            Unit::Layer => self.bytes >= needs.layer,
            Unit::Tensor => self.bytes >= needs.tensor,
        }
    }

    /// Bytes of all buffers; saturates.
    pub(crate) fn total(&self) -> usize {
        self.buffers.saturating_mul(self.bytes)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.unit {
            Unit::Layer => "whole layers",
            Unit::Tensor => "single tensors",
        };
        write!(f, "{what}, {} buffers of {} MiB", self.buffers, self.bytes.div_ceil(1 << 20))
    }
}

/// The rings in the order in which they are wanted, each with the part of what can be lent that it may take, in percent.
const RINGS: [(Unit, usize, usize); 3] = [(Unit::Layer, 2, 50), (Unit::Tensor, 3, 75), (Unit::Tensor, 2, 100)];

/// The rings for which there is room, the best first. `lendable` is what the cache has or is free, less the reserve; `only` is for tests: the
/// unit and the number of buffers.
pub(crate) fn shapes(needs: Needs, lendable: usize, only: Option<(Unit, usize)>) -> Vec<Shape> {
    let fits = |(unit, buffers, percent): (Unit, usize, usize)| {
        let bytes = match unit {
            Unit::Layer => needs.layer,
            Unit::Tensor => needs.tensor,
        };
        let shape = Shape { unit, buffers, bytes };
        (shape.total() <= lendable / 100 * percent + lendable % 100 * percent / 100).then_some(shape)
    };
    let wanted = |shape: &Shape| only.is_none_or(|only| only == (shape.unit, shape.buffers));
    RINGS.into_iter().filter_map(fits).filter(wanted).collect()
}

/// Why a ring was chosen, in words.
pub(crate) fn reason(shape: Shape, needs: Needs, lendable: usize) -> String {
    let mib = |bytes: usize| bytes.div_ceil(1 << 20);
    if lendable == usize::MAX {
        return "nothing bounds the memory of this device".to_owned();
    }
    let (layers, lendable) = (mib(needs.layer.saturating_mul(2)), mib(lendable));
    match (shape.unit, shape.buffers) {
        (Unit::Layer, _) => {
            format!(
                "two layers, {layers} MiB, are no more than half of the {lendable} MiB that the cache has or are free"
            )
        }
        (Unit::Tensor, 3) => {
            format!("two layers, {layers} MiB, are more than half of the {lendable} MiB that the cache has or are free")
        }
        (Unit::Tensor, _) => format!(
            "three tensors, {} MiB, are more than three quarters of the {lendable} MiB that the cache has or are free",
            mib(needs.tensor.saturating_mul(3))
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: usize = 1 << 20;
    const GIB: usize = 1 << 30;

    fn best(needs: Needs, lendable: usize) -> Option<(Unit, usize)> {
        shapes(needs, lendable, None).first().map(|shape| (shape.unit, shape.buffers))
    }

    #[test]
    fn whole_layers_where_they_fit_comfortably() {
        let needs = Needs { layer: 340 * MIB, tensor: 120 * MIB };
        assert_eq!(best(needs, usize::MAX), Some((Unit::Layer, 2)));
        assert_eq!(best(needs, 1360 * MIB), Some((Unit::Layer, 2)));
        assert_eq!(best(needs, 1359 * MIB), Some((Unit::Tensor, 3)));
        assert_eq!(best(needs, 480 * MIB), Some((Unit::Tensor, 3)));
        assert_eq!(best(needs, 479 * MIB), Some((Unit::Tensor, 2)));
        assert_eq!(best(needs, 240 * MIB), Some((Unit::Tensor, 2)));
        assert_eq!(best(needs, 239 * MIB), None);
        assert_eq!(best(needs, 0), None);
    }

    /// 288 experts of 8.3 MB in each of three tensors; dense weights, KV and compute buffers have 3 of 8 GiB.
    #[test]
    fn a_large_layer_on_a_small_card_goes_by_tensors() {
        let tensor = 288 * 8_300_000;
        let needs = Needs { layer: 3 * tensor, tensor };
        let lendable = 8 * GIB - 3 * GIB - 384 * MIB;
        assert_eq!(best(needs, lendable), Some((Unit::Tensor, 2)));
        assert_eq!(best(needs, 10 * GIB), Some((Unit::Tensor, 3)));
        // The same layer with 8.3 MB for an expert of all three tensors.
        let needs = Needs { layer: tensor, tensor: tensor / 3 };
        assert_eq!(best(needs, lendable), Some((Unit::Tensor, 3)));
        assert_eq!(best(needs, 24 * GIB), Some((Unit::Layer, 2)));
    }

    #[test]
    fn tests_may_ask_for_one() {
        let needs = Needs { layer: 30, tensor: 10 };
        for only in [(Unit::Layer, 2), (Unit::Tensor, 3), (Unit::Tensor, 2)] {
            let shapes = shapes(needs, 1000, Some(only));
            assert_eq!(shapes.iter().map(|shape| (shape.unit, shape.buffers)).collect::<Vec<_>>(), [only]);
        }
        assert!(shapes(needs, 50, Some((Unit::Layer, 2))).is_empty(), "also then only what fits");
    }

    proptest! {
        /// Whatever is chosen serves what is needed and fits; more memory never means smaller units.
        #[test]
        fn what_is_chosen_fits(layer in 1_usize..1 << 40, part in 1_usize..4, lendable in 0_usize..1 << 44) {
            let needs = Needs { layer, tensor: layer.div_ceil(part) };
            let order = |lendable| shapes(needs, lendable, None).len();
            for shape in shapes(needs, lendable, None) {
                prop_assert!(shape.serves(needs) && shape.total() <= lendable);
                prop_assert!(!reason(shape, needs, lendable).is_empty());
            }
            prop_assert!(order(lendable) <= order(lendable.saturating_mul(2)));
            prop_assert!(!shapes(needs, needs.tensor * 2, None).is_empty());
        }
    }
}
