//! The format: what is read, refused, kept and merged; property tests over any text.

use super::*;
use proptest::prelude::*;

const TEXT: &str = "\
# a comment
format = 1
colour = green

[model 8f3a]
stamp = 1790000000
tokens = 400
heat.blk.0.ffn_gate_exps.weight = 812 0 33 1250
place.3 = 17

[window]
left = 3
";

#[test]
fn a_file_is_read_and_written_with_what_is_unknown() {
    let state = State::parse(TEXT).unwrap();
    let model = &state.models["8f3a"];
    assert_eq!((model.stamp, model.tokens), (1_790_000_000, 400));
    assert_eq!(model.heat["blk.0.ffn_gate_exps.weight"], [812, 0, 33, 1250]);
    assert_eq!(model.other, [("place.3".to_owned(), "17".to_owned())]);
    let text = state.format();
    assert!(text.contains("colour = green") && text.contains("[window]\nleft = 3"), "{text}");
    assert_eq!(State::parse(&text).unwrap(), state);
}

#[test]
fn errors_name_the_line() {
    let error = |text: &str| State::parse(text).unwrap_err().to_string();
    assert_eq!(error("format = 1\n\n[model x"), "line 3: a heading without \"]\"");
    assert_eq!(error("nonsense"), "line 1: no \"key = value\" and no \"[heading]\"");
    assert_eq!(error("\n= 3"), "line 2: a value without a key");
    assert_eq!(error("[model]"), "line 1: a model without identity");
    assert_eq!(error("[]"), "line 1: an empty heading");
    assert_eq!(error("[model a]\ntokens = -1"), "line 2: tokens is no number");
    assert_eq!(error("[model a]\nheat.g = 1 x"), "line 2: x is no rate from 0 to 10000000");
    assert_eq!(error("[model a]\nheat.g = 1\nheat.g = 2"), "line 3: heat.g stands twice");
    assert_eq!(error("[model a]\n[model a]"), "line 2: model a stands twice");
    assert_eq!(error("format = 2"), "line 1: format 2 is newer than this release, which knows 1");
    assert_eq!(error("format = x"), "line 1: format is not a number from 1");
    assert!(error(&"#".repeat(MOST_BYTES + 1)).contains("bytes are more than"));
    let crowd: String = (0..=MOST_MODELS).map(|number| format!("[model {number}]\n")).collect();
    assert_eq!(error(&crowd), "line 65: more than 64 models");
}

#[test]
fn the_oldest_models_go_first() {
    let mut state = State::default();
    for number in 0..70 {
        state.models.insert(format!("m{number}"), ModelState { stamp: number, ..ModelState::default() });
    }
    let kept = State::parse(&state.format()).unwrap().models;
    assert_eq!(kept.len(), MOST_MODELS);
    assert!(!kept.contains_key("m5") && kept.contains_key("m6"));
    let large =
        |stamp| ModelState { stamp, heat: [("g".to_owned(), vec![LARGEST; 60_000])].into(), ..Default::default() };
    let state = State { models: (0..40).map(|n| (format!("m{n}"), large(n))).collect(), ..State::default() };
    let text = state.format();
    assert!(text.len() <= MOST_BYTES);
    let kept = State::parse(&text).unwrap().models;
    assert!(kept.contains_key("m39") && !kept.contains_key("m0"), "{}", kept.len());
}

#[test]
fn names_that_would_break_a_line_are_not_written() {
    let model =
        ModelState { heat: [("a\nb".to_owned(), vec![1]), ("c=d".to_owned(), vec![1])].into(), ..Default::default() };
    let state = State {
        models: [("x]\n[model y".to_owned(), model.clone()), ("ok".to_owned(), model)].into(),
        ..State::default()
    };
    let read = State::parse(&state.format()).unwrap();
    assert_eq!(read.models.keys().collect::<Vec<_>>(), ["ok"]);
    assert!(read.models["ok"].heat.is_empty());
}

#[test]
fn merging_weighs_by_tokens() {
    let state = |tokens, rates: &[u32]| ModelState {
        tokens,
        heat: [("g".to_owned(), rates.to_vec())].into(),
        ..Default::default()
    };
    let mut sum = state(100, &[0, 400]);
    sum.merge(&state(300, &[400, 0]));
    assert_eq!((sum.tokens, &sum.heat["g"][..]), (400, &[300, 100][..]));
    sum.merge(&state(500, &[7]));
    assert_eq!(sum.heat["g"], [7], "another number of experts: the better known one stays");
    let mut empty = ModelState::default();
    empty.merge(&sum);
    assert_eq!(empty, sum);
}

#[test]
fn what_is_new_stays_visible() {
    assert!((MOST_WEIGHT as f64 - Heat::most_tokens()).abs() < 1.0);
    let state = |tokens, rates: &[u32]| ModelState {
        tokens,
        heat: [("g".to_owned(), rates.to_vec())].into(),
        ..Default::default()
    };
    let mut old = state(50_000_000, &[10_000, 0]);
    for _ in 0..30 {
        old.merge(&state(4_096, &[0, 10_000]));
    }
    assert!(old.heat["g"][1] > 9_000, "{:?}", old.heat["g"]);
}

#[test]
fn heat_survives_the_file() {
    use crate::experts::shape::Group;
    let group = |experts| Group { experts, used: 1, pool: 0 };
    let shape = Shape::new(vec![group(3), group(2)]).unwrap();
    let names = ["a".to_owned(), "b".to_owned()];
    let heat = Heat::from_rates([0.5, 0.25, 0.0, 0.125, 1.0], 800.0);
    let model = ModelState::from_heat(&heat, &shape, &names, 7);
    assert_eq!((model.tokens, model.stamp, &model.heat["b"][..]), (800, 7, &[1250, 10_000][..]));
    let back = model.to_heat(&shape, &names);
    for block in (0..2).map(GroupId).flat_map(|group| shape.blocks_of(group).collect::<Vec<_>>()) {
        assert!((back.rate(block) - heat.rate(block)).abs() < 1e-4);
    }
    let other = Shape::new(vec![group(3), group(4)]).unwrap();
    assert_eq!(model.to_heat(&other, &names).hottest().len(), 2, "a group of another size begins cold");
}

#[test]
fn rates_survive_writing() {
    for original in [0.0, 0.0001, 0.37, 1.0, 8.0] {
        assert!((rate(written(original)) - original).abs() < 0.000_06);
    }
    assert_eq!((written(f32::NAN), written(-1.0), written(f32::INFINITY)), (0, 0, LARGEST));
}

fn models() -> impl Strategy<Value = BTreeMap<String, ModelState>> {
    let heat = proptest::collection::btree_map("[a-z0-9._]{1,12}", proptest::collection::vec(0..=LARGEST, 0..20), 0..4);
    let other = proptest::collection::vec(("[a-z]{9,12}", "[ -~]{0,10}"), 0..3);
    let model = (any::<u64>(), any::<u64>(), heat, other).prop_map(|(stamp, tokens, heat, other)| {
        let other = other.into_iter().map(|(key, value)| (key, value.trim().to_owned())).collect();
        ModelState { stamp, tokens, heat, other }
    });
    proptest::collection::btree_map("[a-f0-9]{1,16}", model, 0..5)
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in "(\\[(model )?[a-z]*\\]?|heat\\.[a-z]* ?= ?[0-9 x]*|tokens ?=[0-9a]*|format = [0-9]|\\PC{0,12}|\n){0,30}") {
        if let Ok(state) = State::parse(&text) {
            let once = state.format();
            let again = State::parse(&once).unwrap();
            prop_assert_eq!(again.format(), once);
        }
    }

    #[test]
    fn what_is_written_is_read(models in models()) {
        let state = State { models, ..State::default() };
        prop_assert_eq!(State::parse(&state.format()).unwrap(), state);
    }

    #[test]
    fn merging_twice_is_merging_the_sum(a in models(), b in models()) {
        let (a, b) = (State { models: a, ..State::default() }, State { models: b, ..State::default() });
        let (mut left, mut right) = (a.clone(), b.clone());
        left.merge(&b);
        right.merge(&a);
        prop_assert_eq!(left.models.keys().collect::<Vec<_>>(), right.models.keys().collect::<Vec<_>>());
        for (identity, model) in &left.models {
            prop_assert_eq!(model.tokens, right.models[identity].tokens);
            prop_assert_eq!(model.stamp, right.models[identity].stamp);
        }
    }
}
