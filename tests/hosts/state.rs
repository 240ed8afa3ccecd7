//! Saving and restoring what the device holds: the server's slots, and the stock state tests.

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::json;

use crate::architectures::plain_models;
use crate::summary::summaries;
use crate::support::fixture_model;
use crate::support::process::run;
use crate::support::server::{Completion, Server};
use crate::support::stock::{OVER_CPU, Side, program, tool};

/// Generates in slot 0, saves it, restores it into slot 1 and goes on there. Returns the saved bytes and what followed.
fn save_and_go_on(side: Side<'_>, folder: &Path) -> (Vec<u8>, Completion) {
    let path = format!("{}/", folder.display());
    let server = Server::start(side, &fixture_model(), &["-c", "1024", "-np", "2", "--slot-save-path", &path]);
    let prompt = "The following example shows how to open a file and";
    server.complete_with(prompt, 16, 0, &json!({"id_slot": 0}));
    let saved = server.post("/slots/0?action=save", &json!({"filename": "slot"}));
    server.post("/slots/0?action=erase", &json!({}));
    let restored = server.post("/slots/1?action=restore", &json!({"filename": "slot"}));
    assert!(saved["n_saved"].as_u64().is_some_and(|count| count > 16), "{saved}");
    assert_eq!(restored["n_restored"], saved["n_saved"]);
    let next = server.complete_with(prompt, 24, 3, &json!({"id_slot": 1, "cache_prompt": true}));
    server.stop();
    (fs::read(folder.join("slot")).expect("the slot was saved"), next)
}

#[test]
fn a_restored_slot_goes_on_as_in_stock() {
    let folders = [tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder")];
    let (stock_bytes, stock) = save_and_go_on(Side::Stock, folders[0].path());
    let (plugin_bytes, plugin) = save_and_go_on(OVER_CPU, folders[1].path());
    assert_eq!(plugin, stock);
    assert!(plugin_bytes == stock_bytes, "the saved keys and values differ");
}

/// A file that stock saved is read by the plugin, and the other way round.
#[test]
fn saved_slots_are_exchangeable_with_stock() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_, saved_by_stock) = save_and_go_on(Side::Stock, folder.path());
    let path = format!("{}/", folder.path().display());
    let server = Server::start(OVER_CPU, &fixture_model(), &["-c", "1024", "-np", "2", "--slot-save-path", &path]);
    server.post("/slots/1?action=restore", &json!({"filename": "slot"}));
    let prompt = "The following example shows how to open a file and";
    let next = server.complete_with(prompt, 24, 3, &json!({"id_slot": 1, "cache_prompt": true}));
    server.stop();
    assert_eq!(next, saved_by_stock);
}

fn stock_test(name: &str, more: &[&str], last_words: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = tool(name, OVER_CPU, &fixture_model(), 2);
    // These tests write a state file into the folder that they run in.
    command.args(more).current_dir(folder.path());
    let finished = run(&mut command, Duration::from_secs(120)).success();
    assert!(finished.log().contains(last_words), "{}", finished.report("the test did not run to its end"));
    assert!(crate::summary::largest(&finished.log(), "graphs") > 0, "{}", finished.report("nothing ran on MoE0"));
}

#[test]
fn stock_save_load_state() {
    stock_test("test-save-load-state", &[], "All tests passed.");
}

/// The same ten checks on every MoE architecture: recurrent states, sliding windows, indexers and latent caches lie in our buffers.
#[test]
fn stock_save_load_state_of_every_architecture() {
    let models = plain_models();
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = program("test-save-load-state", OVER_CPU);
    command.arg("--models").arg(models[0].parent().expect("the models lie in a folder"));
    command.args(["--device", "MoE0", "-ngl", "99", "-nr", "-t", "2"]).current_dir(folder.path());
    let finished = run(&mut command, Duration::from_secs(240)).success();
    let rows =
        finished.stdout.lines().filter(|line| line.contains(".gguf") && line.matches("PASS").count() == 10).count();
    assert_eq!(rows, models.len(), "{}", finished.report("a row of ten passes for each model"));
}

/// An idle server frees its model and loads it again for the next request.
#[test]
fn a_server_that_slept_answers_as_before() {
    let more = ["-c", "512", "-np", "1", "--sleep-idle-seconds", "1"];
    let mut server = Server::start(OVER_CPU, &fixture_model(), &more);
    let before = server.complete("The standard library", 16, 3);
    let asleep =
        |log: &str| summaries(log).iter().any(|summary| summary["blocks"].as_u64().is_some_and(|blocks| blocks > 0));
    server.process().wait_until("the plugin's summary", Duration::from_secs(60), asleep);
    assert_eq!(server.complete("The standard library", 16, 3), before);
    server.stop();
}

#[test]
fn stock_state_restore_fragmented() {
    stock_test("test-state-restore-fragmented", &[], "SUCCESS - state restore works with fragmented KV cache");
}

/// Four contexts of two models, one of them on our device, at the same time.
#[test]
fn stock_thread_safety() {
    let more = ["-p", "The meaning of life is", "-n", "24", "-c", "256", "-np", "2", "-ub", "32"];
    stock_test("test-thread-safety", &more, "All threads finished without errors.");
}
