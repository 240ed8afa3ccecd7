//! Rates that were measured once on this machine, kept in `moe-machine.json` beside the state file.
//!
//! Owns: the file's content. A link is known by the card's name and its address, so a card that moves to another slot is measured again; the
//! RAM's rate by the number of cores.
//! Invariants: a file that cannot be read is an empty one; writing replaces it in one step. Threads: any; the last one to write wins, which
//! costs a measurement. Does not: measure.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::experts::statestore;
use crate::planner::Card;

/// The name of the file.
pub const FILE_NAME: &str = "moe-machine.json";
/// Entries that are kept.
const MOST: usize = 256;

/// What was measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rates {
    known: BTreeMap<String, f64>,
}

fn link_name(card: &Card) -> String {
    format!("link {} {}", card.bus.as_deref().unwrap_or(&card.name), card.description)
}

impl Rates {
    /// Reads the file; a missing one, or one that is none, is empty.
    pub fn read(path: &Path) -> Self {
        statestore::text(path).map(|text| Self::parse(&text)).unwrap_or_default()
    }

    fn parse(text: &str) -> Self {
        let Ok(Value::Object(fields)) = serde_json::from_str(text) else { return Self::default() };
        let rate = |(name, value): (String, Value)| {
            let rate = value.as_f64().filter(|rate| rate.is_finite() && (0.001..10_000.0).contains(rate))?;
            Some((name, rate))
        };
        Self { known: fields.into_iter().filter_map(rate).take(MOST).collect() }
    }

    /// Writes the file.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder)?;
        }
        let fields: Map<String, Value> = self.known.iter().map(|(name, rate)| (name.clone(), json!(rate))).collect();
        statestore::replace(path, &format!("{}\n", serde_json::to_string_pretty(&fields).map_err(io::Error::other)?))
    }

    /// The rate of a card's link.
    pub fn link(&self, card: &Card) -> Option<f64> {
        self.known.get(&link_name(card)).copied()
    }

    /// Notes it.
    pub fn set_link(&mut self, card: &Card, rate: f64) {
        self.known.insert(link_name(card), rate);
    }

    /// The rate of the RAM with so many cores.
    pub fn cpu(&self, cores: u64) -> Option<f64> {
        self.known.get(&format!("ram {cores} cores")).copied()
    }

    /// Notes it.
    pub fn set_cpu(&mut self, cores: u64, rate: f64) {
        self.known.insert(format!("ram {cores} cores"), rate);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deeper").join(FILE_NAME);
        assert_eq!(Rates::read(&path), Rates::default());
        let card = |bus: &str| Card {
            name: "CUDA0".into(),
            bus: Some(bus.into()),
            description: "A".into(),
            ..Card::default()
        };
        let mut rates = Rates::default();
        rates.set_link(&card("0000:01:00.0"), 13.2);
        rates.set_cpu(8, 41.0);
        rates.write(&path).unwrap();
        let read = Rates::read(&path);
        assert_eq!((read.link(&card("0000:01:00.0")), read.cpu(8)), (Some(13.2), Some(41.0)));
        assert_eq!((read.link(&card("0000:02:00.0")), read.cpu(4)), (None, None), "another slot is measured again");
        std::fs::write(&path, "no JSON").unwrap();
        assert_eq!(Rates::read(&path), Rates::default());
        std::fs::write(&path, r#"{"ram 8 cores": -4, "ram 4 cores": "x", "ram 2 cores": 9}"#).unwrap();
        assert_eq!((Rates::read(&path).cpu(8), Rates::read(&path).cpu(2)), (None, Some(9.0)));
    }
}
