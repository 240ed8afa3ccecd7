//! `ggml-moe plan`, `run` and `doctor` over programs that only look like the host's, and over this machine as it is.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny-docs-moe.Q4_K_M.gguf");

/// A machine with a card of 2 GiB.
const MACHINE: &str = r#"{"ram_mib": 8192, "cores": 4, "cpu_gbs": 20, "cpu_source": "measured", "cards": [
    {"name": "CUDA0", "description": "A card", "total_mib": 2000, "free_mib": 1800, "link_gbs": 6, "link_source": "measured"}]}"#;

struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Self { folder: tempfile::tempdir().expect("a folder") };
        place.write("machine.json", MACHINE);
        place
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().expect("text").to_owned()
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).expect("written");
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(0o755)).expect("a program");
    }

    /// The command, with nothing of the caller's settings, and a cache folder of its own.
    fn call(&self, words: &[&str]) -> Output {
        self.call_with("", words)
    }

    /// The same with settings in the environment.
    fn call_with(&self, settings: &str, words: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ggml-moe"));
        command.args(words).env("LLAMA_CACHE", self.path("cache")).env_remove("LD_PRELOAD").env_remove("GGML_MOE");
        if !settings.is_empty() {
            command.env("GGML_MOE", settings);
        }
        command.output().expect("the command starts")
    }

    /// As [`Place::call`], through a shell that tells how many seconds of a processor it took, whatever else the machine does.
    fn timed(&self, words: &[&str]) -> (Output, f64) {
        let told = self.path("times");
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "\"$@\"; status=$?; times > \"$TIMES\"; exit $status",
            "sh",
            env!("CARGO_BIN_EXE_ggml-moe"),
        ]);
        command.args(words).env("TIMES", &told);
        command.env("LLAMA_CACHE", self.path("cache")).env_remove("LD_PRELOAD").env_remove("GGML_MOE");
        let output = command.output().expect("the shell starts");
        // The second line is that of the shell's children: "0m0.120s 0m0.010s".
        let times = fs::read_to_string(told).expect("the shell tells");
        let seconds = |time: &str| {
            let (minutes, rest) = time.split_once('m').expect("minutes and seconds");
            let numbers = [minutes, rest.trim_end_matches('s')].map(|part| part.parse::<f64>().expect("a number"));
            numbers[0] * 60.0 + numbers[1]
        };
        (output, times.lines().nth(1).unwrap_or_default().split_whitespace().map(seconds).sum())
    }

    fn plan(&self, more: &[&str]) -> Output {
        let machine = self.path("machine.json");
        self.call(&[&["plan", "-m", MODEL, "--machine", &machine], more].concat())
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_plan_is_printed_in_every_form() {
    let place = Place::new();
    let machine = place.path("machine.json");
    let (table, work) = place.timed(&[
        "plan",
        "-m",
        MODEL,
        "--machine",
        &machine,
        "--moe",
        "cache=6",
        "-c",
        "512",
        "--",
        "--device",
        "MoE0",
    ]);
    assert!(work < 2.0, "a second is promised without measuring, not {work}");
    let table = text(&table.stdout);
    for words in
        ["expected hits", "CUDA0", "predicted", "bound by", "stock's best placement: -c 512 -ngl", "with the plugin:"]
    {
        assert!(table.contains(words), "{words}: {table}");
    }
    let json: Value = serde_json::from_slice(
        &place.plan(&["--moe", "cache=6", "-c", "512", "--json", "--", "--device", "MoE0"]).stdout,
    )
    .expect("JSON");
    assert_eq!((json["mode"].as_str(), json["context"].as_u64()), (Some("cache"), Some(512)));
    assert_eq!(json["cards"][0]["cache_mib"].as_u64(), Some(6));
    assert!(json["choices"].as_array().is_some_and(|all| all.len() > 4), "{json}");
    assert!(json["decode"]["tokens_per_second"].as_f64().is_some_and(|rate| rate > 0.0));
    let line = text(&place.plan(&["--args", "-c", "512", "--ubatch-size", "512"]).stdout);
    assert!(line.starts_with("-c 512 -ngl ") && line.lines().count() == 1, "{line}");
    let ours =
        text(&place.plan(&["--args", "plugin", "--moe", "cache=6", "-c", "512", "--", "--device", "MoE0"]).stdout);
    assert!(ours.starts_with("--device MoE0 -c 512"), "{ours}");
}

#[test]
fn what_cannot_be_planned_is_told() {
    let place = Place::new();
    let refused = |words: &[&str], code: i32, told: &str| {
        let output = place.call(words);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{words:?}: {error}{}", text(&output.stdout));
        assert!(error.contains(told) && error.lines().count() == 1, "{error}");
    };
    let machine = place.path("machine.json");
    refused(&["plan", "--machine", &machine], 2, "name it with -m");
    refused(&["plan", "--machine", &machine, "-m", "/no/such.gguf"], 2, "/no/such.gguf");
    refused(&["plan", "--machine", &machine, "-m", &machine], 2, "not a GGUF file");
    refused(&["plan", "--machine", MODEL, "-m", MODEL], 2, "tiny-docs-moe");
    refused(&["plan", "--machine", &machine, "-m", MODEL, "--moe", "cach=1"], 2, "cache");
    refused(
        &["plan", "--machine", &machine, "-m", MODEL, "--moe", "cache=lots"],
        2,
        "accepted (MiB): auto, off, or 1 to",
    );
    refused(&["plan", "-m", MODEL, "--host-dir", "/no/such"], 2, "no such program");
    refused(&["plan", "--machine", &machine, "--", "-hf", "them/docs"], 2, "them/docs is not downloaded yet");
    // Among flags for a program they end nothing, as when it runs; neither does a key that is given twice.
    let words = ["--moe", "cache=6", "--moe", "cache=7", "--", "--moe", "cache=lots", "--moe-expert-cache", "many"];
    let output = place.plan(&[&words[..4], &["-c", "512"], &words[4..]].concat());
    let told = text(&output.stdout);
    assert!(output.status.success() && told.contains("cache=lots is not usable"), "{told}");
    assert!(told.contains("moe-expert-cache=many is not usable"), "{told}");
    place.write("small.json", r#"{"ram_mib": 900}"#);
    let small = place.path("small.json");
    let output = place.call(&["plan", "--machine", &small, "-m", MODEL, "--", "-lm", "none"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("do not fit the 900 MiB of RAM"), "{}", text(&output.stdout));
}

/// What stands between a plan and its arguments is told, and not what else there is to say.
#[test]
fn why_there_are_no_arguments() {
    let place = Place::new();
    place.write("small.json", &MACHINE.replace("\"free_mib\": 1800", "\"free_mib\": 12"));
    place.write("ram.json", &MACHINE.replace("\"ram_mib\": 8192", "\"ram_mib\": 900"));
    let refused = |machine: &str, words: &[&str], told: &str| {
        let machine = place.path(machine);
        let output = place.call(&[&["plan", "-m", MODEL, "--machine", &machine, "--args"], words].concat());
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{words:?}: {error}{}", text(&output.stdout));
        assert!(error.contains("there are no such arguments: ") && error.contains(told), "{words:?}: {error}");
    };
    refused("machine.json", &["plugin", "-c", "512"], "fits");
    refused("small.json", &["stock", "-c", "32768", "--", "-ngl", "99"], "more memory than the cards have free");
    for whose in ["stock", "plugin", "chosen"] {
        refused("ram.json", &[whose, "--", "-lm", "none"], "do not fit the 900 MiB of RAM");
    }
}

/// A file that is still being fetched can be planned, and the plan says that nothing starts with it.
#[test]
fn a_cut_model_is_told() {
    let place = Place::new();
    let (machine, cut) = (place.path("machine.json"), place.path("cut.gguf"));
    let whole = fs::read(MODEL).expect("the model");
    fs::write(&cut, &whole[..whole.len() - 3_000_000]).expect("written");
    let output = place.call(&["plan", "-m", &cut, "--machine", &machine, "-c", "512"]);
    let told = text(&output.stdout);
    assert!(
        output.status.success() && told.contains("\nnote: 3 MiB of the model's data are not in its file"),
        "{told}"
    );
    assert!(!text(&place.plan(&["-c", "512"]).stdout).contains("not in its file"));
}

/// What llama.cpp has fetched is planned with as its own command line names it.
#[test]
fn a_fetched_model_is_planned_with() {
    let place = Place::new();
    let repository = place.folder.path().join("cache/models--them--docs");
    let commit = "0123456789abcdef0123456789abcdef01234567";
    fs::create_dir_all(repository.join("refs")).expect("a folder");
    fs::write(repository.join("refs/main"), commit).expect("written");
    let snapshot = repository.join("snapshots").join(commit);
    fs::create_dir_all(&snapshot).expect("a folder");
    std::os::unix::fs::symlink(MODEL, snapshot.join("docs-Q4_K_M.gguf")).expect("a link");
    let machine = place.path("machine.json");
    let of = |name: &str| {
        let output = place.call(&["plan", "--machine", &machine, "--", "-hf", name, "-c", "512"]);
        (output.status.code(), text(&output.stdout).contains("6 layers, experts 12 MiB"))
    };
    assert_eq!((of("them/docs"), of("them/docs:q4_k_m")), ((Some(0), true), (Some(0), true)));
    assert_eq!(of("them/docs:Q8_0"), (Some(2), false));
}

/// A host that lists a card; the machine around it is the real one.
const HOST: &str = "#!/bin/sh\necho 'Available devices:'; echo '  CUDA0: A card (300 MiB, 280 MiB free)'\n";

#[test]
fn the_host_is_asked_for_devices_and_the_machine_can_be_kept() {
    let place = Place::new();
    place.write("llama-server", HOST);
    let (host, kept) = (place.path(""), place.path("kept.json"));
    let (measured, work) = place.timed(&[
        "plan",
        "-m",
        MODEL,
        "--host-dir",
        &host,
        "--measure",
        "--write-machine",
        &kept,
        "-c",
        "512",
        "--json",
    ]);
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as f64;
    assert!(work < 5.0 * threads, "five seconds are promised with measuring: {work} by {threads} threads");
    let json: Value = serde_json::from_slice(&measured.stdout).expect("JSON");
    assert!(json["warnings"].to_string().contains("link of CUDA0 was not measured"), "{json}");
    let machine: Value = serde_json::from_str(&fs::read_to_string(&kept).expect("written")).expect("JSON");
    assert_eq!(
        (machine["cpu_source"].as_str(), machine["cards"][0]["free_mib"].as_u64()),
        (Some("measured"), Some(280))
    );
    assert!(Path::new(&place.path("cache/moe-machine.json")).is_file(), "what was measured is kept");
    let again = place.call(&["plan", "-m", MODEL, "--host-dir", &host, "-c", "512"]);
    assert!(text(&again.stdout).contains("GB/s (measured)"), "{}", text(&again.stdout));
    let recorded = place.call(&["plan", "-m", MODEL, "--machine", &kept, "-c", "512"]);
    assert!(recorded.status.success());
    // On a full disk the command fails and leaves nothing; no file is not replaced by one.
    let full = place.call(&["plan", "-m", MODEL, "--host-dir", &host, "-c", "512", "--write-machine", "/dev/full"]);
    assert_eq!(full.status.code(), Some(1), "{}", text(&full.stdout));
    assert!(text(&full.stderr).contains("/dev/full") && !Path::new("/dev/full").is_file());
}

/// A second is promised without measuring, five with. A busy machine makes it longer, but not the time that processors spend on it.
#[test]
fn a_plan_takes_little_time() {
    let place = Place::new();
    place.write("llama-server", HOST);
    let seconds = |words: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", "\"$@\" > /dev/null; times", "sh", env!("CARGO_BIN_EXE_ggml-moe"), "plan", "-m", MODEL]);
        command.args(words.split(' ')).env("LLAMA_CACHE", place.path("cache")).env_remove("LD_PRELOAD");
        let told = text(&command.output().expect("a shell").stdout);
        let minutes = |word: &str| {
            let (minutes, seconds) = word.split_once('m')?;
            Some(minutes.parse::<f64>().ok()? * 60.0 + seconds.strip_suffix('s')?.parse::<f64>().ok()?)
        };
        let of_children: Vec<f64> = told.lines().nth(1).unwrap_or_default().split(' ').filter_map(minutes).collect();
        assert_eq!(of_children.len(), 2, "{told}");
        of_children.iter().sum::<f64>()
    };
    let recorded = seconds(&format!("--machine {}", place.path("machine.json")));
    assert!(recorded < 1.0, "{recorded} s without measuring");
    let listed = seconds(&format!("--host-dir {}", place.path("")));
    assert!(listed < 1.0, "{listed} s with a host that lists its devices");
    let cores = std::thread::available_parallelism().map_or(1.0, |cores| cores.get() as f64);
    let measured = seconds(&format!("--host-dir {} --measure", place.path("")));
    assert!(measured < 1.0 + 2.0 * cores, "{measured} s of {cores} processors with measuring");
}

#[test]
fn a_program_is_started_in_our_place() {
    let place = Place::new();
    place.write("libggml-moe.so", "");
    place.write("script", "#!/bin/sh\necho \"$LD_PRELOAD|$*\"; exit 7\n");
    let output = place.call(&[
        "run",
        "--plugin",
        &place.path("libggml-moe.so"),
        "--",
        &place.path("script"),
        "a",
        "--moe",
        "cache=5",
        "b",
    ]);
    assert_eq!(output.status.code(), Some(7), "the exit code is the program's");
    assert_eq!(text(&output.stdout), "|a b\n", "what cannot be helped is started as it is, without our arguments");
    assert!(text(&output.stderr).contains("a script"), "{}", text(&output.stderr));
    let killed = place.call(&["run", "--", "/bin/sh", "-c", "kill -9 $$"]);
    assert_eq!(killed.status.code(), None, "and so are signals");
    let none = place.call(&["run", "--plan-only", "--", "/bin/sh"]);
    assert_eq!(none.status.code(), Some(1));
    assert!(text(&none.stdout).contains("no shared library of llama.cpp"));
    assert_eq!(place.call(&["run", "--", "no-such-program"]).status.code(), Some(2));
    assert_eq!(place.call(&["run"]).status.code(), Some(2));
}

#[test]
fn the_doctor_says_what_is_wrong() {
    let place = Place::new();
    let healthy = "#!/bin/sh\necho 'Available devices:'; [ -z \"$GGML_BACKEND_PATH\" ] || echo '  MoE0: MoE over CPU (1 MiB, 1 MiB free)'\n\
        echo 'ggml-moe: version 0.1.0, host layout api 3, graphs handed on as views' >&2\n";
    place.write("llama-server", healthy);
    place.write("libggml-moe.so", "");
    let (host, plugin) = (place.path(""), place.path("libggml-moe.so"));
    let doctor = |more: &[&str]| place.call(&[&["doctor", "--host-dir", &host, "--plugin", &plugin], more].concat());
    let good = doctor(&[]);
    let lines = text(&good.stdout);
    assert_eq!(good.status.code(), Some(0), "{lines}");
    assert!(
        lines.contains("host layout api 3") && lines.contains("cache folder") && lines.contains("\ndoctor: "),
        "{lines}"
    );
    if !Path::new("/proc/driver/nvidia").exists() {
        assert!(lines.contains("ok    gpu            there is no"), "{lines}");
    }
    let told =
        text(&place.call_with("cahce=4;log=debug", &["doctor", "--host-dir", &host, "--plugin", &plugin]).stdout);
    assert!(told.contains("warn  settings       unknown key \"cahce\"; did you mean"), "{told}");
    let refusing = "#!/bin/sh\necho 'Available devices:'; echo 'ggml-moe: entry.init failed: the binary layout of this host is not known' >&2\n";
    place.write("llama-server", refusing);
    let bad = doctor(&["--json"]);
    assert_eq!(bad.status.code(), Some(1));
    let json: Value = serde_json::from_slice(&bad.stdout).expect("JSON");
    let host =
        json["checks"].as_array().and_then(|all| all.iter().find(|check| check["what"] == "host")).expect("a check");
    assert_eq!(host["state"], "bad");
    assert!(
        host["words"].as_str().is_some_and(|words| words.contains("layout of this host")) && host["help"].is_string(),
        "{host}"
    );
    let none = place.call(&["doctor", "--plugin", "/no/such.so", "--host-dir", "/no/such"]);
    assert_eq!(none.status.code(), Some(1));
    assert_eq!(text(&none.stdout).lines().filter(|line| line.starts_with("bad")).count(), 2);
}
