//! The program's arguments: which are ours, and which settings of llama.cpp's the user made.
//!
//! Owns: the spelling of our arguments and of the arguments and variables of llama.cpp's that decide where weights lie.
//! Invariants: any bytes are accepted; what is not ours is kept as it is, in order. Threads: none; everything here is a pure function.
//! Does not: read settings (`config` does).

use crate::config::KEYS;

/// What was found among the arguments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Arguments {
    /// Positions of the arguments that the program gets.
    pub(super) kept: Vec<usize>,
    /// Settings as `GGML_MOE` takes them, in order.
    pub(super) settings: Vec<String>,
    /// `--moe help`.
    pub(super) help: bool,
    /// `--moe off`.
    pub(super) off: bool,
    /// The program is asked for its own help.
    pub(super) host_help: bool,
    /// What is wrong with ours.
    pub(super) faults: Vec<String>,
}

/// Reads the arguments; the first is the program's name.
pub(super) fn read(arguments: &[&[u8]]) -> Arguments {
    let mut found = Arguments::default();
    let mut at = 0;
    while let Some(word) = arguments.get(at) {
        let text = String::from_utf8_lossy(word);
        let next = || arguments.get(at + 1).map(|next| String::from_utf8_lossy(next).into_owned());
        let used = match text.as_ref() {
            _ if at == 0 => 0,
            "--moe" => match next() {
                Some(setting) => 1 + found.setting(&setting, arguments.get(at + 2).copied()),
                None => found.fault("--moe needs a setting after it: key=value, help or off"),
            },
            "--moe-expert-cache" => match next() {
                Some(number) if number.parse::<i64>().is_ok() => {
                    found.settings.push(format!("moe-expert-cache={number}"));
                    2
                }
                _ => found.fault("--moe-expert-cache needs a number after it: -1 is automatic, 0 is off"),
            },
            "--fork" if next().is_some_and(|it| it == "off" || it == "on") => {
                found.off |= next().is_some_and(|it| it == "off");
                2
            }
            // Pinned memory is what ours has anyway; the host knows no such mode.
            "-lm" | "--load-mode" if next().is_some_and(|it| it == "pin") => 2,
            other => match (other.strip_prefix("--moe="), other.strip_prefix("--moe-expert-cache=")) {
                (Some(setting), _) => found.setting(setting, None),
                (_, Some(number)) => {
                    found.settings.push(format!("moe-expert-cache={number}"));
                    1
                }
                _ => 0,
            },
        };
        if used == 0 {
            found.host_help |= at > 0 && matches!(text.as_ref(), "-h" | "--help" | "--usage");
            found.kept.push(at);
        }
        at += used.max(1);
    }
    found
}

impl Arguments {
    /// One setting, and the argument behind it; how many of the two belong to it.
    fn setting(&mut self, setting: &str, next: Option<&[u8]>) -> usize {
        match setting {
            "help" => self.help = true,
            "off" => self.off = true,
            "on" => {}
            pair if pair.contains('=') => self.settings.push(pair.to_owned()),
            key => {
                let value = next.map(|next| String::from_utf8_lossy(next).into_owned());
                // A number may be negative; anything else that begins so is the program's next argument.
                let fits = |value: &String| !value.starts_with('-') || value.parse::<f64>().is_ok();
                let Some(value) = value.filter(fits) else {
                    let known = KEYS.iter().any(|known| known.name == key);
                    let shown = crate::config::shown(key);
                    self.fault(&if known {
                        format!("--moe {shown} needs a value: --moe {shown}=VALUE")
                    } else {
                        format!("--moe {shown} is no key=value pair; --moe help lists the keys")
                    });
                    return 1;
                };
                self.settings.push(format!("{key}={value}"));
                return 2;
            }
        }
        1
    }

    fn fault(&mut self, text: &str) -> usize {
        self.faults.push(text.to_owned());
        1
    }
}

/// Whether a model's file is named, so that this process loads it itself.
pub(super) fn names_model(arguments: &[&[u8]], variable: &dyn Fn(&str) -> Option<String>) -> bool {
    arguments.iter().skip(1).any(|word| matches!(*word, b"-m" | b"--model")) || variable("LLAMA_ARG_MODEL").is_some()
}

/// Settings of llama.cpp's that the user made and that stay as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Explicit {
    /// A choice of devices.
    pub(super) device: Option<String>,
    /// Choices of where layers or experts lie.
    pub(super) placement: Vec<String>,
    /// A length of batches.
    pub(super) batch: Option<String>,
    /// How the file is loaded.
    pub(super) load: bool,
}

/// Flags that place weights, by all their names, and their variable.
const PLACEMENT: [(&[&str], &str); 5] = [
    (&["-ngl", "--gpu-layers", "--n-gpu-layers"], "LLAMA_ARG_N_GPU_LAYERS"),
    (&["-ot", "--override-tensor"], "LLAMA_ARG_OVERRIDE_TENSOR"),
    (&["-cmoe", "--cpu-moe"], "LLAMA_ARG_CPU_MOE"),
    (&["-ncmoe", "--n-cpu-moe"], "LLAMA_ARG_N_CPU_MOE"),
    (&["-ncffn", "--n-cpu-ffn"], "LLAMA_ARG_N_CPU_FFN"),
];
/// Servers of other machines are devices as well, which the host takes beside its own.
const DEVICES: [(&[&str], &str); 2] =
    [(&["-dev", "--device"], "LLAMA_ARG_DEVICE"), (&["-rpc", "--rpc"], "LLAMA_ARG_RPC")];
const BATCH: [(&[&str], &str); 2] =
    [(&["-b", "--batch-size"], "LLAMA_ARG_BATCH"), (&["-ub", "--ubatch-size"], "LLAMA_ARG_UBATCH")];
/// The switches are those of releases before b11434.
const LOAD: [(&[&str], &str); 4] = [
    (&["-lm", "--load-mode"], "LLAMA_ARG_LOAD_MODE"),
    (&["--mmap", "--no-mmap"], "LLAMA_ARG_MMAP"),
    (&["--mlock"], "LLAMA_ARG_MLOCK"),
    (&["-dio", "--direct-io"], "LLAMA_ARG_DIO"),
];

impl Explicit {
    /// Reads what the program gets: its arguments without ours, and its environment.
    pub(super) fn read(arguments: &[&[u8]], variable: &dyn Fn(&str) -> Option<String>) -> Self {
        let given = |(names, name): (&[&str], &str)| {
            let is_named = |word: &[u8]| {
                let word = String::from_utf8_lossy(word);
                // The host takes `_` for `-` in long names.
                let word = if word.starts_with("--") { word.replace('_', "-") } else { word.into_owned() };
                names.contains(&word.as_str()).then_some(word)
            };
            let at = (1..arguments.len()).rev().find_map(|at| Some((at, is_named(arguments[at])?)));
            match at {
                Some((at, word)) => {
                    Some((word, arguments.get(at + 1).map(|it| String::from_utf8_lossy(it).into_owned())))
                }
                None => variable(name).map(|value| (name.to_owned(), Some(value))),
            }
        };
        let is_open = |value: &Option<String>| {
            // The host's own choice, asked for by name.
            value.as_deref().is_some_and(|value| value == "auto" || value.parse::<i64>().is_ok_and(|number| number < 0))
        };
        Self {
            device: DEVICES
                .into_iter()
                .filter_map(given)
                .find(|(_, value)| value.as_deref() != Some("auto"))
                .map(|(word, _)| word),
            placement: PLACEMENT
                .into_iter()
                .filter_map(given)
                .filter(|(_, value)| !is_open(value))
                .map(|(word, _)| word)
                .collect(),
            batch: BATCH.into_iter().find_map(given).map(|(word, _)| word),
            load: LOAD.into_iter().filter_map(given).any(|(_, value)| value.as_deref() != Some("auto")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> (Arguments, Vec<&str>) {
        let words: Vec<&[u8]> = line.split(' ').map(str::as_bytes).collect();
        let found = read(&words);
        let kept = found.kept.iter().map(|at| line.split(' ').nth(*at).unwrap()).collect();
        (found, kept)
    }

    #[test]
    fn ours_are_taken_out_in_every_spelling() {
        let (found, kept) = of(
            "llama-server --moe cache=4 -m M.gguf --moe log debug --moe=inner=CPU --moe-expert-cache -1 -c 512 --moe-expert-cache=8 --moe threads 2",
        );
        assert_eq!(kept, ["llama-server", "-m", "M.gguf", "-c", "512"]);
        assert_eq!(
            found.settings,
            ["cache=4", "log=debug", "inner=CPU", "moe-expert-cache=-1", "moe-expert-cache=8", "threads=2"]
        );
        assert_eq!((found.help, found.off, found.faults.len()), (false, false, 0));
    }

    #[test]
    fn words_and_aliases() {
        assert!(of("x --moe help").0.help);
        assert!(of("x --moe=off -m y").0.off);
        let (found, kept) = of("x --fork off -m y");
        assert_eq!((found.off, kept), (true, vec!["x", "-m", "y"]));
        let (found, kept) = of("x --fork on --moe on");
        assert_eq!((found.off, kept), (false, vec!["x"]));
        assert_eq!(of("x --fork it").1, ["x", "--fork", "it"], "not ours");
        assert_eq!(of("x -lm pin -lm mmap").1, ["x", "-lm", "mmap"]);
        assert!(of("x -h").0.host_help && !of("x -m y").0.host_help);
    }

    #[test]
    fn what_is_wrong_is_said_and_taken_out() {
        for (line, kept, fault) in [
            ("x --moe", vec!["x"], "--moe needs a setting"),
            ("x --moe cache -m y", vec!["x", "-m", "y"], "--moe cache needs a value"),
            ("x --moe nonsense", vec!["x"], "--moe nonsense is no key=value pair"),
            ("x --moe-expert-cache many -m y", vec!["x", "many", "-m", "y"], "--moe-expert-cache needs a number"),
        ] {
            let (found, left) = of(line);
            assert_eq!(left, kept, "{line}");
            assert!(found.faults.len() == 1 && found.faults[0].starts_with(fault), "{line}: {:?}", found.faults);
            assert!(found.settings.is_empty(), "{line}");
        }
    }

    #[test]
    fn the_name_of_the_program_is_no_argument() {
        assert_eq!(of("--moe").1, ["--moe"]);
        assert_eq!(read(&[]), Arguments::default());
    }

    #[test]
    fn bytes_that_are_no_text_are_kept() {
        let words: [&[u8]; 3] = [b"x", b"-p", b"\xff\xfe"];
        assert_eq!(read(&words).kept, [0, 1, 2]);
    }

    fn explicit(line: &str, variables: &[(&str, &str)]) -> Explicit {
        let words: Vec<&[u8]> = line.split(' ').map(str::as_bytes).collect();
        let variable = |name: &str| variables.iter().find(|(it, _)| *it == name).map(|(_, value)| (*value).to_owned());
        Explicit::read(&words, &variable)
    }

    #[test]
    fn settings_of_the_host_are_seen() {
        assert_eq!(explicit("x -m y -c 5 -fit off", &[]), Explicit::default());
        assert_eq!(explicit("x -ngl 20 --n_cpu_moe 3", &[]).placement, ["-ngl", "--n-cpu-moe"]);
        assert_eq!(explicit("x -cmoe -m y", &[]).placement, ["-cmoe"]);
        assert_eq!(
            explicit("x", &[("LLAMA_ARG_OVERRIDE_TENSOR", "exps=CPU")]).placement,
            ["LLAMA_ARG_OVERRIDE_TENSOR"]
        );
        assert_eq!(explicit("x -dev CUDA0", &[]).device.as_deref(), Some("-dev"));
        assert_eq!(explicit("x --rpc a:1", &[]).device.as_deref(), Some("--rpc"));
        assert_eq!(explicit("x -ub 4096", &[]).batch.as_deref(), Some("-ub"));
        assert!(explicit("x -lm none", &[]).load && explicit("x --no-mmap -m y", &[]).load);
        assert!(!explicit("x -lm auto", &[]).load);
        assert_eq!(explicit("x -ngl auto", &[]), Explicit::default());
        assert_eq!(explicit("x -ngl -1", &[]), Explicit::default());
        assert_eq!(explicit("x -ngl 1 -ngl auto", &[]), Explicit::default(), "the last one holds");
    }
}
