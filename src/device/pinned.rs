//! The budget of pinned memory.
//!
//! Owns: how much of it all devices of the process have. Invariants: what is claimed is given back once.
//! Threads: any. Does not: pin (`experts` does).

use std::sync::atomic::{AtomicUsize, Ordering};

use super::Device;
use crate::ram;

/// Host memory registered by all devices of this process, in bytes: the budget is the machine's.
static PINNED_BYTES: AtomicUsize = AtomicUsize::new(0);

impl Device {
    /// Takes `bytes` from the budget of pinned memory; false if it does not hold them.
    pub(crate) fn claim_pinned(&self, bytes: usize) -> bool {
        let limit = self.pin_limit_bytes();
        let claim = |pinned: usize| pinned.checked_add(bytes).filter(|sum| *sum <= limit);
        PINNED_BYTES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, claim).is_ok()
    }

    /// Gives back what [`Device::claim_pinned`] took.
    pub(crate) fn release_pinned(&self, bytes: usize) {
        PINNED_BYTES.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Bytes that are registered at once, at least.
    pub(crate) fn pin_chunk_bytes(&self) -> usize {
        self.config.debug_pins.unwrap_or(512) << 20
    }

    /// The budget of pinned memory, in bytes.
    pub(crate) fn pin_limit_bytes(&self) -> usize {
        let mib = |mib: u64| usize::try_from(mib.saturating_mul(1 << 20)).unwrap_or(usize::MAX);
        self.config.pin_budget_mb.map_or_else(|| ram::usable_bytes() / 4 * 3, mib)
    }
}
