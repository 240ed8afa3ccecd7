//! Which CUDA device, what it can do, and its primary context.

use std::ffi::CString;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::super::DriverError;
use super::failed;
use crate::config::CudaFault;

/// The oldest driver that is used: the release that runs CUDA 12.4, as the kernels' PTX needs.
const OLDEST_VERSION: i32 = 12_040;

/// A retained primary context.
#[derive(Debug)]
pub(super) struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
    /// The unit of physical memory, in bytes.
    granularity: usize,
    /// Whether kernels reach registered host memory at its own address.
    reads_host: bool,
}

// SAFETY: a context handle may be used from any thread once it is current there, which every use here sees to.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// The context of the device with this PCI id; Err says in one line why it is not used.
    pub(super) fn open(id: &str, fault: Option<CudaFault>) -> Result<Self, String> {
        check_library(fault)?;
        result::init().map_err(|error| failed("cuInit")(error).to_string())?;
        // ggml names virtual devices on one card by a suffix.
        let bus = id.split("-v").next().unwrap_or(id);
        let bus = CString::new(bus).map_err(|_| "the PCI id holds a zero byte".to_owned())?;
        let mut device = 0;
        // SAFETY: a place to write to and a C string.
        unsafe { sys::cuDeviceGetByPCIBusId(&raw mut device, bus.as_ptr()) }
            .result()
            .map_err(|error| failed("cuDeviceGetByPCIBusId")(error).to_string())?;
        Self::on(device, fault)
    }

    /// The context of the first device.
    #[cfg(test)]
    pub(super) fn open_first() -> Result<Self, String> {
        check_library(None)?;
        result::init().map_err(|error| failed("cuInit")(error).to_string())?;
        let device = result::device::get(0).map_err(|error| failed("cuDeviceGet")(error).to_string())?;
        Self::on(device, None)
    }

    fn on(device: sys::CUdevice, fault: Option<CudaFault>) -> Result<Self, String> {
        let attribute = |attribute| {
            // SAFETY: a device of this process.
            unsafe { result::device::get_attribute(device, attribute) }.unwrap_or(0)
        };
        let mapped = attribute(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
        if mapped == 0 || fault == Some(CudaFault::NoVmm) {
            return Err("this device has no virtual memory management (it cannot map memory into reserved addresses)"
                .to_owned());
        }
        let reads_host = attribute(Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) != 0;
        // SAFETY: a device of this process; released when dropped.
        let context = unsafe { result::primary_ctx::retain(device) }
            .map_err(|error| failed("cuDevicePrimaryCtxRetain")(error).to_string())?;
        let mut opened = Self { device, context, granularity: 0, reads_host };
        opened.granularity = opened.ask_granularity().map_err(|error| error.to_string())?;
        Ok(opened)
    }

    /// Makes the context current on this thread.
    pub(super) fn enter(&self) -> Result<(), DriverError> {
        // SAFETY: retained, and not released before this object is dropped.
        unsafe { result::ctx::set_current(self.context) }.map_err(failed("cuCtxSetCurrent"))
    }

    /// Rounds up to the unit of physical memory.
    pub(super) fn round(&self, bytes: usize) -> usize {
        bytes.max(1).next_multiple_of(self.granularity)
    }

    /// Whether kernels reach registered host memory at its own address.
    pub(super) fn reads_host(&self) -> bool {
        self.reads_host
    }

    /// What physical memory on this device is asked with.
    pub(super) fn allocation(&self) -> sys::CUmemAllocationProp {
        sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location: self.location(),
            win32HandleMetaData: core::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        }
    }

    /// This device, as a place of memory.
    pub(super) fn location(&self) -> sys::CUmemLocation {
        sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: self.device }
    }

    fn ask_granularity(&self) -> Result<usize, DriverError> {
        let properties = self.allocation();
        let mut granularity = 0;
        let flags = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: a place to write to and valid properties.
        unsafe { sys::cuMemGetAllocationGranularity(&raw mut granularity, &raw const properties, flags) }
            .result()
            .map_err(failed("cuMemGetAllocationGranularity"))?;
        Ok(granularity.max(4096))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained in `on`, released once. A failure leaves the context to the process's end.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// Whether the CUDA driver is there and new enough; Err says what is wrong and what to do.
pub(super) fn check_library(fault: Option<CudaFault>) -> Result<(), String> {
    // SAFETY: only tries to load the library by name.
    let present = unsafe { sys::is_culib_present() };
    if !present || fault == Some(CudaFault::Absent) {
        return Err("libcuda was not found: install NVIDIA's driver".to_owned());
    }
    let mut version = 0;
    // SAFETY: a place to write to; needs no initialisation.
    let asked = unsafe { sys::cuDriverGetVersion(&raw mut version) }.result();
    if fault == Some(CudaFault::Old) {
        version = 11_080;
    }
    if asked.is_err() || version < OLDEST_VERSION {
        return Err(format!(
            "the NVIDIA driver is too old (it runs CUDA {}.{}; 12.4 is needed): update it to release 550 or later",
            version / 1000,
            version % 1000 / 10
        ));
    }
    Ok(())
}
