//! The layout matrix: releases of ggml other than the main one, as others have built them, load the plugin and use it.
//!
//! Each host of `stock/matrix.sh` is driven by the C host (`host/*.c`), compiled against headers of its layout. A small model of
//! mixture-of-experts layers on the plugin's device must give what that host's own CPU backend gives, bit for bit. The
//! llama-server among them is asked, too (`server.rs`), and a main host that looks like none of them (`doctored.rs`).
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test reports by panicking and printing"
)]

#[path = "layouts/doctored.rs"]
mod doctored;
#[path = "host/runner.rs"]
mod runner;
#[path = "layouts/server.rs"]
mod server;
#[path = "hosts/summary.rs"]
mod summary;
#[expect(dead_code, reason = "the gates use more of it")]
mod support;
#[path = "conformance/toolchain.rs"]
#[expect(dead_code, reason = "the main host is tried by abi_host.rs")]
mod toolchain;

use std::path::{Path, PathBuf};

use runner::{FAKE, Host};
use toolchain::matrix;

/// A host of the matrix.
struct Entry {
    name: String,
    layout: String,
    libraries: PathBuf,
    source: PathBuf,
}

fn entries() -> Vec<Entry> {
    let path = PathBuf::from;
    let entry = |words: Vec<String>| match <[String; 4]>::try_from(words) {
        Ok([name, layout, libraries, source]) => {
            Entry { name, layout, libraries: path(libraries), source: path(source) }
        }
        Err(words) => panic!("not a host: {words:?}"),
    };
    matrix(&["list"]).into_iter().map(entry).collect()
}

/// Whether this release passes parameters to `graph_optimize`; its headers are the only place that says so.
fn has_parameters(source: &Path) -> bool {
    let header = std::fs::read_to_string(source.join("src/ggml-backend-impl.h")).unwrap();
    header.contains("struct ggml_backend_graph_optimize_params {")
}

fn build(entry: &Entry) -> Host {
    let mut flags = vec!["-DHOST_HAS_LISTS=0"];
    if !has_parameters(&entry.source) {
        flags.push("-DHOST_HAS_PARAMS=0");
    }
    match entry.layout.as_str() {
        "api2" => {}
        "api2-2025" => flags.push("-DHOST_HAS_ROWS=0"),
        other => panic!("unknown layout {other}"),
    }
    let instead = matrix(&["cpu", &entry.name]).into_iter().flatten().next().map(PathBuf::from);
    Host::build(&format!("host-{}", entry.name), &entry.source, &entry.libraries, instead, &flags)
}

/// What each host must do, with the keys. The stand-in for a GPU has the host's own layout, too.
fn cases(layout: &str) -> Vec<(&'static str, String)> {
    let mut cases = vec![
        ("load", "inner=CPU".to_owned()),
        ("device", "inner=CPU".to_owned()),
        ("two-devices", "inner=CPU,CPU".to_owned()),
        ("pass-through", "inner=NOPE".to_owned()),
        ("split", "inner=FAKE0,CPU;log=debug".to_owned()),
        ("graphs", "inner=CPU;log=debug;debug-graph=add-node".to_owned()),
    ];
    // Before 2026 the registry takes the same reg twice, for every plugin.
    if layout != "api2-2025" {
        cases.push(("load-again", "inner=CPU".to_owned()));
    }
    for inner in ["CPU", FAKE] {
        for case in ["supports", "buffers", "copies", "scheduler", "threads", "null", "foreign", "bounds"] {
            cases.push((case, format!("inner={inner}")));
        }
        cases.push(("graphs", format!("inner={inner};log=debug")));
    }
    cases
}

/// Runs every case on every host of a layout.
fn hosts_of(layout: &str) {
    let mut failures = Vec::new();
    let entries: Vec<Entry> = entries().into_iter().filter(|entry| entry.layout == layout).collect();
    assert!(entries.len() > 2, "the matrix has {} hosts of {layout}", entries.len());
    for entry in &entries {
        let host = build(entry);
        let before = failures.len();
        for (case, keys) in cases(layout) {
            failures.extend(host.try_case(&[case], &keys, &[]).err().map(|report| format!("{}: {report}", entry.name)));
        }
        println!("{}: {} cases, {} failed", entry.name, cases(layout).len(), failures.len() - before);
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

#[test]
fn hosts_of_api_2() {
    hosts_of("api2");
}

#[test]
fn hosts_of_api_2_of_2025() {
    hosts_of("api2-2025");
}

/// One host of each layout: the boundary's answers depend on the layout, not on the release.
#[test]
fn a_panic_in_any_slot_stays_inside() {
    let mut failures = Vec::new();
    for layout in ["api2", "api2-2025"] {
        let entry = entries().into_iter().find(|entry| entry.layout == layout).expect("a host of each layout");
        let reports = build(&entry).panic_in_each_slot();
        failures.extend(reports.into_iter().map(|report| format!("{}: {report}", entry.name)));
    }
    assert!(failures.is_empty(), "{} slots:\n{}", failures.len(), failures.join("\n\n"));
}
