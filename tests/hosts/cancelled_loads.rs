//! Loads that the host gives up, and signals that end it: nothing is kept, nothing crashes, and the next load is a good one.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use serde_json::json;

use crate::interrupts::held_load;
use crate::summary::ran_in_blocks;
use crate::support::process::run;
use crate::support::server::Server;
use crate::support::stock::{OVER_CPU, Side, command, model_host};
use crate::support::{fixture_model, text};

/// The number of SIGTERM on Linux.
const SIGTERM: i32 = 15;

/// Memory that the process may have gained over two dozen cancelled loads of 14 MiB each, in KiB: what allocators keep.
const SLACK_KIB: i64 = 12 << 10;

/// Two dozen loads in one process, given up at places from the first to the last tensor.
fn gives_up(keys: &str, devices: &str, mode: &str) {
    let mut host = command(&model_host(), Side::Plugin { keys, device: devices });
    host.args(["cancel", mode, devices, text(&fixture_model())]);
    let finished = run(&mut host, Duration::from_secs(60)).success();
    let numbers = |line: &str| line.split(' ').map(|word| word.parse().expect("a number")).collect::<Vec<i64>>();
    let holdings: Vec<Vec<i64>> = finished.stdout.lines().map(numbers).collect();
    let [before, after] = &holdings[..] else { panic!("{}", finished.report("two lines of what the process holds")) };
    assert!(after[0] - before[0] < SLACK_KIB, "{}", finished.report("memory was kept"));
    // Open files, threads, and what each device reports as free.
    assert_eq!(after[1..], before[1..], "{}", finished.report("something was kept"));
    let placed = finished.lines_with("MoE0: 12 MiB of RAM, for experts").len();
    assert!(placed > 24, "{}", finished.report(&format!("experts were placed {placed} times")));
}

#[test]
fn loads_given_up_leave_nothing() {
    gives_up("inner=CPU;log=debug", "MoE0", "none");
}

#[test]
fn loads_from_a_mapping_given_up_leave_nothing() {
    gives_up("inner=CPU;log=debug", "MoE0", "mmap");
}

/// A service manager's signal in the middle of the load.
#[test]
fn terminated_during_load() {
    let mut server = held_load();
    server.process().terminate();
    let finished = server.into_process().finish(Duration::from_secs(20));
    // Until the model is loaded llama-server has no handler of its own: the signal itself may end it, as it ends stock.
    let ended_by_itself = finished.status.code().is_some();
    assert!(ended_by_itself || finished.status.signal() == Some(SIGTERM), "{}", finished.report("a crash"));
    assert!(!finished.log().contains("model loaded"), "{}", finished.report("the signal came too late"));
}

/// The same while tokens come: the server ends in good order, and our backend with it.
#[test]
fn terminated_during_generation() {
    let server = Server::start(OVER_CPU, &fixture_model(), &["-c", "4096", "-np", "1", "--no-warmup"]);
    let body = json!({"prompt": "Once", "n_predict": 4000, "stream": true, "ignore_eos": true, "temperature": 0});
    let mut stream = server.open("/completion", &body);
    let mut first = [0; 512];
    stream.read_exact(&mut first).expect("tokens come");
    let process = server.into_process();
    process.terminate();
    // llama-server waits half a minute for a client that keeps its connection.
    drop(stream);
    let finished = process.finish(Duration::from_secs(20)).success();
    ran_in_blocks(&finished);
}
