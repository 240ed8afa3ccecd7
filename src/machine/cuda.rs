//! What the CUDA driver says of itself and its cards, and how fast a link is.
//!
//! Owns: the plain form of it. Threads: the caller's. Does not: call the driver (`gpu::cuda` does).

pub use crate::gpu::cuda::survey::{Survey, SurveyCard};

/// Asks the driver; opens no card.
pub fn survey() -> Survey {
    crate::gpu::cuda::survey::survey()
}

/// 10^9 bytes per second from pinned memory to the card at this address. Opens the card; takes less than a second.
pub fn link_gbs(bus: &str) -> Result<f64, String> {
    crate::gpu::cuda::survey::link_gbs(bus)
}
