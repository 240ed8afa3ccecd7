//! Whether and how a model that is about to be loaded is helped.
//!
//! Owns: the rules, and the line that tells what they came to.
//! Invariants: a setting that the user made is left alone. Threads: none; everything here is a pure function.
//! Does not: read files, ask devices or plan (`planner::advice` does).

use crate::config::Config;
use crate::explicit::{Call, Explicit, Standing, standing};
use crate::model::moe::MoeShape;
use crate::planner::Advice;
use crate::planner::flags::Flags;

/// What is done with one load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Decision {
    /// Our devices take the place of those that the host would choose.
    pub(crate) helps: bool,
    /// Tokens of a pass, where the user left it open.
    pub(crate) pass_tokens: Option<u32>,
    /// The file is mapped, where the caller leaves it open.
    pub(crate) maps: bool,
    /// Bytes of each device beside dense weights that the host may plan with.
    pub(crate) beside: Vec<u64>,
    /// What was decided and why, for the user.
    pub(crate) line: String,
}

/// What is known of the user's settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wishes {
    pub(super) explicit: Explicit,
    /// The user asked for a cache of experts by a key.
    pub(super) cache: bool,
    /// Tokens of a pass, by a key.
    pub(super) pass_tokens: Option<u32>,
    /// The program tells what its passes are, so that they are not to be changed by a plan.
    pub(super) states_passes: bool,
}

impl Wishes {
    /// What the flags of a program and the settings say. `name` is the program's.
    pub(super) fn of(name: &str, flags: &Flags, config: &Config) -> Self {
        Self {
            explicit: flags.explicit.clone(),
            cache: flags.usage.cache_asked,
            pass_tokens: config.pass_tokens,
            // It prints the lengths that it was given.
            states_passes: name.contains("llama-bench"),
        }
    }
}

/// The devices that would help.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// Names for the user, and free bytes of all of them together.
    Free(String, u64),
    /// There are none, and why.
    None(String),
}

impl Decision {
    fn off(line: String) -> Self {
        Self { helps: false, pass_tokens: None, maps: false, beside: Vec::new(), line: format!("off: {line}") }
    }

    /// What the settings decide, before any device is asked. `name` is the model's.
    pub(super) fn of_settings(name: &str, shape: &MoeShape, wishes: &Wishes, call: Call) -> Option<Self> {
        if shape.expert_layers.is_empty() {
            return Some(Self::off(format!("{name} has no experts")));
        }
        match standing(&wishes.explicit, wishes.cache, call) {
            Standing::Open => None,
            Standing::Left(words) => Some(Self::off(words)),
            Standing::Ours(words) => {
                let line = format!("on for {name}: {words} names the device, so nothing else is decided");
                Some(Self { line, ..Self::off(String::new()) })
            }
        }
    }

    /// The same where a device of ours was named that has nothing to stand in front of.
    pub(super) fn named_in_vain(wishes: &Wishes, reason: &str) -> Option<Self> {
        let names = wishes.explicit.ours.as_ref()?;
        Some(Self::off(format!("{names} was named, and hands everything on: {reason}")))
    }

    /// What the devices decide: by the plan, or by the weights alone where the header does not say enough for one.
    pub(super) fn of_room(
        (name, shape): (&str, &MoeShape),
        wishes: &Wishes,
        call: Call,
        room: &Room,
        advice: Option<&Advice>,
    ) -> Self {
        let (devices, free) = match room {
            Room::Free(devices, free) => (devices, *free),
            Room::None(reason) => return Self::off(reason.clone()),
        };
        let experts = shape.expert_bytes();
        let weights = experts.saturating_add(shape.dense_bytes);
        let (stays_out, needs) = match advice {
            Some(advice) => (
                !advice.helps,
                format!("{} MiB with {} tokens of context", mib(advice.need.max(weights)), advice.context),
            ),
            None => (weights <= free, format!("{} MiB of weights", mib(weights))),
        };
        let sizes = format!("{needs}, {} MiB free on {devices}", free >> 20);
        if let Some(reason) = advice.and_then(|advice| advice.reason.as_deref()) {
            return Self::off(format!("{name}: {sizes}; {} llama.cpp runs as without ggml-moe", in_a_line(reason)));
        }
        if stays_out {
            let asked = if wishes.cache {
                "; the cache that was asked for has no effect, --device MoE0 uses it all the same"
            } else {
                ""
            };
            return Self::off(format!("{name} fits: {sizes}; llama.cpp runs as without ggml-moe{asked}"));
        }
        // What fits by the sum alone does not with what llama.cpp leaves free on each card, or not in whole layers.
        let close = advice.is_some_and(|advice| advice.need.max(weights) <= free);
        let margin = if close { ", too little with a margin on each card" } else { "" };
        let mut line = format!("on for {name}: {sizes}{margin}; its {} MiB of experts stay in RAM", mib(experts));
        let open = wishes.explicit.batch.is_none();
        let planned = advice.and_then(|advice| advice.batch.as_ref()).filter(|_| open && !wishes.states_passes);
        let pass_tokens = match (wishes.pass_tokens.filter(|_| open), planned) {
            (Some(tokens), _) => Some(tokens),
            (None, Some((tokens, reason))) => {
                line.push_str(&format!("; passes of {tokens} tokens ({reason})"));
                u32::try_from(*tokens).ok()
            }
            (None, None) => None,
        };
        let mapped =
            advice.and_then(|advice| advice.mapped.as_ref()).filter(|_| !wishes.explicit.load && !call.sets_load);
        if let Some(reason) = mapped {
            line.push_str(&format!("; the file is mapped ({reason})"));
        }
        let beside = advice.map(|advice| advice.beside.clone()).unwrap_or_default();
        Self { helps: true, pass_tokens, maps: mapped.is_some(), beside, line }
    }
}

/// A sentence behind a semicolon.
fn in_a_line(sentence: &str) -> String {
    let mut letters = sentence.chars();
    let first = letters.next().map(|letter| letter.to_lowercase().to_string()).unwrap_or_default();
    format!("{first}{};", letters.as_str().trim_end_matches('.'))
}

/// MiB, rounded up.
fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::moe::ExpertLayer;

    fn shape(experts_mib: u64) -> MoeShape {
        let layer = ExpertLayer { layer: 0, experts: 8, bytes: experts_mib << 20, kind: Vec::new() };
        MoeShape {
            architecture: "a".to_owned(),
            layers: 1,
            used: 2,
            expert_layers: if experts_mib == 0 { Vec::new() } else { vec![layer] },
            dense_bytes: 10 << 20,
            input_bytes: 0,
        }
    }

    #[test]
    fn settings_of_the_user_win() {
        let of = |wishes: &Wishes| {
            Decision::of_settings("m", &shape(90), wishes, Call::default()).map(|it| (it.helps, it.line))
        };
        assert_eq!(of(&Wishes::default()), None);
        let explicit = Explicit::read(&[b"x", b"-ngl", b"5"], &|_| None);
        let (helps, line) = of(&Wishes { explicit, ..Wishes::default() }).unwrap();
        assert!(!helps && line.starts_with("off: -ngl was given and is left alone"));
        let explicit =
            Explicit { device: Some("-dev".to_owned()), ours: Some("MoE0".to_owned()), ..Explicit::default() };
        let (helps, line) = of(&Wishes { explicit, ..Wishes::default() }).unwrap();
        assert!(!helps && line == "on for m: -dev MoE0 names the device, so nothing else is decided", "{line}");
        let dense = Decision::of_settings("m", &shape(0), &Wishes::default(), Call::default()).unwrap();
        assert_eq!(dense.line, "off: m has no experts");
    }

    #[test]
    fn only_what_does_not_fit_is_helped() {
        let of = |free_mib: u64, wishes: &Wishes| {
            let room = Room::Free("MoE0 (CUDA0)".to_owned(), free_mib << 20);
            Decision::of_room(("m", &shape(90)), wishes, Call::default(), &room, None)
        };
        assert!(!of(100, &Wishes::default()).helps);
        let helped = of(99, &Wishes { pass_tokens: Some(4096), ..Wishes::default() });
        assert_eq!((helped.helps, helped.pass_tokens), (true, Some(4096)));
        assert_eq!(
            helped.line,
            "on for m: 100 MiB of weights, 99 MiB free on MoE0 (CUDA0); its 90 MiB of experts stay in RAM"
        );
        let batch = Explicit { batch: Some("-ub".to_owned()), ..Explicit::default() };
        assert_eq!(of(99, &Wishes { pass_tokens: Some(4096), explicit: batch, ..Wishes::default() }).pass_tokens, None);
        let none = Decision::of_room(
            ("m", &shape(90)),
            &Wishes::default(),
            Call::default(),
            &Room::None("no GPU".to_owned()),
            None,
        );
        assert_eq!(none.line, "off: no GPU");
    }

    #[test]
    fn a_plan_knows_more_than_weights() {
        let advice = Advice {
            helps: true,
            fits: false,
            reason: None,
            need: 150 << 20,
            context: 4096,
            batch: Some((2048, "so".to_owned())),
            mapped: Some("large.".to_owned()),
            beside: vec![7],
        };
        let room = Room::Free("MoE0 (CUDA0)".to_owned(), 120 << 20);
        let of = |wishes: &Wishes, call: Call, advice: &Advice| {
            Decision::of_room(("m", &shape(90)), wishes, call, &room, Some(advice))
        };
        let helped = of(&Wishes::default(), Call::default(), &advice);
        assert_eq!(
            (helped.helps, helped.pass_tokens, helped.maps),
            (true, Some(2048), true),
            "its context does not fit"
        );
        assert_eq!(
            helped.line,
            "on for m: 150 MiB with 4096 tokens of context, 120 MiB free on MoE0 (CUDA0); its 90 MiB of experts stay in RAM; passes of 2048 tokens (so); the file is mapped (large.)"
        );
        let close = of(&Wishes::default(), Call::default(), &Advice { need: 110 << 20, ..advice.clone() });
        assert!(
            close.line.contains(", 120 MiB free on MoE0 (CUDA0), too little with a margin on each card; its"),
            "{}",
            close.line
        );
        let fits = of(
            &Wishes::default(),
            Call::default(),
            &Advice { helps: false, fits: true, need: 110 << 20, ..advice.clone() },
        );
        assert!(!fits.helps && fits.line.starts_with("off: m fits: 110 MiB with 4096 tokens"), "{}", fits.line);
        let reason = Some("Only 3 MiB would be left for experts.".to_owned());
        let small = of(&Wishes::default(), Call::default(), &Advice { helps: false, reason, ..advice.clone() });
        assert_eq!(
            (small.helps, small.line.as_str()),
            (
                false,
                "off: m: 150 MiB with 4096 tokens of context, 120 MiB free on MoE0 (CUDA0); only 3 MiB would be left for experts; llama.cpp runs as without ggml-moe"
            )
        );
        // What the user set.
        let keyed = Wishes { pass_tokens: Some(96), ..Wishes::default() };
        assert_eq!(of(&keyed, Call::default(), &advice).pass_tokens, Some(96));
        let explicit = Explicit { batch: Some("-b".to_owned()), load: true, ..Explicit::default() };
        let own = of(&Wishes { explicit, ..Wishes::default() }, Call::default(), &advice);
        assert_eq!((own.pass_tokens, own.maps), (None, false));
        assert!(!own.line.contains("passes") && !own.line.contains("mapped"));
        let bench = Wishes { states_passes: true, ..Wishes::default() };
        assert_eq!(of(&bench, Call::default(), &advice).pass_tokens, None);
        assert!(!of(&Wishes::default(), Call { sets_load: true, ..Call::default() }, &advice).maps);
    }
}
