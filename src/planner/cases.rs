//! Complaints of users about fitting, as cases on recorded machines. The numbers are those of docs/planner.md.

use super::machine::Machine;
use super::model::Model;
use super::usage::{Draft, Usage};
use super::{LoadMode, MIB, Mode, Plan, arguments, flags, plan, samples};
use crate::config::CacheSize;

/// A desktop with a card of so many MiB.
fn desktop(card_mib: u64) -> Machine {
    Machine::parse(&format!(
        r#"{{"ram_mib": 65536, "available_mib": 60000, "cores": 8, "cpu_gbs": 42, "cpu_source": "measured", "cards": [
            {{"name": "CUDA0", "description": "NVIDIA GeForce RTX 4060", "total_mib": {card_mib}, "free_mib": {}, "link_gbs": 13,
              "link_source": "measured"}}]}}"#,
        card_mib - card_mib / 16
    ))
    .unwrap()
}

fn with_cards(cards: &str) -> Machine {
    Machine::parse(&format!(r#"{{"ram_mib": 65536, "cores": 8, "cpu_gbs": 42, "cards": [{cards}]}}"#)).unwrap()
}

/// What the flags say for a model of 48 layers.
fn usage(words: &str) -> Usage {
    let mut flags = flags::read(&words.split_whitespace().map(str::to_owned).collect::<Vec<_>>(), false, |_| None);
    flags.stand(Some(48));
    flags.usage
}

/// The plan, checked for what holds of every plan: no card gives more than it has, and everything has a reason.
fn planned(model: &Model, machine: &Machine, usage: &Usage) -> Plan {
    let plan = plan(model, machine, usage);
    for card in &plan.cards {
        assert!(card.beside() + card.arena + usage.reserve <= card.free, "{card:?}");
        assert!(card.utilisation() <= 1.0);
    }
    if let Some(stock) = plan.stock.as_ref().filter(|stock| stock.fits) {
        for (number, (card, given)) in machine.cards_and_others().0.iter().zip(&stock.cards).enumerate() {
            let margin = if usage.fit { usage.target(number) } else { 0 };
            assert!(given.bytes + margin <= card.free || given.bytes == 0, "{stock:?}");
        }
    }
    assert!(plan.choices.iter().all(|choice| choice.reason.ends_with('.')), "{:?}", plan.choices);
    plan
}

fn reason(plan: &Plan, what: &str) -> String {
    plan.choices.iter().find(|choice| choice.what == what).map(|choice| choice.reason.clone()).unwrap_or_default()
}

/// T1: with --cpu-moe fitting gave up without a word, and the start ran out of memory.
#[test]
fn experts_by_hand_are_planned_or_refused() {
    let fits = planned(&samples::qwen(), &desktop(8192), &usage("-cmoe -c 8192"));
    assert_eq!((fits.mode, fits.stock.as_ref().map(|stock| stock.fits)), (Mode::Stock, Some(true)));
    assert_eq!(fits.stock.unwrap().cpu_experts.len(), 48);
    let not = planned(&samples::qwen(), &desktop(2048), &usage("-cmoe -c 131072"));
    assert!(not.warnings.iter().any(|warning| warning.contains("fail to start")), "{:?}", not.warnings);
}

/// T2: the memory of a draft model was forgotten.
#[test]
fn a_draft_model_has_its_place() {
    let model = samples::qwen();
    let alone = planned(&model, &desktop(12_288), &usage("-c 8192"));
    let small = samples::grouped(&samples::Grouped { layers: 4, experts: 8, used: 2, ..samples::QWEN });
    let beside = Usage { draft: Some(Draft { model: small }), ..usage("-c 8192") };
    let both = planned(&model, &desktop(12_288), &beside);
    assert!(both.cards[0].draft > 300 * MIB && both.cards[0].arena < alone.cards[0].arena);
    let stock = |plan: &Plan| plan.stock.as_ref().unwrap().cpu_experts.len();
    assert!(stock(&both) > stock(&alone));
}

/// T3, T4: without a context fitting took too much of it, on a card of 8 GB, and layers had to go.
#[test]
fn an_unset_context_leaves_room_for_layers() {
    for card in [8192, 12_288, 16_384] {
        let plan = planned(&samples::qwen(), &desktop(card), &Usage::default());
        assert_eq!(plan.mode, Mode::Cache, "{card}");
        assert!((4096..131_072).contains(&plan.context), "{}", plan.context);
        assert!(reason(&plan, "context").contains("ctx-share"));
        let all: usize = plan.cards.iter().map(|card| card.layers.1 - card.layers.0).sum();
        assert_eq!(all, 48, "no layer leaves the card");
        let free = plan.cards[0].free - plan.cards[0].dense;
        assert!(plan.cards[0].context * 2 < free, "at least half is left: {:?}", plan.cards);
    }
    let large = planned(&samples::qwen(), &desktop(143_000), &Usage::default());
    assert_eq!((large.context, large.mode), (131_072, Mode::Stock));
}

/// T5: devices over a network were counted.
#[test]
fn remote_devices_are_left_out() {
    let here = r#"{"name": "CUDA0", "total_mib": 12288, "free_mib": 11000}"#;
    let away = r#"{"name": "RPC0", "total_mib": 99999, "free_mib": 99999, "remote": true}"#;
    let one = planned(&samples::qwen(), &with_cards(here), &usage("-c 8192"));
    let both = planned(&samples::qwen(), &with_cards(&format!("{here}, {away}")), &usage("-c 8192"));
    assert_eq!(one.cards, both.cards);
    assert!(both.warnings.iter().any(|warning| warning.starts_with("RPC0")));
}

/// T6: a device that reports no memory ended in a crash.
#[test]
fn a_card_without_memory_is_told() {
    let plan = planned(&samples::qwen(), &with_cards(r#"{"name": "CUDA0", "total_mib": 0}"#), &usage("-c 8192"));
    assert_eq!((plan.mode, plan.cards.len()), (Mode::Stock, 0));
    assert!(plan.warnings[0].contains("no free memory"));
    assert!(plan.decode.is_some(), "the processors do it");
}

/// T7: a margin made it slower than it had to be.
#[test]
fn a_margin_is_kept_and_moves_nothing_needlessly() {
    let layers = |target: u64| {
        let usage = usage(&format!("-c 8192 -ub 512 -fitt {target}"));
        let plan = planned(&samples::qwen(), &desktop(12_288), &usage);
        let stock = plan.stock.unwrap();
        // One more layer would break the margin.
        let left = 11_520 * MIB - stock.cards[0].bytes;
        assert!((target * MIB..(target + 324) * MIB).contains(&left), "{target}: {} left", left / MIB);
        (stock.gpu_layers, stock.cpu_experts.len())
    };
    let (few, many) = (layers(256), layers(2048));
    assert_eq!((few.0, many.0), (49, 49));
    assert!(many.1 > few.1);
    let whole = planned(&samples::qwen(), &desktop(32_768), &usage("-c 8192 -fitt 2048"));
    assert!(whole.stock.unwrap().is_whole(&samples::qwen()), "what fits beside the margin stays");
}

/// T8: experts in both memories were three times slower than in one.
#[test]
fn what_is_chosen_is_never_slower_than_stock() {
    for card in [4096, 6144, 8192, 12_288, 16_384, 24_576, 49_152] {
        for model in [samples::qwen(), samples::gpt_oss(), samples::deepseek(), samples::dense()] {
            let plan = planned(&model, &desktop(card), &usage("-c 8192"));
            let (Some(stock), Some(decode), Some(prompt)) = (&plan.stock, &plan.decode, &plan.prompt) else { continue };
            let ours = super::stock::request_seconds(&Usage::default(), prompt, decode);
            let theirs = super::stock::request_seconds(&Usage::default(), &stock.prompt, &stock.decode);
            assert!(ours <= theirs * 1.000_001, "{card} {}", model.shape.architecture);
        }
    }
}

/// T20: a context that was asked for was cut to 4096 without a word.
#[test]
fn a_context_that_was_asked_for_is_kept_or_refused_loudly() {
    let kept = planned(&samples::qwen(), &desktop(12_288), &usage("-c 65536"));
    assert_eq!((kept.context, kept.mode), (65_536, Mode::Cache));
    assert!(kept.fit_off && arguments::ours(&kept).contains("--fit off"), "llama.cpp must not move layers for it");
    let tight = planned(&samples::qwen(), &desktop(8192), &usage("-c 131072"));
    assert_eq!((tight.context, tight.mode), (131_072, Mode::Stock), "layers leave the card, the context stays");
    assert!(tight.stock.as_ref().unwrap().gpu_layers < 49);
    assert!(reason(&tight, "experts").contains("do not fit"));
    let most = super::choose::longest_context(&samples::qwen(), &desktop(8192), &Usage::default());
    assert!((40_000..131_072).contains(&most), "{most}");
    let refused = planned(&samples::dense(), &desktop(2048), &usage("-c 40960 -ub 12288"));
    assert!(refused.warnings.iter().any(|warning| warning.contains("take a shorter one")), "{:?}", refused.warnings);
}

/// T22: people wished that fitting would choose the layers whose experts stay in RAM.
#[test]
fn the_division_of_experts_is_planned() {
    let plan = planned(&samples::qwen(), &desktop(12_288), &usage("-c 8192"));
    let line = arguments::stock(&plan, plan.stock.as_ref().unwrap());
    assert!(line.starts_with("-c 8192 -ngl 49 -ot \"blk\\."), "{line}");
    assert!(line.contains("_exps=CPU\"") || line.contains("(ch|)exps=CPU\""), "{line}");
    let two = with_cards(
        r#"{"name": "CUDA0", "total_mib": 8192, "free_mib": 7000}, {"name": "CUDA1", "total_mib": 8192, "free_mib": 7000}"#,
    );
    let plan = planned(&samples::qwen(), &two, &usage("-c 8192"));
    let line = arguments::stock(&plan, plan.stock.as_ref().unwrap());
    assert!(line.contains(" -ts "), "{line}");
    let ours = arguments::ours(&plan);
    assert!(ours.starts_with("--device MoE0,MoE1 -c 8192 -ngl 999 -ts 24,25"), "{ours}");
    let shares: Vec<f64> = plan.cards.iter().map(|card| card.slots as f64 / card.blocks as f64).collect();
    assert!((shares[0] - shares[1]).abs() < 0.10, "both cards are used alike: {shares:?}");
}

/// T32, T33: with -ngl the size of the cache became 0 without a word.
#[test]
fn layers_by_hand_switch_the_cache_off_and_say_so() {
    let off = planned(&samples::qwen(), &desktop(12_288), &usage("-c 8192 -ngl 99"));
    assert_eq!(off.mode, Mode::Stock);
    assert!(reason(&off, "experts").contains("ask for one with --moe cache=auto"));
    let asked = planned(&samples::qwen(), &desktop(12_288), &usage("-c 8192 -ngl 99 --moe cache=auto"));
    assert!(asked.mode == Mode::Cache && asked.cards[0].arena > 1000 * MIB);
    assert_eq!(planned(&samples::qwen(), &desktop(12_288), &usage("-c 8192 -ot x=CPU")).mode, Mode::Stock);
    // Beside a device of ours that is named, all layers are no placement by hand; fewer are.
    let named =
        |words: &str| planned(&samples::qwen(), &desktop(12_288), &usage(&format!("-c 8192 --device MoE0 {words}")));
    assert_eq!((named("").mode, named("-ngl 99").mode, named("-ngl 49").mode), (Mode::Cache, Mode::Cache, Mode::Cache));
    for words in ["-ngl 48", "-ncmoe 3", "-ngl 99 -ot x=CPU", "-ncffn 1"] {
        assert_eq!(named(words).mode, Mode::Stock, "{words}");
    }
    assert_eq!(named("-ngl 20 --moe cache=auto").mode, Mode::Cache);
    let roomy = planned(&samples::qwen(), &desktop(48_000), &usage("-c 8192 --device MoE0 -ngl 99"));
    assert_eq!(roomy.mode, Mode::Cache, "{:?}", roomy.choices);
    let none = Usage { cache: CacheSize::Off, ..usage("-c 8192") };
    assert!(reason(&planned(&samples::qwen(), &desktop(12_288), &none), "experts").contains("cache=off"));
}

/// T32: of several cards the first one was used only.
#[test]
fn every_card_is_used_beside_layers_by_hand() {
    let two = with_cards(
        r#"{"name": "CUDA0", "total_mib": 8192, "free_mib": 7000}, {"name": "CUDA1", "total_mib": 12288, "free_mib": 11000}"#,
    );
    for words in ["-c 8192 -ngl 99 --moe cache=auto", "-c 8192 -ngl 99 --moe-expert-cache -1"] {
        let plan = planned(&samples::qwen(), &two, &usage(words));
        assert_eq!((plan.mode, plan.cards.len()), (Mode::Cache, 2), "{words}");
        assert!(plan.cards.iter().all(|card| card.arena > 3000 * MIB), "{:?}", plan.cards);
    }
}

/// T13, T22: cards of different sizes are used alike, by the plugin and by stock's arguments.
#[test]
fn cards_of_different_sizes() {
    let three = with_cards(
        r#"{"name": "CUDA0", "total_mib": 12288, "free_mib": 11500}, {"name": "CUDA1", "total_mib": 6144, "free_mib": 5500},
           {"name": "CUDA2", "total_mib": 4096, "free_mib": 3600}"#,
    );
    let model = samples::grouped(&samples::Grouped { layers: 80, ..samples::QWEN });
    let plan = planned(&model, &three, &usage("-c 8192 -ub 512"));
    assert_eq!((plan.mode, plan.cards.len()), (Mode::Cache, 3));
    let shares: Vec<f64> = plan.cards.iter().map(|card| card.slots as f64 / card.blocks as f64).collect();
    let (least, most) = (shares.iter().copied().fold(1.0, f64::min), shares.iter().copied().fold(0.0, f64::max));
    assert!(least > 0.2 && most - least < 0.10, "{shares:?}");
    assert!(plan.cards[0].layers.1 > 2 * (plan.cards[2].layers.1 - plan.cards[2].layers.0));
    let split = |line: &str| -> Vec<u64> {
        let counts = line.split(" -ts ").nth(1).unwrap().split(' ').next().unwrap();
        counts.split(',').map(|count| count.parse().unwrap()).collect()
    };
    assert_eq!(split(&arguments::ours(&plan)).iter().sum::<u64>(), 81, "{}", arguments::ours(&plan));
    let stock = plan.stock.as_ref().unwrap();
    let line = arguments::stock(&plan, stock);
    assert_eq!(split(&line).iter().sum::<u64>(), 81, "{line}");
    assert!(stock.cards.iter().all(|card| card.bytes > 1500 * MIB), "{stock:?}");
}

/// Cards and budgets below two GiB: nothing is planned that does not fit, and a reason is given.
#[test]
fn tiny_budgets_are_planned_or_told() {
    for budget in [1, 64, 300, 700, 1200, 1500, 1999] {
        let budgeted = usage(&format!("--moe vram-budget-mb={budget}"));
        let (plan, card) = (
            planned(&samples::qwen(), &desktop(12_288), &budgeted),
            planned(&samples::qwen(), &desktop(budget.max(16)), &Usage::default()),
        );
        for plan in [&plan, &card] {
            assert!(plan.context >= 4096, "what --fit-ctx asks for at least: {}", plan.context);
            // 1035 MiB of dense weights, 384 and more of a context and the reserve.
            assert!(!plan.helps && plan.mode == Mode::Stock, "{budget}: {:?}", plan.choices);
            assert!(reason(plan, "experts").contains("do not fit beside"), "{}", reason(plan, "experts"));
            let fits = plan.stock.as_ref().is_some_and(|stock| stock.fits);
            assert_eq!(fits, plan.warnings.iter().all(|warning| !warning.contains("not even the buffers")), "{plan:?}");
        }
    }
    // With a shorter context and no more than what it needs, there is a cache.
    let plan =
        planned(&samples::qwen(), &desktop(12_288), &usage("-c 512 --moe vram-budget-mb=1999 --moe vram-reserve-mb=0"));
    assert!(plan.helps && plan.cards[0].arena > 500 * MIB, "{:?}", plan.cards);
    let all: usize = plan.cards.iter().map(|card| card.layers.1 - card.layers.0).sum();
    assert_eq!(all, 48);
}

/// Slots: `-c` is of all together; an unset context is so much for each that has a cache of its own.
#[test]
fn slots_share_the_context() {
    let of = |words: &str| planned(&samples::qwen(), &desktop(12_288), &usage(words));
    let (one, four) = (of("-c 16384"), of("-c 16384 -np 4 -no-kvu"));
    assert_eq!((one.cards[0].context, one.context), (four.cards[0].context, four.context));
    let (open, slots) = (of(""), of("-np 4 -no-kvu -fitc 5000"));
    assert!(slots.context.is_multiple_of(4) && slots.context >= 4 * 5000, "{}", slots.context);
    assert!(open.context < 20_000 * 4, "{}", open.context);
    let states = of("-c 16384 -np 4 -kvu");
    assert_eq!(states.context, 16_384);
}

/// A draft model is divided as its cards' free memory is.
#[test]
fn a_draft_model_over_two_cards() {
    let two = with_cards(
        r#"{"name": "CUDA0", "total_mib": 16384, "free_mib": 12000}, {"name": "CUDA1", "total_mib": 8192, "free_mib": 6000}"#,
    );
    let small = samples::grouped(&samples::Grouped { layers: 4, experts: 8, used: 2, ..samples::QWEN });
    let plan = planned(&samples::qwen(), &two, &Usage { draft: Some(Draft { model: small }), ..usage("-c 8192") });
    let parts: Vec<u64> = plan.cards.iter().map(|card| card.draft).collect();
    assert!(parts[1] > 100 * MIB && parts[0].abs_diff(2 * parts[1]) < 4, "{parts:?}");
}

/// `--fit`, `--fit-target`, `--fit-ctx` and `ctx-share` mean what llama.cpp and the plugin mean by them.
#[test]
fn fitting_means_what_it_says() {
    let of = |words: &str| planned(&samples::qwen(), &desktop(16_384), &usage(words));
    let kept = |plan: &Plan| plan.cards[0].context / MIB;
    // 15,360 MiB are free; 384 stay free, 1,035 are dense weights: 30% of the rest is 4,182, less the margin of 1,024 is 3,158.
    let share = of("-ub 512");
    assert!((3000..3158).contains(&kept(&share)), "{}", kept(&share));
    let less = of("-ub 512 -fitt 2048");
    assert!((2000..2134).contains(&kept(&less)), "{}", kept(&less));
    let more = of("-ub 512 --moe ctx-share=0.6");
    assert!((7000..7341).contains(&kept(&more)), "{}", kept(&more));
    // Of a small share there are two GiB all the same.
    let least = of("-ub 512 --moe ctx-share=0.01");
    assert!((900..1024).contains(&kept(&least)), "{}", kept(&least));
    // The least that fitting may choose holds where there is less, and the context of the user is left alone.
    assert_eq!(of("-ub 512 -fitt 9000").context, 4096);
    assert_eq!(of("-ub 512 -fitt 9000 -fitc 16384").context, 16_384);
    assert_eq!(of("-ub 512 -fitt 9000 -c 8192").context, 8192);
    // Without fitting nothing is shortened, and no margin is kept.
    let off = of("-fit off");
    assert_eq!(off.context, 131_072);
    let (with, without) = (of("-c 8192 -ub 512"), of("-c 8192 -ub 512 -fit off"));
    let left = |plan: &Plan| 15_360 * MIB - plan.stock.as_ref().unwrap().cards[0].bytes;
    assert!(left(&with) >= 1024 * MIB && left(&without) < 512 * MIB, "{} {}", left(&with), left(&without));
    // One margin for each card, the last one for those behind it.
    let two = with_cards(
        r#"{"name": "CUDA0", "total_mib": 8192, "free_mib": 7000}, {"name": "CUDA1", "total_mib": 8192, "free_mib": 7000}"#,
    );
    let stock = planned(&samples::qwen(), &two, &usage("-c 8192 -ub 512 -fitt 256,3000")).stock.unwrap();
    assert!(stock.cards[0].bytes > 6300 * MIB && stock.cards[1].bytes <= 4000 * MIB, "{stock:?}");
}

/// T42: nobody said that all experts have to fit the RAM, or how much that is.
#[test]
fn too_little_ram_is_told_with_sizes() {
    let mut small = desktop(12_288);
    small.available = 10_000 * MIB;
    let refused = planned(&samples::qwen(), &small, &usage("-c 8192 -lm none"));
    assert_eq!(refused.mode, Mode::Refused);
    assert!(
        refused.warnings[0].contains("15620 MiB") && refused.warnings[0].contains("10000 MiB"),
        "{:?}",
        refused.warnings
    );
    let mapped = planned(&samples::qwen(), &small, &usage("-c 8192"));
    assert_eq!((mapped.load, mapped.pin_budget), (LoadMode::Mapped, 0));
    let mut limited = desktop(12_288);
    limited.limit = Some(8192 * MIB);
    let plan = planned(&samples::qwen(), &limited, &usage("-c 8192"));
    assert!(plan.warnings[0].contains("the limit of the control group"), "{:?}", plan.warnings);
    assert_eq!(planned(&samples::qwen(), &desktop(12_288), &usage("-c 8192")).load, LoadMode::Read);
}
