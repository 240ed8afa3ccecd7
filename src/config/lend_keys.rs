//! Keys about the memory of compute buffers, and what plans take for the RAM; part of the table in `keys`.

use super::keys::Key;
use super::values::{store, switch};

pub(super) const LEND: Key = Key {
    name: "lend",
    default: "on",
    unit: "-",
    range: "on, off (or 1, 0)",
    effect: "Whether intermediate results have device memory only where a pass touches them, so that a large micro-batch (-ub) takes none while decoding: a long pass takes it from the cache, which has it again when decoding goes on. Only where there may be a cache, and over CUDA devices whose memory can be mapped.",
    reason: "Otherwise -ub 4096 takes gigabytes from the experts for good.",
    test_only: false,
    apply: |config, value| store(&mut config.lend, switch(value)),
};

pub(super) const DEBUG_MAP_ALL: Key = Key {
    name: "debug-map-all",
    default: "off",
    unit: "-",
    range: "on, off (or 1, 0)",
    effect: "All of a compute buffer has memory at all times; what would have none is still refused to the host's copies.",
    reason: "Tells a range that was forgotten from other faults: with this key it does no harm.",
    test_only: true,
    apply: |config, value| store(&mut config.debug_map_all, switch(value)),
};

pub(super) const DEBUG_RAM: Key = Key {
    name: "debug-ram-mb",
    default: "what is free",
    unit: "MiB",
    range: "1 to 16777216",
    effect: "What is taken for the free RAM when a preloaded library decides how a model is loaded.",
    reason: "Shows with a small model what happens to one that is larger than the RAM.",
    test_only: true,
    apply: |config, value| {
        config.debug_ram_mb = Some(value.parse().ok().filter(|mib| (1..=16_777_216).contains(mib)).ok_or(())?);
        Ok(())
    },
};
