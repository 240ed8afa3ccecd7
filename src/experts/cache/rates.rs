//! Measured rates: what the team reads of weights, what the link moves.
//!
//! Owns: one short measurement of the team when a cache is made, and the timing of a few steps' uploads while it is used.
//! Invariants: a measurement of the team takes no longer than [`LONGEST`]; one of the link makes the thread wait for the uploads of one
//! step, seldom.
//! Threads: the one that drives the backend, and the team's. Does not: decide (`policy` does).
// UNSAFETY: weights and memory of the lane are handed to the team.
#![expect(unsafe_code, reason = "weights and memory of the lane are handed to the team")]

use std::time::{Duration, Instant};

use super::{Cache, MOST_TOKENS, Weight, Weights};
use crate::buffer::BufferError;
use crate::cpu::shape::{Job, Pair};
use crate::device::Device;
use crate::experts::shape::Group;

/// How long the measurement of the team may take.
const LONGEST: Duration = Duration::from_millis(80);
/// Fewer bytes say nothing about the link.
const LEAST_LINK_BYTES: u64 = 1 << 20;
/// Steps until the link is measured again, first and at last: memory is being registered meanwhile.
const LINK_STEPS: (u64, u64) = (64, 4096);

impl Cache {
    /// Bytes of weights per microsecond that the team reads; `None` if it could not be measured. The experts differ from job to job, so
    /// that they come from RAM. Uses the lane: called while no graph runs.
    pub(super) fn measure_team(&self) -> Option<f32> {
        let groups = self.policy.shape().groups();
        let rounds = groups.iter().map(|group| group.experts / group.used.max(1)).max()?;
        let began = Instant::now();
        let (mut bytes, mut seconds, mut jobs) = (0.0, 0.0, 0_u32);
        for round in 0..rounds {
            for (group, weights) in groups.iter().zip(&self.weights) {
                let started = Instant::now();
                let Some(read) = self.read_experts(group, weights, round) else { continue };
                // The first jobs wake the threads.
                if jobs >= 4 {
                    bytes += read as f64;
                    seconds += started.elapsed().as_secs_f64();
                }
                jobs += 1;
                if began.elapsed() > LONGEST {
                    return rate(bytes, seconds);
                }
            }
        }
        rate(bytes, seconds)
    }

    /// Computes the next experts of a block with an input of zeros; returns the bytes read.
    fn read_experts(&self, group: &Group, weights: &Weights, round: u32) -> Option<u64> {
        let first = round.checked_mul(group.used)?;
        let experts = first..first.checked_add(group.used)?;
        if experts.end > group.experts {
            return None;
        }
        let (row, size) = (weights.shape.n_embd * size_of::<f32>(), self.lane.size());
        let tokens = usize::try_from(MOST_TOKENS).ok()?;
        if row > size.inputs || row * group.used as usize * tokens > size.outputs {
            return None;
        }
        let run = |weight: &Weight| {
            (weight.address + first as usize * weight.expert_bytes, group.used as usize * weight.expert_bytes)
        };
        self.read_ahead.ask(weights.matrices.iter().map(run));
        let groups: Vec<_> = experts.map(|expert| weights.of(expert)).collect();
        let pairs: Vec<Pair> = (0..group.used).map(|output| Pair { input: 0, output }).collect();
        let job = Job {
            shape: &weights.shape,
            groups: &groups,
            pairs: &pairs,
            inputs: (self.lane.inputs().cast_const().cast(), row),
            outputs: (self.lane.outputs().cast(), row),
        };
        // SAFETY: the weights lie in RAM of the model, which is current; the lane has room for the rows (checked above) and nobody else uses
        // it; the ticket is waited for at once, and each pair has a row of its own.
        let ticket = unsafe { self.team.start(&job) }.ok()?;
        ticket.wait().ok()?;
        Some(groups.len() as u64 * weights.matrices.iter().map(|weight| weight.expert_bytes as u64).sum::<u64>())
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a rate; three digits are enough")]
fn rate(bytes: f64, seconds: f64) -> Option<f32> {
    let rate = bytes / (seconds * 1e6);
    (rate.is_finite() && rate > 0.0).then_some(rate as f32)
}

/// When the link is measured, and what was found.
#[derive(Debug)]
pub(super) struct LinkClock {
    next_step: u64,
    interval: u64,
}

impl LinkClock {
    pub(super) fn new() -> Self {
        Self { next_step: 0, interval: LINK_STEPS.0 }
    }

    /// A step is about to begin uploads. `Some` if they are to be timed: nothing else is on the link then.
    pub(super) fn start(&self, device: &Device, step: u64) -> Result<Option<Instant>, BufferError> {
        if step < self.next_step {
            return Ok(None);
        }
        device.driver().synchronize()?;
        Ok(Some(Instant::now()))
    }

    /// They were begun: waits for them. Bytes per microsecond, if there were enough.
    pub(super) fn stop(
        &mut self,
        device: &Device,
        step: u64,
        began: Instant,
        bytes: u64,
    ) -> Result<Option<f32>, BufferError> {
        if bytes < LEAST_LINK_BYTES {
            return Ok(None);
        }
        device.driver().synchronize()?;
        self.next_step = step + self.interval;
        self.interval = (self.interval * 4).min(LINK_STEPS.1);
        Ok(rate(bytes as f64, began.elapsed().as_secs_f64()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_bytes_per_microsecond() {
        assert_eq!(rate(13e9, 1.0), Some(13_000.0));
        assert_eq!(rate(0.0, 1.0), None);
        assert_eq!(rate(1.0, 0.0), None);
        assert_eq!(rate(0.0, 0.0), None);
    }
}
