//! What is told of graphs: each once.
//!
//! Owns: the words. Threads: the one that drives the backend. Does not: decide anything.

use std::collections::HashSet;

use crate::abi::tensor::Tensor;
use crate::config::LogDetail;
use crate::device::Device;
use crate::graph::Plan;
use crate::telemetry::{MOST_DECODED, PassShape, log};

/// The most nodes that are named in the log as belonging to no block.
const MOST_TOLD: usize = 64;

/// Tells of each pass of a prompt how long it is, at the debug detail.
pub(super) fn pass(device: &Device, pass: &PassShape) {
    if pass.tokens > MOST_DECODED && log::shows(LogDetail::Debug) {
        log::debug(&format!("{}: a pass of {} tokens, {} outputs", device.label(), pass.tokens, pass.outputs));
    }
}

/// Tells once per node which expert products belong to no block, and at the debug detail how each new graph is cut.
pub(super) fn plan(device: &Device, told: &mut HashSet<String>, nodes: &[Tensor<'_>], plan: &Plan) {
    for &index in &plan.unrecognised {
        let name = nodes[index].name();
        if told.len() < MOST_TOLD && told.insert(name.clone()) {
            log::info(&format!("{}: \"{name}\" is in no recognised MoE block and runs by itself", device.label()));
        }
    }
    if log::shows(LogDetail::Debug) && !plan.steps.is_empty() {
        log::debug(&format!(
            "{}: a graph of {} nodes runs in {} steps, {} MoE blocks, {} products outside",
            device.label(),
            nodes.len(),
            plan.steps.len(),
            plan.blocks,
            plan.unrecognised.len()
        ));
    }
}
