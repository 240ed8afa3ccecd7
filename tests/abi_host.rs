//! A C host, built like llama.cpp against ggml's own headers and linked to the stock libraries, loads the plugin and uses it.
//!
//! `host/*.c` holds the cases; each runs in a process of its own, because several are meant to break one. The plugin is
//! `GGML_MOE_LIBRARY`, or the release build. `GGML_MOE_HOST_CFLAGS` adds flags to the host (tests/asan.sh does).
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "conformance/toolchain.rs"]
mod toolchain;

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use toolchain::{compiler, root, run, scratch, stock};

/// No case takes a tenth of it, with sanitizers and on a busy machine; a case that hangs is a deadlock.
const LIMIT_SECONDS: &str = "300";

/// The inner devices of the host: the stock CPU backend, and a stand-in for a GPU (host/fake.c) that has what the CPU lacks and
/// is as strict as CUDA.
const INNER: [&str; 2] = ["CPU", FAKE];
const FAKE: &str = "FAKE0";
/// A backend of ggml that computes in any memory of its device, and one that does not.
const ANY_MEMORY: &str = "MUSA";
const OWN_MEMORY: &str = "Vulkan";

/// The plugin under test.
fn plugin() -> PathBuf {
    let path = std::env::var_os("GGML_MOE_LIBRARY")
        .map_or_else(|| root().join("target/release/libggml-moe.so"), PathBuf::from);
    assert!(path.exists(), "there is no plugin at {}: build it first (make), or set GGML_MOE_LIBRARY", path.display());
    path
}

/// The C host, built once a run.
fn host() -> &'static PathBuf {
    static HOST: OnceLock<PathBuf> = OnceLock::new();
    HOST.get_or_init(|| {
        let flags = std::env::var("GGML_MOE_HOST_CFLAGS").unwrap_or_default();
        // A host with other flags is another program, so that two runs side by side do not take each other's.
        let program = scratch(if flags.is_empty() { "host" } else { "host-flags" }).join("moe-host");
        let libraries = stock("path");
        let mut sources: Vec<PathBuf> = std::fs::read_dir(root().join("tests/host"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "c"))
            .collect();
        sources.sort();
        let mut command = compiler(&stock("source"));
        command.args(["-Werror", "-O1", "-g"]).args(sources);
        command.args(flags.split_whitespace());
        command.arg("-L").arg(&libraries).arg(format!("-Wl,-rpath,{}", libraries.display()));
        run(command.args(["-lggml", "-lggml-base", "-lm", "-lpthread", "-o"]).arg(&program));
        program
    })
}

/// Runs one case with these keys in `GGML_MOE`; what it printed, or how it failed.
fn try_case(case: &[&str], keys: &str, variables: &[(&str, &str)]) -> Result<String, String> {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", LIMIT_SECONDS]).arg(host()).arg(stock("path")).arg(plugin()).args(case);
    command.env("GGML_MOE", keys).env_remove("GGML_BACKEND_PATH").env_remove("LLAMA_ARG_DEVICE");
    if keys.contains(FAKE) {
        command.env("MOE_HOST_FAKE", ANY_MEMORY);
    }
    // Two cases share the cores: waiting threads must sleep. Panics are expected: no need to unwind the stack for each.
    command.env("RUST_BACKTRACE", "0");
    command.env("OMP_WAIT_POLICY", "passive");
    // Where a debugger is installed, ggml's abort starts one, which may take minutes to say what nobody reads here.
    command.env("GGML_NO_BACKTRACE", "1");
    command.envs(variables.iter().copied());
    let output = command.output().expect("coreutils' timeout runs");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.success() && out.contains(&format!("ok: {}", case[0])) {
        return Ok(out.into_owned());
    }
    let tail: Vec<&str> = err.lines().rev().take(40).collect();
    let tail: Vec<&str> = tail.into_iter().rev().collect();
    Err(format!("{case:?} with GGML_MOE={keys:?} ended with {}\n{out}{}", output.status, tail.join("\n")))
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

/// The slots that the plugin says can be made to panic over this inner device.
fn slots(inner: &str) -> Vec<String> {
    let printed = try_case(&["slots"], &format!("inner={inner}"), &[]).unwrap_or_else(|report| panic!("{report}"));
    printed.lines().filter_map(|line| line.strip_prefix("slot ")).map(str::to_owned).collect()
}

#[test]
fn a_panic_in_any_slot_stays_inside() {
    let over_cpu = slots("CPU");
    let over_gpu = slots(FAKE);
    assert!(over_cpu.len() > 40, "only {} slots: {over_cpu:?}", over_cpu.len());
    let mut failures = Vec::new();
    // Over the CPU backend some optional slots are empty; over the stand-in for a GPU only those are left to try.
    let only_gpu = over_gpu.iter().filter(|slot| !over_cpu.contains(slot)).map(|slot| (FAKE, slot));
    for (inner, slot) in over_cpu.iter().map(|slot| ("CPU", slot)).chain(only_gpu) {
        failures.extend(try_case(&["panic", slot], &format!("inner={inner};debug-panic={slot}"), &[]).err());
    }
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
