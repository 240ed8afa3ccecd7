//! What the driver says of itself and of all cards, and a measurement of a link. For the command; the plugin itself does not ask.

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::context::{self, Context};
use super::failed;

/// Bytes of one copy, and copies that are timed.
const COPY_BYTES: usize = 64 << 20;
const COPIES: usize = 4;

/// A card.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SurveyCard {
    /// Its name.
    pub name: String,
    /// Its address on the bus, in the system's spelling.
    pub bus: String,
    /// Bytes of memory.
    pub total: u64,
    /// Its compute capability, as 90 for 9.0.
    pub compute: u32,
    /// Whether it can map memory into reserved addresses.
    pub maps: bool,
    /// Whether kernels reach registered host memory.
    pub reads_host: bool,
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// Whether the driver's library is there.
    pub present: bool,
    /// The CUDA release that the driver runs, as 12040 for 12.4.
    pub version: u32,
    /// Why the driver cannot be used.
    pub fault: Option<String>,
    /// Its cards, in its order.
    pub cards: Vec<SurveyCard>,
}

/// Asks the driver. No card is opened.
pub fn survey() -> Survey {
    // SAFETY: only tries to load the library by name.
    let present = unsafe { sys::is_culib_present() };
    let mut found = Survey { present, fault: context::check_library(None).err(), ..Survey::default() };
    if !found.present {
        return found;
    }
    let mut version = 0;
    // SAFETY: a place to write to; needs no initialisation.
    let asked = unsafe { sys::cuDriverGetVersion(&raw mut version) }.result();
    found.version = asked.ok().and_then(|()| u32::try_from(version).ok()).unwrap_or(0);
    if let Err(error) = result::init() {
        found.fault.get_or_insert_with(|| failed("cuInit")(error).to_string());
        return found;
    }
    let count = result::device::get_count().unwrap_or(0);
    found.cards = (0..count).filter_map(card).collect();
    found
}

fn card(ordinal: i32) -> Option<SurveyCard> {
    let device = result::device::get(ordinal).ok()?;
    let attribute = |attribute| {
        // SAFETY: a device of this process.
        let value = unsafe { result::device::get_attribute(device, attribute) };
        u32::try_from(value.unwrap_or(0)).unwrap_or(0)
    };
    // SAFETY: a device of this process.
    let total = unsafe { result::device::total_mem(device) }.unwrap_or(0);
    let address = [
        Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID,
        Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
        Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID,
    ];
    let [domain, bus, slot] = address.map(attribute);
    Some(SurveyCard {
        name: result::device::get_name(device).unwrap_or_default(),
        bus: format!("{domain:04x}:{bus:02x}:{slot:02x}.0"),
        total: total as u64,
        compute: 10 * attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
            + attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        maps: attribute(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) != 0,
        reads_host: attribute(Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) != 0,
    })
}

/// Memory that is given back when this goes.
struct Pinned(*mut core::ffi::c_void);

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `result::malloc_host`, freed once. A failure leaves it to the process's end.
        let _ = unsafe { result::free_host(self.0) };
    }
}

struct Device(sys::CUdeviceptr);

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: allocated by `result::malloc_sync`, freed once. A failure leaves it to the process's end.
        let _ = unsafe { result::free_sync(self.0) };
    }
}

/// 10^9 bytes per second from pinned memory to the card at this address: the best of a few copies.
pub fn link_gbs(bus: &str) -> Result<f64, String> {
    let context = Context::open(bus, None)?;
    context.enter().map_err(|error| error.to_string())?;
    let told = |what| move |error| failed(what)(error).to_string();
    // SAFETY: the context is current; no flags.
    let host = Pinned(unsafe { result::malloc_host(COPY_BYTES, 0) }.map_err(told("cuMemHostAlloc"))?);
    // SAFETY: the context is current.
    let device = Device(unsafe { result::malloc_sync(COPY_BYTES) }.map_err(told("cuMemAlloc"))?);
    // SAFETY: allocated above with this many bytes, which any value may fill.
    unsafe { core::ptr::write_bytes(host.0.cast::<u8>(), 1, COPY_BYTES) };
    let mut best = 0.0_f64;
    for _ in 0..=COPIES {
        let began = std::time::Instant::now();
        // SAFETY: both sides have this many bytes; the call returns when the copy is done.
        unsafe { sys::cuMemcpyHtoD_v2(device.0, host.0, COPY_BYTES) }.result().map_err(told("cuMemcpyHtoD"))?;
        best = best.max(COPY_BYTES as f64 / began.elapsed().as_secs_f64() / 1e9);
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_driver_it_says_so() {
        let found = survey();
        if found.present {
            assert!(found.version > 0);
        } else {
            assert!(found.fault.is_some_and(|fault| fault.contains("libcuda")) && found.cards.is_empty());
            assert!(link_gbs("0000:01:00.0").unwrap_err().contains("libcuda"));
        }
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn a_link_is_measured() {
        let found = survey();
        let card = found.cards.first().expect("a CUDA device");
        let rate = link_gbs(&card.bus).expect("a copy");
        println!("{card:?}: {rate:.1} GB/s");
        assert!((0.5..200.0).contains(&rate));
    }
}
