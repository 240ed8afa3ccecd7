//! A model that fits: what runs is stock, with its own kernels, buffers and threads, so that its speed is stock's as well.

use std::fs;

use super::support::process::{Finished, Running};
use super::support::server::{Completion, Server};
use super::support::stock::{Side, program};
use super::support::{fixture_model, text};
use super::{SMALL, one_decision, preload_plugin};

/// The bundled model fits 4 GiB.
const FITS: [&str; 5] = ["--moe", "inner=CPU", "--moe", "vram-budget-mb=4096", "--moe=log=debug"];

/// What the host says of devices, buffers, threads and graphs, without what differs from run to run.
fn arrangement(finished: &Finished) -> Vec<String> {
    let tells = |line: &&str| {
        ["buffer size", "n_threads", "graph ", "assigned to", "offloaded", "using device", "MoE", "repack", "fused"]
            .iter()
            .any(|word| line.contains(word))
    };
    let log = finished.log();
    // The host begins its lines with a time and a level.
    let words = |line: &str| line.rsplit(" I ").next().unwrap_or_default().trim().to_owned();
    log.lines().filter(|line| !line.contains("ggml-moe: ")).filter(tells).map(words).collect()
}

/// The names of its threads.
fn threads(process: &Running) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{}/task", process.id())).expect("it runs");
    let mut names: Vec<String> = tasks
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("comm")).ok())
        .map(|name| name.trim().to_owned())
        .collect();
    names.sort();
    names
}

/// With llama.cpp's own defaults, weights that are repacked for the processor's kernels included: no kernel but the same gives the same bits.
fn answer(help: &[&str]) -> (Completion, Vec<String>, Finished) {
    let mut command = program("llama-server", Side::Stock);
    command.args(["-m", text(&fixture_model()), "-t", "2", "-np", "1", "-lv", "4"]).args(SMALL);
    if !help.is_empty() {
        preload_plugin(&mut command);
    }
    let mut server = Server::launch(command.args(help));
    server.wait_ready();
    let completion = server.complete("A list comprehension is a concise way to", 24, 5);
    let threads = threads(server.process());
    (completion, threads, server.stop())
}

#[test]
fn a_model_that_fits_runs_as_stock_bit_for_bit() {
    let (stock, stock_threads, stock_log) = answer(&[]);
    let (fits, threads, log) = answer(&FITS);
    one_decision(&log, "ggml-moe: off: tiny-docs-moe.Q4_K_M.gguf fits: ");
    assert_eq!(fits, stock);
    assert_eq!(threads, stock_threads, "threads of ours");
    let expected = arrangement(&stock_log);
    assert!(expected.len() > 5 && expected.iter().any(|line| line.contains("buffer size")), "{expected:?}");
    assert_eq!(arrangement(&log), expected);
    assert_eq!(log.lines_with("ggml-moe: ").len(), 1, "{}", log.report("more than the decision"));
}
