//! Settings as a user would write them.
//!
//! Every field is taken apart by name, so that a new key does not compile until it is written here, too.

use std::fmt::{Display, Write as _};

use ggml_moe::config::{
    AllocationFault, AllocationKind, CacheSize, Config, CudaFault, ExpertSettings, ExpertsFrom, GraphMode, LogDetail,
    MiddlePasses, PolicyOrder, SliceTokens, Socket, Staging, StateFile,
};

/// Pairs of key and value.
#[derive(Default)]
struct Pairs(String);

impl Pairs {
    fn put(&mut self, name: &str, value: impl Display) {
        write!(self.0, "{name}={value};").expect("a String takes everything");
    }

    fn put_some(&mut self, name: &str, value: Option<impl Display>) {
        if let Some(value) = value {
            self.put(name, value);
        }
    }

    fn switch(&mut self, name: &str, value: bool) {
        self.put(name, if value { "on" } else { "off" });
    }
}

/// The text that sets what a configuration holds.
pub fn written(config: &Config) -> String {
    let Config {
        given: _, // what the text names
        inner,
        log,
        ctx_share,
        pin_budget_mb,
        cache,
        vram_reserve_mb,
        stream_min_tokens,
        middle_passes,
        slice_tokens,
        vram_budget_mb,
        lend,
        pass_tokens,
        equal_passes,
        mask_threads,
        threads,
        prompt_threads,
        experts,
        socket,
        replay,
        timeline,
        debug_staging,
        debug_cuda,
        debug_panic,
        debug_fail_alloc,
        debug_graph,
        debug_experts_on_device,
        debug_fixed_memory,
        debug_pad,
        debug_late,
        debug_pins,
        debug_ram_mb,
        debug_poison,
        debug_map_all,
    } = config;
    let mut pairs = Pairs::default();
    pairs.put_some("inner", (!inner.is_empty()).then(|| inner.join("+")));
    pairs.put("log", log_name(*log));
    pairs.put("ctx-share", ctx_share);
    pairs.put_some("pin-budget-mb", *pin_budget_mb);
    match cache {
        CacheSize::Auto => pairs.put("cache", "auto"),
        CacheSize::Off => pairs.put("cache", "off"),
        CacheSize::Mib(mib) => pairs.put("cache", mib),
        CacheSize::SlotsPerLayer(slots) => pairs.put("moe-expert-cache", slots),
    }
    pairs.put("vram-reserve-mb", vram_reserve_mb);
    pairs.put_some("stream-min-tokens", *stream_min_tokens);
    pairs.put(
        "middle-passes",
        match middle_passes {
            MiddlePasses::Auto => "auto",
            MiddlePasses::Fetch => "fetch",
            MiddlePasses::Cpu => "cpu",
            MiddlePasses::Place => "place",
        },
    );
    match slice_tokens {
        SliceTokens::Auto => pairs.put("slice-tokens", "auto"),
        SliceTokens::Off => pairs.put("slice-tokens", "off"),
        SliceTokens::Most(tokens) => pairs.put("slice-tokens", tokens),
    }
    pairs.put_some("vram-budget-mb", *vram_budget_mb);
    pairs.switch("lend", *lend);
    pairs.put_some("pass-tokens", *pass_tokens);
    pairs.switch("equal-passes", *equal_passes);
    pairs.put_some("mask-threads", *mask_threads);
    pairs.put_some("threads", *threads);
    pairs.put_some("prompt-threads", *prompt_threads);
    put_experts(&mut pairs, experts);
    match socket {
        Socket::Off => pairs.put("socket", "off"),
        Socket::Auto => pairs.put("socket", "auto"),
        Socket::Path(path) => pairs.put("socket", path.display()),
    }
    pairs.put_some("replay", replay.map(|preset| preset.name));
    pairs.put_some("timeline", timeline.as_ref().map(|path| path.display()));
    pairs.put_some("debug-staging", debug_staging.map(staging_name));
    pairs.put_some("debug-cuda", debug_cuda.map(cuda_name));
    pairs.put_some("debug-panic", debug_panic.as_ref());
    pairs.put_some("debug-fail-alloc", debug_fail_alloc.map(fault_name));
    pairs.put_some("debug-graph", debug_graph.map(graph_name));
    pairs.put("debug-experts", if *debug_experts_on_device { "device" } else { "host" });
    pairs.put("debug-memory", if *debug_fixed_memory { "fixed" } else { "elastic" });
    pairs.put("debug-pad", debug_pad);
    pairs.put_some("debug-late", *debug_late);
    pairs.put_some("debug-pins", *debug_pins);
    pairs.put_some("debug-ram-mb", *debug_ram_mb);
    pairs.switch("debug-poison", *debug_poison);
    pairs.switch("debug-map-all", *debug_map_all);
    pairs.0
}

fn put_experts(pairs: &mut Pairs, experts: &ExpertSettings) {
    let ExpertSettings {
        from,
        order,
        window,
        admit,
        swaps_per_step,
        swap_lead,
        wait_swaps,
        upload_share,
        upload_chunk_kb,
        governor,
        retest,
        state_file,
        fixed,
        link_gbs,
    } = experts;
    pairs.put(
        "experts-from",
        match from {
            ExpertsFrom::Auto => "auto",
            ExpertsFrom::Ram => "ram",
            ExpertsFrom::File => "file",
        },
    );
    pairs.put(
        "policy",
        match order {
            PolicyOrder::Auto => "auto",
            PolicyOrder::Window => "window",
            PolicyOrder::Frequency => "frequency",
            PolicyOrder::Layers => "layers",
        },
    );
    pairs.put("window", window);
    pairs.put("admit", admit);
    pairs.put_some("swaps-per-step", *swaps_per_step);
    pairs.put_some("swap-lead", *swap_lead);
    pairs.put_some("wait-swaps", wait_swaps.map(on_or_off));
    pairs.put_some("upload-share", *upload_share);
    pairs.put_some("upload-chunk-kb", *upload_chunk_kb);
    pairs.put_some("governor", governor.map(on_or_off));
    pairs.put_some("retest", *retest);
    match state_file {
        None => {}
        Some(StateFile::Off) => pairs.put("state-file", "off"),
        Some(StateFile::At(path)) => pairs.put("state-file", path.display()),
    }
    pairs.switch("fixed", *fixed);
    pairs.put_some("link-gbs", *link_gbs);
}

fn on_or_off(value: bool) -> &'static str {
    if value { "on" } else { "off" }
}

fn log_name(log: LogDetail) -> &'static str {
    match log {
        LogDetail::Error => "error",
        LogDetail::Notice => "notice",
        LogDetail::Info => "info",
        LogDetail::Debug => "debug",
    }
}

fn staging_name(staging: Staging) -> &'static str {
    match staging {
        Staging::Layer => "layer",
        Staging::ThreeTensors => "three-tensors",
        Staging::TwoTensors => "two-tensors",
    }
}

fn cuda_name(fault: CudaFault) -> &'static str {
    match fault {
        CudaFault::Absent => "absent",
        CudaFault::Old => "old",
        CudaFault::NoVmm => "no-vmm",
    }
}

fn graph_name(mode: GraphMode) -> &'static str {
    match mode {
        GraphMode::View => "view",
        GraphMode::AddNode => "add-node",
    }
}

fn fault_name(fault: AllocationFault) -> String {
    let kind = match fault.kind {
        AllocationKind::Device => "device",
        AllocationKind::Host => "host",
        AllocationKind::Pin => "pin",
        AllocationKind::Map => "map",
        AllocationKind::Lend => "lend",
    };
    format!("{kind}:{}", fault.every)
}
