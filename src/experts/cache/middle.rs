//! What the cache does in passes of more tokens than it decodes and fewer than use all experts.
//!
//! Owns: what of the experts that such a pass brings goes into free slots on the way, that their uses are remembered, and how much is held. Invariants: as those of `pass`.
//! Threads: the one that drives the backend. Does not: know the pass, or choose its way (`experts::cost` does).

use super::{Cache, PoolMemory};
use crate::buffer::BufferError;
use crate::device::Device;
use crate::experts::cost;
use crate::experts::readback::Used;
use crate::experts::residency::LoadError;
use crate::experts::shape::Block;

impl Cache {
    /// A block is about to bring the experts that it uses, of which this weight is a part: their uses count in the lifetime heat, and those
    /// for which there is room go to their slots, and are copied from there. Returns the bytes whose upload began.
    pub(crate) fn load_used(&mut self, device: &Device, address: usize, used: &Used) -> Result<u64, BufferError> {
        let Some(group) = self.locate(address).map(|located| located.group()) else { return Ok(0) };
        if self.replay.is_none() {
            self.policy.note_heat(group, used.each.iter().copied());
        }
        let experts = used.runs.iter().cloned().flatten().filter_map(|expert| u32::try_from(expert).ok());
        let blocks: Vec<Block> = self.policy.offer(group, experts).iter().map(|admission| admission.block).collect();
        let mut bytes = 0;
        for block in blocks {
            match self.residency.load(block) {
                Ok(slot) => bytes += self.upload(device, block, slot.0)?,
                Err(LoadError::NoSlot | LoadError::Leaving) => self.waiting.push_back(block),
                Err(LoadError::Present) => {}
            }
        }
        Ok(bytes)
    }

    /// A pass of so many tokens was handed on, of which every block brought what it uses.
    pub(crate) fn end_fetched(&mut self, tokens: u32) {
        if self.replay.is_none() {
            self.policy.pass_heat(tokens);
        }
    }

    /// Share of the experts that has a slot.
    pub(crate) fn resident_share(&self) -> f64 {
        let pools = 0..u16::try_from(self.pools.len()).unwrap_or(u16::MAX);
        let held: u32 = pools.map(|pool| self.policy.held(pool)).sum();
        f64::from(held) / self.policy.shape().blocks().max(1) as f64
    }

    /// The first layer as it will be when the slots that there are now are full.
    pub(super) fn first_layer(&self) -> Option<cost::Layer> {
        let (group, weights) = (self.policy.shape().groups().first()?, self.weights.first()?);
        let slots: u32 = self.pools.iter().map(PoolMemory::opened).sum();
        Some(cost::Layer {
            experts: group.experts,
            used: group.used,
            expert_bytes: weights.matrices.iter().map(|weight| weight.expert_bytes as u64).sum(),
            resident: f64::from(slots) / self.policy.shape().blocks().max(1) as f64,
        })
    }
}
