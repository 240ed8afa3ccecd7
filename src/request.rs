//! What this process was asked for, as far as it decides about our devices.
//!
//! Owns: the reading of the process's arguments and of llama.cpp's environment variables for them.
//! Invariants: any bytes are accepted; what is not understood asks for nothing.
//! Threads: none; everything here is a pure function of its input.
//! Does not: read the arguments (the entry point does), or know what llama.cpp makes of them.

/// What this process was asked for, as far as it decides about our devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// A device of ours is named, or devices are only listed.
    pub named: bool,
    /// Every tensor is to be split over all devices.
    pub splits_tensors: bool,
}

/// Reads what this process was asked for from its arguments (each ended by a zero byte) and llama.cpp's environment variables for them.
pub fn read_request(arguments: &[u8], device: Option<&str>, split_mode: Option<&str>) -> Request {
    let words: Vec<&[u8]> = arguments.split(|byte| *byte == 0).collect();
    let named = words.iter().any(|word| *word == b"--list-devices" || names_us(word))
        || device.is_some_and(|list| names_us(list.as_bytes()));
    // llama-bench takes a list of modes.
    let is_tensor = |modes: &[u8]| modes.split(|byte| *byte == b',').any(|mode| mode == b"tensor");
    let asks_split = |pair: &[&[u8]]| matches!(pair, [b"-sm" | b"--split-mode", modes] if is_tensor(modes));
    let splits_tensors = words.windows(2).any(asks_split)
        || words.iter().filter_map(|word| word.strip_prefix(b"--split-mode=")).any(is_tensor)
        || split_mode.is_some_and(|mode| is_tensor(mode.as_bytes()));
    Request { named, splits_tensors }
}

/// Whether a word is a list of devices in which one of ours stands. A path is none: it has an empty part or a dot.
fn names_us(word: &[u8]) -> bool {
    let list = word.strip_prefix(b"--device=").unwrap_or(word);
    let parts: Vec<&[u8]> = list.split(|byte| matches!(byte, b',' | b'/' | b';' | b'+')).collect();
    let is_name = |part: &&[u8]| !part.is_empty() && part.iter().all(u8::is_ascii_alphanumeric);
    let is_ours = |part: &&[u8]| {
        part.len() > 3 && part[..3].eq_ignore_ascii_case(b"moe") && part[3..].iter().all(u8::is_ascii_digit)
    };
    parts.iter().all(is_name) && parts.iter().any(is_ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_from_the_arguments() {
        for (arguments, named) in [
            (&b"llama-server\0--device\0MoE0\0"[..], true),
            (b"llama-server\0--device=MoE0\0", true),
            (b"llama-server\0-dev\0CUDA0,moe1\0", true),
            (b"llama-bench\0-dev\0MoE0/MoE1\0", true),
            (b"test-backend-ops\0-b\0MoE0\0", true),
            (b"llama-server\0--list-devices\0", true),
            (b"llama-server\0-m\0/models/MoE0/m.gguf\0", false),
            (b"llama-server\0-m\0/models/MoE.gguf\0", false),
            (b"llama-server\0-m\0moe16b\0", false),
            (b"llama-cli\0-p\0What is MoE0?\0", false),
            (b"", false),
        ] {
            let request = read_request(arguments, None, None);
            assert_eq!(request, Request { named, splits_tensors: false }, "{:?}", String::from_utf8_lossy(arguments));
        }
        assert!(read_request(b"", Some("MoE0"), None).named);
        assert!(!read_request(b"", Some("CUDA0"), None).named);
        assert!(read_request(b"x\0-sm\0tensor\0", None, None).splits_tensors);
        assert!(read_request(b"x\0--split-mode\0tensor\0", None, None).splits_tensors);
        assert!(read_request(b"llama-bench\0-sm\0layer,tensor\0", None, None).splits_tensors);
        assert!(read_request(b"", None, Some("tensor")).splits_tensors);
        assert!(!read_request(b"x\0-sm\0layer\0-p\0tensor\0", None, None).splits_tensors);
    }
}
