//! Keys that have no effect beside others, or over an inner device.
//!
//! Owns: which keys those are, and the words for them.
//! Invariants: only keys that the user set are named; settings stay as they are. Threads: none; everything here is a pure function.
//! Does not: resolve anything (`experts::settle` does), or know devices (`device` says what it lacks).

use super::{CacheSize, Config, MiddlePasses, Notice, PolicyOrder, StateFile};

/// Keys about a cache.
const OF_CACHE: [&str; 13] = [
    "threads",
    "prompt-threads",
    "policy",
    "window",
    "admit",
    "swaps-per-step",
    "wait-swaps",
    "swap-lead",
    "upload-share",
    "upload-chunk-kb",
    "governor",
    "retest",
    "state-file",
];

/// What an inner device lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lacking {
    /// A cache, as long as its size is left open.
    pub(crate) cache: bool,
    /// Memory that is pinned for it.
    pub(crate) pins: bool,
}

impl Config {
    /// Those of these keys that were set, and that ask for something.
    fn asking(&self, names: &[&'static str]) -> Vec<&'static str> {
        let asks = |name: &str| match name {
            "governor" => self.experts.governor == Some(true),
            "wait-swaps" => self.experts.wait_swaps == Some(true),
            "state-file" => self.experts.state_file != Some(StateFile::Off),
            "lend" => self.lend,
            _ => true,
        };
        names.iter().copied().filter(|name| self.is_given(name) && asks(name)).collect()
    }

    /// The keys that have no effect over a device that lacks something, in one line.
    pub(crate) fn idle_over(&self, lacking: Lacking) -> Option<String> {
        let mut parts = Vec::new();
        // Without a cache for other reasons another line has been told.
        if lacking.cache && self.cache == CacheSize::Auto {
            let mut keys = if self.is_given("cache") { vec!["cache=auto"] } else { Vec::new() };
            keys.extend(self.asking(&OF_CACHE));
            keys.extend(self.asking(&["lend", "vram-reserve-mb"]));
            if !keys.is_empty() {
                let keys = keys.join(", ");
                parts.push(format!("{keys} (there is a cache over it only with cache=MIB or vram-budget-mb=MIB)"));
            }
        }
        if lacking.pins && self.pin_budget_mb.is_some_and(|mib| mib > 0) {
            parts.push("pin-budget-mb (memory is pinned for CUDA devices only)".to_owned());
        }
        (!parts.is_empty()).then(|| parts.join("; "))
    }
}

/// The keys that have no effect beside others.
pub(super) fn idle(config: &Config) -> Vec<Notice> {
    let mut told = Vec::new();
    let mut tell = |keys: Vec<&str>, why: &str| {
        if !keys.is_empty() {
            told.push(Notice::Conflict(format!("without effect: {} ({why})", keys.join(", "))));
        }
    };
    if config.cache == CacheSize::Off {
        let mut keys = config.asking(&OF_CACHE);
        keys.extend(config.asking(&["lend"]));
        tell(keys, "cache=off: there is no cache");
        if config.middle_passes == MiddlePasses::Cpu {
            tell(vec!["middle-passes=cpu"], "cache=off: it does as middle-passes=fetch");
        }
    } else if config.experts.order == PolicyOrder::Layers {
        tell(config.asking(&["window", "admit", "governor", "retest"]), "policy=layers leaves nothing to choose");
    } else if config.experts.governor == Some(false) {
        tell(config.asking(&["retest"]), "governor=off never leaves the cache");
    }
    if !config.lend && config.debug_map_all {
        tell(vec!["debug-map-all"], "lend=off");
    }
    if let Some(budget) = config.vram_budget_mb.filter(|budget| *budget <= config.vram_reserve_mb)
        && config.is_given("vram-reserve-mb")
        && config.cache != CacheSize::Off
    {
        told.push(Notice::Conflict(format!(
            "there is no cache: vram-reserve-mb={} leaves nothing of vram-budget-mb={budget}",
            config.vram_reserve_mb
        )));
    }
    told
}

#[cfg(test)]
mod tests {
    use super::super::parse;
    use super::*;

    fn told(text: &str) -> String {
        let lines: Vec<String> = parse(text).1.iter().map(ToString::to_string).collect();
        lines.join("\n")
    }

    #[test]
    fn keys_that_others_make_idle_are_told() {
        for (text, line) in [
            (
                "cache=off;policy=window;threads=3;lend=on;governor=off;state-file=off",
                "without effect: threads, policy, lend (cache=off: there is no cache)",
            ),
            ("moe-expert-cache=0;upload-share=0.5", "without effect: upload-share (cache=off"),
            ("cache=off;middle-passes=cpu", "without effect: middle-passes=cpu (cache=off: it does as"),
            ("policy=layers;governor=on;window=9", "without effect: window, governor (policy=layers"),
            ("governor=off;retest=5", "without effect: retest (governor=off"),
            ("lend=off;debug-map-all=on", "without effect: debug-map-all (lend=off)"),
            ("vram-budget-mb=300;vram-reserve-mb=300", "there is no cache: vram-reserve-mb=300 leaves nothing"),
        ] {
            let all = told(text);
            assert!(all.starts_with(&format!("settings: {line}")) && all.lines().count() == 1, "{text}: {all}");
        }
    }

    #[test]
    fn keys_that_go_together_are_not_told() {
        for text in [
            "cache=off;governor=off;state-file=off;lend=off;wait-swaps=off",
            "policy=layers;governor=off",
            "governor=on;retest=5",
            "lend=off",
            "vram-budget-mb=13",
            "vram-budget-mb=300;vram-reserve-mb=0",
            "cache=off;vram-budget-mb=300;vram-reserve-mb=300",
            "stream-min-tokens=10;middle-passes=cpu",
        ] {
            assert_eq!(told(text), "", "{text}");
        }
    }

    #[test]
    fn keys_that_a_device_cannot_follow_are_told() {
        let all = Lacking { cache: true, pins: true };
        let of = |text: &str| parse(text).0.idle_over(all);
        assert_eq!(of("inner=CPU;log=debug"), None);
        assert_eq!(of("cache=5;policy=window;pin-budget-mb=0"), None);
        assert_eq!(
            of("cache=auto;policy=window;pin-budget-mb=7").unwrap(),
            "cache=auto, policy (there is a cache over it only with cache=MIB or vram-budget-mb=MIB); pin-budget-mb (memory is pinned for \
             CUDA devices only)"
        );
        assert_eq!(parse("policy=window;pin-budget-mb=7").0.idle_over(Lacking::default()), None);
    }
}
