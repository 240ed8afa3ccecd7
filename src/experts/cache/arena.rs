//! Device memory for experts: equal slots in planes.
//!
//! Owns: the planes of every pool. A pool holds blocks of one size; a plane holds one matrix of each of them (gate, up or both merged;
//! down), so that a product reads one plane as if it were its weight, with slots for experts.
//! Invariants: the distance of two slots is a whole number of blocks of the plane's type, because kernels divide; behind the bytes of every
//! slot lie zeros, because kernels read past the last row (not over Vulkan, whose kernels want experts without gaps); the first slots of a pool are zero: a missed expert points to one.
//! Threads: one at a time. Does not: know which block lies where (`residency` does).

use crate::buffer::{Buffer, BufferError};
use crate::device::Device;
use crate::gpu::{Memory, Place};

/// Slots of zeros at the beginning of a pool; a token's missed experts point to different ones.
pub(crate) const ZERO_SLOTS: u32 = 16;

/// Zeros behind the last slot, for planes whose slots have none of their own.
const TAIL_BYTES: usize = 4096;

/// What one plane holds of each block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Matrix {
    /// The type of the weights.
    pub(crate) type_: u32,
    /// Bytes of one expert.
    pub(crate) bytes: usize,
    /// Bytes of zeros that kernels may read behind it.
    pub(crate) padding: usize,
    /// Bytes that the distance of two slots is a multiple of.
    pub(crate) unit: usize,
}

impl Matrix {
    /// Bytes from slot to slot.
    pub(crate) fn stride(&self) -> usize {
        (self.bytes + self.padding).next_multiple_of(self.unit.max(1))
    }
}

/// Slots of one matrix.
#[derive(Debug)]
pub(crate) struct Plane {
    pub(crate) memory: Box<dyn Memory>,
    pub(crate) matrix: Matrix,
}

impl Plane {
    /// Where the bytes of a slot lie. Slots are counted behind those of zeros.
    pub(crate) fn place(&self, slot: u32) -> Place<'_> {
        let index = (slot + ZERO_SLOTS) as usize;
        Place { memory: &*self.memory, address: self.memory.base() + index * self.matrix.stride() }
    }
}

/// The planes of one size of blocks.
#[derive(Debug)]
pub(crate) struct PoolMemory {
    pub(crate) planes: Vec<Plane>,
    /// Slots for blocks.
    pub(crate) slots: u32,
}

impl PoolMemory {
    /// Bytes of a block with all that belongs to it.
    pub(crate) fn block_bytes(matrices: &[Matrix]) -> usize {
        matrices.iter().map(Matrix::stride).sum()
    }

    /// Planes for at most `slots` slots, fewer if the device has no memory for them; `None` below `least`.
    pub(crate) fn allocate(device: &Device, matrices: &[Matrix], slots: u32, least: u32) -> Option<Self> {
        let mut slots = slots;
        while slots >= least.max(1) {
            match Self::exactly(device, matrices, slots) {
                Ok(pool) => return Some(pool),
                Err(BufferError::NoDeviceMemory { .. }) => slots = slots / 10 * 9,
                Err(_) => return None,
            }
        }
        None
    }

    /// Fills a slot with what is not a number; the zeros behind it stay.
    pub(crate) fn poison(&self, device: &Device, slot: u32) -> Result<(), BufferError> {
        for plane in &self.planes {
            device.driver().fill(plane.place(slot), 0xff, plane.matrix.bytes)?;
        }
        Ok(())
    }

    fn exactly(device: &Device, matrices: &[Matrix], slots: u32) -> Result<Self, BufferError> {
        let mut planes = Vec::with_capacity(matrices.len());
        for &matrix in matrices {
            let bytes = (slots + ZERO_SLOTS) as usize * matrix.stride() + TAIL_BYTES;
            let memory = Buffer::device_memory(device, bytes)?;
            device.driver().fill(Place { memory: &*memory, address: memory.base() }, 0, bytes)?;
            planes.push(Plane { memory, matrix });
        }
        device.driver().synchronize()?;
        Ok(Self { planes, slots })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slots_are_whole_blocks_apart(bytes in 1_usize..1 << 24, padding in 0_usize..4096, unit in 1_usize..300) {
            let matrix = Matrix { type_: 0, bytes, padding, unit };
            prop_assert_eq!(matrix.stride() % unit, 0);
            prop_assert!(matrix.stride() >= bytes + padding);
            prop_assert!(matrix.stride() < bytes + padding + unit);
        }
    }
}
