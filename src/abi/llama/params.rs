//! The parameters that llama.cpp's functions for models and contexts take by value, where the caller put them.
//!
//! Owns: the places of the fields that the preload reads or sets, for the releases that it knows.
//! Invariants: a release is told by what its own function for default values writes; where that is not what is known, there are no
//! parameters. Threads: any. Does not: call anything of llama.cpp's but those two functions.

use core::ffi::{CStr, c_void};
use std::sync::OnceLock;

use super::in_order;

/// More bytes than any release writes.
const ROOM: usize = 512;

/// What a function for default values wrote, and up to which byte.
struct Defaults {
    bytes: [u8; ROOM],
    extent: usize,
}

impl Defaults {
    /// Calls a function for default values twice, over different bytes: what is equal afterwards was written.
    fn of(name: &CStr) -> Option<Self> {
        /// A struct of this size is returned by way of a pointer, which is passed as if it were the first argument.
        type Function = unsafe extern "C" fn(*mut [u8; ROOM]) -> *mut c_void;
        let function = in_order(name);
        if function.is_null() {
            return None;
        }
        // SAFETY: the exported function of this name returns a struct in memory, whose address the caller passes.
        let function = unsafe { core::mem::transmute::<*mut c_void, Function>(function) };
        let [first, second] = [0xa5, 0x5a].map(|fill| {
            let mut bytes = [fill; ROOM];
            // SAFETY: room for more than the struct.
            unsafe { function(&raw mut bytes) };
            bytes
        });
        let extent = first.iter().zip(&second).rposition(|(first, second)| first == second)? + 1;
        Some(Self { bytes: first, extent })
    }

    fn word(&self, at: usize) -> u32 {
        self.bytes.get(at..at + 4).and_then(|word| word.try_into().ok()).map_or(u32::MAX, u32::from_ne_bytes)
    }

    fn flags(&self, at: usize) -> &[u8] {
        self.bytes.get(at..at + 6).unwrap_or_default()
    }

    /// Where the flags of a model's parameters lie, if this is a layout that is known.
    fn model_flags(&self) -> Option<usize> {
        // b10434 and its neighbours; b11434 has one field more. Six flags, of which use_extra_bufts is on.
        let flags = [0x40, 0x48].into_iter().find(|flags| (flags + 6..=flags + 8).contains(&self.extent))?;
        let heads = self.bytes[..16].iter().all(|byte| *byte == 0) && self.word(16) == u32::MAX && self.word(20) == 1;
        (heads && self.flags(flags) == [0, 0, 1, 0, 0, 0]).then_some(flags)
    }

    /// Whether the first fields of a context's parameters are those that are known.
    fn is_known_context(&self) -> bool {
        [self.word(0), self.word(4), self.word(8), self.word(12)] == [512, HOST_BATCH, HOST_MICRO_BATCH, 1]
    }

    /// Whether all of a context's parameters lie where b11434 has them.
    fn is_whole_context(&self) -> bool {
        // No rope scaling, pooling, attention or flash attention chosen; offload_kqv, no_perf, op_offload and swa_full are on.
        let open = [40, 44, 48, 52].into_iter().all(|at| self.word(at) == u32::MAX);
        let empty = |range: core::ops::Range<usize>| self.bytes[range].iter().all(|byte| *byte == 0);
        self.is_known_context()
            && self.extent == CONTEXT_BYTES
            && open
            && empty(CALLBACK..CALLBACK + 16)
            && self.flags(EMBEDDINGS) == [0, 1, 1, 1, 1, 0]
            && empty(136..CONTEXT_BYTES)
    }
}

/// The host's numbers for its own choice of a load mode, and for a mapped file.
const LOAD_AUTO: i32 = -1;
const LOAD_MAPPED: i32 = 1;
/// Size of a context's parameters in b11434, and places of its type, its callback for tensors and its flag for embeddings.
pub(super) const CONTEXT_BYTES: usize = 160;
const CONTEXT_TYPE: usize = 36;
const CALLBACK: usize = 88;
const EMBEDDINGS: usize = 128;
/// The host's own lengths of batches.
const HOST_BATCH: u32 = 2048;
const HOST_MICRO_BATCH: u32 = 512;

/// Whether the whole layout of a context's parameters is known, not only the first fields.
pub(super) fn is_whole_context() -> bool {
    static WHOLE: OnceLock<bool> = OnceLock::new();
    let whole = || Defaults::of(c"llama_context_default_params").is_some_and(|it| it.is_whole_context());
    *WHOLE.get_or_init(whole)
}

/// A caller's parameters of a model.
pub(crate) struct ModelParams {
    base: *mut u8,
    flags: usize,
}

impl ModelParams {
    /// The parameters at this address; `None` if the host's layout is not known.
    ///
    /// # Safety
    /// A caller put the host's parameters of a model there, as an argument by value of a call that has not begun.
    pub(super) unsafe fn of(base: *mut u8) -> Option<Self> {
        static FLAGS: OnceLock<Option<usize>> = OnceLock::new();
        let flags = *FLAGS.get_or_init(|| Defaults::of(c"llama_model_default_params")?.model_flags());
        Some(Self { base, flags: flags? })
    }

    fn read<T: Copy>(&self, at: usize) -> T {
        // SAFETY: a field of the struct, by the contract of `of` and its layout.
        unsafe { self.base.wrapping_add(at).cast::<T>().read_unaligned() }
    }

    /// Only the vocabulary is loaded.
    pub(crate) fn is_vocabulary(&self) -> bool {
        self.read::<u8>(self.flags) != 0
    }

    /// Nothing is loaded: the host wants to know what it would take.
    pub(crate) fn is_trial(&self) -> bool {
        self.read::<u8>(self.flags + 4) != 0
    }

    /// The caller names devices.
    pub(crate) fn names_devices(&self) -> bool {
        !self.read::<*const c_void>(0).is_null()
    }

    /// The caller names buffer types for tensors. A list may be there without an entry.
    pub(crate) fn overrides_tensors(&self) -> bool {
        let list = self.read::<*const *const c_void>(8);
        // SAFETY: a list has an entry at least, the one that ends it.
        !list.is_null() && !unsafe { list.read() }.is_null()
    }

    /// How many layers are to lie on devices; negative is the host's choice.
    pub(crate) fn layers_on_devices(&self) -> i32 {
        self.read(16)
    }

    /// Whether layers are what is split between devices, or nothing is.
    pub(crate) fn splits_layers_or_nothing(&self) -> bool {
        matches!(self.read::<i32>(20), 0 | 1)
    }

    /// How the file is to be loaded, as a number of the host's.
    fn load_mode(&self) -> i32 {
        self.read(24)
    }

    /// Whether how the file is loaded is the host's choice.
    pub(crate) fn leaves_load_mode(&self) -> bool {
        self.load_mode() == LOAD_AUTO
    }

    /// Has the file mapped.
    pub(crate) fn map_file(&mut self) {
        // SAFETY: the field behind the way to split; arguments by value belong to the function that is called.
        unsafe { self.base.wrapping_add(24).cast::<i32>().write_unaligned(LOAD_MAPPED) };
    }

    /// Names devices: a list that ends with null and lives for ever.
    pub(crate) fn set_devices(&mut self, devices: &'static DeviceList) {
        let list: *const *mut c_void = devices.0.as_ptr();
        // SAFETY: the first field; arguments by value belong to the function that is called.
        unsafe { self.base.cast::<*const *mut c_void>().write_unaligned(list) };
    }
}

/// Devices as the host takes them: pointers, the last null.
pub(crate) struct DeviceList(Vec<*mut c_void>);

impl DeviceList {
    pub(in crate::abi) fn new(mut devices: Vec<*mut c_void>) -> Self {
        devices.push(core::ptr::null_mut());
        Self(devices)
    }
}

// SAFETY: devices are immortal objects that any thread may name.
unsafe impl Send for DeviceList {}
// SAFETY: as above.
unsafe impl Sync for DeviceList {}

/// A caller's parameters of a context.
pub(crate) struct ContextParams {
    base: *mut u32,
}

impl ContextParams {
    /// The parameters at this address; `None` if the host's layout is not known.
    ///
    /// # Safety
    /// As for [`ModelParams::of`], with parameters of a context.
    pub(super) unsafe fn of(base: *mut u8) -> Option<Self> {
        static KNOWN: OnceLock<bool> = OnceLock::new();
        let known = || Defaults::of(c"llama_context_default_params").is_some_and(|it| it.is_known_context());
        KNOWN.get_or_init(known).then_some(Self { base: base.cast() })
    }

    /// Whether batch and micro-batch have the lengths that the host gives them.
    pub(crate) fn has_host_lengths(&self) -> bool {
        // SAFETY: the second field.
        let batch = unsafe { self.base.wrapping_add(1).read_unaligned() };
        // SAFETY: the third field.
        let micro_batch = unsafe { self.base.wrapping_add(2).read_unaligned() };
        (batch, micro_batch) == (HOST_BATCH, HOST_MICRO_BATCH)
    }

    /// Whether more than the outputs of batches is read of the context, or it is one of a special type. Only where the layout is known.
    pub(super) fn reads_more(&self) -> bool {
        let bytes = self.base.cast::<u8>();
        // SAFETY: a field of the struct, by `is_whole`.
        let kind = unsafe { bytes.wrapping_add(CONTEXT_TYPE).cast::<u32>().read_unaligned() };
        // SAFETY: as above.
        let callback = unsafe { bytes.wrapping_add(CALLBACK).cast::<*const c_void>().read_unaligned() };
        // SAFETY: as above.
        let embeds = unsafe { bytes.wrapping_add(EMBEDDINGS).read() };
        kind != 0 || !callback.is_null() || embeds != 0
    }

    /// Makes a micro-batch so long, and a batch no shorter, and as long as `count` of them.
    pub(crate) fn set_pass(&mut self, tokens: u32, count: u32) {
        // SAFETY: the second field.
        unsafe { self.base.wrapping_add(1).write_unaligned(tokens.saturating_mul(count).max(HOST_BATCH)) };
        // SAFETY: the third field.
        unsafe { self.base.wrapping_add(2).write_unaligned(tokens) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn defaults(flags: usize) -> Defaults {
        let mut bytes = [0; ROOM];
        bytes[16..20].fill(0xff);
        bytes[20] = 1;
        bytes[flags + 2] = 1;
        Defaults { bytes, extent: flags + 6 }
    }

    #[test]
    fn layouts_are_told_by_what_defaults_write() {
        assert_eq!(defaults(0x40).model_flags(), Some(0x40));
        assert_eq!(defaults(0x48).model_flags(), Some(0x48));
        assert_eq!(defaults(0x50).model_flags(), None);
        // Releases before b10434 have use_mmap where that has check_tensors.
        let mut older = defaults(0x40);
        older.bytes[0x41] = 1;
        older.extent = 0x48;
        assert_eq!(older.model_flags(), None);
        let mut fields = defaults(0x40);
        fields.bytes[20] = 2;
        assert_eq!(fields.model_flags(), None);
    }

    #[test]
    fn contexts_are_told_by_their_first_fields() {
        let mut bytes = [0; ROOM];
        for (at, value) in [512_u32, 2048, 512, 1].into_iter().enumerate() {
            bytes[at * 4..at * 4 + 4].copy_from_slice(&value.to_ne_bytes());
        }
        assert!(Defaults { bytes, extent: 160 }.is_known_context());
        bytes[4] = 1;
        assert!(!Defaults { bytes, extent: 160 }.is_known_context());
    }

    #[test]
    fn whole_contexts_are_told_by_all_fields() {
        let mut bytes = [0; ROOM];
        for (at, value) in [512_u32, 2048, 512, 1].into_iter().enumerate() {
            bytes[at * 4..at * 4 + 4].copy_from_slice(&value.to_ne_bytes());
        }
        bytes[40..56].fill(0xff);
        bytes[EMBEDDINGS..EMBEDDINGS + 6].copy_from_slice(&[0, 1, 1, 1, 1, 0]);
        assert!(Defaults { bytes, extent: CONTEXT_BYTES }.is_whole_context());
        for (at, extent) in [(0, 152), (EMBEDDINGS, CONTEXT_BYTES), (CALLBACK, CONTEXT_BYTES), (40, CONTEXT_BYTES)] {
            let mut other = bytes;
            other[at] ^= 1;
            assert!(!Defaults { bytes: other, extent }.is_whole_context(), "{at}");
        }
    }
}
