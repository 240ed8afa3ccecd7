//! Buffers: device memory over the inner device's, and host memory for experts.
//!
//! Owns: the storage behind every buffer that the host gets from us, and the padding rule.
//! Invariants: every access is checked against the buffer's range; the padding behind a quantized weight or KV tensor is zero.
//! Threads: any; the host orders accesses to the same bytes, as it does for its own buffers.
//! Does not: decide where a tensor lies (the host and `Device::supports_op` do).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::abi::inner::Passport;
use crate::abi::tensor::Tensor;
use crate::config::{AllocationKind, ExpertsFrom};
use crate::device::{Device, Term};
use crate::experts::mapped::{self, Unmapped};
use crate::experts::{HostMemory, Origin, Pinner};
use crate::gpu::{self, DriverError, Memory, Rows};
use crate::lent::Lent;
use crate::memory::{Lease, Use};
use crate::purpose::{Purpose, Role};
use crate::telemetry::log;

/// A buffer of ours.
pub(crate) struct Buffer {
    device: &'static Device,
    storage: Storage,
    dense: AtomicUsize,
    cache: AtomicUsize,
}

enum Storage {
    Device(Leased),
    /// Memory of the inner device that comes and goes, once the buffer is known to hold intermediate results.
    Lent(Arc<Lent>),
    // The pinner is dropped first: it waits for its thread, which uses the memory.
    Host {
        pinner: Pinner,
        memory: Arc<HostMemory>,
        origin: Origin,
    },
}

/// Memory of the inner device that is counted.
#[derive(Debug)]
struct Leased {
    memory: Box<dyn Memory>,
    lease: Lease,
}

impl Memory for Leased {
    fn base(&self) -> usize {
        self.memory.base()
    }

    fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    fn passport(&self) -> Passport {
        self.memory.passport()
    }
}

/// A buffer could not be made or used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BufferError {
    /// The inner device has no memory.
    #[error(
        "{device}: {inner} has no {mib} MiB free; use a smaller context (-c) or batch (-ub), or a larger vram-budget-mb if you set one"
    )]
    NoDeviceMemory { device: String, inner: String, mib: usize },
    /// The host has no memory.
    #[error(
        "{device}: no {mib} MiB of RAM for the experts ({why}); use a smaller model or quantization, or stop other programs"
    )]
    NoHostMemory { device: String, mib: usize, why: String },
    /// The device's driver refused an operation.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// There is no memory for a pass.
    #[error(
        "{device}: {inner} has no {mib} MiB free for this pass, even without the cache; use a smaller micro-batch (-ub)"
    )]
    NoLentMemory { device: String, inner: String, mib: usize },
    /// The host reads bytes that no graph left.
    #[error("{device}: bytes {start:#x}..+{bytes} of a compute buffer are read, and no graph since has touched them")]
    NotThere { device: String, start: usize, bytes: usize },
    /// The host asked for bytes outside the buffer.
    #[error("bytes {start:#x}..+{bytes} of \"{tensor}\" lie outside their buffer")]
    OutOfRange { tensor: String, start: usize, bytes: usize },
}

/// A place that a slot reads from or writes to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// Address in the buffer's own terms.
    pub(crate) address: usize,
    pub(crate) bytes: usize,
}

impl Buffer {
    /// Allocates a buffer of `bytes` bytes, at least one.
    pub(crate) fn new(device: &'static Device, role: Role, bytes: usize) -> Result<Self, BufferError> {
        let storage = match role {
            Role::Default => Self::default_storage(device, bytes)?,
            Role::Experts => {
                let memory = Arc::new(Self::host_memory(device, bytes)?);
                device.note_experts();
                let pinner = Pinner::new(device, Arc::clone(&memory));
                Storage::Host { pinner, memory, origin: Origin::default() }
            }
        };
        let place = match role {
            Role::Default => device.inner_name.as_str(),
            Role::Experts => "RAM, for experts",
        };
        log::debug(&format!("{}: {} MiB of {place}", device.label(), bytes.div_ceil(1 << 20)));
        Ok(Self { device, storage, dense: AtomicUsize::new(0), cache: AtomicUsize::new(0) })
    }

    fn default_storage(device: &'static Device, bytes: usize) -> Result<Storage, BufferError> {
        let allocate = |device: &Device| device.driver().allocate(bytes);
        if device.lends() {
            match Self::leased(device, (Use::Compute, Term::Lasting), bytes, &|device| device.driver().sparse(bytes)) {
                Err(BufferError::Driver(DriverError::Unsupported(_))) => {}
                other => return other.map(|(memory, lease)| Storage::Lent(Arc::new(Lent::new(device, memory, lease)))),
            }
        }
        let (memory, lease) = Self::leased(device, (Use::Compute, Term::Lasting), bytes, &allocate)?;
        Ok(Storage::Device(Leased { memory, lease }))
    }

    /// Memory of the inner device, for a scratch.
    pub(crate) fn device_memory(device: &Device, bytes: usize) -> Result<Box<dyn Memory>, BufferError> {
        let allocate = |device: &Device| device.driver().allocate(bytes);
        let (memory, lease) = Self::leased(device, (Use::Other, Term::Lasting), bytes, &allocate)?;
        Ok(Box::new(Leased { memory, lease }))
    }

    /// Memory of the inner device for a long pass, which the cache has again afterwards.
    pub(crate) fn lent_memory(device: &Device, bytes: usize) -> Result<Box<dyn Memory>, BufferError> {
        let allocate = |device: &Device| device.driver().allocate(bytes);
        let (memory, lease) = Self::leased(device, (Use::Other, Term::Lent), bytes, &allocate)?;
        lease.lend(memory.bytes(), 0);
        Ok(Box::new(Leased { memory, lease }))
    }

    /// Memory of the inner device, and its lease. Where there is none, the cache gives some back.
    fn leased<M: Memory + ?Sized>(
        device: &Device,
        (what, term): (Use, Term),
        bytes: usize,
        allocate: &dyn Fn(&Device) -> Result<Box<M>, DriverError>,
    ) -> Result<(Box<M>, Lease), BufferError> {
        let missing = |within: &str| BufferError::NoDeviceMemory {
            device: device.label().to_owned(),
            inner: format!("{}{within}", device.inner_name),
            mib: bytes.div_ceil(1 << 20),
        };
        let Some(lease) = device.lease_room(what, bytes, term) else {
            return Err(missing(&device.budget_mib().map_or(String::new(), |mib| format!(" (vram-budget-mb={mib})"))));
        };
        let mut tries = 0;
        loop {
            let allocated = if device.allocation_fails(AllocationKind::Device) {
                Err(DriverError::OutOfMemory)
            } else {
                allocate(device)
            };
            match allocated {
                Ok(memory) => {
                    lease.resize(memory.bytes());
                    return Ok((memory, lease));
                }
                Err(DriverError::OutOfMemory) if device.reclaim_for(what, bytes, tries, term) => tries += 1,
                Err(DriverError::OutOfMemory) => return Err(missing("")),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn host_memory(device: &Device, bytes: usize) -> Result<HostMemory, BufferError> {
        let memory = if device.allocation_fails(AllocationKind::Host) {
            Err(std::io::Error::from_raw_os_error(libc::ENOMEM))
        } else {
            HostMemory::map(bytes)
        };
        memory.map_err(|error| BufferError::NoHostMemory {
            device: device.label().to_owned(),
            mib: bytes.div_ceil(1 << 20),
            why: error.to_string(),
        })
    }

    /// The device that the buffer belongs to.
    pub(crate) fn device(&self) -> &'static Device {
        self.device
    }

    /// Address of the first byte.
    pub(crate) fn base(&self) -> usize {
        match &self.storage {
            Storage::Device(memory) => memory.base(),
            Storage::Lent(lent) => lent.memory().base(),
            Storage::Host { memory, .. } => memory.address(),
        }
    }

    /// The device memory behind a default buffer.
    pub(crate) fn memory(&self) -> Option<&dyn Memory> {
        match &self.storage {
            Storage::Device(memory) => Some(memory),
            Storage::Lent(lent) => Some(lent.memory()),
            Storage::Host { .. } => None,
        }
    }

    /// The memory behind an expert buffer.
    pub(crate) fn host(&self) -> Option<&HostMemory> {
        match &self.storage {
            Storage::Device(_) | Storage::Lent(_) => None,
            Storage::Host { memory, .. } => Some(memory),
        }
    }

    /// Whether the device's kernels can read this tensor of an expert buffer where it lies. Asking starts the registration of the
    /// buffer, in the background: graphs ask, and a graph runs only when the loader is done.
    pub(crate) fn reads_in_place(&self, tensor: Tensor<'_>) -> bool {
        match &self.storage {
            Storage::Device(_) | Storage::Lent(_) => false,
            Storage::Host { pinner, memory, .. } => {
                pinner.start();
                let bytes = alloc_size(self.device, Role::Experts, tensor);
                if memory.shows_file(tensor.data(), bytes) {
                    return self.device.driver().reads_host_memory();
                }
                !self.device.slows_link() && pinner.holds(tensor.data(), bytes)
            }
        }
    }

    /// Whether this tensor shows the model's file, and the device's kernels read it there.
    pub(crate) fn stays_in_file(&self, tensor: Tensor<'_>) -> bool {
        self.shows_file(tensor) && self.device.driver().reads_host_memory()
    }

    /// Whether this tensor shows the model's file.
    pub(crate) fn shows_file(&self, tensor: Tensor<'_>) -> bool {
        self.host().is_some_and(|memory| memory.shows_file(tensor.data(), 1))
    }

    /// The place of `bytes` bytes at `offset` of a tensor, checked to lie in this buffer.
    pub(crate) fn place(&self, tensor: Tensor<'_>, offset: usize, bytes: usize) -> Result<Place, BufferError> {
        let start = tensor.data().wrapping_add(offset);
        let inside = tensor.data().checked_add(offset).is_some() && self.contains(start, bytes);
        if inside {
            Ok(Place { address: start, bytes })
        } else {
            Err(BufferError::OutOfRange { tensor: tensor.name(), start, bytes })
        }
    }

    fn contains(&self, address: usize, bytes: usize) -> bool {
        match &self.storage {
            Storage::Device(memory) => memory.contains(address, bytes),
            Storage::Lent(lent) => lent.memory().contains(address, bytes),
            Storage::Host { memory, .. } => memory.contains(address, bytes),
        }
    }

    /// Sets bytes of a tensor.
    pub(crate) fn fill(&self, place: Place, value: u8) -> Result<(), BufferError> {
        if !self.makes_writable(place)? {
            return Ok(());
        }
        if let Some(memory) = self.memory() {
            let target = gpu::Place { memory, address: place.address };
            self.device.driver().fill(target, value, place.bytes)?;
            self.device.driver().synchronize()?;
        } else if let Some(memory) = self.host() {
            memory.fill(place.address, value, place.bytes).map_err(|error| self.no_host_memory(place.bytes, &error))?;
        }
        Ok(())
    }

    /// The memory of a compute buffer that comes and goes.
    pub(crate) fn lent(&self) -> Option<&Arc<Lent>> {
        match &self.storage {
            Storage::Lent(lent) => Some(lent),
            Storage::Device(_) | Storage::Host { .. } => None,
        }
    }

    /// Makes sure that there is memory where the host is about to write. False if there is none: what it writes is lost, and the next graph over
    /// this buffer fails for lack of memory.
    pub(crate) fn makes_writable(&self, place: Place) -> Result<bool, BufferError> {
        self.lent().map_or(Ok(true), |lent| lent.write(place.address, place.bytes))
    }

    /// Refuses to read what no graph and no copy has written.
    pub(crate) fn holds(&self, place: Place, rows: Rows) -> Result<(), BufferError> {
        let Some(lent) = self.lent() else { return Ok(()) };
        (0..rows.count).try_for_each(|row| lent.read(place.address + row * rows.stride, rows.size))
    }

    /// No RAM in place of what shows a file.
    pub(crate) fn no_host_memory(&self, bytes: usize, error: &std::io::Error) -> BufferError {
        BufferError::NoHostMemory {
            device: self.device.label().to_owned(),
            mib: bytes.div_ceil(1 << 20),
            why: error.to_string(),
        }
    }

    /// Whether the host sets a whole tensor of dense weights, as it does while it loads.
    pub(crate) fn loads(&self, tensor: Tensor<'_>, place: Place) -> bool {
        let is_whole = place.address == tensor.data() && place.bytes == tensor.bytes();
        is_whole && self.host().is_none() && self.dense.load(Ordering::Relaxed) > 0
    }

    /// The host sets a whole tensor from memory at `source`. If that is the model's file, mapped, the tensor shows it from now on: returned is
    /// its new address. Otherwise the bytes are to be copied.
    pub(crate) fn show_file(&self, tensor: Tensor<'_>, place: Place, source: usize) -> Option<usize> {
        let Storage::Host { pinner, memory, origin } = &self.storage else { return None };
        if place.address != tensor.data() || place.bytes != tensor.bytes() || tensor.viewed().is_some() {
            return None;
        }
        let show = || {
            if self.device.expert_settings().from == ExpertsFrom::Ram {
                return Err(Unmapped::NotAFile); // asked for, so there is nothing to tell
            }
            memory.show_file(place.address, source, place.bytes, |pages| {
                origin.wants_file(self.device, memory)?;
                if pinner.needs(pages, place.address) { Err(Unmapped::NoRoom) } else { Ok(()) }
            })
        };
        match show() {
            Ok(address) => {
                pinner.remove(place.address);
                Some(address)
            }
            Err(why) => {
                origin.tell_copied(self.device, &why);
                None
            }
        }
    }

    /// Sets the whole buffer.
    pub(crate) fn clear(&self, value: u8) -> Result<(), BufferError> {
        let bytes = match &self.storage {
            Storage::Device(memory) => memory.bytes(),
            Storage::Lent(lent) => lent.memory().bytes(),
            Storage::Host { memory, .. } => memory.bytes(),
        };
        self.fill(Place { address: self.base(), bytes }, value)
    }

    /// A tensor was given its place: takes note of its purpose, and zeroes the padding behind it unless `scratch` says that the
    /// buffer holds intermediate results, whose owner pads for itself.
    pub(crate) fn init_tensor(&self, tensor: Tensor<'_>, role: Role, scratch: bool) -> Result<(), BufferError> {
        if scratch && let Some(lent) = self.lent() {
            lent.begin()?;
        }
        if tensor.viewed().is_some() {
            if let Storage::Host { origin, .. } = &self.storage {
                origin.note_view();
            }
            return Ok(());
        }
        let bytes = tensor.bytes();
        if let Storage::Host { pinner, .. } = &self.storage {
            pinner.add(tensor.data(), alloc_size(self.device, role, tensor));
        }
        match Purpose::of(&tensor.name(), role) {
            Purpose::Dense => {
                self.used_for(Use::Dense);
                self.dense.fetch_add(bytes, Ordering::Relaxed);
                self.device.note_dense_loaded(bytes);
            }
            Purpose::Cache => {
                self.used_for(Use::Kv);
                self.cache.fetch_add(bytes, Ordering::Relaxed);
            }
            Purpose::Expert | Purpose::Compute => {}
        }
        if scratch {
            return Ok(());
        }
        let padding = alloc_size(self.device, role, tensor).saturating_sub(bytes);
        // Pages that nobody has written to are zero, and stay untouched: a tensor that shows its file needs none.
        if padding > 0 && !self.host().is_some_and(HostMemory::is_fresh) {
            let place = self.place(tensor, bytes, padding)?;
            if self.device.debug_pad() > 0 {
                self.fill(place, 0xff)?;
            }
            self.fill(place, 0)?;
        }
        Ok(())
    }

    fn used_for(&self, what: Use) {
        match &self.storage {
            Storage::Device(memory) => memory.lease.used_for(what),
            Storage::Lent(lent) => lent.used_for(what),
            Storage::Host { .. } => {}
        }
    }

    /// The host is about to lay its tensors out anew.
    pub(crate) fn reset(&self) {
        self.dense.store(0, Ordering::Relaxed);
        self.cache.store(0, Ordering::Relaxed);
        if let Storage::Host { memory, .. } = &self.storage {
            memory.reuse();
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.host().is_some() {
            self.device.drop_cache(); // it loads from this memory
        }
        let (dense, cache) = (self.dense.load(Ordering::Relaxed), self.cache.load(Ordering::Relaxed));
        if dense + cache > 0 {
            log::debug(&format!(
                "{}: freed a buffer with {} MiB of dense weights and {} MiB of KV",
                self.device.label(),
                dense >> 20,
                cache >> 20
            ));
        }
    }
}

/// Bytes that a tensor takes in a buffer of ours. Device kernels may read or write behind a tensor, so the inner device's own
/// answer counts, in both buffer types: an expert is copied to the device as it lies here.
pub(crate) fn alloc_size(device: &Device, role: Role, tensor: Tensor<'_>) -> usize {
    let inner = device.inner_buffer_type.alloc_size(tensor);
    let may_pad = role == Role::Default && crate::abi::host().is_quantized(tensor.type_());
    if may_pad { inner + device.debug_pad() } else { inner }
}

/// Bytes that the host is told that a tensor takes: experts may move a little within, to where whole pages of their file fit.
pub(crate) fn room_size(device: &Device, role: Role, tensor: Tensor<'_>) -> usize {
    let moves = role == Role::Experts && device.expert_settings().from != ExpertsFrom::Ram;
    alloc_size(device, role, tensor) + if moves { mapped::slack_bytes() } else { 0 }
}

/// Bytes that the loader's tensors take in a buffer, each aligned. Takes note of the size of the dense weights on the way.
pub(crate) fn alloc_size_all(device: &Device, role: Role, tensors: &[Tensor<'_>]) -> usize {
    let alignment = device.inner_buffer_type.alignment();
    let unplaced = tensors.iter().filter(|tensor| tensor.data() == 0 && tensor.viewed().is_none());
    let total = unplaced.map(|tensor| room_size(device, role, *tensor).next_multiple_of(alignment)).sum();
    let dense = tensors.iter().any(|tensor| Purpose::of(&tensor.name(), role) == Purpose::Dense);
    if role == Role::Default && dense {
        device.note_dense_size(total);
    }
    total
}
