//! Device memory in reservations of address space, and registered host memory.

use core::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;

use super::super::{DriverError, Elastic, Memory, Registration, elastic_size};
use super::context::Context;
use super::{Users, failed};
use crate::abi::inner::Passport;
use crate::experts::HostRange;

/// The largest piece of physical memory. A piece is what can be taken back at a time later, so it is not the whole reservation.
const PIECE: usize = 64 << 20;
/// The largest piece of memory that comes and goes, and the number of pieces that a smaller reservation has.
const ELASTIC_PIECE: usize = 32 << 20;
const ELASTIC_PIECES: usize = 128;

/// A reserved range of addresses with physical memory behind the first part of it.
#[derive(Debug)]
pub(super) struct Reservation {
    context: Arc<Context>,
    base: sys::CUdeviceptr,
    reserved: usize,
    /// Bytes with memory behind them.
    bytes: usize,
    /// Size of a piece, the last one of the reservation excepted.
    unit: usize,
    /// Mapped pieces, in order of their offsets: offset, size, handle.
    pieces: Vec<(usize, usize, sys::CUmemGenericAllocationHandle)>,
    passport: Passport,
    users: Users,
}

impl Reservation {
    /// Reserves addresses for `bytes` bytes and maps memory behind them. On failure nothing is left behind.
    pub(super) fn new(
        context: &Arc<Context>,
        bytes: usize,
        passport: Passport,
        users: Users,
    ) -> Result<Self, DriverError> {
        let mut reservation = Self::reserve(context, bytes, PIECE, passport, users)?;
        reservation.grow(reservation.reserved)?;
        Ok(reservation)
    }

    /// Reserves addresses for `bytes` bytes, to be backed later.
    pub(super) fn elastic(
        context: &Arc<Context>,
        bytes: usize,
        passport: Passport,
        users: Users,
    ) -> Result<Self, DriverError> {
        Self::reserve(context, bytes, (bytes / ELASTIC_PIECES).min(ELASTIC_PIECE), passport, users)
    }

    fn reserve(
        context: &Arc<Context>,
        bytes: usize,
        unit: usize,
        passport: Passport,
        users: Users,
    ) -> Result<Self, DriverError> {
        context.enter()?;
        let (reserved, unit) = (context.round(bytes), context.round(unit));
        let mut base = 0;
        // SAFETY: a place to write to; any address will do.
        unsafe { sys::cuMemAddressReserve(&raw mut base, reserved, 0, 0, 0) }
            .result()
            .map_err(failed("cuMemAddressReserve"))?;
        // From here on, dropping the object undoes what was done.
        let pieces = Vec::new();
        Ok(Self { context: Arc::clone(context), base, reserved, bytes: 0, unit, pieces, passport, users })
    }

    /// Maps memory up to `bytes`, at most what is reserved. On failure nothing has changed.
    fn grow(&mut self, bytes: usize) -> Result<(), DriverError> {
        self.context.enter()?;
        let before = self.bytes;
        let grown = self.map(bytes).and_then(|()| self.grant_access(before, self.bytes - before));
        if grown.is_err() {
            self.unmap(before); // nobody was told of it yet
        }
        grown
    }

    fn map(&mut self, bytes: usize) -> Result<(), DriverError> {
        while self.bytes < bytes {
            let size = self.unit.min(self.reserved - self.bytes);
            self.map_piece(self.bytes, size)?;
            self.bytes += size;
        }
        Ok(())
    }

    fn map_piece(&mut self, offset: usize, size: usize) -> Result<(), DriverError> {
        let properties = self.context.allocation();
        let mut handle = 0;
        // SAFETY: a place to write to and valid properties; the size is a multiple of the granularity.
        unsafe { sys::cuMemCreate(&raw mut handle, size, &raw const properties, 0) }
            .result()
            .map_err(failed("cuMemCreate"))?;
        // SAFETY: the range lies in the reservation and nothing is mapped there yet.
        let mapped = unsafe { sys::cuMemMap(self.base + offset as u64, size, 0, handle, 0) }.result();
        if let Err(error) = mapped {
            // SAFETY: made above, mapped nowhere.
            let _ = unsafe { sys::cuMemRelease(handle) };
            return Err(failed("cuMemMap")(error));
        }
        self.pieces.push((offset, size, handle));
        Ok(())
    }

    fn grant_access(&self, offset: usize, bytes: usize) -> Result<(), DriverError> {
        if bytes == 0 {
            return Ok(());
        }
        let access = sys::CUmemAccessDesc {
            location: self.context.location(),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the whole range is mapped, piece by piece; one valid descriptor.
        unsafe { sys::cuMemSetAccess(self.base + offset as u64, bytes, &raw const access, 1) }
            .result()
            .map_err(failed("cuMemSetAccess"))
    }

    /// Takes the pieces away that lie behind `bytes`. Nobody uses them any more. A failure leaves memory to the end of the process: there is
    /// nothing else to do.
    fn unmap(&mut self, bytes: usize) {
        while let Some(&(offset, size, handle)) = self.pieces.last().filter(|(offset, ..)| *offset >= bytes) {
            self.pieces.pop();
            // SAFETY: exactly a mapping of `map_piece`.
            let _ = unsafe { sys::cuMemUnmap(self.base + offset as u64, size) };
            // SAFETY: made by `map_piece`, mapped nowhere any more.
            let _ = unsafe { sys::cuMemRelease(handle) };
        }
        self.bytes = self.pieces.last().map_or(0, |(offset, size, _)| offset + size);
    }
}

impl Elastic for Reservation {
    fn reserved(&self) -> usize {
        self.reserved
    }

    fn unit(&self) -> usize {
        self.unit
    }

    fn resize(&mut self, bytes: usize) -> Result<(), DriverError> {
        if bytes > self.reserved {
            return Err(DriverError::OutOfMemory);
        }
        let size = elastic_size(bytes, self.unit, self.reserved);
        if size >= self.bytes {
            return self.grow(size);
        }
        self.context.enter()?;
        // Unmapping does not wait for kernels that the host queued.
        self.users.wait()?;
        self.unmap(size);
        Ok(())
    }
}

impl Memory for Reservation {
    fn base(&self) -> usize {
        // Device addresses have the width of host addresses on every machine that CUDA runs on.
        usize::try_from(self.base).unwrap_or(0)
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn passport(&self) -> Passport {
        self.passport
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // Failures here leave memory to the end of the process; there is nobody to tell and nothing else to do.
        if self.context.enter().is_err() {
            return;
        }
        // Unmapping does not wait for kernels that the host queued. If waiting fails the device is lost, and unmapping will fail as well.
        let _ = self.users.wait();
        self.unmap(0);
        // SAFETY: exactly the reservation of `reserve`, with nothing mapped.
        let _ = unsafe { sys::cuMemAddressFree(self.base, self.reserved) };
    }
}

/// Whether CUDA knows an address of the host's as pinned. What it never saw, it answers with an error.
pub(super) fn is_pinned(context: &Context, address: *const c_void) -> bool {
    let mut kind: core::ffi::c_uint = 0;
    let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    if context.enter().is_err() {
        return false;
    }
    // SAFETY: this attribute is one unsigned word; the address is looked up, not read.
    let asked = unsafe { sys::cuPointerGetAttribute((&raw mut kind).cast(), attribute, address.addr() as u64) };
    asked.result().is_ok() && kind == sys::CUmemorytype::CU_MEMORYTYPE_HOST as core::ffi::c_uint
}

/// Host memory that kernels read at its own address.
#[derive(Debug)]
pub(super) struct Registered {
    context: Arc<Context>,
    start: *mut c_void,
}

// SAFETY: the pointer is a name for the registration only; it is never read through.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Registered {
    /// Registers a range of host memory, pinning its pages.
    ///
    /// # Safety
    /// The range stays mapped until this is dropped.
    pub(super) unsafe fn new(context: &Arc<Context>, range: HostRange<'_>) -> Result<Self, DriverError> {
        if !context.reads_host() {
            return Err(DriverError::Unsupported("this device does not read host memory at its own address"));
        }
        context.enter()?;
        let start = range.as_ptr().cast_mut();
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: mapped memory by the caller's contract.
        unsafe { sys::cuMemHostRegister_v2(start, range.bytes(), flags) }
            .result()
            .map_err(failed("cuMemHostRegister"))?;
        Ok(Self { context: Arc::clone(context), start })
    }
}

impl Registration for Registered {}

impl Drop for Registered {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: registered in `new`. A failure leaves the pages pinned until they are unmapped.
            let _ = unsafe { sys::cuMemHostUnregister(self.start) };
        }
    }
}
