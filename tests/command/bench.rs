//! `ggml-moe bench` and `ggml-moe ppl` over programs that only look like the host's.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use super::run;

/// A folder with fake programs, an empty plugin and the fixture's path.
struct Host {
    folder: TempDir,
}

/// What a plugin of good health prints.
const LINES: &str = "ggml-moe: MoE0: expert cache of 8 MiB on CUDA0 (as cache= says): room for 97 of 192 experts (51%)\n\
    ggml-moe: summary {\"device\":\"MoE0\",\"blocks\":9,\"hits\":30,\"misses\":10,\"cpu_bytes\":50000000,\"upload_bytes\":1000000}";

/// Prints what llama-bench would: half the speed without the plugin. `$lines` is what the plugin says.
const BENCH: &str = r#"
if [ "$1" = --list-devices ]; then
  echo "Available devices:"; echo "  CUDA0: A card (1 MiB, 1 MiB free)"
  [ -z "$GGML_BACKEND_PATH" ] || echo "  MoE0: MoE over CUDA0 (1 MiB, 1 MiB free)"
  exit 0
fi
echo "$GGML_MOE|$*" >> "$(dirname "$0")/calls"
while [ $# -gt 0 ]; do case $1 in -p) p=$2;; -n) n=$2;; -ub) ub=$2;; -ncmoe) cpu=$2;; esac; shift; done
speed=10; [ -z "$GGML_BACKEND_PATH" ] || { speed=20; echo "$lines" >&2; }
echo "load_tensors: CUDA0 model buffer size = 7.50 MiB" >&2
row() { # prompt, tokens, micro-batch
  rate=$speed; if [ "${cpu:-0}" = 3 ] && [ "$3" = 1024 ]; then rate=15; fi
  echo '{"build_number": 7, "build_commit": "abc", "cpu_info": "C", "gpu_info": "A card", "test_time": "2026-11-30T00:00:00Z",'\
'"n_prompt": '$1', "n_gen": '$2', "n_ubatch": '$3', "samples_ts": [1, 1, '$rate', '$rate.5', '$rate']}'
}
for u in $(echo "$ub" | tr , ' '); do
  if [ "$n" != 0 ]; then row 0 "$n" "$u"; else for size in $(echo "$p" | tr , ' '); do row "$size" 0 "$u"; done; fi
done
"#;

impl Host {
    fn new(lines: &str) -> Self {
        let host = Self { folder: tempfile::tempdir().expect("a folder") };
        host.write("llama-bench", &format!("lines='{lines}'\n{BENCH}"));
        fs::write(host.path("libggml-moe.so"), "").expect("written");
        host
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, script: &str) {
        let path = self.path(name);
        fs::write(&path, format!("#!/bin/bash\n{script}")).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a program");
    }

    /// Calls the command with the fake host: exit code, standard output, standard error without progress.
    fn call(&self, command: &str, more: &[&str]) -> (Option<i32>, String, String) {
        let text = |path: PathBuf| path.to_str().expect("text").to_owned();
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-docs-moe.Q4_K_M.gguf");
        let words = [
            command.to_owned(),
            format!("--model={}", text(model)),
            format!("--host-dir={}", text(self.folder.path().to_owned())),
            format!("--plugin={}", text(self.path("libggml-moe.so"))),
        ];
        let all: Vec<&str> = words.iter().map(String::as_str).chain(more.iter().copied()).collect();
        let output = run(&all);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let errors = text(&output.stderr)
            .lines()
            .filter(|line| line.starts_with("ggml-moe") || line.starts_with("error"))
            .collect::<Vec<_>>()
            .join("\n");
        (output.status.code(), text(&output.stdout), errors)
    }

    fn bench(&self, more: &[&str]) -> (Option<i32>, String, String) {
        let runs = format!("--runs={}", self.path("runs.jsonl").display());
        self.call("bench", &[&[runs.as_str()], more].concat())
    }

    /// The command must end with this code and one line that holds the words.
    fn refused(&self, command: &str, more: &[&str], code: i32, words: &str) {
        let (status, output, errors) = self.call(command, more);
        assert_eq!(status, Some(code), "{output}{errors}");
        assert!(errors.contains(words) && errors.lines().count() == 1 && output.is_empty(), "{output}{errors}");
    }

    fn calls(&self) -> Vec<String> {
        let calls = fs::read_to_string(self.path("calls")).unwrap_or_default();
        calls.lines().map(str::to_owned).collect()
    }
}

#[test]
fn sides_take_turns_and_ratios_are_told() {
    let host = Host::new(LINES);
    let (json, chart) = (host.path("b.json"), host.path("b.svg"));
    let files = [format!("--json={}", json.display()), format!("--chart={}", chart.display())];
    let (status, output, errors) =
        host.bench(&["-p", "64,128", "-n", "16", "--share", "50", "-t", "2", "--repeats", "2", &files[0], &files[1]]);
    assert_eq!((status, errors.as_str()), (Some(0), ""), "{output}");
    let last = output.lines().last().expect("a line");
    assert_eq!(
        last,
        "bench: decode 2.00x (2.00 to 2.00), prompt pp64 2.00x (2.00 to 2.00), prompt pp128 2.00x (2.00 to 2.00)"
    );
    let row: Vec<&str> = output.lines().find(|line| line.contains("tg16")).expect("a row").split_whitespace().collect();
    assert_eq!(row[..5], ["50%", "8", "-ncmoe", "2", "tg16"], "four of six layers fit into 8 MiB");
    assert_eq!(row[8..], ["2.00..2.00", "75.0%", "97/192", "0.6", "0.0", "8", "/", "?+8"]);
    let calls = host.calls();
    let sides: Vec<bool> =
        calls.iter().map(|call| call.starts_with("inner=CUDA0;log=debug;state-file=off;cache=8|")).collect();
    assert_eq!(sides, [false, true, false, true, false, true, false, true], "stock, ours, stock, ours");
    assert!(calls.iter().all(|call| call.contains("-t 2") && call.contains("-ngl 99") && call.contains("-r 5")));
    assert!(calls[0].contains("-dev CUDA0") && calls[0].contains("-ncmoe 2") && calls[0].contains("-p 64,128 -n 0"));
    assert!(calls[7].contains("-dev MoE0") && !calls[7].contains("-ncmoe") && calls[7].contains("-p 0 -n 16"));
    let report: Value = serde_json::from_slice(&fs::read(json).expect("a file")).expect("JSON");
    assert_eq!(report["host"]["build"], "7 (abc)");
    let test = &report["cases"][0]["phases"][1]["tests"][0];
    assert_eq!(test["samples"][1]["ours"], serde_json::json!([20.0, 20.5, 20.0]), "the first two do not count");
    assert!(fs::read_to_string(chart).expect("a picture").contains(">tg16<"));
}

#[test]
fn runs_are_kept_and_listed() {
    let host = Host::new(LINES);
    let (status, output, _) = host.bench(&["--list"]);
    assert!(status == Some(0) && output.contains("no runs are kept"), "{output}");
    for _ in 0..2 {
        assert_eq!(host.bench(&["-p", "0", "-n", "16", "--share", "50", "--repeats", "1"]).0, Some(0));
    }
    let (status, output, _) = host.bench(&["--list"]);
    assert!(status == Some(0) && output.matches("tg16").count() == 2 && output.contains("2.00x"), "{output}");
    let kept = fs::read_to_string(host.path("runs.jsonl")).expect("kept");
    let run: Value = serde_json::from_str(kept.lines().next().expect("a line")).expect("JSON");
    for (place, wanted) in
        [("/machine/gpu", "A card"), ("/machine/cpu", "C"), ("/date", "2026-11-30T00:00:00Z"), ("/command/1", "bench")]
    {
        assert_eq!(run.pointer(place).and_then(Value::as_str), Some(wanted));
    }
}

#[test]
fn what_was_measured_before_a_failure_is_kept() {
    let host = Host::new(LINES);
    let script =
        BENCH.replace("speed=10;", "[ \"$n\" = 0 ] || { echo 'error: out of memory' >&2; exit 3; }; speed=10;");
    host.write("llama-bench", &format!("lines='{LINES}'\n{script}"));
    let (status, output, errors) = host.bench(&["-p", "64", "-n", "16", "--share", "50", "--repeats", "1"]);
    assert_eq!((status, output.as_str()), (Some(1), ""));
    assert_eq!(errors, "ggml-moe bench: stock: llama-bench ended with exit status: 3: error: out of memory");
    let kept = fs::read_to_string(host.path("runs.jsonl")).expect("kept");
    assert!(kept.contains("pp64") && !kept.contains("tg16"), "{kept}");
}

#[test]
fn a_search_takes_stocks_best_flags() {
    let host = Host::new(LINES);
    let (status, output, errors) =
        host.bench(&["-p", "1024", "-n", "0", "--share", "50", "--repeats", "1", "--search"]);
    assert_eq!(status, Some(0), "{output}{errors}");
    assert!(output.contains("-ncmoe 3 -ub 1024") && output.contains("1.33x"), "{output}");
    let calls = host.calls();
    assert!(
        calls[0].contains("-ub 512,1024") && calls[0].contains("-ncmoe 2") && calls[2].contains("-ncmoe 4"),
        "{calls:?}"
    );
    let stock = &calls[calls.len() - 2];
    assert!(stock.matches("-ub ").count() == 1 && stock.contains("-ncmoe 3") && stock.contains("-ub 1024"), "{stock}");
    assert!(calls[calls.len() - 1].contains("-ub 512"), "ours keeps its own");
}

#[test]
fn flags_of_the_user_win() {
    let host = Host::new(LINES);
    let more =
        ["-ub", "128", "--stock-args", "-ot exps=CPU", "--our-args", "-fa on", "--moe", "cache=9", "--moe", "windw=32"];
    // A key that the plugin does not know is refused before anything runs.
    host.refused("bench", &more, 2, "unknown key \"windw\"");
    let more =
        [&["-n", "4", "-p", "0", "--repeats", "1", "--share", "50"][..], &more[..8], &["--", "-ngl", "7"]].concat();
    assert_eq!(host.bench(&more).0, Some(0));
    let calls = host.calls();
    assert!(
        calls[0].contains("-ot exps=CPU") && !calls[0].contains("-ncmoe") && calls[0].contains("-ub 128"),
        "{calls:?}"
    );
    assert!(
        calls[1].starts_with("inner=CUDA0;log=debug;state-file=off;cache=8;cache=9|") && calls[1].contains("-fa on"),
        "{calls:?}"
    );
    assert!(calls.iter().all(|call| call.contains("-ngl 7") && !call.contains("-ngl 99")), "{calls:?}");
}

#[test]
fn a_dry_run_prints_both_commands() {
    let host = Host::new(LINES);
    let (status, output, _) = host.bench(&["--dry-run", "--cache-mib", "3", "-p", "0"]);
    assert_eq!((status, host.calls().len()), (Some(0), 0));
    let lines: Vec<&str> = output.lines().collect();
    assert!(lines[1].contains("/llama-bench -m ") && lines[1].contains("-ncmoe 5"), "{output}");
    assert!(
        lines[2].starts_with("GGML_MOE='inner=CUDA0;log=debug;state-file=off;cache=3' GGML_BACKEND_PATH=/"),
        "{output}"
    );
    assert!(!host.path("runs.jsonl").exists());
}

#[test]
fn a_run_without_the_plugins_work_is_void() {
    for (lines, words) in [
        ("ggml-moe: MoE0 passes everything through to CUDA0: no reason", "to CUDA0: no reason"),
        ("ggml-moe: MoE0: no cache: too small\nggml-moe: summary {\"blocks\":3}", "no cache: too small"),
        ("ggml-moe: summary {\"blocks\":0}", "no MoE block"),
        ("nothing", "told nothing"),
        (
            "ggml-moe: expert cache of 8 MiB on X (x): room for 12 of 192 experts (6%)\nggml-moe: summary {\"blocks\":3,\"hits\":1}",
            "12 of 192",
        ),
    ] {
        let host = Host::new(lines);
        let (status, output, _) = host.bench(&["-p", "0", "-n", "16", "--share", "50"]);
        assert_eq!(status, Some(1), "{output}");
        let last = output.lines().last().expect("a line");
        assert!(last.starts_with("bench: void: ") && last.contains(words), "{last}");
        assert!(!output.contains("2.00x") && host.calls().len() == 2, "it ends after the first pair");
        assert!(fs::read_to_string(host.path("runs.jsonl")).expect("kept").contains("\"void\":\""));
    }
}

#[test]
fn what_cannot_run_is_told_in_one_line() {
    let host = Host::new(LINES);
    host.refused("bench", &["--llama-bench", "/no/such/program"], 2, "/no/such/program: no such program");
    host.refused("bench", &["--share", "0"], 2, "--share 0");
    host.refused("bench", &["--samples", "2"], 2, "more than --skip");
    host.refused("bench", &["-p", "0", "-n", "0"], 2, "nothing to measure");
    host.refused("bench", &["--vram-mib", "300"], 2, "leaves nothing to experts");
    host.refused("bench", &["--replay", "zipf"], 2, "presets: qwen3-30b");
    host.refused("bench", &["--replay", "qwen3-30b"], 2, "routes to 8 of 128 experts, the model to 4 of 32");
    host.refused("bench", &["--inner", "CUDA7"], 1, "no device CUDA7; its devices: CUDA0");
    host.write("llama-bench", "echo 'Available devices:'; echo '  CUDA0: x'");
    host.refused("bench", &[], 1, "does not offer MoE0: it loaded no backend");
    host.write(
        "llama-bench",
        "[ $1 = --list-devices ] || { echo 'error: no memory' >&2; kill -SEGV $$; }\n\
        echo '  CUDA0: x'; echo '  MoE0: x'",
    );
    host.refused("bench", &[], 1, "stock: llama-bench ended with signal: 11");
    host.write("llama-bench", "[ $1 = --list-devices ] || exec sleep 60\necho '  CUDA0: x'; echo '  MoE0: x'");
    host.refused("bench", &["--timeout", "1"], 1, "stock: llama-bench was stopped after 1 s (--timeout)");
    host.write("llama-bench", "echo '  CUDA0: x'; echo '  MoE0: x'");
    host.refused("bench", &["-n", "0"], 1, "stock: llama-bench printed no result for pp512");
    let dense = host.path("dense.gguf");
    fs::write(&dense, b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0").expect("written");
    let call = |model: &str| {
        let output = run(&["bench", "-m", model]);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, error) = call(dense.to_str().expect("text"));
    assert!(status == Some(2) && error.contains("a model without experts"), "{error}");
    let (status, error) = call("/no/such/model.gguf");
    assert!(status == Some(2) && error.contains("/no/such/model.gguf: No such file"), "{error}");
    assert_eq!(run(&["bench"]).status.code(), Some(2));
    assert_eq!(run(&["bench", "--no-such-flag"]).status.code(), Some(2));
}

/// What llama-bench would print of its memory: computing takes a MiB for 512 tokens of a micro-batch.
const MEMORY: &str = r#"
ub=${ub:-512}
for u in $(echo "$ub" | tr , ' '); do
  echo "llama_context: n_ubatch              = $u" >&2
  echo "sched_reserve: CUDA0 compute buffer size = $((u / 512)).00 MiB" >&2
done
path=${GGML_MOE##*timeline=}; path=${path%%;*}
[ "$path" = "$GGML_MOE" ] || echo '{"format":1,"device":"MoE0","pass":1,"tokens":64,"unit":"layer","buffers":2,"ram_bytes":1000,'\
'"copies":[[0,0,0,100]],"computes":[[0,0,50,200]],"both_us":50}' >> "$path"
"#;

#[test]
fn prompts_are_compared_at_the_same_memory() {
    let host = Host::new(LINES);
    host.write(
        "llama-bench",
        &format!("lines='{LINES}'\n{}", BENCH.replace("row() {", &format!("{MEMORY}\nrow() {{"))),
    );
    let (json, drawn) = (host.path("t.json"), host.path("t.svg"));
    let files = [format!("--json={}", json.display()), format!("--timeline={}", drawn.display())];
    let arguments = [
        "--prompt-table",
        "-p",
        "64,128",
        "--cache-mib",
        "8",
        "--our-ubatch",
        "512,1024",
        "--stock-ubatch",
        "512,2048,4096",
    ];
    let (status, output, errors) = host.bench(&[&arguments[..], &[&files[0], &files[1]]].concat());
    assert_eq!((status, errors.as_str()), (Some(0), ""), "{output}");
    let calls = host.calls();
    assert!(
        calls[0].contains("-ub 512,2048") && calls[0].contains("--no-warmup"),
        "what memory is measured with: {calls:?}"
    );
    assert!(calls[1].contains("cache=8;vram-budget-mb=") && calls[1].contains("-ub 512,1024"), "{calls:?}");
    // Four of six layers fit into 8 MiB; 3 MiB more for computing cost two of them, 7 MiB all four.
    for (call, layers) in calls[2..5].iter().zip(["-ncmoe 2", "-ncmoe 4", "-ncmoe 6"]) {
        assert!(call.contains("-lm none") && call.contains(layers), "{layers} in {call}");
    }
    assert!(
        calls[5].contains("-ncmoe 2") && !calls[5].contains("-ub") && !calls[5].contains("-lm"),
        "its defaults: {calls:?}"
    );
    assert!(calls[6].contains("-ncmoe 6") && calls[7].contains("-ncmoe 0") && calls.len() == 8, "{calls:?}");
    assert!(output.contains("2.00x") && output.contains("same memory: "), "{output}");
    assert!(output.contains("50.0% overlap"), "{output}");
    assert!(output.ends_with("pp128 2.00x of stock's best, 2.00x of its default\n"), "{output}");
    let report: Value = serde_json::from_slice(&fs::read(json).expect("a file")).expect("JSON");
    assert_eq!(report.pointer("/prompt_tables/0/prompts/0/best/equal/ratio").and_then(Value::as_f64), Some(2.0));
    assert!(fs::read_to_string(&drawn).expect("a picture").contains(">idle<"));
    let (status, output, _) = host.bench(&["--list"]);
    assert!(status == Some(0) && output.contains("pp128/1024") && output.contains("2.00x"), "{output}");
    let lines = drawn.with_extension("jsonl");
    let (status, output, _) = host.call("bench", &["--draw-timeline", lines.to_str().expect("text")]);
    assert!(status == Some(0) && output.contains("pass 1 of 64 tokens"), "{output}");
    host.refused("bench", &["--draw-timeline", "/no/such/file"], 1, "/no/such/file: No such file");
    host.refused("bench", &["--prompt-table", "-p", "0"], 2, "no prompt to measure");
    host.refused("bench", &["--prompt-table", "--our-ubatch", "0"], 2, "one token or more");
    host.refused("bench", &["--curve", "c", "--curve-from", "640"], 2, "--curve-tokens must be more");
    // A plugin that does nothing, and stock that does not run.
    let host = Host::new("ggml-moe: summary {\"blocks\":0}");
    let (status, output, _) = host.bench(&["--prompt-table", "-p", "64", "--share", "50"]);
    assert!(status == Some(1) && output.contains("void: no MoE block") && !output.contains("2.00x"), "{output}");
}

/// Prints what llama-perplexity would; `$off` is what the plugin's side adds to the second of three chunks.
const PERPLEXITY: &str = r#"
if [ "$1" = --list-devices ]; then
  echo "  CUDA0: A card"; [ -z "$GGML_BACKEND_PATH" ] || echo "  MoE0: MoE over CUDA0"; exit 0
fi
echo "$GGML_MOE|$*" >> "$(dirname "$0")/calls"
echo "perplexity: calculating perplexity over 3 chunks, n_ctx=512" >&2
second=3.000000; [ -z "$GGML_BACKEND_PATH" ] || { second=$off; echo "$lines" >&2; }
echo "       0  20.0855  3.000000  0.1"
echo "     512  20.0855  $second  0.1"
[ -e "$(dirname "$0")/short" ] || echo "    1024  20.0855  3.000000  0.1"
"#;

fn perplexity_host(off: &str, lines: &str) -> Host {
    let host = Host::new("");
    host.write("llama-perplexity", &format!("off={off}\nlines='{lines}'\n{PERPLEXITY}"));
    fs::write(host.path("text"), "words").expect("written");
    host
}

fn ppl(host: &Host, more: &[&str]) -> (Option<i32>, String, String) {
    let file = format!("--file={}", host.path("text").display());
    host.call("ppl", &[&[file.as_str(), "--share", "50"], more].concat())
}

#[test]
fn chunks_are_compared() {
    let host = perplexity_host("3.000500", LINES);
    let (status, output, errors) = ppl(&host, &["-t", "2", "--chunks", "3"]);
    assert_eq!((status, errors.as_str()), (Some(0), ""), "{output}");
    assert!(
        output.contains("    2   20.0855   20.1056    +0.1000%\n    3   20.0855   20.0655    -0.1000%"),
        "{output}"
    );
    assert!(output.contains("30 hits, 10 misses (75.0%)"), "{output}");
    assert!(output.ends_with(
        "ppl: mean difference +0.0000% (standard error 0.0577%) over 3 chunks, limit 0.2% and 2 standard errors: ok\n"
    ));
    let calls = host.calls();
    assert!(calls[0].starts_with('|') && calls[0].contains("-dev CUDA0"), "{calls:?}");
    assert!(
        calls
            .iter()
            .all(|call| call.contains("-b 1 -ub 1") && call.contains("-nr") && call.contains("--ppl-output-type 1"))
    );
    let (status, output, _) = ppl(&host, &["--limit", "0.2", "-b", "512"]);
    assert_eq!(status, Some(0), "{output}");
}

#[test]
fn a_difference_fails() {
    let host = perplexity_host("3.000000", LINES);
    let (status, output, _) = ppl(&host, &[]);
    assert!(status == Some(0) && output.contains("equal to the last decimal: ok"), "{output}");
    // The last figure is the mean of all: it is what the plugin's side must reach.
    host.write(
        "llama-perplexity",
        &format!(
            "off=3.0\nlines='{LINES}'\n{}",
            PERPLEXITY
                .replace("20.0855  3.000000", "20.1000  ${last:-3.000000}")
                .replace("second=3", "[ -z \"$GGML_BACKEND_PATH\" ] || last=3.004000; second=3")
        ),
    );
    let (status, output, _) = ppl(&host, &[]);
    assert!(status == Some(1) && output.contains("more than the limit of 0.2%"), "{output}");
}

#[test]
fn what_cannot_be_compared_is_told_in_one_line() {
    let host = perplexity_host("3.000000", LINES);
    let file = format!("--file={}", host.path("text").display());
    host.refused("ppl", &["--file", "/no/such/text"], 2, "/no/such/text: no such text");
    host.refused("ppl", &[&file, "--limit=-1"], 2, "--limit -1");
    host.refused("ppl", &[&file, "--share", "10,20"], 2, "one size of the cache");
    assert_eq!(host.call("ppl", &[&file, "--chunks", "1"]).0, Some(2));
    fs::write(host.path("short"), "").expect("written");
    let (status, _, errors) = ppl(&host, &[]);
    assert!(status == Some(1) && errors.contains("stock: only 2 of 3 chunks were printed, 3 times"), "{errors}");
    let host = perplexity_host("3.000000", "ggml-moe: MoE0: a line");
    let (status, _, errors) = ppl(&host, &[]);
    assert!(status == Some(1) && errors.contains("counters were not printed"), "{errors}");
    let host = perplexity_host("nan", LINES);
    let (status, _, errors) = ppl(&host, &[]);
    assert!(status == Some(1) && errors.contains("ours: chunk 2 is no number"), "{errors}");
    let host = perplexity_host("3.000000", "ggml-moe: summary {\"blocks\":3}");
    let (status, _, errors) = ppl(&host, &[]);
    assert!(status == Some(1) && errors.contains("void: the cache computed nothing"), "{errors}");
}
