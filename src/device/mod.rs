//! Devices: one `MoE<i>` in front of each inner device.
//!
//! Owns: the rules of placement (which weights the default buffer type refuses, which ops run here), the memory report and the
//! poison flag of a device.
//! Invariants: a device lives as long as the process; once poisoned it stays so and every graph on it fails.
//! Threads: any. Small locks and atomics hold what the loader's questions and the memory report share; none is held across a call.
//! Does not: allocate (`buffer` does) or run graphs (`backend` does).

mod experts;
mod held;
mod memory;
mod passes;
mod pinned;

use std::ffi::CString;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::abi::OpClass;
use crate::abi::inner::{self, DeviceKind};
use crate::abi::tensor::{BufferTypeKey, Tensor};
use crate::config::{AllocationKind, CacheSize, Config, Lacking};
use crate::gpu::{self, Driver};
use crate::telemetry::{Board, log, service};

use experts::Experts;
use memory::Budget;
pub(crate) use memory::{CacheRoom, Term};
pub(crate) use passes::PassLoad;
use passes::Passes;

/// What a device does with what it is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Experts in host memory, graphs cut at their products.
    Proxy,
    /// Everything goes to the inner device as it is, for the reason given.
    PassThrough(String),
    /// As [`Mode::PassThrough`], and with the inner device's own buffer types: its code relies on its own buffer objects.
    Lend(String),
}

/// A device of ours.
pub(crate) struct Device {
    /// `MoE<index>`.
    pub(crate) name: CString,
    pub(crate) description: CString,
    pub(crate) inner: inner::Device,
    /// Name of the inner device.
    pub(crate) inner_name: String,
    /// The inner device's own buffer type.
    pub(crate) inner_buffer_type: inner::BufferType,
    pub(crate) mode: Mode,
    rule: KindRule,
    kind: OnceLock<DeviceKind>,
    config: &'static Config,
    dense: Mutex<DenseSize>,
    /// What was last reported as free, in bytes.
    reported: AtomicUsize,
    /// Whether that was the least that is ever reported.
    reported_least: AtomicBool,
    /// What a plan has beside dense weights, in bytes: the least that is reported, if it is there.
    planned: AtomicUsize,
    allocations: AtomicU32,
    poisoned: AtomicBool,
    told_poison: AtomicBool,
    announced: AtomicBool,
    /// Whether experts were ever placed in our host memory.
    kept_experts: AtomicBool,
    driver: OnceLock<Box<dyn Driver>>,
    /// Whether the inner backend captures parts of graphs as CUDA graphs.
    pub(crate) captures_graphs: bool,
    /// Whether the inner backend's code looks for its own object behind the buffer of each tensor.
    lends_contexts: bool,
    /// Why the driver is not the one for this kind of device, if so, and what the link was made to look like.
    driver_lines: OnceLock<Vec<String>>,
    layout_epoch: AtomicU64,
    experts: Experts,
    passes: Passes,
    budget: Budget,
    /// What is told of its work.
    pub(crate) board: &'static Board,
}

/// Our two buffer types of one device, as the host knows them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BufferTypes {
    /// Over the inner device's memory.
    pub(crate) default: BufferTypeKey,
    /// Host memory for experts; absent when everything is passed through.
    pub(crate) experts: Option<BufferTypeKey>,
}

/// How a reason begins that is a fault of the settings.
pub(crate) const SETTING_FAULT: &str = "settings: ";

/// Smallest room beside the dense weights that is reported as free: a context of 4,096 tokens and the compute buffers of
/// today's models fit, so that llama.cpp's fit step never moves a layer away.
const SMALLEST_ROOM: usize = 2 << 30;

impl Device {
    /// A device in front of `inner`.
    pub(crate) fn new(
        index: usize,
        inner: inner::Device,
        inner_buffer_type: inner::BufferType,
        mode: Mode,
        rule: KindRule,
        config: &'static Config,
    ) -> Self {
        let inner_name = inner.name();
        let purpose = match mode {
            Mode::Proxy => "experts in RAM",
            Mode::PassThrough(_) | Mode::Lend(_) => "passes through",
        };
        let description = format!("MoE over {inner_name} ({}), {purpose}", inner.description());
        let board = Board::new(format!("MoE{index}"), inner_name.clone());
        Self {
            name: CString::new(format!("MoE{index}")).unwrap_or_default(),
            description: CString::new(description.replace('\0', "?")).unwrap_or_default(),
            inner,
            inner_name,
            inner_buffer_type,
            mode,
            rule,
            kind: OnceLock::new(),
            config,
            dense: Mutex::new(DenseSize::default()),
            reported: AtomicUsize::new(0),
            reported_least: AtomicBool::new(false),
            planned: AtomicUsize::new(0),
            allocations: AtomicU32::new(0),
            poisoned: AtomicBool::new(false),
            told_poison: AtomicBool::new(false),
            announced: AtomicBool::new(false),
            kept_experts: AtomicBool::new(false),
            driver: OnceLock::new(),
            captures_graphs: inner.provider() == "CUDA",
            lends_contexts: inner.provider() == "Vulkan",
            driver_lines: OnceLock::new(),
            layout_epoch: AtomicU64::new(1),
            experts: Experts::default(),
            passes: Passes::default(),
            budget: Budget::default(),
            board,
        }
    }

    /// The name as text.
    pub(crate) fn label(&self) -> &str {
        self.name.to_str().unwrap_or("MoE?")
    }

    /// Whether everything goes to the inner device as it is.
    pub(crate) fn passes_through(&self) -> bool {
        !matches!(self.mode, Mode::Proxy)
    }

    /// Whether the host gets the inner device's own buffer types.
    pub(crate) fn lends_inner_types(&self) -> bool {
        matches!(self.mode, Mode::Lend(_))
    }

    /// Whether a default buffer of ours must carry the context of the inner buffer that it is made of.
    pub(crate) fn lends_contexts(&self) -> bool {
        self.lends_contexts
    }

    /// The kind that is reported; asked for late, because some devices open a context to answer.
    pub(crate) fn kind(&self) -> DeviceKind {
        *self.kind.get_or_init(|| self.rule.kind(self.inner.kind(), self.inner.has_id()))
    }

    /// Whether this device runs the node. `types` are its own buffer types.
    ///
    /// The loader asks with a buffer of no bytes whether a weight could lie there: expert weights (three-dimensional, used by
    /// `MUL_MAT_ID`) are refused in device memory and so go to the expert buffer; their one-dimensional companions stay.
    /// Over the expert buffer only `MUL_MAT_ID` and changes of view run here; anything else runs on the CPU, because a device
    /// kernel must not read host memory that it does not know.
    pub(crate) fn supports_op(&self, node: Tensor<'_>, types: BufferTypes) -> bool {
        if self.passes_through() {
            return self.inner.supports_op(node);
        }
        let class = node.op_class();
        if class == OpClass::View {
            return true;
        }
        if class == OpClass::ExpertProduct
            && !self.config.debug_experts_on_device
            && let Some(weight) = node.source(0)
            && let Some(buffer) = weight.buffer()
            && buffer.type_ == types.default
            && buffer.is_probe
            && weight.ne()[2] > 1
        {
            return false;
        }
        let over_experts =
            |tensor: Tensor<'_>| tensor.buffer().is_some_and(|buffer| Some(buffer.type_) == types.experts);
        let mut expert_sources = (0..).map_while(|index| (index < 10).then(|| node.source(index))).enumerate();
        let declined = over_experts(node)
            || expert_sources.any(|(index, source)| {
                source.is_some_and(over_experts) && !(index == 0 && class == OpClass::ExpertProduct)
            });
        !declined && self.inner.supports_op(node)
    }

    /// The loader asked how large dense weights are; it asks for all of them before it asks for the free memory.
    pub(crate) fn note_dense_size(&self, bytes: usize) {
        self.dense.lock().ask(bytes);
    }

    /// Dense weights were given their place; from now on the inner device's own figure lacks them.
    pub(crate) fn note_dense_loaded(&self, bytes: usize) {
        self.dense.lock().load(bytes);
    }

    /// Free and total memory as the host is told, in bytes; see [`reported_free`].
    pub(crate) fn memory(&self) -> (usize, usize) {
        if self.passes_through() {
            return self.inner.memory();
        }
        let (free, total) = self.free_and_total();
        if self.account().leased(crate::memory::Use::Kv) > 0 {
            return (free.max(1 << 20), total); // nothing is fitted any more, and the host's last words are to be true
        }
        let dense = self.dense.lock().settle();
        let planned = dense.saturating_add(self.planned.load(Ordering::Relaxed));
        let reported = reported_free(free, dense, self.config.ctx_share).max(planned.min(free));
        self.reported.store(reported, Ordering::Relaxed);
        self.reported_least.store(reported == dense.saturating_add(SMALLEST_ROOM), Ordering::Relaxed);
        (reported, total)
    }

    /// What the inner device is.
    pub(crate) fn inner_description(&self) -> String {
        self.inner.description()
    }

    /// Whether the fault injection of the tests makes this allocation fail; counts it.
    pub(crate) fn allocation_fails(&self, kind: AllocationKind) -> bool {
        let Some(fault) = self.config.debug_fail_alloc.filter(|fault| fault.kind == kind) else {
            return false;
        };
        let number = self.allocations.fetch_add(1, Ordering::Relaxed) + 1;
        number.is_multiple_of(fault.every)
    }

    /// Extra padding behind quantized tensors (tests only), in bytes.
    pub(crate) fn debug_pad(&self) -> usize {
        self.config.debug_pad
    }

    /// Something went wrong that the host could not be told about: every later graph on this device fails.
    pub(crate) fn poison(&self) {
        self.poisoned.store(true, Ordering::Release);
    }

    /// True once: the first time that a poisoned device is used, so that it is told once.
    pub(crate) fn tells_poison(&self) -> bool {
        !self.told_poison.swap(true, Ordering::Relaxed)
    }

    /// Whether [`Device::poison`] was called.
    pub(crate) fn is_poisoned(&self) -> bool {
        self.poisoned.load(Ordering::Acquire)
    }

    /// The driver of the inner device's memory; opened at the first use, because loading the plugin must touch no device.
    pub(crate) fn driver(&self) -> &dyn Driver {
        let driver = self.driver.get_or_init(|| {
            let Config { debug_cuda, debug_late, ref experts, debug_pins, .. } = *self.config;
            let options = gpu::Options {
                fault: debug_cuda,
                late: debug_late,
                link_gbs: experts.link_gbs,
                pins: debug_pins.is_some(),
            };
            let (driver, lines) = gpu::open(&self.inner, self.inner_buffer_type, options);
            // Told with the first graph; nobody else sets it, since the driver is opened once.
            let _ = self.driver_lines.set(lines);
            driver
        });
        &**driver
    }

    /// The driver, if it was opened.
    pub(crate) fn opened_driver(&self) -> Option<&dyn Driver> {
        self.driver.get().map(|driver| &**driver)
    }

    /// The memory behind graphs was laid out anew or freed: plans made before are void.
    pub(crate) fn bump_layout_epoch(&self) {
        self.layout_epoch.fetch_add(1, Ordering::Release);
    }

    /// Counts [`Device::bump_layout_epoch`].
    pub(crate) fn layout_epoch(&self) -> u64 {
        self.layout_epoch.load(Ordering::Acquire)
    }

    /// Experts were placed in our host memory.
    pub(crate) fn note_experts(&self) {
        self.kept_experts.store(true, Ordering::Relaxed);
    }

    /// Tells once what this device does and why.
    pub(crate) fn announce(&self) {
        if self.announced.swap(true, Ordering::Relaxed) {
            return;
        }
        service::start(&self.config.socket, false);
        match &self.mode {
            Mode::PassThrough(reason) | Mode::Lend(reason) => {
                let line = format!("{} passes everything through to {}: {reason}", self.label(), self.inner_name);
                // A setting that cannot be used is a fault of its own, and llama-cli shows errors only.
                if reason.starts_with(SETTING_FAULT) { log::error(&line) } else { log::notice(&line) }
            }
            Mode::Proxy => {
                if self.reported.load(Ordering::Relaxed) == 0 {
                    self.memory(); // a host that never asked gets the same answer
                }
                let reported = self.reported.load(Ordering::Relaxed) >> 20;
                let experts = if self.kept_experts.load(Ordering::Relaxed) {
                    "experts stay in RAM"
                } else {
                    "it keeps no experts in RAM (none were placed in its expert buffer: the model or this device's layers have none, -ot, \
                     --cpu-moe or --n-cpu-moe placed them elsewhere, or an RPC server put them on the device)"
                };
                let how = if self.reported_least.load(Ordering::Relaxed) {
                    format!(
                        "dense weights and {} MiB, the least that lets llama.cpp place every layer here",
                        SMALLEST_ROOM >> 20
                    )
                } else {
                    format!("dense weights and {} of the rest, ctx-share", self.config.ctx_share)
                };
                log::notice(&format!(
                    "{} runs over {}: {experts}; {reported} MiB were reported free ({how}), so that an unset context leaves memory to \
                     experts",
                    self.label(),
                    self.inner_name,
                ));
                let lacking = Lacking {
                    cache: !self.may_cache(),
                    pins: !self.captures_graphs && self.config.debug_pins.is_none(),
                };
                if let Some(keys) = self.config.idle_over(lacking) {
                    log::notice(&format!("{}: without effect over {}: {keys}", self.label(), self.inner_name));
                }
                if self.kept_experts.load(Ordering::Relaxed)
                    && !self.may_cache()
                    && self.config.cache == CacheSize::Auto
                {
                    let only = format!(
                        "over {} there is one only with a size (cache=MIB) or with vram-budget-mb",
                        self.inner_name
                    );
                    self.tell_no_cache(&only);
                }
                for line in self.driver_lines.get().into_iter().flatten() {
                    log::notice(&format!("{}: {line}", self.label()));
                }
            }
        }
    }
}

/// How large the dense weights are that are still to be loaded: the loader's questions, less what was loaded since.
#[derive(Debug, Default)]
struct DenseSize {
    asked: usize,
    /// Whether the free memory was told since the last question: the next question begins a new model.
    settled: bool,
}

impl DenseSize {
    fn ask(&mut self, bytes: usize) {
        self.asked = if self.settled { bytes } else { self.asked.saturating_add(bytes) };
        self.settled = false;
    }

    fn load(&mut self, bytes: usize) {
        self.asked = self.asked.saturating_sub(bytes);
    }

    fn settle(&mut self) -> usize {
        self.settled = true;
        self.asked
    }
}

/// How a device of ours reports its kind, so that llama.cpp uses it only when it is named (docs/adr/0001-device-kind.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KindRule {
    /// Whether the host has a GPU of another backend, integrated ones included.
    pub(crate) any_gpu: bool,
    /// Whether this process names a device of ours, or only lists devices.
    pub(crate) named: bool,
}

impl KindRule {
    /// The kind over an inner device of this kind.
    pub(crate) fn kind(self, inner: DeviceKind, has_id: bool) -> DeviceKind {
        if inner == DeviceKind::Gpu && has_id {
            // llama.cpp skips a second GPU with the id of one that it has.
            DeviceKind::Gpu
        } else if self.any_gpu || self.named {
            // Integrated GPUs are skipped while there is a GPU or an integrated GPU of another backend. Without either they are not, so
            // only a process that names one of our devices sees it as such.
            DeviceKind::IntegratedGpu
        } else {
            DeviceKind::Cpu
        }
    }
}

/// The memory that is reported as free while KV is allocated at once: the dense weights, and the context's share of the rest.
///
/// `free' = D + max(share * (free - D), 2 GiB)`: what llama.cpp subtracts for the dense weights `D` leaves exactly the room that
/// a context of unset size may take. All in bytes.
pub(crate) fn reported_free(free: usize, dense: usize, share: f64) -> usize {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a share of a size in bytes; rounding is harmless"
    )]
    let room = (free.saturating_sub(dense) as f64 * share.clamp(0.0, 1.0)) as usize;
    dense.saturating_add(room.max(SMALLEST_ROOM))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GIB: usize = 1 << 30;

    #[test]
    fn dense_size_is_what_is_still_to_load() {
        let mut dense = DenseSize::default();
        dense.ask(100);
        dense.ask(20);
        assert_eq!(dense.settle(), 120);
        dense.load(100);
        assert_eq!(dense.settle(), 20);
        dense.load(30);
        assert_eq!(dense.settle(), 0);
        dense.ask(7);
        assert_eq!(dense.settle(), 7, "a question after the answer begins a new model");
    }

    #[test]
    fn kinds_that_llama_cpp_skips_unless_named() {
        use DeviceKind::{Cpu, Gpu, IntegratedGpu};
        let rule = |any_gpu, named| KindRule { any_gpu, named };
        assert_eq!(rule(true, false).kind(Gpu, true), Gpu);
        assert_eq!(rule(true, false).kind(Gpu, false), IntegratedGpu);
        assert_eq!(rule(true, false).kind(IntegratedGpu, true), IntegratedGpu);
        assert_eq!(rule(true, true).kind(Cpu, false), IntegratedGpu);
        assert_eq!(rule(false, false).kind(Cpu, false), Cpu);
        assert_eq!(rule(false, true).kind(Cpu, false), IntegratedGpu);
    }

    #[test]
    fn the_context_gets_its_share_of_what_the_dense_weights_leave() {
        assert_eq!(reported_free(22 * GIB, 2 * GIB, 0.30), 8 * GIB);
        assert_eq!(reported_free(22 * GIB, 2 * GIB, 1.0), 22 * GIB);
    }

    #[test]
    fn a_small_card_still_gets_a_context() {
        assert_eq!(reported_free(6 * GIB, 2 * GIB, 0.30), 4 * GIB);
        assert_eq!(reported_free(GIB, 2 * GIB, 0.30), 4 * GIB);
    }

    proptest! {
        #[test]
        fn never_less_than_the_dense_weights_and_room(free in 0_usize..1 << 45, dense in 0_usize..1 << 45, share in 0.0..=1.0) {
            let reported = reported_free(free, dense, share);
            prop_assert!(reported >= dense + SMALLEST_ROOM);
            prop_assert!(reported <= free.max(dense) + SMALLEST_ROOM);
        }
    }
}
