//! The one table of keys: name, default, unit, range, reason and how a value is stored.
//!
//! `docs/keys.md` and the command's `keys` are generated from it, so they cannot disagree with the parser.

use super::expert_keys as experts;
use super::lend_keys as lend;
use super::pass_keys as passes;
use super::preload_keys as preload;
use super::staging_keys as staging;
use super::values::{store, switch};
use super::{AllocationFault, AllocationKind, CacheSize, Config, CudaFault, GraphMode, LogDetail, Socket};

/// One key of `GGML_MOE`.
pub struct Key {
    /// The name as the user writes it.
    pub name: &'static str,
    /// What holds when the key is absent, as the user would write it.
    pub default: &'static str,
    /// Unit of the value, or `-`.
    pub unit: &'static str,
    /// Accepted values.
    pub range: &'static str,
    /// What it does.
    pub effect: &'static str,
    /// Why the default is what it is.
    pub reason: &'static str,
    /// Whether it exists for the project's tests only.
    pub test_only: bool,
    pub(super) apply: fn(&mut Config, &str) -> Result<(), ()>,
}

/// Every key, in the order in which the documentation lists them.
pub static KEYS: &[Key] = &[
    Key {
        name: "inner",
        default: "every local GPU",
        unit: "device names",
        range: "names as the host prints them (--list-devices), separated by ',' or '+', 64 at most; a name may be repeated",
        effect: "Devices to put a MoE device in front of: the first named becomes MoE0, the next MoE1. Over CPU, CUDA and Vulkan devices (ROCm and MUSA are built as CUDA is, and untested) experts stay in RAM; over any other everything is passed through. Devices that the host registers after the plugin, as those of --rpc, cannot be named. One name that the host does not have puts all our devices into pass-through. Case does not matter. A device named twice counts its memory twice.",
        reason: "The plugin exists for GPUs; each card gets a device of its own.",
        test_only: false,
        apply: |config, value| {
            let names: Vec<String> = value.split([',', '+']).map(|name| name.trim().to_owned()).collect();
            if names.iter().any(String::is_empty) || names.len() > 64 {
                return Err(());
            }
            config.inner = names;
            Ok(())
        },
    },
    Key {
        name: "log",
        default: "notice",
        unit: "-",
        range: "error, notice, info, debug",
        effect: "How much the plugin tells. Lines up to this detail are sent at the host's warning level, because llama.cpp's tools hide information lines. llama-server and llama-perplexity then show them; llama-cli shows errors only without -lv 4, llama-bench without -v.",
        reason: "A decision that nobody sees is a surprise; everything else would be noise.",
        test_only: false,
        apply: |config, value| {
            config.log = match value {
                "error" => LogDetail::Error,
                "notice" => LogDetail::Notice,
                "info" => LogDetail::Info,
                "debug" => LogDetail::Debug,
                _ => return Err(()),
            };
            Ok(())
        },
    },
    Key {
        name: "ctx-share",
        default: "0.30",
        unit: "share",
        range: "0 to 1",
        effect: "Share of the device memory beside the dense weights that is reported as free, and so the most that a context whose size the user left open may claim.",
        reason: "llama.cpp's fit step would otherwise give an unset context all the memory that the experts need.",
        test_only: false,
        apply: |config, value| {
            let share: f64 = value.parse().map_err(|_| ())?;
            if !(0.0..=1.0).contains(&share) || share.is_sign_negative() {
                return Err(());
            }
            config.ctx_share = share;
            Ok(())
        },
    },
    Key {
        name: "pin-budget-mb",
        default: "3/4 of RAM",
        unit: "MiB",
        range: "0 to 16777216; 0 pins nothing",
        effect: "The most RAM that this process pins so that the device reads experts in place. What lies above it is copied when used.",
        reason: "Pinned pages cannot be moved or swapped; a quarter of the RAM stays free for everything else.",
        test_only: false,
        apply: |config, value| {
            config.pin_budget_mb = Some(value.parse().ok().filter(|mib| *mib <= 1 << 24).ok_or(())?);
            Ok(())
        },
    },
    Key {
        name: "cache",
        default: "auto",
        unit: "MiB",
        range: "auto, off, or 1 to 16777216",
        effect: "Device memory for experts in use; the others are computed in RAM at the same time. A number is the most that it takes. auto takes what is free, less vram-reserve-mb: a quarter of it at first, all of it after 64 tokens of decoding; over other devices than CUDA's there is a cache only with a size or with vram-budget-mb. Where you placed weights yourself (-ot, -cmoe, -ncmoe, -ncffn, -ngl for fewer layers) there is none unless this key or moe-expert-cache is given (docs/preload.md). What is loaded later, and other programs that touch the reserve, get memory back from it. off reads or copies experts when they are used.",
        reason: "Memory that nothing else uses is best used for experts. Over CUDA it was measured (docs/measurements.md); over Vulkan it is right, and nobody knows how fast.",
        test_only: false,
        apply: |config, value| {
            config.cache = match value {
                "auto" => CacheSize::Auto,
                "off" => CacheSize::Off,
                number => CacheSize::Mib(number.parse().ok().filter(|mib| (1..=1 << 24).contains(mib)).ok_or(())?),
            };
            Ok(())
        },
    },
    Key {
        name: "vram-reserve-mb",
        default: "384",
        unit: "MiB",
        range: "0 to 16777216",
        effect: "Device memory that the cache leaves free over a GPU, and within vram-budget-mb.",
        reason: "Room for the inner backend's scratch and for other programs.",
        test_only: false,
        apply: |config, value| {
            config.vram_reserve_mb = value.parse().ok().filter(|mib| *mib <= 1 << 24).ok_or(())?;
            Ok(())
        },
    },
    passes::STREAM_MIN_TOKENS,
    passes::MIDDLE_PASSES,
    passes::SLICE_TOKENS,
    Key {
        name: "vram-budget-mb",
        default: "what is free",
        unit: "MiB",
        range: "1 to 16777216",
        effect: "The most device memory of all that the plugin takes on a device: dense weights, KV, compute buffers, scratch and cache. What is reported as free and as there keeps to it. An allocation that passes it fails, after the cache has given back what it has. With it cache=auto works over any device.",
        reason: "For a card that is shared, and to try how a model runs on a smaller one.",
        test_only: false,
        apply: |config, value| {
            config.vram_budget_mb = Some(value.parse().ok().filter(|mib| (1..=1 << 24).contains(mib)).ok_or(())?);
            Ok(())
        },
    },
    lend::LEND,
    Key {
        name: "threads",
        default: "the host's -t",
        unit: "threads",
        range: "1 to 1024",
        effect: "Threads that compute experts in RAM, no more than the processors that the process may use less one for each GPU.",
        reason: "What the user gave the host for computing holds for this as well.",
        test_only: false,
        apply: |config, value| {
            config.threads = Some(value.parse().ok().filter(|threads| (1..=1024).contains(threads)).ok_or(())?);
            Ok(())
        },
    },
    experts::EXPERTS_FROM,
    experts::PROMPT_THREADS,
    experts::EXPERT_CACHE,
    experts::POLICY,
    experts::WINDOW,
    experts::ADMIT,
    experts::SWAPS_PER_STEP,
    experts::WAIT_SWAPS,
    experts::SWAP_LEAD,
    experts::UPLOAD_SHARE,
    experts::UPLOAD_CHUNK_KB,
    experts::GOVERNOR,
    experts::RETEST,
    experts::STATE_FILE,
    experts::FIXED,
    experts::LINK_GBS,
    preload::PASS_TOKENS,
    preload::EQUAL_PASSES,
    preload::MASK_THREADS,
    Key {
        name: "socket",
        default: "auto",
        unit: "-",
        range: "off, auto, or an absolute path without ',' and ';'",
        effect: "Where `ggml-moe top` and other programs of the same user read counters (docs/telemetry.md): a unix socket. auto makes it when there is a cache, in the user's runtime folder (XDG_RUNTIME_DIR) or in /tmp/ggml-moe-UID, under the number of the process. A path is served from the first graph on; its folder must exist.",
        reason: "Counters should be there when somebody wants to know why it is slow; nobody else can read them.",
        test_only: false,
        apply: |config, value| {
            config.socket = match value {
                "off" => Socket::Off,
                "auto" => Socket::Auto,
                path if path.starts_with('/') && !path.contains('\0') => Socket::Path(path.into()),
                _ => return Err(()),
            };
            Ok(())
        },
    },
    Key {
        name: "replay",
        default: "none",
        unit: "-",
        range: "qwen3-30b, gemma4-26b, gpt-oss, qwen3.8-next, frequency, uniform",
        effect: "FOR BENCHMARKS ONLY: the experts of a simulated routing take the place of those that the model's router chose, so the output is nonsense. For models with random weights, whose routing has no locality.",
        reason: "Speed depends on how routing repeats itself; random weights do not show it.",
        test_only: true,
        apply: |config, value| {
            config.replay = Some(crate::sim::PRESETS.iter().find(|preset| preset.name == value).ok_or(())?);
            Ok(())
        },
    },
    staging::TIMELINE,
    staging::DEBUG_STAGING,
    Key {
        name: "debug-cuda",
        default: "none",
        unit: "-",
        range: "absent, old, no-vmm",
        effect: "Makes the CUDA driver look absent, too old, or unable to map memory.",
        reason: "Shows that the plugin then works through ggml's own functions.",
        test_only: true,
        apply: |config, value| {
            config.debug_cuda = Some(match value {
                "absent" => CudaFault::Absent,
                "old" => CudaFault::Old,
                "no-vmm" => CudaFault::NoVmm,
                _ => return Err(()),
            });
            Ok(())
        },
    },
    Key {
        name: "debug-panic",
        default: "none",
        unit: "slot",
        range: "object.slot, for example buffer.set_tensor",
        effect: "The named slot panics at every call.",
        reason: "Shows that no panic reaches the host.",
        test_only: true,
        apply: |config, value| {
            let word = |text: &str| {
                !text.is_empty() && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
            };
            let known =
                value.len() <= 60 && value.split_once('.').is_some_and(|(object, slot)| word(object) && word(slot));
            config.debug_panic = Some(Some(value.to_owned()).filter(|_| known).ok_or(())?);
            Ok(())
        },
    },
    Key {
        name: "debug-fail-alloc",
        default: "none",
        unit: "kind:n",
        range: "device:N, host:N, pin:N, map:N or lend:N, N from 1",
        effect: "Every N-th allocation of that kind fails; map is memory that comes for a graph or for what the host writes, of which the cache gives some and which is tried again; lend the same without that.",
        reason: "Shows that running out of memory ends in a clear line.",
        test_only: true,
        apply: |config, value| {
            let (kind, every) = value.split_once(':').ok_or(())?;
            let kind = match kind {
                "device" => AllocationKind::Device,
                "host" => AllocationKind::Host,
                "pin" => AllocationKind::Pin,
                "map" => AllocationKind::Map,
                "lend" => AllocationKind::Lend,
                _ => return Err(()),
            };
            let every: u32 = every.parse().map_err(|_| ())?;
            if every == 0 {
                return Err(());
            }
            config.debug_fail_alloc = Some(AllocationFault { kind, every });
            Ok(())
        },
    },
    Key {
        name: "debug-graph",
        default: "by self-check",
        unit: "-",
        range: "view, add-node",
        effect: "How parts of a graph are handed to the inner backend.",
        reason: "The view keeps kernel fusion; the other needs no private layout. The self-check at start chooses.",
        test_only: true,
        apply: |config, value| {
            config.debug_graph = Some(match value {
                "view" => GraphMode::View,
                "add-node" => GraphMode::AddNode,
                _ => return Err(()),
            });
            Ok(())
        },
    },
    Key {
        name: "debug-experts",
        default: "host",
        unit: "-",
        range: "host, device",
        effect: "Where expert weights are loaded: RAM, or device memory like any other weight.",
        reason: "Measures what the plugin itself costs, with a model that fits.",
        test_only: true,
        apply: |config, value| {
            config.debug_experts_on_device = match value {
                "host" => false,
                "device" => true,
                _ => return Err(()),
            };
            Ok(())
        },
    },
    Key {
        name: "debug-memory",
        default: "elastic",
        unit: "-",
        range: "elastic, fixed",
        effect: "Whether the memory of a cache can change its size, or the cache is dropped and made again.",
        reason: "Exercises on any device what happens where a driver has no other memory.",
        test_only: true,
        apply: |config, value| {
            config.debug_fixed_memory = match value {
                "elastic" => false,
                "fixed" => true,
                _ => return Err(()),
            };
            Ok(())
        },
    },
    Key {
        name: "debug-pad",
        default: "0",
        unit: "bytes",
        range: "0 to 65536",
        effect: "Extra bytes behind every quantized tensor, filled with 0xFF before the padding rule zeroes them.",
        reason: "Exercises on the CPU the padding that only GPUs ask for.",
        test_only: true,
        apply: |config, value| {
            let bytes: usize = value.parse().map_err(|_| ())?;
            if bytes > 65_536 {
                return Err(());
            }
            config.debug_pad = bytes;
            Ok(())
        },
    },
    Key {
        name: "debug-pins",
        default: "none",
        unit: "MiB",
        range: "1 to 512",
        effect: "Over ggml's own functions and a CPU device, host memory counts as registered in chunks of this size, within pin-budget-mb, and is then read in place; the rest is copied.",
        reason: "Shows without a GPU that a buffer may be registered in part.",
        test_only: true,
        apply: |config, value| {
            config.debug_pins = Some(value.parse().ok().filter(|mib| (1..=512).contains(mib)).ok_or(())?);
            Ok(())
        },
    },
    Key {
        name: "debug-late",
        default: "none",
        unit: "seed",
        range: "0 to 4294967295",
        effect: "Copies through ggml's own functions run on a thread of their own, in order, after delays that look random.",
        reason: "Shows without a GPU that everything waits for the copies that it needs.",
        test_only: true,
        apply: |config, value| {
            config.debug_late = Some(value.parse().map_err(|_| ())?);
            Ok(())
        },
    },
    Key {
        name: "debug-poison",
        default: "off",
        unit: "-",
        range: "on, off (or 1, 0)",
        effect: "Slots of the cache that are free or about to be written, and its memory for small operands between uses, are filled with 0xFF, which is not a number in any format of floats.",
        reason: "A result that was computed from them differs from stock's.",
        test_only: true,
        apply: |config, value| store(&mut config.debug_poison, switch(value)),
    },
    lend::DEBUG_MAP_ALL,
    lend::DEBUG_RAM,
];

/// The page `docs/keys.md`, generated from the table.
pub fn markdown() -> String {
    let mut page = String::from(
        "# Keys\n\n<!-- Generated by `make gen` from src/config/keys.rs; do not edit. -->\n\n\
         Keys are given in the environment: `GGML_MOE=\"key=value;key=value\"`, or with `LD_PRELOAD` as arguments, `--moe key=value` ([preload.md](preload.md)). `;` and `,` separate pairs, and a piece without\n\
         `=` continues the value before it, so `inner=CUDA0,CUDA1;log=info` is two pairs. `+` may be written for `,` inside a\n\
         value. An unknown key or a wrong value is reported in one line and ignored. A key given twice: the last holds, and one line says\n\
         so. Keys that have no effect beside others (`policy` with `cache=off`), or over this inner device, are told as well.\n",
    );
    for (title, test_only) in [("For users", false), ("For the project's tests", true)] {
        page.push_str(&format!(
            "\n## {title}\n\n| key | default | unit | range | effect | why this default |\n|---|---|---|---|---|---|\n"
        ));
        for key in KEYS.iter().filter(|key| key.test_only == test_only) {
            page.push_str(&format!(
                "| `{}` | {} | {} | {} | {} | {} |\n",
                key.name, key.default, key.unit, key.range, key.effect, key.reason
            ));
        }
    }
    page
}
