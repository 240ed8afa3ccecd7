//! Prompts of several sizes: ours with each of its micro-batches against what stock can do.
//!
//! Owns: [`PromptTable`] as table, JSON, picture and one line: for each size the best of our micro-batches beside stock's best at the same
//! device memory, its defaults, all experts in RAM, and everything on the device.
//! Invariants: where our runs are void there is no ratio in any form.
//! Threads: none. Does not: run anything.

use serde_json::{Value, json};

use super::report::columns;
use super::stats::{Spread, spread};
use crate::chart::{Bar, BarChart, BarPanel, Group};

/// Whose figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// With the plugin.
    Ours,
    /// Stock at the same device memory, whatever its micro-batch is.
    Equal,
    /// Stock with the experts of that memory, and its own defaults otherwise.
    Default,
    /// Stock with all experts in RAM and its defaults.
    Ram,
    /// Stock with everything on the device.
    Device,
}

/// All of them, in the order of the table.
pub const ALL: [Who; 5] = [Who::Ours, Who::Equal, Who::Default, Who::Ram, Who::Device];

impl Who {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Equal => "stock's best, same memory",
            Self::Default => "stock, default passes",
            Self::Ram => "stock, experts in RAM",
            Self::Device => "stock, all on the device",
        }
    }

    fn key(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Equal => "equal",
            Self::Default => "default",
            Self::Ram => "ram",
            Self::Device => "device",
        }
    }
}

/// One process's figures for one micro-batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Whose.
    pub who: Who,
    /// The micro-batch.
    pub ubatch: u64,
    /// What stands in the command line for it.
    pub arguments: String,
    /// MiB of the device by the host's account.
    pub device_mib: Option<f64>,
    /// Samples that count, by size of the prompt.
    pub rates: Vec<(u64, Vec<f64>)>,
}

/// All figures of one share.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptTable {
    /// Share of the experts that the cache is made for.
    pub share: f64,
    /// The cache in MiB.
    pub cache_mib: u64,
    /// What everything of ours may take, in MiB.
    pub budget_mib: Option<u64>,
    /// The keys of our side.
    pub keys: String,
    /// Sizes of the prompts.
    pub prompts: Vec<u64>,
    /// The figures.
    pub entries: Vec<Entry>,
    /// What did not run, and why.
    pub missing: Vec<String>,
    /// Why our figures say nothing.
    pub void: Option<String>,
}

impl PromptTable {
    /// The fastest micro-batch of a side for a prompt.
    pub fn best(&self, who: Who, prompt: u64) -> Option<(Spread, &Entry)> {
        let of = |entry: &&Entry| entry.who == who;
        let figure = |entry: &'_ Entry| entry.rates.iter().find(|row| row.0 == prompt).and_then(|row| spread(&row.1));
        let all = self.entries.iter().filter(of).filter_map(|entry| Some((figure(entry)?, entry)));
        all.max_by(|a, b| a.0.median.total_cmp(&b.0.median))
    }

    /// Ours by another side's.
    pub fn ratio(&self, who: Who, prompt: u64) -> Option<f64> {
        let ours = self.best(Who::Ours, prompt).filter(|_| self.void.is_none())?.0.median;
        Some(ours / self.best(who, prompt)?.0.median)
    }

    /// The table.
    pub fn table(&self) -> String {
        let head = ["share", "prompt", "side", "-ub", "flags", "t/s", "lowest..highest", "ours is", "device MiB"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        for prompt in &self.prompts {
            for who in ALL {
                let Some((figure, entry)) = self.best(who, *prompt) else { continue };
                let ratio = match self.ratio(who, *prompt) {
                    _ if who == Who::Ours => String::new(),
                    Some(ratio) => format!("{ratio:.2}x"),
                    None => "void".to_owned(),
                };
                rows.push(vec![
                    format!("{:.0}%", 100.0 * self.share),
                    prompt.to_string(),
                    who.name().to_owned(),
                    entry.ubatch.to_string(),
                    if entry.arguments.is_empty() { "-".to_owned() } else { entry.arguments.clone() },
                    format!("{:.1}", figure.median),
                    format!("{:.1}..{:.1}", figure.low, figure.high),
                    ratio,
                    entry.device_mib.map_or("?".to_owned(), |mib| format!("{mib:.0}")),
                ]);
            }
        }
        let mut out = columns(&rows);
        if let Some(mib) = self.budget_mib {
            out.push_str(&format!("same memory: {mib} MiB with {} MiB of experts\n", self.cache_mib));
        }
        for why in &self.missing {
            out.push_str(&format!("did not run: {why}\n"));
        }
        if let Some(why) = &self.void {
            out.push_str(&format!("VOID: {why}\n"));
        }
        out
    }

    /// One line.
    pub fn verdict(&self) -> String {
        if let Some(why) = &self.void {
            return format!("bench: void: {why}\n");
        }
        let cell = |prompt: &u64| {
            let ratio = |who: Who| self.ratio(who, *prompt).map_or("?".to_owned(), |ratio| format!("{ratio:.2}x"));
            format!("pp{prompt} {} of stock's best, {} of its default", ratio(Who::Equal), ratio(Who::Default))
        };
        let cells: Vec<String> = self.prompts.iter().map(cell).collect();
        format!("bench: {:.0}%: {}\n", 100.0 * self.share, cells.join("; "))
    }

    /// For a report.
    pub fn json(&self) -> Value {
        let entries = self.entries.iter().map(|entry| {
            json!({
                "side": entry.who.key(), "ubatch": entry.ubatch, "arguments": entry.arguments, "device_mib": entry.device_mib,
                "samples": entry.rates.iter().map(|(prompt, rates)| json!({ "prompt": prompt, "rates": rates })).collect::<Vec<_>>(),
            })
        });
        let best = self.prompts.iter().map(|prompt| {
            let sides = ALL.into_iter().filter_map(|who| {
                let (figure, entry) = self.best(who, *prompt)?;
                let row = json!({
                    "rate": figure.median, "ubatch": entry.ubatch, "arguments": entry.arguments, "ratio": self.ratio(who, *prompt),
                });
                Some((who.key().to_owned(), row))
            });
            json!({ "prompt": prompt, "best": sides.collect::<serde_json::Map<_, _>>() })
        });
        json!({
            "share": self.share, "cache_mib": self.cache_mib, "budget_mib": self.budget_mib, "keys": self.keys,
            "prompts": best.collect::<Vec<_>>(), "entries": entries.collect::<Vec<_>>(), "missing": self.missing, "void": self.void,
        })
    }

    /// Bars for each size.
    pub fn svg(&self, title: &str) -> String {
        let known: Vec<Who> =
            ALL.into_iter().filter(|who| self.entries.iter().any(|entry| entry.who == *who)).collect();
        let groups = self.prompts.iter().map(|prompt| Group {
            name: format!("pp{prompt}"),
            note: self.ratio(Who::Equal, *prompt).map_or(String::new(), |ratio| format!("{ratio:.2}x")),
            bars: known
                .iter()
                .map(|who| {
                    let figure = self.best(*who, *prompt).filter(|_| *who != Who::Ours || self.void.is_none())?.0;
                    Some(Bar { value: figure.median, range: (figure.low, figure.high) })
                })
                .collect(),
        });
        let panel = BarPanel { title: "prompts, tokens per second".to_owned(), groups: groups.collect() };
        let names = known.iter().map(|who| who.name().to_owned()).collect();
        BarChart { title: format!("{title}: {:.0}% of the experts", 100.0 * self.share), names, panels: vec![panel] }
            .svg()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn table() -> PromptTable {
        let entry = |who, ubatch: u64, rates: &[(u64, f64)]| Entry {
            who,
            ubatch,
            arguments: if who == Who::Ours { String::new() } else { format!("-ncmoe {}", ubatch / 128) },
            device_mib: (who == Who::Equal).then_some(9000.4),
            rates: rates.iter().map(|(prompt, rate)| (*prompt, vec![*rate, rate * 1.1, rate * 0.9])).collect(),
        };
        PromptTable {
            share: 0.45,
            cache_mib: 7000,
            budget_mib: Some(9100),
            prompts: vec![512, 12288],
            entries: vec![
                entry(Who::Ours, 2048, &[(512, 2000.0), (12288, 7000.0)]),
                entry(Who::Ours, 12288, &[(512, 1900.0), (12288, 11000.0)]),
                entry(Who::Equal, 512, &[(512, 1000.0), (12288, 4000.0)]),
                entry(Who::Equal, 4096, &[(512, 900.0), (12288, 8000.0)]),
                entry(Who::Device, 2048, &[(512, 4000.0), (12288, 12500.0)]),
            ],
            ..PromptTable::default()
        }
    }

    #[test]
    fn the_best_of_each_side_is_compared() {
        let table = table();
        let text = table.table();
        let row = text.lines().find(|line| line.contains("12288") && line.contains("same memory")).unwrap();
        for part in ["4096", "-ncmoe 32", "8000.0", "7200.0..8800.0", "1.38x", "9000"] {
            assert!(row.contains(part), "{part} in {row}");
        }
        assert!(text.contains("same memory: 9100 MiB with 7000 MiB of experts"));
        let verdict = table.verdict();
        assert!(verdict.contains("pp512 2.00x of stock's best, ? of its default; pp12288 1.38x"), "{verdict}");
        let json = table.json();
        assert_eq!(json["prompts"][1]["best"]["device"]["ratio"], 0.88);
        assert_eq!(json["prompts"][1]["best"]["ours"]["ubatch"], 12288);
        let svg = table.svg("m");
        assert!(svg.contains(">pp512<") && svg.contains("1.38x") && svg.contains("all on the device"));
        assert_eq!(svg.matches("<rect x=").count(), 6);
    }

    #[test]
    fn void_figures_have_no_ratio() {
        let table = PromptTable { void: Some("because".into()), missing: vec!["x: y".into()], ..table() };
        assert_eq!(table.verdict(), "bench: void: because\n");
        let text = table.table();
        assert!(
            text.contains("VOID: because") && text.contains("did not run: x: y") && !text.contains("1.38x"),
            "{text}"
        );
        assert!(table.json()["prompts"][0]["best"]["equal"]["ratio"].is_null());
        assert!(!table.svg("m").contains("1.38x"));
    }
}
