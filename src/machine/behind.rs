//! In front of which of a machine's devices the plugin stands, for plans outside of a host.
//!
//! Owns: the way from the devices that a host lists to the plugin's own choice (`registry`), and keys that change what a machine looks like.
//! Threads: none. Does not: ask a device, or choose by itself.

use super::of_first_kind;
use crate::abi::inner::DeviceKind;
use crate::config::Config;
use crate::device::Mode;
use crate::planner::flags::Flags;
use crate::planner::machine::{Card, HOST, LINK_GBS, Machine, Source};
use crate::registry::{Candidate, choose};

/// The machine with the cards that the plugin stands in front of; where it would pass everything through there are none, with the reason.
pub fn behind(mut machine: Machine, config: &Config) -> Machine {
    as_settings_say(&mut machine, config);
    if config.inner.is_empty() {
        machine.cards = of_first_kind(machine.cards);
    }
    // The host has its processors as a device, and does not list them.
    let ram =
        Card { name: HOST.to_owned(), total: machine.ram, free: machine.ram, link_gbs: LINK_GBS, ..Card::default() };
    let mut devices = machine.cards.clone();
    devices.push(ram);
    let candidates: Vec<Candidate> =
        devices.iter().filter(|card| !card.remote || config.inner.is_empty()).map(candidate).collect();
    let choices = choose(&candidates, &config.inner);
    let refused = choices.iter().find_map(|choice| match &choice.mode {
        Mode::PassThrough(reason) | Mode::Lend(reason) => Some(reason.clone()),
        Mode::Proxy => None,
    });
    // Those that cannot be planned with are kept, so that a plan can say so.
    let others: Vec<Card> = machine.cards.iter().filter(|card| card.remote || card.free == 0).cloned().collect();
    machine.cards = match &refused {
        Some(_) => Vec::new(),
        None => {
            let found = choices.iter().filter_map(|choice| candidates.get(choice.candidate));
            found.filter_map(|found| devices.iter().find(|card| card.name == found.name).cloned()).collect()
        }
    };
    machine.no_cards = refused;
    let missing = others.into_iter().filter(|other| !machine.cards.contains(other)).collect::<Vec<_>>();
    machine.cards.extend(missing);
    machine
}

/// The same for a program's flags: of devices that are named, those.
pub fn for_flags(machine: Machine, flags: &Flags) -> Machine {
    let mut machine = behind(machine, &flags.config());
    if flags.explicit.ours.is_some() && !flags.off {
        // Devices of ours stand in front of the cards in order.
        machine.cards.truncate(flags.devices.len());
    } else if !flags.devices.is_empty() {
        machine.cards.retain(|card| flags.devices.contains(&card.name));
    }
    machine
}

/// Keys that change what the machine looks like.
pub fn as_settings_say(machine: &mut Machine, config: &Config) {
    if let Some(rate) = config.experts.link_gbs {
        for card in &mut machine.cards {
            (card.link_gbs, card.link) = (f64::from(rate), Source::Measured);
        }
    }
    if let Some(mib) = config.debug_ram_mb {
        machine.available = mib.saturating_mul(1 << 20);
    }
}

fn candidate(card: &Card) -> Candidate {
    let provider = card.name.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned();
    let kind = if card.is_host() { DeviceKind::Cpu } else { DeviceKind::Gpu };
    Candidate { name: card.name.clone(), kind, provider }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse;

    fn cards(names: &[&str], settings: &str) -> (Vec<String>, Option<String>) {
        let card = |name: &&str| Card {
            name: (*name).to_owned(),
            total: 9 << 30,
            free: 8 << 30,
            remote: name.starts_with("RPC"),
            ..Card::default()
        };
        let machine = Machine { ram: 5 << 30, cards: names.iter().map(card).collect(), ..Machine::default() };
        let machine = behind(machine, &parse(settings).0);
        (machine.cards.into_iter().map(|card| card.name).collect(), machine.no_cards)
    }

    #[test]
    fn the_plugins_own_choice() {
        let all = ["CUDA0", "CUDA1", "Vulkan0"];
        assert_eq!(cards(&all, ""), (vec!["CUDA0".into(), "CUDA1".into()], None));
        assert_eq!(cards(&all, "inner=cuda1"), (vec!["CUDA1".into()], None));
        assert_eq!(cards(&all, "inner=CUDA1+CPU,CUDA1").0, ["CUDA1", "CPU", "CUDA1"]);
        assert_eq!(cards(&all, "inner=Vulkan0").0, ["Vulkan0"]);
        let (none, reason) = cards(&all, "inner=CUDA7");
        assert!(
            none.is_empty()
                && reason
                    .unwrap()
                    .contains("inner=CUDA7 names no device of this host; it has CUDA0, CUDA1, Vulkan0, CPU")
        );
        let (none, reason) = cards(&[], "");
        assert!(none.is_empty() && reason.unwrap().starts_with("no local GPU was found"));
        let (none, reason) = cards(&["SYCL0"], "");
        assert!(none.is_empty() && reason.unwrap().contains("belongs to SYCL"));
        assert_eq!(cards(&["RPC0", "CUDA0"], "").0, ["CUDA0", "RPC0"], "the plan tells of it");
        assert!(cards(&["RPC0"], "inner=RPC0").1.is_some(), "it comes after the plugin");
        assert_eq!(cards(&all, "inner=CPU"), (vec!["CPU".into()], None));
    }
}
