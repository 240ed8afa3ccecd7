//! The times of long passes (`timeline`): taken while a pass is handed on, read when it is over.
//!
//! Owns: the passes whose times are not all known yet. Invariants: nothing is waited for within a pass; without the key nothing is taken.
//! Threads: the one that drives the backend. Does not: compute with the times (`telemetry::timeline` does).

use crate::abi::inner;
use crate::device::Device;
use crate::experts::stage::{Brought, Moved, Shape};
use crate::gpu::{Clock, DriverError};
use crate::telemetry::log;
use crate::telemetry::timeline::{Interval, Timeline};

/// Passes that are kept while their times are not known; later ones push the oldest out.
const MOST_KEPT: usize = 64;

/// A block, a part, and the stamps at both ends.
type Stamped = (i64, usize, usize, usize);

/// One pass.
#[derive(Debug)]
pub(super) struct Watch {
    clock: Box<dyn Clock>,
    shape: Shape,
    tokens: u64,
    blocks: usize,
    moved: Moved,
    copies: Vec<Stamped>,
    computes: Vec<Stamped>,
    began: Option<usize>,
}

impl Watch {
    /// The pass begins; `None` without the key.
    pub(super) fn new(device: &Device, shape: Shape, parts: &[Brought<'_>], tokens: u64) -> Option<Self> {
        device.timeline()?;
        let mut clock = device.driver().clock().ok()?;
        clock.stamp().ok()?;
        let blocks = parts.last().map_or(0, |part| part.block + 1);
        let (copies, computes) = (Vec::new(), Vec::new());
        Some(Self { clock, shape, tokens, blocks, moved: Moved::default(), copies, computes, began: None })
    }

    /// A buffer is free and about to be filled.
    pub(super) fn copy_begins(&mut self) -> Result<(), DriverError> {
        self.began = Some(self.clock.stamp()?);
        Ok(())
    }

    /// All that fills it was asked for.
    pub(super) fn copy_ends(&mut self, part: &Brought<'_>, moved: Moved) -> Result<(), DriverError> {
        let end = self.clock.stamp()?;
        let block = i64::try_from(part.block).unwrap_or(i64::MAX);
        self.copies.extend(self.began.take().map(|began| (block, part.part, began, end)));
        self.moved += moved;
        Ok(())
    }

    /// Work is about to be handed on.
    pub(super) fn compute_begins(&mut self, inner: &inner::Backend) -> Result<(), DriverError> {
        self.began = Some(self.clock.stamp_inner(inner)?);
        Ok(())
    }

    /// It was handed on; `part` is absent for what lies between blocks.
    pub(super) fn compute_ends(
        &mut self,
        inner: &inner::Backend,
        part: Option<&Brought<'_>>,
    ) -> Result<(), DriverError> {
        let end = self.clock.stamp_inner(inner)?;
        let (block, part) = part.map_or((-1, 0), |part| (i64::try_from(part.block).unwrap_or(i64::MAX), part.part));
        self.computes.extend(self.began.take().map(|began| (block, part, began, end)));
        Ok(())
    }

    fn timeline(&self, pass: u64) -> Result<Option<Timeline>, DriverError> {
        let Some(times) = self.clock.read()? else { return Ok(None) };
        let at = |stamp: usize| times.get(stamp).copied().unwrap_or(0.0);
        let intervals = |stamped: &[Stamped]| {
            let interval =
                |&(block, part, begin, end): &Stamped| Interval { block, part, begin_us: at(begin), end_us: at(end) };
            stamped.iter().map(interval).collect()
        };
        Ok(Some(Timeline {
            clock: self.clock.name(),
            pass,
            unit: self.shape.unit.name(),
            buffers: self.shape.buffers,
            tokens: self.tokens,
            blocks: self.blocks,
            ram_bytes: self.moved.ram,
            device_bytes: self.moved.device,
            copies: intervals(&self.copies),
            computes: intervals(&self.computes),
        }))
    }
}

/// The passes of one backend that were handed on.
#[derive(Debug, Default)]
pub(super) struct Watches {
    passes: Vec<(u64, Watch)>,
    handed_on: u64,
    told: bool,
}

impl Watches {
    /// A pass was handed on.
    pub(super) fn keep(&mut self, watch: Watch) {
        self.handed_on += 1;
        if self.passes.len() >= MOST_KEPT {
            self.passes.remove(0);
        }
        self.passes.push((self.handed_on, watch));
    }

    /// Writes those whose times are known, in order.
    pub(super) fn write(&mut self, device: &Device) {
        let Some(path) = device.timeline() else { return };
        while let Some((pass, watch)) = self.passes.first() {
            let written = match watch.timeline(*pass) {
                Ok(None) => return,
                Ok(Some(timeline)) => timeline.append(device.label(), path).map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            };
            if let Err(error) = written
                && !std::mem::replace(&mut self.told, true)
            {
                log::error(&format!("{}: timeline={}: {error}", device.label(), path.display()));
            }
            self.passes.remove(0);
        }
    }
}
