//! Rows of the table of keys for the preloaded library.

use super::Key;
use super::values::{store, switch};

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

pub(super) const EQUAL_PASSES: Key = Key {
    name: "equal-passes",
    default: "on",
    unit: "-",
    range: "on, off (or 1, 0)",
    effect: "With LD_PRELOAD and llama.cpp b11434: a batch that llama.cpp would run in passes of -ub tokens and a short rest runs in as many passes of equal length. Only a batch of one sequence whose outputs all lie in its last pass. Where pass-tokens or the plan sets -ub, -b becomes four times as long, because what is cut is a batch.",
    reason: "Each pass brings the experts once. A short one has too little work to hide that behind.",
    test_only: false,
    apply: |config, value| store(&mut config.equal_passes, switch(value)),
};

pub(super) const MASK_THREADS: Key = Key {
    name: "mask-threads",
    default: "auto",
    unit: "threads",
    range: "auto, or 1 to 1024",
    effect: "With LD_PRELOAD and llama.cpp b11434: threads that fill the mask of attention before a long pass of one text over a MoE device, which llama.cpp does by one. The cells are the same. auto: as many as prompt-threads or threads say, or the host's -t, or all processors; 16 at most. 1 leaves it to llama.cpp.",
    reason: "The GPU waits meanwhile: a mask of 12288 tokens takes one thread a quarter of a second.",
    test_only: false,
    apply: |config, value| {
        config.mask_threads = match value {
            "auto" => None,
            number => Some(number.parse().ok().filter(|threads| (1..=1024).contains(threads)).ok_or(())?),
        };
        Ok(())
    },
};
