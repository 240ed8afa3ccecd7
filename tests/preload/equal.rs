//! Passes of equal length: batches that llama.cpp would run as full passes and a short rest give what a stock host gives with micro-batches of the
//! equal length; batches of which more is wanted than outputs at the end run as in stock. What the device saw is in the debug lines of its passes.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::support::process::{Finished, run};
use super::support::server::Server;
use super::support::stock::{self, Side, command, compile, program};
use super::support::{fixture, fixture_model, text};
use super::{HELP, LIMIT, host, preload_plugin, ran_in_blocks, was_helped};

/// Tokens and outputs of each pass of a prompt, in order.
type Passes = Vec<(u32, u32)>;

fn passes(lines: &[String]) -> Passes {
    let read = |line: &String| {
        let (_, numbers) = line.split_once("a pass of ")?;
        let (tokens, outputs) = numbers.split_once(" tokens, ")?;
        Some((tokens.parse().ok()?, outputs.split_once(" outputs")?.0.parse().ok()?))
    };
    lines.iter().filter_map(read).collect()
}

fn passes_of(finished: &Finished) -> Passes {
    passes(&finished.lines_with("a pass of "))
}

/// Memory for longer contexts than other tests have, and less than the model takes with one.
const ROOM: [&str; 2] = ["--moe", "vram-budget-mb=28"];
const TOLD: &str =
    "ggml-moe: a prompt of 400 tokens runs as 2 passes of 200 tokens instead of one of 256 and one of 144, because";

/// What a server with micro-batches of so many tokens answers to prompts of these lengths. `help`: the library and its arguments, or stock.
fn answers(micro_batch: &str, lengths: &[u32], more: &[&str], help: &[&str]) -> (Vec<Value>, Finished) {
    let mut command = host("llama-server");
    command.args(["-c", "2048", "-np", "1", "-b", "1024", "-ub", micro_batch]).args(more).args(help);
    if !help.is_empty() {
        preload_plugin(&mut command);
    }
    let mut server = Server::launch(&mut command);
    server.wait_ready();
    let ask = |&tokens: &u32| {
        let prompt: Vec<u32> = (0..tokens).map(|at| 20 + (at * 37 + tokens + at * at % 13) % 400).collect();
        let body = json!({
            "prompt": prompt, "n_predict": 6, "n_probs": 3, "temperature": 0, "seed": 1, "return_tokens": true, "cache_prompt": false,
        });
        let answer = server.post("/completion", &body);
        assert_eq!(answer["tokens"].as_array().map(Vec::len), Some(6), "{answer}");
        json!([answer["tokens"], answer["completion_probabilities"]])
    };
    (lengths.iter().map(ask).collect(), server.stop())
}

#[test]
fn a_server_with_equal_passes_equals_stock() {
    // Prompts, and the equal length or that of the micro-batch where nothing is gained.
    let expected: [(u32, &str, &[u32]); 5] = [
        (400, "200", &[200, 200]),
        (700, "234", &[234, 234, 232]),
        (900, "225", &[225, 225, 225, 225]),
        (600, "256", &[256, 256, 88]),
        (500, "256", &[256, 244]),
    ];
    let lengths = expected.map(|(tokens, ..)| tokens);
    let (ours, finished) = answers("256", &lengths, &[], &HELP);
    was_helped(&finished);
    for ((tokens, micro_batch, _), ours) in expected.iter().zip(&ours) {
        let (stock, _) = answers(micro_batch, &[*tokens], &[], &[]);
        assert_eq!(ours, &stock[0], "{}", finished.report(&format!("{tokens} tokens")));
    }
    let lengths: Vec<u32> = passes_of(&finished).iter().map(|(tokens, _)| *tokens).collect();
    assert_eq!(lengths, expected.iter().flat_map(|(.., passes)| *passes).copied().collect::<Vec<_>>());
    assert_eq!(finished.lines_with(TOLD).len(), 1, "{}", finished.report("what is done is told once"));

    let (off, finished) = answers("256", &[400], &[], &[&HELP[..], &["--moe", "equal-passes=off"]].concat());
    assert_eq!((&off, passes_of(&finished)), (&answers("256", &[400], &[], &[]).0, vec![(256, 0), (144, 1)]));
}

/// A draft model reads the prompt as well, and drafts are checked with outputs for each token.
#[test]
fn drafts_after_equal_passes_equal_stock() {
    let model = fixture_model();
    let draft = ["-md", text(&model), "--spec-type", "draft-simple", "--spec-draft-n-max", "4"];
    let (ours, finished) = answers("256", &[400], &draft, &[&HELP[..], &ROOM].concat());
    assert_eq!(ours, answers("200", &[400], &draft, &[]).0, "{}", finished.report("not equal to stock"));
    let target: Passes = passes_of(&finished).into_iter().filter(|(_, outputs)| *outputs > 0).collect();
    assert!(target.contains(&(200, 1)), "{target:?}");
}

/// Logits of the second half of each chunk: all in the last part, or in the middle as well.
#[test]
fn perplexity_is_cut_where_its_outputs_allow() {
    let figures = |chunk: &str, micro_batch: &str, help: &[&str]| {
        let mut command = host("llama-perplexity");
        command.args(["-f", text(&fixture("eval.txt")), "--chunks", "2", "-c", chunk, "-b", chunk, "-ub", micro_batch]);
        if !help.is_empty() {
            preload_plugin(&mut command).args(help).args(ROOM).args(["-lv", "4"]);
        }
        let finished = run(&mut command, LIMIT).success();
        let figure = finished.lines_with("Final estimate").pop().expect("a result");
        (figure.split_once("Final").expect("it begins so").1.to_owned(), passes_of(&finished))
    };
    let (cut, seen) = figures("512", "300", &HELP);
    assert_eq!((cut, seen), (figures("512", "256", &[]).0, vec![(256, 0), (256, 256), (256, 0), (256, 256)]));
    let (whole, seen) = figures("1024", "400", &HELP);
    let chunk = [(400, 0), (400, 288), (224, 224)];
    assert_eq!((whole, seen), (figures("1024", "400", &[]).0, [chunk, chunk].concat()));
}

#[test]
fn a_bench_runs_in_equal_passes() {
    let mut command = program("llama-bench", Side::Stock);
    command.args([
        "-m",
        text(&fixture_model()),
        "-t",
        "2",
        "-p",
        "400",
        "-n",
        "0",
        "-r",
        "1",
        "-b",
        "512",
        "-ub",
        "256",
    ]);
    let finished = run(preload_plugin(&mut command).args(HELP).args(["-o", "json", "-v"]), LIMIT).success();
    was_helped(&finished);
    // Its warm-up is the first from which it is known that the model is helped.
    assert_eq!(passes_of(&finished), [(256, 0), (144, 1), (200, 0), (200, 1)]);
}

/// A program of our own: every way to an output, what is left alone, what fails; it compares numbers itself.
#[test]
fn every_batch_is_as_in_stock() {
    let backends = format!("-DBACKENDS=\"{}\"", stock::folder().display());
    let host = compile("preload/equal.c", "equal", &[&backends]);
    let cases = |more: &[&str]| {
        let mut command = command(&host, Side::Stock);
        let keys =
            ["--moe", "inner=CPU", "--moe", "vram-budget-mb=60", "--moe", "log=debug", "--moe", "state-file=off"];
        command.arg(fixture_model()).args(keys).args(["--moe", "threads=1", "--moe", "pass-tokens=1024"]).args(more);
        let finished = run(preload_plugin(&mut command), LIMIT);
        let (mut name, mut cases) = (String::new(), HashMap::<String, Vec<String>>::new());
        for line in finished.stderr.lines() {
            match line.strip_prefix("case ") {
                Some(next) => next.clone_into(&mut name),
                None => cases.entry(name.clone()).or_default().push(line.to_owned()),
            }
        }
        (finished, cases)
    };
    let (finished, cases_on) = cases(&[]);
    let finished = finished.success();
    ran_in_blocks(&finished);
    assert!(finished.stdout.contains("lengths: 4096 1024"), "{}", finished.report("four passes to a batch"));
    let of = |name: &str| passes(cases_on.get(name).map(Vec::as_slice).unwrap_or_default());
    let cut = [(200, 0), (200, 1)];
    for (name, expected) in [
        ("equal", &cut[..]),
        ("stock", &cut),
        ("read", &cut),
        ("no-room", &[(200, 0), (200, 1), (200, 0), (200, 1)]),
        ("refused", &[]),
        ("middle", &[(256, 1), (144, 1)]),
        ("tail", &[(200, 0), (200, 2)]),
        ("hole", &[]),
        ("sequences", &[(256, 0), (144, 1)]),
        ("shared", &[(256, 0), (144, 1)]),
        ("refilled", &[(200, 0), (200, 0)]),
        ("embeddings", &[(256, 256), (144, 144)]),
        ("token-embeddings", &[(256, 256), (144, 144)]),
        ("pooled", &[(256, 256), (144, 144)]),
        ("watched", &[(256, 0), (144, 1)]),
        ("counted", &cut),
        ("aborted", &cut),
    ] {
        assert_eq!(of(name), expected, "{}", finished.report(name));
    }
    let said = |name: &str, what: &str| cases_on[name].iter().any(|line| line.contains(what));
    assert!(
        said("refused", "failed to find a memory slot for batch of size 400"),
        "{}",
        finished.report("as stock says")
    );

    let (finished, cases_off) = cases(&["--moe", "equal-passes=off"]);
    assert!(finished.stdout.contains("lengths: 2048 1024"), "{}", finished.report("llama.cpp's own batch"));
    let seen = cases_off.get("equal").map(Vec::as_slice).unwrap_or_default();
    assert_eq!(passes(seen), [(256, 0), (144, 1)], "{seen:#?}");
}

/// Functions of llama.cpp that build batches, or have a context and a number that may be an index in one: each is stood before, or needs not be.
#[test]
fn every_function_with_an_index_is_known() {
    let (headers, mut unknown) = (stock::sources(), Vec::new());
    let defined = run(Command::new("nm").args(["-D", "--defined-only", text(stock::plugin())]), LIMIT).success().stdout;
    let is_ours = |name: &str| {
        let mangled = format!("_Z{}{name}P", name.len());
        defined.lines().filter_map(|line| line.rsplit(' ').next()).any(|it| it == name || it.starts_with(&mangled))
    };
    let mut count = 0;
    for header in ["include/llama.h", "src/llama-ext.h"] {
        let text = std::fs::read_to_string(Path::new(headers).join(header)).expect("a header");
        let code: String =
            text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join(" ");
        for declaration in code.split("LLAMA_API").skip(1) {
            let declaration = declaration.split(';').next().unwrap_or_default();
            let Some((head, arguments)) = declaration.split_once('(') else { continue };
            let name = head.split([' ', '*']).next_back().map_or("", str::trim);
            let name =
                if name.is_empty() { head.trim_end().rsplit([' ', '*']).next().unwrap_or_default() } else { name };
            let has = |word: &str| arguments.split(|c: char| !c.is_alphanumeric() && c != '_').any(|it| it == word);
            let indexes = has("llama_context") && has("int32_t");
            if !indexes && !has("llama_batch_ext") && !name.starts_with("llama_batch_ext") && !has("llama_batch") {
                continue;
            }
            count += 1;
            if !is_ours(name) && !FREE_OF_INDICES.contains(&name) {
                unknown.push(name.to_owned());
            }
        }
    }
    assert!(count > 30, "the headers were not read: {count} functions");
    assert_eq!(
        unknown,
        Vec::<String>::new(),
        "src/abi/llama/equal.rs has to stand before them, or they go to FREE_OF_INDICES"
    );
}

/// Those whose numbers are no index in a batch, or that read what contexts have whose batches are never cut.
const FREE_OF_INDICES: [&str; 5] = [
    "llama_batch_free",               // of the other kind of batch, which is not cut
    "llama_set_n_threads",            // threads
    "llama_set_adapter_cvec",         // sizes and layers
    "llama_set_nextn_layer_offset",   // a layer
    "llama_get_embeddings_nextn_ith", // asked for by llama_set_embeddings_nextn, after which nothing is cut
];
