//! The memory by which a block's small operands travel: ids, rows of activations and results.
//!
//! Owns: host memory, registered with the device where its driver can do that, and the device memory for slots and tables.
//! Invariants: each block of a graph has its own places, so that a captured graph finds them there again.
//! Threads: the one that drives the backend. Does not: order anything; the engine does.
// UNSAFETY: one call registers memory that the lane keeps mapped; words that the device writes are read and written as such.
#![expect(unsafe_code, reason = "the lane's memory is shared with the device")]

use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::buffer::{Buffer, BufferError};
use crate::device::Device;
use crate::experts::HostMemory;
use crate::gpu::{Memory, Place, Registration, Rows};

/// The most ids of one block: eight tokens, 32 experts each.
pub(crate) const MOST_PAIRS: usize = 256;
/// Bytes of the ids of one block.
const IDS_BYTES: usize = MOST_PAIRS * WORD;
const WORD: usize = size_of::<i32>();
/// What a word holds that the device has not written yet: no id, and no number that arithmetic gives.
pub(crate) const UNWRITTEN: u32 = u32::MAX;

/// Sizes of a lane, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaneSize {
    /// Ids as they lie on the device, strides included.
    pub(crate) ids: usize,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    /// Number of blocks of a graph.
    pub(crate) blocks: usize,
    /// Number of experts of all blocks.
    pub(crate) experts: usize,
    /// Experts of the block that has most.
    pub(crate) most_experts: usize,
}

impl LaneSize {
    fn table(&self) -> usize {
        self.experts * WORD
    }

    /// Numbers in their order, as many as there are rows or experts.
    fn counted(&self) -> usize {
        self.most_experts.max(MOST_PAIRS)
    }
}

/// Places in the host memory, in bytes from its start.
#[derive(Clone, Copy, Debug, Default)]
struct Offsets {
    inputs: usize,
    outputs: usize,
    slots: usize,
    arrivals: usize,
    given: usize,
    table: usize,
    end: usize,
}

impl Offsets {
    fn new(size: &LaneSize) -> Self {
        let mut end = 0_usize;
        let mut take = |bytes: usize| {
            let start = end;
            end += bytes.next_multiple_of(256);
            start
        };
        take(size.ids);
        let (inputs, outputs) = (take(size.inputs), take(size.outputs));
        let mut blocks = || take(size.blocks * IDS_BYTES);
        let (slots, arrivals, given) = (blocks(), blocks(), blocks());
        let table = take(size.table());
        Self { inputs, outputs, slots, arrivals, given, table, end }
    }
}

/// The memory of one backend's blocks.
#[derive(Debug)]
pub(crate) struct Lane {
    size: LaneSize,
    offsets: Offsets,
    // Dropped before the memory that it registers.
    registration: Option<Box<dyn Registration>>,
    host: HostMemory,
    device: Box<dyn Memory>,
}

impl Lane {
    /// Memory of these sizes.
    pub(crate) fn new(device: &Device, size: LaneSize) -> Result<Self, BufferError> {
        let offsets = Offsets::new(&size);
        let host = HostMemory::map(offsets.end).map_err(|error| BufferError::NoHostMemory {
            device: device.label().to_owned(),
            mib: offsets.end.div_ceil(1 << 20),
            why: error.to_string(),
        })?;
        let memory = Buffer::device_memory(device, Self::device_bytes(&size))?;
        let registration = host.range(host.address(), host.bytes()).and_then(|range| {
            // SAFETY: the registration is dropped before the memory, which stays mapped until then.
            unsafe { device.driver().register(range) }.ok() // without it copies are slower
        });
        let lane = Self { size, offsets, registration, host, device: memory };
        lane.count(device)?;
        Ok(lane)
    }

    fn device_bytes(size: &LaneSize) -> usize {
        2 * size.blocks.max(1) * IDS_BYTES + size.table().next_multiple_of(256) + size.counted() * WORD
    }

    /// Writes the numbers in their order to the device.
    fn count(&self, device: &Device) -> Result<(), BufferError> {
        let numbers: Vec<i32> = (0..).take(self.size.counted()).collect();
        let place = Place { memory: &*self.device, address: self.counted() };
        let rows = Rows::one(numbers.len() * WORD);
        // SAFETY: the numbers live until the driver was waited for.
        unsafe { device.driver().upload(place, numbers.as_ptr().cast(), rows) }?;
        Ok(device.driver().synchronize()?)
    }

    /// Whether kernels of the device can write to the host memory.
    pub(crate) fn is_reached(&self, device: &Device) -> bool {
        self.registration.is_some() || device.inner_buffer_type.is_host()
    }

    /// What it has room for.
    pub(crate) fn size(&self) -> LaneSize {
        self.size
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.host.as_ptr().cast::<u8>().wrapping_add(offset)
    }

    fn of_block(&self, start: usize, block: usize) -> usize {
        start + block.min(self.size.blocks.saturating_sub(1)) * IDS_BYTES
    }

    /// Where ids are read to as they lie on the device.
    pub(crate) fn ids(&self) -> *mut u8 {
        self.at(0)
    }

    /// Where rows of activations are read to, or written by the device.
    pub(crate) fn inputs(&self) -> *mut u8 {
        self.at(self.offsets.inputs)
    }

    /// Where rows of results are computed.
    pub(crate) fn outputs(&self) -> *mut u8 {
        self.at(self.offsets.outputs)
    }

    /// Where the slots of a block's pairs are written, in host memory.
    pub(crate) fn slots(&self, block: usize) -> *mut u8 {
        self.at(self.of_block(self.offsets.slots, block))
    }

    /// Where the device writes the ids of a block's pairs, token by token.
    pub(crate) fn arrivals(&self, block: usize) -> *mut u8 {
        self.at(self.of_block(self.offsets.arrivals, block))
    }

    /// Where ids that replace a block's own are written, in host memory.
    pub(crate) fn given(&self, block: usize) -> *mut u8 {
        self.at(self.of_block(self.offsets.given, block))
    }

    /// Where the slot of every expert of every block is written, in host memory.
    pub(crate) fn table(&self) -> *mut i32 {
        self.at(self.offsets.table).cast()
    }

    /// Marks words as not written by the device yet.
    pub(crate) fn unwrite(&self, place: *mut u8, words: usize) {
        for word in self.words(place, words) {
            word.store(UNWRITTEN, Ordering::Relaxed);
        }
    }

    /// Whether the device has written all of these words.
    pub(crate) fn are_written(&self, place: *mut u8, words: usize) -> bool {
        let all = self.words(place, words).iter().all(|word| word.load(Ordering::Relaxed) != UNWRITTEN);
        core::sync::atomic::fence(Ordering::Acquire);
        all
    }

    /// Words of the lane that the device writes; none if they do not lie in it.
    fn words(&self, place: *mut u8, words: usize) -> &[AtomicU32] {
        let inside = self.host.contains(place.addr(), words.saturating_mul(WORD)) && place.addr().is_multiple_of(WORD);
        debug_assert!(inside, "words outside the lane");
        if !inside {
            return &[];
        }
        // SAFETY: the words lie in the mapping, which lives as long as the lane, at a multiple of their size; the device writes whole words.
        unsafe { core::slice::from_raw_parts(place.cast::<AtomicU32>(), words) }
    }

    /// Fills what a block is about to read with what is no number and no id (`debug-poison`). Nothing reads it: the block before is computed.
    pub(crate) fn poison_operands(&self) {
        self.fill(self.ids(), self.outputs());
    }

    /// The same for what a block is about to write. The stream was waited for, so nothing of the block before is still read.
    pub(crate) fn poison_results(&self) {
        self.fill(self.outputs(), self.slots(0).wrapping_add(self.size.blocks * IDS_BYTES));
    }

    fn fill(&self, from: *mut u8, to: *mut u8) {
        // SAFETY: both lie in the lane's memory, in this order; the callers say why nobody else uses what lies between.
        unsafe { from.write_bytes(0xff, to.addr() - from.addr()) };
    }

    /// The device memory of slots and tables.
    pub(crate) fn device(&self) -> &dyn Memory {
        &*self.device
    }

    /// The address of a block's slots there.
    pub(crate) fn device_slots(&self, block: usize) -> usize {
        self.device.base() + self.of_block(0, block)
    }

    /// The address of ids there that replace a block's own.
    pub(crate) fn device_given(&self, block: usize) -> usize {
        self.device.base() + self.of_block(self.size.blocks.max(1) * IDS_BYTES, block)
    }

    /// The address of the table there.
    pub(crate) fn device_table(&self) -> usize {
        self.device.base() + 2 * self.size.blocks.max(1) * IDS_BYTES
    }

    /// The address of the numbers in their order.
    pub(crate) fn counted(&self) -> usize {
        self.device_table() + self.size.table().next_multiple_of(256)
    }

    /// What is copied to the device before a graph: the table, and ids that replace those of all blocks. Address there, source, bytes.
    pub(crate) fn table_copy(&self) -> (usize, *const c_void, usize) {
        (self.device_table(), self.table().cast_const().cast(), self.size.table())
    }

    /// As [`Lane::table_copy`], for the ids.
    pub(crate) fn given_copy(&self) -> (usize, *const c_void, usize) {
        (self.device_given(0), self.given(0).cast_const().cast(), self.size.blocks * IDS_BYTES)
    }
}
