//! The pace with a clock that the tests move.

use super::*;
use crate::experts::shape::Group;

struct Clock(u64);

impl Clock {
    /// One graph whose call takes `call` and after which `pause` passes.
    fn step(&mut self, pace: &mut Pace, tokens: u32, call: u64, pause: u64) -> Option<Verdict> {
        let verdict = pace.begin(self.0);
        self.0 += call;
        pace.end(self.0, tokens, false);
        self.0 += pause;
        verdict
    }
}

fn pace(keys: &str) -> Pace {
    Pace::new(&crate::config::parse(keys).0.experts)
}

fn is_near(a: f64, b: f64) -> bool {
    (a - b).abs() < 0.01 * b
}

#[test]
fn a_step_lasts_until_the_next_one_if_that_follows_soon() {
    for (pause, expected) in
        [(0, 10_000.0), (1_000, 11_000.0), (5_000, 15_000.0), (5_001, 10_000.0), (9_000_000, 10_000.0)]
    {
        let (mut pace, mut clock) = (pace(""), Clock(7));
        (0..20).for_each(|_| assert_eq!(clock.step(&mut pace, 1, 10_000, pause), None));
        assert!(is_near(pace.step_us, expected), "{pause}: {}", pace.step_us);
    }
}

#[test]
fn outliers_are_left_out_but_a_lasting_change_is_followed() {
    let (mut pace, mut clock) = (pace(""), Clock(0));
    (0..20).for_each(|_| assert_eq!(clock.step(&mut pace, 1, 1_000, 0), None));
    clock.step(&mut pace, 1, 900_000, 0);
    clock.step(&mut pace, 1, 1_000, 0);
    assert!(pace.step_us < 1_200.0, "{}", pace.step_us);
    (0..200).for_each(|_| assert_eq!(clock.step(&mut pace, 1, 10_000, 0), None));
    assert!(is_near(pace.step_us, 10_000.0), "{}", pace.step_us);
}

#[test]
fn rates_are_told_every_few_steps_once_known() {
    let (mut pace, mut clock) = (pace(""), Clock(0));
    pace.set_team(Some(38_000.0));
    let told = |pace: &mut Pace, clock: &mut Clock| {
        let mut told = 0;
        for _ in 0..320 {
            clock.step(pace, 1, 2_000, 0);
            told += u32::from(pace.rates().is_some());
        }
        told
    };
    assert_eq!(told(&mut pace, &mut clock), 0, "the link is not known");
    pace.set_link(Some(13_000.0));
    pace.set_link(None);
    assert_eq!(told(&mut pace, &mut clock), 10);
    assert_eq!(pace.rates_in_words().unwrap(), "experts in RAM are read at 38.0 GB/s, the link moves 13.0 GB/s");
}

/// Runs steps whose time depends on the mode; returns the reasons in order.
fn governed(pace: &mut Pace, clock: &mut Clock, steps: u32, tokens: u32, us: impl Fn(Mode) -> u64) -> Vec<Reason> {
    let mut mode = pace.governor.as_ref().unwrap().now().mode;
    let mut reasons = Vec::new();
    for _ in 0..steps {
        if let Some(verdict) = clock.step(pace, tokens, us(mode), 100) {
            mode = verdict.mode;
            reasons.push(verdict.reason);
        }
        if pace.wants_prediction() {
            pace.set_team(Some(40_000.0));
            // Stock mode reads 100 MB less: 2.5 ms.
            pace.expect_stock(300e6, 200e6);
        }
    }
    reasons
}

#[test]
fn a_slower_cache_is_left_by_prediction_and_tried_again_after_retest_tokens() {
    let (mut pace, mut clock) = (pace("retest=500"), Clock(0));
    let us = |mode| if mode == Mode::Cache { 12_000 } else { 9_000 };
    let reasons = governed(&mut pace, &mut clock, 1_200, 1, us);
    assert_eq!(reasons, [Reason::Slower, Reason::Retest, Reason::Slower]);
    let line = pace.tell(Verdict { mode: Mode::Stock, reason: Reason::Slower });
    assert!(line.contains("12.10 ms with the cache") && line.contains("9.10 ms so"), "{line}");
}

#[test]
fn a_cache_that_is_faster_than_predicted_stock_mode_stays() {
    let (mut pace, mut clock) = (pace(""), Clock(0));
    pace.set_team(Some(40_000.0));
    for _ in 0..2_000 {
        assert_eq!(clock.step(&mut pace, 1, 10_000, 0), None);
        if pace.wants_prediction() {
            pace.expect_stock(100e6, 400e6);
        }
    }
    let (stock, measured) = pace.governor.as_ref().unwrap().time(Mode::Stock).unwrap();
    assert!(is_near(stock, 10_000.0 + 7_500.0) && !measured, "{stock}");
}

#[test]
fn keys_turn_the_governor_off() {
    for keys in ["governor=off", "policy=layers", "fixed=1;cache=8"] {
        let (mut pace, mut clock) = (pace(keys), Clock(0));
        pace.set_team(Some(40_000.0));
        for _ in 0..1_000 {
            assert_eq!(clock.step(&mut pace, 1, 10_000, 0), None, "{keys}");
            assert!(!pace.wants_prediction());
        }
    }
}

#[test]
fn retest_zero_stays_in_stock_mode() {
    let (mut pace, mut clock) = (pace("retest=0"), Clock(0));
    let us = |mode| if mode == Mode::Cache { 12_000 } else { 9_000 };
    assert_eq!(governed(&mut pace, &mut clock, 30_000, 1, us), [Reason::Slower]);
}

#[test]
fn only_steps_of_one_width_are_compared() {
    let (mut pace, mut clock) = (pace(""), Clock(0));
    let mut measured = |pace: &mut Pace, tokens, us, steps| {
        (0..steps).for_each(|_| assert_eq!(clock.step(pace, tokens, us, 0), None));
        pace.governor.as_ref().unwrap().time(Mode::Cache).map(|(us, _)| us)
    };
    assert!(is_near(measured(&mut pace, 1, 10_000, 400).unwrap(), 10_000.0));
    // A few graphs of four tokens change nothing; many are followed.
    assert!(is_near(measured(&mut pace, 4, 16_000, 20).unwrap(), 10_000.0));
    assert!(is_near(measured(&mut pace, 1, 10_000, 100).unwrap(), 10_000.0));
    assert!(is_near(measured(&mut pace, 4, 16_000, 200).unwrap(), 4_000.0));
}

#[test]
fn nothing_is_measured_while_stock_mode_moves_blocks() {
    let (mut pace, mut clock) = (pace(""), Clock(0));
    governed(&mut pace, &mut clock, 300, 1, |_| 12_000);
    assert_eq!(pace.governor.as_ref().unwrap().now().mode, Mode::Stock);
    for _ in 0..1_000 {
        assert_eq!(pace.begin(clock.0), None);
        clock.0 += 50_000;
        pace.end(clock.0, 1, true);
    }
    assert!(!pace.governor.as_ref().unwrap().time(Mode::Stock).unwrap().1);
}

#[test]
fn the_load_of_stock_mode_follows_the_placement() {
    let group = |pool| Group { experts: 4, used: 2, pool };
    let shape = Shape::new(vec![group(0), group(0), group(1)]).unwrap();
    let heat = Heat::from_rates([0.5, 0.5, 0.5, 0.5, 0.8, 0.1, 0.8, 0.3, 0.5, 0.5, 0.5, 0.5], 1000.0);
    let bytes = |slots: &[u32]| stock_bytes(&shape, slots, &[100, 10], &heat);
    for (slots, expected) in [([0, 0], 420.0), ([4, 4], 200.0), ([8, 4], 0.0), ([2, 0], 200.0 + 200.0 * 0.2 + 20.0)] {
        assert!((bytes(&slots) - expected).abs() < 0.1, "{slots:?}: {}", bytes(&slots));
    }
}

#[test]
fn settings_reach_the_policy() {
    let settings = |keys: &str| policy_settings(&crate::config::parse(keys).0.experts);
    assert_eq!(settings(""), Settings::default());
    let set = settings("policy=frequency;window=32;admit=5;swaps-per-step=3;upload-share=0.5");
    assert_eq!(
        set,
        Settings {
            window: 32,
            admit: 5,
            swaps_per_step: Some(3),
            upload_share: 0.5,
            regime: Some(Regime::Frequency),
            ..Settings::default()
        }
    );
    assert_eq!(settings("policy=window").regime, Some(Regime::Recency));
    assert_eq!(settings("policy=layers").regime, None);
}
