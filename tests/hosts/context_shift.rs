//! Positions that are moved inside the cache: the context shift of a full cache, and chunks of a prompt that are reused at another
//! place. Both rotate keys that lie in our buffers.

use serde_json::{Value, json};

use crate::summary::ran_in_blocks;
use crate::support::fixture_model;
use crate::support::process::Finished;
use crate::support::server::{Completion, Server};
use crate::support::stock::{OVER_CPU, Side};

/// Generates past the end of a cache of 256 tokens.
fn shifted(side: Side<'_>, count: u32, flags: &[&str]) -> (Completion, Finished) {
    let flags = [&["-c", "256", "-np", "1", "--context-shift", "--no-warmup"], flags].concat();
    let server = Server::start(side, &fixture_model(), &flags);
    let more = json!({"ignore_eos": true, "n_keep": 4});
    let answer = server.complete_with("A dictionary maps keys to values. The following", count, 2, &more);
    (answer, server.stop())
}

fn equal_to_stock(device: Side<'_>, count: u32, shifts: usize, flags: &[&str]) {
    let (stock, _) = shifted(Side::Stock, count, flags);
    let (plugin, finished) = shifted(device, count, flags);
    assert_eq!(stock.tokens.len(), count as usize, "generation went on past the end of the cache");
    let lines = finished.lines_with("slot context shift").len();
    assert_eq!(lines, shifts, "{}", finished.report("the cache was shifted another number of times"));
    assert!(plugin == stock, "{}", finished.report("what follows the shift differs"));
    ran_in_blocks(&finished);
}

#[test]
fn a_full_cache_is_shifted_as_in_stock() {
    equal_to_stock(OVER_CPU, 400, 2, &[]);
}

/// With a cache, whose memory compute buffers take and give back.
#[test]
fn a_full_cache_is_shifted_as_in_stock_while_memory_comes_and_goes() {
    equal_to_stock(Side::Plugin { keys: crate::lending::KEYS, device: "MoE0" }, 280, 1, &[]);
}

/// Quantized keys are unpacked, rotated and packed again.
#[test]
fn a_quantized_cache_over_two_devices_is_shifted_as_in_stock() {
    let two = Side::Plugin { keys: "inner=CPU,CPU;log=debug", device: "MoE0,MoE1" };
    equal_to_stock(two, 280, 1, &["-ctk", "q8_0", "-ctv", "q8_0"]);
}

/// The second prompt is the first without a sentence: what stood behind it moves to the front.
fn reused(side: Side<'_>) -> (Vec<Value>, u64, Finished) {
    let server =
        Server::start(side, &fixture_model(), &["-c", "1024", "-np", "1", "--cache-reuse", "16", "--no-warmup"]);
    let rest = "The with statement makes sure that a file is closed when the block is left, whatever happens in it. ";
    let ask = |sentence: &str| {
        let body = json!({
            "prompt": format!("Files are opened by name.\n{sentence}{}", rest.repeat(4)), "n_predict": 24, "temperature": 0,
            "seed": 1, "cache_prompt": true, "return_tokens": true,
        });
        server.post("/completion", &body)
    };
    let answers = [ask("This chapter tells what they hold and who may read them.\n"), ask("")];
    let cached = answers[1]["timings"]["cache_n"].as_u64().expect("a count of cached tokens");
    (answers.map(|answer| answer["tokens"].clone()).to_vec(), cached, server.stop())
}

#[test]
fn a_chunk_reused_at_another_place_equals_stock() {
    let (stock, _, _) = reused(Side::Stock);
    let (plugin, cached, finished) = reused(OVER_CPU);
    assert!(cached >= 64, "{}", finished.report(&format!("only {cached} tokens came from the cache")));
    assert_eq!(plugin, stock);
    ran_in_blocks(&finished);
}
