//! Own kernels: the only place that launches one. One typed function per kernel, which says what it may touch.

use core::ffi::c_void;
use std::ffi::CString;

use cudarc::driver::{result, sys};

use super::super::DriverError;
use super::failed;

/// Our kernels, loaded into the current context.
#[derive(Debug)]
pub(super) struct Kernels {
    module: sys::CUmodule,
    fill: sys::CUfunction,
}

/// The kernels of kernels/fill.cu, as committed: made by tests/gen/kernels.sh.
const FILL_PTX: &str = include_str!("../../../kernels/ptx/fill.ptx");
/// As in kernels/fill.cu.
const RANGES: usize = 64;
/// Threads of a block, and the bytes that one block is given, as kernels/fill.cu recommends.
const THREADS: u32 = 256;
const BYTES_PER_BLOCK: u64 = 64 << 10;
const MOST_BLOCKS: u64 = 1024;

/// `moe_range` of kernels/fill.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Range {
    address: u64,
    bytes: u64,
}

impl Kernels {
    /// Loads the kernels into the current context.
    pub(super) fn load() -> Result<Self, DriverError> {
        let image = CString::new(FILL_PTX).map_err(|_| DriverError::Unsupported("PTX with a zero byte"))?;
        // SAFETY: a zero-terminated PTX text that lives until the call returns.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) }.map_err(failed("cuModuleLoadData"))?;
        // SAFETY: a module of the current context.
        let fill = unsafe { result::module::get_function(module, c"moe_k_fill".to_owned()) };
        match fill {
            Ok(fill) => Ok(Self { module, fill }),
            Err(error) => {
                // SAFETY: loaded above, used by nobody.
                let _ = unsafe { result::module::unload(module) };
                Err(failed("cuModuleGetFunction")(error))
            }
        }
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
        unsafe { result::launch_kernel(self.fill, (blocks, 1, 1), (THREADS, 1, 1), 0, stream, &mut arguments) }
            .map_err(failed("cuLaunchKernel"))
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // SAFETY: loaded in `load`. Its context is retained by the stream that owns this, and current: the stream's drop entered it.
        let _ = unsafe { result::module::unload(self.module) };
    }
}
