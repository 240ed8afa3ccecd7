//! Host memory for expert weights: anonymous pages, filled by the host's loader in place.
//!
//! Owns: the mapping. Invariants: it stays mapped, readable and writable until dropped; accesses are range-checked.
//! Threads: the loader writes, graph threads read; the host does not run graphs over a model that is loading, and plain
//! concurrent accesses go through raw copies, never through references.
// UNSAFETY: memory mapping and raw copies; each block says what bounds it.
#![expect(unsafe_code, reason = "memory mapping and raw copies over host memory")]

use core::ffi::c_void;
use core::marker::PhantomData;
use core::ptr::NonNull;
use std::io;

/// The unit of mappings and of registration with a device. The system's pages may be larger, never smaller.
pub(super) const PAGE_BYTES: usize = 4096;

/// A mapping of zeroed pages.
#[derive(Debug)]
pub(crate) struct HostMemory {
    start: NonNull<c_void>,
    bytes: usize,
}

/// Readable bytes of a [`HostMemory`], borrowed from it but not a slice: the loader may still be writing elsewhere in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostRange<'a> {
    start: NonNull<c_void>,
    bytes: usize,
    life: PhantomData<&'a HostMemory>,
}

impl HostRange<'_> {
    /// Address of the first byte; readable for [`HostRange::bytes`].
    pub(crate) fn as_ptr(&self) -> *const c_void {
        self.start.as_ptr()
    }

    /// Length.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

// SAFETY: the mapping belongs to this object alone and is reached through range-checked raw copies.
unsafe impl Send for HostMemory {}
// SAFETY: as above; ordering of accesses to the same bytes is the host's, as for its own buffers.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Maps `bytes` bytes (at least one, rounded up to whole pages) of zeroed memory. Pages are committed when first written.
    pub(crate) fn map(bytes: usize) -> io::Result<Self> {
        let bytes = bytes
            .max(1)
            .checked_next_multiple_of(PAGE_BYTES)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        // SAFETY: a fresh anonymous mapping; no existing memory is touched.
        let start = unsafe {
            libc::mmap(
                core::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        // Large pages save most of the page faults of loading and the TLB misses of reading; without them all still works.
        // SAFETY: the range is the mapping just made; the advice changes no content.
        unsafe { libc::madvise(start.as_ptr(), bytes, libc::MADV_HUGEPAGE) };
        Ok(Self { start, bytes })
    }

    /// Address of the first byte.
    pub(crate) fn address(&self) -> usize {
        self.start.addr().get()
    }

    /// Size.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The memory as the host's loader sees it.
    pub(crate) fn as_ptr(&self) -> *mut c_void {
        self.start.as_ptr()
    }

    /// Whether a range lies in the mapping.
    pub(crate) fn contains(&self, address: usize, bytes: usize) -> bool {
        self.offset(address, bytes).is_some()
    }

    fn offset(&self, address: usize, bytes: usize) -> Option<usize> {
        let offset = address.checked_sub(self.address())?;
        (offset.checked_add(bytes)? <= self.bytes).then_some(offset)
    }

    /// Bytes to read; `None` outside the mapping.
    pub(crate) fn range(&self, address: usize, bytes: usize) -> Option<HostRange<'_>> {
        let offset = self.offset(address, bytes)?;
        // SAFETY: the offset lies in the mapping.
        let start = unsafe { self.start.byte_add(offset) };
        Some(HostRange { start, bytes, life: PhantomData })
    }

    /// Sets bytes; outside the mapping nothing happens.
    pub(crate) fn fill(&self, address: usize, value: u8, bytes: usize) {
        if let Some(range) = self.range(address, bytes) {
            // SAFETY: the range lies in the mapping, which is writable.
            unsafe { range.start.as_ptr().cast::<u8>().write_bytes(value, bytes) };
        }
    }

    /// Copies bytes in; outside the mapping nothing happens.
    ///
    /// # Safety
    /// `source` is readable for `bytes`.
    pub(crate) unsafe fn write(&self, address: usize, source: *const c_void, bytes: usize) {
        if let Some(range) = self.range(address, bytes) {
            let target = range.start.as_ptr().cast::<u8>();
            // SAFETY: the target lies in the mapping, the source is the caller's; `copy` allows them to overlap.
            unsafe { core::ptr::copy(source.cast::<u8>(), target, bytes) };
        }
    }

    /// Copies bytes out; outside the mapping nothing happens.
    ///
    /// # Safety
    /// `target` is writable for `bytes`.
    pub(crate) unsafe fn read(&self, address: usize, target: *mut c_void, bytes: usize) {
        if let Some(range) = self.range(address, bytes) {
            // SAFETY: the source lies in the mapping, the target is the caller's; `copy` allows them to overlap.
            unsafe { core::ptr::copy(range.as_ptr().cast::<u8>(), target.cast::<u8>(), bytes) };
        }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping of `map`; every range borrows from self, so none is left.
        unsafe { libc::munmap(self.start.as_ptr(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroed_and_checked() {
        let memory = HostMemory::map(10_000).unwrap();
        assert_eq!(memory.bytes(), 12_288, "whole pages");
        let base = memory.address();
        let mut out = [9_u8; 4];
        // SAFETY: four writable bytes.
        unsafe { memory.read(base + 9_996, out.as_mut_ptr().cast(), 4) };
        assert_eq!(out, [0; 4]);
        memory.fill(base, 7, 4);
        // SAFETY: four writable bytes.
        unsafe { memory.read(base, out.as_mut_ptr().cast(), 4) };
        assert_eq!(out, [7; 4]);
        // SAFETY: four readable bytes.
        unsafe { memory.write(base + 2, [1_u8, 2, 3, 4].as_ptr().cast(), 4) };
        // SAFETY: four writable bytes.
        unsafe { memory.read(base + 1, out.as_mut_ptr().cast(), 4) };
        assert_eq!(out, [7, 1, 2, 3]);
    }

    #[test]
    fn outside_is_refused() {
        let memory = HostMemory::map(4096).unwrap();
        let base = memory.address();
        assert!(memory.contains(base, 4096));
        assert!(!memory.contains(base, 4097));
        assert!(!memory.contains(base - 1, 1));
        assert!(!memory.contains(base + 1, usize::MAX));
        assert!(memory.range(base + 4096, 0).is_some());
        assert!(memory.range(base + 4090, 7).is_none());
    }

    #[test]
    fn too_much_is_an_error() {
        assert!(HostMemory::map(1 << 62).is_err());
    }
}
