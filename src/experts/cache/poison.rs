//! Poison for the tests (`debug-poison`): slots that nobody may read hold what is not a number.
//!
//! A free slot is filled once, when it is first seen to be free: after it was made, after the last graph that read it is done, and so before
//! its next upload begins. A graph that reads a slot that is free or being loaded then computes what no comparison takes for a result.
//! Does not: decide which slots are free (`residency` does).

use super::Cache;
use crate::buffer::BufferError;
use crate::device::Device;

impl Cache {
    /// Poisons the slots that became free.
    pub(super) fn poison_free(&mut self, device: &Device) -> Result<(), BufferError> {
        if !device.poisons() {
            return Ok(());
        }
        for (number, pool) in (0..).zip(&self.pools) {
            for slot in self.residency.free_slots(number) {
                if self.poisoned.insert((number, slot.0)) {
                    pool.poison(device.driver(), slot.0)?;
                }
            }
        }
        Ok(())
    }
}
