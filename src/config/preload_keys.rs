//! Rows of the table of keys for the preloaded library.

use super::Key;

pub(super) const PASS_TOKENS: Key = Key {
    name: "pass-tokens",
    default: "the host's -ub",
    unit: "tokens",
    range: "host, or 32 to 65536",
    effect: "With LD_PRELOAD: the micro-batch (-ub) of a model that ggml-moe helps, and a batch (-b) no shorter. Only where neither was given; a context for embeddings keeps its own. Without LD_PRELOAD nothing: give -ub and -b.",
    reason: "A long prompt brings every expert to the device once per micro-batch, so longer ones are faster; they take more memory for intermediate results.",
    test_only: false,
    apply: |config, value| {
        config.pass_tokens = match value {
            "host" => None,
            number => Some(number.parse().ok().filter(|tokens| (32..=65_536).contains(tokens)).ok_or(())?),
        };
        Ok(())
    },
};
