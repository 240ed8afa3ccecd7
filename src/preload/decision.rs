//! Whether and how a model that is about to be loaded is helped.
//!
//! Owns: the rules, and the line that tells what they came to.
//! Invariants: a setting that the user made is left alone. Threads: none; everything here is a pure function.
//! Does not: read files or ask devices. A planner that knows more takes the place of [`Decision::of_room`].

use super::explicit::Explicit;
use crate::model::moe::MoeShape;

/// What is done with one load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Decision {
    /// Our devices take the place of those that the host would choose.
    pub(crate) helps: bool,
    /// Tokens of a pass, where the user left it open.
    pub(crate) pass_tokens: Option<u32>,
    /// What was decided and why, for the user.
    pub(crate) line: String,
}

/// What the caller of the load asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Call {
    /// It names devices.
    pub(crate) names_devices: bool,
    /// It places layers or tensors.
    pub(crate) places_weights: bool,
    /// It splits what our devices cannot split.
    pub(crate) splits_tensors: bool,
}

/// What is known of the user's settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wishes {
    pub(super) explicit: Explicit,
    /// The user asked for a cache of experts by a key.
    pub(super) cache: bool,
    /// Tokens of a pass, by a key.
    pub(super) pass_tokens: Option<u32>,
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
        Self { helps: false, pass_tokens: None, line: format!("off: {line}") }
    }

    /// What the settings decide, before any device is asked. `name` is the model's.
    pub(super) fn of_settings(name: &str, shape: &MoeShape, wishes: &Wishes, call: Call) -> Option<Self> {
        if shape.expert_layers.is_empty() {
            return Some(Self::off(format!("{name} has no experts")));
        }
        let explicit = &wishes.explicit;
        if explicit.device.is_some() || call.names_devices {
            let what = explicit.device.as_deref().unwrap_or("a choice of devices");
            return Some(Self::off(format!("{what} was given and is left alone")));
        }
        if call.splits_tensors {
            return Some(Self::off(
                "a split of rows or tensors was asked for, which experts in RAM cannot follow".to_owned(),
            ));
        }
        let placed = if explicit.placement.is_empty() && call.places_weights {
            Some("a placement of layers or tensors".to_owned())
        } else {
            (!explicit.placement.is_empty()).then(|| explicit.placement.join(", "))
        };
        match placed {
            Some(what) if !wishes.cache => Some(Self::off(format!(
                "{what} was given and is left alone, so there is no cache of experts; ask for one with --moe cache=auto, or leave it out"
            ))),
            _ => None,
        }
    }

    /// What the devices decide.
    pub(super) fn of_room(name: &str, shape: &MoeShape, wishes: &Wishes, room: &Room) -> Self {
        let (devices, free) = match room {
            Room::Free(devices, free) => (devices, *free),
            Room::None(reason) => return Self::off(reason.clone()),
        };
        let experts = shape.expert_bytes();
        let weights = experts.saturating_add(shape.dense_bytes);
        let sizes = format!("{} MiB of weights, {} MiB free on {devices}", mib(weights), free >> 20);
        if weights <= free {
            return Self::off(format!("{name} fits: {sizes}; llama.cpp runs as without ggml-moe"));
        }
        let line = format!("on for {name}: {sizes}; its {} MiB of experts stay in RAM", mib(experts));
        Self { helps: true, pass_tokens: wishes.pass_tokens.filter(|_| wishes.explicit.batch.is_none()), line }
    }
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

    fn placed(what: &str) -> Wishes {
        Wishes { explicit: Explicit { placement: vec![what.to_owned()], ..Explicit::default() }, ..Wishes::default() }
    }

    #[test]
    fn settings_of_the_user_win() {
        let of = |wishes: &Wishes, call| Decision::of_settings("m", &shape(90), wishes, call).map(|it| it.line);
        assert_eq!(of(&Wishes::default(), Call::default()), None);
        assert!(of(&placed("-ngl"), Call::default()).unwrap().starts_with("off: -ngl was given and is left alone"));
        assert_eq!(of(&Wishes { cache: true, ..placed("-ngl") }, Call::default()), None, "a cache was asked for");
        let call = Call { places_weights: true, ..Call::default() };
        assert!(of(&Wishes::default(), call).unwrap().starts_with("off: a placement of layers"));
        let named = Call { names_devices: true, ..Call::default() };
        assert!(
            of(&Wishes { cache: true, ..Wishes::default() }, named).unwrap().starts_with("off: a choice of devices")
        );
        let split = Call { splits_tensors: true, ..Call::default() };
        assert!(of(&Wishes::default(), split).is_some());
        let dense = Decision::of_settings("m", &shape(0), &Wishes::default(), Call::default()).unwrap();
        assert_eq!(dense.line, "off: m has no experts");
    }

    #[test]
    fn only_what_does_not_fit_is_helped() {
        let of = |free_mib: u64, wishes: &Wishes| {
            Decision::of_room("m", &shape(90), wishes, &Room::Free("MoE0 (CUDA0)".to_owned(), free_mib << 20))
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
        let none = Decision::of_room("m", &shape(90), &Wishes::default(), &Room::None("no GPU".to_owned()));
        assert_eq!(none.line, "off: no GPU");
    }
}
