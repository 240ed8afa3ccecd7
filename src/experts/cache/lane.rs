//! The memory by which a block's small operands travel: ids, rows of activations and results.
//!
//! Owns: host memory, registered with the device where its driver can do that, and ids on the device.
//! Invariants: each block of a graph has its own place for ids on the device, so that a captured graph finds them there again.
//! Threads: the one that drives the backend. Does not: order anything; the engine does.
// UNSAFETY: one call registers memory that the lane keeps mapped; one fills it.
#![expect(unsafe_code, reason = "one call registers memory that the lane keeps mapped; one fills it")]

use crate::buffer::{Buffer, BufferError};
use crate::device::Device;
use crate::experts::HostMemory;
use crate::gpu::{Memory, Registration};

/// The most ids of one block: eight tokens, 32 experts each.
pub(crate) const MOST_PAIRS: usize = 256;
/// Bytes of the ids of one block on the device.
const IDS_BYTES: usize = MOST_PAIRS * size_of::<i32>();

/// Sizes of a lane, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaneSize {
    /// Ids as they lie on the device, strides included.
    pub(crate) ids: usize,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    pub(crate) blocks: usize,
}

/// The memory of one backend's blocks.
#[derive(Debug)]
pub(crate) struct Lane {
    size: LaneSize,
    // Dropped before the memory that it registers.
    _registration: Option<Box<dyn Registration>>,
    host: HostMemory,
    device: Box<dyn Memory>,
}

impl Lane {
    /// Memory of these sizes.
    pub(crate) fn new(device: &Device, size: LaneSize) -> Result<Self, BufferError> {
        let bytes = size.ids.next_multiple_of(256)
            + size.inputs.next_multiple_of(256)
            + size.outputs.next_multiple_of(256)
            + size.blocks * IDS_BYTES;
        let host = HostMemory::map(bytes).map_err(|error| BufferError::NoHostMemory {
            device: device.label().to_owned(),
            mib: bytes.div_ceil(1 << 20),
            why: error.to_string(),
        })?;
        let memory = Buffer::device_memory(device, size.blocks.max(1) * IDS_BYTES)?;
        let registration = host.range(host.address(), host.bytes()).and_then(|range| {
            // SAFETY: the registration is dropped before the memory, which stays mapped until then.
            unsafe { device.driver().register(range) }.ok() // without it copies are slower
        });
        Ok(Self { size, _registration: registration, host, device: memory })
    }

    /// What it has room for.
    pub(crate) fn size(&self) -> LaneSize {
        self.size
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.host.as_ptr().cast::<u8>().wrapping_add(offset)
    }

    /// Where ids are read to.
    pub(crate) fn ids(&self) -> *mut u8 {
        self.at(0)
    }

    /// Where rows of activations are read to.
    pub(crate) fn inputs(&self) -> *mut u8 {
        self.at(self.size.ids.next_multiple_of(256))
    }

    /// Where rows of results are computed.
    pub(crate) fn outputs(&self) -> *mut u8 {
        self.at(self.size.ids.next_multiple_of(256) + self.size.inputs.next_multiple_of(256))
    }

    /// Where the slots of a block's pairs are written, in host memory.
    pub(crate) fn slots(&self, block: usize) -> *mut u8 {
        let before = self.size.ids.next_multiple_of(256)
            + self.size.inputs.next_multiple_of(256)
            + self.size.outputs.next_multiple_of(256);
        self.at(before + block.min(self.size.blocks.saturating_sub(1)) * IDS_BYTES)
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

    /// Where they lie on the device.
    pub(crate) fn device(&self) -> &dyn Memory {
        &*self.device
    }

    /// The address of a block's ids there.
    pub(crate) fn device_ids(&self, block: usize) -> usize {
        self.device.base() + block.min(self.size.blocks.saturating_sub(1)) * IDS_BYTES
    }
}
