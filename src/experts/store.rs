//! Host memory for expert weights: anonymous pages, filled by the host's loader in place, or pages of the model's file.
//!
//! Owns: the mapping, and with it what `mapped` put over parts of it. Invariants: it stays mapped and readable until dropped; accesses are
//! range-checked; what shows a file becomes memory of its own before it is written to.
//! Threads: the loader writes, graph threads read; the host does not run graphs over a model that is loading, and plain
//! concurrent accesses go through raw copies, never through references.
// UNSAFETY: memory mapping and raw copies; each block says what bounds it.
#![expect(unsafe_code, reason = "memory mapping and raw copies over host memory")]

use core::ffi::c_void;
use core::marker::PhantomData;
use core::ptr::NonNull;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use super::mapped::{self, Extents, Unmapped};

/// The unit of mappings and of registration with a device. The system's pages may be larger, never smaller.
pub(super) const PAGE_BYTES: usize = 4096;

/// A mapping of zeroed pages.
#[derive(Debug)]
pub(crate) struct HostMemory {
    start: NonNull<c_void>,
    bytes: usize,
    /// What shows a file.
    extents: Extents,
    /// Whether all that nobody has written to is zero.
    fresh: AtomicBool,
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
        // A model that is larger than the RAM gets its addresses only where the loader maps its file, so that the pages can come from there.
        // Elsewhere the refusal is better than what the system does when the pages are written.
        let start = anonymous(bytes, 0).or_else(|error| {
            if mapped::mapped_file_bytes() < bytes - bytes / 64 {
                Err(error)
            } else {
                anonymous(bytes, libc::MAP_NORESERVE)
            }
        })?;
        // Large pages save most of the page faults of loading and the TLB misses of reading; without them all still works.
        // SAFETY: the range is the mapping just made; the advice changes no content.
        unsafe { libc::madvise(start.as_ptr(), bytes, libc::MADV_HUGEPAGE) };
        Ok(Self { start, bytes, extents: Extents::default(), fresh: AtomicBool::new(true) })
    }

    /// Lets a tensor that was placed at `address` show `bytes` bytes of a file that the host has mapped at `source`, without a copy. Returns
    /// its address from now on, behind the old one. `wanted` is asked about the pages in the buffer that would show the file.
    pub(crate) fn show_file(
        &self,
        address: usize,
        source: usize,
        bytes: usize,
        wanted: impl FnOnce(&Range<usize>) -> Result<(), Unmapped>,
    ) -> Result<usize, Unmapped> {
        let found = mapped::find_here(source, bytes)?;
        let pages = Extents::place(&found, address).ok_or(Unmapped::NoRoom)?;
        if !self.contains(pages.start, pages.len()) {
            return Err(Unmapped::NoRoom);
        }
        wanted(&pages)?;
        self.as_ptr().expose_provenance();
        // SAFETY: the pages lie in this mapping, are as many as were found, and hold no tensor but the one that is replaced.
        unsafe { self.extents.show(&found, pages) }
    }

    /// Bytes that show a file.
    pub(crate) fn file_bytes(&self) -> usize {
        self.extents.bytes()
    }

    /// The ranges that show a file, in no order.
    pub(crate) fn file_ranges(&self) -> Vec<Range<usize>> {
        self.extents.list()
    }

    /// Whether any of these bytes show a file.
    pub(crate) fn shows_file(&self, address: usize, bytes: usize) -> bool {
        self.extents.touch(&(address..address.saturating_add(bytes)))
    }

    /// Asks the system for bytes that are about to be read, where they show a file: it then reads the pages that hold them, and none around.
    pub(crate) fn ask(&self, address: usize, bytes: usize) {
        if self.contains(address, bytes) && self.shows_file(address, bytes) {
            mapped::will_need(address, bytes);
        }
    }

    /// Whether all that nobody has written to is zero.
    pub(crate) fn is_fresh(&self) -> bool {
        self.fresh.load(Ordering::Relaxed)
    }

    /// Tensors are laid out anew: what lay anywhere before is left.
    pub(crate) fn reuse(&self) {
        self.fresh.store(false, Ordering::Relaxed);
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

    /// Sets bytes; outside the mapping nothing happens. Fails where a file is shown and there is no memory to take its place.
    pub(crate) fn fill(&self, address: usize, value: u8, bytes: usize) -> io::Result<()> {
        if let Some(range) = self.range(address, bytes) {
            self.make_writable(address, bytes)?;
            // SAFETY: the range lies in the mapping, which is writable there.
            unsafe { range.start.as_ptr().cast::<u8>().write_bytes(value, bytes) };
        }
        Ok(())
    }

    fn make_writable(&self, address: usize, bytes: usize) -> io::Result<()> {
        self.extents.own(&(address..address.saturating_add(bytes)))
    }

    /// Copies bytes in; outside the mapping nothing happens. Fails as [`HostMemory::fill`].
    ///
    /// # Safety
    /// `source` is readable for `bytes`.
    pub(crate) unsafe fn write(&self, address: usize, source: *const c_void, bytes: usize) -> io::Result<()> {
        if let Some(range) = self.range(address, bytes) {
            self.make_writable(address, bytes)?;
            let target = range.start.as_ptr().cast::<u8>();
            // SAFETY: the target lies in the mapping, the source is the caller's; `copy` allows them to overlap.
            unsafe { core::ptr::copy(source.cast::<u8>(), target, bytes) };
        }
        Ok(())
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

/// Anonymous memory.
fn anonymous(bytes: usize, flags: i32) -> io::Result<NonNull<c_void>> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags;
    // SAFETY: a fresh anonymous mapping; no existing memory is touched.
    let start = unsafe { libc::mmap(core::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(start).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: exactly the addresses of `map`, with what lies there now; every range borrows from self, so none is left.
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
        memory.fill(base, 7, 4).unwrap();
        // SAFETY: four writable bytes.
        unsafe { memory.read(base, out.as_mut_ptr().cast(), 4) };
        assert_eq!(out, [7; 4]);
        // SAFETY: four readable bytes.
        unsafe { memory.write(base + 2, [1_u8, 2, 3, 4].as_ptr().cast(), 4) }.unwrap();
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

    /// A file of `bytes` bytes that count, mapped as the host maps a model.
    fn mapped_file(bytes: usize) -> (tempfile::TempDir, *mut c_void) {
        use std::os::fd::AsRawFd;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model");
        std::fs::write(&path, content(bytes)).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        // SAFETY: a fresh mapping of an open file.
        let start =
            unsafe { libc::mmap(core::ptr::null_mut(), bytes, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert_ne!(start, libc::MAP_FAILED);
        (folder, start)
    }

    #[expect(clippy::cast_possible_truncation, reason = "a pattern of bytes")]
    fn content(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|byte| (byte % 251) as u8).collect()
    }

    fn read(memory: &HostMemory, address: usize, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        // SAFETY: the vector is writable for its length.
        unsafe { memory.read(address, out.as_mut_ptr().cast(), bytes) };
        out
    }

    #[test]
    fn a_tensor_shows_its_file_until_it_is_written_to() {
        let bytes = 50_000;
        let (_folder, file) = mapped_file(100_000);
        let memory = HostMemory::map(200_000).unwrap();
        let source = file.expose_provenance() + 4_128;
        let old = memory.address() + 100;
        let address = memory.show_file(old, source, bytes, |_| Ok(())).unwrap();
        assert!(address >= old && address + bytes <= old + bytes + mapped::slack_bytes());
        assert_eq!(address % mapped::page_bytes(), source % mapped::page_bytes());
        assert_eq!(read(&memory, address, bytes), content(100_000)[4_128..4_128 + bytes]);
        assert_eq!(read(&memory, memory.address(), 4_096), vec![0; 4_096], "its neighbours stay");
        assert!(memory.shows_file(address, 1) && !memory.shows_file(memory.address(), 100));
        // SAFETY: the mapping made above, which nobody uses any more.
        unsafe { libc::munmap(file, 100_000) };
        assert_eq!(read(&memory, address, bytes), content(100_000)[4_128..4_128 + bytes], "the host's mapping may go");
        memory.fill(address + 10, 9, 1).unwrap();
        assert_eq!(memory.file_bytes(), 0);
        let mut written = content(100_000)[4_128..4_128 + bytes].to_vec();
        written[10] = 9;
        assert_eq!(read(&memory, address, bytes), written);
    }

    #[test]
    fn what_cannot_be_shown_stays_as_it_is() {
        let (_folder, file) = mapped_file(100_000);
        let memory = HostMemory::map(65_536).unwrap();
        let (base, source) = (memory.address(), file.expose_provenance());
        let shown = |address, source, bytes, taken: bool| {
            memory.show_file(address, source, bytes, |_| if taken { Err(Unmapped::NoRoom) } else { Ok(()) })
        };
        assert!(matches!(shown(base, source, 65_536 + 1, false), Err(Unmapped::NoRoom)), "larger than the buffer");
        assert!(matches!(shown(base, source, 100, true), Err(Unmapped::NoRoom)), "a neighbour");
        assert!(matches!(shown(base, content(10).as_ptr().addr(), 10, false), Err(Unmapped::NotAFile)));
        shown(base, source, 100, false).unwrap();
        assert!(matches!(shown(base, source, 100, false), Err(Unmapped::NoRoom)), "twice");
        assert!(memory.file_bytes() == mapped::page_bytes());
    }

    #[test]
    fn addresses_for_more_than_the_ram_need_a_file() {
        assert!(HostMemory::map(1 << 45).is_err());
        assert!(anonymous(1 << 44, libc::MAP_NORESERVE).is_ok_and(|start| {
            // SAFETY: the mapping just made.
            unsafe { libc::munmap(start.as_ptr(), 1 << 44) == 0 }
        }));
    }
}
