//! Device memory in reservations of address space, and registered host memory.

use core::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;

use super::super::{DriverError, Memory, Registration};
use super::context::Context;
use super::{Users, failed};
use crate::abi::inner::Passport;
use crate::experts::HostRange;

/// The largest piece of physical memory. A piece is what can be taken back at a time later, so it is not the whole reservation.
const PIECE: usize = 64 << 20;

/// A reserved range of addresses with physical memory behind all of it.
#[derive(Debug)]
pub(super) struct Reservation {
    context: Arc<Context>,
    base: sys::CUdeviceptr,
    bytes: usize,
    /// Mapped pieces: offset, size, handle.
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
        context.enter()?;
        let bytes = context.round(bytes);
        let mut base = 0;
        // SAFETY: a place to write to; any address will do.
        unsafe { sys::cuMemAddressReserve(&raw mut base, bytes, 0, 0, 0) }
            .result()
            .map_err(failed("cuMemAddressReserve"))?;
        // From here on, dropping the object undoes what was done.
        let mut reservation = Self { context: Arc::clone(context), base, bytes, pieces: Vec::new(), passport, users };
        let mut offset = 0;
        while offset < bytes {
            let size = PIECE.min(bytes - offset);
            reservation.map_piece(offset, size)?;
            offset += size;
        }
        reservation.grant_access()?;
        Ok(reservation)
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

    fn grant_access(&self) -> Result<(), DriverError> {
        let access = sys::CUmemAccessDesc {
            location: self.context.location(),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the whole range is mapped; one valid descriptor.
        unsafe { sys::cuMemSetAccess(self.base, self.bytes, &raw const access, 1) }
            .result()
            .map_err(failed("cuMemSetAccess"))
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
        for (offset, size, handle) in self.pieces.drain(..) {
            // SAFETY: exactly a mapping of `map_piece`.
            let _ = unsafe { sys::cuMemUnmap(self.base + offset as u64, size) };
            // SAFETY: made by `map_piece`, mapped nowhere any more.
            let _ = unsafe { sys::cuMemRelease(handle) };
        }
        // SAFETY: exactly the reservation of `new`, with nothing mapped.
        let _ = unsafe { sys::cuMemAddressFree(self.base, self.bytes) };
    }
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
