//! Memory of compute buffers that comes with the passes that touch it, over ggml's CPU backend, where a byte that was forgotten ends the host and
//! what comes is poisoned. Results are stock's; memory comes, goes and is the same after every prompt.

use std::fs;
use std::time::Duration;

use serde_json::{Value, json};

use crate::perplexity::{figures, perplexity};
use crate::sides::equal_over;
use crate::summary::{largest, summaries};
use crate::support::process::{Finished, run};
use crate::support::server::Server;
use crate::support::stock::{Side, program, tool};
use crate::support::{fixture, fixture_model, text};

/// Memory for half of the experts.
pub(crate) const KEYS: &str = "inner=CPU;log=debug;cache=8;debug-poison=on";

fn side(keys: &str) -> Side<'_> {
    Side::Plugin { keys, device: "MoE0" }
}

/// The sum of a counter over all backends.
fn sum(finished: &Finished, counter: &str) -> u64 {
    summaries(&finished.log()).iter().filter_map(|summary| summary[counter].as_u64()).sum()
}

/// Some memory came for graphs, and some of it went back.
fn lent(finished: &Finished) {
    for counter in ["lent_bytes", "returned_bytes"] {
        assert!(sum(finished, counter) > 0, "{}", finished.report(&format!("no {counter}")));
    }
    for line in ["of compute memory came (", "of compute memory went back ("] {
        assert!(!finished.lines_with(line).is_empty(), "{}", finished.report(line));
    }
}

#[test]
fn passes_of_all_sizes_equal_stock() {
    for batch in ["512", "2048"] {
        let more = ["-ub", batch, "-b", "2048"];
        let stock = figures(&perplexity(Side::Stock, 2, 4, &more));
        for keys in [KEYS.to_owned(), format!("{KEYS};debug-map-all=on"), format!("{KEYS};lend=off")] {
            let finished = perplexity(side(&keys), 2, 4, &more);
            assert_eq!(figures(&finished), stock, "{}", finished.report(&keys));
            let is_off = keys.contains("lend=off");
            let told = finished.lines_with("of compute memory came (");
            assert_eq!(told.is_empty(), is_off, "{}", finished.report(&keys));
            assert!(largest(&finished.log(), "streamed_blocks") > 0, "{}", finished.report(&keys));
        }
    }
}

/// Long and short prompts in two slots. The cache has all that the budget leaves, so passes take from it, and it has the same again each time.
#[test]
fn a_server_lends_and_has_it_back() {
    let keys = "inner=CPU;log=debug;debug-poison=on;cache=auto;vram-budget-mb=29;vram-reserve-mb=1";
    let long = fs::read_to_string(fixture("eval.txt")).expect("the text").chars().take(3_000).collect::<String>();
    let arguments = ["-c", "3072", "-np", "2", "-b", "512", "-ub", "512", "--no-cache-idle-slots"];
    let ask = |server: &Server, prompt: &str, slot: usize, count: u32| {
        let body = json!({
            "prompt": prompt, "n_predict": count, "temperature": 0, "seed": 1, "return_tokens": true, "cache_prompt": false,
            "id_slot": slot, "ignore_eos": true,
        });
        server.post("/completion", &body)["tokens"].clone()
    };
    let (_, finished) = equal_over(side(keys), &fixture_model(), &arguments, |server| {
        let first = ask(server, "A list is a mutable", 0, 90);
        let answers: Vec<Value> = (0..10)
            .map(|round| {
                json!([ask(server, &long, round % 2, 48), ask(server, "import os\nfor name in", 1 - round % 2, 8)])
            })
            .collect();
        assert!(answers[1..].iter().all(|answer| *answer == answers[0]), "the same answer each time");
        (first, answers)
    });
    lent(&finished);
    let shrunk = finished.lines_with("MiB are needed for");
    assert!(shrunk.len() >= 10, "{}", finished.report("the cache lent too seldom"));
    let back: Vec<String> = finished
        .lines_with("KiB again, after a long pass")
        .iter()
        .filter_map(|line| Some(line.split_once("the cache has ")?.1.to_owned()))
        .collect();
    assert!(back.len() >= 9, "{}", finished.report("the cache did not get it back"));
    assert!(back[1..].iter().all(|size| *size == back[1]), "{}", finished.report(&format!("{back:?}")));
    // What came and what stays, as the lines of the log tell: each prompt takes and leaves the same.
    for words in ["of compute memory came (", "of compute memory went back ("] {
        let lines = finished.lines_with(words);
        let sizes: Vec<&str> = lines.iter().filter_map(|line| Some(line.rsplit_once(": ")?.1)).collect();
        let most = sizes.iter().map(|size| sizes.iter().filter(|other| other == &size).count()).max();
        assert!(most >= Some(9), "{}", finished.report(&format!("{sizes:?}")));
    }
}

/// Graphs that the host stops at every matrix, whose operands it reads.
#[test]
fn an_importance_matrix_equals_stock() {
    let folder = tempfile::tempdir().expect("a folder");
    let matrix = |side, name: &str| {
        let path = folder.path().join(name);
        let mut command = tool("llama-imatrix", side, &fixture_model(), 2);
        command.args(["-f", text(&fixture("eval.txt")), "-c", "256", "--chunks", "3", "-o", text(&path)]);
        let finished = run(&mut command, Duration::from_secs(120)).success();
        (fs::read(&path).expect("the matrix was written"), finished)
    };
    let (stock, _) = matrix(Side::Stock, "stock.gguf");
    let (plugin, finished) = matrix(side(KEYS), "plugin.gguf");
    assert!(plugin == stock, "{}", finished.report("the matrices differ"));
    assert!(sum(&finished, "lent_bytes") > 0, "{}", finished.report("nothing came"));
}

/// Without memory for a pass the request fails with one clear line, and the server goes on.
#[test]
fn a_pass_without_memory_fails_alone() {
    let keys = format!("{KEYS};debug-fail-alloc=map:1");
    let server = Server::start(side(&keys), &fixture_model(), &["-c", "512", "-np", "1", "--no-warmup"]);
    for _ in 0..2 {
        let answer = server.answer("/completion", &json!({"prompt": "A list", "n_predict": 4}));
        assert_eq!(answer.status, 500, "{}", answer.body);
    }
    server.get("/props");
    let finished = server.stop();
    let lines = finished.lines_with("free for this pass, even without the cache; use a smaller micro-batch (-ub)");
    assert!(!lines.is_empty(), "{}", finished.report("nobody says why"));
    assert!(finished.lines_with("failed earlier").is_empty(), "{}", finished.report("the device is lost"));
}

/// A context takes all of its compute buffer from the cache before that is known to come and go; the cache has it again with the first pass.
#[test]
fn a_second_context_leaves_the_cache_what_it_had() {
    let keys = "inner=CPU;log=debug;state-file=off;stream-min-tokens=9;cache=8;vram-budget-mb=64;vram-reserve-mb=0";
    let mut command = program("llama-bench", side(keys));
    command.args(["-m", text(&fixture_model()), "-dev", "MoE0", "-ngl", "99", "-t", "2", "-v"]);
    command.args(["-p", "2048", "-b", "2048", "-ub", "1024,2048", "-n", "0", "-r", "2"]);
    let finished = run(&mut command, Duration::from_secs(120)).success();
    assert!(!finished.lines_with("the cache shrinks from ").is_empty(), "{}", finished.report("there was room"));
    let moved: Vec<u64> =
        summaries(&finished.log()).iter().filter_map(|summary| summary["expert_bytes"].as_u64()).collect();
    // Three passes of 14 MB of experts, of which it held an eighth when the context was there, and holds half.
    assert!(moved.last().is_some_and(|bytes| *bytes < 28_000_000), "{moved:?} {}", finished.report("it stayed small"));
}
