//! The user's own flags for placing weights: they win over our placement, the results stay stock's, and our counters tell what was
//! left to us.

use crate::perplexity::{figures, perplexity};
use crate::summary::summaries;
use crate::support::process::Finished;
use crate::support::stock::{OVER_CPU, Side};

/// MoE layers of the fixture, each with its block.
const LAYERS: u64 = 6;

/// A run of a few passes of 32 tokens.
fn short(side: Side<'_>, flags: &[&str]) -> Finished {
    perplexity(side, 2, 1, &[&["-c", "128", "-ub", "32"], flags].concat())
}

/// The MoE blocks that ran on our devices and the expert products that they ran outside any.
fn counted(finished: &Finished) -> (u64, u64) {
    let sum = |counter: &str| summaries(&finished.log()).iter().filter_map(|summary| summary[counter].as_u64()).sum();
    (sum("blocks"), sum("unrecognised"))
}

/// With each set of flags the figures are those of stock with `stock_flags`, and as many of the six layers as expected run as blocks on
/// our device.
fn blocks_left(rows: &[(&[&str], &[&str], u64)]) {
    let (all, _) = counted(&short(OVER_CPU, &[]));
    assert!(all >= LAYERS && all.is_multiple_of(LAYERS), "{all} blocks in a run with everything on MoE0");
    let mut wrong = Vec::new();
    for (flags, stock_flags, layers) in rows {
        let plugin = short(OVER_CPU, flags);
        let stock = figures(&short(Side::Stock, stock_flags));
        if figures(&plugin) != stock {
            wrong.push(plugin.report(&format!("{flags:?}: the figures differ from {stock:?}")));
        }
        let (blocks, unrecognised) = counted(&plugin);
        if (blocks * LAYERS, unrecognised) != (all * layers, 0) {
            wrong.push(format!(
                "{flags:?}: {blocks} blocks and {unrecognised} products outside, expected {layers}/6 of {all}"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn layers_that_stay_on_the_cpu() {
    // The output layer is the first that -ngl counts.
    blocks_left(&[
        (&["-ngl", "0"], &["-ngl", "0"], 0),
        (&["-ngl", "1"], &["-ngl", "1"], 0),
        (&["-ngl", "3"], &["-ngl", "3"], 2),
    ]);
}

#[test]
fn experts_that_stay_on_the_cpu() {
    let of_three = ["-ot", r"blk\.[0-2]\.ffn_.*_exps=CPU"];
    blocks_left(&[
        (&["-ncmoe", "2"], &["-ncmoe", "2"], 4),
        (&["--cpu-moe"], &["--cpu-moe"], 0),
        (&of_three, &of_three, 3),
    ]);
}

/// A block is cut where its products lie with two devices: what is left to us runs all the same, by the plain path.
#[test]
fn one_expert_matrix_of_each_layer_on_the_cpu() {
    let down = ["-ot", "ffn_down_exps=CPU"];
    let finished = short(OVER_CPU, &down);
    assert_eq!(figures(&finished), figures(&short(Side::Stock, &down)));
    let ran: u64 = summaries(&finished.log()).iter().filter_map(|summary| summary["plain_nodes"].as_u64()).sum();
    assert!(ran > 0, "{}", finished.report("no expert product ran on MoE0"));
}

#[test]
fn dense_weights_that_stay_on_the_cpu() {
    let attention = ["-ot", "attn_q=CPU,attn_output=CPU"];
    let all_dense = ["-ot", r"(attn_.*|ffn_norm|ffn_gate_inp|output.*)\.weight=CPU"];
    let everything = ["-ot", ".*=CPU"];
    blocks_left(&[(&attention, &attention, LAYERS), (&all_dense, &all_dense, LAYERS), (&everything, &everything, 0)]);
}

/// Experts named for the device's own memory lie there, in every second layer here; their products cut nothing.
#[test]
fn experts_in_the_memory_of_our_device() {
    blocks_left(&[(&["-ot", r"blk\.[024]\.ffn_.*_exps=MoE0"], &[], 3)]);
}

#[test]
fn a_device_without_experts_says_so() {
    let said = |flags: &[&str]| {
        let finished = short(OVER_CPU, flags);
        let line = finished.lines_with("MoE0 runs over CPU: ").pop();
        line.unwrap_or_else(|| panic!("{}", finished.report("no line on what the device does")))
    };
    for flags in [&["--cpu-moe"][..], &["-ot", "exps=CPU"], &["-ot", ".*_exps=MoE0"]] {
        let line = said(flags);
        assert!(line.contains("it keeps no experts in RAM"), "{flags:?}: {line}");
    }
    for flags in [&[][..], &["-ncmoe", "5"]] {
        let line = said(flags);
        assert!(line.contains("experts stay in RAM"), "{flags:?}: {line}");
    }
}
