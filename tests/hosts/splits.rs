//! Layers and tensors split over several devices: what `-ts` and `-mg` choose, and the split modes that cannot have ours.

use std::time::Duration;

use crate::perplexity::{figures, perplexity};
use crate::summary::summaries;
use crate::support::process::{Finished, run};
use crate::support::stock::{Side, tool};
use crate::support::{fixture, fixture_model, text};

/// Two devices of ours.
const TWO: Side<'static> = Side::Plugin { keys: "inner=CPU,CPU;log=debug", device: "MoE0,MoE1" };

const SMALL: [&str; 4] = ["-c", "128", "-ub", "64"];

/// The most MoE blocks in one graph of a device: the layers that it was given. 0 if it ran nothing.
fn layers_of(finished: &Finished, device: &str) -> u64 {
    let of_device = summaries(&finished.log()).into_iter().filter(|summary| summary["device"] == device);
    of_device.filter_map(|summary| summary["blocks_max"].as_u64()).max().unwrap_or(0)
}

#[test]
fn layers_follow_the_tensor_split() {
    let stock = figures(&perplexity(Side::Stock, 2, 1, &SMALL));
    // Six layers and the output layer, which llama.cpp counts among them.
    for (flags, expected) in [
        (&["-ts", "1,1"][..], [4, 2]),
        (&["-ts", "5,2"], [5, 1]),
        (&["-ts", "1,0"], [6, 0]),
        (&["-ts", "0,1"], [0, 6]),
        (&["-ts", "1,1", "-mg", "1"], [4, 2]),
        (&["-sm", "none"], [6, 0]),
        (&["-sm", "none", "-mg", "1"], [0, 6]),
    ] {
        let finished = perplexity(TWO, 2, 1, &[&SMALL, flags].concat());
        assert_eq!(figures(&finished), stock, "{}", finished.report("the figures differ"));
        let layers = ["MoE0", "MoE1"].map(|device| layers_of(&finished, device));
        assert_eq!(layers, expected, "{}", finished.report("layers went elsewhere"));
    }
}

/// A run that is expected to be refused.
fn refused(side: Side<'_>, flags: &[&str]) -> Finished {
    let mut host = tool("llama-perplexity", side, &fixture_model(), 2);
    host.args(["-f", text(&fixture("eval.txt")), "-c", "128", "--chunks", "1"]).args(flags);
    run(&mut host, Duration::from_secs(30)).clean_failure()
}

/// llama.cpp asks the backend for a buffer type that splits rows; ours has none, and llama.cpp says so.
#[test]
fn rows_are_not_split() {
    let finished = refused(TWO, &["-sm", "row"]);
    let said = finished.lines_with("device MoE0 does not support split buffers");
    assert!(!said.is_empty(), "{}", finished.report("no word on the split mode"));
}

#[test]
fn tensors_are_not_split() {
    let finished = refused(TWO, &["-sm", "tensor"]);
    let said = finished.lines_with("ggml-moe: off: split mode tensor");
    assert_eq!(said.len(), 1, "{}", finished.report("one line on the split mode"));
    assert!(said[0].contains("use -sm layer"), "what to do: {}", said[0]);
    assert!(finished.log().contains("invalid device: MoE0"), "{}", finished.report("the host's own word"));
}

/// Where our devices are not asked for, a loaded plugin changes nothing about these modes.
#[test]
fn unnamed_devices_change_no_split_mode() {
    let unnamed = Side::Plugin { keys: "inner=CPU,CPU;log=debug", device: "" };
    let rows = perplexity(unnamed, 2, 1, &[&SMALL[..], &["-sm", "row"]].concat());
    assert_eq!(figures(&rows), figures(&perplexity(Side::Stock, 2, 1, &[&SMALL[..], &["-sm", "row"]].concat())));
    assert!(rows.lines_with("ggml-moe: summary").is_empty(), "{}", rows.report("our device was used"));
    for side in [Side::Stock, unnamed] {
        let finished = refused(side, &["-sm", "tensor"]);
        assert!(finished.log().contains("needs >= 1 devices"), "{}", finished.report("another error"));
    }
}
