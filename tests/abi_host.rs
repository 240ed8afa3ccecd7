//! A C host, built like llama.cpp against ggml's own headers and linked to the stock libraries, loads the plugin and uses it.
//!
//! `host/*.c` holds the cases; each runs in a process of its own, because several are meant to break one. Other releases
//! of ggml are tried by layouts.rs.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "host/runner.rs"]
mod runner;
#[path = "conformance/toolchain.rs"]
#[expect(dead_code, reason = "the other hosts are tried by layouts.rs")]
mod toolchain;

use std::sync::OnceLock;

use runner::{FAKE, Host, LATE};
use toolchain::stock;

/// The inner devices of the host: the stock CPU backend, and the stand-in for a GPU.
const INNER: [&str; 2] = ["CPU", FAKE];
/// A backend of ggml that computes only in memory of its own.
const OWN_MEMORY: &str = "SYCL";

/// The C host, built once a run.
fn host() -> &'static Host {
    static HOST: OnceLock<Host> = OnceLock::new();
    HOST.get_or_init(|| Host::build("host", &stock("source").join("ggml"), &stock("path"), None, &[]))
}

fn try_case(case: &[&str], keys: &str, variables: &[(&str, &str)]) -> Result<String, String> {
    host().try_case(case, keys, variables)
}

/// A case that must pass.
fn case(name: &str, keys: &str) {
    try_case(&[name], keys, &[]).unwrap_or_else(|report| panic!("{report}"));
}

/// A case that must pass over each inner device; `more` are further keys.
fn case_over_each(name: &str, more: &str) {
    INNER.iter().for_each(|inner| case(name, &format!("inner={inner}{more}")));
}

#[test]
fn loads_and_unloads_three_times() {
    case("load", "inner=CPU");
}

#[test]
fn loads_again_without_an_unload() {
    case("load-again", "inner=CPU");
}

#[test]
fn device_describes_itself() {
    case("device", "inner=CPU");
    try_case(&["device"], "inner=CPU", &[("LLAMA_ARG_DEVICE", "MoE0")]).unwrap_or_else(|report| panic!("{report}"));
}

#[test]
fn two_devices_describe_themselves() {
    case("two-devices", "inner=CPU,CPU");
}

#[test]
fn supports_the_right_operations() {
    case_over_each("supports", "");
}

#[test]
fn buffers_keep_what_they_are_given() {
    case_over_each("buffers", "");
}

#[test]
fn paddings_are_zero() {
    for (inner, pad) in INNER.iter().flat_map(|inner| [(inner, "512"), (inner, "4096")]) {
        try_case(&["buffers"], &format!("inner={inner};debug-pad={pad}"), &[("MOE_HOST_PAD", pad)])
            .unwrap_or_else(|report| panic!("{report}"));
    }
}

/// Memory that comes and goes: copies find it, and nobody reads what is not there. With the test key all of it is there.
#[test]
fn compute_buffers_have_memory_where_it_is_used() {
    for more in ["", ";debug-map-all=on", ";debug-poison=on"] {
        case("lent", &format!("inner=CPU;cache=1{more}"));
    }
    case("lent", &format!("inner={LATE};debug-late=3;cache=1"));
    case("scheduler", "inner=CPU;cache=1;debug-poison=on");
}

#[test]
fn copies_between_buffers() {
    case_over_each("copies", "");
    INNER.iter().for_each(|inner| case("copies", &format!("inner={inner},{inner}")));
}

#[test]
fn graphs_equal_the_cpu_backend() {
    case_over_each("graphs", ";log=debug");
    case_over_each("graphs", ";log=debug;debug-pad=512");
}

#[test]
fn graphs_equal_the_cpu_backend_without_private_structs() {
    case_over_each("graphs", ";log=debug;debug-graph=add-node");
    case_over_each("scheduler", ";debug-graph=add-node");
}

#[test]
fn an_abort_reaches_the_inner_backend() {
    case("abort", "inner=CPU");
}

#[test]
fn scheduled_graphs_equal_the_cpu_backend() {
    case_over_each("scheduler", "");
}

#[test]
fn layers_split_over_two_devices_equal_the_cpu_backend() {
    INNER.iter().for_each(|inner| case("split", &format!("inner={inner},{inner};log=debug")));
    case("split", "inner=FAKE0,CPU;log=debug");
}

/// Random graphs (host/random.c). `GGML_MOE_RANDOM_GRAPHS` is how many of each kind; a failure tells how to run its graph alone.
#[test]
fn random_graphs_equal_the_cpu_backend() {
    let count = std::env::var("GGML_MOE_RANDOM_GRAPHS").map_or(250, |count| count.parse().unwrap());
    let kinds = INNER.iter().flat_map(|inner| [(inner, "view"), (inner, "add-node")]);
    for (number, (inner, graphs)) in kinds.enumerate() {
        let seeds = format!("{}+{count}", number * count);
        try_case(&["random", &seeds], &format!("inner={inner};log=debug;debug-graph={graphs}"), &[])
            .unwrap_or_else(|report| panic!("{report}"));
    }
}

/// The same with a cache, over the CPU and over a device that is late, whose copies are late and whose free memory is poisoned.
#[test]
fn random_graphs_with_a_cache_equal_the_cpu_backend() {
    let count = std::env::var("GGML_MOE_RANDOM_GRAPHS").map_or(100, |count| count.parse().unwrap());
    let late = |seed| format!("inner={LATE};log=debug;debug-late={seed};debug-poison=on;cache=1");
    let kinds = ["inner=CPU;log=debug;cache=1".to_owned(), late(1), late(2) + ";debug-graph=add-node"];
    for (number, keys) in kinds.iter().enumerate() {
        let seeds = format!("{}+{count}", 10_000 + number * count);
        let mut variables = vec![("MOE_HOST_RELOAD", "1"), ("MOE_HOST_SEED", "7")];
        variables.extend((number == 1).then_some(("MOE_HOST_KEEP", "1")));
        let printed = try_case(&["random", &seeds], keys, &variables).unwrap_or_else(|report| panic!("{report}"));
        assert!(!printed.contains("\"hits\":0,"), "{keys}: the cache computed nothing: {printed}");
    }
}

/// Copies, graphs and events over a device that is late.
#[test]
fn nothing_is_read_too_early() {
    for (name, seed) in [("graphs", "1"), ("scheduler", "2"), ("copies", "3"), ("buffers", "4"), ("threads", "5")] {
        let keys = format!("inner={LATE};log=debug;debug-late={seed};debug-poison=on;cache=1");
        try_case(&[name], &keys, &[("MOE_HOST_SEED", seed)]).unwrap_or_else(|report| panic!("{report}"));
    }
    let keys = format!("inner={LATE},{LATE};log=debug;debug-late=6");
    try_case(&["split"], &keys, &[("MOE_HOST_SEED", "6")]).unwrap_or_else(|report| panic!("{report}"));
}

#[test]
fn a_refused_device_passes_everything_through() {
    case("pass-through", "inner=NOPE");
    case("pass-through", "inner=NOPE,FAKE0");
    try_case(&["pass-through"], "inner=FAKE0", &[("MOE_HOST_FAKE", OWN_MEMORY)])
        .unwrap_or_else(|report| panic!("{report}"));
}

#[test]
fn two_threads_with_a_backend_each() {
    case_over_each("threads", "");
}

#[test]
fn null_arguments_are_refused() {
    case_over_each("null", "");
}

#[test]
fn foreign_handles_are_refused() {
    case_over_each("foreign", "");
}

#[test]
fn accesses_outside_a_buffer_are_refused() {
    case_over_each("bounds", "");
}

#[test]
fn a_panic_in_any_slot_stays_inside() {
    let failures = host().panic_in_each_slot();
    assert!(failures.is_empty(), "{} slots:\n{}", failures.len(), failures.join("\n\n"));
}

#[test]
fn failed_allocations_give_null() {
    let mut failures = Vec::new();
    for (inner, kind) in INNER.iter().flat_map(|inner| [(inner, "device"), (inner, "host")]) {
        for n in ["1", "2", "3", "4"] {
            let keys = format!("inner={inner};debug-fail-alloc={kind}:{n}");
            failures.extend(try_case(&[&format!("fail-{kind}"), n], &keys, &[]).err());
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}
