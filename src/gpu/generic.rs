//! The driver for any device: ggml's own functions on the inner device's buffers.

use core::ffi::c_void;

use super::pages::{Pages, SparsePages};
use super::{Driver, DriverError, Elastic, Mark, Memory, Place, Reached, Registration, Rows, Sparse, elastic_size};
use crate::abi::inner::{self, Passport};
use crate::experts::HostRange;
use crate::graph::Ranges;

/// Memory and copies through ggml's interface. Every operation is complete when it returns.
#[derive(Debug)]
pub(crate) struct Generic {
    buffer_type: inner::BufferType,
    /// Whether the device computes in any memory of the host.
    is_cpu: bool,
    /// Whether memory counts as registered (tests only).
    pins: bool,
}

/// A registration that nothing stands for.
#[derive(Debug)]
struct Nominal;

impl Registration for Nominal {}

impl Generic {
    /// Pages of the host, for a device that computes in any memory of the host.
    pub(super) fn sparse_in_host_memory(&self, bytes: usize) -> Result<Box<dyn Sparse>, DriverError> {
        let passport = self.buffer_type.alloc(1).ok_or(DriverError::OutOfMemory)?;
        Ok(Box::new(CpuSparse { passport, pages: SparsePages::new(bytes)? }))
    }

    /// A driver over the inner device's buffer type.
    pub(crate) fn new(buffer_type: inner::BufferType, is_cpu: bool, pins: bool) -> Self {
        Self { buffer_type, is_cpu, pins }
    }
}

/// Memory of ggml's CPU backend whose size changes.
#[derive(Debug)]
struct CpuPages {
    pages: Pages,
    /// A buffer of that backend, for its functions: they look at the address of a tensor, not at the bounds of its buffer.
    passport: inner::Buffer,
}

impl Memory for CpuPages {
    fn base(&self) -> usize {
        self.pages.base()
    }

    fn bytes(&self) -> usize {
        self.pages.bytes()
    }

    fn passport(&self) -> Passport {
        self.passport.passport()
    }
}

impl Elastic for CpuPages {
    fn reserved(&self) -> usize {
        self.pages.reserved()
    }

    fn unit(&self) -> usize {
        self.pages.unit()
    }

    fn resize(&mut self, bytes: usize) -> Result<(), DriverError> {
        if bytes > self.reserved() {
            return Err(DriverError::OutOfMemory);
        }
        self.pages.resize(elastic_size(bytes, self.unit(), self.reserved()))
    }
}

/// Memory of ggml's CPU backend behind parts of its addresses.
#[derive(Debug)]
struct CpuSparse {
    /// As in [`CpuPages`]. Dropped first: a device that is late waits for its work then.
    passport: inner::Buffer,
    pages: SparsePages,
}

impl Memory for CpuSparse {
    fn base(&self) -> usize {
        self.pages.base()
    }

    fn bytes(&self) -> usize {
        self.pages.bytes()
    }

    fn passport(&self) -> Passport {
        self.passport.passport()
    }
}

impl Sparse for CpuSparse {
    fn unit(&self) -> usize {
        self.pages.unit()
    }

    fn map(&self, ranges: &Ranges) -> Result<(), DriverError> {
        self.pages.map(ranges)
    }

    fn keep_only(&self, ranges: &Ranges) -> Result<(), DriverError> {
        self.pages.keep_only(ranges)
    }

    fn mapped_bytes(&self) -> usize {
        self.pages.mapped().bytes()
    }
}

impl Memory for inner::Buffer {
    fn base(&self) -> usize {
        inner::Buffer::base(self)
    }

    fn bytes(&self) -> usize {
        inner::Buffer::bytes(self)
    }

    fn passport(&self) -> Passport {
        inner::Buffer::passport(self)
    }
}

impl Driver for Generic {
    fn name(&self) -> &'static str {
        "ggml"
    }

    fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>, DriverError> {
        match self.buffer_type.alloc(bytes) {
            Some(buffer) => Ok(Box::new(buffer)),
            None => Err(DriverError::OutOfMemory),
        }
    }

    fn reserve(&self, bytes: usize) -> Result<Box<dyn Elastic>, DriverError> {
        if !self.is_cpu {
            return Err(DriverError::Unsupported("ggml's interface gives memory of one size"));
        }
        let passport = self.buffer_type.alloc(1).ok_or(DriverError::OutOfMemory)?;
        Ok(Box::new(CpuPages { pages: Pages::reserve(bytes)?, passport }))
    }

    fn sparse(&self, bytes: usize) -> Result<Box<dyn Sparse>, DriverError> {
        if !self.is_cpu {
            return Err(DriverError::Unsupported("ggml's interface gives memory of one size"));
        }
        self.sparse_in_host_memory(bytes)
    }

    fn fill(&self, target: Place<'_>, value: u8, bytes: usize) -> Result<(), DriverError> {
        // SAFETY: the contract says that the range lies in the memory.
        unsafe { target.memory.passport().fill(target.address, value, bytes) };
        Ok(())
    }

    unsafe fn upload(&self, target: Place<'_>, source: *const c_void, rows: Rows) -> Result<(), DriverError> {
        if !rows.is_empty() {
            // SAFETY: the range lies in the memory, the source is the caller's.
            unsafe { target.memory.passport().write(target.address, source, rows) };
        }
        Ok(())
    }

    unsafe fn download(&self, target: *mut c_void, source: Place<'_>, rows: Rows) -> Result<(), DriverError> {
        if !rows.is_empty() {
            // SAFETY: the range lies in the memory, the target is the caller's.
            unsafe { source.memory.passport().read(source.address, target, rows) };
        }
        Ok(())
    }

    fn copy(&self, target: Place<'_>, source: Place<'_>, bytes: usize) -> Result<bool, DriverError> {
        let (from, to) = (source.memory.passport(), target.memory.passport());
        // SAFETY: both ranges lie in their memories.
        Ok(unsafe { Passport::copy((from, source.address), (to, target.address), bytes) })
    }

    fn mark(&self) -> Result<Box<dyn Mark>, DriverError> {
        Ok(Box::new(Reached))
    }

    fn synchronize(&self) -> Result<(), DriverError> {
        Ok(())
    }

    fn reads_host_memory(&self) -> bool {
        self.is_cpu
    }

    unsafe fn register(&self, _range: HostRange<'_>) -> Result<Box<dyn Registration>, DriverError> {
        if self.pins {
            return Ok(Box::new(Nominal));
        }
        Err(DriverError::Unsupported("ggml's interface registers no host memory"))
    }
}
