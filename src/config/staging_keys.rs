//! Keys about the staging of long passes.

use super::Key;

/// What the tests make a buffer of the staging hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Staging {
    /// Two buffers of a whole layer.
    Layer,
    /// Three buffers of one expert tensor.
    ThreeTensors,
    /// Two of them.
    TwoTensors,
}

pub(super) const TIMELINE: Key = Key {
    name: "timeline",
    default: "off",
    unit: "path",
    range: "an absolute path without ',' and ';'",
    effect: "FOR BENCHMARKS ONLY: for each pass whose experts are brought as a whole, a line of JSON is appended to this file: when each copy and each computation began and ended (docs/telemetry.md).",
    reason: "Shows whether copies run behind the work; taking the times costs a little.",
    test_only: true,
    apply: |config, value| {
        if !value.starts_with('/') || value.contains('\0') {
            return Err(());
        }
        config.timeline = Some(value.into());
        Ok(())
    },
};

pub(super) const DEBUG_STAGING: Key = Key {
    name: "debug-staging",
    default: "by what is free",
    unit: "-",
    range: "layer, three-tensors, two-tensors",
    effect: "What the staging of long passes holds: two whole layers, three expert tensors, or two. Without room for it there is none.",
    reason: "Shows that results are the same with each.",
    test_only: true,
    apply: |config, value| {
        config.debug_staging = Some(match value {
            "layer" => Staging::Layer,
            "three-tensors" => Staging::ThreeTensors,
            "two-tensors" => Staging::TwoTensors,
            _ => return Err(()),
        });
        Ok(())
    },
};
