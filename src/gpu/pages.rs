//! Addresses in the host's own memory, with pages behind a part of them: what a device's mapping is, for devices whose memory is RAM.
//!
//! Owns: the mapping, and which parts of it have pages ([`SparsePages`]). Invariants: pages behind the size, or outside of those parts, cannot be read or written; who tries ends
//! the process.
//! Threads: as for memory of a driver. Does not: wait for anybody; its driver does.
// UNSAFETY: memory mapping; each block says what bounds it.
#![expect(unsafe_code, reason = "memory mapping")]

use core::ffi::c_void;
use core::ptr::NonNull;

use std::ops::Range;

use parking_lot::Mutex;

use super::DriverError;
use crate::graph::Ranges;

/// Smallest unit of the system's protection.
const PAGE_BYTES: usize = 4096;

/// Reserved addresses.
#[derive(Debug)]
pub(super) struct Pages {
    start: NonNull<c_void>,
    reserved: usize,
    bytes: usize,
}

// SAFETY: the mapping belongs to this object; its bytes are reached through a driver, whose contract orders accesses.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Addresses for `bytes` bytes, rounded up to whole pages.
    pub(super) fn reserve(bytes: usize) -> Result<Self, DriverError> {
        let reserved = bytes.max(1).checked_next_multiple_of(PAGE_BYTES).ok_or(DriverError::OutOfMemory)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh anonymous mapping; no existing memory is touched.
        let start = unsafe { libc::mmap(core::ptr::null_mut(), reserved, libc::PROT_NONE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(DriverError::OutOfMemory);
        }
        start.expose_provenance();
        let start = NonNull::new(start).ok_or(DriverError::OutOfMemory)?;
        Ok(Self { start, reserved, bytes: 0 })
    }

    /// Address of the first byte.
    pub(super) fn base(&self) -> usize {
        self.start.addr().get()
    }

    /// Bytes with pages behind them.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes of addresses.
    pub(super) fn reserved(&self) -> usize {
        self.reserved
    }

    /// The pieces that come and go: some hundred in all, of 256 KiB at most, so that tests see many of them.
    pub(super) fn unit(&self) -> usize {
        (self.reserved / 128).clamp(PAGE_BYTES, 256 << 10).next_multiple_of(PAGE_BYTES)
    }

    /// Makes exactly the first `bytes` bytes usable, a multiple of the unit or all.
    pub(super) fn resize(&mut self, bytes: usize) -> Result<(), DriverError> {
        let bytes = bytes.min(self.reserved);
        if bytes > self.bytes {
            self.protect(self.bytes, bytes, libc::PROT_READ | libc::PROT_WRITE)?;
        } else if bytes < self.bytes {
            self.close(bytes, self.bytes)?;
        }
        self.bytes = bytes;
        Ok(())
    }

    fn close(&self, from: usize, to: usize) -> Result<(), DriverError> {
        self.protect(from, to, libc::PROT_NONE)?;
        // SAFETY: the range lies in the mapping, and nobody can read what is lost.
        unsafe { libc::madvise(self.start.as_ptr().wrapping_byte_add(from), to - from, libc::MADV_DONTNEED) };
        Ok(())
    }

    fn protect(&self, from: usize, to: usize, protection: libc::c_int) -> Result<(), DriverError> {
        // SAFETY: the range lies in the mapping, on page boundaries.
        let done = unsafe { libc::mprotect(self.start.as_ptr().wrapping_byte_add(from), to - from, protection) };
        if done == 0 { Ok(()) } else { Err(DriverError::OutOfMemory) }
    }
}

/// Pages behind any part of reserved addresses.
#[derive(Debug)]
pub(super) struct SparsePages {
    pages: Pages,
    mapped: Mutex<Ranges>,
}

impl SparsePages {
    /// Addresses for `bytes` bytes, with pages behind all of them.
    pub(super) fn new(bytes: usize) -> Result<Self, DriverError> {
        let mut pages = Pages::reserve(bytes)?;
        let all = pages.reserved();
        pages.resize(all)?;
        Ok(Self { pages, mapped: Mutex::new(Ranges::from(0..all)) })
    }

    /// Address of the first byte.
    pub(super) fn base(&self) -> usize {
        self.pages.base()
    }

    /// Bytes of addresses.
    pub(super) fn bytes(&self) -> usize {
        self.pages.reserved()
    }

    /// The smallest piece that comes and goes.
    pub(super) fn unit(&self) -> usize {
        PAGE_BYTES
    }

    /// What has pages behind it.
    pub(super) fn mapped(&self) -> Ranges {
        self.mapped.lock().clone()
    }

    /// Puts pages behind these ranges. On failure nothing has changed.
    pub(super) fn map(&self, ranges: &Ranges) -> Result<(), DriverError> {
        let mut mapped = self.mapped.lock();
        let missing: Vec<Range<usize>> = ranges.without(&mapped).iter().collect();
        for (at, run) in missing.iter().enumerate() {
            if let Err(error) = self.pages.protect(run.start, run.end, libc::PROT_READ | libc::PROT_WRITE) {
                missing[..at].iter().try_for_each(|run| self.pages.close(run.start, run.end))?;
                return Err(error);
            }
        }
        *mapped = mapped.with(ranges);
        Ok(())
    }

    /// Takes the pages away outside of these ranges.
    pub(super) fn keep_only(&self, ranges: &Ranges) -> Result<(), DriverError> {
        let mut mapped = self.mapped.lock();
        for run in mapped.without(ranges).iter() {
            self.pages.close(run.start, run.end)?;
        }
        *mapped = mapped.within(ranges);
        Ok(())
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping of `reserve`.
        unsafe { libc::munmap(self.start.as_ptr(), self.reserved) };
    }
}
