//! llama-perplexity on the fixture: every chunk's figure, as printed with four decimals, equal to stock's.

use std::time::Duration;

use crate::summary::{largest, ran_in_blocks};
use crate::support::process::{Finished, run};
use crate::support::stock::{OVER_CPU, Side, tool};
use crate::support::{Computed, fixture, fixture_model, text};

/// Runs llama-perplexity over the first chunks of the held-out text.
pub(crate) fn perplexity(side: Side<'_>, threads: u32, chunks: u32, more: &[&str]) -> Finished {
    perplexity_within(Duration::from_secs(120), side, threads, chunks, more)
}

/// The same with another time limit; 0 chunks are all of the text. What stock alone gives for the same arguments is computed once: many tests
/// compare with it.
pub(crate) fn perplexity_within(limit: Duration, side: Side<'_>, threads: u32, chunks: u32, more: &[&str]) -> Finished {
    static STOCK: Computed<Finished> = Computed::new();
    let chunks = if chunks == 0 { "-1".to_owned() } else { chunks.to_string() };
    let mut command = tool("llama-perplexity", side, &fixture_model(), threads);
    command.args(["-f", text(&fixture("eval.txt")), "-c", "512", "--chunks", &chunks]).args(more);
    let name = format!("{command:?}");
    let mut compute = || run(&mut command, limit).success();
    match side {
        Side::Stock => STOCK.get(name, compute),
        Side::Plugin { .. } => compute(),
    }
}

/// The figures of all chunks, then the final one with its error.
pub(crate) fn figures(finished: &Finished) -> Vec<String> {
    let log = finished.log();
    let chunks = log.lines().find(|line| line.starts_with("[1]"));
    let last = log.lines().find_map(|line| Some(line.split_once("Final estimate: ")?.1));
    let (Some(chunks), Some(last)) = (chunks, last) else { panic!("{}", finished.report("no estimate")) };
    chunks.split_terminator(',').chain([last]).map(str::to_owned).collect()
}

/// Runs both sides and compares; the plugin's side must have run in MoE blocks.
fn equal_to_stock(threads: u32, chunks: u32, more: &[&str]) {
    let stock = figures(&perplexity(Side::Stock, threads, chunks, more));
    assert_eq!(stock.len(), chunks as usize + 1, "a figure for each chunk: {stock:?}");
    let plugin = perplexity(OVER_CPU, threads, chunks, more);
    assert_eq!(figures(&plugin), stock);
    ran_in_blocks(&plugin);
}

#[test]
fn equal_at_512_tokens_per_pass_with_one_thread() {
    equal_to_stock(1, 16, &["-ub", "512"]);
}

#[test]
fn equal_at_512_tokens_per_pass_with_two_threads() {
    equal_to_stock(2, 16, &["-ub", "512"]);
}

#[test]
fn equal_at_64_tokens_per_pass_with_one_thread() {
    equal_to_stock(1, 8, &["-ub", "64"]);
}

#[test]
fn equal_at_64_tokens_per_pass_with_two_threads() {
    equal_to_stock(2, 8, &["-ub", "64"]);
}

#[test]
fn equal_at_one_token_per_pass_with_one_thread() {
    equal_to_stock(1, 3, &["-ub", "1", "-b", "1"]);
}

#[test]
fn equal_at_one_token_per_pass_with_two_threads() {
    equal_to_stock(2, 3, &["-ub", "1", "-b", "1"]);
}

#[test]
fn equal_without_flash_attention() {
    equal_to_stock(2, 4, &["-fa", "off"]);
}

#[test]
fn equal_with_quantized_keys_and_values() {
    equal_to_stock(2, 4, &["-ctk", "q8_0", "-ctv", "q8_0"]);
}

/// The two-thread results above mean something only if the thread count can change them: it does at one token per pass.
#[test]
fn host_threads_reach_the_inner_device() {
    let one_token = |threads| figures(&perplexity(OVER_CPU, threads, 2, &["-ub", "1", "-b", "1"]));
    assert_ne!(one_token(1), one_token(2));
}

/// Passes whose experts are brought as a whole, from RAM alone, and from a cache that they fill on their way.
#[test]
fn long_passes_equal_stock() {
    let cached = "stream-min-tokens=9;cache=8;debug-poison=on";
    let sides: [(&str, u32, &[&str]); 4] = [
        ("16", 3, &["stream-min-tokens=9", cached]),
        ("512", 3, &["stream-min-tokens=9", cached]),
        ("2048", 4, &[cached, "cache=8"]),
        ("8192", 16, &[cached, "cache=8"]),
    ];
    for (batch, chunks, keys) in sides {
        let more = ["-ub", batch, "-b", batch];
        let stock = figures(&perplexity(Side::Stock, 2, chunks, &more));
        for keys in keys {
            let keys = format!("inner=CPU;log=debug;{keys}");
            let finished = perplexity(Side::Plugin { keys: &keys, device: "MoE0" }, 2, chunks, &more);
            assert_eq!(figures(&finished), stock, "{}", finished.report(&keys));
            let log = finished.log();
            assert!(largest(&log, "streamed_blocks") > 0, "{}", finished.report("no long pass"));
            // The warm-up has two tokens, each of which uses four experts in six layers.
            let uses = largest(&log, "hits") + largest(&log, "misses");
            assert!(uses <= 2 * 4 * 6, "{}", finished.report("a long pass was computed in RAM"));
        }
    }
}

/// Graph views are an optimisation over ggml's private layout; the public way must give the same figures.
#[test]
fn equal_when_graphs_are_rebuilt_through_the_public_interface() {
    let side = Side::Plugin { keys: "inner=CPU;log=debug;debug-graph=add-node", device: "MoE0" };
    let more = ["-ub", "64"];
    let rebuilt = perplexity(side, 2, 4, &more);
    assert!(!rebuilt.lines_with("graphs built anew").is_empty(), "{}", rebuilt.report("the key did nothing"));
    assert_eq!(figures(&rebuilt), figures(&perplexity(Side::Stock, 2, 4, &more)));
    ran_in_blocks(&rebuilt);
}

/// An inner device whose tensors are larger than their contents, as CUDA's are: the pads are poisoned by the test key.
#[test]
fn equal_with_padded_tensors() {
    let padded = Side::Plugin { keys: "inner=CPU;log=debug;debug-pad=65536", device: "MoE0" };
    let more = ["-ub", "64", "-lv", "4"];
    let [padded, plain] = [padded, OVER_CPU].map(|side| perplexity(side, 2, 4, &more));
    assert_eq!(figures(&padded), figures(&perplexity(Side::Stock, 2, 4, &more)));
    let weights = |finished: &Finished| {
        let line = finished.lines_with("MoE0 model buffer size").pop().unwrap_or_default();
        line.split_once('=').map(|(_, size)| size.to_owned())
    };
    assert!(weights(&padded).is_some() && weights(&padded) != weights(&plain), "the key did nothing");
}
