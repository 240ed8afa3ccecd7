//! Models of a given shape with random weights, made by the generator for the GPU machine and kept between runs.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use super::process::run;
use super::{kept_folder, making, package};

/// Like gpt-oss: windows of attention in every second layer, biases on every expert, a clamped activation.
pub const LIKE_GPT_OSS: [&str; 16] = [
    "--arch", "gpt-oss", "--layers", "4", "--embd", "256", "--ff", "128", "--heads", "4", "--kv", "2", "--hd", "64",
    "--vocab", "1024",
];

/// Makes a model, again when the script is newer.
pub fn model(name: &str, shape: &[&str]) -> PathBuf {
    static MODELS: Mutex<()> = Mutex::new(());
    let _making = making(&MODELS);
    let script = package().join("tests/gpu/synth_moe.py");
    let path = kept_folder("models").join(format!("{name}.gguf"));
    let time = |path: &PathBuf| path.metadata().and_then(|data| data.modified()).ok();
    if time(&path) < time(&script) {
        let part = path.with_extension("part");
        run(Command::new("python3").arg(&script).arg(&part).args(shape), Duration::from_secs(120)).success();
        std::fs::rename(&part, &path).expect("a folder for models");
    }
    path
}
