//! Which devices exist: one in front of each inner device that is named, or of each GPU.
//!
//! Owns: the choice of inner devices and of each device's mode and kind, with the reason.
//! Invariants: our devices are never an inner device; a device of ours is used by llama.cpp only when it is named.
//! Threads: the loader's. Does not: open a device or start anything.

use crate::abi::inner::{self, DeviceKind};
use crate::config::Config;
use crate::device::{Device, Mode};
use crate::telemetry::log;

/// What the choice needs to know of a registered device.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Candidate {
    name: String,
    kind: DeviceKind,
    provider: String,
    has_id: bool,
}

/// A device to make: the position of the inner device among the candidates, and how it is used.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Choice {
    candidate: usize,
    mode: Mode,
    kind: DeviceKind,
}

/// Makes the devices of this process; none if the host has no device at all.
pub(crate) fn devices(config: &'static Config, named: bool) -> Vec<&'static Device> {
    let registered: Vec<inner::Device> =
        inner::devices().into_iter().filter(|device| !crate::abi::slots::reg::owns_device(*device)).collect();
    let candidates: Vec<Candidate> = registered
        .iter()
        .map(|device| Candidate {
            name: device.name(),
            kind: device.kind(),
            provider: device.provider(),
            has_id: device.has_id(),
        })
        .collect();
    let choices = choose(&candidates, &config.inner, named);
    if choices.is_empty() {
        log::notice("no device to stand in front of: the host has registered none");
    }
    choices
        .into_iter()
        .filter_map(|choice| {
            let inner = registered.get(choice.candidate).copied()?;
            Some((choice, inner, inner.buffer_type()?))
        })
        .enumerate()
        .map(|(index, (choice, inner, buffer_type))| {
            let device = Device::new(index, inner, buffer_type, choice.mode, choice.kind, config);
            if device.passes_through() {
                device.announce(); // a refusal is told at once, even if nobody uses the device
            }
            &*Box::leak(Box::new(device))
        })
        .collect()
}

/// Chooses inner devices. `wanted` are the names of the `inner` key, `named` whether this process's arguments name a device of
/// ours.
fn choose(candidates: &[Candidate], wanted: &[String], named: bool) -> Vec<Choice> {
    let any_gpu = candidates.iter().any(|candidate| candidate.kind == DeviceKind::Gpu);
    let choice = |candidate: usize, mode: Mode| Choice {
        candidate,
        mode,
        kind: shown_kind(candidates[candidate].has_id, any_gpu, named),
    };
    if wanted.is_empty() {
        let gpus: Vec<Choice> = (0..candidates.len())
            .filter(|&index| candidates[index].kind == DeviceKind::Gpu && candidates[index].provider != "RPC")
            .map(|index| choice(index, Mode::Proxy))
            .collect();
        if !gpus.is_empty() {
            return gpus;
        }
        let reason =
            "no local GPU was found; name a device with GGML_MOE=inner=NAME to stand in front of it all the same";
        return fallback(candidates)
            .map(|index| choice(index, Mode::PassThrough(reason.to_owned())))
            .into_iter()
            .collect();
    }
    let find = |name: &String| candidates.iter().position(|candidate| candidate.name.eq_ignore_ascii_case(name));
    let found: Vec<Option<usize>> = wanted.iter().map(find).collect();
    let missing: Vec<&str> =
        wanted.iter().zip(&found).filter(|(_, found)| found.is_none()).map(|(name, _)| name.as_str()).collect();
    if missing.is_empty() {
        return found.into_iter().flatten().map(|index| choice(index, Mode::Proxy)).collect();
    }
    let names: Vec<&str> = candidates.iter().map(|candidate| candidate.name.as_str()).collect();
    let reason = format!(
        "GGML_MOE: inner={} names no device of this host; it has {}",
        missing.join(","),
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    );
    // Every name keeps its number, so that --device MoE0,MoE1 finds both.
    let stand_in = fallback(candidates);
    found
        .into_iter()
        .filter_map(|index| index.or(stand_in))
        .map(|index| choice(index, Mode::PassThrough(reason.clone())))
        .collect()
}

/// The device that stands in when there is no better one: the first GPU, else the CPU.
fn fallback(candidates: &[Candidate]) -> Option<usize> {
    let of_kind = |kind| candidates.iter().position(|candidate| candidate.kind == kind && candidate.provider != "RPC");
    of_kind(DeviceKind::Gpu).or_else(|| of_kind(DeviceKind::Cpu)).or(if candidates.is_empty() { None } else { Some(0) })
}

/// The kind that a device of ours reports, so that llama.cpp uses it only when it is named (docs/adr/0001-device-kind.md).
fn shown_kind(has_id: bool, any_gpu: bool, named: bool) -> DeviceKind {
    if has_id {
        // llama.cpp skips a second GPU with the id of one that it has.
        DeviceKind::Gpu
    } else if any_gpu || named {
        // Integrated GPUs are skipped while there is a GPU. Without any GPU they are not, so only a process that names one of
        // our devices sees it as such.
        DeviceKind::IntegratedGpu
    } else {
        DeviceKind::Cpu
    }
}

/// Whether arguments or llama.cpp's own environment variable name one of our devices, or only ask which devices there are.
pub(crate) fn names_us(arguments: &[u8], variable: Option<&str>) -> bool {
    let is_ours = |word: &[u8]| {
        word.len() > 3 && word[..3].eq_ignore_ascii_case(b"moe") && word[3..].iter().all(u8::is_ascii_digit)
    };
    let names = |text: &[u8]| {
        text.split(|byte| matches!(byte, 0 | b',' | b'=' | b';' | b'/' | b'+' | b' ' | b':')).any(is_ours)
    };
    let lists = arguments.split(|byte| *byte == 0).any(|word| word == b"--list-devices");
    lists || names(arguments) || variable.is_some_and(|text| names(text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(name: &str, kind: DeviceKind) -> Candidate {
        let provider = if name.starts_with("RPC") { "RPC" } else { "X" };
        Candidate { name: name.into(), kind, provider: provider.into(), has_id: name.starts_with("CUDA") }
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
        let choices = choose(&machine(), &[], false);
        assert_eq!(inner(&choices), [1, 2]);
        assert!(choices.iter().all(|choice| choice.mode == Mode::Proxy && choice.kind == DeviceKind::Gpu));
    }

    #[test]
    fn named_devices_in_order_and_repeated() {
        let choices = choose(&machine(), &["cpu".into(), "CUDA0".into(), "CPU".into()], true);
        assert_eq!(inner(&choices), [3, 1, 3]);
        assert_eq!(choices[0].kind, DeviceKind::IntegratedGpu);
        assert_eq!(choices[1].kind, DeviceKind::Gpu);
    }

    #[test]
    fn a_name_without_device_passes_everything_through() {
        let choices = choose(&machine(), &["CUDA7".into(), "CPU".into()], false);
        assert_eq!(inner(&choices), [1, 3]);
        for choice in choices {
            let Mode::PassThrough(reason) = choice.mode else { panic!("proxy without its device") };
            assert_eq!(reason, "GGML_MOE: inner=CUDA7 names no device of this host; it has RPC0, CUDA0, CUDA1, CPU");
        }
    }

    #[test]
    fn without_gpu_the_cpu_is_passed_through_and_not_chosen_by_itself() {
        let cpu = [candidate("CPU", DeviceKind::Cpu)];
        let choices = choose(&cpu, &[], false);
        assert!(matches!(choices[..], [Choice { candidate: 0, mode: Mode::PassThrough(_), kind: DeviceKind::Cpu }]));
        assert_eq!(choose(&cpu, &["CPU".into()], false)[0].kind, DeviceKind::Cpu);
        assert_eq!(choose(&cpu, &["CPU".into()], true)[0].kind, DeviceKind::IntegratedGpu);
        assert_eq!(choose(&[], &[], true), []);
    }

    #[test]
    fn arguments_that_name_us() {
        for (arguments, named) in [
            (&b"llama-server\0--device\0MoE0\0"[..], true),
            (b"llama-server\0-dev\0CUDA0,moe1\0", true),
            (b"llama-bench\0-dev\0MoE0/MoE1\0", true),
            (b"test-backend-ops\0-b\0MoE0\0", true),
            (b"llama-server\0--list-devices\0", true),
            (b"llama-server\0-m\0/models/MoE.gguf\0", false),
            (b"llama-server\0-m\0moe16b\0", false),
            (b"", false),
        ] {
            assert_eq!(names_us(arguments, None), named, "{:?}", String::from_utf8_lossy(arguments));
        }
        assert!(names_us(b"", Some("MoE0")));
        assert!(!names_us(b"", Some("CUDA0")));
    }
}
