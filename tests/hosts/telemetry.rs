//! What the plugin tells of its work: a line for each request, counters over a socket, and what goes wrong with it.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use serde_json::{Value, json};

use crate::summary::summaries;
use crate::support::process::{Finished, run};
use crate::support::server::Server;
use crate::support::stock::{Side, tool};
use crate::support::{fixture, fixture_model, text};

const LIMIT: Duration = Duration::from_secs(120);

fn top(arguments: &[&str], folder: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ggml-moe"))
        .arg("top")
        .args(arguments)
        .env("XDG_RUNTIME_DIR", folder)
        .output()
        .expect("the command starts")
}

/// What the socket answers, read by the command. It waits for two seconds; a busy machine may take longer now and then.
fn counters(socket: &Path) -> Value {
    let ask = |_| top(&["--json", "--socket", text(socket)], Path::new("/"));
    let output = (0..10).map(ask).find(|output| output.status.success());
    let output = output.unwrap_or_else(|| ask(10));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one line of JSON")
}

/// The tokens decoded for each prompt, as the socket tells. A busy machine may pause for a second between two tokens, and what decodes after a pause is
/// told as one request more, without a prompt: it belongs to the one before.
fn requests(answer: &Value) -> Vec<u64> {
    let mut all: Vec<u64> = Vec::new();
    for request in answer["devices"][0]["requests"].as_array().expect("a list") {
        let count = |name: &str| request[name].as_u64().unwrap_or_else(|| panic!("no {name} in {request}"));
        match all.last_mut() {
            Some(last) if count("prompt_tokens") == 0 => *last += count("tokens"),
            _ => all.push(count("tokens")),
        }
    }
    all
}

/// A number of a request line: the one before these words.
fn number(line: &str, words: &str) -> f64 {
    let before = line.split(words).next().filter(|before| before.len() < line.len());
    let before = before.unwrap_or_else(|| panic!("no {words:?} in {line}"));
    let start = before.rfind(|c: char| !(c.is_ascii_digit() || c == '.')).map_or(0, |place| place + 1);
    before[start..].parse().unwrap_or_else(|error| panic!("{error}: {words:?} in {line}"))
}

/// The lines of requests.
fn lines(finished: &Finished) -> Vec<String> {
    finished.lines_with("ggml-moe: MoE0: request ")
}

/// The same as the lines of the log tell it.
fn decoded(lines: &[String]) -> Vec<f64> {
    let mut all: Vec<f64> = Vec::new();
    for line in lines {
        let tokens = number(line, " decoded");
        match all.last_mut() {
            Some(last) if number(line, " prompt tokens") == 0.0 => *last += tokens,
            _ => all.push(tokens),
        }
    }
    all
}

/// The sum of a counter over the backends of a log.
fn total(log: &str, counter: &str) -> u64 {
    summaries(log).iter().map(|summary| summary[counter].as_u64().unwrap_or_else(|| panic!("no {counter}"))).sum()
}

fn open_files(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

/// The threads of a process that have this name.
fn threads(pid: u32, name: &str) -> Vec<PathBuf> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the process runs");
    let named = |task: &PathBuf| fs::read_to_string(task.join("comm")).is_ok_and(|own| own.trim_end() == name);
    tasks.flatten().map(|task| task.path()).filter(named).collect()
}

#[test]
fn requests_add_up_and_the_socket_answers() {
    let place = tempfile::tempdir().expect("a folder");
    let folder = place.path().join("ggml-moe");
    fs::create_dir(&folder).expect("a folder");
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).expect("a private folder");
    // Of a process that is gone: above the largest number that Linux gives.
    let left = folder.join("4194311.sock");
    drop(UnixListener::bind(&left).expect("a socket"));

    let side = Side::Plugin { keys: "inner=CPU;log=debug;cache=6", device: "MoE0" };
    let mut command = tool("llama-server", side, &fixture_model(), 2);
    command.args(["-c", "4096", "-np", "4"]).env("XDG_RUNTIME_DIR", place.path());
    let mut server = Server::launch(&mut command);
    server.wait_ready();
    let pid = server.process().id();
    let socket = folder.join(format!("{pid}.sock"));
    // The host has tried its context, which is no request.
    let before = counters(&socket);
    assert!(requests(&before).is_empty(), "{before}");

    // Two requests, one after the other.
    assert_eq!(server.complete("A list comprehension is a", 32, 0).tokens.len(), 32);
    assert_eq!(server.complete("import os\nfor name in", 24, 0).tokens.len(), 24);
    assert!(!left.exists(), "what a dead process left is removed");
    assert_eq!(fs::metadata(&socket).expect("the socket").mode() & 0o777, 0o600);
    let answer = counters(&socket);
    assert_eq!((answer["pid"].as_u64(), &answer["program"]), (Some(pid.into()), &"llama-server".into()));
    assert_eq!(answer["devices"][0]["cache"]["experts"], 192);
    assert_eq!(requests(&answer).len(), 2, "{answer}");
    let shown = top(&["--once"], place.path());
    let shown = String::from_utf8_lossy(&shown.stdout);
    assert!(
        shown.contains(&format!("llama-server (pid {pid})")) && shown.contains("MoE0 over CPU: cache of"),
        "{shown}"
    );

    signals_are_blocked(pid);
    others_are_refused(place.path(), &socket);

    // Four at once, and meanwhile a thousand connections that nobody reads, and some that are gone at once.
    let prompts = ["A tuple is", "def main():\n    return", "The garbage collector", "## Ownership\n"];
    let body = json!({
        "prompt": prompts, "n_predict": 120, "temperature": 0, "seed": 1, "cache_prompt": false, "ignore_eos": true,
    });
    let files = open_files(pid);
    std::thread::scope(|scope| {
        let generation = scope.spawn(|| server.post("/completion", &body));
        let seen = |answer: &Value| requests(answer).get(2).is_some_and(|tokens| *tokens > 0);
        let mut is_over = false;
        while !seen(&counters(&socket)) {
            // A look behind the end sees it in any case.
            assert!(!is_over, "asked while it generates: {}", counters(&socket));
            is_over = generation.is_finished();
        }
        let silent: Vec<UnixStream> = (0..1000).map(|_| UnixStream::connect(&socket).expect("it takes them")).collect();
        (0..200).for_each(|_| drop(UnixStream::connect(&socket)));
        counters(&socket);
        assert!(open_files(pid) < files + 100, "those who connect hold nothing");
        drop(silent);
        assert_eq!(generation.join().expect("an answer").as_array().map(Vec::len), Some(4));
    });

    // Told without another graph: the thread of the socket notices.
    let told = |log: &str| {
        let lines: Vec<String> =
            log.lines().filter(|line| line.contains("MoE0: request ")).map(str::to_owned).collect();
        decoded(&lines).get(2).is_some_and(|tokens| *tokens >= 4.0 * 119.0)
    };
    server.process().wait_until("the line of the last request", LIMIT, told);
    let last = counters(&socket);
    let finished = server.stop();
    assert!(!socket.exists(), "{}", finished.report("the socket is removed at the end"));

    let (log, lines) = (finished.log(), lines(&finished));
    let decoded = decoded(&lines);
    assert_eq!(decoded.len(), 3, "{}", finished.report("one line for each request"));
    assert_eq!(decoded[..2], [31.0, 23.0], "the first token of each comes from the prompt");
    // The last token of a prompt may be computed by itself, and then looks like decoding.
    assert!((4.0 * 119.0..=4.0 * 120.0).contains(&decoded[2]), "{decoded:?}");
    let trials = |counter: &str| before["devices"][0]["counters"][counter].as_u64().expect("a counter");
    let sum = |words: &str| lines.iter().map(|line| number(line, words)).sum::<f64>();
    for (words, counter) in [
        (" prompt tokens", "prompt_tokens"),
        (" decoded", "tokens"),
        (" hits (", "hits"),
        (" misses", "misses"),
        (" uploads", "uploads"),
    ] {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "printed whole")]
        let told = sum(words) as u64;
        assert_eq!(told, total(&log, counter) - trials(counter), "{}", finished.report(counter));
        assert!(told > 0, "{counter}");
    }
    for (words, counted) in
        [(" MB computed by the CPU", &["cpu_bytes"][..]), (" MB over the link", &["upload_bytes", "expert_bytes"][..])]
    {
        let exact: u64 = counted.iter().map(|counter| total(&log, counter) - trials(counter)).sum();
        let exact = exact as f64 / 1e6;
        assert!((sum(words) - exact).abs() < 0.06 * lines.len() as f64 && exact > 1.0, "{}", finished.report(words));
    }
    assert!(total(&log, "evictions") > 0 && total(&log, "team_ns") > 0 && total(&log, "waits") > 0, "{log}");
    for counter in
        ["hits", "misses", "cpu_bytes", "uploads", "upload_bytes", "evictions", "tokens", "prompt_tokens", "waits"]
    {
        assert_eq!(last["devices"][0]["counters"][counter], total(&log, counter), "{}", finished.report(counter));
    }
    let start = finished.lines_with("expert cache of ");
    assert!(
        start.len() == 1 && start[0].contains("of 192 experts") && start[0].contains("uses should hit"),
        "{start:?}"
    );
}

/// The thread gets none of the host's signals: Ctrl-C is for the host's own handler.
fn signals_are_blocked(pid: u32) {
    let found = threads(pid, "ggml-moe-top");
    assert_eq!(found.len(), 1, "one thread for the process");
    let status = fs::read_to_string(found[0].join("status")).expect("the thread runs");
    let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).expect("a mask");
    let mask = u64::from_str_radix(mask.trim(), 16).expect("a number");
    for signal in [1, 2, 10, 13, 15, 17] {
        assert!(mask >> (signal - 1) & 1 == 1, "signal {signal} is not blocked: {mask:x}");
    }
}

/// Another user gets no answer, even where everybody may connect. Only root can try that.
fn others_are_refused(place: &Path, socket: &Path) {
    if fs::metadata("/proc/self").expect("own process").uid() != 0 {
        println!("not root: another user was not tried");
        return;
    }
    let open = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("may");
    let folder = socket.parent().expect("a folder");
    [place, folder].into_iter().for_each(|path| open(path, 0o755));
    open(socket, 0o666);
    let command = place.join("top");
    fs::copy(env!("CARGO_BIN_EXE_ggml-moe"), &command).expect("a copy");
    let ask = |uid| Command::new(&command).args(["top", "--json", "--socket", text(socket)]).uid(uid).gid(uid).output();
    let refused = ask(65_534).expect("the command starts");
    let reason = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && refused.stdout.is_empty(), "{reason}");
    assert!(reason.contains("its own user only"), "{reason}");
    assert!(ask(0).expect("the command starts").status.success(), "and its own user does");
    [place, folder].into_iter().for_each(|path| open(path, 0o700));
}

/// Perplexity of a few single tokens, with a setting for the socket.
fn perplexity(socket: &str, folder: &Path) -> Finished {
    let keys = format!("inner=CPU;log=info;cache=6;socket={socket}");
    let mut command = tool("llama-perplexity", Side::Plugin { keys: &keys, device: "MoE0" }, &fixture_model(), 1);
    command.args(["-f", text(&fixture("eval.txt")), "--chunks", "1", "-b", "1", "-ub", "1", "-c", "16"]);
    run(command.env("XDG_RUNTIME_DIR", folder), LIMIT).success()
}

#[test]
fn a_socket_that_cannot_be_made_costs_a_line() {
    let place = tempfile::tempdir().expect("a folder");
    let path = |name: &str| text(&place.path().join(name)).to_owned();
    let file = path("file");
    fs::write(&file, "kept").expect("a file");
    let served = path("served.sock");
    let _serving = UnixListener::bind(&served).expect("a socket");
    for (socket, reason) in [
        (path(&"long".repeat(40)), "SUN_LEN"),
        (path("missing/moe.sock"), "No such file"),
        (file.clone(), "the name is taken"),
        (served.clone(), "the name is taken"),
    ] {
        let finished = perplexity(&socket, place.path());
        let told = finished.lines_with("no socket for counters");
        assert!(told.len() == 1 && told[0].contains(reason), "{}", finished.report(reason));
        let told = lines(&finished);
        assert!(
            told.concat().contains("request 1: 8 prompt tokens, ") && decoded(&told) == [8.0],
            "{}",
            finished.report("no thread")
        );
    }
    assert_eq!(fs::read_to_string(&file).expect("still there"), "kept");
    assert!(Path::new(&served).exists());
}

#[test]
fn settings_choose_whether_and_where() {
    let place = tempfile::tempdir().expect("a folder");
    let named = place.path().join("moe.sock");
    let path = perplexity(text(&named), place.path());
    assert_eq!(path.lines_with("counters can be read at").len(), 1, "{}", path.report("a path"));
    assert!(path.lines_with(text(&named)).len() == 1 && !named.exists(), "{}", path.report("a path"));
    let off = perplexity("off", place.path());
    assert!(off.lines_with("counters can be read").is_empty(), "{}", off.report("off"));
    assert_eq!(decoded(&lines(&off)), [8.0], "{}", off.report("off"));
    assert!(!place.path().join("ggml-moe").exists());
    // A folder that others can open is not used; the next best is.
    fs::create_dir(place.path().join("ggml-moe")).expect("a folder");
    fs::set_permissions(place.path().join("ggml-moe"), fs::Permissions::from_mode(0o777)).expect("open to all");
    let auto = perplexity("auto", place.path());
    assert!(auto.lines_with("counters can be read at /tmp/ggml-moe-").len() == 1, "{}", auto.report("auto"));
}
