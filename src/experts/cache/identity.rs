//! Who a model is: a number from the names, types, sizes and some bytes of its experts.
//!
//! Owns: the number. The same file gives the same number in every run and release; another quantization or a model trained further gives
//! another one. Experts that lie elsewhere (on another device, or kept on the CPU by flags) are not in it, so what is learned under one
//! division of the layers is not used under another.
//! Invariants: of a weight that lies in the model's file, only the pages are read that hold these bytes. A page fault reads some MiB around itself, and
//! the places of a model's weights lie so close that they would be the whole file; pages that were asked for come alone.
//! Threads: none. Does not: read whole weights: a few bytes of each.
// UNSAFETY: bytes are copied out of the host's memory into an array of ours.
#![expect(unsafe_code, reason = "bytes are copied out of the host's memory into an array of ours")]

use super::host_memory;
use crate::abi::tensor::Tensor;
use crate::experts::HostMemory;

/// Places at which a weight is looked at, and bytes of each.
const PLACES: usize = 8;
const PLACE_BYTES: usize = 32;

/// FNV-1a with 64 bits: constant over releases, and small.
#[derive(Clone, Copy, Debug)]
pub(super) struct Identity(u64);

impl Identity {
    pub(super) fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    /// A weight of the model.
    pub(super) fn add_weight(&mut self, weight: Tensor<'_>) {
        self.add(weight.name().as_bytes());
        self.add(&weight.type_().to_le_bytes());
        weight.ne().iter().for_each(|extent| self.add(&extent.to_le_bytes()));
        let Some(memory) = host_memory(weight) else { return };
        self.add_samples(memory, weight.data(), weight.bytes());
    }

    /// Bytes of a weight.
    fn add_samples(&mut self, memory: &HostMemory, start: usize, bytes: usize) {
        places(start, bytes).for_each(|(address, bytes)| memory.ask(address, bytes));
        for (address, bytes) in places(start, bytes) {
            let mut sample = [0_u8; PLACE_BYTES];
            // SAFETY: the array has room; the memory checks that the place lies in it.
            unsafe { memory.read(address, sample.as_mut_ptr().cast(), bytes) };
            self.add(&sample);
        }
    }

    /// The number as the state file names a model.
    pub(super) fn text(self) -> String {
        format!("{:016x}", self.0)
    }
}

/// Where a weight is looked at: addresses and lengths.
fn places(start: usize, bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    let last = bytes.saturating_sub(PLACE_BYTES);
    (0..PLACES).map(move |place| (start + last / (PLACES - 1) * place, PLACE_BYTES.min(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_is_that_of_the_published_function() {
        let of = |text: &str| {
            let mut identity = Identity::new();
            identity.add(text.as_bytes());
            identity.text()
        };
        assert_eq!(of(""), "cbf29ce484222325");
        assert_eq!(of("a"), "af63dc4c8601ec8c");
        assert_eq!(of("foobar"), "85944171f73967e8");
    }

    /// Of a file of which nothing is in memory, no more pages come than hold the places. (On a file system in memory this says nothing.)
    #[test]
    fn a_file_is_read_at_the_places_only() {
        use std::os::fd::AsRawFd;
        let bytes = 32 << 20;
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes as u64).unwrap();
        let (access, descriptor) = (libc::PROT_READ, file.as_raw_fd());
        // SAFETY: a fresh mapping of an open file.
        let source = unsafe { libc::mmap(core::ptr::null_mut(), bytes, access, libc::MAP_SHARED, descriptor, 0) };
        assert_ne!(source, libc::MAP_FAILED);
        let memory = HostMemory::map(bytes + (1 << 20)).unwrap();
        let start = memory.show_file(memory.address(), source.expose_provenance(), bytes, |_| Ok(())).unwrap();
        let mut identity = Identity::new();
        identity.add_samples(&memory, start, bytes);
        let page = crate::experts::mapped::page_bytes();
        let mut there = vec![0_u8; bytes / page];
        // SAFETY: the mapping made above; the vector has a byte for each of its pages.
        assert_eq!(unsafe { libc::mincore(source, bytes, there.as_mut_ptr()) }, 0);
        let pages = there.iter().filter(|page| **page & 1 == 1).count();
        assert!((PLACES..=2 * PLACES).contains(&pages), "{pages} pages for {PLACES} places");
        // SAFETY: the mapping made above, which nobody uses any more.
        unsafe { libc::munmap(source, bytes) };
    }
}
