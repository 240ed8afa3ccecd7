//! The library in `LD_PRELOAD`: programs of stock llama.cpp whose models it helps answer as without it; what it need not or must not touch
//! stays as it is.
//!
//! ggml's CPU backend is the inner device, and `vram-budget-mb` what makes the bundled model (14 MiB) too large for it.
//! `make stock stock-matrix` first, then `cargo test --test preload -- --test-threads=1`.
#![expect(clippy::expect_used, clippy::panic, reason = "a test reports by panicking")]

#[path = "preload/downloads.rs"]
mod downloads;
#[path = "preload/equal.rs"]
mod equal;
#[path = "preload/hub.rs"]
mod hub;
#[path = "preload/launched.rs"]
mod launched;
#[path = "preload/masks.rs"]
mod masks;
#[path = "preload/memory.rs"]
mod memory;
#[path = "preload/planned.rs"]
mod planned;
#[path = "hosts/summary.rs"]
mod summary;
#[expect(dead_code, reason = "the gates use more of it")]
mod support;
#[path = "preload/untouched.rs"]
mod untouched;

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::json;

use summary::{ran_in_blocks, summaries};
use support::process::{Finished, run};
use support::server::{Completion, Server};
use support::stock::{self, Side, command, compile, preloaded, program, tool};
use support::{fixture, fixture_model, text};

const LIMIT: Duration = Duration::from_secs(120);
/// What makes the bundled model one that is helped, in the spellings that there are.
const HELP: [&str; 9] = [
    "--moe",
    "inner=CPU",
    "--moe",
    "vram-budget-mb",
    "13",
    "--moe=log=debug",
    "--moe=state-file=off",
    "--moe",
    "threads=1",
];
const SMALL: [&str; 6] = ["-c", "256", "-b", "64", "-ub", "64"];

/// Puts the plugin itself before all other libraries of a program.
fn preload_plugin(command: &mut Command) -> &mut Command {
    let libraries = [stock::plugin().to_owned(), preloaded("support/flush_log")].map(|path| path.display().to_string());
    command.env("LD_PRELOAD", libraries.join(" "))
}

/// A stock program with the bundled model, not repacked, and without any flag that places weights.
fn host(name: &str) -> Command {
    let mut command = program(name, Side::Stock);
    command.args(["-m", text(&fixture_model()), "-nr", "-t", "2"]);
    command
}

/// Runs the same command line without the library, and with it and `more`.
fn both(make: impl Fn() -> Command, more: &[&str]) -> (Finished, Finished) {
    let stock = run(&mut make(), LIMIT).success();
    let mut command = make();
    let preloaded = run(preload_plugin(&mut command).args(more), LIMIT).success();
    (stock, preloaded)
}

/// The library's own decisions.
fn decisions(finished: &Finished) -> Vec<String> {
    let is_decision = |line: &String| line.starts_with("ggml-moe: on for ") || line.starts_with("ggml-moe: off: ");
    // The host may have begun a line with the time.
    let own = |line: String| line.find("ggml-moe: ").and_then(|at| line.get(at..)).map(str::to_owned);
    finished.lines_with("ggml-moe: ").into_iter().filter_map(own).filter(is_decision).collect()
}

fn one_decision(finished: &Finished, start: &str) {
    let lines = decisions(finished);
    assert!(lines.len() == 1 && lines[0].starts_with(start), "{lines:?} for {start}: {}", finished.report("decisions"));
}

fn was_helped(finished: &Finished) {
    one_decision(finished, "ggml-moe: on for tiny-docs-moe");
    ran_in_blocks(finished);
}

#[test]
fn perplexity_equals_stock() {
    let make = || {
        let mut command = host("llama-perplexity");
        command.args(SMALL).args(["-f", text(&fixture("eval.txt")), "--chunks", "2"]);
        command
    };
    let figure = |finished: &Finished| {
        let line = finished.lines_with("Final estimate").pop().expect("a result");
        line.split_once("Final").expect("it begins so").1.to_owned()
    };
    let (stock, preloaded) = both(make, &HELP);
    was_helped(&preloaded);
    assert_eq!(figure(&preloaded), figure(&stock));
}

#[test]
fn cli_equals_stock() {
    let make = || {
        let mut command = host("llama-cli");
        command.args(SMALL).args(["-n", "16", "--temp", "0", "--seed", "1", "-st", "--simple-io"]);
        command.args(["--no-display-prompt", "--no-show-timings", "-p", "What is a list?"]);
        command
    };
    let (stock, preloaded) = both(make, &HELP);
    one_decision(&preloaded, "ggml-moe: on for ");
    assert!(stock.stdout.len() > 20 && preloaded.stdout == stock.stdout, "{}", preloaded.report("not equal"));
    let mut verbose = make();
    was_helped(&run(preload_plugin(&mut verbose).args(HELP).args(["-lv", "4"]), LIMIT).success());
}

#[test]
fn bench_runs_on_our_device() {
    let mut command = program("llama-bench", Side::Stock);
    command.args(["-m", text(&fixture_model()), "-t", "2", "-p", "32", "-n", "4", "-r", "1", "-o", "json", "-v"]);
    let finished = run(preload_plugin(&mut command).args(HELP), LIMIT).success();
    was_helped(&finished);
    let rows: serde_json::Value = serde_json::from_str(&finished.stdout).expect("JSON");
    assert_eq!(rows.as_array().map(Vec::len), Some(2), "{rows}");
}

fn ask(mut command: Command, more: &[&str]) -> (Completion, Finished) {
    let mut server = Server::launch(command.args(SMALL).args(["-np", "1"]).args(more));
    server.wait_ready();
    (server.complete("A list comprehension is", 24, 3), server.stop())
}

#[test]
fn server_equals_stock() {
    let (stock, _) = ask(host("llama-server"), &[]);
    let mut command = host("llama-server");
    preload_plugin(&mut command);
    let (preloaded, finished) = ask(command, &HELP);
    assert_eq!(preloaded, stock);
    was_helped(&finished);
}

/// The server of another release that others have built.
fn older_server() -> Command {
    let matrix = |arguments: &[&str]| {
        let script = support::package().join("tests/stock/matrix.sh");
        run(Command::new(script).args(arguments), LIMIT).success().stdout
    };
    let list = matrix(&["list"]);
    let line = list.lines().find(|line| line.split_whitespace().next() == Some("b10434")).expect("the matrix has it");
    let folder = Path::new(line.split_whitespace().nth(2).expect("a folder"));
    let mut command = command(&folder.join("llama-server"), Side::Stock);
    if let Some(folder) = matrix(&["cpu", "b10434"]).lines().next() {
        command.env("LD_LIBRARY_PATH", folder);
    }
    command
}

#[test]
fn the_server_of_b10434_equals_stock() {
    let make = || {
        let mut command = older_server();
        command.args(["-m", text(&fixture_model()), "-nr", "-t", "2"]);
        command
    };
    let (stock, _) = ask(make(), &[]);
    let mut command = make();
    preload_plugin(&mut command);
    let (preloaded, finished) = ask(command, &HELP);
    assert_eq!(preloaded, stock);
    was_helped(&finished);
}

/// A router loads nothing itself; the servers that it starts read the settings from its environment.
#[test]
fn servers_of_a_router_are_helped() {
    let folder = tempfile::tempdir().expect("a folder");
    symlink(fixture_model(), folder.path().join("routed.gguf")).expect("a link");
    let complete = |help: &[&str]| {
        let mut command = program("llama-server", Side::Stock);
        command.args(["--models-dir", text(folder.path()), "-nr", "-t", "2", "-np", "1"]).args(SMALL);
        if !help.is_empty() {
            preload_plugin(&mut command);
        }
        if help.contains(&"off") {
            // By its name alone, found by the loader.
            let (folder, name) = (stock::plugin().parent(), stock::plugin().file_name());
            command.env("LD_LIBRARY_PATH", folder.expect("a folder")).env("LD_PRELOAD", name.expect("a name"));
        }
        let mut server = Server::launch(command.args(help));
        server.wait_ready();
        (server.complete_with("A tuple is", 16, 0, &json!({"model": "routed"})).tokens, server.stop())
    };
    let (stock, _) = complete(&[]);
    let (tokens, finished) = complete(&HELP);
    assert_eq!(tokens, stock);
    ran_in_blocks(&finished);
    assert_eq!(finished.lines_with("ggml-moe: on for routed.gguf").len(), 1, "{}", finished.report("one child"));
    let (tokens, finished) = complete(&["--moe", "off"]);
    assert_eq!(tokens, stock);
    assert_eq!(finished.lines_with("ggml-moe: ").len(), 0, "{}", finished.report("off holds for what it starts"));
}

/// A file by a link with another name, as the folder of downloads has it, and a model of several files.
#[test]
fn links_and_split_models_are_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let link = folder.path().join("d1b2a3");
    symlink(fixture_model(), &link).expect("a link");
    let mut split = program("llama-gguf-split", Side::Stock);
    split.args(["--split", "--split-max-tensors", "30", text(&fixture_model()), text(&folder.path().join("part"))]);
    run(&mut split, LIMIT).success();
    let files = std::fs::read_dir(folder.path()).expect("a folder").count();
    assert!(files > 3, "a link and several files, not {files}");
    let first = folder.path().join(format!("part-00001-of-{:05}.gguf", files - 1));
    for (model, name) in [(&link, "d1b2a3"), (&first, "part-00001-of-")] {
        let mut command = program("llama-bench", Side::Stock);
        command.args(["-m", text(model), "-t", "2", "-p", "16", "-n", "0", "-r", "1", "-v"]);
        let finished = run(preload_plugin(&mut command).args(HELP), LIMIT).success();
        one_decision(&finished, &format!("ggml-moe: on for {name}"));
        ran_in_blocks(&finished);
    }
}

/// All functions that load files, from a program of our own; and the same in one that is no llama.cpp program, but opens the library.
#[test]
fn every_function_that_loads_is_reached() {
    let backends = format!("-DBACKENDS=\"{}\"", stock::folder().display());
    let deprecated = "-Wno-deprecated-declarations";
    let library = stock::folder().join("libllama.so");
    let loads = ["load 0: ok", "load 1: ok", "load 2: ok", "load 3: ok"];
    let run_host = |path: &Path, arguments: &[&str]| {
        let mut host = command(path, Side::Stock);
        let finished = run(preload_plugin(host.arg(fixture_model())).args(arguments), LIMIT).success();
        assert!(loads.iter().all(|line| finished.stdout.contains(line)), "{}", finished.report("loads"));
        finished
    };
    let linked = compile("preload/loads.c", "loads", &["-DLINKED", &backends, deprecated]);
    let finished = run_host(&linked, &[&HELP[..], &["--moe", "pass-tokens=96"]].concat());
    // All four are there at once, so that what is free differs.
    let on = decisions(&finished).iter().filter(|line| line.starts_with("ggml-moe: on for ")).count();
    assert_eq!(on, 4, "{}", finished.report("decisions"));
    assert_eq!(finished.lines_with("for experts").iter().filter(|line| line.contains("of RAM")).count(), 4);
    for number in 0..4 {
        assert!(finished.stdout.contains(&format!("context {number}: 512 96")), "{}", finished.report("passes of 96"));
    }

    let opening = compile("preload/loads.c", "opens", &[&backends, deprecated]);
    let finished = run_host(&opening, &[text(&library)]);
    assert_eq!(finished.lines_with("ggml-moe: ").len(), 0, "{}", finished.report("no llama.cpp program"));
}

/// The length of passes, where the user left it open.
#[test]
fn passes_are_as_long_as_asked() {
    let pass = |more: &[&str]| {
        let mut command = host("llama-server");
        command.args(["-c", "512", "-np", "1", "-lv", "4"]).args(more);
        preload_plugin(&mut command).args(HELP).args(["--moe", "vram-budget-mb=13", "--moe", "pass-tokens=96"]);
        let mut server = Server::launch(&mut command);
        server.wait_ready();
        let finished = server.stop();
        finished.lines_with("n_ubatch").iter().any(|line| line.trim_end().ends_with("= 96"))
    };
    assert!(pass(&[]));
    assert!(!pass(&["-ub", "64", "-b", "64"]), "the user's own holds");
}

/// `--fit` loads without memory, several times, and changes the parameters: they are then not the user's, and the decision stays.
#[test]
fn the_fit_step_lays_out_on_our_device() {
    let mut command = host("llama-perplexity");
    // More than is reported free, so that layers have to go.
    command.args(SMALL).args(["-f", text(&fixture("eval.txt")), "--chunks", "1", "-fitt", "3000", "-lv", "4"]);
    let finished = run(preload_plugin(&mut command).args(HELP), LIMIT).success();
    one_decision(&finished, "ggml-moe: on for ");
    let said = |text: &str| !finished.lines_with(text).is_empty();
    assert!(said("cannot meet free memory target"), "{}", finished.report("the fit step changed nothing"));
    assert!(said("using device MoE0"), "{}", finished.report("loaded elsewhere"));
}

/// Settings that the user made, models that fit, machines without GPU: stock, and one line.
#[test]
fn what_needs_no_help_gets_none() {
    let bench = |more: &[&str]| {
        let mut command = program("llama-bench", Side::Stock);
        command.args(["-m", text(&fixture_model()), "-t", "2", "-p", "8", "-n", "0", "-r", "1", "-o", "json", "-v"]);
        run(preload_plugin(&mut command).args(more), LIMIT).success()
    };
    let with_help = |more: &[&str]| bench(&[&HELP[..], more].concat());
    for (more, line) in [
        (&["-ngl", "99"][..], "ggml-moe: off: -ngl was given and is left alone"),
        (&["-ncmoe", "2"], "ggml-moe: off: -ncmoe was given"),
        (&["-ot", "exps=CPU"], "ggml-moe: off: -ot was given"),
        (
            &["--moe", "vram-budget-mb=64"],
            "ggml-moe: off: tiny-docs-moe.Q4_K_M.gguf fits: 25 MiB with 8 tokens of context, 64 MiB free",
        ),
        (&["--moe", "inner=NONE7"], "ggml-moe: off: settings: inner=NONE7 names no device of this host; it has "),
    ] {
        let finished = with_help(more);
        one_decision(&finished, line);
        let rows: serde_json::Value = serde_json::from_str(&finished.stdout).expect("JSON");
        assert_eq!(rows[0]["backends"], "CPU", "the host does not know us: {rows}");
        assert!(summaries(&finished.log()).is_empty(), "{}", finished.report("it ran"));
    }
    one_decision(&bench(&[]), "ggml-moe: off: no local GPU was found");
    let mut asked = HELP.to_vec();
    asked.extend(["-ngl", "99", "--moe", "cache=auto"]);
    was_helped(&bench(&asked));
    let mut named = program("llama-bench", Side::Stock);
    named.args(["-m", text(&fixture_model()), "-t", "2", "-p", "8", "-n", "0", "-r", "1", "-v", "-dev", "MoE0"]);
    let finished = run(preload_plugin(&mut named).args(HELP), LIMIT).success();
    one_decision(&finished, "ggml-moe: on for tiny-docs-moe.Q4_K_M.gguf: -dev MoE0 names the device");
    ran_in_blocks(&finished);
    let mut placed = program("llama-bench", Side::Stock);
    placed.args(["-m", text(&fixture_model()), "-t", "2", "-p", "8", "-n", "0", "-r", "1", "-v", "-dev", "MoE0"]);
    let finished = run(preload_plugin(&mut placed).args(["-ncmoe", "2"]).args(HELP), LIMIT).success();
    let line = "-ncmoe was given and is left alone, so there is no cache of experts; ask for one with --moe cache=auto";
    assert_eq!(finished.lines_with(line).len(), 1, "{}", finished.report("a device that was named"));
}

/// A dense model, and `--moe off`: not even a line more than in stock's log, or the one that says why.
#[test]
fn off_is_stock() {
    let make = || {
        let mut command = host("llama-perplexity");
        command.args(SMALL).args(["-f", text(&fixture("eval.txt")), "--chunks", "1"]);
        command
    };
    let (stock, off) = both(make, &["--moe", "inner=CPU", "--moe", "off"]);
    let plain = |finished: &Finished| -> Vec<String> {
        let is_result = |line: &&str| line.contains("PPL") || line.contains("[1]");
        finished.stdout.lines().filter(is_result).map(str::to_owned).collect()
    };
    assert_eq!(plain(&off), plain(&stock));
    assert_eq!(off.lines_with("ggml-moe: ").len(), 0, "{}", off.report("off"));
}

#[test]
fn faults_are_told_and_exit_codes_kept() {
    let bench = |more: &[&str]| {
        let mut command = program("llama-bench", Side::Stock);
        command.args(["-m", text(&fixture_model()), "-t", "2", "-p", "8", "-n", "0", "-r", "1"]);
        run(preload_plugin(&mut command).args(more), LIMIT)
    };
    for (more, line) in [
        (&["--moe", "cahce=4"][..], "ggml-moe: settings: unknown key \"cahce\"; did you mean \"cache\"?"),
        (&["--moe", "cache=lots"], "ggml-moe: settings: cache=lots is not usable and ignored"),
        (&["--moe", "cache", "-v"], "ggml-moe: --moe cache needs a value: --moe cache=VALUE; it is ignored"),
        (&["--moe"], "ggml-moe: --moe needs a setting after it"),
        (&["--moe", "-v"], "ggml-moe: --moe needs a setting after it"),
        (&["--moe-expert-cache", "-5"], "ggml-moe: settings: moe-expert-cache=-5 is not usable"),
        (&["--moe-expert-cache", "many"], "ggml-moe: settings: moe-expert-cache=many is not usable"),
        (&["--moe-expert-cache"], "ggml-moe: --moe-expert-cache needs a number after it"),
        (
            &["--moe", "cache=off", "--moe", "policy=window"],
            "ggml-moe: settings: without effect: policy (cache=off: there is no cache)",
        ),
        (
            &["--moe", "cache=4", "--moe", "cache", "5"],
            "ggml-moe: settings: set more than once, the last holds: cache=5",
        ),
    ] {
        let finished = bench(more).success();
        assert_eq!(finished.lines_with(line).len(), 1, "{}", finished.report(line));
    }
    // The last of two holds, and the command line before the environment.
    let mut command = program("llama-bench", Side::Stock);
    command.args(["-m", text(&fixture_model()), "-t", "2", "-p", "8", "-n", "0", "-r", "1"]);
    command.env("GGML_MOE", "inner=CPU;vram-budget-mb=13,log=error");
    command.args(["--moe", "vram-budget-mb=99", "--moe", "log=notice", "--moe", "vram-budget-mb=98"]);
    let finished = run(preload_plugin(&mut command), LIMIT).success();
    one_decision(
        &finished,
        "ggml-moe: off: tiny-docs-moe.Q4_K_M.gguf fits: 25 MiB with 8 tokens of context, 98 MiB free",
    );

    let code = |command: &mut Command| run(command, LIMIT).status.code();
    let wrong = |more: &[&str]| {
        let mut command = host("llama-server");
        command.args(more).arg("--no-such-flag");
        command
    };
    let mut preloaded = wrong(&["--moe", "cache=4"]);
    assert_eq!(code(preload_plugin(&mut preloaded)), code(&mut wrong(&[])));
    let mut preloaded = wrong(&["--moe", "cahce=4", "--moe-expert-cache", "many", "--moe"]);
    assert_eq!(code(preload_plugin(&mut preloaded)), code(&mut wrong(&[])));
    // Loaded by GGML_BACKEND_PATH the library takes nothing out of anything.
    let mut plugin = tool("llama-server", Side::Plugin { keys: "inner=CPU", device: "MoE0" }, &fixture_model(), 2);
    let refused = run(plugin.args(["--moe", "cache=4"]), LIMIT).clean_failure();
    assert!(!refused.lines_with("invalid argument: --moe").is_empty(), "{}", refused.report("the host knows no --moe"));
}

#[test]
fn help_is_printed() {
    let mut page = program("llama-server", Side::Stock);
    let finished = run(preload_plugin(&mut page).args(["--moe", "help"]), LIMIT).success();
    assert!(
        finished.stdout.starts_with(concat!("ggml-moe ", env!("CARGO_PKG_VERSION"), ": settings"))
            && finished.stdout.contains("\nvram-budget-mb ")
            && !finished.stdout.contains("debug-"),
        "{}",
        finished.stdout
    );
    for name in ["llama-server", "llama-cli", "llama-bench", "llama-perplexity"] {
        let (mut stock, mut preloaded) = (program(name, Side::Stock), program(name, Side::Stock));
        let stock = run(stock.arg("--help"), LIMIT).success();
        let preloaded = run(preload_plugin(&mut preloaded).arg("--help"), LIMIT).success();
        let section = preloaded.stdout.strip_prefix(&stock.stdout).unwrap_or_else(|| panic!("{name}: another help"));
        assert!(section.contains("--moe KEY=VALUE"), "{name}: {section}");
    }
    let version = |preloads: bool| {
        let mut command = program("llama-server", Side::Stock);
        if preloads {
            preload_plugin(&mut command);
        }
        let finished = run(command.arg("--version"), LIMIT).success();
        (finished.stdout, finished.stderr)
    };
    assert_eq!(version(true), version(false));
}

/// The device that is named is found without GGML_BACKEND_PATH, and beside another library in it.
#[test]
fn named_devices_and_other_plugins_are_loaded() {
    let list = |path: Option<&Path>| {
        let mut command = program("llama-server", Side::Stock);
        if let Some(path) = path {
            command.env("GGML_BACKEND_PATH", path);
        }
        preload_plugin(&mut command).args(["--list-devices", "--moe", "inner=CPU"]);
        let finished = run(&mut command, LIMIT).success();
        finished.lines_with("MoE0: ").len()
    };
    assert_eq!(list(None), 1);
    assert_eq!(list(Some(&stock::folder().join("libggml-rpc.so"))), 1);
    assert_eq!(list(Some(stock::plugin())), 1, "the same file twice is one library");
}

/// Programs that are no llama.cpp, linked statically and not, and what a shell starts.
#[test]
fn foreign_programs_are_left_alone() {
    let dynamic = compile("preload/foreign.c", "foreign", &[]);
    let folder = tempfile::tempdir().expect("a folder");
    let fixed = folder.path().join("foreign");
    let source = support::package().join("tests/preload/foreign.c");
    run(Command::new("cc").arg("-static").arg("-o").arg(&fixed).arg(&source), LIMIT).success();
    let arguments = ["--moe", "cache=4", "--moe", "help", "-m", "x"];
    for path in [&dynamic, &fixed] {
        let output = |preloads: bool| {
            let mut command = command(path, Side::Stock);
            command.env("GGML_MOE", "nonsense").args(arguments);
            if preloads {
                preload_plugin(&mut command);
            }
            let finished = run(&mut command, LIMIT);
            let lines: Vec<String> =
                finished.stdout.lines().filter(|line| !line.starts_with("LD_PRELOAD=")).map(str::to_owned).collect();
            (finished.status.code(), lines, finished.stderr)
        };
        assert_eq!(output(true), output(false));
    }
    for (program, arguments) in [
        ("true", &[][..]),
        ("python3", &["-c", "import sys; print(sys.argv)", "--moe", "help"]),
        ("sh", &["-c", "echo $0 $1", "--moe", "off"]),
    ] {
        let run = |preloads: bool| {
            let mut command = command(program.as_ref(), Side::Stock);
            if preloads {
                preload_plugin(&mut command);
            }
            let finished = run(command.args(arguments), LIMIT).success();
            (finished.stdout, finished.stderr)
        };
        assert_eq!(run(true), run(false), "{program}");
    }
}
