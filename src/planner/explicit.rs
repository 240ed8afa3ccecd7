//! Which settings of llama.cpp's the user made, and what they decide before any device is asked.
//!
//! Owns: the spelling of the arguments and variables of llama.cpp's that decide where weights lie, and the rule that they are left alone
//! ([`standing`]), for the preloaded library and for plans.
//! Invariants: any bytes are accepted. Threads: none; everything here is a pure function.
//! Does not: know our own arguments (`arguments` does), or numbers (`flags` does).

/// Whether a model's file is named, so that this process loads it itself.
pub(crate) fn names_model(arguments: &[&[u8]], variable: &dyn Fn(&str) -> Option<String>) -> bool {
    arguments.iter().skip(1).any(|word| matches!(*word, b"-m" | b"--model")) || variable("LLAMA_ARG_MODEL").is_some()
}

/// Whether this is the name of a device of ours.
fn is_ours(name: &str) -> bool {
    let number = name.trim().strip_prefix("MoE");
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Settings of llama.cpp's that the user made and that stay as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Explicit {
    /// A choice of devices.
    pub device: Option<String>,
    /// Its value, where it names devices of ours only.
    pub ours: Option<String>,
    /// A split of rows or tensors.
    pub splits: bool,
    /// Choices of where layers or experts lie.
    pub placement: Vec<String>,
    /// A length of batches.
    pub batch: Option<String>,
    /// How the file is loaded.
    pub load: bool,
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
const SPLIT: (&[&str], &str) = (&["-sm", "--split-mode"], "LLAMA_ARG_SPLIT_MODE");
/// The switches are those of releases before b11434.
const LOAD: [(&[&str], &str); 4] = [
    (&["-lm", "--load-mode"], "LLAMA_ARG_LOAD_MODE"),
    (&["--mmap", "--no-mmap"], "LLAMA_ARG_MMAP"),
    (&["--mlock"], "LLAMA_ARG_MLOCK"),
    (&["-dio", "--direct-io"], "LLAMA_ARG_DIO"),
];

/// What the caller of a load asks for beside that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Call {
    /// It names devices.
    pub names_devices: bool,
    /// It places layers or tensors.
    pub places_weights: bool,
    /// It splits what our devices cannot split.
    pub splits_tensors: bool,
    /// It says how the file is loaded.
    pub sets_load: bool,
}

/// What settings decide.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Standing {
    /// Nothing: the plan does.
    #[default]
    Open,
    /// The plugin has it, because its devices are named, as the words say.
    Ours(String),
    /// It is left alone, because the words say so.
    Left(String),
}

/// What the settings decide, before any device is asked. `cache`: a cache was asked for by a key.
pub fn standing(explicit: &Explicit, cache: bool, call: Call) -> Standing {
    if let (Some(word), Some(names)) = (&explicit.device, &explicit.ours) {
        return Standing::Ours(format!("{word} {names}"));
    }
    if explicit.device.is_some() || call.names_devices {
        let what = explicit.device.as_deref().unwrap_or("a choice of devices");
        return Standing::Left(format!("{what} was given and is left alone"));
    }
    if explicit.splits || call.splits_tensors {
        let what = "a split of rows or tensors was asked for, which experts in RAM cannot follow";
        return Standing::Left(what.to_owned());
    }
    let placed = match &explicit.placement[..] {
        [] => call.places_weights.then(|| "a placement of layers or tensors".to_owned()),
        words => Some(words.join(", ")),
    };
    match placed {
        Some(what) if !cache => Standing::Left(format!(
            "{what} was given and is left alone, so there is no cache of experts; ask for one with --moe cache=auto, or leave it out"
        )),
        _ => Standing::Open,
    }
}

impl Explicit {
    /// Reads what the program gets: its arguments without ours, and its environment.
    pub(crate) fn read(arguments: &[&[u8]], variable: &dyn Fn(&str) -> Option<String>) -> Self {
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
        let device = DEVICES.into_iter().filter_map(given).find(|(_, value)| value.as_deref() != Some("auto"));
        let ours = device.as_ref().and_then(|(_, value)| value.clone()).filter(|names| names.split(',').all(is_ours));
        Self {
            device: device.map(|(word, _)| word),
            ours,
            splits: given(SPLIT).is_some_and(|(_, value)| matches!(value.as_deref(), Some("row" | "tensor"))),
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
        let ours = explicit("x --device MoE0,MoE1", &[]);
        assert_eq!((ours.device.as_deref(), ours.ours.as_deref()), (Some("--device"), Some("MoE0,MoE1")));
        assert_eq!(explicit("x --device MoE0,CUDA1", &[]).ours, None);
        assert!(explicit("x -sm row", &[]).splits && !explicit("x -sm layer", &[]).splits);
        assert_eq!(explicit("x --rpc a:1", &[]).device.as_deref(), Some("--rpc"));
        assert_eq!(explicit("x -ub 4096", &[]).batch.as_deref(), Some("-ub"));
        assert!(explicit("x -lm none", &[]).load && explicit("x --no-mmap -m y", &[]).load);
        assert!(!explicit("x -lm auto", &[]).load);
        assert_eq!(explicit("x -ngl auto", &[]), Explicit::default());
        assert_eq!(explicit("x -ngl -1", &[]), Explicit::default());
        assert_eq!(explicit("x -ngl 1 -ngl auto", &[]), Explicit::default(), "the last one holds");
    }

    #[test]
    fn settings_of_the_user_win() {
        let of = |line: &str, cache, call| standing(&explicit(line, &[]), cache, call);
        let left = |line: &str, cache, call, words: &str| match of(line, cache, call) {
            Standing::Left(told) => assert!(told.starts_with(words), "{told}"),
            other => panic!("{other:?}"),
        };
        let call = Call::default();
        assert_eq!(of("x -m y", false, call), Standing::Open);
        left("x -ngl 9", false, call, "-ngl was given and is left alone");
        assert_eq!(of("x -ngl 9", true, call), Standing::Open, "a cache was asked for");
        left("x", false, Call { places_weights: true, ..call }, "a placement of layers");
        left("x", true, Call { names_devices: true, ..call }, "a choice of devices");
        left("x -dev CUDA0", true, call, "-dev was given");
        assert_eq!(of("x -dev MoE0 -ngl 9", false, call), Standing::Ours("-dev MoE0".to_owned()));
        left("x", false, Call { splits_tensors: true, ..call }, "a split of rows");
        left("x -sm tensor", false, call, "a split of rows");
    }
}
