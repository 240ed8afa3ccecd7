//! The keys of the live cache beside its size; part of the table in `keys`.

use super::CacheSize;
use super::experts::{ExpertsFrom, PolicyOrder, StateFile};
use super::keys::Key;
use super::values::{store, store_some, switch};

pub(super) const PROMPT_THREADS: Key = Key {
    name: "prompt-threads",
    default: "threads if set, else the host's -tb",
    unit: "threads",
    range: "1 to 1024",
    effect: "Threads that compute experts in RAM in passes of more than one token (prompts, drafts that are checked, several slots at once), as -tb does for what the host computes; no more than threads may have. Long passes compute nothing in RAM.",
    reason: "As -tb is -t unless it is set.",
    test_only: false,
    apply: |config, value| {
        config.prompt_threads = Some(value.parse().ok().filter(|threads| (1..=1024).contains(threads)).ok_or(())?);
        Ok(())
    },
};

pub(super) const EXPERT_CACHE: Key = Key {
    name: "moe-expert-cache",
    default: "see cache",
    unit: "slots per layer",
    range: "-1 (cache=auto), 0 (cache=off), or a number from 1 to 65536",
    effect: "Another way to set cache: N is how many experts of each layer the cache has room for; what it holds may lie in any layer. The last of cache and moe-expert-cache holds.",
    reason: "The name and the meaning that a fork of llama.cpp uses.",
    test_only: false,
    apply: |config, value| {
        config.cache = match value.parse().map_err(|_| ())? {
            -1 => CacheSize::Auto,
            0 => CacheSize::Off,
            slots @ 1..=65_536_i64 => CacheSize::SlotsPerLayer(u32::try_from(slots).map_err(|_| ())?),
            _ => return Err(()),
        };
        Ok(())
    },
};

pub(super) const EXPERTS_FROM: Key = Key {
    name: "experts-from",
    default: "auto",
    unit: "-",
    range: "auto, ram, file",
    effect: "Where experts lie when the loader maps the model's file (-lm mmap; the default of b10434): file: they stay there, no RAM is taken for a copy; the system reads what is used and drops it when RAM is short. ram: they are copied to RAM. auto: file, unless the device reads pinned RAM in place (CUDA) and a copy fits the RAM that is free. Without a mapped file, and where the host locks the model in RAM, they are copied.",
    reason: "Pinned RAM is faster, but a model that is larger than the RAM must stay in its file.",
    test_only: false,
    apply: |config, value| {
        config.experts.from = match value {
            "auto" => ExpertsFrom::Auto,
            "ram" => ExpertsFrom::Ram,
            "file" => ExpertsFrom::File,
            _ => return Err(()),
        };
        Ok(())
    },
};

pub(super) const POLICY: Key = Key {
    name: "policy",
    default: "auto",
    unit: "-",
    range: "auto, window, frequency, layers",
    effect: "What the cache keeps: window: the experts used most in the last tokens. frequency: those used most over all tokens and runs (state-file). auto: whichever of the two finds more. layers: whole layers, the last ones first, as -ncmoe places them; nothing moves and the governor has nothing to choose.",
    reason: "No order is best for every model and subject.",
    test_only: false,
    apply: |config, value| {
        config.experts.order = match value {
            "auto" => PolicyOrder::Auto,
            "window" => PolicyOrder::Window,
            "frequency" => PolicyOrder::Frequency,
            "layers" => PolicyOrder::Layers,
            _ => return Err(()),
        };
        Ok(())
    },
};

pub(super) const WINDOW: Key = Key {
    name: "window",
    default: "64",
    unit: "tokens",
    range: "8 to 127",
    effect: "How many tokens count as recent use. The latest 3/8 of them count twice.",
    reason: "Best of those tried on the simulator's presets (docs/policy.md).",
    test_only: false,
    apply: |config, value| {
        store(&mut config.experts.window, value.parse().ok().filter(|tokens| (8..=127).contains(tokens)))
    },
};

pub(super) const ADMIT: Key = Key {
    name: "admit",
    default: "2",
    unit: "uses",
    range: "1 to 127",
    effect: "Uses within the window before an expert may take the place of another.",
    reason: "One use is often the last; an upload for it is lost.",
    test_only: false,
    apply: |config, value| store(&mut config.experts.admit, value.parse().ok().filter(|uses| (1..=127).contains(uses))),
};

pub(super) const SWAPS_PER_STEP: Key = Key {
    name: "swaps-per-step",
    default: "auto",
    unit: "experts",
    range: "auto (or -1), or 0 to 65536",
    effect: "The most experts that the policy loads after one graph of up to 8 tokens, beside those preloaded while there is room. auto: as many as upload-share allows. 0 loads nothing beside what earlier runs learned.",
    reason: "The share of the link's time says it better, for experts of any size.",
    test_only: false,
    apply: |config, value| {
        config.experts.swaps_per_step = match value {
            "auto" | "-1" => None,
            number => Some(number.parse().ok().filter(|swaps| *swaps <= 65_536).ok_or(())?),
        };
        Ok(())
    },
};

pub(super) const WAIT_SWAPS: Key = Key {
    name: "wait-swaps",
    default: "off",
    unit: "-",
    range: "on, off (or 1, 0)",
    effect: "on: a graph starts only when the uploads begun swap-lead graphs ago or earlier are complete. off: what is not complete is computed in RAM once more.",
    reason: "A missed expert costs less than waiting for its upload.",
    test_only: false,
    apply: |config, value| store_some(&mut config.experts.wait_swaps, switch(value)),
};

pub(super) const SWAP_LEAD: Key = Key {
    name: "swap-lead",
    default: "0",
    unit: "graphs",
    range: "0 to 64",
    effect: "With wait-swaps=on: how many further graphs may start before an upload is waited for; 0 waits before the next graph.",
    reason: "Who waits wants the expert in the next token.",
    test_only: false,
    apply: |config, value| store_some(&mut config.experts.swap_lead, value.parse().ok().filter(|graphs| *graphs <= 64)),
};

pub(super) const UPLOAD_SHARE: Key = Key {
    name: "upload-share",
    default: "0.25",
    unit: "share",
    range: "above 0, to 1",
    effect: "The part of the link's time that uploads may take, by the measured speed of the link and the measured time of a graph. While slots are free, as after a prompt that borrowed memory of the cache, it is up to three times as much, three quarters at most.",
    reason: "Activations and results cross the same link, and a waiting one delays every layer.",
    test_only: false,
    apply: |config, value| {
        store_some(&mut config.experts.upload_share, value.parse().ok().filter(|share| *share > 0.0 && *share <= 1.0))
    },
};

pub(super) const UPLOAD_CHUNK_KB: Key = Key {
    name: "upload-chunk-kb",
    default: "0",
    unit: "KiB",
    range: "0 to 1048576; 0 copies each matrix of an expert whole",
    effect: "The largest piece in which the cache copies an expert to the device. Between two pieces the link is free for other copies.",
    reason: "Pieces cost time of their own; experts are a few MiB at most.",
    test_only: false,
    apply: |config, value| {
        let kib: u32 = value.parse().ok().filter(|kib| *kib <= 1 << 20).ok_or(())?;
        config.experts.upload_chunk_kb = Some(kib).filter(|kib| *kib > 0);
        Ok(())
    },
};

pub(super) const GOVERNOR: Key = Key {
    name: "governor",
    default: "on",
    unit: "-",
    range: "on, off (or 1, 0)",
    effect: "on: measured times per token decide whether the device holds experts by use (the cache) or whole layers (stock mode); a change is told in one line. off: the cache, always.",
    reason: "Where routing has no locality, whole layers cost less.",
    test_only: false,
    apply: |config, value| store_some(&mut config.experts.governor, switch(value)),
};

pub(super) const RETEST: Key = Key {
    name: "retest",
    default: "2048",
    unit: "tokens",
    range: "0 to 1000000; 0 never tries again",
    effect: "Decoded tokens in stock mode until the governor tries the cache again; doubled after each try that fails.",
    reason: "A try costs a few hundred tokens of moving experts.",
    test_only: false,
    apply: |config, value| {
        store_some(&mut config.experts.retest, value.parse().ok().filter(|tokens| *tokens <= 1_000_000))
    },
};

pub(super) const STATE_FILE: Key = Key {
    name: "state-file",
    default: "moe-state.ini in llama.cpp's cache folder",
    unit: "path",
    range: "a path, or off",
    effect: "Where is kept which experts each model uses most, for the next start. llama.cpp's cache folder is $LLAMA_CACHE, or llama.cpp in $XDG_CACHE_HOME, or ~/.cache/llama.cpp. off: nothing is read or written. `ggml-moe state` shows, resets and merges such files.",
    reason: "A cache that begins with the right experts is fast from the first token.",
    test_only: false,
    apply: |config, value| {
        let file = match value {
            "" => None,
            "off" => Some(StateFile::Off),
            path => Some(StateFile::At(path.into())),
        };
        store_some(&mut config.experts.state_file, file)
    },
};

pub(super) const FIXED: Key = Key {
    name: "fixed",
    default: "off",
    unit: "-",
    range: "on, off (or 1, 0)",
    effect: "on: nothing depends on time or on earlier runs, so that two runs with the same arguments give the same text and the same counters: the state file is neither read nor written, uploads are chosen after each graph and complete before the next, the governor and measured rates are off. Needs cache=MIB or moe-expert-cache=N, and one request at a time.",
    reason: "Waiting for uploads costs speed.",
    test_only: false,
    apply: |config, value| store(&mut config.experts.fixed, switch(value)),
};

pub(super) const LINK_GBS: Key = Key {
    name: "link-gbs",
    default: "off",
    unit: "10^9 bytes per second",
    range: "0.1 to 1000",
    effect: "FOR BENCHMARKS ONLY: the link looks this slow. Each copy of 64 KiB or more to the device runs as often as it takes (a fraction of it at the end); the measured speed and the number are told. Experts are not read in place.",
    reason: "Shows what a narrower slot or an older bus would give.",
    test_only: true,
    apply: |config, value| {
        store_some(&mut config.experts.link_gbs, value.parse().ok().filter(|gbs| (0.1..=1000.0).contains(gbs)))
    },
};
