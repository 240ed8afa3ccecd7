//! Models that are wrong on purpose, with the plugin and without: each runs with the same logits, is refused with the same words, or
//! ends by the same signal and assertion as stock. The plugin crashes nowhere else, never hangs, and tells nothing that is not so.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use crate::support::doctored::Model;
use crate::support::process::run;
use crate::support::stock::{OVER_CPU, Side, command, model_host};
use crate::support::{fixture_model, text};

/// So many files lie on the disk at a time.
const GROUP: usize = 48;

/// How a host ended with one model.
#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    /// `exit 0`, `exit 1`, `signal 6`, ...
    end: String,
    /// The hash of the logits, or what stock gave as the reason.
    words: Vec<String>,
}

/// Runs a group of models on one side; the outcome and the whole output of each.
fn outcomes(side: Side<'_>, devices: &str, list: &Path, count: usize) -> Vec<(Outcome, String)> {
    let logs = tempfile::tempdir().expect("a folder");
    let mut host = command(&model_host(), side);
    let finished = run(host.args(["each", devices, text(list), text(logs.path())]), Duration::from_secs(60)).success();
    let ends: Vec<&str> = finished.stdout.lines().filter_map(|line| Some(line.split_once(' ')?.1)).collect();
    assert_eq!(ends.len(), count, "{}", finished.report("not every model was tried"));
    let read = |(number, end): (usize, &&str)| {
        let log = fs::read(logs.path().join(number.to_string())).unwrap_or_default();
        let log = String::from_utf8_lossy(&log).into_owned();
        let telling = ["logits ", "error loading model", "GGML_ASSERT", "what():"];
        let told = |line: &&str| telling.iter().any(|word| line.contains(word)) && !line.contains("ggml-moe: ");
        let words = log.lines().filter(told).map(str::to_owned).collect();
        (Outcome { end: (*end).to_owned(), words }, log)
    };
    ends.iter().enumerate().map(read).collect()
}

/// The lines of ours that are no ordinary telling of what runs.
fn complaints(log: &str) -> Vec<&str> {
    let ordinary = [
        "summary {",
        " MiB of CPU",
        " MiB of RAM, for experts",
        "a graph of ",
        " runs over ",
        "freed a buffer",
        "version ",
        " pinned",
        "experts are copied when used",
        ": request ",
        ": no cache: over CPU there is one only with a size",
    ];
    log.lines().filter(|line| line.contains("ggml-moe: ") && !ordinary.iter().any(|word| line.contains(word))).collect()
}

#[test]
fn doctored_models_end_as_with_stock() {
    let sound = Model::one_layer_of(&fixture_model());
    let models = [vec![sound.clone()], sound.doctored()].concat();
    let folder = tempfile::tempdir().expect("a folder");
    let list = folder.path().join("list");
    model_host(); // compiled before two threads want it
    let (mut wrong, mut ran, mut refused, mut died) = (Vec::new(), 0, 0, 0);
    for group in models.chunks(GROUP) {
        let mut paths = String::new();
        for (number, model) in group.iter().enumerate() {
            let path = folder.path().join(format!("{number}.gguf"));
            fs::write(&path, model.bytes()).expect("room for a model");
            paths.push_str(&format!("{}\n", path.display()));
        }
        fs::write(&list, paths).expect("a list");
        let (stock, plugin) = thread::scope(|scope| {
            let stock = scope.spawn(|| outcomes(Side::Stock, "cpu", &list, group.len()));
            let plugin = outcomes(OVER_CPU, "MoE0", &list, group.len());
            (stock.join().expect("stock's outcomes"), plugin)
        });
        for ((model, (stock, _)), (plugin, log)) in group.iter().zip(stock).zip(plugin) {
            match stock.end.as_str() {
                "exit 0" => ran += 1,
                "exit 1" => refused += 1,
                _ => died += 1,
            }
            let complaints = complaints(&log);
            if stock != plugin || !complaints.is_empty() {
                wrong.push(format!("{}: stock {stock:?}\n  plugin {plugin:?}\n  {complaints:?}", model.label));
            }
            if stock.end == "exit 0" && !log.contains("ggml-moe: summary ") {
                wrong.push(format!("{}: ran without the plugin", model.label));
            }
        }
    }
    println!("{} models: {ran} run, {refused} are refused, {died} end by a signal", models.len());
    assert!(ran > 5 && refused > 200, "{ran} run, {refused} are refused: the models are not what they should be");
    assert!(wrong.is_empty(), "{} of {} models:\n{}", wrong.len(), models.len(), wrong.join("\n"));
}
