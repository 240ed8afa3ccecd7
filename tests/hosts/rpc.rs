//! A device of stock's RPC backend beside ours: layers split between the two, ours alone, and ours unnamed.

use std::time::Duration;

use crate::perplexity::figures;
use crate::summary::summaries;
use crate::support::http::Port;
use crate::support::process::{Finished, Running, run};
use crate::support::stock::{OVER_CPU, Side, program};
use crate::support::{fixture, fixture_model, text};

const LIMIT: Duration = Duration::from_secs(120);

/// A server of stock's RPC backend on this machine; dropping it kills it.
struct RpcServer {
    process: Running,
    endpoint: String,
    _port: Port,
}

impl RpcServer {
    fn start(side: Side<'_>, flags: &[&str]) -> Self {
        let port = Port::hold();
        let mut command = program("ggml-rpc-server", side);
        // As many threads as the clients have: attention is split by them.
        command.args(["-t", "2", "-H", "127.0.0.1", "-p", &port.number().to_string()]).args(flags);
        let endpoint = format!("127.0.0.1:{}", port.number());
        let mut process = Running::start(&mut command);
        // Its greeting stands in a buffer until it ends; that it takes connections is seen at the socket.
        process.wait_until("the RPC server", LIMIT, |_| std::net::TcpStream::connect(&endpoint).is_ok());
        Self { process, endpoint, _port: port }
    }

    /// A short run of a client.
    fn client(&self, side: Side<'_>, flags: &[&str]) -> Finished {
        let mut command = program("llama-perplexity", side);
        command.args(["-m", text(&fixture_model()), "-nr", "-t", "2", "-ngl", "99", "-f", text(&fixture("eval.txt"))]);
        command.args(["-c", "128", "-ub", "64", "--chunks", "1", "-lv", "4", "--rpc", &self.endpoint]).args(flags);
        run(&mut command, LIMIT).success()
    }
}

/// The most MoE blocks in one graph of our device: the layers that it was given. `None` if it was not used.
fn layers(finished: &Finished) -> Option<u64> {
    summaries(&finished.log()).iter().filter_map(|summary| summary["blocks_max"].as_u64()).max()
}

fn uses(finished: &Finished, device: &str) -> bool {
    !finished.lines_with(&format!("using device {device} ")).is_empty()
}

#[test]
fn a_remote_device_beside_ours_equals_stock() {
    let named = Side::Plugin { keys: "inner=CPU;log=debug", device: "" };
    let mut server = RpcServer::start(Side::Stock, &[]);
    let stock = figures(&server.client(Side::Stock, &["--device", "none"]));
    for (flags, expected, remote) in [
        (&["--device", "MoE0,RPC0", "-ts", "1,1"][..], Some(4), true),
        (&["--device", "RPC0,MoE0", "-ts", "1,1"], Some(2), true),
        (&["--device", "MoE0"], Some(6), false),
    ] {
        let finished = server.client(named, flags);
        assert_eq!(figures(&finished), stock, "{}", finished.report("the figures differ"));
        assert_eq!(layers(&finished), expected, "{}", finished.report("layers went elsewhere"));
        assert_eq!(uses(&finished, "RPC0"), remote, "{}", finished.report("the remote device"));
    }
    // Unnamed, stock takes the remote device and not ours.
    let unnamed = server.client(named, &[]);
    assert_eq!(figures(&unnamed), stock);
    assert!(uses(&unnamed, "RPC0") && !uses(&unnamed, "MoE0"), "{}", unnamed.report("another choice than stock's"));
    assert_eq!(layers(&unnamed), None, "{}", unnamed.report("our device was used unnamed"));
    // Devices are put in front of what is there when the plugin is loaded, and that is before llama.cpp reads --rpc.
    let over_remote = Side::Plugin { keys: "inner=RPC0;log=debug", device: "" };
    let passed = server.client(over_remote, &["--device", "MoE0"]);
    assert_eq!(figures(&passed), stock);
    let said = passed.lines_with("ggml-moe: MoE0 passes everything through to CPU: ");
    assert!(
        said.iter().any(|line| line.contains("inner=RPC0 names no device")),
        "{}",
        passed.report("no reason given")
    );
    assert!(server.process.is_running(), "the RPC server ended:\n{}", server.process.log());
}

/// The other way round: a stock client over the wire, our device behind the server.
#[test]
fn a_server_that_offers_our_device_equals_stock() {
    let mut server = RpcServer::start(OVER_CPU, &["--device", "MoE0"]);
    let stock = figures(&server.client(Side::Stock, &["--device", "none"]));
    let finished = server.client(Side::Stock, &["--device", "RPC0"]);
    assert!(uses(&finished, "RPC0"), "{}", finished.report("the remote device was not used"));
    assert_eq!(figures(&finished), stock);
    // A client over the wire has no buffer type of ours for experts: all weights come into the device's own memory.
    server
        .process
        .wait_until("our device", LIMIT, |log| log.contains("ggml-moe: MoE0 runs over CPU: it keeps no experts"));
}
