//! What goes into the policy and what comes out.
//!
//! Owns: the plain types of its interface.
//! Threads: none. Does not: decide.

use super::super::shape::Block;
use super::regime::Regime;

/// What the policy is told at start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Tokens of recent use, 8 to 127.
    pub window: u32,
    /// Uses within the window before a block replaces another.
    pub admit: u32,
    /// Uploads per step at most; `None` leaves it to the upload share.
    pub swaps_per_step: Option<u32>,
    /// Part of the link's time that uploads may take, once rates are known.
    pub upload_share: f32,
    /// Uses that an upload must bring, until rates are known.
    pub payback: f32,
    /// The order of blocks; `None` chooses by measured hits.
    pub regime: Option<Regime>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { window: 64, admit: 2, swaps_per_step: None, upload_share: 0.25, payback: 2.0, regime: None }
    }
}

/// One pool of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Blocks that it can hold.
    pub slots: u32,
    /// Bytes of one block.
    pub block_bytes: u64,
}

/// A block to upload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    /// The block.
    pub block: Block,
    /// The block that gives up its place; `None` where there was room.
    pub evicts: Option<Block>,
}

/// Uses, and how many of them found their block loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Uses noted.
    pub uses: u64,
    /// Of them, uses of held and loaded blocks.
    pub hits: u64,
}
