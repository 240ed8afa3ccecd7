//! Every key of the table with values that it takes and values that it does not: what its text says is what the parser does.

use super::{Config, KEYS, Key, Notice, parse, shown};
use crate::arguments;

/// What is tried of a key beside what follows from its text.
struct Case {
    key: &'static str,
    good: &'static [&'static str],
    wrong: &'static [&'static str],
    /// Any text may be a value, if it has this beginning.
    text: Option<&'static str>,
}

const fn case(key: &'static str, good: &'static [&'static str], wrong: &'static [&'static str]) -> Case {
    Case { key, good, wrong, text: None }
}

const fn text(
    key: &'static str,
    start: &'static str,
    good: &'static [&'static str],
    wrong: &'static [&'static str],
) -> Case {
    Case { key, good, wrong, text: Some(start) }
}

const SWITCH: &[&str] = &["on", "off", "1", "0"];
const NO_SWITCH: &[&str] = &["2", "true", "yes", "ON", "auto", "maybe"];

const CASES: &[Case] = &[
    text("inner", "", &["CPU", "CUDA0+CUDA1", "a", "RPC0[h:1]"], &["A,,B", "+", "A+"]),
    case("log", &["error", "notice", "info", "debug"], &["loud", "INFO", "2", "error notice"]),
    case("ctx-share", &["0.5", "0.30", "1e-3"], &["-0", "30%", "0,3x", ".", "-0.1"]),
    case("pin-budget-mb", &["1024"], &["auto", "3/4", "1.5", "all"]),
    case("cache", &["auto", "off", "512"], &["0", "on", "50%", "1.5", "lots", "4G"]),
    case("vram-reserve-mb", &["384"], &["off", "1.5"]),
    case("stream-min-tokens", &["auto", "512"], &["off", "8", "9.5"]),
    case("middle-passes", &["auto", "fetch", "cpu", "place"], &["gpu", "0"]),
    case("slice-tokens", &["auto", "off", "0", "32", "2048"], &["on", "31", "-1", "2k"]),
    case("vram-budget-mb", &["9000"], &["auto", "0", "8G"]),
    case("lend", SWITCH, NO_SWITCH),
    case("threads", &["4"], &["auto", "0", "4.0"]),
    case("experts-from", &["auto", "ram", "file"], &["disk", "RAM"]),
    case("prompt-threads", &["4"], &["auto", "0"]),
    case("moe-expert-cache", &["-1", "0", "12"], &["auto", "off", "-2", "many", "1.5"]),
    case("policy", &["auto", "window", "frequency", "layers"], &["lru", "off"]),
    case("window", &["64"], &["auto"]),
    case("admit", &["2"], &["off"]),
    case("swaps-per-step", &["auto", "-1", "0", "7"], &["-2", "off"]),
    case("wait-swaps", SWITCH, NO_SWITCH),
    case("swap-lead", &["0", "3"], &["auto", "-1"]),
    case("upload-share", &["0.25", "1"], &["0", "0.0", "25%"]),
    case("upload-chunk-kb", &["0", "512"], &["auto"]),
    case("governor", SWITCH, NO_SWITCH),
    case("retest", &["0", "512"], &["off"]),
    text("state-file", "", &["off", "/tmp/a.ini", "a.ini"], &[]),
    case("fixed", SWITCH, NO_SWITCH),
    case("link-gbs", &["12.5"], &["off", "0"]),
    case("pass-tokens", &["host", "4096"], &["auto", "many"]),
    case("equal-passes", SWITCH, NO_SWITCH),
    case("mask-threads", &["auto", "1", "8"], &["0", "1025", "off"]),
    text("socket", "/", &["off", "auto", "/tmp/a.sock"], &["on", "moe.sock"]),
    case("replay", &["qwen3-30b", "uniform"], &["QWEN3", "none"]),
    text("timeline", "/", &["/tmp/a.jsonl"], &["a.jsonl", "off"]),
    case("debug-staging", &["layer", "three-tensors", "two-tensors"], &["four"]),
    case("debug-cuda", &["absent", "old", "no-vmm"], &["none"]),
    text("debug-panic", "a.", &["buffer.set_tensor"], &["x", "a.B", "a.b.c", "none"]),
    case(
        "debug-fail-alloc",
        &["device:1", "host:3", "pin:2", "map:4", "lend:1"],
        &["host:0", "disk:1", "host", "host:-1", ":"],
    ),
    case("debug-graph", &["view", "add-node"], &["none"]),
    case("debug-experts", &["host", "device"], &["ram"]),
    case("debug-memory", &["elastic", "fixed"], &["on"]),
    case("debug-pad", &["32"], &["off"]),
    case("debug-pins", &["16"], &["off"]),
    case("debug-late", &["7"], &["soon"]),
    case("debug-poison", SWITCH, NO_SWITCH),
    case("debug-map-all", SWITCH, NO_SWITCH),
    case("debug-ram-mb", &["100"], &["auto"]),
];

/// The bounds that a range names: `A to B`, and whether A itself is left out.
fn bounds(range: &str) -> Option<(&str, &str, bool)> {
    let words: Vec<&str> = range.split_whitespace().map(|word| word.trim_matches([',', ';', '.', '(', ')'])).collect();
    let at = words.iter().position(|word| *word == "to")?;
    let (low, high) = (*words.get(at.checked_sub(1)?)?, *words.get(at + 1)?);
    let left_out = at > 1 && words[at - 2] == "above";
    (low.parse::<f64>().is_ok() && high.parse::<f64>().is_ok()).then_some((low, high, left_out))
}

/// The next number outside a bound.
fn beyond(bound: &str, step: i64) -> String {
    match bound.parse::<i64>() {
        Ok(number) => (number + step).to_string(),
        Err(_) => (bound.parse::<f64>().unwrap() * (1.0 + step as f64 / 2.0)).to_string(),
    }
}

/// Values that the key must take, and values that it must not.
fn values(key: &Key, case: &Case) -> (Vec<String>, Vec<String>) {
    let mut good: Vec<String> = case.good.iter().map(|value| (*value).to_owned()).collect();
    let mut wrong: Vec<String> = case.wrong.iter().map(|value| (*value).to_owned()).collect();
    wrong.extend(["", "  ", "\u{fffd}"].map(str::to_owned));
    let start = case.text.unwrap_or_default();
    wrong.extend([format!("{start}{}", "x".repeat(5000)), format!("{start}a\u{fffd}b")]);
    if case.text.is_none() {
        let junk = [
            "nonsense",
            "\u{e9}t\u{e9}",
            "\u{663}\u{664}",
            "0x10",
            "--",
            "NaN",
            "inf",
            "1e999",
            "\u{202e}7",
            "\u{1b}[2J",
        ];
        wrong.extend(junk.map(str::to_owned));
        wrong.extend(["9".repeat(400), format!("-{}", "9".repeat(30)), "18446744073709551616".to_owned()]);
        wrong.extend(good.iter().flat_map(|value| [format!("{value}x"), format!("{value} x"), format!("{value}=1")]));
    }
    if let Some((low, high, left_out)) = bounds(key.range) {
        if left_out {
            wrong.push(low.to_owned());
        } else {
            good.push(low.to_owned());
        }
        good.push(high.to_owned());
        wrong.extend([beyond(low, -1), beyond(high, 1)]);
    }
    wrong.retain(|value| !good.contains(value));
    (good, wrong)
}

fn is_bad_value(notice: &Notice) -> bool {
    matches!(notice, Notice::BadValue { .. })
}

#[test]
fn every_key_has_a_case() {
    let keys: Vec<&str> = KEYS.iter().map(|key| key.name).collect();
    let cases: Vec<&str> = CASES.iter().map(|case| case.key).collect();
    assert_eq!(cases, keys, "a new key needs a row, in the table's order");
    for key in KEYS {
        assert!(!key.default.is_empty() && !key.unit.is_empty() && key.range.len() > 2, "{}", key.name);
        let has_bounds = bounds(key.range).is_some();
        let is_number = !["-", "path", "device names", "slot", "kind:n"].contains(&key.unit);
        assert_eq!(has_bounds, is_number, "{}: numbers have bounds: {}", key.name, key.range);
    }
}

#[test]
fn every_key_takes_what_its_text_says() {
    for (key, case) in KEYS.iter().zip(CASES) {
        for value in values(key, case).0 {
            let (config, notices) = parse(&format!("{}={value}", key.name));
            assert!(!notices.iter().any(is_bad_value), "{}={value}: {notices:?}", key.name);
            assert_eq!(config.given, [key.name]);
        }
    }
}

#[test]
fn every_wrong_value_is_told_in_one_line_and_ignored() {
    for (key, case) in KEYS.iter().zip(CASES) {
        let (good, wrong) = values(key, case);
        assert!(wrong.len() >= 5, "{}", key.name);
        for value in wrong {
            let text = format!("{}={value}", key.name);
            let (config, notices) = parse(&text);
            assert_eq!(config, Config::default(), "{text}");
            let [notice] = &notices[..] else { panic!("{text}: {notices:?}") };
            assert!(is_bad_value(notice) && notice.is_fault(), "{text}: {notice:?}");
            let line = notice.to_string();
            for part in [format!("{}={}", key.name, shown(value.trim())), key.range.to_owned(), key.default.to_owned()]
            {
                assert!(line.contains(&part), "{part:?} in {line}");
            }
            assert!(!line.chars().any(super::turns_line) && line.len() < 500 + key.range.len(), "{line}");
            // What was set before holds.
            let before = format!("{}={}", key.name, good[0]);
            assert_eq!(parse(&format!("{before};{text}")).0, parse(&before).0, "{before};{text}");
        }
    }
}

/// As arguments they are the same settings, in each spelling.
#[test]
fn arguments_give_what_the_variable_gives() {
    for (key, case) in KEYS.iter().zip(CASES) {
        let (good, wrong) = values(key, case);
        for value in good.iter().chain(&wrong) {
            let expected = parse(&format!("{}={value}", key.name));
            let pair = format!("{}={value}", key.name);
            let joined = format!("--moe={pair}");
            let mut spellings = vec![vec!["x", "--moe", &pair], vec!["x", &joined]];
            // A word that begins so is the next argument, unless it is a number.
            if !value.starts_with('-') {
                spellings.push(vec!["x", "--moe", key.name, value]);
            }
            for words in spellings {
                let words: Vec<&[u8]> = words.into_iter().map(str::as_bytes).collect();
                let found = arguments::read(&words);
                assert_eq!((found.kept, found.faults), (vec![0], vec![]), "{pair}");
                assert_eq!(parse(&found.settings.join(";")), expected, "{pair}");
            }
        }
    }
}
