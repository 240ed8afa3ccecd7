//! One question asked of a stock server and of the same server with the plugin: the answers must be equal, and the plugin's must
//! come from recognised MoE blocks on our device.

use std::fmt::Debug;
use std::path::Path;

use crate::summary::ran_in_blocks;
use crate::support::process::Finished;
use crate::support::server::Server;
use crate::support::stock::{OVER_CPU, Side};

/// As [`equal_over`], with the plugin over the CPU.
pub(crate) fn equal<T: PartialEq + Debug>(
    model: &Path,
    arguments: &[&str],
    ask: impl Fn(&Server) -> T,
) -> (T, Finished) {
    equal_over(OVER_CPU, model, arguments, ask)
}

/// Starts a server on each side, asks, stops it, and compares. Returns the answer and what the plugin's side left.
pub(crate) fn equal_over<T: PartialEq + Debug>(
    ours: Side<'_>,
    model: &Path,
    arguments: &[&str],
    ask: impl Fn(&Server) -> T,
) -> (T, Finished) {
    let answers = |side| {
        let server = Server::start(side, model, arguments);
        (ask(&server), server.stop())
    };
    let (stock, _) = answers(Side::Stock);
    let (plugin, finished) = answers(ours);
    assert_eq!(plugin, stock, "{}", finished.report("not equal to stock"));
    ran_in_blocks(&finished);
    (stock, finished)
}
