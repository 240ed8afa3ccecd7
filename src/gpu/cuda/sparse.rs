//! Device memory behind any part of a reserved range of addresses.
//!
//! Owns: the reservation, the pieces behind it. Invariants: a range that stays keeps its content, also when it gets another piece; nothing goes
//! before everybody who may use it was waited for. A piece that cannot be split for lack of memory stays whole.
//! Threads: any; the list of pieces has a lock, held while pieces come and go, waits included. Does not: choose what comes and goes.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys;
use parking_lot::Mutex;

use super::super::sparse::{Piece, Pieces};
use super::super::{DriverError, Memory, Sparse};
use super::context::Context;
use super::{Users, failed};
use crate::abi::inner::Passport;
use crate::graph::Ranges;

type Handle = sys::CUmemGenericAllocationHandle;

/// Reserved addresses with memory behind any part of them.
#[derive(Debug)]
pub(super) struct SparseReservation {
    context: Arc<Context>,
    base: sys::CUdeviceptr,
    reserved: usize,
    pieces: Mutex<Pieces<Handle>>,
    passport: Passport,
    users: Users,
}

impl SparseReservation {
    /// Reserves addresses for `bytes` bytes and maps memory behind all of them. On failure nothing is left behind.
    pub(super) fn new(
        context: &Arc<Context>,
        bytes: usize,
        passport: Passport,
        users: Users,
    ) -> Result<Self, DriverError> {
        context.enter()?;
        let reserved = context.round(bytes);
        let base = reserve(reserved)?;
        // From here on, dropping the object undoes what was done.
        let memory = Self { context: Arc::clone(context), base, reserved, pieces: Mutex::default(), passport, users };
        memory.map(&Ranges::from(0..reserved))?;
        Ok(memory)
    }

    fn address(&self, offset: usize) -> sys::CUdeviceptr {
        self.base + offset as u64
    }

    /// Memory behind a range that has none.
    fn map_piece(&self, range: Range<usize>) -> Result<Piece<Handle>, DriverError> {
        let handle = create(&self.context, range.len())?;
        if let Err(error) = map(&self.context, self.address(range.start), range.len(), handle) {
            release(handle);
            return Err(error);
        }
        Ok(Piece { range, handle })
    }

    /// Takes a piece away. Nobody uses it any more.
    fn unmap_piece(&self, piece: &Piece<Handle>) {
        unmap(self.address(piece.range.start), piece.range.len());
        release(piece.handle);
    }

    /// New pieces with copies of these ranges, mapped nowhere; nothing is left behind on failure.
    fn copies(&self, ranges: &[Range<usize>]) -> Result<Vec<Piece<Handle>>, DriverError> {
        let mut made: Vec<Piece<Handle>> = Vec::with_capacity(ranges.len());
        let copied = ranges.iter().try_for_each(|range| {
            let handle = create(&self.context, range.len())?;
            made.push(Piece { range: range.clone(), handle });
            self.copy_into(handle, range)
        });
        if let Err(error) = copied {
            made.iter().for_each(|piece| release(piece.handle));
            return Err(error);
        }
        Ok(made)
    }

    /// Copies a range into memory that is mapped nowhere yet, by way of addresses for the time of the copy.
    fn copy_into(&self, handle: Handle, range: &Range<usize>) -> Result<(), DriverError> {
        let (bytes, window) = (range.len(), reserve(range.len())?);
        let copied = map(&self.context, window, bytes, handle).and_then(|()| {
            let (target, source) = (address_of(window), address_of(self.address(range.start)));
            // SAFETY: both ranges are mapped and of that size; nobody else knows the first, nobody uses the second.
            let copied = unsafe { self.users.stream.copy(target, source, bytes) };
            let copied = copied.and_then(|()| self.users.stream.synchronize());
            unmap(window, bytes);
            copied
        });
        // SAFETY: exactly the reservation from above, with nothing mapped.
        let _ = unsafe { sys::cuMemAddressFree(window, bytes) };
        copied
    }

    /// Puts pieces in place of one whose ranges they hold copies of. If that fails the content is lost.
    fn replace(
        &self,
        pieces: &mut Pieces<Handle>,
        old: &Piece<Handle>,
        new: Vec<Piece<Handle>>,
    ) -> Result<(), DriverError> {
        self.unmap_piece(old);
        let mut outcome = Ok(());
        for piece in new {
            match map(&self.context, self.address(piece.range.start), piece.range.len(), piece.handle) {
                Ok(()) => pieces.add(piece),
                Err(error) => {
                    release(piece.handle);
                    outcome = Err(error);
                }
            }
        }
        outcome
    }
}

impl Sparse for SparseReservation {
    fn unit(&self) -> usize {
        self.context.round(1)
    }

    fn map(&self, ranges: &Ranges) -> Result<(), DriverError> {
        self.context.enter()?;
        let mut pieces = self.pieces.lock();
        let mut made: Vec<Piece<Handle>> = Vec::new();
        for range in pieces.missing(ranges) {
            match self.map_piece(range) {
                Ok(piece) => made.push(piece),
                Err(error) => {
                    made.iter().for_each(|piece| self.unmap_piece(piece)); // nobody was told of them yet
                    return Err(error);
                }
            }
        }
        made.into_iter().for_each(|piece| pieces.add(piece));
        Ok(())
    }

    fn keep_only(&self, ranges: &Ranges) -> Result<(), DriverError> {
        self.context.enter()?;
        let mut pieces = self.pieces.lock();
        // Unmapping does not wait for kernels that the host queued.
        self.users.wait()?;
        let mut outcome = Ok(());
        for (piece, rest) in pieces.take_beside(ranges) {
            match self.copies(&rest) {
                Ok(new) => outcome = outcome.and(self.replace(&mut pieces, &piece, new)),
                Err(_) => pieces.add(piece), // more than asked for stays
            }
        }
        outcome
    }

    fn mapped_bytes(&self) -> usize {
        self.pieces.lock().bytes()
    }
}

impl Memory for SparseReservation {
    fn base(&self) -> usize {
        address_of(self.base)
    }

    fn bytes(&self) -> usize {
        self.reserved
    }

    fn passport(&self) -> Passport {
        self.passport
    }
}

impl Drop for SparseReservation {
    fn drop(&mut self) {
        // Failures here leave memory to the end of the process; there is nobody to tell and nothing else to do.
        if self.context.enter().is_err() {
            return;
        }
        // Unmapping does not wait for kernels that the host queued. If waiting fails the device is lost, and unmapping will fail as well.
        let _ = self.users.wait();
        for piece in self.pieces.get_mut().take_all() {
            unmap(self.base + piece.range.start as u64, piece.range.len());
            release(piece.handle);
        }
        // SAFETY: exactly the reservation of `new`, with nothing mapped.
        let _ = unsafe { sys::cuMemAddressFree(self.base, self.reserved) };
    }
}

fn address_of(address: sys::CUdeviceptr) -> usize {
    // Device addresses have the width of host addresses on every machine that CUDA runs on.
    usize::try_from(address).unwrap_or(0)
}

/// Addresses for `bytes` bytes, a multiple of the unit.
fn reserve(bytes: usize) -> Result<sys::CUdeviceptr, DriverError> {
    let mut base = 0;
    // SAFETY: a place to write to; any address will do.
    unsafe { sys::cuMemAddressReserve(&raw mut base, bytes, 0, 0, 0) }
        .result()
        .map_err(failed("cuMemAddressReserve"))?;
    Ok(base)
}

/// Physical memory of `bytes` bytes, a multiple of the unit, mapped nowhere.
fn create(context: &Context, bytes: usize) -> Result<Handle, DriverError> {
    let properties = context.allocation();
    let mut handle = 0;
    // SAFETY: a place to write to and valid properties; the size is a multiple of the granularity.
    unsafe { sys::cuMemCreate(&raw mut handle, bytes, &raw const properties, 0) }
        .result()
        .map_err(failed("cuMemCreate"))?;
    Ok(handle)
}

/// Maps a handle of that size at reserved addresses behind which nothing is mapped, and lets the device use it. Nothing is mapped on failure.
fn map(context: &Context, address: sys::CUdeviceptr, bytes: usize, handle: Handle) -> Result<(), DriverError> {
    // SAFETY: reserved, and nothing is mapped there, by the caller's word.
    unsafe { sys::cuMemMap(address, bytes, 0, handle, 0) }.result().map_err(failed("cuMemMap"))?;
    let access = sys::CUmemAccessDesc {
        location: context.location(),
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    // SAFETY: the whole range is mapped, just above; one valid descriptor.
    let granted = unsafe { sys::cuMemSetAccess(address, bytes, &raw const access, 1) }.result();
    if granted.is_err() {
        unmap(address, bytes);
    }
    granted.map_err(failed("cuMemSetAccess"))
}

/// Takes exactly a mapping of [`map`] away. A failure leaves it to the end of the process: there is nothing else to do.
fn unmap(address: sys::CUdeviceptr, bytes: usize) {
    // SAFETY: exactly a mapping of `map`, which nobody uses any more.
    let _ = unsafe { sys::cuMemUnmap(address, bytes) };
}

/// Gives a handle of [`create`] back.
fn release(handle: Handle) {
    // SAFETY: made by `create`, given back once.
    let _ = unsafe { sys::cuMemRelease(handle) };
}
