//! What the host prints of memory when it ends, beside what its buffers are and what we say that we have: as a plugin and preloaded, with a
//! cache of a fixed size and one that takes what is free.

use std::process::Command;

use super::support::process::Finished;
use super::support::server::Server;
use super::support::stock::{Side, program};
use super::support::{fixture_model, text};
use super::{host, preload_plugin, ran_in_blocks};

/// What the device is said to have; its weights fit, and the context does not.
const BUDGET_MIB: f64 = 80.0;

/// A server with a context of 48 MiB that answers, and what it left.
fn served(mut command: Command) -> Finished {
    let command = command.args(["-c", "16384", "-np", "1", "-b", "512", "-ub", "512", "-fit", "off", "-lv", "4"]);
    let mut server = Server::launch(command);
    server.wait_ready();
    let prompt = "A list comprehension is ".repeat(60);
    assert_eq!(server.complete(&prompt, 8, 0).tokens.len(), 8);
    let finished = server.stop();
    ran_in_blocks(&finished);
    finished
}

/// The row of our device in the last table: total, free, self, model, context, compute, unaccounted.
fn row(finished: &Finished) -> [f64; 7] {
    let line = finished.lines_with("- MoE0 (").pop().expect("a table");
    let numbers = line.rsplit_once("experts in RAM)").expect("our description").1;
    let numbers: Vec<f64> =
        numbers.split(|c: char| !c.is_ascii_digit() && c != '-').filter_map(|word| word.parse().ok()).collect();
    numbers.try_into().unwrap_or_else(|_| panic!("{line}"))
}

/// The last size of a buffer of ours in the host's log.
fn buffer(finished: &Finished, kind: &str) -> f64 {
    let line = finished.lines_with(&format!("MoE0 {kind} buffer size =")).pop().expect("a size");
    let size = line.rsplit_once('=').expect("it has it").1.trim().trim_end_matches("MiB").trim();
    size.parse().unwrap_or_else(|_| panic!("{line}"))
}

/// The part of our own account, as it was when the cache was made.
fn account(finished: &Finished, part: &str) -> f64 {
    let line = finished.lines_with(": memory of CPU: ").pop().expect("an account");
    let size = line.rsplit_once(&format!("{part} ")).expect("the part").1;
    size.split(' ').next().and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{line}"))
}

fn is_true(finished: &Finished, cache: std::ops::RangeInclusive<f64>) {
    let [total, free, own, model, context, compute, rest] = row(finished);
    let report = || finished.report("memory");
    let near = |one: f64, other: f64| (one - other).abs() < 1.01;
    // The host's table is what its buffers are.
    let buffers = ["model", "KV", "compute"].map(|kind| buffer(finished, kind));
    assert!(near(model, buffers[0]) && near(context, buffers[1]) && near(compute, buffers[2]), "{}", report());
    assert!(context > 40.0 && compute > 4.0, "large enough to be seen: {}", report());
    // Our account is the same. Memory for computing comes with the graphs, and is counted as if all of it were there.
    assert!(near(account(finished, "dense weights"), model) && near(account(finished, "KV"), context), "{}", report());
    assert!(cache.contains(&account(finished, "cache")), "{}", report());
    // What is left of the budget is free, the cache's part with it; what nobody but us knows of is staging.
    let staging: f64 = {
        let line = finished.lines_with("staging of whole layers, 2 buffers of ").pop().unwrap_or_default();
        let each = line.rsplit_once("buffers of ").and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
        2.0 * each.unwrap_or(0.0)
    };
    assert!((total - BUDGET_MIB).abs() < 0.1 && (total - free - own - rest).abs() < 3.0, "{}", report());
    let taken = buffers.iter().sum::<f64>() + staging;
    assert!((free - (BUDGET_MIB - taken)).abs() < 2.5, "{free} free beside {taken}: {}", report());
    assert!((rest - staging).abs() < 2.5, "{rest} beside {staging}: {}", report());
}

#[test]
fn the_table_of_memory_is_true() {
    let keys = |more: &str| format!("inner=CPU;vram-budget-mb=80;vram-reserve-mb=1;log=debug;{more}");
    for (more, cache) in [("cache=4", 3.0..=4.0), ("cache=auto", 1.0..=12.0)] {
        let keys = keys(more);
        let mut command = program("llama-server", Side::Plugin { keys: &keys, device: "MoE0" });
        command.args(["-m", text(&fixture_model()), "-nr", "-t", "2", "--device", "MoE0"]);
        is_true(&served(command), cache);
    }
    let mut command = host("llama-server");
    command.env("GGML_MOE", keys("cache=auto;state-file=off"));
    let finished = served({
        preload_plugin(&mut command);
        command
    });
    assert_eq!(finished.lines_with("ggml-moe: on for ").len(), 1, "{}", finished.report("not helped"));
    is_true(&finished, 1.0..=12.0);
}
