//! Every architecture that stock can build: test-llama-archs on our device, then its MoE models as files, plain and
//! quantized, with the logits of each equal to stock's bit for bit and each of its MoE blocks recognised.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use crate::summary::largest;
use crate::support::gguf::Header;
use crate::support::process::{Finished, run};
use crate::support::stock::{OVER_CPU, Side, command, folder, load_all_backends, model_host, program};
use crate::support::{Computed, kept_folder, making, text};

/// The models are the same on every machine and in every run.
const SEED: &str = "1";

/// As few MoE models as stock's program is known to write; fewer means that the list itself has broken.
const AT_LEAST: usize = 53;

/// Stock loads the experts of this architecture but its graph never reads them, so that no block can run.
const NEVER_READ: &str = "refact-moe";

/// Stock's CPU backend cannot add one of this architecture's tensors once llama-quantize has quantized it.
const UNABLE_QUANTIZED: &str = "qwen4exp-moe";

/// Tokens of a prompt, in one pass.
const PROMPT: u32 = 40;

fn test_llama_archs(side: Side<'_>, arguments: &[&str]) -> Finished {
    let mut command = program("test-llama-archs", side);
    command.args(["-s", SEED]).args(arguments);
    run(load_all_backends(&mut command), Duration::from_secs(240)).success()
}

#[test]
fn stock_test_passes_on_our_device() {
    // Warnings shown: they carry our summaries.
    let finished = test_llama_archs(OVER_CPU, &["-b", "MoE0", "-v", "2"]);
    let rows = finished.log().lines().filter(|line| line.starts_with('|') && line.contains("OK")).count();
    let all_passed = format!("all {rows} test(s) passed");
    assert!(rows > 100, "{}", finished.report("too few configurations ran"));
    assert!(finished.log().contains(&all_passed), "{}", finished.report(&format!("not: {all_passed}")));
    assert!(largest(&finished.log(), "blocks") > 0, "{}", finished.report("no MoE block ran on MoE0"));
}

/// Makes a folder of models once, one test at a time: `make` fills an empty one, and only a complete one gets its name.
fn models(kind: &'static Mutex<()>, name: &str, make: impl FnOnce(&Path)) -> Vec<PathBuf> {
    let _making = making(kind);
    // The stock build is in the name: other sources write other models.
    let build = folder().parent().and_then(Path::file_name).and_then(|name| name.to_str()).expect("the stock folder");
    let complete = kept_folder("models").join(format!("{name}-{build}"));
    if !complete.is_dir() {
        let started = complete.with_extension("part");
        // Left by an interrupted run, or not there.
        let _ = fs::remove_dir_all(&started);
        fs::create_dir_all(&started).expect("a folder for models");
        make(&started);
        fs::rename(&started, &complete).expect("a folder for models");
    }
    let entries = fs::read_dir(&complete).expect("a folder of models");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("a folder of models").path()).collect();
    paths.sort();
    assert!(paths.len() >= AT_LEAST, "only {} models in {}", paths.len(), complete.display());
    paths
}

/// The MoE models of test-llama-archs, in F32 as it writes them.
pub(crate) fn plain_models() -> Vec<PathBuf> {
    static PLAIN: Mutex<()> = Mutex::new(());
    models(&PLAIN, "plain", |folder| {
        test_llama_archs(Side::Stock, &["-o", text(folder)]);
        for entry in fs::read_dir(folder).expect("models were written") {
            let path = entry.expect("models were written").path();
            if Header::read(&path).moe_blocks() == 0 {
                fs::remove_file(&path).expect("a dense model can be removed");
            }
        }
    })
}

/// The same models as Q4_K_M, and those that stock cannot run so.
pub(crate) fn k_quantized_models() -> (Vec<PathBuf>, [&'static str; 1]) {
    (quantized_models("Q4_K_M"), [UNABLE_QUANTIZED])
}

/// The same models through llama-quantize, which takes another type where a shape does not allow the one asked for.
fn quantized_models(kind: &str) -> Vec<PathBuf> {
    // Made of the plain ones, whose lock is another.
    static QUANTIZED: Mutex<()> = Mutex::new(());
    models(&QUANTIZED, kind, |folder| {
        for path in plain_models() {
            let output = folder.join(path.file_name().expect("a file"));
            let mut quantize = program("llama-quantize", Side::Stock);
            run(quantize.args([text(&path), text(&output), kind, "2"]), Duration::from_secs(60)).success();
        }
    })
}

/// Runs a model on one side and returns its logits as bytes with what the host printed; `None` when the host failed.
fn logits(side: Side<'_>, devices: &str, model: &Path, prompt: u32) -> (Option<Vec<u8>>, Finished) {
    let output = tempfile::NamedTempFile::new().expect("a file");
    let mut command = command(&model_host(), side);
    command.args(["logits", "2", devices, text(model), text(output.path()), &prompt.to_string()]);
    let finished = run(&mut command, Duration::from_secs(60));
    let bytes = fs::read(output.path()).expect("the logits");
    (finished.status.success().then_some(bytes), finished)
}

/// What stock alone gives for a model: several tests compare with it.
fn stock_logits(model: &Path, prompt: u32) -> (Option<Vec<u8>>, Finished) {
    static STOCK: Computed<(Option<Vec<u8>>, Finished)> = Computed::new();
    STOCK.get(format!("{} {prompt}", model.display()), || logits(Side::Stock, "cpu", model, prompt))
}

/// In how many models something was seen.
#[derive(Default)]
pub(crate) struct Ran {
    /// The cache computed.
    pub(crate) cached: usize,
    /// Blocks ran in slices.
    pub(crate) sliced: usize,
}

/// What is wrong with a model on our device; nothing, if all is right.
fn faults(side: Side<'_>, model: &Path, prompt: u32, stock: &[u8], ran: &mut Ran) -> Vec<String> {
    let (plugin, finished) = logits(side, "MoE0", model, prompt);
    let Some(plugin) = plugin else { return vec![finished.report("failed")] };
    let log = finished.log();
    ran.cached += usize::from(largest(&log, "hits") + largest(&log, "misses") > 0);
    ran.sliced += usize::from(largest(&log, "sliced_blocks") > 0);
    let mut wrong = Vec::new();
    if !finite(stock) {
        wrong.push("stock's own logits are not finite".to_owned());
    } else if plugin != stock {
        wrong.push(format!("logits differ, normalized error {:.1e}", normalized_error(stock, &plugin)));
    }
    let expected =
        if model.file_stem().is_some_and(|name| name == NEVER_READ) { 0 } else { Header::read(model).moe_blocks() };
    let blocks = largest(&log, "blocks_max");
    if blocks != expected as u64 {
        wrong.push(format!("{blocks} blocks recognised, the file has {expected}"));
    }
    let unrecognised = largest(&log, "unrecognised");
    if unrecognised != 0 {
        wrong.push(format!("{unrecognised} MoE nodes in no block"));
    }
    wrong
}

/// Compares all models of a kind and lists everything that differs, not the first thing. `unable` names those that stock
/// itself cannot run in this kind.
fn equal_to_stock(models: &[PathBuf], unable: &[&str]) {
    equal_with(OVER_CPU, models, unable);
}

/// The same with other keys of the plugin.
pub(crate) fn equal_with(side: Side<'_>, models: &[PathBuf], unable: &[&str]) -> Ran {
    equal_after(PROMPT, side, models, unable)
}

/// The same after a prompt of so many tokens.
pub(crate) fn equal_after(prompt: u32, side: Side<'_>, models: &[PathBuf], unable: &[&str]) -> Ran {
    let (mut wrong, mut ran) = (Vec::new(), Ran::default());
    for model in models {
        let name = model.file_stem().and_then(|name| name.to_str()).expect("a file");
        match &stock_logits(model, prompt) {
            (Some(stock), _) if !unable.contains(&name) => {
                wrong.extend(
                    faults(side, model, prompt, stock, &mut ran).iter().map(|fault| format!("{name}: {fault}")),
                );
            }
            (Some(_), _) => wrong.push(format!("{name}: stock runs it after all; take it off the list")),
            (None, _) if unable.contains(&name) => {}
            (None, finished) => wrong.push(format!("{name}: {}", finished.report("stock itself failed"))),
        }
    }
    assert!(wrong.is_empty(), "{} of {} models:\n{}", wrong.len(), models.len(), wrong.join("\n"));
    ran
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.chunks_exact(4).map(|chunk| f32::from_le_bytes([chunk[0], chunk[1], chunk[2], chunk[3]]))
}

fn finite(bytes: &[u8]) -> bool {
    !bytes.is_empty() && floats(bytes).all(f32::is_finite) && floats(bytes).any(|value| value != 0.0)
}

fn normalized_error(stock: &[u8], plugin: &[u8]) -> f64 {
    let square = |value: f32| f64::from(value) * f64::from(value);
    let error: f64 = floats(stock).zip(floats(plugin)).map(|(a, b)| square(a - b)).sum();
    error / floats(stock).map(square).sum::<f64>()
}

#[test]
fn plain_moe_models_equal_stock() {
    equal_to_stock(&plain_models(), &[]);
}

#[test]
fn k_quantized_moe_models_equal_stock() {
    equal_to_stock(&quantized_models("Q4_K_M"), &[UNABLE_QUANTIZED]);
}

#[test]
fn mxfp4_moe_models_equal_stock() {
    equal_to_stock(&quantized_models("MXFP4_MOE"), &[UNABLE_QUANTIZED]);
}
