//! What must hold of everything that reads bytes from outside, whatever the bytes are.
//!
//! One function per fuzz target; each panics when a rule is broken. tests/corpus.rs runs the same functions over the committed corpus,
//! so that a machine without a nightly toolchain tests it, too.

mod written;

use ggml_moe::arguments;
use ggml_moe::config::{Config, Notice, parse};
use ggml_moe::experts::statefile::State;
use ggml_moe::ids::Ids;
use ggml_moe::model::gguf::{Header, Value};
use ggml_moe::model::moe::MoeShape;
use ggml_moe::purpose::{Purpose, Role};
use ggml_moe::ram::{limit_files, machine_bytes};
use ggml_moe::request::{Request, read_request};
use ggml_moe::telemetry::Counters;

/// The longest line about a setting, in bytes: what the user wrote is cut, the rest is ours.
const LONGEST_LINE: usize = 1000;

/// The value of `GGML_MOE`.
pub fn settings(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (config, notices) = parse(&text);
    in_range(&config);
    assert!(notices.len() <= text.len(), "more notices than bytes");
    for notice in notices {
        let line = notice.to_string();
        assert!(line.starts_with("settings: ") && line.len() <= LONGEST_LINE, "{line:?}");
        assert!(
            !line.contains(|c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202e}')),
            "{line:?}"
        );
    }
    let again = written::written(&config);
    let (mut read, notices) = parse(&again);
    // Settings that hold may still have no effect beside each other.
    let used = notices.iter().all(|notice| matches!(notice, Notice::Conflict(_)));
    assert!(used, "{notices:?}: {again:?} was made of {text:?}");
    // What is written names more than was set.
    read.given.clone_from(&config.given);
    assert_eq!(read, config, "{again:?} was made of {text:?}");
}

fn in_range(config: &Config) {
    assert!((0.0..=1.0).contains(&config.ctx_share));
    assert!(config.debug_pad <= 65_536);
    assert!(config.debug_fail_alloc.is_none_or(|fault| fault.every > 0));
    assert!(config.inner.len() <= 64);
    assert!(config.inner.iter().all(|name| !name.is_empty() && name.trim() == name && !name.contains([',', '+', ';'])));
    let plain = |text: &String| text.contains('.') && text.bytes().all(|byte| byte.is_ascii_graphic());
    assert!(config.debug_panic.as_ref().is_none_or(plain));
}

/// The arguments of a process; behind 0xff bytes, the values of LLAMA_ARG_DEVICE and LLAMA_ARG_SPLIT_MODE.
pub fn request(data: &[u8]) {
    let mut parts = data.splitn(3, |byte| *byte == 0xff);
    let arguments = parts.next().unwrap_or_default();
    let [device, split_mode] = [parts.next(), parts.next()].map(|part| part.map(String::from_utf8_lossy));
    let (device, split_mode) = (device.as_deref(), split_mode.as_deref());
    let read = read_request(arguments, device, split_mode);

    let holds = |word: &str| {
        let inside = |text: &[u8]| text.to_ascii_lowercase().windows(word.len()).any(|part| part == word.as_bytes());
        inside(arguments) || [device, split_mode].into_iter().flatten().any(|text| inside(text.as_bytes()))
    };
    assert!(!read.named || holds("moe") || holds("--list-devices"), "named by nothing");
    assert!(!read.splits_tensors || holds("tensor"), "split by nothing");
    // What is asked for in one place is asked for, whatever stands in the others.
    let with = |words: &[u8]| read_request(&[arguments, b"\0", words].concat(), device, split_mode);
    assert_eq!(with(b"-c\x00512\x00"), read, "an argument about something else changes the answer");
    assert_eq!(with(b"--device\0MoE0\0"), Request { named: true, ..read });
    assert_eq!(with(b"-sm\0tensor\0"), Request { splits_tensors: true, ..read });
    let alone =
        [read_request(arguments, None, None), read_request(b"", device, None), read_request(b"", None, split_mode)];
    assert_eq!(read.named, alone.iter().any(|part| part.named));
    assert_eq!(read.splits_tensors, alone.iter().any(|part| part.splits_tensors));
}

/// /proc/meminfo and /proc/self/cgroup.
pub fn memory(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let bytes = machine_bytes(&text);
    assert!(bytes.is_multiple_of(1024) || bytes == usize::MAX, "{bytes} bytes are no whole kB");
    assert!(bytes == 0 || text.contains("MemTotal:"), "{bytes} bytes out of nothing");
    for file in limit_files(&text) {
        assert!(file.starts_with("/sys/fs/cgroup/"), "{file:?}");
        assert!(file.ends_with("/memory.max") || file.ends_with("/memory.limit_in_bytes"), "{file:?}");
        assert!(!file.split('/').any(|part| part == ".."), "{file:?}");
    }
}

/// Names of tensors and of devices.
pub fn names(data: &[u8]) {
    let name = String::from_utf8_lossy(data);
    assert_eq!(Purpose::of(&name, Role::Experts), Purpose::Expert);
    let purpose = Purpose::of(&name, Role::Default);
    assert_ne!(purpose, Purpose::Expert, "{name:?}");
    assert_eq!(purpose == Purpose::Cache, name.starts_with("cache_"), "{name:?}");
    let json = Counters::default().json(&name, &name);
    let read: serde_json::Value = serde_json::from_str(&json).expect("valid JSON");
    assert_eq!(read["device"], *name);
    assert!(!json.contains(char::is_control), "{json:?}");
}

/// An id operand: five numbers of two bytes (experts, used, tokens, the two steps), then its bytes. Steps may be huge.
pub fn ids(data: &[u8]) {
    let Some((head, bytes)) = data.split_first_chunk::<10>() else { return };
    let number = |index: usize| usize::from(u16::from_le_bytes([head[2 * index], head[2 * index + 1]]));
    let step = |index: usize| if number(index) == 0xffff { usize::MAX / 2 } else { number(index) };
    let (experts, used, tokens) = (number(0) % 1024, number(1) % 64, number(2) % 64);
    let operand = Ids { bytes, used, tokens, id_stride: step(3), token_stride: step(4) };
    let at = |token: usize, slot: usize| {
        let start = token.checked_mul(step(4))?.checked_add(slot.checked_mul(step(3))?)?;
        let word: [u8; 4] = bytes.get(start..start.checked_add(4)?)?.try_into().ok()?;
        usize::try_from(i32::from_ne_bytes(word)).ok().filter(|&id| id < experts)
    };
    let all: Option<std::collections::BTreeSet<usize>> = (0..tokens)
        .flat_map(|token| (0..used).map(move |slot| (token, slot)))
        .map(|(token, slot)| at(token, slot))
        .collect();
    match (operand.runs(experts), all) {
        (Ok(runs), Some(all)) => {
            assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start), "runs touch: {runs:?}");
            assert!(runs.into_iter().flatten().eq(all), "other experts than the named ones");
        }
        (Err(_), None) => {}
        (got, wanted) => panic!("{got:?}, not {wanted:?}"),
    }
}

/// The arguments of a process, of which ours are taken out.
pub fn arguments(data: &[u8]) {
    let words: Vec<&[u8]> = data.split(|byte| *byte == 0).collect();
    let found = arguments::read(&words);
    assert_eq!(found.kept.first(), Some(&0), "the program has no name any more");
    assert!(found.kept.is_sorted_by(|a, b| a < b) && found.kept.last().is_none_or(|last| *last < words.len()));
    let ours = words.len() - found.kept.len();
    assert!(found.settings.len() + found.faults.len() <= ours, "{found:?} out of {ours} words");
    assert!(ours > 0 || !(found.help || found.off), "{found:?} out of nothing");
    for word in words.iter().skip(1).filter(|word| word.starts_with(b"--moe=")) {
        assert!(found.kept.iter().all(|at| words[*at] != *word || is_value_of(&words, *at)), "{found:?}");
    }
    for fault in &found.faults {
        assert!(fault.len() <= LONGEST_LINE && !fault.contains(char::is_control), "{fault:?}");
    }
}

/// Whether the word before takes any word behind it.
fn is_value_of(words: &[&[u8]], at: usize) -> bool {
    at == 0 || words.get(at - 1).is_some_and(|word| word.starts_with(b"--moe"))
}

/// The file of what was learned.
pub fn state(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    match State::parse(&text) {
        Ok(state) => {
            let once = state.format();
            let again = State::parse(&once).expect("what is written can be read");
            assert_eq!(again.format(), once, "made of {text:?}");
            // A state that is added to itself knows no more models.
            let mut both = state.clone();
            both.merge(&state);
            assert_eq!(both.models.len(), state.models.len());
            assert!(both.models.keys().eq(state.models.keys()));
            State::parse(&both.format()).expect("what is merged can be read");
        }
        Err(error) => {
            let line = error.to_string();
            assert!(line.len() <= LONGEST_LINE && !line.contains(char::is_control), "{line:?}");
        }
    }
}

/// The header of a model file.
pub fn gguf(data: &[u8]) {
    let Ok(header) = Header::read(data) else { return };
    // Every item stands in the file, so that memory is bounded by its size.
    let kept = header.keys.iter().map(|(name, value)| {
        name.len()
            + match value {
                Value::Text(Some(text)) => text.len() / 3, // bytes that are no text became a sign of three bytes
                Value::List { numbers, .. } => numbers.len(),
                _ => 1,
            }
    });
    let kept: usize = kept.chain(header.tensors.iter().map(|tensor| tensor.name.len() + 24)).sum();
    assert!(kept <= data.len(), "{kept} of {} bytes", data.len());
    assert!(header.tensors.iter().all(|tensor| tensor.shape.len() <= 4 && i64::try_from(tensor.bytes).is_ok()));
    let longer = Header::read(&[data, b"more"].concat()[..]).expect("what stands behind does not matter");
    // As text: a number may be NaN, which equals nothing.
    assert_eq!(format!("{longer:?}"), format!("{header:?}"));
    let Ok(shape) = MoeShape::of(std::slice::from_ref(&header)) else { return };
    let sum: u128 = header.tensors.iter().map(|tensor| u128::from(tensor.bytes)).sum();
    let parts = [shape.expert_bytes(), shape.dense_bytes, shape.input_bytes].map(u128::from);
    assert!(parts.iter().sum::<u128>() >= sum, "bytes are missing");
    assert!(shape.expert_layers.windows(2).all(|pair| pair[0].layer < pair[1].layer));
    assert!(shape.expert_layers.last().is_none_or(|last| last.layer < shape.layers || last.layer == u32::MAX));
}
