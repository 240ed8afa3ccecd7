//! Device memory for experts: equal slots in planes.
//!
//! Owns: the planes of every pool. A pool holds blocks of one size; a plane holds one matrix of each of them (gate, up or both merged;
//! down), so that a product reads one plane as if it were its weight, with slots for experts.
//! Invariants: the distance of two slots is a whole number of blocks of the plane's type, because kernels divide; behind the bytes of every
//! slot lie zeros, because kernels read past the last row (over Vulkan, whose kernels want experts without gaps, behind the last slot only); the first slots of a pool are zero: a missed expert points to one. A plane keeps
//! its address and its number of slots for life; memory lies behind the open ones, which come first, the same number in all planes.
//! Threads: one at a time. Does not: know which block lies where (`residency` does), or wait for readers (`resize` does).

use crate::abi::inner::Passport;
use crate::buffer::BufferError;
use crate::gpu::{Driver, DriverError, Elastic, Memory, Place, elastic_size};

/// Slots of zeros at the beginning of a pool; a token's missed experts point to different ones.
pub(crate) const ZERO_SLOTS: u32 = 16;
/// Kernels count the distance from the first slot to the last in blocks of the type, in 32 bits with a sign.
const MOST_STEPS: u64 = (1 << 31) - 1;

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
    /// Bytes of a block of the type, in which kernels count.
    pub(crate) step: usize,
}

impl Matrix {
    /// Bytes from slot to slot.
    pub(crate) fn stride(&self) -> usize {
        (self.bytes + self.padding).next_multiple_of(self.unit.max(1))
    }

    /// The most slots, beside those of zeros, of a plane that kernels find their way in and that is no larger than `largest` bytes.
    pub(crate) fn most_slots(&self, largest: usize) -> u32 {
        let stride = self.stride().max(1) as u64;
        let span = MOST_STEPS.saturating_mul(self.step.max(1) as u64).min(largest as u64);
        u32::try_from(span / stride).unwrap_or(u32::MAX).saturating_sub(ZERO_SLOTS)
    }
}

/// Memory of one size, for drivers that have no other.
#[derive(Debug)]
struct Fixed(Box<dyn Memory>);

impl Memory for Fixed {
    fn base(&self) -> usize {
        self.0.base()
    }

    fn bytes(&self) -> usize {
        self.0.bytes()
    }

    fn passport(&self) -> Passport {
        self.0.passport()
    }
}

impl Elastic for Fixed {
    fn reserved(&self) -> usize {
        self.0.bytes()
    }

    fn unit(&self) -> usize {
        self.0.bytes()
    }

    fn resize(&mut self, bytes: usize) -> Result<(), DriverError> {
        if bytes <= self.bytes() { Ok(()) } else { Err(DriverError::OutOfMemory) }
    }
}

/// Slots of one matrix.
#[derive(Debug)]
pub(crate) struct Plane {
    pub(crate) memory: Box<dyn Elastic>,
    pub(crate) matrix: Matrix,
}

impl Plane {
    /// Where the bytes of a slot lie. Slots are counted behind those of zeros.
    pub(crate) fn place(&self, slot: u32) -> Place<'_> {
        let index = (slot + ZERO_SLOTS) as usize;
        Place { memory: &*self.memory, address: self.memory.base() + index * self.matrix.stride() }
    }

    fn bytes_for(&self, slots: u32) -> usize {
        let bytes = ((slots + ZERO_SLOTS) as usize).saturating_mul(self.matrix.stride());
        elastic_size(bytes, self.memory.unit(), self.memory.reserved())
    }
}

/// The planes of one size of blocks.
#[derive(Debug)]
pub(crate) struct PoolMemory {
    pub(crate) planes: Vec<Plane>,
    /// Slots for blocks that the planes have addresses for: constant, so that what kernels are shown does not change.
    pub(crate) slots: u32,
    /// Slots with memory behind them.
    open: u32,
    elastic: bool,
}

impl PoolMemory {
    /// Bytes of a block with all that belongs to it.
    pub(crate) fn block_bytes(matrices: &[Matrix]) -> usize {
        matrices.iter().map(Matrix::stride).sum()
    }

    /// Addresses for `slots` slots; memory behind the slots of zeros comes with the first [`PoolMemory::open`]. A driver whose memory has one
    /// size gives memory for `start` slots instead, and that is all.
    pub(crate) fn reserve(
        driver: &dyn Driver,
        matrices: &[Matrix],
        slots: u32,
        start: u32,
        may_grow: bool,
    ) -> Result<Self, DriverError> {
        let bytes = |matrix: &Matrix, slots: u32| (slots + ZERO_SLOTS) as usize * matrix.stride() + TAIL_BYTES;
        if may_grow {
            let planes = matrices
                .iter()
                .map(|&matrix| driver.reserve(bytes(&matrix, slots)).map(|memory| Plane { memory, matrix }));
            match planes.collect::<Result<Vec<Plane>, DriverError>>() {
                Ok(planes) => return Ok(Self { planes, slots, open: 0, elastic: true }),
                Err(DriverError::Unsupported(_)) => {}
                Err(error) => return Err(error),
            }
        }
        let mut planes = Vec::with_capacity(matrices.len());
        for &matrix in matrices {
            let memory = driver.allocate(bytes(&matrix, start))?;
            driver.fill(Place { memory: &*memory, address: memory.base() }, 0, bytes(&matrix, start))?;
            planes.push(Plane { memory: Box::new(Fixed(memory)), matrix });
        }
        Ok(Self { planes, slots: start, open: 0, elastic: false })
    }

    /// Fills a slot with what is not a number; the zeros behind it stay.
    pub(crate) fn poison(&self, driver: &dyn Driver, slot: u32) -> Result<(), BufferError> {
        for plane in &self.planes {
            driver.fill(plane.place(slot), 0xff, plane.matrix.bytes)?;
        }
        Ok(())
    }

    /// Slots with memory behind them.
    pub(crate) fn opened(&self) -> u32 {
        self.open
    }

    /// Whether its size can change.
    pub(crate) fn is_elastic(&self) -> bool {
        self.elastic
    }

    /// Bytes that it has.
    pub(crate) fn bytes(&self) -> usize {
        self.planes.iter().map(|plane| plane.memory.bytes()).sum()
    }

    /// Bytes that it has with so many open slots.
    pub(crate) fn bytes_for(&self, slots: u32) -> usize {
        self.planes.iter().fold(0, |sum, plane| sum.saturating_add(plane.bytes_for(slots)))
    }

    /// The most open slots for which `bytes` suffice; `None` if they do not suffice for the slots of zeros.
    pub(crate) fn slots_for(&self, bytes: usize) -> Option<u32> {
        if !self.elastic {
            return (self.bytes() <= bytes).then_some(self.slots);
        }
        let (mut low, mut high) = (0, self.slots);
        if self.bytes_for(low) > bytes {
            return None;
        }
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if self.bytes_for(middle) <= bytes { low = middle } else { high = middle - 1 }
        }
        Some(low)
    }

    /// Puts memory behind the first `slots` slots, and takes it from the others. Nobody reads or writes a slot that is closed. On failure
    /// nothing has changed.
    pub(crate) fn open(&mut self, driver: &dyn Driver, slots: u32) -> Result<(), DriverError> {
        let slots = slots.min(self.slots);
        for number in 0..self.planes.len() {
            if let Err(error) = self.planes[number].open(driver, slots) {
                let before = self.open;
                // Giving back what has just come cannot fail for lack of memory.
                self.planes[..=number].iter_mut().try_for_each(|plane| plane.open(driver, before))?;
                return Err(error);
            }
        }
        self.open = slots;
        Ok(())
    }
}

impl Plane {
    fn open(&mut self, driver: &dyn Driver, slots: u32) -> Result<(), DriverError> {
        let before = self.memory.bytes();
        self.memory.resize((slots + ZERO_SLOTS) as usize * self.matrix.stride())?;
        let bytes = self.memory.bytes().saturating_sub(before);
        // What comes is zero, and uploads write experts only: so zeros lie behind each, whenever it came.
        let came = Place { memory: &*self.memory, address: self.memory.base() + before };
        if bytes > 0 { driver.fill(came, 0, bytes) } else { Ok(()) }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::gpu::fake::Fake;
    use proptest::prelude::*;

    /// Two planes of small blocks.
    pub(in crate::experts::cache) fn matrices() -> Vec<Matrix> {
        let matrix = |bytes| Matrix { type_: 0, bytes, padding: 100, unit: 34, step: 34 };
        vec![matrix(2_000), matrix(1_000)]
    }

    proptest! {
        #[test]
        fn slots_are_whole_blocks_apart(bytes in 1_usize..1 << 24, padding in 0_usize..4096, unit in 1_usize..300) {
            let matrix = Matrix { type_: 0, bytes, padding, unit, step: unit };
            prop_assert_eq!(matrix.stride() % unit, 0);
            prop_assert!(matrix.stride() >= bytes + padding);
            prop_assert!(matrix.stride() < bytes + padding + unit);
        }

        /// The number of blocks in front of any slot fits 31 bits, and a slot more would not (or the plane would be too large).
        #[test]
        fn spans_are_bounded(bytes in 1_usize..1 << 26, step in prop::sample::select(vec![2_usize, 4, 17, 18, 22, 34, 110, 144, 210]),
                             largest in (1_usize << 26)..1 << 45) {
            let matrix = Matrix { type_: 0, bytes, padding: 512, unit: step.max(16) / step * step, step };
            let slots = matrix.most_slots(largest);
            let last = (u64::from(slots) + u64::from(ZERO_SLOTS)) * matrix.stride() as u64;
            let fits = |end: u64| end / step as u64 <= i32::MAX as u64 && end <= largest as u64;
            prop_assert!(slots == 0 || fits(last));
            prop_assert!(!fits(last + matrix.stride() as u64));
        }

        /// Whatever the order of sizes: what is open can be used, what is behind it is gone, padding is zero, and the sum is as foretold.
        #[test]
        fn pools_grow_and_shrink(sizes in proptest::collection::vec((0_u32..60, any::<bool>()), 1..20)) {
            let driver = Fake::default();
            let mut pool = PoolMemory::reserve(&driver, &matrices(), 50, 0, true).unwrap();
            prop_assert!(pool.is_elastic() && pool.bytes() == 0);
            let bases: Vec<usize> = pool.planes.iter().map(|plane| plane.memory.base()).collect();
            for (slots, fails) in sizes {
                let before = (pool.opened(), pool.bytes());
                driver.limit_mapping(if fails { driver.mapped() } else { usize::MAX });
                match pool.open(&driver, slots) {
                    Ok(()) => prop_assert_eq!((pool.opened(), pool.bytes()), (slots.min(50), pool.bytes_for(slots.min(50)))),
                    Err(_) => prop_assert_eq!((pool.opened(), pool.bytes()), before),
                }
                prop_assert_eq!(driver.mapped(), pool.bytes());
                let bytes = pool.bytes();
                if bytes > 0 {
                    let most = pool.slots_for(bytes).unwrap();
                    prop_assert!(most >= pool.opened() && pool.bytes_for(most) <= bytes);
                    prop_assert!(most == 50 || pool.bytes_for(most + 1) > bytes);
                    // As the slots of zeros are, so is what lies behind the bytes of each slot.
                    for plane in &pool.planes {
                        for slot in 0..pool.opened() {
                            let place = plane.place(slot);
                            let behind = Place { address: place.address + plane.matrix.bytes, ..place };
                            prop_assert!(driver.read(behind, plane.matrix.padding).iter().all(|byte| *byte == 0));
                            driver.fill(plane.place(slot), 0xff, plane.matrix.bytes).unwrap();
                        }
                    }
                }
                prop_assert!(pool.planes.iter().map(|plane| plane.memory.base()).eq(bases.iter().copied()));
            }
        }
    }

    #[test]
    fn memory_of_one_size_stays_as_it_is() {
        let driver = Fake::default();
        let mut pool = PoolMemory::reserve(&driver, &matrices(), 50, 7, false).unwrap();
        assert!(!pool.is_elastic() && pool.slots == 7);
        pool.open(&driver, 50).unwrap();
        assert_eq!(pool.opened(), 7);
        assert_eq!((pool.slots_for(pool.bytes()), pool.slots_for(pool.bytes() - 1)), (Some(7), None));
    }
}
