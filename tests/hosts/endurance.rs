//! Many requests to one server with the cache (`tests/endurance/endurance.py`): memory stays, no token waits, closed connections do no harm.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::summary::{largest, ran_in_blocks};
use crate::support::process::{Finished, run};
use crate::support::stock::{Side, command, folder};
use crate::support::{fixture_model, package, text};

fn endure(tokens: u32, limit: Duration) {
    let log = tempfile::NamedTempFile::new().expect("a file");
    let side = Side::Plugin { keys: "inner=CPU;log=debug;cache=6", device: "MoE0" };
    let mut python: Command = command(Path::new("python3"), side);
    python.arg(package().join("tests/endurance/endurance.py")).args([
        "--tokens",
        &tokens.to_string(),
        "--log",
        text(log.path()),
    ]);
    python.arg("--").arg(folder().join("llama-server")).args([
        "-m",
        text(&fixture_model()),
        "-nr",
        "-t",
        "1",
        "-ngl",
        "99",
    ]);
    python.args(["--device", "MoE0", "-c", "1024", "-np", "2", "--cache-ram", "0", "--offline"]);
    let finished = run(&mut python, limit);
    println!("{}", finished.stdout.trim());
    assert!(finished.status.success(), "{}", finished.report("endurance"));
    // The server's own output, as if it had been ours to start.
    let server = Finished { stdout: std::fs::read_to_string(log.path()).expect("the log"), ..finished };
    ran_in_blocks(&server);
    assert!(largest(&server.log(), "hits").min(largest(&server.log(), "misses")) > 0, "{}", server.report("the cache"));
}

#[test]
fn a_server_stays_as_it_is() {
    endure(1500, Duration::from_secs(200));
}

/// About three minutes; `tests/gpu` has the same on a card.
#[test]
#[ignore = "make test-full runs it"]
fn a_server_stays_as_it_is_for_long() {
    endure(20_000, Duration::from_secs(1500));
}
