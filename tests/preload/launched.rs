//! `ggml-moe run -- PROGRAM` with programs of stock llama.cpp: the program takes the launcher's place, with its answers, exit codes and signals.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Command;

use super::support::process::{Finished, Running, interruptible, run};
use super::support::server::Server;
use super::support::stock::{self, Side, command, preloaded, program};
use super::support::{fixture_model, text};
use super::{HELP, LIMIT, ask, host, was_helped};

const BENCH: [&str; 8] = ["-t", "2", "-p", "8", "-n", "0", "-r", "1"];

/// The launcher with its own arguments, and then a program.
fn launcher(more: &[&str], program: &Path) -> Command {
    let mut command = command(Path::new(env!("CARGO_BIN_EXE_ggml-moe")), Side::Stock);
    command.env("LD_PRELOAD", preloaded("support/flush_log"));
    command.args(["run", "--plugin", text(stock::plugin())]).args(more).arg("--").arg(program);
    command
}

/// The same with a stock program and the bundled model.
fn launched(more: &[&str], name: &str) -> Command {
    let mut command = launcher(more, &stock::folder().join(name));
    command.args(["-m", text(&fixture_model())]);
    command
}

/// A plan, then the server in its place.
#[test]
fn the_launcher_equals_stock() {
    let launch = |more: &[&str]| {
        let mut command = launched(more, "llama-server");
        command.args(["-nr", "-t", "2"]);
        command
    };
    let (stock, _) = ask(host("llama-server"), &[]);
    let (launched, finished) = ask(launch(&[]), &HELP);
    assert_eq!(launched, stock);
    was_helped(&finished);
    assert!(!finished.lines_with("ggml-moe: experts: ").is_empty(), "{}", finished.report("no plan"));
    let wrong = |mut command: Command| run(command.arg("--no-such-flag"), LIMIT).status.code();
    assert_eq!(wrong(launch(&["--moe", "inner=CPU"])), wrong(host("llama-server")));
}

/// What the system knows of a process that must be as without the launcher: signals that are ignored and blocked, its group and terminal.
fn standing(process: &Running) -> Vec<String> {
    let id = process.id();
    let status = fs::read_to_string(format!("/proc/{id}/status")).expect("it runs");
    let kept = ["SigIgn:", "SigBlk:", "NoNewPrivs:", "Umask:"];
    let mut lines: Vec<String> =
        status.lines().filter(|line| kept.iter().any(|name| line.starts_with(name))).map(str::to_owned).collect();
    assert_eq!(lines.len(), kept.len(), "{status}");
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).expect("it runs");
    let fields: Vec<&str> = stat.rsplit_once(") ").expect("a name").1.split(' ').collect();
    // Parent, session, terminal.
    lines.extend([1, 3, 4].map(|at| fields[at].to_owned()));
    assert_eq!(fields[2], id.to_string(), "it leads its group");
    let file = fs::read_link(format!("/proc/{id}/exe")).expect("its file");
    lines.push(file.display().to_string());
    lines.extend(["0", "1", "2"].map(|number| {
        let target = fs::read_link(format!("/proc/{id}/fd/{number}")).expect("it is open").display().to_string();
        target.split(':').next().unwrap_or_default().to_owned()
    }));
    lines
}

/// Nothing lies between the caller and the server: it has the launcher's number, and every signal does what it does to stock.
#[test]
fn signals_reach_the_server_itself() {
    let start = |command: &mut Command| {
        command.args(["-nr", "-t", "1", "-c", "256", "-np", "1", "--no-warmup", "--moe", "inner=CPU"]);
        let mut server = Server::launch(&mut interruptible(command));
        server.wait_ready();
        server
    };
    let mut starts: Vec<Server> = Vec::new();
    for _ in 0..3 {
        let mut command = program("llama-server", Side::Stock);
        command.args(["-m", text(&fixture_model())]);
        // Stock knows no `--moe`.
        super::preload_plugin(&mut command);
        starts.push(start(&mut command));
        starts.push(start(&mut launched(&["--no-plan"], "llama-server")));
    }
    let mut ends = Vec::new();
    for (number, server) in starts.into_iter().enumerate() {
        let process = server.into_process();
        let standing = standing(&process);
        match number / 2 {
            0 => process.interrupt(),
            1 => process.terminate(),
            // As a terminal that closes.
            _ => {
                run(Command::new("sh").args(["-c", &format!("kill -s HUP {}", process.id())]), LIMIT).success();
            }
        }
        let finished = process.finish(LIMIT);
        ends.push((standing, finished.status.code(), finished.status.signal()));
    }
    for pair in ends.chunks(2) {
        assert_eq!(pair[0], pair[1]);
    }
    assert!(ends[0].1 == Some(0) && ends[2].1 == Some(0), "{ends:?}");
    assert_eq!(ends[4].2, Some(1), "llama-server does not handle a hang-up");
}

/// Starts a server in a terminal, types Ctrl-C when it listens, and prints its exit code and whether it has shown a plan.
const IN_A_TERMINAL: &str = r#"
import os, pty, re, sys, urllib.request
child, terminal = pty.fork()
if child == 0:
    os.execv(sys.argv[1], sys.argv[1:])
seen = b""
try:
    while b"listening on" not in seen:
        seen += os.read(terminal, 4096)
    while not (address := re.search(rb"listening on (http\S+)\r?\n", seen)):
        seen += os.read(terminal, 4096)
    # Its main loop answers this; before that loop runs it forgets what is typed.
    urllib.request.urlopen(address[1].decode() + "/slots").read()
    os.write(terminal, b"\x03")
    while os.read(terminal, 4096):
        pass
except OSError:
    pass
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), b"ggml-moe: experts: " in seen)
"#;

/// What is typed there reaches the server, and the plan and the server's log are seen there.
#[test]
fn a_terminal_is_the_servers() {
    let typed = |server: &Command| {
        let mut command = command(Path::new("python3"), Side::Stock);
        command.args(["-c", IN_A_TERMINAL]).arg(server.get_program()).args(server.get_args());
        command.args(["-t", "1", "-c", "256", "-np", "1", "--no-warmup", "--host", "127.0.0.1", "--port", "0"]);
        let finished = run(&mut interruptible(&command), LIMIT).success();
        finished.stdout.trim().to_owned()
    };
    assert_eq!(typed(&launched(&[], "llama-server")), "0 True");
    let mut stock = program("llama-server", Side::Stock);
    stock.args(["-m", text(&fixture_model())]);
    assert_eq!(typed(&stock), "0 False");
}

/// What `--plan-only` says, and by which exit code; what is wrong with keys is told once and ends nothing.
#[test]
fn plans_and_wrong_keys() {
    let plan = |more: &[&str], flags: &[&str]| {
        let mut command = launched(&[&["--plan-only"], more].concat(), "llama-server");
        let finished = run(command.args(flags), LIMIT);
        (finished.status.code(), finished.stdout)
    };
    let (code, printed) = plan(&[], &[]);
    assert!(code == Some(0) && printed.contains("experts: ") && printed.contains("context: "), "{printed}");
    let (code, printed) = plan(&["--moe", "cahce=4"], &["--moe", "cache=lots", "--moe"]);
    assert_eq!(code, Some(0), "{printed}");
    for line in ["unknown key \"cahce\"", "cache=lots is not usable", "--moe needs a setting"] {
        assert_eq!(printed.lines().filter(|it| it.contains(line)).count(), 1, "{line}: {printed}");
    }
    let (code, printed) = plan(&[], &["-m", "/no/such.gguf"]);
    assert!(code == Some(1) && printed.starts_with("no plan: /no/such.gguf"), "{printed}");

    let bench = |more: &[&str], flags: &[&str]| {
        let mut command = launched(&[&["--no-plan"], more].concat(), "llama-bench");
        run(command.args(BENCH).args(flags), LIMIT)
    };
    let finished = bench(&["--moe", "cahce=4", "--moe", "threads=0"], &["--moe", "cache=lots"]).success();
    for line in ["unknown key \"cahce\"", "threads=0 is not usable", "cache=lots is not usable"] {
        assert_eq!(finished.lines_with(line).len(), 1, "{}", finished.report(line));
    }
    let mut stock = program("llama-bench", Side::Stock);
    let own = run(stock.args(["-m", "/no/such.gguf"]).args(BENCH), LIMIT).clean_failure();
    let kept = bench(&["--moe", "cahce=4"], &["-m", "/no/such.gguf"]);
    assert_eq!(kept.status.code(), own.status.code(), "{}", kept.report("another exit code"));
}

/// Programs that cannot be started, or not be helped: one line says why and what to do.
#[test]
fn programs_that_cannot_be_started_or_helped() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = |name: &str, bytes: &[u8], mode: u32| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("a mode");
        path
    };
    let one_line = |path: &Path, code: i32, words: &[&str]| {
        let finished = run(&mut launcher(&["--no-plan"], path), LIMIT);
        assert_eq!(finished.status.code(), Some(code), "{}", finished.report("exit code"));
        let last = finished.stderr.lines().last().unwrap_or_default();
        assert!(finished.stdout.is_empty() && last.starts_with("ggml-moe"), "{}", finished.report("its words"));
        for words in words {
            assert!(finished.stderr.contains(words), "{}", finished.report(words));
        }
        assert!(finished.stderr.lines().count() <= 2, "{}", finished.report("too many lines"));
    };
    let server = fs::read(stock::folder().join("llama-server")).expect("the program");
    one_line(&folder.path().join("llama-server"), 2, &["no such program", "name it with its folder"]);
    one_line(Path::new("no-such-llama"), 2, &["no no-such-llama in PATH", "name it with its folder"]);
    one_line(folder.path(), 2, &["it is no file"]);
    one_line(&place("locked", &server, 0o644), 2, &["may not be executed", "chmod +x"]);
    // Another machine's: the byte that says so.
    let mut other = server.clone();
    other[18] ^= 0xff;
    one_line(&place("other", &other, 0o755), 2, &["another kind of machine", "name the program of a build"]);
    let script = place("script", b"#!/bin/sh\nexit 9\n", 0o755);
    one_line(&script, 9, &["it is no program of this system", "name the program itself", "it is started as it is"]);
    let mut lost = server.clone();
    let loader = lost.windows(8).position(|part| part == b"/ld-linu").expect("the loader's name");
    lost[loader + 1] = b'x';
    one_line(&place("lost", &lost, 0o755), 1, &["the loader or interpreter that it names is missing"]);

    // A folder of PATH that holds a name without permission is passed over, as a shell does.
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    fs::create_dir(&first).and(fs::create_dir(&second)).expect("folders");
    fs::copy(folder.path().join("locked"), first.join("llama-bench")).expect("a copy");
    symlink(stock::folder().join("llama-bench"), second.join("llama-bench")).expect("a link");
    let mut command = launcher(&["--no-plan"], Path::new("llama-bench"));
    command.env("PATH", format!("{}:{}", first.display(), second.display()));
    run(command.args(["-m", text(&fixture_model())]).args(BENCH), LIMIT).success();

    let fixed = folder.path().join("fixed");
    let source = super::support::package().join("tests/preload/foreign.c");
    run(Command::new("cc").arg("-static").arg("-o").arg(&fixed).arg(&source), LIMIT).success();
    let finished = run(launcher(&[], &fixed).args(["--moe", "cache=4", "a"]), LIMIT);
    assert_eq!(finished.status.code(), Some(2), "it returns how many arguments it has: {}", finished.report(""));
    let line = finished.lines_with("ggml-moe: the plugin cannot help").pop().expect("a line");
    assert!(line.contains("linked statically") && line.contains("-DBUILD_SHARED_LIBS=ON"), "{line}");
}

/// A release whose parameters are not known is stock, and one line says what can be done.
#[test]
fn an_unknown_release_is_stock() {
    let unknown = stock::compile("preload/unknown.c", "unknown.so", &["-shared", "-fPIC"]);
    let mut command = launched(&["--no-plan"], "llama-bench");
    command.env("LD_PRELOAD", &unknown).args(BENCH).args(["-o", "json", "-v"]).args(HELP);
    let finished: Finished = run(&mut command, LIMIT).success();
    let line = "ggml-moe: off: the parameters of this llama.cpp are not known";
    assert_eq!(finished.lines_with(line).len(), 1, "{}", finished.report("no line"));
    assert!(finished.lines_with(line)[0].contains("--device MoE0"));
    let rows: serde_json::Value = serde_json::from_str(&finished.stdout).expect("JSON");
    assert_eq!(rows[0]["backends"], "CPU", "the host does not know us: {rows}");
}
