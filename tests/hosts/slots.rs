//! Saved slots beyond one process: read by a fresh one, in other slots, with two in use; erased slots; files that are broken.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::summary::ran_in_blocks;
use crate::support::fixture_model;
use crate::support::process::Finished;
use crate::support::server::{Completion, Server};
use crate::support::stock::{OVER_CPU, Side};

const PROMPTS: [&str; 2] =
    ["The following example shows how to open a file and", "Ownership is a set of rules that govern how a program"];

fn start(side: Side<'_>, folder: &Path, flags: &[&str]) -> Server {
    let path = format!("{}/", folder.display());
    let more = ["-c", "1024", "-np", "2", "--no-warmup", "--slot-save-path", &path];
    Server::start(side, &fixture_model(), &[&more, flags].concat())
}

fn action(server: &Server, slot: usize, action: &str, file: &str) -> Value {
    server.post(&format!("/slots/{slot}?action={action}"), &json!({"filename": file}))
}

/// Fills two slots in one process and goes on in the other slot of another. Returns the saved files and what followed.
fn over_two_processes(side: Side<'_>, flags: &[&str]) -> (Vec<Vec<u8>>, Vec<Completion>, Finished) {
    let folder = tempfile::tempdir().expect("a folder");
    let names = ["first", "second"];
    let server = start(side, folder.path(), flags);
    for (slot, prompt) in PROMPTS.iter().enumerate() {
        server.complete_with(prompt, 16, 0, &json!({"id_slot": slot}));
    }
    for (slot, name) in names.iter().enumerate() {
        action(&server, slot, "save", name);
    }
    server.stop();
    let server = start(side, folder.path(), flags);
    for (slot, name) in names.iter().enumerate() {
        let restored = action(&server, 1 - slot, "restore", name);
        assert!(restored["n_restored"].as_u64().is_some_and(|count| count > 16), "{restored}");
    }
    let next = PROMPTS
        .iter()
        .enumerate()
        .map(|(slot, prompt)| server.complete_with(prompt, 24, 3, &json!({"id_slot": 1 - slot, "cache_prompt": true})));
    let next = next.collect();
    let saved = names.iter().map(|name| fs::read(folder.path().join(name)).expect("the slot was saved")).collect();
    (saved, next, server.stop())
}

fn equal_over_two_processes(flags: &[&str]) {
    let (stock_files, stock, _) = over_two_processes(Side::Stock, flags);
    let (plugin_files, plugin, finished) = over_two_processes(OVER_CPU, flags);
    assert_eq!(plugin, stock);
    assert!(plugin_files == stock_files, "{}", finished.report("the saved keys and values differ"));
    ran_in_blocks(&finished);
}

#[test]
fn a_fresh_process_goes_on_with_both_slots() {
    equal_over_two_processes(&[]);
}

#[test]
fn a_fresh_process_goes_on_with_both_slots_of_one_shared_quantized_cache() {
    // Idle slots would be emptied for one that works.
    equal_over_two_processes(&["-kvu", "--no-cache-idle-slots", "-ctk", "q8_0", "-ctv", "q8_0"]);
}

/// An erased slot knows nothing of its prompt, its neighbour knows all of its own.
#[test]
fn an_erased_slot_is_empty_and_its_neighbour_is_not() {
    let work = |side| {
        let folder = tempfile::tempdir().expect("a folder");
        let server = start(side, folder.path(), &[]);
        let ask = |slot: usize| {
            let body = json!({
                "prompt": PROMPTS[slot], "n_predict": 16, "temperature": 0, "seed": 1, "id_slot": slot, "cache_prompt": true,
                "return_tokens": true,
            });
            let answer = server.post("/completion", &body);
            (answer["tokens"].clone(), answer["timings"]["cache_n"].as_u64().expect("a count of cached tokens"))
        };
        let first = [ask(0), ask(1)];
        let erased = server.post("/slots/0?action=erase", &json!({}));
        assert!(erased["n_erased"].as_u64().is_some_and(|count| count > 16), "{erased}");
        let second = [ask(0), ask(1)];
        assert_eq!(second[0], first[0], "an empty slot computes the whole prompt anew");
        assert!(second[1].1 > 4, "the other slot kept its prompt: {second:?}");
        (first, second, server.stop())
    };
    let (stock_first, stock_second, _) = work(Side::Stock);
    let (first, second, finished) = work(OVER_CPU);
    assert_eq!((first, second), (stock_first, stock_second));
    ran_in_blocks(&finished);
}

/// A cut file is refused, and the server goes on as if nobody had asked.
#[test]
fn a_cut_slot_file_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = start(OVER_CPU, folder.path(), &[]);
    let answer = server.complete_with(PROMPTS[0], 16, 3, &json!({"id_slot": 0}));
    action(&server, 0, "save", "slot");
    let bytes = fs::read(folder.path().join("slot")).expect("the slot was saved");
    // A file that lacks its last byte ends stock itself, by an assertion in its own reader.
    for length in [8, bytes.len() / 4, bytes.len() / 2] {
        fs::write(folder.path().join("cut"), &bytes[..length]).expect("a cut copy");
        let refused = server.answer("/slots/1?action=restore", &json!({"filename": "cut"}));
        assert_eq!(refused.status, 400, "{length} of {} bytes: {}", bytes.len(), refused.body);
    }
    action(&server, 1, "restore", "slot");
    let fresh = server.complete_with(PROMPTS[0], 16, 3, &json!({"id_slot": 1, "cache_prompt": false}));
    assert_eq!(fresh, answer);
    server.stop();
}
