//! The keys of passes of more than 8 tokens; part of the table in `keys`.

use super::MiddlePasses;
use super::keys::Key;

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
