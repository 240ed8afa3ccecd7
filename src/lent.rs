//! Memory of a compute buffer: it comes with the graphs that touch it and goes when smaller ones follow (docs/adr/0013).
//!
//! Owns: the addresses and the memory behind them, its lease, and when it begins to come and go: with the first tensor of a buffer that the host calls
//! a compute buffer, if nothing was written before.
//! Invariants: a graph runs, and the host's copies are done, only where there is memory; what the host could still read stays. The lease is
//! what has memory. The lock of the mapping is held while memory comes and goes, the cache's part in it included: it is taken before the cache.
//! Threads: any; the graphs of one buffer come from one thread at a time. Does not: know graphs (`backend` does) or how memory is mapped
//! (`gpu` does).

use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::buffer::BufferError;
use crate::config::AllocationKind;
use crate::device::{Device, Term};
use crate::gpu::{DriverError, Memory, Place, Sparse};
use crate::graph::Ranges;
use crate::memory::{GraphName, Lease, Mapping, Need, Use};
use crate::telemetry::log;

/// Everything has memory, and what the buffer is for is not known.
const WHOLE: u8 = 0;
/// Memory comes and goes.
const ON_DEMAND: u8 = 1;
/// Everything has memory, for good.
const FIXED: u8 = 2;

/// The memory of one buffer.
pub(crate) struct Lent {
    device: &'static Device,
    memory: Box<dyn Sparse>,
    lease: Lease,
    phase: AtomicU8,
    state: Mutex<State>,
    /// The mapping's stamp, to be compared without its lock.
    stamp: AtomicU64,
}

impl std::fmt::Debug for Lent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lent").field("memory", &self.memory).field("lease", &self.lease).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct State {
    mapping: Mapping,
    /// Bytes that had no memory when the host wrote them: the next graph fails.
    missed: usize,
}

/// What a graph brought and took, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Moved {
    pub(crate) came: usize,
    pub(crate) went: usize,
}

impl Lent {
    /// Over memory that is all there, and leased.
    pub(crate) fn new(device: &'static Device, memory: Box<dyn Sparse>, lease: Lease) -> Self {
        let (phase, state) = (AtomicU8::new(WHOLE), Mutex::default());
        Self { device, memory, lease, phase, state, stamp: AtomicU64::new(0) }
    }

    /// The memory.
    pub(crate) fn memory(&self) -> &dyn Memory {
        &*self.memory
    }

    /// The use became known.
    pub(crate) fn used_for(&self, what: Use) {
        self.lease.used_for(what);
    }

    /// The host calls it a compute buffer and lays out its first tensor.
    pub(crate) fn begin(&self) -> Result<(), BufferError> {
        if self.phase.compare_exchange(WHOLE, ON_DEMAND, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return Ok(());
        }
        let had = self.memory.mapped_bytes();
        let mut state = self.state.lock();
        self.keep(&mut state, Ranges::default())?;
        drop(state);
        self.device.note_on_demand(had.saturating_sub(self.memory.mapped_bytes()));
        let mib = self.memory.bytes() >> 20;
        log::debug(&format!(
            "{}: {mib} MiB of compute memory come with the graphs that touch them",
            self.device.label()
        ));
        Ok(())
    }

    /// Whether memory comes and goes; asked without consequences.
    pub(crate) fn comes_and_goes(&self) -> bool {
        self.phase.load(Ordering::Acquire) == ON_DEMAND
    }

    fn is_on_demand(&self) -> bool {
        match self.phase.load(Ordering::Acquire) {
            ON_DEMAND => true,
            // It is used before it is known to be a compute buffer: it stays as it is.
            WHOLE => self.phase.compare_exchange(WHOLE, FIXED, Ordering::AcqRel, Ordering::Acquire) == Err(ON_DEMAND),
            _ => false,
        }
    }

    /// The units that hold any of these bytes.
    pub(crate) fn units(&self, ranges: &Ranges) -> Ranges {
        ranges.in_units(self.memory.unit(), self.memory.bytes())
    }

    fn offsets(&self, address: usize, bytes: usize) -> Range<usize> {
        let start = address.saturating_sub(self.memory.base());
        start..start.saturating_add(bytes)
    }

    /// The host is about to write: brings memory there. False if there is none; the next graph fails then.
    pub(crate) fn write(&self, address: usize, bytes: usize) -> Result<bool, BufferError> {
        if bytes == 0 || !self.is_on_demand() {
            return Ok(true);
        }
        let touched = self.units(&Ranges::from(self.offsets(address, bytes)));
        let mut state = self.state.lock();
        let missing = state.mapping.write(&touched);
        if missing.is_empty() {
            return Ok(true);
        }
        match self.bring(&mut state, &missing) {
            Err(BufferError::NoLentMemory { .. }) => {
                state.missed += missing.bytes();
                Ok(false)
            }
            other => other.map(|()| true),
        }
    }

    /// The host is about to read.
    pub(crate) fn read(&self, address: usize, bytes: usize) -> Result<(), BufferError> {
        if bytes == 0 || !self.is_on_demand() || self.state.lock().mapping.holds(&self.offsets(address, bytes)) {
            return Ok(());
        }
        Err(BufferError::NotThere { device: self.device.label().to_owned(), start: address, bytes })
    }

    /// Whether bytes that the host wrote are lost, so that the next graph must fail.
    pub(crate) fn has_lost(&self) -> bool {
        self.state.lock().missed > 0
    }

    /// Bytes of these units without memory.
    pub(crate) fn lacks(&self, units: &Ranges) -> usize {
        if self.comes_and_goes() { self.state.lock().mapping.lacks(units) } else { 0 }
    }

    /// Whether a graph that needed nothing at this stamp still needs nothing.
    pub(crate) fn is_unchanged(&self, stamp: u64) -> bool {
        stamp != 0 && self.stamp.load(Ordering::Acquire) == stamp
    }

    /// A graph that touches these units is about to run. `idle` waits for the stream that it will run on. Returns also the stamp at which it
    /// needs nothing; 0 if it is to be asked again.
    pub(crate) fn prepare(
        &self,
        name: GraphName,
        touched: &Ranges,
        idle: &dyn Fn(),
    ) -> Result<(Moved, u64), BufferError> {
        let mut moved = Moved::default();
        if !self.is_on_demand() {
            return Ok((moved, 0));
        }
        let mut state = self.state.lock();
        let missed = std::mem::take(&mut state.missed);
        if missed > 0 {
            return Err(self.no_memory(missed));
        }
        loop {
            match state.mapping.graph(name, touched) {
                Need::Nothing(stamp) => {
                    self.account(&state.mapping);
                    return Ok((moved, stamp));
                }
                Need::Watching => {
                    self.stamp.store(state.mapping.stamp(), Ordering::Release);
                    return Ok((moved, 0));
                }
                Need::Memory(missing) => {
                    moved.came += missing.bytes();
                    self.bring(&mut state, &missing)?;
                    self.tell("came", missing.bytes(), &state.mapping);
                }
                Need::Only(kept) => {
                    let went = state.mapping.mapped().bytes().saturating_sub(kept.bytes());
                    moved.went += went;
                    idle();
                    self.keep(&mut state, kept)?;
                    self.device.note_returned();
                    self.tell("went back", went, &state.mapping);
                }
            }
        }
    }

    fn bring(&self, state: &mut State, missing: &Ranges) -> Result<(), BufferError> {
        let bytes = missing.bytes();
        if !self.device.maps_all() {
            let refused = self.device.allocation_fails(AllocationKind::Lend);
            if refused || !self.device.lend_room(&self.lease, Use::Compute, bytes) {
                return Err(self.no_memory(bytes));
            }
            let mapped = self.map(missing, bytes);
            self.lease.resize(self.memory.mapped_bytes());
            mapped?;
        }
        state.mapping.came(missing);
        self.account(&state.mapping);
        if self.device.poisons() {
            for run in missing.iter() {
                let place = Place { memory: self.memory(), address: self.memory.base() + run.start };
                self.device.driver().fill(place, 0xff, run.len())?;
            }
            self.device.driver().synchronize()?;
        }
        Ok(())
    }

    /// Where there is no memory, the cache gives some back.
    fn map(&self, missing: &Ranges, bytes: usize) -> Result<(), BufferError> {
        let mut tries = 0;
        loop {
            let mapped = if self.device.allocation_fails(AllocationKind::Map) {
                Err(DriverError::OutOfMemory)
            } else {
                self.memory.map(missing)
            };
            match mapped {
                Err(DriverError::OutOfMemory) if self.device.reclaim_for(Use::Compute, bytes, tries, Term::Lent) => {
                    tries += 1;
                }
                Err(DriverError::OutOfMemory) => return Err(self.no_memory(bytes)),
                other => return Ok(other?),
            }
        }
    }

    fn keep(&self, state: &mut State, kept: Ranges) -> Result<(), BufferError> {
        if !self.device.maps_all() {
            self.memory.keep_only(&kept)?;
            self.lease.resize(self.memory.mapped_bytes());
        }
        state.mapping.went(kept);
        self.account(&state.mapping);
        Ok(())
    }

    /// Tells the account what a long pass has and what it may ask for.
    fn account(&self, mapping: &Mapping) {
        self.stamp.store(mapping.stamp(), Ordering::Release);
        if !self.device.maps_all() {
            let promised = self.memory.bytes().saturating_sub(self.memory.mapped_bytes());
            self.lease.lend(mapping.lent_bytes(), promised);
        }
    }

    fn no_memory(&self, bytes: usize) -> BufferError {
        BufferError::NoLentMemory {
            device: self.device.label().to_owned(),
            inner: self.device.inner_name.clone(),
            mib: bytes.div_ceil(1 << 20),
        }
    }

    fn tell(&self, how: &str, bytes: usize, mapping: &Mapping) {
        let (bytes, now, all) = (bytes >> 10, mapping.mapped().bytes() >> 10, self.memory.bytes() >> 10);
        log::info(&format!("{}: {bytes} KiB of compute memory {how} ({now} of {all} KiB)", self.device.label()));
    }
}
