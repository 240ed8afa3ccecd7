//! What a long pass leaves: what its last tokens used, memory for large passes that nobody touched, threads of their own for passes of several
//! tokens. Results are stock's throughout.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::json;

use crate::perplexity::perplexity;
use crate::sides::equal_over;
use crate::summary::{largest, ran_in_blocks};
use crate::support::fixture_model;
use crate::support::server::Server;
use crate::support::stock::{Side, tool};

/// A prompt of two long passes of 48 tokens and a rest, and what follows.
const PROMPT: &str = "## What is ownership?\n\nOwnership is a set of rules that govern how a program manages memory. All programs have to \
    manage the way they use a computer's memory while running. Some languages have garbage collection that regularly looks for memory \
    that is no longer used as the program runs; in other languages, the programmer must explicitly allocate and free the memory. The";

/// Heat of each group's experts, in uses per 10,000 tokens, out of a state file.
fn heat(file: &Path) -> BTreeMap<String, Vec<f64>> {
    let text = std::fs::read_to_string(file).expect("a state file");
    let rows = text.lines().filter_map(|line| line.trim().strip_prefix("heat.")?.split_once('='));
    let numbers = |list: &str| {
        list.split([' ', ',']).filter(|word| !word.is_empty()).map(|word| word.parse().expect(word)).collect()
    };
    rows.map(|(name, list)| (name.trim().to_owned(), numbers(list))).collect()
}

/// The ids that a long pass leaves are those of its tokens: what is learned of 128 tokens in long passes is what is learned of them one by one. Over
/// the CPU, and over a device that copies late.
#[test]
fn what_is_learned_of_a_pass_is_what_its_tokens_used() {
    let folder = tempfile::tempdir().expect("a folder");
    let learn = |name: &str, keys: &str, passes: &[&str]| {
        let file = folder.path().join(name);
        let keys = format!("log=debug;moe-expert-cache=8;state-file={};{keys}", file.display());
        let side = Side::Plugin { keys: &keys, device: "MoE0" };
        let finished = perplexity(side, 1, 1, &[&["-c", "128"], passes].concat());
        (heat(&file), finished)
    };
    let (one_by_one, _) = learn("single", "inner=CPU", &["-b", "1", "-ub", "1"]);
    assert_eq!(one_by_one.len(), 6);
    for (name, keys) in [("cpu", "inner=CPU"), ("late", "inner=LATE0;debug-late=3;debug-poison=on")] {
        let (passes, finished) = learn(name, keys, &["-b", "64", "-ub", "64"]);
        assert!(largest(&finished.log(), "streamed_blocks") > 0, "{}", finished.report("no long pass"));
        assert_eq!(passes.len(), 6, "{}", finished.report(name));
        for (group, uses) in &passes {
            let sum: f64 = uses.iter().sum();
            // The last layer computes the half of the tokens whose logits are asked for.
            let all = if group.starts_with("blk.5.") { 20_000.0 } else { 40_000.0 };
            assert!((sum - all).abs() < 400.0, "{name}, {group}: four experts per token, {sum}");
            // Routing near a tie may differ by the number of tokens that are computed at once.
            let apart: f64 = uses.iter().zip(&one_by_one[group]).map(|(one, other)| (one - other).abs()).sum();
            assert!(apart < 800.0, "{name}, {group}: {apart} of {sum} apart\n{uses:?}\n{:?}", one_by_one[group]);
        }
    }
}

/// Prompts of long passes, of a few tokens, and both behind each other, then decoding: the cache is filled by what the prompts used.
#[test]
fn decoding_after_prompts_equals_stock() {
    for keys in ["inner=CPU;cache=6", "inner=LATE0;debug-late=2;debug-poison=on;cache=6"] {
        let keys = format!("{keys};log=debug;prompt-threads=1;threads=2");
        let side = Side::Plugin { keys: &keys, device: "MoE0" };
        let arguments = ["-c", "1024", "-np", "1", "-b", "48", "-ub", "48"];
        let ask = |server: &Server, prompt: &str, cached: bool| {
            let body = json!({ "prompt": prompt, "n_predict": 20, "temperature": 0, "seed": 1, "return_tokens": true,
                "cache_prompt": cached, "ignore_eos": true });
            server.post("/completion", &body)["tokens"].clone()
        };
        let (_, finished) = equal_over(side, &fixture_model(), &arguments, |server| {
            let longer = format!("{PROMPT} stack and the heap are");
            [
                ask(server, PROMPT, false),
                ask(server, "A list is a mutable", false),
                ask(server, &longer, true),
                ask(server, PROMPT, true),
            ]
        });
        let log = finished.log();
        assert!(largest(&log, "streamed_blocks") > 0 && largest(&log, "hits") > 0, "{}", finished.report("not so"));
    }
}

/// The largest resident size that a process had, in MiB.
fn most_resident_mib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).expect("a number") >> 10
}

/// Passes of up to 12,288 tokens over a long context: the host's mask is large, and a device whose host memory is committed when it is given out
/// would take it whole. Through us it costs what is used, and answers are stock's.
#[test]
fn memory_for_large_passes_costs_what_is_used() {
    let flags = ["-c", "16384", "-np", "1", "-b", "12288", "-ub", "12288", "--no-warmup", "-fa", "on"];
    let answer = |side: Side<'_>, device: &str| {
        let mut command = tool("llama-server", side, &fixture_model(), 1);
        command.env("MOE_HOST_PINNED", "1").args(flags).arg("-v");
        if !device.is_empty() {
            command.env_remove("GGML_BACKEND_PATH").args(["--device", device]);
        }
        let mut server = Server::launch(&mut command);
        server.wait_ready();
        let told = server.complete(PROMPT, 8, 3);
        let peak = most_resident_mib(server.process().id());
        (told, peak, server.stop())
    };
    let late = "inner=LATE0;debug-late=1";
    // What the device computes by itself is stock's (`late::the_device_alone_equals_stock`).
    let (stock, whole, _) = answer(Side::Plugin { keys: late, device: "" }, "LATE0");
    let keys = format!("{late};log=debug;cache=6");
    let (ours, used, finished) = answer(Side::Plugin { keys: &keys, device: "MoE0" }, "");
    assert_eq!(ours, stock, "{}", finished.report("not equal to stock"));
    ran_in_blocks(&finished);
    let line = finished.lines_with("of RAM for compute are not pinned").pop();
    let line = line.unwrap_or_else(|| panic!("{}", finished.report("all of it is pinned")));
    let mib: u64 = line.split("MoE0: ").last().and_then(|rest| rest.split(' ').next()?.parse().ok()).expect("a size");
    println!("{mib} MiB for compute; {whole} MiB resident without us, {used} with us");
    assert!(mib > 256 && used + mib * 3 / 4 < whole, "{mib} MiB: {used} and {whole} resident");
    assert!(!finished.lines_with("LATE0_Host compute buffer").is_empty(), "{}", finished.report("not named as it was"));
}
