//! Models that llama.cpp fetches itself: `-hf`, `-mu` and the models of a router, from a server of files on this machine, each time into a new
//! folder. What is decided is decided when the file is there; the launcher says that it cannot plan before, and plans the next time.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use super::hub::Hub;
use super::support::process::{Finished, run};
use super::support::server::Server;
use super::support::stock::{self, Side, command, preloaded, program};
use super::support::{fixture, fixture_model, text};
use super::{HELP, LIMIT, SMALL, decisions, host, older_server, preload_plugin, ran_in_blocks};

const NAME: &str = "tiny-docs-moe.Q4_K_M.gguf";

/// The tokens of an answer, and the log.
fn answer(command: &mut Command, more: &serde_json::Value) -> (Vec<serde_json::Value>, Finished) {
    let mut server = Server::launch_online(command.args(SMALL).args(["-np", "1"]));
    server.wait_ready();
    (server.complete_with("A list comprehension is", 16, 0, more).tokens, server.stop())
}

/// What b11434 answers with the file itself.
fn stock_tokens() -> Vec<serde_json::Value> {
    let mut command = host("llama-server");
    answer(command.arg("--offline"), &json!({})).0
}

/// A server without its model, which finds the hub and keeps what it fetches in the folder.
fn fetching(mut command: Command, hub: &Hub, folder: &Path, preloads: bool) -> Command {
    command.env("MODEL_ENDPOINT", hub.endpoint()).env("LLAMA_CACHE", folder).args(["-nr", "-t", "2"]);
    if preloads {
        preload_plugin(&mut command).args(HELP);
    }
    command
}

fn was_helped(finished: &Finished, name: &str) {
    let lines = decisions(finished);
    let start = format!("ggml-moe: on for {name}: ");
    assert!(lines.len() == 1 && lines[0].starts_with(&start), "{lines:?}: {}", finished.report("decisions"));
    ran_in_blocks(finished);
}

/// The bundled model in two files with names that the hub's have.
fn in_two(folder: &Path) -> Vec<(String, PathBuf)> {
    let base = folder.join("tiny-docs-moe.Q4_K_M");
    let mut split = program("llama-gguf-split", Side::Stock);
    run(split.args(["--split", "--split-max-size", "8M", text(&fixture_model()), text(&base)]), LIMIT).success();
    let file = |number| {
        let name = format!("tiny-docs-moe.Q4_K_M-{number:05}-of-00002.gguf");
        (name.clone(), folder.join(name))
    };
    vec![file(1), file(2)]
}

#[test]
fn fetched_models_are_helped() {
    let folder = tempfile::tempdir().expect("a folder");
    let parts = in_two(folder.path());
    let part = |at: usize| ("them/parts", parts[at].0.as_str(), parts[at].1.as_path());
    let model = fixture_model();
    let hub = Hub::open(&[("them/tiny-docs", NAME, &model), ("them/tiny-docs", "README.md", &model), part(0), part(1)]);
    let stock = stock_tokens();
    // A server that is given an address alone is a router; with a file's name it fetches to that.
    let (address, place) = (hub.address("them/tiny-docs", NAME), folder.path().join(NAME));
    let names = [parts[0].0.as_str(), parts[1].0.as_str()];
    for (number, (flags, files)) in [
        (&["-hf", "them/tiny-docs:Q4_K_M"][..], &[NAME][..]),
        (&["-hf", "them/parts"], &names),
        (&["--model-url", &address, "-m", text(&place)], &[NAME]),
    ]
    .into_iter()
    .enumerate()
    {
        let cache = folder.path().join(format!("new-{number}"));
        let mut command = fetching(program("llama-server", Side::Stock), &hub, &cache, true);
        let (tokens, finished) = answer(command.args(flags), &json!({}));
        assert_eq!(
            hub.take_fetched(),
            files,
            "{}",
            finished.report("fetched once, and it is the file that was helped")
        );
        assert_eq!(tokens, stock, "{}", finished.report("not equal to stock"));
        was_helped(&finished, files[0]);
    }
}

#[test]
fn models_that_b10434_fetches_are_helped() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = fixture_model();
    let hub = Hub::open(&[("them/tiny-docs", NAME, &model)]);
    let get = |preloads: bool| {
        let cache = folder.path().join(preloads.to_string());
        let mut command = fetching(older_server(), &hub, &cache, preloads);
        let got = answer(command.args(["-hf", "them/tiny-docs:Q4_K_M"]), &json!({}));
        assert_eq!(hub.take_fetched(), [NAME]);
        got
    };
    let (tokens, finished) = get(true);
    assert_eq!(tokens, get(false).0);
    was_helped(&finished, NAME);
}

/// Programs that end by themselves.
#[test]
fn what_the_other_programs_fetch_is_helped() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = fixture_model();
    let hub = Hub::open(&[("them/tiny-docs", NAME, &model)]);
    let talk = [&SMALL[..], &["-nr", "-n", "8", "-st", "--simple-io", "-lv", "4", "-p", "What is a list?"]].concat();
    let text_of = fixture("eval.txt");
    let chunks = [&SMALL[..], &["-nr", "-f", text(&text_of), "--chunks", "1"]].concat();
    let rows = ["-p", "32", "-n", "4", "-r", "1", "-v"];
    for (name, arguments) in [("llama-cli", &talk[..]), ("llama-perplexity", &chunks), ("llama-bench", &rows)] {
        let mut command = program(name, Side::Stock);
        command.env("MODEL_ENDPOINT", hub.endpoint()).env("LLAMA_CACHE", folder.path().join(name));
        command.args(["-t", "2", "-hf", "them/tiny-docs:Q4_K_M"]).args(arguments);
        let finished = run(preload_plugin(&mut command).args(HELP), LIMIT).success();
        assert_eq!(hub.take_fetched(), [NAME], "{}", finished.report("fetched once"));
        was_helped(&finished, NAME);
    }
}

/// The launcher before the file is there, and when it is.
#[test]
fn the_launcher_plans_with_what_is_there() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = fixture_model();
    let hub = Hub::open(&[("them/tiny-docs", NAME, &model)]);
    let stock = stock_tokens();
    let launcher = |flags: [&str; 2], more: &[&str]| {
        let mut launcher = command(Path::new(env!("CARGO_BIN_EXE_ggml-moe")), Side::Stock);
        launcher.env("LD_PRELOAD", preloaded("support/flush_log"));
        launcher.args(["run", "--plugin", text(stock::plugin())]).args(more).arg("--");
        launcher.arg(stock::folder().join("llama-server")).args(HELP).args(flags);
        fetching(launcher, &hub, folder.path(), false)
    };
    let hf = ["-hf", "them/tiny-docs:Q4_K_M"];
    let (tokens, first) = answer(&mut launcher(hf, &[]), &json!({}));
    assert_eq!(tokens, stock);
    was_helped(&first, NAME);
    let told = "ggml-moe: no plan: them/tiny-docs:Q4_K_M is not downloaded yet; the plugin decides when it is loaded";
    assert_eq!(first.lines_with(told).len(), 1, "{}", first.report("no plan"));
    assert_eq!((first.lines_with("ggml-moe: no plan").len(), hub.take_fetched().len()), (1, 1));

    let (tokens, second) = answer(&mut launcher(hf, &[]), &json!({}));
    assert_eq!((tokens, hub.take_fetched().len()), (stock, 0));
    was_helped(&second, NAME);
    assert_eq!(second.lines_with("no plan").len(), 0);
    let told = format!("ggml-moe: plan for {NAME}, which them/tiny-docs:Q4_K_M was when it was downloaded");
    assert_eq!(second.lines_with(&told).len(), 1, "{}", second.report("of what the plan is"));
    assert_eq!(second.lines_with("ggml-moe: experts: ").len(), 1, "{}", second.report("a plan"));

    let only = |flags: [&str; 2]| {
        let finished = run(&mut launcher(flags, &["--plan-only"]), LIMIT);
        (finished.status.code(), finished.stdout)
    };
    let (code, told) = only(hf);
    assert!(code == Some(0) && told.contains("experts: "), "{told}");
    let (code, told) = only(["-hf", "them/tiny-docs:Q8_0"]);
    assert!(code == Some(1) && told.contains("no plan: them/tiny-docs:Q8_0 is not downloaded yet"), "{told}");
    assert_eq!(hub.take_fetched().len(), 0, "planning fetches nothing");
}

/// A router whose presets name repositories; its servers fetch.
#[test]
fn what_a_router_fetches_is_helped() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = fixture_model();
    let hub = Hub::open(&[("them/tiny-docs", NAME, &model)]);
    let preset = folder.path().join("presets.ini");
    std::fs::write(&preset, "version = 1\n[docs]\nhf-repo = them/tiny-docs:Q4_K_M\n").expect("written");
    let mut command = fetching(program("llama-server", Side::Stock), &hub, &folder.path().join("new"), true);
    let (tokens, finished) = answer(command.args(["--models-preset", text(&preset)]), &json!({"model": "docs"}));
    assert_eq!(hub.take_fetched(), [NAME]);
    assert_eq!(tokens, stock_tokens());
    was_helped(&finished, NAME);
}
