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
#[path = "layouts/vulkan.rs"]
mod vulkan;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};
use std::thread;
use std::time::Instant;

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

/// Every host of the matrix with its program, built once a run, two at a time.
fn hosts() -> &'static [(Entry, Host)] {
    static HOSTS: OnceLock<Vec<(Entry, Host)>> = OnceLock::new();
    HOSTS.get_or_init(|| {
        let next = Mutex::new(entries().into_iter());
        let builder = || {
            let mut built = Vec::new();
            loop {
                let Some(entry) = next.lock().unwrap().next() else { return built };
                let host = build(&entry);
                built.push((entry, host));
            }
        };
        thread::scope(|scope| {
            let builders = [scope.spawn(builder), scope.spawn(builder)];
            builders.into_iter().flat_map(|builder| builder.join().unwrap()).collect()
        })
    })
}

/// What each host must do, with the keys. The stand-in for a GPU has the host's own layout, too.
fn cases(layout: &str) -> Vec<(&'static str, String)> {
    let mut cases = vec![
        ("load", "inner=CPU".to_owned()),
        ("device", "inner=CPU".to_owned()),
        ("two-devices", "inner=CPU,CPU".to_owned()),
        ("threads", "inner=CPU".to_owned()),
        ("pass-through", "inner=NOPE".to_owned()),
        ("split", "inner=FAKE0,CPU;log=debug".to_owned()),
        ("graphs", "inner=CPU;log=debug;debug-graph=add-node".to_owned()),
    ];
    // Before 2026 the registry takes the same reg twice, for every plugin.
    if layout != "api2-2025" {
        cases.push(("load-again", "inner=CPU".to_owned()));
    }
    for inner in ["CPU", FAKE] {
        for case in ["supports", "buffers", "copies", "scheduler", "null", "foreign", "bounds"] {
            cases.push((case, format!("inner={inner}")));
        }
        cases.push(("graphs", format!("inner={inner};log=debug")));
    }
    cases
}

/// Runs every case on every host of a layout. One thread computes: threads of ggml wait for each other by spinning, which takes many
/// times as long as the work where the cores are shared, and how many there are is no matter of layout.
fn hosts_of(layout: &str) {
    let mut failures = Vec::new();
    let hosts: Vec<&(Entry, Host)> = hosts().iter().filter(|(entry, _)| entry.layout == layout).collect();
    assert!(hosts.len() > 2, "the matrix has {} hosts of {layout}", hosts.len());
    for (entry, host) in hosts {
        let before = failures.len();
        let start = Instant::now();
        for (case, keys) in cases(layout) {
            let result = host.try_case(&[case], &keys, &[("MOE_HOST_THREADS", "1")]);
            failures.extend(result.err().map(|report| format!("{}: {report}", entry.name)));
        }
        // Releases of 2025 lack operations that random graphs are made of.
        if layout != "api2-2025" {
            let random = host.try_case(&["random", "0+40"], "inner=CPU;log=debug", &[("MOE_HOST_THREADS", "1")]);
            failures.extend(random.err().map(|report| format!("{}: {report}", entry.name)));
        }
        let failed = failures.len() - before;
        println!("{}: {} cases, {failed} failed, {:.1?}", entry.name, cases(layout).len(), start.elapsed());
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
        let (entry, host) = hosts().iter().find(|(entry, _)| entry.layout == layout).expect("a host of each layout");
        let reports = host.panic_in_each_slot();
        failures.extend(reports.into_iter().map(|report| format!("{}: {report}", entry.name)));
    }
    assert!(failures.is_empty(), "{} slots:\n{}", failures.len(), failures.join("\n\n"));
}
