//! Who a model is: a number from the names, types, sizes and some bytes of its experts.
//!
//! Owns: the number. The same file gives the same number in every run and release; another quantization or a model trained further gives
//! another one. Experts that lie elsewhere (on another device, or kept on the CPU by flags) are not in it, so what is learned under one
//! division of the layers is not used under another.
//! Threads: none. Does not: read whole weights: a few bytes of each.
// UNSAFETY: bytes are copied out of the host's memory into an array of ours.
#![expect(unsafe_code, reason = "bytes are copied out of the host's memory into an array of ours")]

use super::host_memory;
use crate::abi::tensor::Tensor;

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
        let last = weight.bytes().saturating_sub(PLACE_BYTES);
        for place in 0..PLACES {
            let mut sample = [0_u8; PLACE_BYTES];
            let address = weight.data() + last / (PLACES - 1) * place;
            let bytes = PLACE_BYTES.min(weight.bytes());
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
}
