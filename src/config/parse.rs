//! The syntax of `GGML_MOE`: pairs, continuation, suggestions.

use std::fmt;

use super::{Config, KEYS};

/// Something in the settings that could not be used and is ignored: what was set before, or the default, holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// No key has this name.
    UnknownKey {
        /// What the user wrote.
        name: String,
        /// The closest key, when one is close.
        suggestion: Option<&'static str>,
    },
    /// The key exists, the value is not in its range.
    BadValue {
        /// The key.
        name: &'static str,
        /// What the user wrote.
        value: String,
    },
    /// Text before the first `key=`.
    Stray(String),
    /// Keys that exclude each other.
    Conflict(String),
    /// Keys that were set more than once, with the values that hold.
    Repeated(Vec<(&'static str, String)>),
}

impl Notice {
    /// Whether something that was written is not used, other than because it was written again.
    pub fn is_fault(&self) -> bool {
        !matches!(self, Self::Repeated(_))
    }
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownKey { name, suggestion } => {
                write!(f, "settings: unknown key \"{}\"", shown(name))?;
                match suggestion {
                    Some(suggestion) => write!(f, "; did you mean \"{suggestion}\"?")?,
                    None => write!(f, ";")?,
                }
                write!(f, " keys: {}", key_names())
            }
            Self::BadValue { name, value } => {
                let (range, default, unit) = KEYS
                    .iter()
                    .find(|key| key.name == *name)
                    .map_or(("", "", "-"), |key| (key.range, key.default, key.unit));
                let unit = if unit == "-" { String::new() } else { format!(" ({unit})") };
                write!(
                    f,
                    "settings: {name}={} is not usable and ignored: what was set before holds, or the default ({default}); accepted{unit}: {range}",
                    shown(value)
                )
            }
            Self::Conflict(text) => write!(f, "settings: {text}"),
            Self::Repeated(pairs) => {
                const MOST: usize = 8;
                let told = pairs.iter().take(MOST).map(|(name, value)| format!("{name}={}", shown(value)));
                let told: Vec<String> = told.collect();
                write!(f, "settings: set more than once, the last holds: {}", told.join(", "))?;
                if pairs.len() > MOST { write!(f, " and {} more", pairs.len() - MOST) } else { Ok(()) }
            }
            Self::Stray(text) => {
                write!(f, "settings: \"{}\" is no key=value pair; keys: {}", shown(text), key_names())
            }
        }
    }
}

/// User text made fit for one log line: nothing that breaks or turns the line, and cut.
pub fn shown(text: &str) -> String {
    const LONGEST: usize = 60;
    let mut line: String = text.chars().take(LONGEST).map(|c| if turns_line(c) { '?' } else { c }).collect();
    if text.chars().nth(LONGEST).is_some() {
        line.push_str("...");
    }
    line
}

/// Control characters, and those that end a line, hide, or change the direction of what follows.
pub(crate) fn turns_line(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

fn key_names() -> String {
    let names: Vec<&str> = KEYS.iter().filter(|key| !key.test_only).map(|key| key.name).collect();
    names.join(", ")
}

/// Reads settings as the user writes them. Never fails: what cannot be used becomes a [`Notice`] and leaves the default.
pub fn parse(text: &str) -> (Config, Vec<Notice>) {
    let mut config = Config::default();
    let mut notices = Vec::new();
    let mut held = Held::default();
    for (name, value) in pairs(text, &mut notices) {
        match KEYS.iter().find(|key| key.name == name) {
            Some(key) => {
                if is_text(&value) && (key.apply)(&mut config, &value).is_ok() {
                    held.set(key.name, value);
                } else {
                    notices.push(Notice::BadValue { name: key.name, value });
                }
            }
            None => notices.push(Notice::UnknownKey { suggestion: nearest(&name), name }),
        }
    }
    notices.extend(held.repeated());
    config.given = held.0.into_iter().map(|setting| setting.name).collect();
    notices.extend(super::experts::settle(&mut config));
    notices.extend(super::idle::idle(&config));
    (config, notices)
}

/// What can be a value of any key: no more than a path may have, and without a stand-in for bytes that were no text.
fn is_text(value: &str) -> bool {
    value.len() < 4096 && !value.contains(char::REPLACEMENT_CHARACTER)
}

/// What holds of each key that was set.
#[derive(Default)]
struct Held(Vec<Setting>);

struct Setting {
    name: &'static str,
    value: String,
    /// It was something else before.
    repeated: bool,
}

impl Held {
    fn set(&mut self, name: &'static str, value: String) {
        // Two names of one setting.
        const SIZE: [&str; 2] = ["cache", "moe-expert-cache"];
        let same = |other: &str| other == name || SIZE.contains(&name) && SIZE.contains(&other);
        let before = self.0.iter().position(|setting| same(setting.name)).map(|at| self.0.remove(at));
        let repeated = before.is_some_and(|it| it.repeated || it.name != name || it.value != value);
        self.0.push(Setting { name, value, repeated });
    }

    fn repeated(&self) -> Option<Notice> {
        let repeated = self.0.iter().filter(|it| it.repeated).map(|it| (it.name, it.value.clone()));
        Some(Notice::Repeated(repeated.collect())).filter(|notice| *notice != Notice::Repeated(Vec::new()))
    }
}

/// Settings of two sources as one text: what the second sets is left out of the first, so that it counts as no repetition.
pub(crate) fn merged(first: &str, second: &[String]) -> String {
    let names: Vec<String> = pairs(&second.join(";"), &mut Vec::new()).into_iter().map(|(name, _)| name).collect();
    let mut stray = Vec::new();
    let kept = pairs(first, &mut stray).into_iter().filter(|(name, _)| !names.contains(name));
    let mut parts: Vec<String> = kept.map(|(name, value)| format!("{name}={value}")).collect();
    // Told when all is read.
    parts.extend(stray.into_iter().filter_map(|notice| match notice {
        Notice::Stray(text) => Some(text),
        _ => None,
    }));
    parts.extend(second.iter().cloned());
    parts.join(";")
}

/// Splits at ';' and ','; a piece without '=' continues the value before it when it followed a ','.
fn pairs(text: &str, notices: &mut Vec<Notice>) -> Vec<(String, String)> {
    let mut pairs: Vec<(String, String)> = Vec::new();
    for group in text.split(';') {
        let mut open = false; // whether a pair of this group can be continued
        for piece in group.split(',') {
            let piece = piece.trim();
            match piece.split_once('=') {
                Some((name, value)) => {
                    close(&mut pairs, open);
                    pairs.push((name.trim().to_owned(), value.trim().to_owned()));
                    open = true;
                }
                None if piece.is_empty() && !open => {}
                None => match pairs.last_mut().filter(|_| open) {
                    Some((_, value)) => {
                        value.push(',');
                        value.push_str(piece);
                    }
                    None => notices.push(Notice::Stray(piece.to_owned())),
                },
            }
        }
        close(&mut pairs, open);
    }
    pairs
}

/// Nothing more continues the last value: "inner=CPU," is a slip of the pen, not an empty second name.
fn close(pairs: &mut [(String, String)], open: bool) {
    if let Some((_, value)) = pairs.last_mut().filter(|_| open) {
        value.truncate(value.trim_end_matches(',').len());
    }
}

/// The key within a third of its length of edits, if any.
fn nearest(name: &str) -> Option<&'static str> {
    let name: String = name.chars().take(40).collect::<String>().to_lowercase();
    let close = |key: &&'static str| distance(&name, key) <= key.len().div_ceil(3).max(1);
    KEYS.iter().map(|key| key.name).filter(close).min_by_key(|key| distance(&name, key))
}

/// Levenshtein distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, left) in a.chars().enumerate() {
        let mut diagonal = i;
        let mut previous = i + 1;
        for (cell, right) in row.iter_mut().skip(1).zip(&b) {
            let substituted = diagonal + usize::from(left != *right);
            diagonal = *cell;
            previous = substituted.min(previous + 1).min(*cell + 1);
            *cell = previous;
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{AllocationFault, AllocationKind, GraphMode, LogDetail, MiddlePasses, markdown};
    use proptest::prelude::*;

    #[test]
    fn empty_gives_defaults() {
        assert_eq!(parse(""), (Config::default(), vec![]));
        assert_eq!(parse(" ; ,, ;"), (Config::default(), vec![]));
    }

    #[test]
    fn both_separators_and_continuation() {
        let (config, notices) = parse("inner=CUDA0, CUDA1;log=debug,ctx-share=0.5");
        assert_eq!(notices, vec![]);
        assert_eq!(config.inner, ["CUDA0", "CUDA1"]);
        assert_eq!(config.log, LogDetail::Debug);
        assert!((config.ctx_share - 0.5).abs() < f64::EPSILON);
    }

    #[test]
    fn plus_stands_for_comma() {
        assert_eq!(parse("inner=CPU+CPU").0.inner, ["CPU", "CPU"]);
    }

    #[test]
    fn last_one_holds_and_it_is_said() {
        let (config, notices) = parse("log=debug;cache=4;log=error;moe-expert-cache=0;threads=2;threads=2");
        assert_eq!((config.log, config.cache), (LogDetail::Error, crate::config::CacheSize::Off));
        assert_eq!(config.given, ["log", "moe-expert-cache", "threads"]);
        let lines: Vec<String> = notices.iter().map(ToString::to_string).collect();
        assert_eq!(lines[0], "settings: set more than once, the last holds: log=error, moe-expert-cache=0");
        let all: String = KEYS.iter().map(|key| format!("{0}=1;{0}=100;{0}=1;", key.name)).collect();
        let long = parse(&all).1.into_iter().find(|notice| !notice.is_fault()).expect("repeated");
        assert!(long.to_string().contains(" more") && long.to_string().len() < 300, "{long}");
        assert!(!notices[0].is_fault() && parse("log=debug;log=loud").1.iter().all(Notice::is_fault));
    }

    #[test]
    fn a_second_source_wins_without_a_word() {
        let second = ["log=error".to_owned(), "threads=2".to_owned(), "threads=3".to_owned()];
        let text = merged("inner=A,B;log=debug,cache=4;CPU;threads=9", &second);
        assert_eq!(text, "inner=A,B;cache=4;CPU;log=error;threads=2;threads=3");
        let lines: Vec<String> = parse(&text).1.iter().map(ToString::to_string).collect();
        assert!(lines[0].contains("\"CPU\" is no key=value pair") && lines[1].ends_with(": threads=3"), "{lines:?}");
        assert_eq!(merged("a=1", &[]), "a=1");
    }

    #[test]
    fn trailing_comma_is_forgiven() {
        let given = vec!["inner"];
        assert_eq!(parse("inner=CPU,"), (Config { inner: vec!["CPU".into()], given, ..Config::default() }, vec![]));
        assert_eq!(parse("inner=CPU,,log=debug"), parse("inner=CPU;log=debug"), "also before another pair");
    }

    #[test]
    fn passes() {
        let passes = |text| {
            let (config, notices) = parse(text);
            assert_eq!(notices, vec![], "{text}");
            (config.stream_min_tokens, config.middle_passes)
        };
        assert_eq!(passes(""), (None, MiddlePasses::Auto));
        assert_eq!(passes("stream-min-tokens=auto;middle-passes=auto"), (None, MiddlePasses::Auto));
        assert_eq!(passes("stream-min-tokens=9;middle-passes=fetch"), (Some(9), MiddlePasses::Fetch));
        assert_eq!(passes("middle-passes=cpu").1, MiddlePasses::Cpu);
        assert_eq!(passes("middle-passes=place").1, MiddlePasses::Place);
    }

    #[test]
    fn test_keys() {
        let (config, notices) = parse(
            "debug-panic=buffer.clear;debug-fail-alloc=host:3;debug-graph=add-node;debug-pad=96;debug-late=7;debug-poison=on;\
             debug-pins=2",
        );
        assert_eq!(notices, vec![]);
        assert_eq!(config.debug_panic.as_deref(), Some("buffer.clear"));
        assert_eq!(config.debug_fail_alloc, Some(AllocationFault { kind: AllocationKind::Host, every: 3 }));
        assert_eq!(config.debug_graph, Some(GraphMode::AddNode));
        assert_eq!(config.debug_pad, 96);
        assert_eq!((config.debug_late, config.debug_poison, config.debug_pins), (Some(7), true, Some(2)));
        let (config, notices) = parse("timeline=/tmp/a.jsonl;debug-staging=two-tensors");
        assert_eq!(notices, vec![]);
        assert_eq!(config.timeline.as_deref(), Some(std::path::Path::new("/tmp/a.jsonl")));
        assert_eq!(config.debug_staging, Some(crate::config::Staging::TwoTensors));
    }

    #[test]
    fn unknown_key_is_suggested_and_lists_keys() {
        let (config, notices) = parse("inne=CPU");
        assert_eq!(config, Config::default());
        let line = notices[0].to_string();
        assert!(line.starts_with("settings: unknown key \"inne\"; did you mean \"inner\"? keys: inner, log"), "{line}");
        assert!(!line.contains("debug-"), "{line}");
    }

    #[test]
    fn far_key_gets_no_suggestion() {
        assert!(matches!(&parse("zzzzzz=1").1[..], [Notice::UnknownKey { suggestion: None, .. }]));
    }

    #[test]
    fn bad_values_keep_the_default() {
        for text in [
            "log=loud",
            "timeline=a.jsonl",
            "timeline=",
            "debug-staging=four",
            "stream-min-tokens=8",
            "stream-min-tokens=-1",
            "middle-passes=gpu",
            "threads=0",
            "prompt-threads=0",
            "prompt-threads=1025",
            "prompt-threads=auto",
            "ctx-share=1.5",
            "ctx-share=NaN",
            "ctx-share=",
            "inner=",
            "inner=A,,B",
            "debug-fail-alloc=host:0",
            "debug-fail-alloc=disk:1",
            "debug-pad=-1",
            "debug-late=soon",
            "debug-pins=0",
            "debug-pins=513",
            "debug-poison=2",
            "debug-panic=x",
            "debug-panic=a.b\nc",
            "debug-graph=none",
            "pass-tokens=31",
            "pass-tokens=many",
            "equal-passes=2",
            "socket=on",
            "socket=moe.sock",
        ] {
            let (config, notices) = parse(text);
            assert_eq!(config, Config::default(), "{text}");
            assert!(matches!(&notices[..], [Notice::BadValue { .. }]), "{text}: {notices:?}");
        }
    }

    #[test]
    fn stray_text_is_reported() {
        assert_eq!(parse("CPU;log=info").1, vec![Notice::Stray("CPU".into())]);
    }

    #[test]
    fn every_key_is_documented() {
        let page = markdown();
        for key in KEYS {
            assert!(page.contains(&format!("| `{}` |", key.name)));
            assert!(!key.effect.is_empty() && !key.reason.is_empty() && !key.range.is_empty());
        }
    }

    proptest! {
        #[test]
        fn never_panics_and_lines_stay_one_line(text in ".{0,200}") {
            let (_, notices) = parse(&text);
            for notice in notices {
                let line = notice.to_string();
                prop_assert!(line.starts_with("settings: "));
                prop_assert!(!line.chars().any(char::is_control));
            }
        }

        #[test]
        fn distance_is_a_metric(a in "[a-d]{0,6}", b in "[a-d]{0,6}", c in "[a-d]{0,6}") {
            prop_assert_eq!(distance(&a, &b), distance(&b, &a));
            prop_assert_eq!(distance(&a, &b) == 0, a == b);
            prop_assert!(distance(&a, &c) <= distance(&a, &b) + distance(&b, &c));
        }
    }
}
