//! The cost model: what must hold for any figures, and what it says of machines that were measured.

use proptest::prelude::*;

use super::*;

const MOST: u32 = 2048;

fn layers() -> impl Strategy<Value = Layer> {
    (1_u32..600, 1_u32..40, 1_u64..1 << 27, 0.0..=1.0).prop_map(|(experts, used, expert_bytes, resident)| Layer {
        experts,
        used,
        expert_bytes,
        resident,
    })
}

fn rates() -> impl Strategy<Value = Rates> {
    let rate =
        || prop::option::of(prop_oneof![1.0_f32..1e6, Just(f32::NAN), Just(f32::INFINITY), Just(0.0), Just(-1.0)]);
    (rate(), rate(), 0_usize..300).prop_map(|(cpu, link, threads)| Rates { cpu, link, threads })
}

proptest! {
    #[test]
    fn costs_are_times(layer in layers(), rates in rates(), tokens in 0_u32..100_000) {
        let Costs { in_ram_us, fetch_us, stream_us } = layer.costs(tokens, &rates);
        for us in [in_ram_us, fetch_us, stream_us] {
            prop_assert!(us.is_finite() && us > 0.0, "{us}");
        }
    }

    #[test]
    fn distinct_experts_are_bounded_and_grow(layer in layers(), tokens in 1_u32..MOST) {
        let (now, next) = (layer.distinct(tokens), layer.distinct(tokens + 1));
        let used = f64::from(layer.used.min(layer.experts));
        prop_assert!(now >= used - 1e-6 && now <= f64::from(layer.experts) + 1e-6);
        prop_assert!(now <= used * f64::from(tokens) + 1e-6, "no more than are named");
        prop_assert!(next >= now - 1e-9);
    }

    #[test]
    fn more_tokens_cost_no_less(layer in layers(), rates in rates(), tokens in 1_u32..MOST) {
        let (now, next) = (layer.costs(tokens, &rates), layer.costs(tokens + 1, &rates));
        prop_assert!(next.fetch_us >= now.fetch_us * (1.0 - 1e-9));
        prop_assert!(next.in_ram_us >= now.in_ram_us * (1.0 - 1e-9));
        prop_assert!((next.stream_us - now.stream_us).abs() < 1e-9);
    }

    #[test]
    fn the_threshold_divides(layer in layers(), rates in rates(), least in 9_u32..64) {
        let threshold = layer.threshold(least, &rates);
        prop_assert!(threshold >= least);
        let streams = |tokens| layer.way(tokens, &rates, false, true) == Way::Stream;
        prop_assert!(threshold == least || !streams(threshold - 1));
        prop_assert!(threshold >= MOST_TOKENS || streams(threshold) && streams(threshold + 7));
    }

    #[test]
    fn a_way_that_may_not_be_taken_is_not(layer in layers(), rates in rates(), tokens in 9_u32..MOST) {
        prop_assert_eq!(layer.way(tokens, &rates, false, false), Way::Fetch);
        prop_assert!(layer.way(tokens, &rates, false, true) != Way::InRam);
        prop_assert!(layer.way(tokens, &rates, true, false) != Way::Stream);
    }

    /// A faster processor never turns a pass away from it, nor a slower link.
    #[test]
    fn rates_pull_their_way(layer in layers(), cpu in 100.0_f32..1e5, link in 100.0_f32..1e5, tokens in 9_u32..MOST) {
        let way = |cpu, link| layer.way(tokens, &Rates { cpu: Some(cpu), link: Some(link), threads: 1 }, true, true);
        if way(cpu, link) == Way::InRam {
            prop_assert_eq!(way(cpu * 2.0, link), Way::InRam);
            prop_assert_eq!(way(cpu, link / 2.0), Way::InRam);
        }
    }
}

/// A layer of the 30B-A3B shape, Q4_K.
fn layer(resident: f64) -> Layer {
    Layer { experts: 128, used: 8, expert_bytes: 2_654_208, resident }
}

fn machine(cpu_gbs: f32, link_gbs: f32) -> Rates {
    Rates { cpu: Some(cpu_gbs * 1e3), link: Some(link_gbs * 1e3), threads: 16 }
}

/// Figures of docs/measurements.md: 53 GB/s, 16 threads that read 75; 64 tokens took 5.5 ms a layer when streamed at 20%.
#[test]
fn a_fast_link() {
    let rates = machine(75.0, 53.0);
    let costs = layer(0.2).costs(64, &rates);
    assert!((5_000.0..6_000.0).contains(&costs.stream_us), "{costs:?}");
    assert_eq!(layer(0.2).way(32, &rates, true, true), Way::Fetch);
    assert_eq!(layer(0.2).way(512, &rates, true, true), Way::Stream);
    let threshold = layer(0.2).threshold(9, &rates);
    assert!((48..160).contains(&threshold), "{threshold}");
    assert_eq!(layer(0.7).way(9, &rates, true, true), Way::InRam, "few uses miss a large cache");
}

#[test]
fn a_slow_link() {
    for link in [6.0, 13.0] {
        let rates = machine(75.0, link);
        for tokens in [9, 16, 31] {
            assert_eq!(layer(0.2).way(tokens, &rates, true, true), Way::InRam, "{link} GB/s, {tokens} tokens");
        }
        assert_eq!(layer(0.2).way(512, &rates, true, true), Way::Stream, "{link} GB/s");
    }
}

#[test]
fn a_slow_processor() {
    let rates = machine(8.0, 25.0);
    assert!([9, 16, 31].iter().all(|&tokens| layer(0.2).way(tokens, &rates, true, true) == Way::Fetch));
}

#[test]
fn everything_resident_needs_no_link() {
    for link in [6.0, 53.0] {
        assert_eq!(
            layer(1.0).way(16, &machine(75.0, link), true, true),
            Way::InRam,
            "nothing is copied, nothing missed"
        );
        assert!(layer(1.0).costs(16, &machine(75.0, link)).in_ram_us < 200.0);
    }
}

#[test]
fn what_is_not_measured_is_said() {
    assert_eq!(machine(75.0, 53.0).words(), "the link moves 53.0 GB/s, experts in RAM are read at 75.0 GB/s");
    let prior = Rates { threads: 4, ..Rates::default() };
    assert_eq!(
        prior.words(),
        "the link moves 20.0 GB/s (not measured), experts in RAM are read at 20.0 GB/s (not measured)"
    );
}
