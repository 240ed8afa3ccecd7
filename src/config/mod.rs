//! The plugin's settings: one table of keys, one parser, one resolved value.
//!
//! Owns: the key table (`keys`), the syntax of `GGML_MOE` (`parse`) and the resolved [`Config`].
//! Invariants: a `Config` always holds valid values; a bad key or value is ignored and yields one [`Notice`].
//! Threads: none; everything here is a pure function of its input.
//! Does not: read the environment or print (the entry point does), or know any host type.

mod expert_keys;
mod experts;
mod idle;
mod keys;
#[cfg(test)]
mod keys_tests;
mod lend_keys;
mod parse;
mod pass_keys;
mod preload_keys;
mod staging_keys;
mod values;

pub use experts::{ExpertSettings, ExpertsFrom, PolicyOrder, StateFile};
pub(crate) use idle::Lacking;
pub use keys::{KEYS, Key, markdown};
pub use parse::shown;
pub use parse::{Notice, parse};
pub(crate) use parse::{merged, turns_line};
pub use staging_keys::Staging;

/// How much the plugin tells. Lines up to this detail are shown; the rest follows the host's own filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogDetail {
    /// Only what went wrong.
    Error,
    /// Also what was decided and why, once.
    Notice,
    /// Also what each load and context did.
    Info,
    /// Also one JSON summary per backend, the plan of each new graph, and the length of each pass of a prompt.
    Debug,
}

/// How a part of the host's graph is handed to the inner backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GraphMode {
    /// A view that shares the host graph's node array, use counts and hash set: fusion keeps working.
    View,
    /// A graph built node by node through ggml's public functions: no fusion, needs no private layout.
    AddNode,
}

/// Which allocations the fault injection of the tests makes fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocationKind {
    /// Memory of the inner device.
    Device,
    /// The host memory of an expert buffer.
    Host,
    /// The registration of host memory with a device.
    Pin,
    /// Memory behind a part of a compute buffer.
    Map,
    /// The same, for good.
    Lend,
}

/// What the tests make the CUDA driver look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaFault {
    /// No libcuda.
    Absent,
    /// A release that is too old.
    Old,
    /// A device that cannot map memory into reserved addresses.
    NoVmm,
}

/// Every n-th allocation of one kind fails (tests only).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocationFault {
    /// The kind of allocation that fails.
    pub kind: AllocationKind,
    /// Every how many allocations; at least 1.
    pub every: u32,
}

/// How much of the device's memory experts may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheSize {
    /// What is free, less the reserve.
    Auto,
    /// None.
    Off,
    /// So many MiB.
    Mib(usize),
    /// Room for so many experts of each layer.
    SlotsPerLayer(u32),
}

/// The most tokens that a block computes at once in a long pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SliceTokens {
    /// By the model, where it is worth it.
    #[default]
    Auto,
    /// All of a pass.
    Off,
    /// So many.
    Most(u32),
}

/// What passes of more than 8 tokens do that do not bring all experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MiddlePasses {
    /// What the cost model says.
    Auto,
    /// The experts that are used are brought.
    Fetch,
    /// The device computes with what the cache holds, the processor with the rest.
    Cpu,
    /// The device reads experts where they are, or they are copied before each product.
    Place,
}

/// Whether and where the counters can be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Socket {
    /// Nowhere.
    Off,
    /// In a private folder, once there is a cache.
    Auto,
    /// In this file.
    Path(std::path::PathBuf),
}

/// The resolved settings of this process.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Keys that were set to something usable, each once.
    pub given: Vec<&'static str>,
    /// Names of the devices to put a proxy in front of, in order; empty means every GPU.
    pub inner: Vec<String>,
    /// How much is logged.
    pub log: LogDetail,
    /// Share of the memory beside the dense weights that an unset context may claim, 0 to 1.
    pub ctx_share: f64,
    /// The most host memory that is registered for direct reading, in MiB; `None` is three quarters of the RAM.
    pub pin_budget_mb: Option<u64>,
    /// Device memory for experts.
    pub cache: CacheSize,
    /// Device memory that the cache leaves free, in MiB.
    pub vram_reserve_mb: u64,
    /// Tokens of a pass from which on all experts are brought to the device; `None` leaves it to the cost model.
    pub stream_min_tokens: Option<u64>,
    /// What passes between those of single tokens and those do.
    pub middle_passes: MiddlePasses,
    /// The most tokens that a block computes at once in a long pass.
    pub slice_tokens: SliceTokens,
    /// The most device memory of all that is ours, in MiB; `None` is what is free.
    pub vram_budget_mb: Option<u64>,
    /// Whether compute buffers have memory only for what graphs touch.
    pub lend: bool,
    /// Tokens of a pass of a model that the preload helps; `None` is what the host does.
    pub pass_tokens: Option<u32>,
    /// Whether batches of a model that the preload helps are cut into passes of equal length.
    pub equal_passes: bool,
    /// Threads that fill the mask of a long pass where the library is preloaded; `None` is as many as compute.
    pub mask_threads: Option<u32>,
    /// Threads that compute experts in RAM; `None` is what the host uses.
    pub threads: Option<u32>,
    /// The same in passes of several tokens; `None` is as `threads`.
    pub prompt_threads: Option<u32>,
    /// What is learned, how uploads are bounded, who decides.
    pub experts: ExpertSettings,
    /// Where the counters can be read.
    pub socket: Socket,
    /// A preset of the simulator whose routing replaces the model's (benchmarks only).
    pub replay: Option<&'static crate::sim::Preset>,
    /// Where the times of long passes are written (benchmarks only).
    pub timeline: Option<std::path::PathBuf>,
    /// What the staging of long passes holds, whatever is free (tests only).
    pub debug_staging: Option<Staging>,
    /// What the CUDA driver is made to look like (tests only).
    pub debug_cuda: Option<CudaFault>,
    /// The slot that panics at every call (tests only).
    pub debug_panic: Option<String>,
    /// The allocations that fail (tests only).
    pub debug_fail_alloc: Option<AllocationFault>,
    /// How graph parts are handed on; `None` lets the self-check of the graph layout decide.
    pub debug_graph: Option<GraphMode>,
    /// Whether expert weights may lie in device memory like any other weight (tests only).
    pub debug_experts_on_device: bool,
    /// Whether the memory of a cache has one size (tests only).
    pub debug_fixed_memory: bool,
    /// Extra bytes behind every quantized tensor, poisoned before the padding rule zeroes them (tests only).
    pub debug_pad: usize,
    /// Seed of the delays of copies that are late on purpose (tests only).
    pub debug_late: Option<u32>,
    /// The size of chunks in MiB in which memory counts as registered that no driver registers (tests only).
    pub debug_pins: Option<usize>,
    /// What plans take for the free RAM, in MiB (tests only).
    pub debug_ram_mb: Option<u64>,
    /// Whether memory of the cache that nobody may read is poisoned (tests only).
    pub debug_poison: bool,
    /// Whether lending is pretended only (tests only).
    pub debug_map_all: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            given: Vec::new(),
            inner: Vec::new(),
            log: LogDetail::Notice,
            ctx_share: 0.30,
            pin_budget_mb: None,
            cache: CacheSize::Auto,
            vram_reserve_mb: 384,
            stream_min_tokens: None,
            middle_passes: MiddlePasses::Auto,
            slice_tokens: SliceTokens::Auto,
            vram_budget_mb: None,
            lend: true,
            pass_tokens: None,
            equal_passes: true,
            mask_threads: None,
            threads: None,
            prompt_threads: None,
            experts: ExpertSettings::default(),
            socket: Socket::Auto,
            replay: None,
            timeline: None,
            debug_staging: None,
            debug_cuda: None,
            debug_panic: None,
            debug_fail_alloc: None,
            debug_graph: None,
            debug_experts_on_device: false,
            debug_fixed_memory: false,
            debug_pad: 0,
            debug_late: None,
            debug_pins: None,
            debug_ram_mb: None,
            debug_poison: false,
            debug_map_all: false,
        }
    }
}

impl Config {
    /// Whether a key was set.
    pub fn is_given(&self, name: &str) -> bool {
        self.given.contains(&name)
    }

    /// Whether the user asked for a cache, so that there is one also where other settings speak against it.
    pub fn asks_for_cache(&self) -> bool {
        self.cache != CacheSize::Off && (self.is_given("cache") || self.is_given("moe-expert-cache"))
    }
}
