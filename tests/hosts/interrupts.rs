//! Ctrl-C while the model loads and while tokens come: the host ends soon, and not by a crash.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use serde_json::json;

use crate::support::fixture_model;
use crate::support::process::interruptible;
use crate::support::server::Server;
use crate::support::stock::{OVER_CPU, preload, tool};

/// The number of SIGINT on Linux.
const SIGINT: i32 = 2;

/// A server in the middle of its load, which it goes on with when it has handled a signal.
pub(crate) fn held_load() -> Server {
    let mut command = tool("llama-server", OVER_CPU, &fixture_model(), 2);
    command.args(["-c", "256", "-lv", "4", "-lm", "none", "--no-warmup", "-fit", "off"]);
    let mut server = Server::launch(&mut interruptible(preload(&mut command, "support/hold_load")));
    let in_tensors = |log: &str| log.contains("MoE0_Experts model buffer size") && log.contains("the load is held");
    server.process().wait_until("the load", Duration::from_secs(60), in_tensors);
    server
}

#[test]
fn during_load() {
    let mut server = held_load();
    server.process().interrupt();
    let finished = server.into_process().finish(Duration::from_secs(20));
    // Until the model is loaded llama-server has no handler of its own: the signal itself may end it, as it ends stock.
    let ended_by_itself = finished.status.code().is_some();
    assert!(ended_by_itself || finished.status.signal() == Some(SIGINT), "{}", finished.report("a crash"));
    assert!(!finished.log().contains("model loaded"), "{}", finished.report("the signal came too late"));
}

#[test]
fn during_generation() {
    let server = Server::start(OVER_CPU, &fixture_model(), &["-c", "4096", "-np", "1"]);
    let body = json!({"prompt": "Once", "n_predict": 4000, "stream": true, "ignore_eos": true, "temperature": 0});
    let mut stream = server.open("/completion", &body);
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains("\"content\"") {
        let mut block = [0; 1024];
        let count = stream.read(&mut block).expect("tokens come");
        assert!(count > 0, "the answer ended before its first token: {}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&block[..count]);
    }
    let process = server.into_process();
    process.interrupt();
    // llama-server waits half a minute for a client that keeps its connection.
    drop(stream);
    let finished = process.finish(Duration::from_secs(60)).success();
    assert!(finished.log().contains("ggml-moe: summary "), "{}", finished.report("our backend was not freed"));
}
