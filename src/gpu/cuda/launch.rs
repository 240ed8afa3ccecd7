//! Own kernels: the only place that launches one. One typed function per kernel, which says what it may touch.

use core::ffi::c_void;
use std::ffi::{CStr, CString};

use cudarc::driver::{result, sys};

use super::super::DriverError;
use super::failed;

/// Our kernels, loaded into the current context.
#[derive(Debug)]
pub(super) struct Kernels {
    fill: Kernel,
    gather: Kernel,
}

/// The kernels of kernels/, as committed: made by tests/gen/kernels.sh.
const FILL_PTX: &str = include_str!("../../../kernels/ptx/fill.ptx");
const GATHER_PTX: &str = include_str!("../../../kernels/ptx/gather.ptx");
/// As in kernels/fill.cu.
const RANGES: usize = 64;
/// The most copies of one launch, as in kernels/gather.cu.
pub(super) const COPIES: usize = 128;
/// Threads of a block, and the bytes that one block is given, as the kernels' sources recommend.
const THREADS: u32 = 256;
const BYTES_PER_BLOCK: u64 = 64 << 10;
const MOST_BLOCKS: u64 = 1024;
/// The most blocks for one of several copies.
const MOST_BLOCKS_OF_A_COPY: u64 = 16;

/// `moe_range` of kernels/fill.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Range {
    address: u64,
    bytes: u64,
}

/// `moe_copy` of kernels/gather.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Copy {
    pub(super) target: u64,
    pub(super) source: u64,
    pub(super) bytes: u64,
}

/// One kernel and the module that it lies in.
#[derive(Debug)]
struct Kernel {
    module: sys::CUmodule,
    function: sys::CUfunction,
}

impl Kernel {
    fn load(ptx: &str, name: &CStr) -> Result<Self, DriverError> {
        let image = CString::new(ptx).map_err(|_| DriverError::Unsupported("PTX with a zero byte"))?;
        // SAFETY: a zero-terminated PTX text that lives until the call returns.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) }.map_err(failed("cuModuleLoadData"))?;
        // SAFETY: a module of the current context.
        match unsafe { result::module::get_function(module, name.to_owned()) } {
            Ok(function) => Ok(Self { module, function }),
            Err(error) => {
                // SAFETY: loaded above, used by nobody.
                let _ = unsafe { result::module::unload(module) };
                Err(failed("cuModuleGetFunction")(error))
            }
        }
    }
}

impl Kernels {
    /// Loads the kernels into the current context.
    pub(super) fn load() -> Result<Self, DriverError> {
        Ok(Self { fill: Kernel::load(FILL_PTX, c"moe_k_fill")?, gather: Kernel::load(GATHER_PTX, c"moe_k_gather")? })
    }

    /// Sets `bytes` bytes (at least one) at `address`, any alignment, to `value`, on `stream`.
    ///
    /// # Safety
    /// The range is mapped, writable device memory until the stream has run this; the stream belongs to the current context.
    pub(super) unsafe fn fill(
        &self,
        stream: sys::CUstream,
        address: u64,
        bytes: u64,
        value: u8,
    ) -> Result<(), DriverError> {
        let mut ranges = [Range { address: 0, bytes: 0 }; RANGES];
        ranges[0] = Range { address, bytes };
        let mut count = 1_u32;
        let mut value = u32::from(value);
        let mut arguments: [*mut c_void; 3] =
            [(&raw mut ranges).cast(), (&raw mut count).cast(), (&raw mut value).cast()];
        let blocks = u32::try_from(bytes.div_ceil(BYTES_PER_BLOCK).clamp(1, MOST_BLOCKS)).unwrap_or(1);
        // SAFETY: the arguments have the sizes and the order of moe_k_fill and are copied by the call; the launch shape is one that the
        // kernel accepts; the caller vouches for the range and the stream.
        unsafe { result::launch_kernel(self.fill.function, (blocks, 1, 1), (THREADS, 1, 1), 0, stream, &mut arguments) }
            .map_err(failed("cuLaunchKernel"))
    }
    /// Does at most [`COPIES`] copies, of any alignment, on `stream`.
    ///
    /// # Safety
    /// Every range is mapped device memory until the stream has run this, and no target overlaps another range; the stream belongs to the
    /// current context.
    pub(super) unsafe fn gather(&self, stream: sys::CUstream, copies: &[Copy]) -> Result<(), DriverError> {
        let mut all = [Copy::default(); COPIES];
        let count = copies.len().min(COPIES);
        all[..count].copy_from_slice(&copies[..count]);
        let Some(longest) = all.iter().map(|copy| copy.bytes).max().filter(|longest| *longest > 0) else {
            return Ok(());
        };
        let blocks = u32::try_from(longest.div_ceil(BYTES_PER_BLOCK).clamp(1, MOST_BLOCKS_OF_A_COPY)).unwrap_or(1);
        let mut count = u32::try_from(count).unwrap_or(0);
        let grid = (blocks, count, 1);
        let mut arguments: [*mut c_void; 2] = [(&raw mut all).cast(), (&raw mut count).cast()];
        // SAFETY: the arguments have the sizes and the order of moe_k_gather and are copied by the call; the launch shape is one that the
        // kernel accepts; the caller vouches for the ranges and the stream.
        unsafe { result::launch_kernel(self.gather.function, grid, (THREADS, 1, 1), 0, stream, &mut arguments) }
            .map_err(failed("cuLaunchKernel"))
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        // SAFETY: loaded in `load`. Its context is retained by the stream that owns this, and current: the stream's drop entered it.
        let _ = unsafe { result::module::unload(self.module) };
    }
}
