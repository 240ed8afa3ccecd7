//! What a program is: whether another library can be loaded into it, and which libraries it wants.
//!
//! Invariants: any bytes are accepted; what is not understood is `Kind::Foreign`. The system's loader has the last word.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

/// The most that is read of a program.
const MOST_BYTES: u64 = 256 << 20;

/// What a program is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One that the dynamic loader starts, with the libraries that it names.
    Dynamic(Vec<String>),
    /// One without the dynamic loader.
    Static,
    /// A program for another kind of machine.
    Other,
    /// A script, or nothing that this system starts.
    Foreign,
}

/// Looks at a program.
pub(crate) fn kind(path: &Path) -> std::io::Result<Kind> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MOST_BYTES).read_to_end(&mut bytes)?;
    Ok(parse(&bytes).unwrap_or(Kind::Foreign))
}

fn number<const N: usize>(bytes: &[u8], at: u64) -> Option<u64> {
    let at = usize::try_from(at).ok()?;
    let part = bytes.get(at..at.checked_add(N)?)?;
    Some(part.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

/// What this command is made for, as a program's header says it.
const MACHINE: Option<u64> = if cfg!(target_arch = "x86_64") {
    Some(62)
} else if cfg!(target_arch = "aarch64") {
    Some(183)
} else {
    None
};

/// Kinds of program headers, and tags of the dynamic section.
const LOAD: u64 = 1;
const DYNAMIC: u64 = 2;
const INTERPRETER: u64 = 3;
const NEEDED: u64 = 1;
const STRINGS: u64 = 5;

fn parse(bytes: &[u8]) -> Option<Kind> {
    if !bytes.starts_with(b"\x7fELF") {
        return None;
    }
    // 64 bits, little endian.
    let is_own = bytes.starts_with(b"\x7fELF\x02\x01");
    if !is_own || MACHINE.is_some_and(|own| number::<2>(bytes, 18).is_some_and(|machine| machine != own)) {
        return Some(Kind::Other);
    }
    let (first, size, count) = (number::<8>(bytes, 32)?, number::<2>(bytes, 54)?, number::<2>(bytes, 56)?);
    let headers: Vec<u64> = (0..count).filter_map(|header| first.checked_add(header * size)).collect();
    let is = |kind: u64| move |at: &u64| number::<4>(bytes, *at) == Some(kind);
    let dynamic = headers.iter().copied().find(is(DYNAMIC));
    if !headers.iter().any(|at| is(INTERPRETER)(at)) {
        return Some(Kind::Static);
    }
    let dynamic = dynamic?;
    let (offset, length) = (number::<8>(bytes, dynamic + 8)?, number::<8>(bytes, dynamic + 32)?);
    let entries: Vec<(u64, u64)> = (0..(length / 16).min(4096))
        .map_while(|entry| {
            let at = offset.checked_add(entry * 16)?;
            Some((number::<8>(bytes, at)?, number::<8>(bytes, at + 8)?)).filter(|(tag, _)| *tag != 0)
        })
        .collect();
    let address = entries.iter().find(|(tag, _)| *tag == STRINGS)?.1;
    // Where the table lies in the file.
    let strings = headers.iter().copied().filter(is(LOAD)).find_map(|at| {
        let (offset, start, length) =
            (number::<8>(bytes, at + 8)?, number::<8>(bytes, at + 16)?, number::<8>(bytes, at + 32)?);
        let inside = address.checked_sub(start).filter(|inside| *inside < length)?;
        offset.checked_add(inside)
    })?;
    let name = |(_, at): &(u64, u64)| {
        let at = usize::try_from(strings.checked_add(*at)?).ok()?;
        let text = bytes.get(at..)?.split(|byte| *byte == 0).next()?;
        Some(String::from_utf8_lossy(text).into_owned())
    };
    Some(Kind::Dynamic(entries.iter().filter(|(tag, _)| *tag == NEEDED).filter_map(name).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_program_is_dynamic() {
        let Kind::Dynamic(libraries) = kind(&std::env::current_exe().unwrap()).unwrap() else { panic!("not dynamic") };
        assert!(libraries.iter().any(|name| name.starts_with("libc.so")), "{libraries:?}");
    }

    #[test]
    fn any_bytes_are_accepted() {
        let bytes = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(parse(b"#!/bin/sh\n"), None);
        assert_eq!(parse(b"\x7fELF\x01\x01"), Some(Kind::Other));
        let mut other = bytes[..64].to_vec();
        other[18] ^= 0xff;
        assert_eq!(parse(&other), Some(Kind::Other));
        for length in [0, 5, 6, 63, 64, 100, 200, 1000, 5000] {
            let _ = parse(&bytes[..length.min(bytes.len())]);
        }
        let mut broken = bytes[..4096.min(bytes.len())].to_vec();
        for at in 0..broken.len() {
            let before = broken[at];
            broken[at] = 0xff;
            let _ = parse(&broken);
            broken[at] = before;
        }
    }
}
