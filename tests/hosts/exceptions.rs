//! A C++ exception of the inner backend ends in the host's own error, as it does without the plugin.

use std::time::Duration;

use crate::support::fixture_model;
use crate::support::process::run;
use crate::support::stock::{OVER_CPU, preload, tool};
use crate::support::{fixture, text};

#[test]
fn an_exception_of_the_inner_backend_is_told_and_becomes_the_hosts_own_error() {
    for (what, words) in [("open", "when it was opened"), ("memory", "when it was asked for memory")] {
        let mut command = tool("llama-perplexity", OVER_CPU, &fixture_model(), 1);
        command.args(["-f", text(&fixture("eval.txt")), "--chunks", "1", "-c", "128", "-lm", "none", "-fit", "off"]);
        preload(&mut command, "hosts/throws.cpp").env("MOE_THROW", what);
        let finished = run(&mut command, Duration::from_secs(60)).clean_failure();
        let lines = finished.lines_with("ggml-moe: the inner backend threw an exception");
        assert!(!lines.is_empty(), "{}", finished.report(what));
        assert!(lines.iter().all(|line| line.ends_with(&format!("{words}: the device was lost"))), "{lines:?}");
    }
}
