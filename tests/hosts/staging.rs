//! The staging of long passes: by whole layers, by three tensors and by two, with a cache and within a budget, equal to stock; and the times that
//! `timeline` writes.

use serde_json::Value;

use crate::perplexity::{figures, perplexity};
use crate::summary::largest;
use crate::support::stock::Side;
use crate::support::{kept_folder, text};

const ARGUMENTS: [&str; 2] = ["-ub", "96"];
/// Test key, and how the log calls it.
const UNITS: [(&str, &str); 3] = [
    ("layer", "bring experts by whole layers, 2 buffers"),
    ("three-tensors", "bring experts by single tensors, 3 buffers"),
    ("two-tensors", "bring experts by single tensors, 2 buffers"),
];

/// The passes of a file, checked as far as docs/telemetry.md promises anything.
fn timelines(file: &str, unit: &str) -> Vec<Value> {
    let lines = std::fs::read_to_string(file).expect("a timeline was written");
    let passes: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
    for (pass, number) in passes.iter().zip(1_u64..) {
        let of = |name: &str| pass[name].as_f64().unwrap_or_else(|| panic!("{name} in {pass}"));
        let list = |name: &str| pass[name].as_array().unwrap_or_else(|| panic!("{name} in {pass}")).clone();
        let parts = if unit == "layer" { 1 } else { 3 };
        assert_eq!((&pass["pass"], &pass["clock"], &pass["device"]), (&number.into(), &"host".into(), &"MoE0".into()));
        assert_eq!(pass["unit"], if unit == "layer" { "layer" } else { "tensor" });
        assert_eq!(pass["buffers"], if unit == "three-tensors" { 3 } else { 2 });
        let copies = list("copies");
        assert_eq!(copies.len() as u64, parts * pass["blocks"].as_u64().expect("a number"), "{pass}");
        for (copy, number) in copies.iter().zip(0_u64..) {
            assert_eq!((&copy[0], &copy[1]), (&(number / parts).into(), &(number % parts).into()), "{pass}");
        }
        let blocks = list("computes").iter().filter(|compute| compute[0].as_i64() >= Some(0)).count();
        assert_eq!(blocks, copies.len(), "each part runs once: {pass}");
        let sum = of("copy_us") + of("compute_us") - of("both_us") + of("idle_us");
        assert!((sum - of("span_us")).abs() < 1.0 && of("ram_bytes") + of("device_bytes") > 0.0, "{pass}");
    }
    passes
}

#[test]
fn each_unit_equals_stock_within_a_budget() {
    let stock = figures(&perplexity(Side::Stock, 2, 2, &ARGUMENTS));
    let folder = kept_folder("staging");
    for (unit, line) in UNITS {
        let file = folder.join(format!("{unit}.jsonl"));
        let _ = std::fs::remove_file(&file); // left by an earlier run
        let keys = format!(
            "inner=CPU;log=debug;stream-min-tokens=9;state-file=off;debug-poison=on;vram-budget-mb=22;vram-reserve-mb=1;\
             debug-staging={unit};timeline={}",
            text(&file)
        );
        let finished = perplexity(Side::Plugin { keys: &keys, device: "MoE0" }, 2, 2, &ARGUMENTS);
        assert_eq!(figures(&finished), stock, "{}", finished.report(&keys));
        assert_eq!(finished.lines_with(line).len(), 1, "{}", finished.report("another unit"));
        assert!(largest(&finished.log(), "streamed_blocks") > 0, "{}", finished.report("no long pass"));
        let passes = timelines(text(&file), unit);
        assert!(passes.len() >= 8, "{} passes", passes.len());
        let sum = |name: &str| passes.iter().filter_map(|pass| pass[name].as_u64()).sum::<u64>();
        assert!(sum("ram_bytes") > 0 && sum("device_bytes") > 0, "{}", finished.report("from one side only"));
    }
}

/// Over a device that is late, from RAM alone and from a cache.
#[test]
fn tensors_equal_stock_over_a_late_device() {
    let stock = figures(&perplexity(Side::Stock, 2, 1, &ARGUMENTS));
    for (seed, unit, cache) in [(1, "two-tensors", "off"), (2, "three-tensors", "6"), (5, "two-tensors", "9")] {
        let keys = format!(
            "inner=LATE0;log=debug;stream-min-tokens=9;state-file=off;debug-late={seed};debug-poison=on;cache={cache};\
             debug-staging={unit}"
        );
        let finished = perplexity(Side::Plugin { keys: &keys, device: "MoE0" }, 2, 1, &ARGUMENTS);
        assert_eq!(figures(&finished), stock, "{}", finished.report(&keys));
        assert_eq!(
            finished.lines_with("bring experts by single tensors").len(),
            1,
            "{}",
            finished.report("another unit")
        );
        assert!(largest(&finished.log(), "streamed_blocks") > 0, "{}", finished.report("no long pass"));
    }
}

/// A budget that has no room for two layers beside what else there is.
#[test]
fn a_small_budget_goes_by_tensors() {
    let stock = figures(&perplexity(Side::Stock, 2, 1, &ARGUMENTS));
    let keys = "inner=CPU;log=debug;stream-min-tokens=9;state-file=off;vram-budget-mb=15;vram-reserve-mb=0";
    let finished = perplexity(Side::Plugin { keys, device: "MoE0" }, 2, 1, &ARGUMENTS);
    assert_eq!(figures(&finished), stock, "{}", finished.report(keys));
    assert_eq!(finished.lines_with("bring experts by single tensors").len(), 1, "{}", finished.report("another unit"));
}
