//! Experts that stay in the model's file: pages of the host's own mapping of it take the place of pages of an expert buffer.
//!
//! Owns: the finding of the mapping behind an address, and which ranges of a buffer show a file.
//! Invariants: only a shared, read-only mapping of a regular file is taken, and only if all of the tensor lies in it. What is put in place is
//! a second mapping of the same pages, so it neither needs the file's name nor ends with the host's mapping. A range shows the file
//! until something is written to it: then it becomes memory of its own, with the same content, first.
//! Threads: any; the list has a lock, held for a look or a change. A range changes only while the loader writes to it.
//! Does not: choose which tensors stay in the file (`buffer` does), or know tensors. A file that shrinks while it is mapped ends the process
//! with SIGBUS at the first access behind its end, as it does in a host that maps the file itself.
// UNSAFETY: mappings are moved over pages of the buffer; each block says what bounds it.
#![expect(unsafe_code, reason = "mappings are moved over pages of the buffer")]

use core::ffi::c_void;
use std::io;
use std::ops::Range;

use parking_lot::RwLock;

/// Pages of a file mapping of the host that hold a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// The first page.
    start: usize,
    /// Whole pages.
    bytes: usize,
    /// Where in the first page the tensor begins.
    offset: usize,
}

/// Why a tensor cannot stay in its file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unmapped {
    /// The loader reads the file into memory of its own.
    #[error("the loader does not map the file")]
    NotAFile,
    /// The file is mapped in a way in which its content may change or cannot be shared.
    #[error("the file is mapped as {0}, not as r--s")]
    Kind(String),
    /// The tensor begins in one mapping and ends in another.
    #[error("the mapping of the file ends within a tensor")]
    Ends,
    /// The pages of the file do not fit between the tensor's neighbours.
    #[error("no room for whole pages between two tensors")]
    NoRoom,
    /// The user or the placement wants RAM.
    #[error("{0}")]
    Unwanted(&'static str),
    /// The system refused.
    #[error("the system refused a second mapping: {0}")]
    Refused(#[from] io::Error),
}

/// The system's page size.
pub(crate) fn page_bytes() -> usize {
    // SAFETY: a query without arguments in memory.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).ok().filter(|bytes| bytes.is_power_of_two()).unwrap_or(super::store::PAGE_BYTES)
}

/// Bytes that a tensor needs beside its own, so that whole pages of a file fit wherever it begins in them.
pub(crate) fn slack_bytes() -> usize {
    3 * page_bytes()
}

/// Finds `bytes` bytes at `address` in the text of /proc/self/maps.
pub(super) fn find(maps: &str, address: usize, bytes: usize, page: usize) -> Result<Found, Unmapped> {
    let end = address.checked_add(bytes).ok_or(Unmapped::Ends)?;
    let line = maps.lines().find_map(|line| parse(line).filter(|mapping| mapping.range.contains(&address)));
    let mapping = line.ok_or(Unmapped::NotAFile)?;
    let is_device = mapping.path.starts_with("/dev/") && !mapping.path.starts_with("/dev/shm/");
    if mapping.inode == 0 || !mapping.path.starts_with('/') || is_device {
        return Err(Unmapped::NotAFile);
    }
    if mapping.access != "r--s" {
        return Err(Unmapped::Kind(mapping.access.to_owned()));
    }
    let start = address / page * page;
    let behind = end.checked_next_multiple_of(page).ok_or(Unmapped::Ends)?;
    // The last page of a mapping is whole, whatever the size of the file.
    if start < mapping.range.start || behind > mapping.range.end {
        return Err(Unmapped::Ends);
    }
    Ok(Found { start, bytes: behind - start, offset: address - start })
}

struct Mapping<'a> {
    range: Range<usize>,
    access: &'a str,
    inode: u64,
    path: &'a str,
}

fn parse(line: &str) -> Option<Mapping<'_>> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    let range = address(start)?..address(end)?;
    let access = words.next()?;
    let inode = words.nth(2)?.parse().ok()?;
    Some(Mapping { range, access, inode, path: words.next().unwrap_or("").trim_start() })
}

/// Whether the file behind a mapping is a regular one; one whose name is gone cannot be asked and passes.
fn is_regular(maps: &str, address: usize) -> bool {
    let mapping = maps.lines().find_map(|line| parse(line).filter(|mapping| mapping.range.contains(&address)));
    mapping.is_some_and(|mapping| std::fs::metadata(mapping.path).map_or(true, |file| file.is_file()))
}

/// Finds the file behind bytes of this process.
pub(super) fn find_here(address: usize, bytes: usize) -> Result<Found, Unmapped> {
    let maps = std::fs::read("/proc/self/maps")?;
    let maps = String::from_utf8_lossy(&maps);
    let found = find(&maps, address, bytes, page_bytes())?;
    if is_regular(&maps, address) { Ok(found) } else { Err(Unmapped::NotAFile) }
}

/// Bytes of all files that this process has mapped as the host maps models.
pub(super) fn mapped_file_bytes() -> usize {
    let maps = std::fs::read("/proc/self/maps").unwrap_or_default();
    let maps = String::from_utf8_lossy(&maps);
    let is_file = |mapping: &Mapping<'_>| mapping.inode != 0 && mapping.access == "r--s";
    maps.lines().filter_map(parse).filter(is_file).map(|mapping| mapping.range.len()).sum()
}

/// The ranges of a buffer that show a file, in whole pages.
#[derive(Debug, Default)]
pub(super) struct Extents {
    ranges: RwLock<Vec<Range<usize>>>,
}

impl Extents {
    /// Bytes that show a file.
    pub(super) fn bytes(&self) -> usize {
        self.ranges.read().iter().map(Range::len).sum()
    }

    /// The ranges.
    pub(super) fn list(&self) -> Vec<Range<usize>> {
        self.ranges.read().clone()
    }

    /// Whether any of these bytes show a file.
    pub(super) fn touch(&self, wanted: &Range<usize>) -> bool {
        self.ranges.read().iter().any(|range| overlaps(range, wanted))
    }

    /// Where a tensor would begin that shows a file from `address` on: the first page that is wholly behind it, and the place within.
    pub(super) fn place(found: &Found, address: usize) -> Option<Range<usize>> {
        let start = address.checked_next_multiple_of(page_bytes())?;
        Some(start..start.checked_add(found.bytes)?)
    }

    /// Puts the pages that were found over those of the buffer at `pages`. Returns the address of the tensor.
    ///
    /// # Safety
    /// `pages` belongs to one mapping of the caller, is as long as what was found, and holds nothing that is still needed.
    pub(super) unsafe fn show(&self, found: &Found, pages: Range<usize>) -> Result<usize, Unmapped> {
        if self.touch(&pages) {
            return Err(Unmapped::NoRoom);
        }
        let old = core::ptr::with_exposed_provenance_mut::<c_void>(found.start);
        // SAFETY: an old size of zero asks for a second mapping of the pages of a shared one; nothing that exists changes.
        let second = unsafe { libc::mremap(old, 0, found.bytes, libc::MREMAP_MAYMOVE) };
        if second == libc::MAP_FAILED {
            return Err(io::Error::last_os_error().into());
        }
        // SAFETY: the second mapping is ours and as long as the pages, which the caller gives away.
        unsafe { move_over(second, &pages) }?;
        let address = pages.start + found.offset;
        self.ranges.write().push(pages);
        Ok(address)
    }

    /// Makes memory of its own of every range that these bytes touch, with the content of the file.
    pub(super) fn own(&self, wanted: &Range<usize>) -> io::Result<()> {
        let touched: Vec<Range<usize>> =
            self.ranges.read().iter().filter(|range| overlaps(range, wanted)).cloned().collect();
        for range in touched {
            let fresh = anonymous(core::ptr::null_mut(), range.len(), 0)?;
            let source = core::ptr::with_exposed_provenance::<u8>(range.start);
            // SAFETY: the range is readable and stays so; the fresh mapping is as long and nobody else's.
            unsafe { core::ptr::copy_nonoverlapping(source, fresh.cast::<u8>(), range.len()) };
            // SAFETY: the range belongs to the buffer of this list; its content was copied.
            unsafe { move_over(fresh, &range) }?;
            self.ranges.write().retain(|known| *known != range);
        }
        Ok(())
    }
}

fn overlaps(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}

/// Anonymous memory.
fn anonymous(at: *mut c_void, bytes: usize, flags: i32) -> io::Result<*mut c_void> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags;
    // SAFETY: a mapping at a place that the system chooses, or at one that is free (`MAP_FIXED_NOREPLACE`).
    let start = unsafe { libc::mmap(at, bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if start == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(start) }
}

/// Moves a mapping over pages. If the system refuses, the mapping is gone and the pages are zero.
///
/// # Safety
/// The mapping is the caller's and as long as the pages; the pages are the caller's, too.
unsafe fn move_over(mapping: *mut c_void, pages: &Range<usize>) -> io::Result<()> {
    let target = core::ptr::with_exposed_provenance_mut::<c_void>(pages.start);
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the caller's contract.
    if unsafe { libc::mremap(mapping, pages.len(), pages.len(), flags, target) } != libc::MAP_FAILED {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    // SAFETY: the mapping is the caller's, and nobody was told of it.
    unsafe { libc::munmap(mapping, pages.len()) };
    // The system may have taken the pages away before it refused. Where it has not, this fails and changes nothing.
    let _ = anonymous(target, pages.len(), libc::MAP_FIXED_NOREPLACE);
    Err(error)
}

/// Bytes that are asked for at once: of one call the system takes no more than its read-ahead, which is 128 KiB where nobody changed it.
const ASKED_BYTES: usize = 128 << 10;

/// Asks the system to read these bytes soon: the pages that hold them, and none around. Nothing but time changes.
pub(crate) fn will_need(start: usize, bytes: usize) {
    for (address, length) in asked(start, bytes, page_bytes()) {
        let at = core::ptr::with_exposed_provenance_mut::<c_void>(address);
        // SAFETY: advice about pages; a range that is not mapped is refused.
        unsafe { libc::madvise(at, length, libc::MADV_WILLNEED) };
    }
}

/// The calls for that: whole pages from their first byte on.
fn asked(start: usize, bytes: usize, page: usize) -> impl Iterator<Item = (usize, usize)> {
    let end = start.saturating_add(bytes);
    let step = ASKED_BYTES.max(page);
    (start / page * page..end).step_by(step).map(move |address| (address, step.min(end - address)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
7f0000000000-7f0000010000 r--s 00002000 fd:01 1234                       /models/a model.gguf
7f0000010000-7f0000020000 rw-s 00000000 fd:01 1235                       /models/b.gguf
7f0000020000-7f0000030000 r--p 00000000 fd:01 1236                       /lib/libx.so
7f0000030000-7f0000040000 rw-p 00000000 00:00 0
7f0000040000-7f0000050000 rw-s 00000000 00:06 99                         /dev/nvidia0
7f0000050000-7f0000060000 r--s 00000000 00:17 7                          /dev/shm/m.gguf (deleted)
7f0000060000-7f0000070000 r--p 00000000 00:00 0                          [vdso]
";

    fn at(address: usize, bytes: usize) -> Result<Found, Unmapped> {
        find(MAPS, address, bytes, 4096)
    }

    #[test]
    fn only_read_only_shared_files_are_taken() {
        let base = 0x7f00_0000_0000;
        let found = at(base + 0x1020, 0x2000).expect("a file");
        assert_eq!(found, Found { start: base + 0x1000, bytes: 0x3000, offset: 0x20 });
        assert_eq!(at(base, 0x10000).expect("all of it").bytes, 0x10000);
        assert!(at(base + 0x5_0000, 0x1000).is_ok(), "a file without a name");
        assert!(matches!(at(base + 0x1_0000, 16), Err(Unmapped::Kind(_))), "it may change");
        assert!(matches!(at(base + 0x2_0000, 16), Err(Unmapped::Kind(_))), "private");
        for address in [base + 0x3_0000, base + 0x4_0000, base + 0x6_0000, base - 1, base + 0x7_0000] {
            assert!(matches!(at(address, 16), Err(Unmapped::NotAFile)), "{address:#x}");
        }
        assert!(matches!(at(base + 0xf000, 0x1001), Err(Unmapped::Ends)));
        assert!(matches!(at(base + 0xf000, usize::MAX), Err(Unmapped::Ends)));
    }

    #[test]
    fn all_that_is_asked_for_is_asked_for_in_little_pieces() {
        let calls = |start, bytes| asked(start, bytes, 4096).collect::<Vec<_>>();
        assert_eq!(calls(4096 + 5, 10), [(4096, 15)]);
        assert_eq!(calls(4095, 2), [(0, 4097)]);
        assert_eq!(calls(8192, ASKED_BYTES + 1), [(8192, ASKED_BYTES), (8192 + ASKED_BYTES, 1)]);
        assert_eq!(calls(8192, 0), []);
        assert_eq!(asked(1 << 16, 10, 1 << 18).collect::<Vec<_>>(), [(0, (1 << 16) + 10)], "large pages");
    }

    #[test]
    fn any_text_is_accepted() {
        for text in ["", "x", "-", "1-2", "zz-1 r--s", "1-2 r--s 0 0 x /a", "1-2 r--s 0 0 99999999999999999999 /a"] {
            assert!(find(text, 1, 1, 4096).is_err(), "{text}");
        }
    }
}
