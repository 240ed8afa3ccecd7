//! The plugin's report at the end of a backend's life: what the gates read from it.

use serde_json::Value;

use crate::support::process::Finished;

/// The start of each summary line.
const MARK: &str = "ggml-moe: summary ";

/// All summaries in a text, in order.
pub(crate) fn summaries(log: &str) -> Vec<Value> {
    log.lines()
        .filter_map(|line| line.split_once(MARK))
        .map(|(_, json)| serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {json}")))
        .collect()
}

/// The largest value of a counter over all backends of a text.
pub(crate) fn largest(log: &str, counter: &str) -> u64 {
    let found = summaries(log)
        .into_iter()
        .map(|summary| summary[counter].as_u64().unwrap_or_else(|| panic!("no counter {counter:?} in {summary}")));
    found.max().unwrap_or_else(|| panic!("no summary of the plugin in:\n{log}"))
}

/// Asserts that the model really ran in recognised MoE blocks on our device, not beside it and not by the plain path.
pub(crate) fn ran_in_blocks(finished: &Finished) {
    let log = finished.log();
    assert!(largest(&log, "blocks") > 0, "{}", finished.report("no MoE block ran"));
    let in_place = log.contains("experts mapped from the file") || log.contains("reads them in place");
    let reached = largest(&log, "expert_bytes") > 0 || largest(&log, "misses") > 0 || in_place;
    assert!(reached, "{}", finished.report("no expert was copied, computed in RAM or read in place"));
    assert_eq!(largest(&log, "unrecognised"), 0, "{}", finished.report("MoE nodes in no block"));
}
