//! Which devices exist: one in front of each inner device that is named, or of each GPU.
//!
//! Owns: the choice of inner devices and of each device's mode, with the reason.
//! Invariants: our devices are never an inner device; a device of ours is used by llama.cpp only when it is named.
//! Threads: the loader's. Does not: open a device or start anything.

use std::sync::Once;

use crate::abi::inner::{self, DeviceKind};
use crate::config::Config;
use crate::device::{Device, KindRule, Mode, SETTING_FAULT};
use crate::request::Request;
use crate::telemetry::log;

/// What the choice needs to know of a registered device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) name: String,
    pub(crate) kind: DeviceKind,
    pub(crate) provider: String,
}

/// A device to make: the position of the inner device among the candidates, and how it is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) candidate: usize,
    pub(crate) mode: Mode,
}

/// Backends whose code computes on buffer objects that are not its own; Vulkan's does if they carry its context
/// (`abi/slots/borrowed.rs`). Others look into objects of their own that we cannot stand in for.
const PROVIDERS: [&str; 5] = ["CPU", "CUDA", "ROCm", "MUSA", "Vulkan"];

/// Makes the devices of this process: none if it wants a mode that cannot have ours, `None` if the host has no device yet and the next
/// load should ask again.
pub(crate) fn devices(config: &'static Config, request: Request) -> Option<Vec<&'static Device>> {
    if request.splits_tensors {
        static TOLD: Once = Once::new();
        TOLD.call_once(|| log::notice(
            "off: split mode tensor divides every tensor among all devices, which experts in RAM cannot follow; use -sm layer, or run \
             without GGML_BACKEND_PATH",
        ));
        return Some(Vec::new());
    }
    let registered: Vec<(inner::Device, inner::BufferType)> = inner::devices()
        .into_iter()
        .filter(|device| !crate::abi::slots::reg::owns_device(*device))
        .filter_map(|device| Some((device, device.buffer_type()?)))
        .collect();
    let candidates: Vec<Candidate> = registered
        .iter()
        .map(|(device, _)| Candidate { name: device.name(), kind: device.kind(), provider: device.provider() })
        .collect();
    let rule = KindRule { any_gpu: any_gpu(&candidates), named: request.named };
    let choices = choose(&candidates, &config.inner);
    if choices.is_empty() {
        return None;
    }
    let devices = choices
        .into_iter()
        .enumerate()
        .map(|(index, choice)| {
            let (inner, buffer_type) = registered[choice.candidate];
            inner.keep_loaded();
            let device = Device::new(index, inner, buffer_type, choice.mode, rule, config);
            // The preload tells the reason in its own line.
            if device.passes_through() && !crate::preload::is_active() {
                device.announce(); // a refusal is told at once, even if nobody uses the device
            }
            &*Box::leak(Box::new(device))
        })
        .collect();
    Some(devices)
}

/// Chooses inner devices. `wanted` are the names of the `inner` key.
pub(crate) fn choose(candidates: &[Candidate], wanted: &[String]) -> Vec<Choice> {
    let choice = |candidate: usize| {
        let Candidate { name, provider, .. } = &candidates[candidate];
        let mode = if PROVIDERS.contains(&provider.as_str()) {
            Mode::Proxy
        } else {
            Mode::Lend(format!("{name} belongs to {provider}, whose code accepts only buffers of its own"))
        };
        Choice { candidate, mode }
    };
    let stand_in = |candidate: usize, reason: &str| {
        let lent = matches!(choice(candidate).mode, Mode::Lend(_));
        let reason = reason.to_owned();
        Choice { candidate, mode: if lent { Mode::Lend(reason) } else { Mode::PassThrough(reason) } }
    };
    if wanted.is_empty() {
        let gpus: Vec<Choice> =
            (0..candidates.len()).filter(|&index| is_local_gpu(&candidates[index])).map(choice).collect();
        if !gpus.is_empty() {
            return gpus;
        }
        let reason = "no local GPU was found; inner=CPU (--moe inner=CPU, or in GGML_MOE) stands in front of the processors all the same";
        return fallback(candidates).map(|index| stand_in(index, reason)).into_iter().collect();
    }
    let find = |name: &String| candidates.iter().position(|candidate| candidate.name.eq_ignore_ascii_case(name));
    let found: Vec<Option<usize>> = wanted.iter().map(find).collect();
    let missing: Vec<&str> =
        wanted.iter().zip(&found).filter(|(_, found)| found.is_none()).map(|(name, _)| name.as_str()).collect();
    if missing.is_empty() {
        return found.into_iter().flatten().map(choice).collect();
    }
    let names: Vec<&str> = candidates.iter().map(|candidate| candidate.name.as_str()).collect();
    let reason = format!(
        "{SETTING_FAULT}inner={} names no device of this host; it has {}",
        crate::config::shown(&missing.join(",")),
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    );
    // Every name keeps its number, so that --device MoE0,MoE1 finds both.
    let last_resort = fallback(candidates);
    found.into_iter().filter_map(|index| index.or(last_resort)).map(|index| stand_in(index, &reason)).collect()
}

/// Whether llama.cpp takes another device before an integrated GPU of ours. Servers of the RPC backend do not count there.
fn any_gpu(candidates: &[Candidate]) -> bool {
    candidates.iter().any(|candidate| is_local_gpu(candidate) || candidate.kind == DeviceKind::IntegratedGpu)
}

fn is_local_gpu(candidate: &Candidate) -> bool {
    candidate.kind == DeviceKind::Gpu && candidate.provider != "RPC"
}

/// The device that stands in when there is no better one: the first local GPU, else the CPU, else the first.
fn fallback(candidates: &[Candidate]) -> Option<usize> {
    let cpu = |candidate: &Candidate| candidate.kind == DeviceKind::Cpu;
    let first = (!candidates.is_empty()).then_some(0);
    candidates.iter().position(is_local_gpu).or_else(|| candidates.iter().position(cpu)).or(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(name: &str, kind: DeviceKind) -> Candidate {
        let provider = name.trim_end_matches(|c: char| c.is_ascii_digit());
        Candidate { name: name.into(), kind, provider: provider.into() }
    }

    fn machine() -> Vec<Candidate> {
        vec![
            candidate("RPC0", DeviceKind::Gpu),
            candidate("CUDA0", DeviceKind::Gpu),
            candidate("CUDA1", DeviceKind::Gpu),
            candidate("CPU", DeviceKind::Cpu),
        ]
    }

    fn inner(choices: &[Choice]) -> Vec<usize> {
        choices.iter().map(|choice| choice.candidate).collect()
    }

    #[test]
    fn every_local_gpu_by_default() {
        let choices = choose(&machine(), &[]);
        assert_eq!(inner(&choices), [1, 2]);
        assert!(choices.iter().all(|choice| choice.mode == Mode::Proxy));
    }

    #[test]
    fn named_devices_in_order_and_repeated() {
        let choices = choose(&machine(), &["cpu".into(), "CUDA0".into(), "CPU".into()]);
        assert_eq!(inner(&choices), [3, 1, 3]);
        assert!(choices.iter().all(|choice| choice.mode == Mode::Proxy));
    }

    #[test]
    fn a_name_without_device_passes_everything_through() {
        let choices = choose(&machine(), &["CUDA7".into(), "CPU".into()]);
        assert_eq!(inner(&choices), [1, 3]);
        for choice in choices {
            let Mode::PassThrough(reason) = choice.mode else { panic!("proxy without its device") };
            assert_eq!(reason, "settings: inner=CUDA7 names no device of this host; it has RPC0, CUDA0, CUDA1, CPU");
        }
    }

    #[test]
    fn remote_devices_are_no_local_gpus() {
        let machine = [candidate("RPC0", DeviceKind::Gpu), candidate("CPU", DeviceKind::Cpu)];
        assert!(!any_gpu(&machine));
        assert!(matches!(choose(&machine, &[])[..], [Choice { candidate: 1, mode: Mode::PassThrough(_) }]));
        assert!(matches!(choose(&machine, &["RPC0".into()])[..], [Choice { candidate: 0, mode: Mode::Lend(_) }]));
        assert!(any_gpu(&[candidate("Vulkan0", DeviceKind::IntegratedGpu)]));
        assert!(any_gpu(&[candidate("CUDA0", DeviceKind::Gpu)]));
    }

    #[test]
    fn backends_that_need_their_own_buffers_lend_them() {
        let machine = [candidate("SYCL0", DeviceKind::Gpu), candidate("CPU", DeviceKind::Cpu)];
        let choices = choose(&machine, &[]);
        assert_eq!(inner(&choices), [0]);
        assert!(matches!(&choices[0].mode, Mode::Lend(reason) if reason.starts_with("SYCL0 belongs to SYCL")));
        assert!(matches!(choose(&machine, &["SYCL0".into()])[0].mode, Mode::Lend(_)));
        assert!(matches!(choose(&machine, &["SYCL7".into()])[0].mode, Mode::Lend(_)), "the stand-in is lent, too");
        assert_eq!(choose(&machine, &["CPU".into()])[0].mode, Mode::Proxy);
    }

    #[test]
    fn without_gpu_the_cpu_is_passed_through() {
        let cpu = [candidate("CPU", DeviceKind::Cpu)];
        assert!(matches!(choose(&cpu, &[])[..], [Choice { candidate: 0, mode: Mode::PassThrough(_) }]));
        assert_eq!(choose(&[], &[]), []);
    }
}
