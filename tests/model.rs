//! The reading of model headers against the host: sizes of types, and a model that the host's own tool split.
#![expect(clippy::panic, clippy::expect_used, reason = "a test fails by panicking")]

#[path = "conformance/toolchain.rs"]
#[expect(dead_code, reason = "shared with the conformance tests")]
mod toolchain;

use std::process::Command;

use ggml_moe::model::gguf::open_all;
use ggml_moe::model::moe::MoeShape;
use ggml_moe::model::types::TYPES;
use toolchain::{compiler, root, run, scratch, stock};

#[test]
fn sizes_of_types_are_the_hosts() {
    let (source, bin) = (stock("source").join("ggml"), stock("path"));
    let program = scratch("model").join("types");
    let mut command = compiler(&source);
    command.arg(root().join("tests/model/types.c")).arg("-o").arg(&program);
    command.arg("-L").arg(&bin).arg(format!("-Wl,-rpath,{}", bin.display())).arg("-lggml-base");
    run(&mut command);
    let output = run(&mut Command::new(&program));
    let host: Vec<String> = String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect();
    let ours: Vec<String> =
        TYPES.iter().map(|kind| format!("{} {} {} {}", kind.number, kind.name, kind.values, kind.bytes)).collect();
    assert_eq!(ours, host);
}

#[test]
fn a_model_that_the_host_split_has_the_same_shape() {
    let model = root().join("tests/fixtures/tiny-docs-moe.Q4_K_M.gguf");
    let folder = tempfile::tempdir().expect("a folder");
    let prefix = folder.path().join("part");
    let mut split = Command::new(stock("path").join("llama-gguf-split"));
    run(split.args(["--split", "--split-max-tensors", "20"]).arg(&model).arg(&prefix));
    let first = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.to_str().unwrap().contains("-00001-of-"))
        .expect("the first part");
    assert!(open_all(&first).unwrap().len() > 3);
    assert_eq!(MoeShape::open(&first).unwrap(), MoeShape::open(&model).unwrap());
}
