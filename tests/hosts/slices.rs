//! Blocks of long passes in slices of their tokens, over ggml's CPU backend and over the late device: equal to stock.
//!
//! ggml's tiled kernels round by the number of rows that an expert has at once. They are off on both sides, so that what is left is the order of work.

use std::fs;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::adapters::adapter;
use crate::architectures;
use crate::perplexity::figures;
use crate::summary::{largest, summaries};
use crate::support::process::{Finished, run};
use crate::support::server::Server;
use crate::support::stock::{Side, command, model_host, program, tool};
use crate::support::{Computed, fixture, fixture_model, text};

const LIMIT: Duration = Duration::from_secs(120);
/// What makes slices of every pass of a prompt.
const KEYS: &str = "log=debug;stream-min-tokens=9;debug-poison=on;cache=8";

/// Without the kernels that round by the number of rows.
pub(crate) fn untiled(command: &mut Command) -> &mut Command {
    command.env("GGML_CPU_TILED_MM", "0")
}

fn side(keys: &str) -> Side<'_> {
    Side::Plugin { keys, device: "MoE0" }
}

fn perplexity(side: Side<'_>, more: &[&str]) -> Finished {
    let mut command = tool("llama-perplexity", side, &fixture_model(), 2);
    command.args(["-f", text(&fixture("eval.txt")), "-c", "512", "--chunks", "4", "-b", "2048"]).args(more);
    run(untiled(&mut command), LIMIT).success()
}

/// What stock gives, computed once for each size of a pass.
fn stock(more: &[&str]) -> Vec<String> {
    static STOCK: Computed<Vec<String>> = Computed::new();
    STOCK.get(more.join(" "), || figures(&perplexity(Side::Stock, more)))
}

/// The largest number of blocks in slices, of a run whose passes brought their experts.
fn sliced(finished: &Finished) -> u64 {
    assert!(largest(&finished.log(), "streamed_blocks") > 0, "{}", finished.report("no long pass"));
    largest(&finished.log(), "sliced_blocks")
}

fn told(finished: &Finished) -> Vec<String> {
    finished.lines_with("computes its experts in slices of ")
}

#[test]
fn slices_equal_stock() {
    for batch in ["512", "2048"] {
        let more = ["-ub", batch];
        let stock = stock(&more);
        for (most, keys) in
            [("32", ""), ("100", ""), ("100", ";debug-map-all=on"), ("32", ";vram-budget-mb=64;vram-reserve-mb=1")]
        {
            let keys = format!("inner=CPU;{KEYS};slice-tokens={most}{keys}");
            let finished = perplexity(side(&keys), &more);
            assert_eq!(figures(&finished), stock, "{}", finished.report(&keys));
            assert_eq!(sliced(&finished), largest(&finished.log(), "streamed_blocks"), "{}", finished.report(&keys));
            let each = if most == "32" { 32 } else { 96 };
            let line = format!("a pass of {batch} tokens computes its experts in slices of {each} tokens");
            assert_eq!(finished.lines_with(&line).len(), 1, "{}", finished.report(&line));
        }
    }
}

/// Staging of single tensors, memory that does not come and go, graphs whose uses are not known, passes that are no longer than a slice, and what
/// is not worth it.
#[test]
fn whole_passes_where_slices_cannot_be_equal_stock() {
    let more = ["-ub", "512"];
    let stock = stock(&more);
    for keys in [
        "slice-tokens=32;debug-staging=three-tensors",
        "slice-tokens=32;debug-staging=two-tensors",
        "slice-tokens=32;lend=off",
        "slice-tokens=32;debug-graph=add-node",
        "slice-tokens=512",
        "slice-tokens=off",
        "slice-tokens=auto",
    ] {
        let keys = format!("inner=CPU;{KEYS};{keys}");
        let finished = perplexity(side(&keys), &more);
        assert_eq!(figures(&finished), stock, "{}", finished.report(&keys));
        assert_eq!(sliced(&finished), 0, "{}", finished.report(&keys));
    }
}

/// Over the device that copies and computes late, of each kind.
#[test]
fn slices_over_a_late_device_equal_stock() {
    let more = ["-ub", "512"];
    let stock = stock(&more);
    for (seed, most) in [(1, 100), (2, 32), (3, 32), (4, 100)] {
        let keys = format!("inner=LATE0;{KEYS};debug-late={seed};slice-tokens={most}");
        let finished = perplexity(side(&keys), &more);
        assert_eq!(figures(&finished), stock, "{}", finished.report(&keys));
        assert!(sliced(&finished) > 0, "{}", finished.report(&keys));
    }
}

/// Each product of a block is a sum of two then, one of them of two small products.
#[test]
fn adapters_of_experts_equal_stock() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("experts.gguf");
    adapter(&path, &["ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"], 0.1);
    let keys = format!("inner=CPU;{KEYS};slice-tokens=100");
    let more = ["-ub", "512", "--lora", text(&path)];
    let [stock, finished] = [Side::Stock, side(&keys)].map(|side| perplexity(side, &more));
    assert_eq!(figures(&finished), figures(&stock), "{}", finished.report(&keys));
    assert_ne!(figures(&stock), self::stock(&more[..2]), "the adapter changed nothing");
    assert!(sliced(&finished) > 0, "{}", finished.report(&keys));
}

/// Graphs that the host stops at every matrix, whose operands it reads.
#[test]
fn an_importance_matrix_equals_stock() {
    let folder = tempfile::tempdir().expect("a folder");
    let matrix = |side, name: &str| {
        let path = folder.path().join(name);
        let mut command = tool("llama-imatrix", side, &fixture_model(), 2);
        command.args(["-f", text(&fixture("eval.txt")), "-c", "256", "--chunks", "3", "-o", text(&path)]);
        run(untiled(&mut command), LIMIT).success();
        fs::read(&path).expect("the matrix was written")
    };
    let keys = format!("inner=CPU;{KEYS};slice-tokens=32");
    assert!(matrix(side(&keys), "plugin.gguf") == matrix(Side::Stock, "stock.gguf"), "the matrices differ");
}

/// A callback that stops graphs behind the last product of a block, and reads what it has read.
#[test]
fn operands_of_the_last_node_equal_stock() {
    let operands = |side, devices| {
        let output = tempfile::NamedTempFile::new().expect("a file");
        let mut command = command(&model_host(), side);
        command.args(["operands", "2", devices, text(&fixture_model()), text(output.path()), "600"]);
        let finished = run(untiled(&mut command), LIMIT).success();
        (fs::read(output.path()).expect("the operands"), finished)
    };
    let keys = format!("inner=CPU;{KEYS};slice-tokens=32");
    let ((stock, _), (ours, finished)) = (operands(Side::Stock, "cpu"), operands(side(&keys), "MoE0"));
    assert!(!stock.is_empty() && ours == stock, "{}", finished.report("operands differ"));
    assert!(largest(&finished.log(), "streamed_blocks") > 0, "{}", finished.report("no long pass"));
}

/// Memory that came for graphs, over all backends, and what was told that slices save.
fn compute_memory(keys: &str) -> (u64, u64) {
    let keys = format!("inner=CPU;{KEYS};{keys}");
    let mut command = program("llama-bench", side(&keys));
    command.args(["-m", text(&fixture_model()), "-dev", "MoE0", "-ngl", "99", "-t", "2", "-r", "1", "-o", "json"]);
    command.args(["-p", "4096", "-n", "0", "-b", "4096", "-ub", "4096", "--no-warmup", "-v"]);
    let finished = run(&mut command, LIMIT).success();
    let sum = summaries(&finished.log()).iter().filter_map(|summary| summary["lent_bytes"].as_u64()).sum();
    let lines = told(&finished);
    let saved = lines.first().and_then(|line| {
        let (_, rest) = line.split_once("which leaves ")?;
        rest.split_once(" MiB")?.0.parse().ok()
    });
    assert_eq!(saved.is_some(), !keys.contains("slice-tokens=off"), "{}", finished.report(&keys));
    (sum, saved.unwrap_or(0))
}

#[test]
fn slices_save_what_is_told() {
    let (whole, _) = compute_memory("slice-tokens=off");
    let (least, all) = compute_memory("slice-tokens=32");
    let (most, some) = compute_memory("slice-tokens=2048");
    for (bytes, saved) in [(least, all), (most, some)] {
        assert_eq!(whole.saturating_sub(bytes) >> 20, saved, "{whole} bytes without slices, {bytes} with them");
    }
    assert!(all > some && some > 0, "{all} and {some} MiB");
}

/// Architectures of test-llama-archs whose blocks can be cut: all but those with scales for each expert, which are repeated and picked by id.
const CUT: usize = 44;

#[test]
fn architectures_equal_stock() {
    let keys = format!("inner=CPU;{KEYS};slice-tokens=32");
    let ran = architectures::equal_after(230, side(&keys), &architectures::plain_models(), &[]);
    assert!(ran.sliced >= CUT, "slices in {} models", ran.sliced);
}

/// Where the memory for all tokens is not to be had, a pass runs in slices that nobody asked for; where the host's own bytes are lost, it fails, and
/// never answers with something else.
#[test]
fn a_pass_without_memory_runs_in_slices_or_fails() {
    // More than the 2,048 tokens that a slice of this model may have.
    let prompt: Vec<u32> = (0..2600_u32).map(|token| 300 + token * 7 % 600).collect();
    let body = json!({"prompt": prompt, "n_predict": 6, "temperature": 0, "ignore_eos": true, "return_tokens": true, "cache_prompt": false});
    let flags = ["-c", "4096", "-np", "1", "-b", "4096", "-ub", "4096", "--no-warmup"];
    let answer = |side: Side<'_>| {
        let mut command = tool("llama-server", side, &fixture_model(), 2);
        command.args(flags);
        let mut server = Server::launch(untiled(&mut command));
        server.wait_ready();
        let answer = server.answer("/completion", &body);
        let tokens: Option<Value> = (answer.status == 200)
            .then(|| serde_json::from_str::<Value>(&answer.body).expect("JSON")["tokens"].clone());
        (tokens, server.stop())
    };
    let (stock, _) = answer(Side::Stock);
    let (mut in_slices, mut failed) = (0, 0);
    for every in 16..=20 {
        let keys = format!("inner=CPU;{KEYS};debug-fail-alloc=lend:{every}");
        let (ours, finished) = answer(side(&keys));
        let fell_back = finished.lines_with("there is no memory for all of them at once").len();
        match ours {
            Some(_) => assert_eq!(ours, stock, "{}", finished.report(&keys)),
            None => failed += 1,
        }
        in_slices += u32::from(fell_back > 0 && ours.is_some() && largest(&finished.log(), "sliced_blocks") > 0);
    }
    assert!(in_slices > 0 && failed > 0, "{in_slices} in slices, {failed} failed");
}
