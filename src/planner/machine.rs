//! What a machine has: RAM, processors, cards and the links to them.
//!
//! Owns: [`Machine`] and its form as JSON, in which machines are recorded (`ggml-moe plan --write-machine`, `--machine`).
//! Invariants: any text is a machine or an error; sizes and rates are finite and not negative. What is not known is `None`.
//! Threads: none. Does not: look at the machine it runs on (`crate::machine` does).

use serde_json::{Map, Value, json};

use super::{MIB, Usage, whole};
use crate::config::CacheSize;

/// Where a rate comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// Measured on this machine.
    Measured,
    /// Reckoned from what the system says of the slot or the processor.
    Reckoned,
    /// Nothing is known; a common value.
    #[default]
    Assumed,
}

impl Source {
    const ALL: [(Self, &'static str); 3] =
        [(Self::Measured, "measured"), (Self::Reckoned, "reckoned"), (Self::Assumed, "assumed")];

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(known, _)| *known == self).map_or("assumed", |(_, name)| name)
    }
}

/// One card.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Card {
    /// The host's name of the device, for example `CUDA0`.
    pub name: String,
    /// What it is.
    pub description: String,
    /// Its address on the bus, if known.
    pub bus: Option<String>,
    /// Bytes of memory.
    pub total: u64,
    /// Bytes that are free.
    pub free: u64,
    /// 10^9 bytes per second to the device.
    pub link_gbs: f64,
    /// Where that comes from.
    pub link: Source,
    /// Reached over a network: not planned with.
    pub remote: bool,
}

/// A machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Machine {
    /// Bytes of RAM.
    pub ram: u64,
    /// Bytes that programs can still get.
    pub available: u64,
    /// The least limit of the control groups, in bytes.
    pub limit: Option<u64>,
    /// Physical cores that this process may use.
    pub cores: u64,
    /// Nodes of memory.
    pub nodes: u64,
    /// 10^9 bytes per second that the cores read of RAM together.
    pub cpu_gbs: f64,
    /// Where that comes from.
    pub cpu: Source,
    /// 10^9 bytes per second of the disk with the model, if known.
    pub disk_gbs: Option<f64>,
    /// Its cards.
    pub cards: Vec<Card>,
    /// Why the plugin stands in front of none of them, if so; not recorded.
    pub no_cards: Option<String>,
}

/// The processors as a device of ggml's.
pub const HOST: &str = "CPU";

impl Card {
    /// Whether this is no card, but the processors in the place of one (`inner=CPU`).
    pub fn is_host(&self) -> bool {
        self.name == HOST
    }

    /// Whether there may be a cache on it: of its own accord over CUDA only, elsewhere with a size or a budget.
    pub fn may_cache(&self, usage: &Usage) -> bool {
        match usage.cache {
            CacheSize::Off => false,
            CacheSize::Mib(_) | CacheSize::SlotsPerLayer(_) => true,
            CacheSize::Auto => self.name.starts_with("CUDA") || usage.budget.is_some(),
        }
    }
}

impl Machine {
    /// Bytes of RAM that this process can still take.
    pub fn room(&self) -> u64 {
        self.available.min(self.limit.unwrap_or(u64::MAX))
    }

    /// Bytes of RAM that there are for this process in all.
    pub fn usable(&self) -> u64 {
        self.ram.min(self.limit.unwrap_or(u64::MAX))
    }

    /// Cards that can be planned with; and why the others cannot.
    pub fn cards_and_others(&self) -> (Vec<&Card>, Vec<String>) {
        let (mut cards, mut others) = (Vec::new(), Vec::new());
        for card in &self.cards {
            if card.remote {
                others.push(format!("{} is reached over a network and is not planned with", card.name));
            } else if card.total == 0 || card.free == 0 {
                others.push(format!("{} reports no free memory and is not planned with", card.name));
            } else {
                cards.push(card);
            }
        }
        (cards, others)
    }

    /// A machine out of its recorded form; the error names what is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let fields = Fields::of(&value, "the machine")?;
        let cards = match value.get("cards") {
            None => Vec::new(),
            Some(Value::Array(cards)) => cards.iter().map(card).collect::<Result<_, _>>()?,
            Some(_) => return Err("\"cards\" is no list".to_owned()),
        };
        let ram = fields.mib("ram_mib")?.ok_or("\"ram_mib\" is missing")?;
        Ok(Self {
            ram,
            available: fields.mib("available_mib")?.unwrap_or(ram),
            limit: fields.mib("limit_mib")?,
            cores: fields.number("cores")?.map_or(1, whole).max(1),
            nodes: fields.number("nodes")?.map_or(1, whole).max(1),
            cpu_gbs: fields.number("cpu_gbs")?.unwrap_or(20.0),
            cpu: fields.source("cpu_source")?,
            disk_gbs: fields.number("disk_gbs")?,
            cards,
            no_cards: None,
        })
    }

    /// Its recorded form.
    pub fn value(&self) -> Value {
        let cards: Vec<Value> = self
            .cards
            .iter()
            .map(|card| {
                json!({
                    "name": card.name, "description": card.description, "bus": card.bus, "total_mib": card.total / MIB,
                    "free_mib": card.free / MIB, "link_gbs": card.link_gbs, "link_source": card.link.name(), "remote": card.remote,
                })
            })
            .collect();
        json!({
            "ram_mib": self.ram / MIB, "available_mib": self.available / MIB, "limit_mib": self.limit.map(|bytes| bytes / MIB),
            "cores": self.cores, "nodes": self.nodes, "cpu_gbs": self.cpu_gbs, "cpu_source": self.cpu.name(),
            "disk_gbs": self.disk_gbs, "cards": cards,
        })
    }
}

fn card(value: &Value) -> Result<Card, String> {
    let fields = Fields::of(value, "a card")?;
    let text = |name: &str| value.get(name).and_then(Value::as_str).map(str::to_owned);
    let total = fields.mib("total_mib")?.unwrap_or(0);
    Ok(Card {
        name: text("name").ok_or("a card has no \"name\"")?,
        description: text("description").unwrap_or_default(),
        bus: text("bus"),
        total,
        free: fields.mib("free_mib")?.unwrap_or(total),
        link_gbs: fields.number("link_gbs")?.unwrap_or(LINK_GBS),
        link: fields.source("link_source")?,
        remote: value.get("remote").and_then(Value::as_bool).unwrap_or(false),
    })
}

/// What a link is taken for of which nothing is known: PCIe 3 x16.
pub const LINK_GBS: f64 = 12.5;

/// The part of a link's rate that copies of pinned memory reach: 53 of 63 GB/s were measured on PCIe 5 x16, 13.2 of 15.8 on PCIe 3 x16.
const LINK_PART: f64 = 0.84;

/// What a slot of this speed (10^9 transfers per second and lane) and width should move, in 10^9 bytes per second.
pub fn slot_gbs(transfers: f64, lanes: u64) -> f64 {
    // Up to 5 GT/s a byte takes ten bits, then 8 of 130/128.
    let coded = if transfers <= 5.0 { 0.1 } else { 128.0 / 130.0 / 8.0 };
    transfers * coded * lanes as f64 * LINK_PART
}

/// Fields of an object of JSON.
struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    fn of(value: &'a Value, what: &str) -> Result<Self, String> {
        value.as_object().map(Self).ok_or_else(|| format!("{what} is no object"))
    }

    fn number(&self, name: &str) -> Result<Option<f64>, String> {
        match self.0.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_f64().filter(|number| number.is_finite() && *number >= 0.0) {
                Some(number) => Ok(Some(number)),
                None => Err(format!("\"{name}\" is no number from 0 on")),
            },
        }
    }

    fn mib(&self, name: &str) -> Result<Option<u64>, String> {
        Ok(self.number(name)?.map(|mib| whole(mib * MIB as f64)))
    }

    fn source(&self, name: &str) -> Result<Source, String> {
        match self.0.get(name).and_then(Value::as_str) {
            None => Ok(Source::Assumed),
            Some(told) => Source::ALL
                .iter()
                .find(|(_, known)| *known == told)
                .map(|(source, _)| *source)
                .ok_or_else(|| format!("\"{name}\" is not measured, reckoned or assumed")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_machine_is_written_and_read() {
        let machine = Machine {
            ram: 64 * 1024 * MIB,
            available: 50 * 1024 * MIB,
            limit: Some(32 * 1024 * MIB),
            cores: 8,
            nodes: 2,
            cpu_gbs: 41.5,
            cpu: Source::Measured,
            disk_gbs: None,
            no_cards: None,
            cards: vec![Card {
                name: "CUDA0".into(),
                total: 8192 * MIB,
                free: 7000 * MIB,
                link_gbs: 6.1,
                link: Source::Reckoned,
                ..Card::default()
            }],
        };
        assert_eq!(Machine::parse(&machine.value().to_string()).unwrap(), machine);
        assert_eq!(machine.room(), 32 * 1024 * MIB);
    }

    #[test]
    fn what_is_no_machine_is_told() {
        for (text, words) in [
            ("", "EOF"),
            ("[]", "no object"),
            ("{}", "ram_mib"),
            (r#"{"ram_mib": -1}"#, "from 0 on"),
            (r#"{"ram_mib": 1, "cards": 3}"#, "no list"),
            (r#"{"ram_mib": 1, "cards": [{}]}"#, "no \"name\""),
            (r#"{"ram_mib": 1, "cpu_source": "guessed"}"#, "cpu_source"),
        ] {
            assert!(Machine::parse(text).unwrap_err().contains(words), "{text}");
        }
    }

    #[test]
    fn slots() {
        assert!((slot_gbs(32.0, 16) - 52.9).abs() < 0.5);
        assert!((slot_gbs(8.0, 16) - 13.2).abs() < 0.2);
        assert!((slot_gbs(16.0, 4) - 6.6).abs() < 0.2);
        assert!((slot_gbs(2.5, 1) - 0.21).abs() < 0.01);
    }

    proptest! {
        #[test]
        fn any_text_is_accepted_or_refused(text in "\\PC{0,80}") {
            let _ = Machine::parse(&text);
        }
    }
}
