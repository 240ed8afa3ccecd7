//! Passes of more than 8 tokens, by each way to their experts: fetched, computed in RAM where the cache misses, brought as a whole. Over the CPU and
//! over the late device results are stock's, whatever the way.

use serde_json::{Value, json};

use crate::perplexity::{figures, perplexity};
use crate::summary::{largest, ran_in_blocks};
use crate::support::fixture_model;
use crate::support::process::Finished;
use crate::support::server::Server;
use crate::support::stock::Side;

/// Numbers of tokens around every bound: of decoding, of computing in RAM, of streaming, of a micro-batch.
const LENGTHS: [u32; 10] = [1, 8, 9, 17, 31, 32, 33, 94, 257, 600];

/// So many tokens that mean nothing in particular.
fn prompt(tokens: u32, seed: u32) -> Value {
    (0..tokens).map(|at| 20 + (at * 37 + seed * 101 + at * at % 13) % 400).collect::<Vec<_>>().into()
}

/// What a server answers to prompts of all lengths, each asked twice.
fn answers(side: Side<'_>) -> (Vec<Value>, Finished) {
    let server = Server::start(side, &fixture_model(), &["-c", "1024", "-np", "1"]);
    let ask = |tokens| {
        let body = json!({
            "prompt": prompt(tokens, 1), "n_predict": 3, "n_probs": 3, "temperature": 0, "seed": 1, "return_tokens": true,
            "cache_prompt": false,
        });
        let answer = server.post("/completion", &body);
        json!([answer["tokens"], answer["completion_probabilities"]])
    };
    let all = LENGTHS.into_iter().chain(LENGTHS.into_iter().rev()).map(ask).collect();
    (all, server.stop())
}

/// A way to the experts, and counters that show that it was gone.
const SIDES: [(&str, &[&str]); 7] = [
    ("inner=CPU;middle-passes=fetch", &["fetched_blocks", "streamed_blocks"]),
    ("inner=CPU;middle-passes=fetch;cache=6;debug-poison=on", &["fetched_blocks", "streamed_blocks", "hits", "misses"]),
    ("inner=CPU;middle-passes=cpu;cache=6;debug-poison=on", &["hits", "misses", "streamed_blocks"]),
    ("inner=CPU;stream-min-tokens=9;cache=9;middle-passes=cpu", &["streamed_blocks", "hits", "misses"]),
    (
        "inner=LATE0;middle-passes=fetch;stream-min-tokens=40;debug-late=51;cache=off",
        &["fetched_blocks", "streamed_blocks"],
    ),
    (
        "inner=LATE0;middle-passes=fetch;stream-min-tokens=40;debug-late=54;cache=6;debug-poison=on",
        &["fetched_blocks", "hits", "misses"],
    ),
    ("inner=LATE0;middle-passes=cpu;debug-late=55;cache=6;debug-poison=on", &["hits", "misses"]),
];

#[test]
fn prompts_of_any_length_equal_stock() {
    let (stock, _) = answers(Side::Stock);
    for (keys, counters) in SIDES {
        let keys = format!("{keys};log=debug");
        let (ours, finished) = answers(Side::Plugin { keys: &keys, device: "MoE0" });
        for (number, (ours, stock)) in ours.iter().zip(&stock).enumerate() {
            assert_eq!(ours, stock, "{}", finished.report(&format!("{keys}: prompt {number} is not equal to stock")));
        }
        for counter in counters {
            assert!(largest(&finished.log(), counter) > 0, "{}", finished.report(&format!("{keys}: no {counter}")));
        }
        ran_in_blocks(&finished);
    }
}

/// Every chunk's perplexity in passes of 9 to 32 tokens.
#[test]
fn middle_passes_equal_stock() {
    for (batch, sides) in [("20", &SIDES[..3]), ("32", &SIDES[2..3]), ("9", &SIDES[5..])] {
        let more = ["-ub", batch, "-b", batch, "-c", "128"];
        let stock = figures(&perplexity(Side::Stock, 2, 3, &more));
        for (keys, _) in sides {
            let keys = format!("{keys};log=debug;stream-min-tokens=1000");
            let finished = perplexity(Side::Plugin { keys: &keys, device: "MoE0" }, 2, 3, &more);
            assert_eq!(figures(&finished), stock, "{}", finished.report(&keys));
            let log = finished.log();
            let way = if keys.contains("fetch") { "fetched_blocks" } else { "misses" };
            assert!(largest(&log, way) > 0, "{}", finished.report(&format!("{keys}: no {way}")));
            assert_eq!(largest(&log, "streamed_blocks"), 0, "{}", finished.report("a long pass"));
        }
    }
}

/// Fetched passes fill free slots of the cache: what the first brought, the second finds on the device.
#[test]
fn fetched_passes_fill_the_cache() {
    let keys = |cache: &str| format!("inner=CPU;log=debug;middle-passes=fetch;stream-min-tokens=1000;{cache}");
    let from_ram = |cache: &str| {
        let more = ["-ub", "16", "-b", "16", "-c", "128"];
        let keys = keys(cache);
        let finished = perplexity(Side::Plugin { keys: &keys, device: "MoE0" }, 2, 2, &more);
        largest(&finished.log(), "expert_bytes")
    };
    let (none, all) = (from_ram("cache=off"), from_ram("cache=16"));
    // Each expert comes once, and is then found on the device.
    assert!(7 * all < none, "{all} bytes from RAM with a cache, {none} without");
}

/// One slot decodes whenever a prompt arrives in the other, prompts of several lengths: texts are stock's, and what long passes need is not made
/// anew each time.
///
/// All prompts come in one request, so that the server has the next one when a slot is free, and each graph holds the same tokens in every run:
/// which of them are computed together changes the last digits. Slots are free at different times because the second prompt takes three graphs.
#[test]
fn prompts_beside_decoding_equal_stock() {
    const PREDICTED: usize = 24;
    let run = |side: Side<'_>| {
        let server = Server::start(side, &fixture_model(), &["-c", "4096", "-np", "2", "-b", "300"]);
        let prompts: Vec<Value> =
            [5, 600, 20, 300, 33, 9, 120, 64, 250, 12, 40].into_iter().map(|tokens| prompt(tokens, tokens)).collect();
        let body = json!({
            "prompt": prompts, "n_predict": PREDICTED, "n_probs": 3, "temperature": 0, "seed": 1, "return_tokens": true,
            "cache_prompt": false, "ignore_eos": true,
        });
        let mut answers = server.post("/completion", &body).as_array().expect("one answer per prompt").clone();
        answers.sort_by_key(|answer| answer["index"].as_u64());
        assert!(answers.iter().all(|answer| answer["tokens"].as_array().map(Vec::len) == Some(PREDICTED)));
        let told = |answer: &Value| json!([answer["tokens"], answer["completion_probabilities"]]);
        (answers.iter().map(told).collect::<Vec<Value>>(), server.stop())
    };
    let (stock, _) = run(Side::Stock);
    for keys in ["inner=CPU;cache=6;middle-passes=fetch", "inner=LATE0;cache=6;debug-late=54;debug-poison=on"] {
        let keys = format!("{keys};log=debug");
        let (ours, finished) = run(Side::Plugin { keys: &keys, device: "MoE0" });
        assert_eq!(ours, stock, "{}", finished.report("not equal to stock"));
        let (log, made) = (finished.log(), finished.lines_with("staging of").len());
        assert!(largest(&log, "hits") > 0 && made > 0, "{}", finished.report("no hit, or no staging"));
        assert!(made <= 2, "{}", finished.report(&format!("staging was made {made} times")));
        assert_eq!(finished.lines_with("expert cache of").len(), 1, "{}", finished.report("the cache was made anew"));
    }
}
