//! Which settings of llama.cpp's the user made, and what they decide before any device is asked.
//!
//! Owns: the spelling of the arguments and variables of llama.cpp's that decide where weights lie, and the rule that they are left alone
//! ([`standing`]), for the plugin, the preloaded library and plans.
//! Invariants: any bytes are accepted. Threads: none; everything here is a pure function.
//! Does not: know our own arguments (`arguments` does), or read files: how many layers a model has is asked of the caller.

use std::borrow::Cow;

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
    pub placement: Vec<Placement>,
    /// A length of batches.
    pub batch: Option<String>,
    /// How the file is loaded.
    pub load: bool,
}

/// A choice of where layers or experts lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The flag, or the variable for it.
    pub flag: String,
    /// For a number of layers on devices: the number, or the list of them.
    layers: Option<String>,
}

/// A number of layers that people write for all of them; models with experts have fewer.
const ALL_LAYERS: u64 = 99;

impl Placement {
    /// Whether it leaves weights away from a device that was named. `layers` are those of the model, as far as they are known.
    fn moves_away(&self, layers: &dyn Fn() -> Option<u64>) -> bool {
        let covers = |number: &str| {
            let number = number.parse::<u64>().ok();
            // The output counts as one more.
            number.is_some_and(|number| number >= ALL_LAYERS || layers().is_some_and(|layers| number > layers))
        };
        !self.layers.as_ref().is_some_and(|list| list.split(',').all(|it| it == "all" || is_open(it) || covers(it)))
    }
}

/// The host's own choice, asked for by name.
fn is_open(value: &str) -> bool {
    value == "auto" || value.parse::<i64>().is_ok_and(|number| number < 0)
}

/// A switch that a variable does not turn on.
fn is_unset(name: &str, value: &str) -> bool {
    name == CPU_MOE && !matches!(value, "on" | "enabled" | "true" | "1")
}

const LAYERS: &str = "LLAMA_ARG_N_GPU_LAYERS";
const CPU_MOE: &str = "LLAMA_ARG_CPU_MOE";
const N_CPU_MOE: &str = "LLAMA_ARG_N_CPU_MOE";
const N_CPU_FFN: &str = "LLAMA_ARG_N_CPU_FFN";
/// Flags that place weights, by all their names, and their variable.
const PLACEMENT: [(&[&str], &str); 5] = [
    (&["-ngl", "--gpu-layers", "--n-gpu-layers"], LAYERS),
    (&["-ot", "--override-tensor"], "LLAMA_ARG_OVERRIDE_TENSOR"),
    (&["-cmoe", "--cpu-moe"], CPU_MOE),
    (&["-ncmoe", "--n-cpu-moe"], N_CPU_MOE),
    (&["-ncffn", "--n-cpu-ffn"], N_CPU_FFN),
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
        placements => Some(flags_of(placements.iter())),
    };
    match placed {
        Some(what) if !cache => Standing::Left(without_cache(&what)),
        _ => Standing::Open,
    }
}

/// Why there is no cache beside these flags.
pub(crate) fn without_cache(flags: &str) -> String {
    format!(
        "{flags} was given and is left alone, so there is no cache of experts; ask for one with --moe cache=auto, or leave it out"
    )
}

fn flags_of<'a>(placements: impl Iterator<Item = &'a Placement>) -> String {
    placements.map(|it| it.flag.as_str()).collect::<Vec<_>>().join(", ")
}

impl Explicit {
    /// Reads what the program gets: its arguments, and its environment.
    pub(crate) fn read(arguments: &[&[u8]], variable: &dyn Fn(&str) -> Option<String>) -> Self {
        let given = |names: &[&str], name: &str| {
            let at = (1..arguments.len()).rev().find_map(|at| Some((at, named(arguments[at], names)?)));
            match at {
                Some((at, word)) => Some((word, value_at(arguments, at + 1))),
                None => {
                    variable(name).filter(|value| !is_unset(name, value)).map(|value| (name.to_owned(), Some(value)))
                }
            }
        };
        let placed = |(names, name): (&[&str], &str)| {
            let (flag, value) = given(names, name)?;
            // A switch has no value; what follows it is the next argument.
            let value = value.filter(|_| name != CPU_MOE);
            // Of no layers at all.
            let nothing = matches!(name, N_CPU_MOE | N_CPU_FFN) && value.as_deref() == Some("0");
            (!nothing && !value.as_deref().is_some_and(is_open))
                .then(|| Placement { flag, layers: value.filter(|_| name == LAYERS) })
        };
        let is_auto = |value: &Option<String>| value.as_deref() == Some("auto");
        let device =
            DEVICES.into_iter().filter_map(|(names, name)| given(names, name)).find(|(_, value)| !is_auto(value));
        let ours = device.as_ref().and_then(|(_, value)| value.clone()).filter(|names| names.split(',').all(is_ours));
        Self {
            device: device.map(|(word, _)| word),
            ours,
            splits: given(SPLIT.0, SPLIT.1)
                .is_some_and(|(_, value)| matches!(value.as_deref(), Some("row" | "tensor"))),
            placement: PLACEMENT.into_iter().filter_map(placed).collect(),
            batch: BATCH.into_iter().find_map(|(names, name)| given(names, name)).map(|(word, _)| word),
            load: LOAD.into_iter().filter_map(|(names, name)| given(names, name)).any(|(_, value)| !is_auto(&value)),
        }
    }

    /// The flags that leave weights away from a device that was named, for the user; `None` if everything is to lie there. `layers` are those of
    /// the model, as far as they are known.
    pub(crate) fn moved_away(&self, layers: &dyn Fn() -> Option<u64>) -> Option<String> {
        let flags = flags_of(self.placement.iter().filter(|it| it.moves_away(layers)));
        (!flags.is_empty()).then_some(flags)
    }
}

/// The flag that a word is, as the host reads it.
fn named(word: &[u8], names: &[&str]) -> Option<String> {
    let word = String::from_utf8_lossy(word);
    // The host takes `_` for `-` in long names.
    let word = if word.starts_with("--") { Cow::Owned(word.replace('_', "-")) } else { word };
    names.contains(&word.as_ref()).then(|| word.into_owned())
}

fn value_at(arguments: &[&[u8]], at: usize) -> Option<String> {
    arguments.get(at).map(|it| String::from_utf8_lossy(it).into_owned())
}

/// The files of the models that are named.
pub(crate) fn models(arguments: &[&[u8]], variable: &dyn Fn(&str) -> Option<String>) -> Vec<String> {
    let named = |at: &usize| matches!(arguments[*at], b"-m" | b"--model");
    let files: Vec<String> = (1..arguments.len()).filter(named).filter_map(|at| value_at(arguments, at + 1)).collect();
    if files.is_empty() { variable("LLAMA_ARG_MODEL").into_iter().collect() } else { files }
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
        let placement = |line: &str, variables: &[(&str, &str)]| -> Vec<String> {
            explicit(line, variables).placement.into_iter().map(|it| it.flag).collect()
        };
        assert_eq!(placement("x -ngl 20 --n_cpu_moe 3", &[]), ["-ngl", "--n-cpu-moe"]);
        assert_eq!(placement("x -cmoe -m y", &[]), ["-cmoe"]);
        assert_eq!(placement("x -cmoe auto", &[]), ["-cmoe"], "a switch has no value");
        assert_eq!(placement("x", &[("LLAMA_ARG_OVERRIDE_TENSOR", "exps=CPU")]), ["LLAMA_ARG_OVERRIDE_TENSOR"]);
        assert_eq!(placement("x", &[("LLAMA_ARG_CPU_MOE", "1")]), ["LLAMA_ARG_CPU_MOE"]);
        assert_eq!(placement("x", &[("LLAMA_ARG_CPU_MOE", "0")]), [] as [String; 0], "as the host reads it");
        assert_eq!(placement("x -ncmoe 0 -ncffn 0", &[("LLAMA_ARG_CPU_MOE", "1")]), ["LLAMA_ARG_CPU_MOE"]);
        assert_eq!(placement("x -ngl 0", &[("LLAMA_ARG_N_CPU_MOE", "0")]), ["-ngl"], "no layers on devices");
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
    fn a_device_that_was_named_keeps_what_no_flag_moves_away() {
        let of = |line: &str, layers: Option<u64>| explicit(line, &[]).moved_away(&|| layers);
        for (line, layers) in [
            ("x -dev MoE0", Some(48)),
            ("x -dev MoE0 -ngl 99", Some(48)),
            ("x -ngl all", None),
            ("x -ngl -1", None),
            ("x -ngl -2", None),
            ("x -ngl auto", None),
            ("x -ngl 999", None),
            ("x -ngl 99", None),
            ("x -ngl 49", Some(48)),
            ("x -ngl 99,60", Some(48)),
        ] {
            assert_eq!(of(line, layers), None, "{line}");
        }
        for (line, layers, flags) in [
            ("x -ngl 48", Some(48), "-ngl"),
            ("x -ngl 0", Some(48), "-ngl"),
            ("x -ngl 49", None, "-ngl"),
            ("x -ngl 99,0", Some(48), "-ngl"),
            ("x -ngl 0-99", Some(48), "-ngl"),
            ("x -ngl", None, "-ngl"),
            ("x -ngl 99 -ncmoe 3", Some(48), "-ncmoe"),
            ("x -ngl 9 --cpu-moe", Some(48), "-ngl, --cpu-moe"),
            ("x -ot exps=CPU", Some(48), "-ot"),
        ] {
            assert_eq!(of(line, layers).as_deref(), Some(flags), "{line}");
        }
        let variable = |name: &str| (name == "LLAMA_ARG_MODEL").then(|| "v".to_owned());
        assert_eq!(models(&[b"x", b"-m", b"a", b"--model", b"b", b"-m"], &variable), ["a", "b"]);
        assert_eq!(models(&[b"x"], &variable), ["v"]);
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
