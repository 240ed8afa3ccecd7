//! The figures of a bench run as a table, as JSON, as a picture and as one line.
//!
//! Owns: [`Report`] and its forms.
//! Invariants: a phase that is void has no ratio in any of them.
//! Threads: none. Does not: run anything, or write files.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::output::{Counts, HostInfo};
use super::prompts::PromptTable;
use super::stats::{Spread, median, ratios, spread};
use crate::chart::{Bar, BarChart, BarPanel, Group};

/// One test, in pairs of stock and ours; each with its samples that count.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Test {
    /// `pp512` or `tg128`.
    pub name: String,
    /// Samples of each pair in tokens per second: stock's and ours.
    pub pairs: Vec<(Vec<f64>, Vec<f64>)>,
}

impl Test {
    /// The medians of each pair.
    fn medians(&self) -> Vec<(f64, f64)> {
        self.pairs.iter().filter_map(|(stock, ours)| Some((median(stock)?, median(ours)?))).collect()
    }

    /// Ours by stock's, over the pairs.
    pub fn ratio(&self) -> Option<Spread> {
        spread(&ratios(&self.medians()))
    }

    /// Stock's rates, over the pairs.
    pub fn stock(&self) -> Option<Spread> {
        spread(&self.medians().into_iter().map(|(stock, _)| stock).collect::<Vec<_>>())
    }

    /// Our rates, over the pairs.
    pub fn ours(&self) -> Option<Spread> {
        spread(&self.medians().into_iter().map(|(_, ours)| ours).collect::<Vec<_>>())
    }
}

/// Prompts, or decoding.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Phase {
    /// Whether it is decoding.
    pub decodes: bool,
    /// Where stock put the experts, and with what else.
    pub stock_arguments: String,
    /// The command lines: stock's and ours.
    pub commands: (String, String),
    /// What was tried to find stock's arguments, with its rate.
    pub tried: Vec<(String, f64)>,
    /// The tests.
    pub tests: Vec<Test>,
    /// What the plugin counted, over all of its runs.
    pub counts: Counts,
    /// Tokens of these runs, those that do not count as samples included.
    pub tokens: u64,
    /// Experts that the cache had slots for, of those that it knew.
    pub held: Option<(u64, u64)>,
    /// MiB of the device by the host's own account: stock's; ours without the cache.
    pub device_mib: (Option<f64>, Option<f64>),
    /// Why it says nothing.
    pub void: Option<String>,
}

/// One size of the cache.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Case {
    /// Share of the experts that the cache is made for, 0 to 1.
    pub share: f64,
    /// The cache in MiB.
    pub cache_mib: u64,
    /// The keys of the plugin.
    pub keys: String,
    /// Prompts, decoding, or both.
    pub phases: Vec<Phase>,
}

/// A run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// What the user called.
    pub command: Vec<String>,
    /// The plugin's version.
    pub version: String,
    /// What the host said.
    pub host: HostInfo,
    /// Processors that this process may use.
    pub processors: usize,
    /// RAM in MiB.
    pub ram_mib: usize,
    /// The model in words.
    pub model: String,
    /// The model's file name.
    pub model_file: String,
    /// The sizes of the cache.
    pub cases: Vec<Case>,
    /// Tables of prompts, if they are all that was asked for.
    pub prompt_tables: Vec<PromptTable>,
}

impl Report {
    fn phases(&self) -> impl Iterator<Item = (&Case, &Phase)> {
        self.cases.iter().flat_map(|case| case.phases.iter().map(move |phase| (case, phase)))
    }

    /// Why a part of it says nothing.
    pub fn void(&self) -> Option<&str> {
        self.phases().find_map(|(_, phase)| phase.void.as_deref())
    }

    /// What was measured, and where.
    pub fn head(&self) -> String {
        let gpu = if self.host.gpu.is_empty() { String::new() } else { format!("{}; ", self.host.gpu) };
        format!(
            "{}: {}\n{gpu}{}; {} processors, {} MiB of RAM; host build {}\n\n",
            self.model_file, self.model, self.host.cpu, self.processors, self.ram_mib, self.host.build
        )
    }

    /// The table.
    pub fn table(&self) -> String {
        let mut rows = vec![
            [
                "share",
                "cache MiB",
                "stock's flags",
                "test",
                "stock t/s",
                "ours t/s",
                "ratio",
                "lowest..highest",
                "hits",
                "held",
                "CPU MB/tok",
                "link MB/tok",
                "device MiB",
            ]
            .map(str::to_owned)
            .to_vec(),
        ];
        for (case, phase) in self.phases() {
            let [percent, per_cpu, per_link] = phase.work();
            for test in &phase.tests {
                let rate =
                    |spread: Option<Spread>| spread.map_or("-".to_owned(), |spread| format!("{:.1}", spread.median));
                let ratio = test.ratio().filter(|_| phase.void.is_none());
                let device = |mib: Option<f64>| mib.map_or("?".to_owned(), |mib| format!("{mib:.0}"));
                rows.push(vec![
                    format!("{:.0}%", 100.0 * case.share),
                    case.cache_mib.to_string(),
                    if phase.stock_arguments.is_empty() { "-".to_owned() } else { phase.stock_arguments.clone() },
                    test.name.clone(),
                    rate(test.stock()),
                    rate(test.ours()),
                    ratio.map_or("void".to_owned(), |ratio| format!("{:.2}x", ratio.median)),
                    ratio.map_or("-".to_owned(), |ratio| format!("{:.2}..{:.2}", ratio.low, ratio.high)),
                    percent.clone(),
                    phase.held.map_or("-".to_owned(), |(slots, known)| format!("{slots}/{known}")),
                    per_cpu.clone(),
                    per_link.clone(),
                    format!("{} / {}+{}", device(phase.device_mib.0), device(phase.device_mib.1), case.cache_mib),
                ]);
            }
        }
        let mut out = format!("{}{}", self.head(), columns(&rows));
        for (case, phase) in self.phases() {
            if let Some(reason) = &phase.void {
                let _ = writeln!(out, "\nVOID: {} at {:.0}%: {reason}", phase.name(), 100.0 * case.share);
            }
        }
        out
    }

    /// The last line.
    pub fn verdict(&self) -> String {
        if let Some(reason) = self.void() {
            return format!("bench: void: {reason}\n");
        }
        let many = self.cases.len() > 1;
        let cases = self.cases.iter().map(|case| {
            let phases: Vec<String> = case.phases.iter().rev().flat_map(Phase::verdict).collect();
            let label = if many { format!("{:.0}%: ", 100.0 * case.share) } else { String::new() };
            format!("{label}{}", phases.join(", "))
        });
        format!("bench: {}\n", cases.collect::<Vec<_>>().join("; "))
    }

    /// One JSON object.
    pub fn json(&self) -> Value {
        json!({
            "date": self.host.time, "command": self.command, "version": self.version,
            "host": { "build": self.host.build },
            "machine": {
                "cpu": self.host.cpu, "gpu": self.host.gpu, "processors": self.processors, "ram_mib": self.ram_mib,
            },
            "model": { "file": self.model_file, "shape": self.model },
            "void": self.void(),
            "cases": self.cases.iter().map(Case::json).collect::<Vec<_>>(),
            "prompt_tables": self.prompt_tables.iter().map(PromptTable::json).collect::<Vec<_>>(),
        })
    }

    /// Bars of both sides, with the ratio above; of tables of prompts the first.
    pub fn svg(&self) -> String {
        if let Some(table) = self.prompt_tables.first() {
            return table.svg(&self.model_file);
        }
        let bar = |spread: Option<Spread>| {
            spread.map(|spread| Bar { value: spread.median, range: (spread.low, spread.high) })
        };
        let panel = |decodes: bool| {
            let phases = self.phases().filter(|(_, phase)| phase.decodes == decodes && phase.void.is_none());
            let groups: Vec<Group> = phases
                .flat_map(|(case, phase)| {
                    phase.tests.iter().map(move |test| Group {
                        name: format!("{}\n{:.0}%", test.name, 100.0 * case.share),
                        note: test.ratio().map_or(String::new(), |ratio| format!("{:.2}x", ratio.median)),
                        bars: vec![bar(test.stock()), bar(test.ours())],
                    })
                })
                .collect();
            let what = if decodes { "decoding" } else { "prompts" };
            (!groups.is_empty()).then(|| BarPanel { title: format!("{what}, tokens per second"), groups })
        };
        BarChart {
            title: format!("{}: share of the experts in the cache", self.model_file),
            names: vec!["stock, same device memory".to_owned(), "with ggml-moe".to_owned()],
            panels: [true, false].into_iter().filter_map(panel).collect(),
        }
        .svg()
    }
}

impl Case {
    fn json(&self) -> Value {
        json!({
            "share": self.share, "cache_mib": self.cache_mib, "keys": self.keys,
            "phases": self.phases.iter().map(Phase::json).collect::<Vec<_>>(),
        })
    }
}

impl Phase {
    fn name(&self) -> &'static str {
        if self.decodes { "decode" } else { "prompt" }
    }

    /// Hits in percent, MB by the processor and MB over the link for each token, for a table.
    fn work(&self) -> [String; 3] {
        // Of a prompt, the cache may compute the last token's last layer, which says nothing.
        let percent = self.counts.hit_percent().filter(|_| self.decodes);
        let percent = percent.map_or("-".to_owned(), |percent| format!("{percent:.1}%"));
        let per_token = |bytes: u64| match self.tokens {
            0 => "-".to_owned(),
            tokens => format!("{:.1}", bytes as f64 / 1e6 / tokens as f64),
        };
        [percent, per_token(self.counts.cpu_bytes), per_token(self.counts.link_bytes)]
    }

    fn verdict(&self) -> Vec<String> {
        let one = self.tests.len() == 1;
        let words = self.tests.iter().map(|test| {
            let name = if one { self.name().to_owned() } else { format!("{} {}", self.name(), test.name) };
            match test.ratio() {
                Some(ratio) => format!("{name} {:.2}x ({:.2} to {:.2})", ratio.median, ratio.low, ratio.high),
                None => format!("{name} not measured"),
            }
        });
        words.collect()
    }

    fn json(&self) -> Value {
        let tests = self.tests.iter().map(|test| {
            let side = |spread: Option<Spread>| spread.map(|spread| json!([spread.median, spread.low, spread.high]));
            json!({
                "name": test.name, "ratio": side(test.ratio().filter(|_| self.void.is_none())), "stock": side(test.stock()),
                "ours": side(test.ours()),
                "samples": test.pairs.iter().map(|(stock, ours)| json!({ "stock": stock, "ours": ours })).collect::<Vec<_>>(),
            })
        });
        json!({
            "phase": self.name(), "stock_arguments": self.stock_arguments,
            "commands": { "stock": self.commands.0, "ours": self.commands.1 },
            "tried": self.tried.iter().map(|(arguments, rate)| json!({ "arguments": arguments, "rate": rate })).collect::<Vec<_>>(),
            "tests": tests.collect::<Vec<_>>(),
            "hit_percent": self.counts.hit_percent(), "hits": self.counts.hits, "misses": self.counts.misses,
            "cpu_bytes": self.counts.cpu_bytes, "link_bytes": self.counts.link_bytes, "tokens": self.tokens,
            "unrecognised": self.counts.unrecognised,
            "held": self.held.map(|(slots, known)| json!({ "slots": slots, "experts": known })),
            "device_mib": { "stock": self.device_mib.0, "ours_without_cache": self.device_mib.1 },
            "void": self.void,
        })
    }
}

/// Rows of text below each other, the first as head.
pub(super) fn columns(rows: &[Vec<String>]) -> String {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width =
        |place: usize| rows.iter().filter_map(|row| row.get(place)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..count).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        out.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn report() -> Report {
        let test = |name: &str, factor: f64| Test {
            name: name.into(),
            pairs: [1.0, 1.1, 0.9].map(|pair| (vec![50.0, 52.0, 51.0], vec![51.0 * factor * pair; 2])).to_vec(),
        };
        let decode = Phase {
            decodes: true,
            stock_arguments: "-ncmoe 39".into(),
            tests: vec![test("tg128", 2.0)],
            counts: Counts {
                blocks: 1,
                hits: 3,
                misses: 1,
                cpu_bytes: 64_000_000,
                link_bytes: 8_000_000,
                unrecognised: 0,
            },
            tokens: 4,
            held: Some((100, 500)),
            device_mib: (Some(3000.4), None),
            ..Phase::default()
        };
        let prompt = Phase { tests: vec![test("pp512", 0.9), test("pp2048", 1.2)], ..Phase::default() };
        Report {
            command: vec!["ggml-moe".into(), "bench".into()],
            model_file: "m.gguf".into(),
            model: "a model".into(),
            host: HostInfo { time: "2026-11-30T12:00:00Z".into(), gpu: "H".into(), ..HostInfo::default() },
            cases: vec![Case { share: 0.2, cache_mib: 3161, keys: "cache=3161".into(), phases: vec![prompt, decode] }],
            ..Report::default()
        }
    }

    #[test]
    fn a_table_and_a_last_line() {
        let report = report();
        let table = report.table();
        let row: Vec<&str> = table.lines().find(|line| line.contains("tg128")).unwrap().split_whitespace().collect();
        assert_eq!(row[..4], ["20%", "3161", "-ncmoe", "39"]);
        assert_eq!(
            row[5..],
            ["51.0", "102.0", "2.00x", "1.80..2.20", "75.0%", "100/500", "16.0", "2.0", "3000", "/", "?+3161"]
        );
        let line = report.verdict();
        let wanted = "bench: decode 2.00x (1.80 to 2.20), prompt pp512 0.90x (0.81 to 0.99), prompt pp2048 1.20x (1.08 to 1.32)\n";
        assert_eq!(line, wanted);
    }

    #[test]
    fn several_shares_are_told_apart() {
        let mut report = report();
        report.cases[0].phases.remove(0);
        report.cases.push(Case { share: 0.45, ..report.cases[0].clone() });
        assert_eq!(report.verdict(), "bench: 20%: decode 2.00x (1.80 to 2.20); 45%: decode 2.00x (1.80 to 2.20)\n");
        let svg = report.svg();
        assert!(svg.contains(">tg128<") && svg.contains(">45%<") && svg.contains("2.00x") && !svg.contains("prompts"));
    }

    #[test]
    fn a_void_phase_has_no_ratio_anywhere() {
        let mut report = report();
        report.cases[0].phases[1].void = Some("because".into());
        assert_eq!(report.verdict(), "bench: void: because\n");
        let table = report.table();
        assert!(!table.contains("2.00x") && table.contains("VOID: decode at 20%: because"), "{table}");
        let json = report.json();
        assert_eq!(json["void"], "because");
        assert!(json["cases"][0]["phases"][1]["tests"][0]["ratio"].is_null());
        assert!(json["cases"][0]["phases"][0]["tests"][0]["ratio"][0].is_number());
        assert!(!report.svg().contains("tg128"));
    }
}
