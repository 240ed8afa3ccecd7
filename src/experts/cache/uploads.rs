//! Copies of experts to the device: in pieces, and waited for where that is asked for.
//!
//! Owns: how a matrix is cut into pieces, and the waiting for uploads under way (`wait-swaps`, `swap-lead`).
//! Invariants: every byte of a matrix is copied once, in order.
//! Threads: the one that drives the backend. Does not: choose what is loaded, or mark where an upload ends.
// UNSAFETY: addresses in RAM of the model are handed to copies.
#![expect(unsafe_code, reason = "addresses in RAM of the model are handed to copies")]

use core::ffi::c_void;
use std::time::{Duration, Instant};

use super::Cache;
use crate::abi::inner;
use crate::buffer::BufferError;
use crate::device::Device;
use crate::gpu::{DriverError, Mark, Place, Rows};

/// What drivers take into memory of their own at once.
const TAKEN_BYTES: usize = 256 << 10;
/// How long a mark is looked at before everything is waited for instead.
const LONGEST_LOOK: Duration = Duration::from_millis(100);
/// Time between two looks.
const LOOK: Duration = Duration::from_micros(50);

/// Copies matrices of experts that lie one behind the other, to a slot or to staging.
pub(crate) fn upload(device: &Device, target: Place<'_>, source: usize, bytes: usize) -> Result<(), BufferError> {
    let source = core::ptr::with_exposed_provenance::<c_void>(source);
    let largest = device.expert_settings().upload_chunk_kb.map_or(bytes, |kib| kib as usize * 1024);
    pieces(bytes, largest, |done, piece| {
        // CUDA refuses a copy from memory of which a part is registered, as it is while registration goes on behind us, and one that reaches
        // over the end of a registration into the next.
        halves(done, piece, &mut |done, piece, taking| {
            let place = Place { address: target.address + done, ..target };
            let source = source.wrapping_byte_add(done);
            if taking {
                // SAFETY: the bytes lie in RAM of the model.
                return unsafe { device.driver().upload_taking(place, source, Rows::one(piece)) };
            }
            // SAFETY: as above; the RAM stays while the cache is current; it is dropped, and the driver waited for, before.
            unsafe { device.driver().upload(place, source, Rows::one(piece)) }
        })
    })?;
    Ok(())
}

/// Calls `copy` with a piece and `false`; if it is refused, with its halves, and so on. What is still refused when it is small is asked for with
/// `true`. So a piece with one bad place in it is copied but for little around that place.
fn halves(
    start: usize,
    bytes: usize,
    copy: &mut impl FnMut(usize, usize, bool) -> Result<(), DriverError>,
) -> Result<(), DriverError> {
    if copy(start, bytes, false).is_ok() {
        return Ok(());
    }
    if bytes <= TAKEN_BYTES {
        return copy(start, bytes, true);
    }
    let half = bytes / 2;
    halves(start, half, copy)?;
    halves(start + half, bytes - half, copy)
}

/// Calls `copy` with offset and length of each piece.
fn pieces(
    bytes: usize,
    largest: usize,
    mut copy: impl FnMut(usize, usize) -> Result<(), DriverError>,
) -> Result<(), DriverError> {
    let mut done = 0;
    while done < bytes {
        let piece = largest.max(1).min(bytes - done);
        copy(done, piece)?;
        done += piece;
    }
    Ok(())
}

impl Cache {
    /// Where uploads are waited for: begins those that wait for a slot, and waits for those that have had their time. Called before a graph
    /// starts.
    pub(crate) fn catch_up(&mut self, device: &Device, inner: &inner::Backend) -> Result<(), BufferError> {
        let Some(patience) = device.expert_settings().upload_patience() else { return Ok(()) };
        // The graph before still reads the slots that are written next.
        inner.synchronize();
        self.uncounted_bytes += self.idle(device)?;
        let overdue = self.uploads.iter().rev().find(|upload| is_overdue(upload.graph, self.graph, patience));
        if let Some(upload) = overdue {
            let all = patience == 0;
            if all || !is_reached_soon(&*upload.mark)? {
                device.driver().synchronize()?;
            }
        }
        Ok(())
    }
}

/// Whether an upload that began after so many graphs has had its time after so many.
fn is_overdue(began: u64, now: u64, patience: u32) -> bool {
    began.saturating_add(patience.into()) <= now
}

fn is_reached_soon(mark: &dyn Mark) -> Result<bool, DriverError> {
    let began = Instant::now();
    while began.elapsed() < LONGEST_LOOK {
        if mark.is_reached()? {
            return Ok(true);
        }
        std::thread::sleep(LOOK);
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lead_counts_graphs() {
        // Begun after graph 7 ended: graph 8 may start without it only if there is a lead.
        let waits = |patience| (7..12).find(|now| is_overdue(7, *now, patience));
        assert_eq!([0, 1, 3].map(waits), [Some(7), Some(8), Some(10)]);
    }

    /// A registration ends in the middle: two large copies, a small one that is taken, and no byte twice.
    #[test]
    fn a_refused_copy_is_cut_around_the_bad_place() {
        let (bytes, bad) = (100 << 20, 37_123_456);
        let (mut at, mut taken, mut asked) = (0, 0, 0);
        let outcome = halves(0, bytes, &mut |start, piece, taking| {
            asked += 1;
            if !taking && (start..start + piece).contains(&bad) && (start..start + piece).contains(&(bad - 1)) {
                return Err(DriverError::OutOfMemory);
            }
            assert_eq!(start, at);
            at += piece;
            taken += if taking { piece } else { 0 };
            Ok(())
        });
        assert!(
            outcome.is_ok() && at == bytes && (1..=TAKEN_BYTES).contains(&taken) && asked < 24,
            "{at} {taken} {asked}"
        );
        let mut asked = 0;
        let lost = halves(0, bytes, &mut |_, _, _| {
            asked += 1;
            Err(DriverError::OutOfMemory)
        });
        assert!(lost.is_err() && asked < 24, "a lost device is found out soon");
    }

    #[test]
    fn pieces_cover_every_byte_once() {
        let cut = |bytes, largest| {
            let mut all = Vec::new();
            let outcome = pieces(bytes, largest, |done, piece| {
                all.push((done, piece));
                Ok(())
            });
            assert!(outcome.is_ok());
            all
        };
        assert_eq!(cut(10, 4), [(0, 4), (4, 4), (8, 2)]);
        assert_eq!(cut(8, 4), [(0, 4), (4, 4)]);
        assert_eq!(cut(8, 100), [(0, 8)]);
        assert_eq!(cut(0, 4), []);
        let stopped = pieces(10, 4, |done, _| if done == 4 { Err(DriverError::OutOfMemory) } else { Ok(()) });
        assert_eq!(stopped, Err(DriverError::OutOfMemory));
    }
}
