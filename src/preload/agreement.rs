//! A plan for a command line says what the preloaded library decides for it: on or off, passes, mapped or not.

use super::decision::{Decision, Room, Wishes};
use crate::explicit::Call;
use crate::machine::for_flags;
use crate::planner::flags::of_program;
use crate::planner::{Machine, Model, advise, json, plan, samples};
use serde_json::Value;

/// A desktop with cards of so many MiB free, as a host lists them.
fn desktop(cards: &[(&str, u64)]) -> Machine {
    let card = |(name, free): &(&str, u64)| {
        format!(
            r#"{{"name": "{name}", "description": "NVIDIA GeForce RTX 4060", "total_mib": {}, "free_mib": {free}, "link_gbs": 13, "remote": {}}}"#,
            free + 500,
            name.starts_with("RPC")
        )
    };
    let cards: Vec<String> = cards.iter().map(card).collect();
    Machine::parse(&format!(
        r#"{{"ram_mib": 65536, "available_mib": 60000, "cores": 8, "cpu_gbs": 42, "cards": [{}]}}"#,
        cards.join(",")
    ))
    .unwrap()
}

/// What `ggml-moe plan --json` says: of the plugin, of passes longer than the host's, and whether the file is mapped.
fn planned(model: &Model, machine: &Machine, line: &str) -> (bool, u64, bool, Value) {
    let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    let flags = of_program(&words, |_| None);
    let machine = for_flags(machine.clone(), &flags);
    let value = json::value(model, &plan(model, &machine, &flags.usage));
    let on = value["plugin"].as_bool().unwrap();
    (on, value["batch"].as_u64().unwrap(), value["load"] == "mmap", value)
}

/// What the library does with the same words, where its devices are those that `inner` chooses.
fn preloaded(model: &Model, machine: &Machine, line: &str) -> Decision {
    let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    let flags = of_program(&words, |_| None);
    let config = flags.config();
    let wishes = Wishes::of(&words[0], &flags, &config);
    if let Some(decision) = Decision::of_settings("m", &model.shape, &wishes, Call::default()) {
        return decision;
    }
    let machine = for_flags(machine.clone(), &flags);
    let (cards, _) = machine.cards_and_others();
    let room = match &machine.no_cards {
        Some(reason) => Room::None(reason.clone()),
        None if cards.is_empty() => Room::None("no device".to_owned()),
        None => Room::Free("MoE0".to_owned(), cards.iter().map(|card| card.free).sum()),
    };
    let advice = advise(model, &machine, &flags.usage).filter(|_| !cards.is_empty());
    Decision::of_room(("m", &model.shape), &wishes, Call::default(), &room, advice.as_ref())
}

#[test]
fn plans_say_what_the_library_decides() {
    let small = desktop(&[("CUDA0", 11_500)]);
    let two = desktop(&[("CUDA0", 7000), ("CUDA1", 11_000), ("RPC0", 90_000)]);
    let tiny = desktop(&[("CUDA0", 1700)]);
    let large = desktop(&[("CUDA0", 40_000)]);
    let none = desktop(&[]);
    let vulkan = desktop(&[("Vulkan0", 11_500)]);
    let qwen = samples::qwen();
    // The machine, the line, and whether the plugin is used.
    for (machine, line, on) in [
        (&small, "llama-server", true),
        (&small, "llama-server -c 8192 -ub 1024", true),
        (&small, "llama-server -c 8192 -b 1024", true),
        (&small, "llama-cli -c 8192 --moe pass-tokens=4096", true),
        (&small, "llama-cli -c 8192 -fit off", true),
        (&small, "llama-cli -c 8192 -fitt 4096 -ctk q8_0", true),
        (&small, "llama-bench -p 512", true),
        (&small, "llama-bench -p 512 -ub 64,128", true),
        (&small, "llama-perplexity -c 4096", true),
        (&small, "llama-server -c 8192 -np 4 -no-kvu", true),
        (&small, "llama-cli -ngl 99", false),
        (&small, "llama-cli -ngl auto", true),
        (&small, "llama-cli -ngl 99 --moe cache=auto", true),
        (&small, "llama-cli -cmoe --moe-expert-cache 20", true),
        (&small, "llama-cli -ncmoe 9", false),
        (&small, "llama-cli -ot x=CPU", false),
        (&small, "llama-cli -sm row", false),
        (&small, "llama-cli --rpc a:1", false),
        (&small, "llama-cli --device CUDA0", false),
        (&small, "llama-cli --moe off", false),
        (&small, "llama-cli --moe cache=off", false),
        (&small, "llama-cli --moe cache=2000 --moe vram-reserve-mb=1000", true),
        (&small, "llama-cli --moe vram-reserve-mb=9900", false),
        (&small, "llama-cli -c 8192 --moe vram-budget-mb=2000", false),
        (&small, "llama-cli -c 8192 --moe vram-budget-mb=6000", true),
        (&small, "llama-cli --moe lend=off --moe ctx-share=0.6", true),
        (&small, "llama-cli --moe policy=layers", true),
        (&small, "llama-cli --moe stream-min-tokens=100000", true),
        (&small, "llama-cli --moe link-gbs=3", true),
        (&small, "llama-cli --moe debug-ram-mb=9000", true),
        (&small, "llama-cli --moe debug-ram-mb=9000 --moe experts-from=file", true),
        (&small, "llama-cli --moe threads=2", true),
        (&small, "llama-cli -c 131072", false),
        (&small, "llama-cli --moe inner=CUDA1", false),
        (&small, "llama-cli --moe inner=CPU", false),
        (&small, "llama-cli -c 8192 --moe inner=CPU --moe vram-budget-mb=9000", true),
        (&small, "llama-cli -c 8192 --moe inner=cpu --moe vram-budget-mb=13", true),
        (&two, "llama-server -c 8192", true),
        (&two, "llama-server -c 8192 --moe inner=CUDA1", true),
        (&two, "llama-server -c 8192 --moe inner=CUDA1+CUDA0", true),
        (&two, "llama-server -c 8192 --moe inner=RPC0", false),
        (&tiny, "llama-cli", false),
        (&tiny, "llama-cli -c 4096 --moe cache=auto", false),
        (&large, "llama-cli -c 8192", false),
        (&large, "llama-cli -c 8192 --moe cache=500", false),
        (&large, "llama-cli -c 8192 --moe vram-budget-mb=9000", true),
        (&none, "llama-cli", false),
        (&none, "llama-cli --moe inner=CPU --moe vram-budget-mb=9000", true),
        (&vulkan, "llama-cli", false),
        (&vulkan, "llama-cli -c 8192 --moe vram-budget-mb=11000", true),
    ] {
        let (helps, batch, mapped, value) = planned(&qwen, machine, line);
        let decision = preloaded(&qwen, machine, line);
        let told = format!("{line}: {}; the plan: {value:#}", decision.line);
        assert_eq!(helps, decision.helps, "{told}");
        assert_eq!(helps, on, "{told}");
        assert_eq!(decision.line.starts_with("on for "), on, "{told}");
        if on {
            assert!(decision.pass_tokens.is_none_or(|tokens| u64::from(tokens) == batch), "{told}");
            let set = line.contains("-ub") || line.contains("-b ") || line.contains("bench");
            assert_eq!(decision.pass_tokens.is_some(), !set && (batch > 512 || line.contains("pass-tokens")), "{told}");
            assert_eq!(decision.maps, mapped, "{told}");
        }
    }
    // A device of ours that is named is used, whatever else is said; the library has nothing to decide then.
    for line in
        ["llama-cli --device MoE0", "llama-cli --device MoE0 -ngl 99 -c 8192", "llama-cli -dev MoE0 --moe cache=6"]
    {
        let decision = preloaded(&qwen, &large, line);
        assert!(planned(&qwen, &large, line).0 && !decision.helps && decision.line.starts_with("on for "), "{line}");
    }
    for model in [samples::dense(), samples::gpt_oss(), samples::deepseek()] {
        for machine in [&small, &two, &tiny, &large] {
            let on = planned(&model, machine, "llama-server -c 8192").0;
            assert_eq!(on, preloaded(&model, machine, "llama-server -c 8192").helps, "{}", model.shape.architecture);
        }
    }
}
