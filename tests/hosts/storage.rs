//! Where experts lie: RAM that is pinned, RAM that is not, the model's file. Results are stock's, and the memory is what it should be.
//!
//! The models are made by `tests/gpu/synth_moe.py`: random weights, many thin layers, so that what the CPU device copies for one layer is little beside
//! the model. `tests/support/watch.py` looks at memory, faults and reads.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::perplexity::{figures, perplexity};
use crate::summary::{largest, ran_in_blocks};
use crate::support::generated::model;
use crate::support::process::{Finished, run};
use crate::support::stock::{Side, tool};
use crate::support::{fixture, package, text};

const LIMIT: Duration = Duration::from_secs(120);
const ON_DISK: &str = "experts mapped from the file";
const NO_GROUP: i32 = 77;

fn thin(name: &str, layers: &str) -> PathBuf {
    let shape =
        ["--experts", "16", "--used", "4", "--embd", "1024", "--ff", "768", "--heads", "8", "--kv", "2", "--hd", "64"];
    let shape: Vec<&str> = shape.into_iter().chain(["--vocab", "1024", "--layers", layers]).collect();
    model(name, &shape)
}

/// Nobody else reads the model meanwhile, in this process or another: what is in the page cache, and who put it there, is compared.
fn alone(model: &Path) -> File {
    let lock = File::create(model.with_extension("lock")).expect("a folder for models");
    lock.lock().expect("it is given back");
    lock
}

fn mib(path: &Path) -> u64 {
    path.metadata().expect("a model").len() >> 20
}

fn figures_of(side: Side<'_>, model: &Path, flags: &[&str]) -> Command {
    let mut command = tool("llama-perplexity", side, model, 1);
    command.args(["-f", text(&fixture("eval.txt")), "--chunks", "1", "--no-warmup"]).args(flags);
    command
}

/// Runs a command and watches it; `None` where it was to run with little memory and cannot.
fn watched(command: &Command, options: &[&str]) -> Option<(Finished, Value)> {
    let report = tempfile::NamedTempFile::new().expect("a file for the report");
    let mut watch = Command::new("python3");
    watch.arg(package().join("tests/support/watch.py")).arg(report.path()).args(options).arg("--");
    watch.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            watch.env(name, value);
        }
    }
    let finished = run(&mut watch, LIMIT);
    if finished.status.code() == Some(NO_GROUP) {
        return None;
    }
    let finished = finished.success();
    let report = std::fs::read(report.path()).expect("a report");
    Some((finished, serde_json::from_slice(&report).expect("a report in JSON")))
}

fn number(report: &Value, name: &str) -> u64 {
    report[name].as_u64().unwrap_or_else(|| panic!("no {name} in {report}"))
}

/// No load mode takes the model twice, and with a mapped file there is none of the experts beside it.
#[test]
fn every_load_mode_holds_experts_once() {
    let model = thin("storage-500", "24");
    let _alone = alone(&model);
    let whole = mib(&model);
    assert!((400..600).contains(&whole), "{whole} MiB");
    let flags = ["-c", "8", "-b", "1", "-ub", "1", "-lm"];
    let mode = |mode: &'static str| flags.iter().copied().chain([mode]).collect::<Vec<_>>();
    let stock = figures(&run(&mut figures_of(Side::Stock, &model, &mode("mmap")), LIMIT).success());
    for (name, keys, most) in [
        ("none", "inner=CPU;log=debug", whole * 11 / 10),
        ("mmap", "inner=CPU;log=debug", whole / 4),
        ("mmap", "inner=CPU;log=debug;experts-from=file;cache=48", whole / 4),
        ("mmap", "inner=CPU;log=debug;experts-from=ram", whole * 11 / 10),
        ("mlock", "inner=CPU;log=debug", whole * 11 / 10),
        ("mmap+mlock", "inner=CPU;log=debug", whole * 11 / 10),
        ("dio", "inner=CPU;log=debug", whole * 11 / 10),
    ] {
        let side = Side::Plugin { keys, device: "MoE0" };
        let (finished, report) = watched(&figures_of(side, &model, &mode(name)), &[]).expect("no limit was asked for");
        let heading = format!("{name} with {keys}: {report}, at most {most} MiB");
        assert_eq!(figures(&finished), stock, "{}", finished.report(&heading));
        ran_in_blocks(&finished);
        assert!(number(&report, "peak_own_kib") >> 10 <= most, "{}", finished.report(&heading));
        let in_file = name == "mmap" && !keys.contains("ram");
        assert_eq!(!finished.lines_with(ON_DISK).is_empty(), in_file, "{}", finished.report(&heading));
        println!("{heading}");
    }
}

/// From a dropped page cache a mapped model costs no more reads and faults than it costs stock. A disk that is busy with something else is read in
/// other pieces and faults happen where read-ahead has not come yet: the best of a few pairs is compared. A model that was copied would cost all
/// of its pages once more, each time.
#[test]
fn a_mapped_model_is_read_once() {
    let model = thin("storage-500", "24");
    let _alone = alone(&model);
    let flags = ["-c", "8", "-b", "8", "-ub", "8", "-lm", "mmap"];
    let drop = ["--drop", text(&model)];
    let side = Side::Plugin { keys: "inner=CPU;log=debug", device: "MoE0" };
    let pair = || {
        let (stock, theirs) = watched(&figures_of(Side::Stock, &model, &flags), &drop).expect("no limit was asked for");
        let (finished, ours) = watched(&figures_of(side, &model, &flags), &drop).expect("no limit was asked for");
        assert_eq!(figures(&finished), figures(&stock), "{}", finished.report("the figures differ"));
        println!("stock {theirs}, plugin {ours}");
        // The plugin's own library is read, too.
        number(&ours, "read_bytes") <= number(&theirs, "read_bytes") + (4 << 20)
            && number(&ours, "major_faults") <= number(&theirs, "major_faults") + 64
    };
    assert!((0..5).any(|_| pair()), "more reads or faults than stock has");
}

/// With half of the memory that the model takes: equal results, with a cache as well, and no more to read than stock has. Which pages the system
/// drops is chance, and stock's own reads differ by a third from run to run: medians of three in turns are compared, of more where the machine does
/// something else; a model that is copied would not run at all.
#[test]
fn a_model_twice_as_large_as_the_memory() {
    let model = thin("storage-170", "8");
    let _alone = alone(&model);
    let limit = (mib(&model) / 2).to_string();
    let options = ["--drop", text(&model), "--limit", &limit];
    let flags = ["-c", "8", "-b", "4", "-ub", "4", "-lm", "mmap"];
    let plugin = |keys: &'static str| Side::Plugin { keys, device: "MoE0" };
    let (mut theirs, mut ours, mut expected) = (Vec::new(), Vec::new(), None);
    let median = |numbers: &[u64]| {
        let mut sorted = numbers.to_vec();
        sorted.sort_unstable();
        sorted[sorted.len() / 2]
    };
    for turn in 1..=7 {
        let Some((stock, report)) = watched(&figures_of(Side::Stock, &model, &flags), &options) else {
            println!("skipped: no control group with a memory limit can be made here");
            return;
        };
        let expected = expected.get_or_insert_with(|| figures(&stock));
        theirs.push(number(&report, "read_bytes"));
        let side = plugin("inner=CPU;log=debug");
        let (finished, report) = watched(&figures_of(side, &model, &flags), &options).expect("as before");
        assert_eq!(&figures(&finished), &*expected, "{}", finished.report("the figures differ"));
        assert!(!finished.lines_with(ON_DISK).is_empty(), "{}", finished.report("not in the file"));
        ours.push(number(&report, "read_bytes"));
        if turn >= 3 && median(&ours) <= median(&theirs) / 2 * 3 {
            break;
        }
    }
    // What stands for the device's memory takes a fifth of the limit here, so more is read.
    let cached = plugin("inner=CPU;log=debug;cache=16");
    let (finished, _) = watched(&figures_of(cached, &model, &flags), &options).expect("as before");
    assert_eq!(Some(figures(&finished)), expected, "{}", finished.report("the figures differ"));
    println!("bytes read by stock {theirs:?}, by the plugin {ours:?}");
    assert!(median(&ours) <= median(&theirs) / 2 * 3, "{ours:?} beside stock's {theirs:?}");
}

/// A long pass with memory for half of the model reads the file once, as stock does, beside what loading reads: neither the making of the cache nor
/// what it takes on the way reads it again, nor do dense weights bring the experts around them. What is copied is asked for first, so it faults no more
/// than stock does. The best of a few pairs is compared: which pages the system drops is chance, while a second reading of most of the file, 1.55 to 2
/// times of what stock reads in all, would come each time.
#[test]
fn a_long_pass_reads_a_large_file_once() {
    let model = thin("storage-500", "24");
    let _alone = alone(&model);
    let half = mib(&model) / 2;
    // What stands for the device's memory (cache, staging) is RAM here, and comes on top.
    let (limit, more) = (half.to_string(), (half + 128).to_string());
    let options = ["--drop", text(&model), "--limit", &limit];
    let with_device = ["--drop", text(&model), "--limit", &more];
    let flags = ["-c", "32", "-b", "32", "-ub", "32", "-lm", "mmap"];
    let keys = "inner=CPU;debug-late=9;stream-min-tokens=9;experts-from=file;cache=24;log=debug";
    let mut read = Vec::new();
    for _ in 0..7 {
        let Some((stock, theirs)) = watched(&figures_of(Side::Stock, &model, &flags), &options) else {
            println!("skipped: no control group with a memory limit can be made here");
            return;
        };
        let (finished, ours) =
            watched(&figures_of(Side::Plugin { keys, device: "MoE0" }, &model, &flags), &with_device)
                .expect("as before");
        assert_eq!(figures(&finished), figures(&stock), "{}", finished.report("the figures differ"));
        assert!(!finished.lines_with(ON_DISK).is_empty(), "{}", finished.report("not in the file"));
        assert!(!finished.lines_with("expert cache of").is_empty(), "{}", finished.report("no cache was made"));
        assert!(largest(&finished.log(), "streamed_blocks") > 0, "{}", finished.report("nothing was brought"));
        println!("stock {theirs}, plugin {ours}");
        let both = |name| (number(&ours, name), number(&theirs, name));
        let ((bytes, stocks), (faults, stocks_faults)) = (both("read_bytes"), both("major_faults"));
        if bytes <= stocks / 5 * 7 && faults <= stocks_faults + 64 {
            return;
        }
        read.push((bytes, stocks, faults, stocks_faults));
    }
    panic!("bytes read by the plugin and by stock, major faults of both: {read:?}");
}

/// A buffer of which a part counts as registered, the rest not, at every border between chunks of a MiB; one token per pass and long passes, with
/// and without a cache.
#[test]
fn a_buffer_that_is_pinned_in_part() {
    for (threads, flags) in [(1, ["-b", "1", "-ub", "1", "-c", "64"]), (2, ["-b", "512", "-ub", "512", "-c", "512"])] {
        let stock = figures(&perplexity(Side::Stock, threads, 1, &flags));
        for (budget, device) in [
            (5, "inner=CPU;cache=off"),
            (3, "inner=CPU;cache=5"),
            (7, "inner=LATE0;debug-late=5;cache=5;debug-poison=on"),
        ] {
            let keys = format!("{device};log=debug;debug-pins=1;pin-budget-mb={budget}");
            let finished = perplexity(Side::Plugin { keys: &keys, device: "MoE0" }, threads, 1, &flags);
            assert_eq!(figures(&finished), stock, "{}", finished.report(&keys));
            let told = format!("experts pinned: pin-budget-mb allows {budget}");
            assert_eq!(finished.lines_with(&told).len(), 1, "{}", finished.report(&keys));
            ran_in_blocks(&finished);
        }
    }
}

/// Experts in the file over a device whose copies are late: long passes go through the pieces, single tokens through the cache.
#[test]
fn experts_in_the_file_over_a_late_device() {
    for (threads, flags, counter) in [
        (1, ["-b", "1", "-ub", "1", "-c", "64", "-lm", "mmap"], "misses"),
        (2, ["-b", "512", "-ub", "512", "-c", "512", "-lm", "mmap"], "streamed_blocks"),
    ] {
        let stock = figures(&perplexity(Side::Stock, threads, 1, &flags));
        for keys in
            ["inner=LATE0;debug-late=6;cache=5;debug-poison=on;log=debug", "inner=CPU;debug-late=9;cache=5;log=debug"]
        {
            let finished = perplexity(Side::Plugin { keys, device: "MoE0" }, threads, 1, &flags);
            assert_eq!(figures(&finished), stock, "{}", finished.report(keys));
            assert_eq!(finished.lines_with(ON_DISK).len(), 1, "{}", finished.report(keys));
            assert!(largest(&finished.log(), counter) > 0, "{}", finished.report(keys));
        }
    }
}
