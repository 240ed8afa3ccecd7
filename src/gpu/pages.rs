//! Addresses in the host's own memory, with pages behind a part of them: what a device's mapping is, for devices whose memory is RAM.
//!
//! Owns: the mapping. Invariants: pages behind the size cannot be read or written; who tries ends the process.
//! Threads: as for memory of a driver. Does not: wait for anybody; its driver does.
// UNSAFETY: memory mapping; each block says what bounds it.
#![expect(unsafe_code, reason = "memory mapping")]

use core::ffi::c_void;
use core::ptr::NonNull;

use super::DriverError;

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
            self.protect(bytes, self.bytes, libc::PROT_NONE)?;
            // SAFETY: the range lies in the mapping, and nobody can read what is lost.
            unsafe {
                libc::madvise(self.start.as_ptr().wrapping_byte_add(bytes), self.bytes - bytes, libc::MADV_DONTNEED)
            };
        }
        self.bytes = bytes;
        Ok(())
    }

    fn protect(&self, from: usize, to: usize, protection: libc::c_int) -> Result<(), DriverError> {
        // SAFETY: the range lies in the mapping, on page boundaries.
        let done = unsafe { libc::mprotect(self.start.as_ptr().wrapping_byte_add(from), to - from, protection) };
        if done == 0 { Ok(()) } else { Err(DriverError::OutOfMemory) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping of `reserve`.
        unsafe { libc::munmap(self.start.as_ptr(), self.reserved) };
    }
}
