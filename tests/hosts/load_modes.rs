//! The ways in which stock can read a model file: the results stay stock's, and what stock refuses is refused.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::perplexity::figures;
use crate::summary::ran_in_blocks;
use crate::support::gguf::Header;
use crate::support::process::{Finished, run};
use crate::support::stock::{OVER_CPU, Side, program, tool};
use crate::support::{fixture, fixture_model, text};

const LIMIT: Duration = Duration::from_secs(60);

fn short(side: Side<'_>, model: &Path, flags: &[&str]) -> Finished {
    let mut command = tool("llama-perplexity", side, model, 2);
    command.args(["-f", text(&fixture("eval.txt")), "-c", "128", "--chunks", "1"]).args(flags);
    run(&mut command, LIMIT)
}

/// Each way of loading gives the same figures; `stock` are those of stock.
fn loads(model: &Path, stock: &[String], flags: &[&str]) {
    let finished = short(OVER_CPU, model, flags).success();
    assert_eq!(figures(&finished), stock, "{}", finished.report("the figures differ"));
    ran_in_blocks(&finished);
}

#[test]
fn every_load_mode_gives_the_same_figures() {
    let model = fixture_model();
    for flags in [
        &["-lm", "auto"][..],
        &["-lm", "none"],
        &["-lm", "mmap"],
        &["-lm", "mlock"],
        &["-lm", "mmap+mlock"],
        &["-lm", "dio"],
        &["-lm", "mmap", "-lzm", "on"],
        &["--no-host"],
        &["--no-host", "-lm", "mmap"],
        &["--check-tensors"],
        &["--check-tensors", "-lm", "mmap"],
        &["-fit", "off"],
    ] {
        let stock = figures(&short(Side::Stock, &model, flags).success());
        loads(&model, &stock, flags);
    }
}

/// A scale that is no number, in the middle of the experts of one layer: --check-tensors finds it in our memory as in stock's.
#[test]
fn check_tensors_finds_a_broken_expert() {
    /// ggml's number of the type Q4_K, the size of its blocks in bytes, and a half-precision number that is none.
    const Q4_K: (u32, u64, [u8; 2]) = (12, 144, [0xff, 0x7f]);
    let mut bytes = fs::read(fixture_model()).expect("the fixture can be read");
    let header = Header::read(&fixture_model());
    let broken = header.tensors.iter().find(|tensor| tensor.kind == Q4_K.0 && tensor.name.ends_with("_exps.weight"));
    let broken = broken.expect("an expert tensor of this type");
    let place = usize::try_from(header.data_start + broken.offset + 1000 * Q4_K.1).expect("the fixture fits memory");
    bytes[place..place + 2].copy_from_slice(&Q4_K.2);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("broken.gguf");
    fs::write(&path, &bytes).expect("a broken copy");
    let words = format!("tensor '{}' has invalid data", broken.name);
    for mode in ["none", "mmap", "dio"] {
        for side in [Side::Stock, OVER_CPU] {
            let finished = short(side, &path, &["--check-tensors", "-lm", mode]).clean_failure();
            assert!(finished.log().contains(&words), "{}", finished.report("another error"));
        }
    }
}

/// The fixture in several files; returns the first of them.
fn split(folder: &Path) -> PathBuf {
    let mut split = program("llama-gguf-split", Side::Stock);
    split.args(["--split", "--split-max-tensors", "20", text(&fixture_model()), text(&folder.join("part"))]);
    run(&mut split, LIMIT).success();
    let mut parts: Vec<PathBuf> =
        fs::read_dir(folder).expect("parts were written").map(|entry| entry.expect("a part").path()).collect();
    parts.sort();
    assert!(parts.len() >= 3, "three parts or more: {parts:?}");
    parts.swap_remove(0)
}

#[test]
fn a_model_in_several_files() {
    let folder = tempfile::tempdir().expect("a folder");
    let first = split(folder.path());
    let stock = figures(&short(Side::Stock, &fixture_model(), &[]).success());
    for mode in ["none", "mmap", "dio"] {
        loads(&first, &stock, &["-lm", mode, "--check-tensors"]);
    }
    let last = fs::read_dir(folder.path()).expect("parts").map(|entry| entry.expect("a part").path()).max();
    fs::remove_file(last.expect("a part")).expect("a part can be removed");
    let finished = short(OVER_CPU, &first, &[]).clean_failure();
    assert!(finished.log().contains("failed to load model"), "{}", finished.report("another error"));
}
