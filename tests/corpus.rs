//! The committed corpus of the fuzz targets (tests/fuzz/), through the same checks, on any toolchain.
#![expect(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "fuzz/src/checks.rs"]
mod checks;

use std::fs;
use std::path::Path;

use ggml_moe::config::{KEYS, parse};

/// Runs a check over every file of its folder, and over all beginnings of each file.
fn corpus(name: &str, check: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(name);
    let mut files = 0;
    for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let data = fs::read(entry.unwrap().path()).unwrap();
        (0..=data.len()).for_each(|length| check(&data[..length]));
        files += 1;
    }
    assert!(files >= 5, "only {files} files in {}", folder.display());
}

#[test]
fn settings() {
    corpus("settings", checks::settings);
}

/// A fuzz target finds what is near its corpus: every key stands there with a value that is taken.
#[test]
fn settings_name_every_key() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus/settings");
    let given: Vec<&str> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| fs::read(entry.unwrap().path()).unwrap())
        .flat_map(|data| parse(&String::from_utf8_lossy(&data)).0.given)
        .collect();
    let missing: Vec<&str> = KEYS.iter().map(|key| key.name).filter(|name| !given.contains(name)).collect();
    assert_eq!(missing, Vec::<&str>::new());
}

#[test]
fn request() {
    corpus("request", checks::request);
}

#[test]
fn memory() {
    corpus("memory", checks::memory);
}

#[test]
fn names() {
    corpus("names", checks::names);
}

#[test]
fn ids() {
    corpus("ids", checks::ids);
}

#[test]
fn arguments() {
    corpus("arguments", checks::arguments);
}

#[test]
fn state() {
    corpus("state", checks::state);
}

#[test]
fn gguf() {
    corpus("gguf", checks::gguf);
}
