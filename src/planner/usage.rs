//! What the user wants, in llama.cpp's terms.
//!
//! Owns: [`Usage`] and its defaults, which are llama.cpp's and the plugin's.
//! Threads: none. Does not: parse a command line.

use super::choose::LoadMode;
use super::model::Model;
use super::prompts::Ways;
use super::{MIB, whole};
use crate::config::{CacheSize, Config, SliceTokens};
use crate::explicit::Standing;
use crate::model::types::Type;

/// A model that runs beside the main one.
#[derive(Clone, Debug, PartialEq)]
pub struct Draft {
    /// What it needs.
    pub model: Model,
}

/// What is wanted. `None` stands for what llama.cpp chooses, or we.
#[derive(Clone, Debug, PartialEq)]
pub struct Usage {
    /// Tokens of context, of all slots together (`-c`).
    pub context: Option<u64>,
    /// Slots (`-np`).
    pub parallel: u64,
    /// Whether slots share one cache of keys and values (`-kvu`).
    pub unified: bool,
    /// Micro-batch (`-ub`).
    pub batch: Option<u64>,
    /// Types of keys and of values (`-ctk`, `-ctv`): values and bytes of a block.
    pub types: [(u64, u64); 2],
    /// Whether attention is computed in one operation (`-fa`).
    pub flash: bool,
    /// Whether layers with a window keep everything (`--swa-full`).
    pub full_windows: bool,
    /// The draft model (`-md`).
    pub draft: Option<Draft>,
    /// Whether what is not set is fitted to the memory (`--fit`).
    pub fit: bool,
    /// Bytes that are left free on each card (`--fit-target`); the last one holds for further cards.
    pub fit_target: Vec<u64>,
    /// The least context that fitting may choose (`--fit-ctx`), per slot with a cache of its own.
    pub fit_context: u64,
    /// Layers on devices (`-ngl`).
    pub layers: Option<u64>,
    /// Layers whose experts stay in RAM (`-ncmoe`; `-cmoe` is all).
    pub cpu_experts: Option<u64>,
    /// Threads (`-t`).
    pub threads: Option<u64>,
    /// How weights are loaded (`-lm`).
    pub load: Option<LoadMode>,
    /// Size of the cache (`cache`).
    pub cache: CacheSize,
    /// Whether the size of the cache was asked for by name: it then holds beside `-ngl` and `-ncmoe`.
    pub cache_asked: bool,
    /// Bytes that the cache leaves free on each card (`vram-reserve-mb`).
    pub reserve: u64,
    /// The most bytes of a card that are taken (`vram-budget-mb`).
    pub budget: Option<u64>,
    /// The part of the memory beside dense weights that a context of unset size may take (`ctx-share`).
    pub context_share: f64,
    /// Whether memory of a long pass comes from the cache and goes back to it (`lend`).
    pub lends: bool,
    /// How long passes compute experts.
    pub slices: SliceTokens,
    /// The most bytes of RAM that are pinned (`pin-budget-mb`).
    pub pin_budget: Option<u64>,
    /// What settings decide, whatever the plan says.
    pub standing: Standing,
    /// Tokens of a pass from which on all experts of a layer are brought (`stream-min-tokens`).
    pub stream_from: Option<u64>,
    /// Experts stay in the file where it is mapped (`experts-from=file`).
    pub from_file: bool,
    /// The cache holds whole layers (`policy=layers`).
    pub whole_layers: bool,
    /// Tokens of the prompt and of the answer for which speed is weighed against memory; a long prompt that the context holds if not told.
    pub request: Option<(u64, u64)>,
    /// The part of a layer's experts that a pass of a prompt uses; from the number of experts if not told.
    pub touched: Option<f64>,
    /// How bytes reach the card in passes.
    pub ways: Ways,
    /// What a state file says of hits with room for a share of the experts: pairs of share and hits, by share.
    pub learned: Vec<(f64, f64)>,
}

impl Default for Usage {
    fn default() -> Self {
        let f16 = Type::of(1).map_or((1, 2), |kind| (kind.values, kind.bytes));
        Self {
            context: None,
            parallel: 1,
            unified: true,
            batch: None,
            types: [f16, f16],
            flash: true,
            full_windows: false,
            draft: None,
            fit: true,
            fit_target: vec![1024 * MIB],
            fit_context: 4096,
            layers: None,
            cpu_experts: None,
            threads: None,
            load: None,
            cache: CacheSize::Auto,
            cache_asked: false,
            reserve: 384 * MIB,
            budget: None,
            context_share: 0.30,
            lends: true,
            slices: SliceTokens::Auto,
            pin_budget: None,
            standing: Standing::Open,
            stream_from: None,
            from_file: false,
            whole_layers: false,
            request: None,
            touched: None,
            ways: Ways::default(),
            learned: Vec::new(),
        }
    }
}

/// More threads that fill a mask only wait for the memory that is written.
const MOST_MASK_THREADS: usize = 16;

/// The longest prompt for which passes are chosen: a longer one takes more of the same passes.
const LONG_PROMPT: u64 = 12_288;
/// Answers for which they are weighed.
const ANSWER: u64 = 512;

impl Usage {
    /// The program runs with the library preloaded, on so many processors: masks of its long passes are filled by the threads of `mask-threads`, by those
    /// that compute prompts in RAM (`prompt-threads`, `threads`, the host's `-t`), or by as many as there are processors.
    pub fn preload(&mut self, config: &Config, processors: usize) {
        let computing = config.prompt_threads.or(config.threads).map(u64::from).or(self.threads);
        let threads = match (config.mask_threads, computing) {
            (Some(threads), _) => usize::try_from(threads).unwrap_or(usize::MAX),
            (None, computing) => computing
                .map_or(processors, |threads| usize::try_from(threads).unwrap_or(usize::MAX))
                .min(MOST_MASK_THREADS),
        };
        self.ways.mask_threads = u32::try_from(threads.clamp(1, processors.max(1))).ok();
    }

    /// Tokens of the prompt and of the answer for which speed is weighed against memory.
    pub fn request(&self) -> (u64, u64) {
        self.request.unwrap_or_else(|| (LONG_PROMPT.min(self.context.unwrap_or(LONG_PROMPT)).max(1), ANSWER))
    }

    /// What is left free on a card by fitting.
    pub fn target(&self, card: usize) -> u64 {
        self.fit_target.get(card).or(self.fit_target.last()).copied().unwrap_or(1024 * MIB)
    }

    /// Sequences that have a cache of their own.
    pub fn streams(&self) -> u64 {
        if self.unified { 1 } else { self.parallel.max(1) }
    }

    /// Bytes of so many values of keys, or of values.
    pub fn bytes(&self, values: u64, kind: usize) -> u64 {
        let (per, bytes) = self.types[kind.min(1)];
        whole(values as f64 * bytes as f64 / per.max(1) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    #[test]
    fn masks_are_filled_by_the_threads_that_were_given() {
        let of = |settings: &str, host: Option<u64>, processors: usize| {
            let mut usage = Usage { threads: host, ..Usage::default() };
            usage.preload(&config::parse(settings).0, processors);
            usage.ways.mask_threads
        };
        assert_eq!(of("", None, 8), Some(8));
        assert_eq!(of("", None, 64), Some(16));
        assert_eq!(of("", Some(6), 64), Some(6), "-t");
        assert_eq!(of("", Some(6), 4), Some(4), "no more than there are");
        assert_eq!(of("threads=3", Some(6), 64), Some(3));
        assert_eq!(of("threads=3;prompt-threads=5", Some(6), 64), Some(5));
        assert_eq!(of("mask-threads=32", Some(6), 64), Some(32), "the key wins");
        assert_eq!(of("mask-threads=1", Some(6), 64), Some(1));
        assert_eq!(of("", Some(0), 0), Some(1));
    }
}
