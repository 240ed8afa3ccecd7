//! Registration of expert buffers with the device, in the background: the device then reads experts where they lie.
//!
//! Owns: the registrations of one expert buffer and the thread that makes them.
//! Invariants: chunks are whole pages that do not overlap, because a page can be registered once; a tensor counts as registered only when
//! all of its bytes are, padding included; chunks are registered in address order until the budget or the system says no; everything is
//! taken back before the memory is unmapped.
//! Threads: one, named `ggml-moe-pin`, from the first graph until the last chunk or the end of the buffer. It holds no lock while it
//! registers. A panic in it ends the registration and is told; what is registered by then stays usable.
//! Does not: read or write the memory.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use parking_lot::{Mutex, RwLock};

use super::HostMemory;
use super::store::PAGE_BYTES;
use crate::config::AllocationKind;
use crate::device::Device;
use crate::gpu::{DriverError, Registration};
use crate::telemetry::log;

/// The registration of one expert buffer.
pub(crate) struct Pinner {
    shared: Arc<Shared>,
    started: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    device: &'static Device,
    memory: Arc<HostMemory>,
    tensors: Mutex<Vec<Range<usize>>>,
    chunks: RwLock<Vec<Chunk>>,
    stop: AtomicBool,
}

struct Chunk {
    range: Range<usize>,
    _registration: Box<dyn Registration>,
}

impl Pinner {
    /// A pinner for a buffer; it does nothing before [`Pinner::start`].
    pub(crate) fn new(device: &'static Device, memory: Arc<HostMemory>) -> Self {
        let shared = Shared {
            device,
            memory,
            tensors: Mutex::new(Vec::new()),
            chunks: RwLock::new(Vec::new()),
            stop: AtomicBool::new(false),
        };
        Self { shared: Arc::new(shared), started: AtomicBool::new(false), thread: Mutex::new(None) }
    }

    /// A tensor was given its place, padding included.
    pub(crate) fn add(&self, address: usize, bytes: usize) {
        self.shared.tensors.lock().push(address..address.saturating_add(bytes));
    }

    /// A tensor shows its file now: there is nothing to register.
    pub(crate) fn remove(&self, address: usize) {
        self.shared.tensors.lock().retain(|tensor| tensor.start != address);
    }

    /// Whether another tensor than that at `address` lies in any of these bytes.
    pub(crate) fn needs(&self, bytes: &Range<usize>, address: usize) -> bool {
        let lies = |tensor: &Range<usize>| tensor.start < bytes.end && bytes.start < tensor.end;
        self.shared.tensors.lock().iter().any(|tensor| tensor.start != address && lies(tensor))
    }

    /// Starts the registration, once.
    pub(crate) fn start(&self) {
        if self.started.swap(true, Ordering::Relaxed) {
            return;
        }
        self.tell_files();
        if self.shared.tensors.lock().is_empty() {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let work = move || {
            let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| shared.run()));
            if told.is_err() {
                log::error(&format!(
                    "{}: pinning ended by a panic; the other experts are copied when used",
                    shared.device.label()
                ));
            }
        };
        match std::thread::Builder::new().name("ggml-moe-pin".to_owned()).spawn(work) {
            Ok(thread) => *self.thread.lock() = Some(thread),
            Err(error) => log::notice(&format!(
                "{}: no thread to pin memory with ({error}); experts are copied when used",
                self.shared.device.label()
            )),
        }
    }

    fn tell_files(&self) {
        let from_file = self.shared.memory.file_bytes();
        if from_file == 0 {
            return;
        }
        let copied: usize = self.shared.tensors.lock().iter().map(Range::len).sum();
        let rest = if copied == 0 { String::new() } else { format!("; {} MiB were copied to RAM", copied >> 20) };
        let reads = if self.shared.device.driver().reads_host_memory() {
            "read in place"
        } else {
            "not pinned, copied when used, the next layer read ahead"
        };
        log::notice(&format!(
            "{}: experts mapped from the file: {} MiB, {reads}{rest}",
            self.shared.device.label(),
            from_file >> 20
        ));
    }

    /// Whether all these bytes are registered.
    pub(crate) fn holds(&self, address: usize, bytes: usize) -> bool {
        covers(self.shared.chunks.read().iter().map(|chunk| &chunk.range), address..address.saturating_add(bytes))
    }
}

impl Drop for Pinner {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.get_mut().take()
            && thread.join().is_err()
        {
            // The thread catches its own panics; nothing is left to do for one that it could not.
        }
        let chunks = std::mem::take(&mut *self.shared.chunks.write());
        let bytes = chunks.iter().map(|chunk| chunk.range.len()).sum();
        drop(chunks);
        self.shared.device.release_pinned(bytes);
    }
}

impl Shared {
    fn run(&self) {
        let all: Vec<Range<usize>> = groups(self.tensors.lock().clone(), self.memory.file_ranges())
            .into_iter()
            .flat_map(|group| chunks(group, self.device.pin_chunk_bytes()))
            .collect();
        let whole: usize = all.iter().map(Range::len).sum();
        let mut pinned = 0;
        for chunk in all {
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            let bytes = chunk.len();
            if !self.device.claim_pinned(bytes) {
                let limit = self.device.pin_limit_bytes() >> 20;
                return self.tell(pinned, whole, &format!("pin-budget-mb allows {limit}"));
            }
            match self.register(&chunk) {
                Ok(registration) => self.chunks.write().push(Chunk { range: chunk, _registration: registration }),
                Err(error) => {
                    self.device.release_pinned(bytes);
                    if let DriverError::Unsupported(reason) = error {
                        return log::info(&format!("{}: experts are copied when used: {reason}", self.device.label()));
                    }
                    let hint = format!(
                        "pinning was refused ({error}): the RAM, a container's limit, or Windows below WSL allows no more; raise that, or set pin-budget-mb"
                    );
                    return self.tell(pinned, whole, &hint);
                }
            }
            pinned += bytes;
            // Plans made so far still copy what can now be read in place.
            self.device.bump_layout_epoch();
        }
        if pinned > 0 {
            log::info(&format!(
                "{}: {} MiB of experts pinned; {} reads them in place",
                self.device.label(),
                pinned >> 20,
                self.device.inner_name
            ));
        }
    }

    // UNSAFETY: promises the driver that the memory outlives the registration.
    #[expect(unsafe_code, reason = "promises the driver that the memory outlives the registration")]
    fn register(&self, chunk: &Range<usize>) -> Result<Box<dyn Registration>, DriverError> {
        if self.device.allocation_fails(AllocationKind::Pin) {
            return Err(DriverError::OutOfMemory);
        }
        let range = self
            .memory
            .range(chunk.start, chunk.len())
            .ok_or(DriverError::Unsupported("a tensor outside its buffer"))?;
        // SAFETY: `self.memory` is kept by this object; the registration is dropped before it, by `Pinner::drop` or with `chunks`.
        unsafe { self.device.driver().register(range) }
    }

    fn tell(&self, pinned: usize, whole: usize, why: &str) {
        log::notice(&format!(
            "{}: {} of {} MiB of experts pinned: {why}; the others are copied when used",
            self.device.label(),
            pinned >> 20,
            whole >> 20
        ));
    }
}

/// Whether ranges, in ascending order, cover all of `wanted` without a gap.
fn covers<'a>(ranges: impl Iterator<Item = &'a Range<usize>>, wanted: Range<usize>) -> bool {
    let mut reached = wanted.start;
    for range in ranges {
        if range.contains(&reached) {
            reached = range.end;
        }
    }
    reached >= wanted.end
}

/// Cuts tensors into groups with nothing of a file between two of a group.
fn groups(mut tensors: Vec<Range<usize>>, files: Vec<Range<usize>>) -> Vec<Vec<Range<usize>>> {
    tensors.sort_by_key(|tensor| tensor.start);
    let before = |tensor: &Range<usize>| files.iter().filter(|file| file.start < tensor.start).count();
    tensors.chunk_by(|one, next| before(one) == before(next)).map(<[_]>::to_vec).collect()
}

/// Joins tensors, in address order, to chunks of at least `size` bytes (the last may be smaller), each of whole pages. Together the chunks
/// cover every tensor; where two tensors share a page, the chunk of the first has it.
fn chunks(mut tensors: Vec<Range<usize>>, size: usize) -> Vec<Range<usize>> {
    tensors.sort_by_key(|tensor| tensor.start);
    let mut chunks: Vec<Range<usize>> = Vec::new();
    for tensor in tensors {
        let start = tensor.start / PAGE_BYTES * PAGE_BYTES;
        let end = tensor.end.next_multiple_of(PAGE_BYTES);
        match chunks.last_mut() {
            Some(chunk) if chunk.len() < size => chunk.end = chunk.end.max(end),
            Some(chunk) if end <= chunk.end => {}
            Some(chunk) => {
                let start = start.max(chunk.end);
                chunks.push(start..end);
            }
            None => chunks.push(start..end),
        }
    }
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: usize = PAGE_BYTES;

    #[test]
    fn tensors_are_joined_up_to_the_size() {
        let tensors = vec![0..100, 100..2 * PAGE + 5, 2 * PAGE + 5..2 * PAGE + 9, 3 * PAGE..9 * PAGE];
        assert_eq!(chunks(tensors, 2 * PAGE), [0..3 * PAGE, 3 * PAGE..9 * PAGE]);
        assert_eq!(chunks(vec![], PAGE), []);
    }

    #[test]
    fn what_shows_a_file_is_never_in_a_chunk() {
        let tensors = vec![5 * PAGE..6 * PAGE, 0..100, 200..PAGE, 9 * PAGE + 7..10 * PAGE];
        let groups = groups(tensors, vec![2 * PAGE..4 * PAGE, 6 * PAGE..8 * PAGE]);
        let starts: Vec<Vec<usize>> =
            groups.iter().map(|group| group.iter().map(|tensor| tensor.start).collect()).collect();
        assert_eq!(starts, [vec![0, 200], vec![5 * PAGE], vec![9 * PAGE + 7]]);
        let chunks: Vec<_> = groups.into_iter().flat_map(|group| chunks(group, 100 * PAGE)).collect();
        assert_eq!(chunks, [0..PAGE, 5 * PAGE..6 * PAGE, 9 * PAGE..10 * PAGE]);
    }

    #[test]
    fn a_tensor_counts_only_when_all_of_it_is_registered() {
        let tensors = vec![0..PAGE + 1, PAGE + 1..4 * PAGE];
        let chunks = chunks(tensors, 1);
        assert_eq!(chunks, [0..2 * PAGE, 2 * PAGE..4 * PAGE]);
        let second = PAGE + 1..4 * PAGE;
        assert!(!covers(chunks[..1].iter(), second.clone()), "its first page came with the chunk before");
        assert!(covers(chunks.iter(), second));
        assert!(!covers(chunks[1..].iter(), 0..PAGE));
    }

    proptest! {
        #[test]
        fn chunks_are_pages_that_cover_every_tensor(
            sizes in proptest::collection::vec((0_usize..9_000, 1_usize..50_000), 0..40),
            size in 1_usize..100_000,
        ) {
            let mut start = 0;
            let tensors: Vec<Range<usize>> = sizes.into_iter().map(|(gap, bytes)| {
                let range = start + gap..start + gap + bytes;
                start = range.end;
                range
            }).collect();
            let chunks = chunks(tensors.clone(), size);
            for tensor in &tensors {
                prop_assert!(covers(chunks.iter(), tensor.clone()));
            }
            prop_assert!(chunks.iter().all(|chunk| chunk.start % PAGE == 0 && chunk.end % PAGE == 0 && !chunk.is_empty()));
            prop_assert!(chunks.windows(2).all(|pair| pair[0].end <= pair[1].start));
        }
    }
}
