//! Which settings of llama.cpp's the user made.
//!
//! Owns: the spelling of the arguments and variables of llama.cpp's that decide where weights lie.
//! Invariants: any bytes are accepted. Threads: none; everything here is a pure function.
//! Does not: know our own arguments (`arguments` does).

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
