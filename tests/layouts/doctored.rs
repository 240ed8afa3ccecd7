//! A host whose layout the plugin does not know: the main one, made to look different by a preloaded library (`doctored.c`).
//!
//! It must run as if the plugin were not there, and the plugin must say in one line what to do.

use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use crate::summary::ran_in_blocks;
use crate::support::fixture_model;
use crate::support::process::{Finished, run};
use crate::support::server::{Completion, Server};
use crate::support::stock::{OVER_CPU, Side, command, plugin, preload, tool};
use crate::toolchain::{self, compiler, root, scratch};

/// What makes the host unknown, and what the plugin's line must name.
const UNKNOWN: [(&str, &str); 5] = [
    ("slot", "backend api version 3, but its objects look otherwise"),
    ("version", "backend api version 99; this plugin knows"),
    ("tensor", "tensors differ"),
    ("op", "no op named MUL_MAT_ID"),
    ("function", "does not export ggml_graph_add_node"),
];

/// The plugin without a device that is named.
const UNNAMED: Side<'_> = Side::Plugin { keys: "inner=CPU;log=debug", device: "" };

fn host(side: Side<'_>, doctor: &str) -> Command {
    let mut command = undoctored(side);
    preload(&mut command, "layouts/doctored").env("GGML_MOE_DOCTOR", doctor);
    command
}

fn answer(mut command: Command) -> (Completion, Finished) {
    let mut server = Server::launch(&mut command);
    server.wait_ready();
    (server.complete("A list is a mutable sequence. A tuple is", 16, 3), server.stop())
}

/// What stock alone answers.
fn stock() -> &'static Completion {
    static ANSWER: OnceLock<Completion> = OnceLock::new();
    ANSWER.get_or_init(|| answer(undoctored(Side::Stock)).0)
}

fn undoctored(side: Side<'_>) -> Command {
    let mut command = tool("llama-server", side, &fixture_model(), 2);
    command.args(["-c", "256", "-np", "1"]);
    command
}

/// The line of ours that tells why and what to do, how often it stands there.
fn told(finished: &Finished, reason: &str) -> usize {
    let lines = finished.lines_with("ggml-moe: ");
    let right = |line: &String| line.contains(reason) && line.contains("remove --device MoE0");
    assert!(lines.iter().all(right), "{}", finished.report(&format!("{reason:?} was expected: {lines:#?}")));
    lines.len()
}

#[test]
fn an_unknown_layout_leaves_the_host_as_it_is() {
    for (doctor, reason) in UNKNOWN {
        let (completion, finished) = answer(host(UNNAMED, doctor));
        assert_eq!(told(&finished, reason), 1, "{}", finished.report(doctor));
        assert_eq!(&completion, stock(), "{doctor}");
    }
}

/// llama.cpp ends when it does not know a device that is named; the plugin's line says what to do. llama.cpp loads its backends once
/// more to look the name up; the line is told once all the same.
#[test]
fn a_named_device_is_refused_by_the_host_itself() {
    for (doctor, reason) in UNKNOWN {
        let finished = run(&mut host(OVER_CPU, doctor), Duration::from_secs(30)).clean_failure();
        assert_eq!(finished.lines_with("invalid device: MoE0").len(), 1, "{}", finished.report(doctor));
        assert_eq!(told(&finished, reason), 1, "{}", finished.report(doctor));
    }
}

/// Graphs of another form are no reason to refuse: parts of them are then built through public functions.
#[test]
fn graphs_of_an_unknown_form_are_built_anew() {
    let (completion, finished) = answer(host(OVER_CPU, "graph"));
    assert_eq!(finished.lines_with("graphs built anew").len(), 1, "{}", finished.report("views were made"));
    ran_in_blocks(&finished);
    assert_eq!(&completion, stock());
}

/// The preloaded library itself changes nothing.
#[test]
fn an_undoctored_host_is_known() {
    let (completion, finished) = answer(host(OVER_CPU, ""));
    assert_eq!(finished.lines_with("graphs handed on as views").len(), 1, "{}", finished.report("not known"));
    ran_in_blocks(&finished);
    assert_eq!(&completion, stock());
}

/// The first library found would be taken for the one that asks, and the program would crash.
#[test]
fn two_ggml_libraries_in_one_process_are_refused() {
    let folder = |name: &str| {
        let entry = crate::entries().into_iter().find(|entry| entry.name == name).expect("the matrix has it");
        entry.libraries
    };
    let program = scratch("two").join("two");
    let mut compile = compiler(&folder("ggml-0.9.4"));
    toolchain::run(compile.arg("-Werror").arg(root().join("tests/layouts/two.c")).arg("-ldl").arg("-o").arg(&program));
    let mut command = command(&program, Side::Plugin { keys: "inner=CPU", device: "" });
    command.arg(folder("ggml-0.9.4")).arg(folder("ggml-0.20.2")).arg(plugin());
    let finished = run(&mut command, Duration::from_secs(30)).success();
    let lines = finished.lines_with("ggml-moe: ");
    assert_eq!(lines.len(), 1, "{}", finished.report("one line"));
    assert!(lines[0].contains("this process holds 2 ggml libraries"), "{lines:?}");
}
