//! Slots of cards: how fast and how wide their links are.
//!
//! Owns: the reading of /sys/bus/pci and of the names that NVIDIA's driver gives. A card that idles tells a lower speed than it has, so the speed
//! is the most that card and slot can do; the width is the one in use.
//! Invariants: any content is accepted. Threads: any; nothing is kept. Does not: ask a card.

use std::path::Path;

use super::system::text;

/// A slot with a card.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Slot {
    /// Its address on the bus.
    pub bus: String,
    /// The card's maker: 0x10de is NVIDIA, 0x1002 AMD, 0x8086 Intel.
    pub vendor: u32,
    /// The card's name, if its driver tells it.
    pub name: Option<String>,
    /// 10^9 transfers per second and lane, and lanes in use.
    pub link: Option<(f64, u64)>,
    /// Lanes that the card has.
    pub most_lanes: Option<u64>,
    /// The memory node that it belongs to.
    pub node: Option<u32>,
}

impl Slot {
    /// Whether a device of this backend and name can be the one in this slot.
    pub fn fits(&self, backend: &str, description: &str) -> bool {
        let vendor = match backend {
            "CUDA" => self.vendor == 0x10de,
            "ROCm" | "HIP" => self.vendor == 0x1002,
            _ => true,
        };
        let named = |name: &str| description.contains(name) || name.contains(description);
        vendor && self.name.as_deref().is_none_or(named)
    }
}

/// All slots with graphics cards, by address.
pub fn read(root: &Path) -> Vec<Slot> {
    let folder = root.join("sys/bus/pci/devices");
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut slots: Vec<Slot> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).filter_map(|bus| slot(root, bus)).collect();
    slots.sort_by(|one, other| one.bus.cmp(&other.bus));
    slots
}

fn slot(root: &Path, bus: String) -> Option<Slot> {
    let field =
        |name: &str| text(root, &format!("/sys/bus/pci/devices/{bus}/{name}")).map(|text| text.trim().to_owned());
    let hex = |name: &str| u32::from_str_radix(field(name)?.trim_start_matches("0x"), 16).ok();
    // Display controllers, and the 3D controllers of servers; class, subclass and interface.
    if hex("class").is_none_or(|class| class >> 16 != 0x03) {
        return None;
    }
    let speed = |name: &str| field(name)?.split_whitespace().next()?.parse::<f64>().ok().filter(|speed| *speed > 0.0);
    let lanes = |name: &str| field(name)?.parse::<u64>().ok().filter(|lanes| (1..=32).contains(lanes));
    // What is above the card is the slot.
    let above = root.join("sys/bus/pci/devices").join(&bus).canonicalize().ok().and_then(|path| {
        let text = std::fs::read_to_string(path.parent()?.join("max_link_speed")).ok()?;
        text.split_whitespace().next()?.parse::<f64>().ok()
    });
    let fastest = match (speed("max_link_speed"), above) {
        (Some(card), Some(slot)) if slot > 0.0 => Some(card.min(slot)),
        (card, _) => card.or_else(|| speed("current_link_speed")),
    };
    let width = lanes("current_link_width");
    let information = text(root, &format!("/proc/driver/nvidia/gpus/{bus}/information"));
    let name = information
        .as_deref()
        .and_then(|text| text.lines().find_map(|line| line.strip_prefix("Model:")).map(|name| name.trim().to_owned()));
    Some(Slot {
        vendor: hex("vendor").unwrap_or(0),
        name,
        link: fastest.zip(width),
        most_lanes: lanes("max_link_width"),
        node: field("numa_node").and_then(|node| node.parse().ok()),
        bus,
    })
}
