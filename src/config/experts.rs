//! The settings of the live cache beside its size: what is learned, how uploads are bounded, who decides.
//!
//! Owns: [`ExpertSettings`], what holds where a key is absent, and which keys exclude each other.
//! Invariants: after [`settle`], `fixed` holds only with a cache of a given size, and nothing that depends on time or on earlier runs
//! is on with it.
//! Threads: none. Does not: know how a policy is made of it (`experts::cache` does).

use std::path::PathBuf;

use super::{CacheSize, Config, Notice};

/// The order by which blocks are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PolicyOrder {
    /// Recent use or lifetime heat, whichever finds more.
    #[default]
    Auto,
    /// Recent use.
    Window,
    /// Lifetime heat.
    Frequency,
    /// Whole layers, the last ones first.
    Layers,
}

/// Where what was learned is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StateFile {
    /// Nowhere.
    Off,
    /// In this file.
    At(PathBuf),
}

/// Whether experts are copied to RAM or stay in a file that the loader maps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertsFrom {
    /// In the file, unless they fit RAM that the device reads in place.
    #[default]
    Auto,
    /// Always copied.
    Ram,
    /// In the file.
    File,
}

/// What the user set; `None` where a default holds that depends on other keys.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertSettings {
    /// Whether experts stay in a file that the loader maps.
    pub from: ExpertsFrom,
    /// The order by which blocks are kept.
    pub order: PolicyOrder,
    /// Tokens of recent use.
    pub window: u32,
    /// Uses within the window before a block replaces another.
    pub admit: u32,
    /// Replacements per step; `None` leaves it to the upload share.
    pub swaps_per_step: Option<u32>,
    /// Steps that an upload may take before it is waited for.
    pub swap_lead: Option<u32>,
    /// Whether uploads are waited for at all.
    pub wait_swaps: Option<bool>,
    /// Part of the link's time that uploads may take.
    pub upload_share: Option<f32>,
    /// The largest piece of a copy, in KiB; `None` copies matrices whole.
    pub upload_chunk_kb: Option<u32>,
    /// Whether measured times decide between cache and stock mode.
    pub governor: Option<bool>,
    /// Tokens in stock mode until the cache is tried again.
    pub retest: Option<u32>,
    /// Where what was learned is kept; `None` is the cache folder of llama.cpp.
    pub state_file: Option<StateFile>,
    /// Nothing depends on time or on earlier runs.
    pub fixed: bool,
    /// The speed to which the link is slowed down, in 10^9 bytes per second (benchmarks only).
    pub link_gbs: Option<f32>,
}

impl Default for ExpertSettings {
    fn default() -> Self {
        Self {
            from: ExpertsFrom::Auto,
            order: PolicyOrder::Auto,
            window: 64,
            admit: 2,
            swaps_per_step: None,
            swap_lead: None,
            wait_swaps: None,
            upload_share: None,
            upload_chunk_kb: None,
            governor: None,
            retest: None,
            state_file: None,
            fixed: false,
            link_gbs: None,
        }
    }
}

impl ExpertSettings {
    /// Steps that an upload may take before the next graph waits for it; `None` never waits.
    pub fn upload_patience(&self) -> Option<u32> {
        if self.fixed {
            return Some(0);
        }
        self.wait_swaps.unwrap_or(false).then(|| self.swap_lead.unwrap_or(0))
    }

    /// Whether rates and times are measured and used.
    pub fn measures(&self) -> bool {
        !self.fixed
    }

    /// Whether measured times decide between cache and stock mode.
    pub fn governs(&self) -> bool {
        self.measures() && self.order != PolicyOrder::Layers && self.governor.unwrap_or(true)
    }

    /// Whether what was learned is read and written.
    pub fn remembers(&self) -> bool {
        !self.fixed && self.state_file != Some(StateFile::Off)
    }
}

/// Resolves keys that exclude each other; says which ones have no effect.
pub(super) fn settle(config: &mut Config) -> Vec<Notice> {
    let mut notices = Vec::new();
    let mut tell = |text: String| notices.push(Notice::Conflict(text));
    let experts = &mut config.experts;
    if experts.fixed && !matches!(config.cache, CacheSize::Mib(_) | CacheSize::SlotsPerLayer(_)) {
        tell("fixed is ignored: it needs a cache whose size does not depend on free memory; set cache=MIB or moe-expert-cache=N".to_owned());
        experts.fixed = false;
    }
    if experts.fixed {
        let unused = [
            ("state-file", matches!(experts.state_file, Some(StateFile::At(_)))),
            ("governor", experts.governor == Some(true)),
            ("retest", experts.retest.is_some()),
            ("wait-swaps", experts.wait_swaps == Some(false)),
            ("swap-lead", experts.swap_lead.is_some_and(|lead| lead > 0)),
            ("upload-share", experts.upload_share.is_some()),
        ];
        let unused: Vec<&str> = unused.iter().filter(|(_, given)| *given).map(|(name, _)| *name).collect();
        if !unused.is_empty() {
            tell(format!("fixed=1 leaves no room for {}: ignored; remove fixed to use them", unused.join(", ")));
        }
    } else if experts.swap_lead.is_some() && experts.wait_swaps != Some(true) {
        tell("swap-lead has no effect without wait-swaps=on".to_owned());
    }
    notices
}

#[cfg(test)]
mod tests {
    use super::super::parse;
    use super::*;

    fn experts(text: &str) -> ExpertSettings {
        let (config, notices) = parse(text);
        assert!(!notices.iter().any(Notice::is_fault), "{text}: {notices:?}");
        config.experts
    }

    fn told(text: &str) -> String {
        let lines: Vec<String> = parse(text).1.iter().map(ToString::to_string).collect();
        lines.join("\n")
    }

    #[test]
    fn every_key_sets_what_it_names() {
        let set = experts(
            "experts-from=file;policy=window;window=32;admit=3;swaps-per-step=4;wait-swaps=on;swap-lead=2;upload-share=0.5;upload-chunk-kb=512;\
             governor=on;retest=512;state-file=/tmp/a,b.ini;link-gbs=12.5",
        );
        let expected = ExpertSettings {
            from: ExpertsFrom::File,
            order: PolicyOrder::Window,
            window: 32,
            admit: 3,
            swaps_per_step: Some(4),
            swap_lead: Some(2),
            wait_swaps: Some(true),
            upload_share: Some(0.5),
            upload_chunk_kb: Some(512),
            governor: Some(true),
            retest: Some(512),
            state_file: Some(StateFile::At("/tmp/a,b.ini".into())),
            fixed: false,
            link_gbs: Some(12.5),
        };
        assert_eq!(set, expected);
        assert_eq!(experts("policy=frequency;swaps-per-step=auto").order, PolicyOrder::Frequency);
        assert_eq!(experts("swaps-per-step=4;swaps-per-step=-1").swaps_per_step, None);
        assert_eq!(experts("upload-chunk-kb=64;upload-chunk-kb=0").upload_chunk_kb, None);
        assert_eq!(experts("state-file=off").state_file, Some(StateFile::Off));
    }

    #[test]
    fn wrong_values_are_told_and_ignored() {
        for text in [
            "experts-from=disk",
            "experts-from=",
            "policy=lru",
            "window=7",
            "window=128",
            "admit=0",
            "admit=200",
            "swaps-per-step=-2",
            "swaps-per-step=x",
            "swap-lead=-1",
            "swap-lead=65",
            "wait-swaps=maybe",
            "upload-share=0",
            "upload-share=1.1",
            "upload-share=NaN",
            "upload-chunk-kb=-1",
            "governor=2",
            "retest=-5",
            "state-file=",
            "fixed=2",
            "link-gbs=0.05",
            "link-gbs=inf",
            "moe-expert-cache=-2",
            "moe-expert-cache=x",
        ] {
            let (config, notices) = parse(text);
            assert_eq!(config, Config::default(), "{text}");
            assert!(matches!(&notices[..], [Notice::BadValue { .. }]), "{text}: {notices:?}");
        }
    }

    #[test]
    fn the_alias_sets_the_cache() {
        let cache = |text: &str| parse(text).0.cache;
        assert_eq!(cache("moe-expert-cache=-1"), CacheSize::Auto);
        assert_eq!(cache("cache=8;moe-expert-cache=0"), CacheSize::Off);
        assert_eq!(cache("moe-expert-cache=12"), CacheSize::SlotsPerLayer(12));
        assert_eq!(cache("moe-expert-cache=12;cache=8"), CacheSize::Mib(8), "the last holds");
    }

    #[test]
    fn what_holds_without_keys() {
        let set = experts("");
        assert!(set.measures() && set.governs() && set.remembers());
        assert_eq!(set.upload_patience(), None);
        assert_eq!(experts("wait-swaps=1").upload_patience(), Some(0));
        assert_eq!(experts("wait-swaps=on;swap-lead=3").upload_patience(), Some(3));
        assert!(!experts("policy=layers").governs() && !experts("governor=off").governs());
        assert!(!experts("state-file=off").remembers());
    }

    #[test]
    fn fixed_needs_a_size_and_turns_off_what_measures() {
        for size in ["cache=8", "moe-expert-cache=4"] {
            let set = experts(&format!("fixed=1;{size}"));
            assert!(set.fixed && !set.measures() && !set.governs() && !set.remembers(), "{size}");
            assert_eq!(set.upload_patience(), Some(0), "{size}");
        }
        for size in ["", ";cache=auto", ";cache=off"] {
            let text = format!("fixed=1{size}");
            assert!(!parse(&text).0.experts.fixed, "{text}");
            assert!(told(&text).starts_with("settings: fixed is ignored: it needs a cache"), "{}", told(&text));
        }
    }

    #[test]
    fn keys_without_effect_are_told_in_one_line() {
        let line =
            told("fixed=1;cache=8;state-file=/x;governor=on;retest=5;wait-swaps=off;swap-lead=1;upload-share=0.5");
        assert_eq!(
            line,
            "settings: fixed=1 leaves no room for state-file, governor, retest, wait-swaps, swap-lead, upload-share: ignored; remove fixed \
             to use them"
        );
        assert_eq!(told("fixed=1;cache=8;state-file=off;governor=off;wait-swaps=on;swap-lead=0"), "");
        assert!(told("swap-lead=2").contains("without wait-swaps=on"));
    }
}
