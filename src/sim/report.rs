//! The figures of a simulation as a table, as JSON and as chart.
//!
//! Owns: [`Report`] and its three forms.
//! Threads: none. Does not: replay, or write files.

use std::fmt::Write as _;

use crate::chart::{Chart, Line, Panel};

use super::run::Rule;
use super::series::Outcome;

/// One rule at one share.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    /// The rule.
    pub rule: Rule,
    /// What it did in the second half of the trace.
    pub outcome: Outcome,
    /// What it did in each part of [`Report::parts`].
    pub parts: Vec<Outcome>,
}

/// All rules at one share.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Share of the experts that the cache holds, 0 to 1.
    pub share: f64,
    /// Slots per layer.
    pub slots: usize,
    /// One cell per rule.
    pub cells: Vec<Cell>,
}

/// A simulation.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// What was replayed.
    pub title: String,
    /// Tokens, layers, experts per layer and used.
    pub size: [usize; 4],
    /// Names of the parts of the trace that are told apart; none without a redraw.
    pub parts: Vec<String>,
    /// One row per share.
    pub rows: Vec<Row>,
}

impl Report {
    fn rules(&self) -> Vec<Rule> {
        self.rows.first().map_or_else(Vec::new, |row| row.cells.iter().map(|cell| cell.rule).collect())
    }

    /// The table. Where LRU is in it, uploads are given as a part of LRU's, too.
    pub fn table(&self) -> String {
        let [tokens, layers, experts, used] = self.size;
        let mut out = format!(
            "{}: {tokens} tokens, {layers} layers, {used} of {experts} experts; hits and uploads per token of the second half\n\n",
            self.title
        );
        let mut head = String::from("share  slots/layer");
        for rule in self.rules() {
            let _ = write!(head, "  {:>23}", rule.name());
        }
        let _ = writeln!(out, "{head}");
        for row in &self.rows {
            let _ = write!(out, "{:>4.0}%  {:>11}", 100.0 * row.share, row.slots);
            let lru = row.cells.iter().find(|cell| cell.rule == Rule::Lru).map(|cell| cell.outcome);
            for cell in &row.cells {
                let uploads = cell.outcome.uploads_per_token();
                let part = lru.map(|lru| 100.0 * uploads / lru.uploads_per_token().max(f64::MIN_POSITIVE));
                let part =
                    part.filter(|_| cell.rule != Rule::Lru).map_or(String::new(), |part| format!("({part:.0}%)"));
                let _ = write!(out, "  {:>6.1}%  {uploads:>7.1} {part:>6}", cell.outcome.hit_percent());
            }
            out.push('\n');
        }
        if !self.parts.is_empty() {
            out.push_str("\nHits by tokens from the redraw:\n\nshare  rule  ");
            self.parts.iter().for_each(|part| out.push_str(&format!("  {part:>12}")));
            out.push('\n');
            for row in &self.rows {
                for cell in &row.cells {
                    let _ = write!(out, "{:>4.0}%  {:<6}", 100.0 * row.share, cell.rule.name());
                    cell.parts.iter().for_each(|part| out.push_str(&format!("  {:>11.1}%", part.hit_percent())));
                    out.push('\n');
                }
            }
        }
        out
    }

    /// One JSON object.
    pub fn json(&self) -> String {
        let [tokens, layers, experts, used] = self.size;
        let title: String = self.title.chars().flat_map(char::escape_default).collect();
        let mut out = format!(
            "{{\"trace\":\"{title}\",\"tokens\":{tokens},\"layers\":{layers},\"experts\":{experts},\"used\":{used},\"results\":["
        );
        let mut first = true;
        for (row, cell) in self.rows.iter().flat_map(|row| row.cells.iter().map(move |cell| (row, cell))) {
            let parts: Vec<String> = cell.parts.iter().map(|part| format!("{:.3}", part.hit_percent())).collect();
            let _ = write!(
                out,
                "{}{{\"share\":{},\"slots_per_layer\":{},\"policy\":\"{}\",\"hit_percent\":{:.3},\"uploads_per_token\":{:.3},\"parts\":[{}]}}",
                if std::mem::take(&mut first) { "" } else { "," },
                row.share,
                row.slots,
                cell.rule.name(),
                cell.outcome.hit_percent(),
                cell.outcome.uploads_per_token(),
                parts.join(",")
            );
        }
        out.push_str("]}\n");
        out
    }

    /// Hits and uploads over the share, as an SVG picture.
    pub fn svg(&self) -> String {
        let line = |rule: Rule, value: &dyn Fn(&Outcome) -> f64| Line {
            name: rule.name().to_owned(),
            points: self
                .rows
                .iter()
                .filter_map(|row| {
                    let cell = row.cells.iter().find(|cell| cell.rule == rule)?;
                    Some((100.0 * row.share, value(&cell.outcome)))
                })
                .collect(),
        };
        let panel = |title: &str, value: &dyn Fn(&Outcome) -> f64| Panel {
            title: title.to_owned(),
            lines: self.rules().into_iter().map(|rule| line(rule, value)).collect(),
        };
        Chart {
            title: self.title.clone(),
            across: "share of the experts in the cache, %".to_owned(),
            panels: vec![
                panel("hits, %", &|outcome| outcome.hit_percent()),
                panel("uploads per token", &|outcome| outcome.uploads_per_token()),
            ],
        }
        .svg()
    }
}
