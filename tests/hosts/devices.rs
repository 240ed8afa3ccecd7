//! Which devices a host sees and uses: two of ours, ours unnamed, ours over nothing.

use std::time::Duration;

use crate::perplexity::{figures, perplexity};
use crate::summary::summaries;
use crate::support::process::{Finished, run};
use crate::support::stock::{OVER_CPU, Side, program};
use crate::support::{fixture_model, text};

#[test]
fn two_devices_with_layers_split_equal_stock() {
    let side = Side::Plugin { keys: "inner=CPU,CPU;log=debug", device: "MoE0,MoE1" };
    let more = ["-ub", "64", "-sm", "layer", "-ts", "1,1"];
    let split = perplexity(side, 2, 4, &more);
    assert_eq!(figures(&split), figures(&perplexity(Side::Stock, 2, 4, &["-ub", "64"])));
    for device in ["MoE0", "MoE1"] {
        let ran = summaries(&split.log())
            .iter()
            .any(|summary| summary["device"] == device && summary["blocks"].as_u64().is_some_and(|blocks| blocks > 0));
        assert!(ran, "{}", split.report(&format!("no MoE block ran on {device}")));
    }
}

#[test]
fn the_host_lists_our_device() {
    let finished = run(program("llama-server", OVER_CPU).arg("--list-devices"), Duration::from_secs(30)).success();
    assert!(!finished.lines_with("  MoE0: ").is_empty(), "{}", finished.report("MoE0 is not listed"));
    assert!(finished.lines_with("  MoE1: ").is_empty(), "{}", finished.report("one inner device, one MoE device"));
}

/// llama.cpp asks before each load what would fit; whatever we report, no layer and no expert may leave our device.
#[test]
fn fitting_keeps_every_layer_on_our_device() {
    let mut fit = program("llama-fit-params", OVER_CPU);
    fit.args(["-m", text(&fixture_model()), "--device", "MoE0"]);
    let finished = run(&mut fit, Duration::from_secs(30)).success();
    let printed = finished.stdout.lines().last().unwrap_or_default();
    assert!(printed.contains("-ngl -1") && !printed.contains("-ot"), "{}", finished.report("layers were moved"));
}

/// Whoever loads the plugin but names no device gets exactly what stock alone would have used.
#[test]
fn our_device_is_used_only_when_it_is_named() {
    let unnamed = Side::Plugin { keys: "inner=CPU;log=debug", device: "" };
    let log = |side| perplexity(side, 2, 1, &["-lv", "4"]);
    let used = |finished: &Finished| !finished.lines_with("using device MoE0").is_empty();
    assert!(used(&log(OVER_CPU)), "the line that the other runs must not have");
    let finished = log(unnamed);
    assert!(!used(&finished), "{}", finished.report("MoE0 was used unnamed"));
    assert!(finished.lines_with("MoE0 model buffer").is_empty(), "{}", finished.report("MoE0 holds weights"));
    assert_eq!(figures(&finished), figures(&log(Side::Stock)));
}

/// A host may be unable to offer what the user named: our device then hands everything to the CPU and says why.
#[test]
fn an_inner_device_that_does_not_exist_passes_through() {
    let side = Side::Plugin { keys: "inner=NoSuchDevice;log=debug", device: "MoE0" };
    let finished = perplexity(side, 2, 2, &["-ub", "64"]);
    let said = finished.lines_with("ggml-moe: MoE0 passes everything through to CPU: ");
    assert!(said.iter().any(|line| line.contains("NoSuchDevice")), "{}", finished.report("no reason given"));
    assert_eq!(figures(&finished), figures(&perplexity(Side::Stock, 2, 2, &["-ub", "64"])));
}
