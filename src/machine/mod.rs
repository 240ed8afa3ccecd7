//! What this machine has, for the planner and the doctor.
//!
//! Owns: the reading of what the system says of RAM, processors and memory nodes (`system`), of slots (`slots`), the rates that were measured
//! once and are kept (`rates`), the measurement of the RAM's rate (`bandwidth`), what the CUDA driver says (`cuda`), and in
//! front of which devices the plugin stands (`behind`).
//! Invariants: nothing here fails: what the system does not tell is unknown. Looking takes milliseconds; only measuring takes longer, at most
//! a second for the RAM and one for each link, and only when asked to. No device is opened but for measuring and for the doctor.
//! Threads: the caller's, and the ones that measure, which end before the call does.
//! Does not: choose anything (`planner` does), or run a program (the command does).

mod bandwidth;
mod behind;
pub mod cuda;
pub mod rates;
pub mod slots;
pub mod system;

use std::path::Path;

use crate::planner::machine::{Card, LINK_GBS, Machine, Source, slot_gbs};

pub use bandwidth::read_gbs;
pub use behind::{as_settings_say, behind, for_flags};

/// What cores of which nothing was measured read together, 10^9 bytes per second: so much for each, up to two channels of memory.
const CORE_GBS: (f64, f64) = (9.0, 38.0);

/// Devices in what `--list-devices` of a host printed, as cards with the memory that the host sees. Those of ours are left out.
pub fn host_cards(stdout: &str) -> Vec<Card> {
    let listed = crate::bench::output::devices(stdout);
    let ours = |name: &str| name.strip_prefix("MoE").is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_digit()));
    let sizes = |words: &str| -> Option<(String, u64, u64)> {
        let (description, rest) = words.rsplit_once(" (")?;
        let (total, free) = rest.split_once(" MiB, ")?;
        let free = free.strip_suffix(" MiB free)")?;
        Some((description.to_owned(), total.parse().ok()?, free.parse().ok()?))
    };
    listed
        .into_iter()
        .filter(|(name, _)| !ours(name))
        .map(|(name, words)| {
            let (description, total, free) = sizes(&words).unwrap_or((words, 0, 0));
            let remote = name.starts_with("RPC");
            let mib = |mib: u64| mib.saturating_mul(1 << 20);
            Card {
                name,
                description,
                total: mib(total),
                free: mib(free),
                link_gbs: LINK_GBS,
                remote,
                ..Card::default()
            }
        })
        .collect()
}

/// Cards of one kind only: a card that two of ggml's backends can drive is listed twice.
pub fn of_first_kind(cards: Vec<Card>) -> Vec<Card> {
    let kind = |card: &Card| card.name.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned();
    let first = cards.iter().find(|card| !card.remote).map(kind);
    cards.into_iter().filter(|card| card.remote || first.as_ref().is_some_and(|first| *first == kind(card))).collect()
}

/// The machine with these cards. Rates come from what is kept, else from slots and processors. `root` is `/`, or a folder for tests.
pub fn look(root: &Path, mut cards: Vec<Card>, kept: &rates::Rates) -> Machine {
    let slots = slots::read(root);
    let mut free: Vec<&slots::Slot> = slots.iter().collect();
    for card in cards.iter_mut().filter(|card| !card.remote) {
        let backend = card.name.trim_end_matches(|c: char| c.is_ascii_digit());
        // Cards come in the order of their addresses where they are alike.
        let found = free.iter().position(|slot| slot.fits(backend, &card.description));
        if let Some(slot) = found.map(|at| free.remove(at)) {
            card.bus = Some(slot.bus.clone());
            if let Some(link) = slot.link {
                card.link_gbs = slot_gbs(link.0, link.1);
                card.link = Source::Reckoned;
            }
        }
        if let Some(rate) = kept.link(card) {
            (card.link_gbs, card.link) = (rate, Source::Measured);
        }
    }
    let mut machine = system::read(root);
    machine.cards = cards;
    machine.cpu_gbs = (CORE_GBS.0 * machine.cores as f64).min(CORE_GBS.1 * machine.nodes.max(1) as f64);
    if let Some(rate) = kept.cpu(machine.cores) {
        (machine.cpu_gbs, machine.cpu) = (rate, Source::Measured);
    }
    machine
}

/// Measures what is not yet known, or all of it, and keeps it. Returns what could not be measured.
pub fn measure(machine: &mut Machine, kept: &mut rates::Rates, again: bool) -> Vec<String> {
    let mut failed = Vec::new();
    if again || machine.cpu != Source::Measured {
        let threads = usize::try_from(machine.cores).unwrap_or(1);
        match read_gbs(threads, machine.room()) {
            Some(rate) => {
                (machine.cpu_gbs, machine.cpu) = (rate, Source::Measured);
                kept.set_cpu(machine.cores, rate);
            }
            None => failed.push("there is too little free RAM to measure its rate".to_owned()),
        }
    }
    for card in machine.cards.iter_mut().filter(|card| !card.remote && card.name.starts_with("CUDA")) {
        if !again && card.link == Source::Measured {
            continue;
        }
        match card.bus.as_deref().ok_or_else(|| "its place on the bus is not known".to_owned()).and_then(cuda::link_gbs)
        {
            Ok(rate) => {
                (card.link_gbs, card.link) = (rate, Source::Measured);
                kept.set_link(card, rate);
            }
            Err(reason) => failed.push(format!("the link of {} was not measured: {reason}", card.name)),
        }
    }
    failed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_that_a_host_lists() {
        let cards = host_cards(
            "Available devices:\n  CUDA0: NVIDIA GeForce RTX 3060 (12 GB) (11909 MiB, 11200 MiB free)\n  MoE0: MoE over CUDA0 (1 MiB, 1 MiB free)\n  RPC0: 10.0.0.1:50052 (900 MiB, 800 MiB free)\n  CUDA1: odd\n",
        );
        let names: Vec<&str> = cards.iter().map(|card| card.name.as_str()).collect();
        assert_eq!(names, ["CUDA0", "RPC0", "CUDA1"]);
        assert_eq!((cards[0].description.as_str(), cards[0].free >> 20), ("NVIDIA GeForce RTX 3060 (12 GB)", 11200));
        assert!(cards[1].remote && cards[2].total == 0);
        let mut both = cards;
        both.push(Card { name: "Vulkan0".into(), ..Card::default() });
        assert_eq!(of_first_kind(both).len(), 3);
    }

    /// A folder like `/` with a machine of two cards, the second in a narrow slot.
    #[test]
    fn a_machine_is_looked_at() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("proc/meminfo", "MemTotal: 65536000 kB\nMemAvailable: 60000000 kB\n");
        write("proc/self/cgroup", "0::/box\n");
        write("sys/fs/cgroup/box/memory.max", "34359738368\n");
        for (bus, width) in [("0000:01:00.0", 16), ("0000:02:00.0", 4)] {
            write(&format!("sys/bus/pci/devices/{bus}/class"), "0x030000\n");
            write(&format!("sys/bus/pci/devices/{bus}/vendor"), "0x10de\n");
            write(&format!("sys/bus/pci/devices/{bus}/max_link_speed"), "16.0 GT/s PCIe\n");
            write(&format!("sys/bus/pci/devices/{bus}/current_link_speed"), "2.5 GT/s PCIe\n");
            write(&format!("sys/bus/pci/devices/{bus}/max_link_width"), "16\n");
            write(&format!("sys/bus/pci/devices/{bus}/current_link_width"), &format!("{width}\n"));
            write(&format!("proc/driver/nvidia/gpus/{bus}/information"), "Model: \t\t NVIDIA A40\n");
        }
        write("sys/devices/system/node/node0/cpulist", "0-7\n");
        let card = |name: &str| Card { name: name.into(), description: "NVIDIA A40".into(), ..Card::default() };
        let mut kept = rates::Rates::default();
        let machine = look(root, vec![card("CUDA0"), card("CUDA1")], &kept);
        assert_eq!((machine.ram, machine.limit, machine.nodes), (65_536_000 << 10, Some(32 << 30), 1));
        let links: Vec<f64> = machine.cards.iter().map(|card| card.link_gbs.round()).collect();
        assert_eq!(links, [26.0, 7.0], "{:?}", machine.cards);
        assert_eq!(machine.cards[1].bus.as_deref(), Some("0000:02:00.0"));
        kept.set_link(&machine.cards[1], 6.1);
        kept.set_cpu(machine.cores, 44.0);
        let again = look(root, vec![card("CUDA0"), card("CUDA1")], &kept);
        assert_eq!((again.cards[1].link, again.cards[1].link_gbs, again.cpu_gbs), (Source::Measured, 6.1, 44.0));
        assert_eq!(again.cards[0].link, Source::Reckoned);
    }
}
