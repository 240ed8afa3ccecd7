//! The keys of passes of more than 8 tokens; part of the table in `keys`.

use super::keys::Key;
use super::{MiddlePasses, SliceTokens};

pub(super) const STREAM_MIN_TOKENS: Key = Key {
    name: "stream-min-tokens",
    default: "auto",
    unit: "tokens",
    range: "auto, or 9 to 1000000000",
    effect: "Tokens of a pass from which on the experts of a layer are brought to the device as a whole, while it computes the layers before: those that the cache holds from there, the others from RAM. Shorter passes do what middle-passes says. auto: as many as make that faster than anything else, by the measured speed of the link and of the processor; the number is told. With a number, passes of that many tokens and more are never computed in RAM.",
    reason: "It depends on the link, the processor, the size of experts and how many of them a token uses.",
    test_only: false,
    apply: |config, value| {
        config.stream_min_tokens = match value {
            "auto" => None,
            number => Some(number.parse().ok().filter(|tokens| (9..=1_000_000_000).contains(tokens)).ok_or(())?),
        };
        Ok(())
    },
};

pub(super) const MIDDLE_PASSES: Key = Key {
    name: "middle-passes",
    default: "auto",
    unit: "-",
    range: "auto, fetch, cpu, place",
    effect: "What passes of 9 tokens up to stream-min-tokens do. fetch: each layer waits for the ids of its experts and brings those that are used. cpu: the device computes with what the cache holds while the processor computes the rest (up to 32 tokens and 256 uses of experts in a layer, with a cache; otherwise as fetch). place: the device reads experts in RAM, over the link; those that it cannot read there are copied before each product. auto: fetch or cpu, whichever the measured speeds make faster; place over the CPU.",
    reason: "Few tokens use few experts: the processor is nearer to them than a slow link.",
    test_only: false,
    apply: |config, value| {
        config.middle_passes = match value {
            "auto" => MiddlePasses::Auto,
            "fetch" => MiddlePasses::Fetch,
            "cpu" => MiddlePasses::Cpu,
            "place" => MiddlePasses::Place,
            _ => return Err(()),
        };
        Ok(())
    },
};

pub(super) const SLICE_TOKENS: Key = Key {
    name: "slice-tokens",
    default: "auto",
    unit: "tokens",
    range: "auto, off, or 32 to 1000000000",
    effect: "The most tokens that a block of experts computes at once in a pass whose experts are brought. A longer pass computes each block slice by slice, and what lies between its first product and the sum over its experts, most of the memory for computing in a long pass, is there for one slice only: so much less is taken from the cache. auto: as many as give each expert 256 rows, where that saves 64 MiB or more and the link is what the pass waits for, by the figures that are told; and where there is no memory for all tokens at once. off: all tokens at once.",
    reason: "Each expert that the cache keeps does not come over the link. Shorter slices would be computed slower; a slice rounds as a micro-batch (-ub) of its length does.",
    test_only: false,
    apply: |config, value| {
        config.slice_tokens = match value {
            "auto" => SliceTokens::Auto,
            "off" | "0" => SliceTokens::Off,
            number => {
                SliceTokens::Most(number.parse().ok().filter(|most| (32..=1_000_000_000).contains(most)).ok_or(())?)
            }
        };
        Ok(())
    },
};
