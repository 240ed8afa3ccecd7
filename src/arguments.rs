//! Our arguments among those of a program of llama.cpp's.
//!
//! Owns: their spelling, for all who meet them: the preloaded library, which takes them out, and the command, which plans with them and
//! starts programs without them.
//! Invariants: any bytes are accepted; what is not ours is kept as it is, in order. Threads: none; everything here is a pure function.
//! Does not: read settings (`config` does).

use crate::config::KEYS;

/// What was found among the arguments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Arguments {
    /// Positions of the arguments that the program gets.
    pub kept: Vec<usize>,
    /// Settings as `GGML_MOE` takes them, in order.
    pub settings: Vec<String>,
    /// `--moe help`.
    pub help: bool,
    /// `--moe off`.
    pub off: bool,
    /// The program is asked for its own help.
    pub host_help: bool,
    /// What is wrong with ours.
    pub faults: Vec<String>,
}

/// Whether a word can be a value: a number may be negative; anything else that begins so is the program's next argument.
fn is_value(word: &str) -> bool {
    word.strip_prefix('-').is_none_or(|rest| rest.starts_with(|sign: char| sign.is_ascii_digit() || sign == '.'))
}

/// Reads the arguments; the first is the program's name.
pub fn read(arguments: &[&[u8]]) -> Arguments {
    let mut found = Arguments::default();
    let mut at = 0;
    while let Some(word) = arguments.get(at) {
        let text = String::from_utf8_lossy(word);
        let next = || arguments.get(at + 1).map(|next| String::from_utf8_lossy(next).into_owned());
        let used = match text.as_ref() {
            _ if at == 0 => 0,
            "--moe" => match next() {
                Some(setting) if is_value(&setting) => 1 + found.setting(&setting, arguments.get(at + 2).copied()),
                _ => found.fault(NO_SETTING),
            },
            "--moe-expert-cache" => match next() {
                // One that is no number of experts is a wrong value, which the settings tell.
                Some(number) if is_value(&number) => {
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

const NO_SETTING: &str = "--moe needs a setting after it: key=value, help or off";

impl Arguments {
    /// One setting, and the argument behind it; how many of the two belong to it.
    fn setting(&mut self, setting: &str, next: Option<&[u8]>) -> usize {
        match setting {
            "help" => self.help = true,
            "off" => self.off = true,
            "on" => {}
            "" => return self.fault(NO_SETTING),
            pair if pair.contains('=') => self.settings.push(pair.to_owned()),
            key => {
                let value = next.map(|next| String::from_utf8_lossy(next).into_owned());
                let Some(value) = value.filter(|value| is_value(value)) else {
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
    fn numbers_are_taken_whatever_their_size() {
        let (found, kept) = of("x --moe-expert-cache -99999999999999999999 --moe cache 1e99 --moe threads -inf");
        assert_eq!(found.settings, ["moe-expert-cache=-99999999999999999999", "cache=1e99"]);
        assert_eq!((kept, found.faults.len()), (vec!["x", "-inf"], 1));
    }

    #[test]
    fn what_is_wrong_is_said_and_taken_out() {
        for (line, kept, fault) in [
            ("x --moe", vec!["x"], "--moe needs a setting"),
            ("x -m y --moe", vec!["x", "-m", "y"], "--moe needs a setting"),
            // What follows is the program's.
            ("x --moe -m y", vec!["x", "-m", "y"], "--moe needs a setting"),
            ("x --moe= -m y", vec!["x", "-m", "y"], "--moe needs a setting"),
            ("x --moe  y", vec!["x", "y"], "--moe needs a setting"),
            ("x --moe cache -m y", vec!["x", "-m", "y"], "--moe cache needs a value"),
            ("x --moe cache", vec!["x"], "--moe cache needs a value"),
            ("x --moe nonsense", vec!["x"], "--moe nonsense is no key=value pair"),
            ("x --moe-expert-cache", vec!["x"], "--moe-expert-cache needs a number"),
            ("x --moe-expert-cache -m y", vec!["x", "-m", "y"], "--moe-expert-cache needs a number"),
            ("x --moe-expert-cache --verbose", vec!["x", "--verbose"], "--moe-expert-cache needs a number"),
        ] {
            let (found, left) = of(line);
            assert_eq!(left, kept, "{line}");
            assert!(found.faults.len() == 1 && found.faults[0].starts_with(fault), "{line}: {:?}", found.faults);
            assert!(found.settings.is_empty(), "{line}");
        }
    }

    #[test]
    fn a_word_where_a_number_belongs_is_a_wrong_value() {
        let (found, kept) =
            of("x --moe-expert-cache many -m y --moe-expert-cache -5x --moe-expert-cache= --moe cache=");
        assert_eq!(kept, ["x", "-m", "y"]);
        assert_eq!(
            found.settings,
            ["moe-expert-cache=many", "moe-expert-cache=-5x", "moe-expert-cache=", "cache="],
            "the settings tell them"
        );
        assert_eq!(found.faults, [] as [String; 0]);
        assert!(found.settings.iter().all(|setting| !crate::config::parse(setting).1.is_empty()));
        // A second `--moe` is no setting of the first, and nothing ends our arguments.
        let (found, kept) = of("x --moe --moe cache=4 -- --moe log=info --moe help");
        assert_eq!((kept, found.help, found.faults.len()), (vec!["x", "--"], true, 1));
        assert_eq!(found.settings, ["cache=4", "log=info"]);
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
        // In a setting they are told: a path with other bytes than were written would be another file.
        let found = read(&[b"x", b"--moe", b"state-file=/tmp/\xff", b"--moe", b"\xfe", b"1"]);
        assert_eq!((found.kept, found.faults.len()), (vec![0], 0));
        let (config, notices) = crate::config::parse(&found.settings.join(";"));
        assert_eq!((config, notices.len()), (crate::config::Config::default(), 2));
    }
}
