//! The simulator against the Python model, the rules against plain searches, and what the plugin's policy must reach.
//!
//! The full run of the targets is made with the command (docs/policy.md); here fewer layers and tokens do.

use std::collections::BTreeMap;

use super::routing::PRESETS;
use super::*;
use crate::experts::policy::{Regime, Settings};
use proptest::prelude::*;

const QWEN: &[u8] = include_bytes!("../../tests/fixtures/routing/qwen3-30b.npy");
const NEXT: &[u8] = include_bytes!("../../tests/fixtures/routing/qwen3.8-next.npy");

fn preset(name: &str) -> &'static Preset {
    PRESETS.iter().find(|preset| preset.name == name).unwrap()
}

fn sorted(ids: &[u16]) -> Vec<u16> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    ids
}

#[test]
fn traces_are_those_of_the_python_model() {
    for (file, name, seed) in [(QWEN, "qwen3-30b", 3), (NEXT, "qwen3.8-next", 7)] {
        let preset = preset(name);
        let theirs = Trace::read(file, Some(preset.experts.into())).unwrap();
        let ours = trace(preset, theirs.tokens(), 6, seed, None);
        assert_eq!((ours.layers(), ours.used()), (theirs.layers(), theirs.used()));
        for (token, layer) in (0..ours.tokens()).flat_map(|token| (0..6).map(move |layer| (token, layer))) {
            assert_eq!(
                sorted(ours.at(token, layer)),
                sorted(theirs.at(token, layer)),
                "{name}, token {token}, layer {layer}"
            );
        }
    }
}

#[test]
fn lru_hits_are_those_of_its_check() {
    // What `gen.py check` prints: 400 tokens, 6 layers, seed 3, shares of 10 to 50%.
    let check = [
        ("qwen3-30b", [0.546, 0.761, 0.871, 0.929, 0.959]),
        ("gemma4-26b", [0.506, 0.716, 0.831, 0.904, 0.943]),
        ("gpt-oss", [0.623, 0.808, 0.874, 0.908, 0.930]),
        ("qwen3.8-next", [0.598, 0.780, 0.866, 0.914, 0.942]),
        ("frequency", [0.426, 0.574, 0.677, 0.752, 0.814]),
        ("uniform", [0.103, 0.206, 0.300, 0.398, 0.497]),
    ];
    assert_eq!(check.map(|(name, _)| name).to_vec(), PRESETS.iter().map(|preset| preset.name).collect::<Vec<_>>());
    for (name, expected) in check {
        let trace = trace(preset(name), 400, 6, 3, None);
        for (share, expected) in [0.1, 0.2, 0.3, 0.4, 0.5].into_iter().zip(expected) {
            let hits = lru(&trace, share).hit_percent();
            assert!((hits - 100.0 * expected).abs() < 0.2, "{name} at {share}: {hits} and {expected}");
        }
    }
}

fn replay(rule: Rule, trace: &Trace, share: f64, settings: &Settings) -> Series {
    rule.replay(trace, slots_per_layer(trace, share), settings).unwrap()
}

fn lru(trace: &Trace, share: f64) -> Outcome {
    replay(Rule::Lru, trace, share, &Settings::default()).second_half()
}

const SHARES: [f64; 4] = [0.1, 0.2, 0.3, 0.4];
const SEEDS: [u64; 2] = [101, 102];

/// LRU and the policy, summed over seeds.
fn compared(name: &str, share: f64, traces: &[Trace]) -> (Outcome, Outcome) {
    let mut sums = (Outcome::default(), Outcome::default());
    for trace in traces {
        sums.0.add(lru(trace, share));
        sums.1.add(replay(Rule::Window, trace, share, &Settings::default()).second_half());
    }
    println!(
        "{name} {share}: lru {:.1}% {:.1}, window {:.1}% {:.1}",
        sums.0.hit_percent(),
        sums.0.uploads_per_token(),
        sums.1.hit_percent(),
        sums.1.uploads_per_token()
    );
    sums
}

fn traces(name: &str) -> Vec<Trace> {
    SEEDS.iter().map(|&seed| trace(preset(name), 768, 7, seed, None)).collect()
}

#[test]
fn under_recency_the_policy_finds_what_lru_finds_with_few_uploads() {
    for name in ["qwen3-30b", "gemma4-26b", "qwen3.8-next"] {
        let traces = traces(name);
        for (share, most) in SHARES.into_iter().zip([0.15, 0.25, 0.40, 0.55]) {
            let (lru, window) = compared(name, share, &traces);
            assert!(window.hit_percent() >= lru.hit_percent() - 1.5, "{name} at {share}");
            assert!(window.uploads as f64 <= most * lru.uploads as f64, "{name} at {share}");
        }
    }
}

#[test]
fn with_fast_changes_the_policy_loses_little() {
    let traces = traces("gpt-oss");
    for share in SHARES {
        let (lru, window) = compared("gpt-oss", share, &traces);
        assert!(window.hit_percent() >= lru.hit_percent() - 5.0, "at {share}");
        assert!(window.uploads < lru.uploads, "at {share}");
    }
}

#[test]
fn where_use_is_stationary_a_list_by_heat_is_kept() {
    let traces = [trace(preset("frequency"), 2560, 3, 5, None)];
    let recency = Settings { regime: Some(Regime::Recency), ..Settings::default() };
    for share in [0.1, 0.3] {
        let (lru, window) = compared("frequency", share, &traces);
        let recency = replay(Rule::Window, &traces[0], share, &recency).second_half();
        let best = replay(Rule::Static, &traces[0], share, &Settings::default()).second_half();
        assert!(window.hit_percent() > recency.hit_percent() + 1.0, "{:.1}", recency.hit_percent());
        assert!(window.hit_percent() > lru.hit_percent() + 5.0);
        assert!(window.hit_percent() > best.hit_percent() - 2.0, "{:.1}", best.hit_percent());
        assert!(window.uploads_per_token() < 0.1 * recency.uploads_per_token());
    }
}

#[test]
fn after_a_redraw_hits_are_back_within_256_tokens() {
    for name in ["qwen3-30b", "gemma4-26b", "qwen3.8-next"] {
        for redraw in [Redraw::Ranks, Redraw::All] {
            let trace = trace(preset(name), 512 + 512, 5, 7, Some((512, redraw)));
            for share in [0.1, 0.3] {
                // Few uploads per step, as a slow link allows: about one per layer.
                let settings = Settings { swaps_per_step: Some(5), ..Settings::default() };
                let series = replay(Rule::Window, &trace, share, &settings);
                let (before, after) = (series.sum(256..512).hit_percent(), series.sum(768..1024).hit_percent());
                println!(
                    "{name} {redraw:?} {share}: {before:.1}, at once {:.1}, {after:.1}",
                    series.sum(512..528).hit_percent()
                );
                assert!(after > before - 3.0, "{name} {redraw:?} at {share}: {before} and {after}");
            }
        }
    }
}

#[test]
fn a_list_by_heat_is_left_when_the_subject_changes() {
    let trace = trace(preset("frequency"), 1536 + 640, 3, 9, Some((1536, Redraw::Ranks)));
    let series = replay(Rule::Window, &trace, 0.2, &Settings::default());
    let lru = replay(Rule::Lru, &trace, 0.2, &Settings::default());
    let (before, after) = (series.sum(1280..1536).hit_percent(), series.sum(1792..2176).hit_percent());
    assert!(before > lru.sum(1280..1536).hit_percent() + 5.0);
    assert!(after > lru.sum(1792..2176).hit_percent(), "{after}");
    assert!(after > before - 6.0, "{before} and {after}");
}

/// Fewer layers than a model has, a prompt that leaves half of the cache, and the uploads that PCIe x16 allows for so many layers.
#[test]
fn after_a_prompt_decoding_is_soon_what_it_was_without() {
    for (name, redraw) in [("qwen3-30b", Some(Redraw::All)), ("gpt-oss", Some(Redraw::Ranks)), ("gemma4-26b", None)] {
        let (before, tokens) = (256, 1024);
        let trace = trace(preset(name), before + tokens + 512, 6, 11, redraw.map(|what| (before, what)));
        let prompt = Prompt { before, tokens, left: 0.5, uploads_per_token: 4.0 };
        for share in [0.2, 0.45] {
            let slots = slots_per_layer(&trace, share);
            let series = |told| prompt.replay(&trace, slots, &Settings::default(), told).unwrap();
            let all = [Told::Decoded, Told::Nothing, Told::Tail].map(series);
            let hits = |from: usize, to: usize| {
                all.each_ref().map(|series| {
                    let start = before + tokens;
                    series.sum(start + from..start + to).hit_percent()
                })
            };
            let (first, late) = (hits(0, 32), hits(256, 512));
            println!("{name} {redraw:?} {share}: {first:.1?} {late:.1?}");
            assert!(first[2] > first[1], "{name} at {share}: {first:?}");
            assert!(late[2] > late[0] - 1.0, "{name} at {share}: {late:?}");
        }
    }
}

#[test]
fn below_the_floor_hits_are_those_of_whole_layers() {
    let trace = trace(preset("qwen3-30b"), 64, 8, 1, None);
    let settings = Settings::default();
    for slots in [2, 7] {
        let window = Rule::Window.replay(&trace, slots, &settings).unwrap().second_half();
        let layers = Rule::Layers.replay(&trace, slots, &settings).unwrap().second_half();
        assert!(window.hits >= layers.hits, "at {slots}");
        assert_eq!(window.uploads, 0);
    }
}

#[test]
fn names_lead_to_rules_and_back() {
    for (name, rule) in Rule::ALL {
        assert_eq!((Rule::named(name), rule.name()), (Some(rule), name));
    }
    assert_eq!(Rule::named("fifo"), None);
}

#[test]
fn files_that_are_no_traces_are_refused() {
    let error = |bytes: &[u8]| Trace::read(bytes, Some(128)).unwrap_err().to_string();
    let text = |from: &str, to: &str| {
        let at = QWEN.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        let mut bytes = QWEN.to_vec();
        bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
        error(&bytes)
    };
    assert!(error(b"").contains("no such beginning"));
    assert!(error(&QWEN[..40]).contains("cut off"));
    assert!(text("<i2", "<f2").contains("another type"));
    assert!(text("False", "True ").contains("Fortran"));
    assert!(text("(64, 6, 8)", "(64, 6, 9)").contains("64 x 6 x 9 and needs 6912 bytes"));
    assert!(text("(64, 6, 8)", "(64, 48,) ").contains("three dimensions"));
    assert!(text("(64, 6, 8)", "(64, 0, 8)").contains("64 x 0 x 8"));
    assert!(Trace::read(QWEN, Some(64)).unwrap_err().to_string().contains("is none of 64 experts"));
    let mut twice = QWEN.to_vec();
    let end = twice.len();
    twice.copy_within(end - 4..end - 2, end - 2);
    assert!(error(&twice).starts_with("token 63, layer 5: expert"), "{}", error(&twice));
}

#[test]
fn a_trace_is_written_as_it_is_read() {
    let trace = Trace::read(QWEN, Some(128)).unwrap();
    assert_eq!(Trace::read(&trace.write(), Some(128)).unwrap(), trace);
    assert_eq!(trace.write(), QWEN);
}

#[test]
fn a_report_has_a_table_json_and_a_picture() {
    let trace = trace(preset("uniform"), 40, 2, 1, None);
    let cell = |rule: Rule| {
        let outcome = replay(rule, &trace, 0.2, &Settings::default()).second_half();
        Cell { rule, outcome, parts: vec![outcome] }
    };
    let rows = vec![Row { share: 0.2, slots: 26, cells: vec![cell(Rule::Lru), cell(Rule::Window)] }];
    let report = Report { title: "a \"b\"".into(), size: [40, 2, 128, 8], parts: vec!["0-64".into()], rows };
    let table = report.table();
    assert!(table.contains(" 20%           26") && table.contains("%)") && table.contains("0-64"), "{table}");
    let json: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
    assert_eq!(json["trace"], "a \"b\"");
    assert_eq!(json["results"][1]["policy"], "window");
    assert!(json["results"][0]["hit_percent"].as_f64().unwrap() > 0.0);
    assert_eq!(report.svg().matches("<polyline").count(), 4);
}

/// The most hits that any choice of contents gives, by trying all.
fn best(trace: &Trace, slots: usize) -> u64 {
    let mut states = BTreeMap::from([(0_u32, 0_u64)]);
    for token in 0..trace.tokens() {
        let used: u32 = trace.at(token, 0).iter().map(|&expert| 1 << expert).sum();
        let mut next = BTreeMap::new();
        for (held, hits) in states {
            let hits = hits + u64::from((held & used).count_ones());
            let choice = held | used;
            for kept in (0..=choice).filter(|kept| kept & !choice == 0 && kept.count_ones() as usize <= slots) {
                let most = next.entry(kept).or_insert(hits);
                *most = hits.max(*most);
            }
        }
        states = next;
    }
    states.into_values().max().unwrap_or(0)
}

proptest! {
    #[test]
    fn belady_is_the_best(ids in proptest::collection::vec(0_u16..5, 2..16), slots in 1_usize..4) {
        let trace = Trace::from_parts(ids, 1, 1, 5);
        let series = Rule::Belady.replay(&trace, slots, &Settings::default()).unwrap();
        prop_assert_eq!(series.sum(0..99).hits, best(&trace, slots));
    }

    #[test]
    fn nobody_beats_belady(seed in 0_u64..50, slots in 8_usize..60) {
        let trace = trace(preset("gemma4-26b"), 40, 1, seed, None);
        let most = Rule::Belady.replay(&trace, slots, &Settings::default()).unwrap().sum(0..40).hits;
        for rule in [Rule::Lru, Rule::Lfu, Rule::Window] {
            let hits = rule.replay(&trace, slots, &Settings::default()).unwrap().sum(0..40).hits;
            prop_assert!(hits <= most, "{}", rule.name());
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused(mut bytes in proptest::collection::vec(any::<u8>(), 0..40), at in 0_usize..200) {
        let _ = Trace::read(&bytes, None);
        let mut file = QWEN.to_vec();
        let end = (at + bytes.len()).min(file.len());
        bytes.truncate(end - at);
        file[at..end].copy_from_slice(&bytes);
        let _ = Trace::read(&file, None);
    }
}
