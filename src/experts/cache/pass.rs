//! What the cache does while a long pass brings all experts to the device: what it has room for goes into its slots on the way, and what it holds
//! is copied from there.
//!
//! Owns: the choice of what is loaded during a pass, by group, and where a weight's experts lie.
//! Invariants: copies of one driver run in order, so an expert may be copied from its slot as soon as its upload was asked for.
//! Threads: the one that drives the backend. Does not: know the pass.

use super::{Cache, Weights};
use crate::buffer::BufferError;
use crate::device::Device;
use crate::experts::residency::{LoadError, State};
use crate::experts::shape::{Block, GroupId};
use crate::gpu::Place;

/// A weight in RAM whose experts the cache may hold.
pub(crate) struct Located<'c> {
    cache: &'c Cache,
    group: GroupId,
    plane: usize,
}

impl<'c> Located<'c> {
    /// Bytes behind an expert that are zero there.
    pub(crate) fn padding(&self) -> usize {
        let pool = &self.cache.pools[usize::from(self.cache.weights[self.group.0 as usize].pool)];
        pool.planes.get(self.plane).map_or(0, |plane| plane.matrix.padding)
    }

    /// The group of the blocks.
    pub(super) fn group(&self) -> GroupId {
        self.group
    }

    /// Where an expert lies on the device, or will lie when what was asked for so far is done.
    pub(crate) fn find(&self, expert: usize) -> Option<Place<'c>> {
        let block = self.cache.policy.shape().block(self.group, u32::try_from(expert).ok()?)?;
        let (State::Resident(slot) | State::Loading(slot)) = self.cache.residency.state(block) else { return None };
        let pool = &self.cache.pools[usize::from(self.cache.weights[self.group.0 as usize].pool)];
        pool.planes.get(self.plane).map(|plane| plane.place(slot.0))
    }
}

impl Cache {
    /// The blocks of which a weight in RAM is a part, and its plane.
    pub(crate) fn locate(&self, address: usize) -> Option<Located<'_>> {
        let plane = |weights: &Weights| weights.matrices.iter().position(|matrix| matrix.address == address);
        let groups = self.weights.iter().zip(0_u32..);
        let (group, plane) = groups.filter_map(|(weights, group)| Some((GroupId(group), plane(weights)?))).next()?;
        Some(Located { cache: self, group, plane })
    }

    /// A long pass begins: chooses what is loaded on its way, as far as there is room.
    pub(crate) fn begin_pass(&mut self) {
        let blocks: Vec<Block> = self.policy.fill().iter().map(|admission| admission.block).collect();
        for block in blocks {
            match self.residency.load(block) {
                Ok(slot) => self.on_the_way.push((block, slot.0)),
                Err(LoadError::NoSlot | LoadError::Leaving) => self.waiting.push_back(block),
                Err(LoadError::Present) => {}
            }
        }
    }

    /// The pass comes to the blocks of which this weight is a part. Returns the bytes whose upload began.
    pub(crate) fn load_on_the_way(&mut self, device: &Device, address: usize) -> Result<u64, BufferError> {
        let Some(group) = self.locate(address).map(|located| located.group) else { return Ok(0) };
        let of_group = |block: Block| self.policy.shape().key(block).0 == group;
        let (now, later) = self.on_the_way.iter().partition(|(block, _)| of_group(*block));
        self.on_the_way = later;
        self.load_all(device, now)
    }

    /// The pass was handed on: loads what lay on nobody's way.
    pub(crate) fn end_pass(&mut self, device: &Device) -> Result<u64, BufferError> {
        let rest = std::mem::take(&mut self.on_the_way);
        self.load_all(device, rest)
    }

    fn load_all(&mut self, device: &Device, blocks: Vec<(Block, u32)>) -> Result<u64, BufferError> {
        blocks.into_iter().try_fold(0, |bytes, (block, slot)| Ok(bytes + self.upload(device, block, slot)?))
    }
}
