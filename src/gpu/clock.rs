//! Times at which work was done, for measuring (`timeline`): the device's own where a driver has them, else the host's.
//!
//! Owns: the contract and the host's clock. Invariants: nothing is waited for. Threads: the one that drives the backend.
//! Does not: know what is measured.

use std::fmt;
use std::time::Instant;

use super::DriverError;
use crate::abi::inner;

/// The times of one pass.
pub(crate) trait Clock: Send + fmt::Debug {
    /// Whose times they are: `device` or `host`.
    fn name(&self) -> &'static str;

    /// Takes the time when everything is done that the driver was asked for so far. Returns the number of the stamp, from 0.
    fn stamp(&mut self) -> Result<usize, DriverError>;

    /// Takes the time when everything is done that the inner stream was given so far. Returns the number of the stamp.
    fn stamp_inner(&mut self, inner: &inner::Backend) -> Result<usize, DriverError>;

    /// All times, in microseconds from the earliest; `None` while one is not known yet.
    fn read(&self) -> Result<Option<Vec<f64>>, DriverError>;
}

/// The host's clock: the times at which work was handed on.
#[derive(Debug, Default)]
pub(crate) struct HostClock(Vec<Instant>);

impl HostClock {
    fn take(&mut self) -> usize {
        self.0.push(Instant::now());
        self.0.len() - 1
    }
}

impl Clock for HostClock {
    fn name(&self) -> &'static str {
        "host"
    }

    fn stamp(&mut self) -> Result<usize, DriverError> {
        Ok(self.take())
    }

    fn stamp_inner(&mut self, _inner: &inner::Backend) -> Result<usize, DriverError> {
        Ok(self.take())
    }

    fn read(&self) -> Result<Option<Vec<f64>>, DriverError> {
        let us = |time: &Instant| self.0.first().map_or(0.0, |first| time.duration_since(*first).as_secs_f64() * 1e6);
        Ok(Some(self.0.iter().map(us).collect()))
    }
}

/// The same times, counted from the earliest.
pub(super) fn from_earliest(mut times: Vec<f64>) -> Vec<f64> {
    let earliest = times.iter().copied().fold(f64::INFINITY, f64::min);
    times.iter_mut().for_each(|time| *time -= earliest);
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_count_from_the_earliest() {
        assert_eq!(from_earliest(vec![0.0, -2.0, 5.0]), [2.0, 0.0, 7.0]);
        assert_eq!(from_earliest(Vec::new()), [0.0; 0]);
    }
}
