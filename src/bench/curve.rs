//! Decoding token by token: when the tokens of an answer arrived, after a long prompt and without one.
//!
//! Owns: [`Curve`] as CSV, JSON and picture, and the ratio of decoding after a prompt to decoding without.
//! Threads: none. Does not: ask a server.

use std::fmt::Write as _;

use serde_json::{Value, json};

use crate::chart::{Chart, Line, Panel};

/// Tokens over which a point of the picture is a mean.
const WINDOW: usize = 16;

/// One answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// Which side.
    pub side: String,
    /// What went before: `without a prompt`, `after a prompt`, `the same context without a pass`.
    pub what: String,
    /// When each token arrived, in ms from the request.
    pub arrivals_ms: Vec<f64>,
}

impl Answer {
    /// Tokens per second from one token to another.
    pub fn rate(&self, from: usize, to: usize) -> Option<f64> {
        let last = to.min(self.arrivals_ms.len().checked_sub(1)?);
        let ms = self.arrivals_ms.get(last)? - self.arrivals_ms.get(from)?;
        (last > from && ms > 0.0).then(|| (last - from) as f64 * 1000.0 / ms)
    }

    fn points(&self) -> Vec<(f64, f64)> {
        let ends = (WINDOW..self.arrivals_ms.len()).step_by(WINDOW / 2);
        ends.filter_map(|end| Some((end as f64, self.rate(end - WINDOW, end)?))).collect()
    }
}

/// Answers of both sides.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curve {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// The token from which on decoding must be as before.
    pub from: usize,
    /// The answers.
    pub answers: Vec<Answer>,
}

impl Curve {
    /// Tokens per second from that token to the end.
    fn rate(&self, side: &str, what: &str) -> Option<f64> {
        let answer = self.answers.iter().find(|answer| answer.side == side && answer.what == what)?;
        answer.rate(self.from, usize::MAX)
    }

    /// After a prompt by without one, from that token on, for a side.
    pub fn ratio(&self, side: &str, without: &str) -> Option<f64> {
        Some(self.rate(side, AFTER)? / self.rate(side, without)?)
    }

    /// Lines for a reader.
    pub fn words(&self) -> String {
        let mut out = String::new();
        for side in self.sides() {
            let rate = |what: &str| self.rate(side, what).map_or("?".to_owned(), |rate| format!("{rate:.1}"));
            let ratio = |what: &str| self.ratio(side, what).map_or("?".to_owned(), |ratio| format!("{ratio:.3}"));
            let _ = writeln!(
                out,
                "{side}: from token {} after {} tokens {} t/s: {} of {} in the same context without a pass, {} of {} without a prompt",
                self.from,
                self.prompt,
                rate(AFTER),
                ratio(AGAIN),
                rate(AGAIN),
                ratio(WITHOUT),
                rate(WITHOUT)
            );
        }
        out
    }

    fn sides(&self) -> Vec<&str> {
        let mut sides: Vec<&str> = Vec::new();
        for answer in &self.answers {
            if !sides.contains(&answer.side.as_str()) {
                sides.push(&answer.side);
            }
        }
        sides
    }

    /// One row per token: its number and, for each answer, ms since the token before (the first: since the request).
    pub fn csv(&self) -> String {
        let names = self.answers.iter().map(|answer| format!(",{} {} ms", answer.side, answer.what));
        let mut out = format!("token{}\n", names.collect::<String>());
        let most = self.answers.iter().map(|answer| answer.arrivals_ms.len()).max().unwrap_or(0);
        for token in 0..most {
            let _ = write!(out, "{}", token + 1);
            for answer in &self.answers {
                let before = token.checked_sub(1).and_then(|before| answer.arrivals_ms.get(before)).unwrap_or(&0.0);
                match answer.arrivals_ms.get(token) {
                    Some(time) => {
                        let _ = write!(out, ",{:.3}", time - before);
                    }
                    None => out.push(','),
                }
            }
            out.push('\n');
        }
        out
    }

    /// For a report.
    pub fn json(&self) -> Value {
        let ratios = self.sides().into_iter().map(|side| {
            json!({ "side": side, "by_same_context": self.ratio(side, AGAIN), "by_no_prompt": self.ratio(side, WITHOUT) })
        });
        let answers = self
            .answers
            .iter()
            .map(|answer| json!({ "side": answer.side, "what": answer.what, "arrivals_ms": answer.arrivals_ms }));
        json!({
            "prompt": self.prompt, "from": self.from, "ratios": ratios.collect::<Vec<_>>(), "answers": answers.collect::<Vec<_>>(),
        })
    }

    /// Speed over tokens, a panel for each side.
    pub fn svg(&self, title: &str) -> String {
        let panels = self.sides().into_iter().map(|side| {
            let lines = self.answers.iter().filter(|answer| answer.side == side);
            let lines = lines.map(|answer| Line { name: answer.what.clone(), points: answer.points() });
            Panel { title: format!("{side}, tokens per second"), lines: lines.collect() }
        });
        let across = format!("token of the answer (means of {WINDOW}; the prompt has {} tokens)", self.prompt);
        Chart { title: title.to_owned(), across, panels: panels.collect() }.svg()
    }
}

/// Names of what went before an answer.
pub const WITHOUT: &str = "without a prompt";
/// Right after the long prompt.
pub const AFTER: &str = "after a prompt";
/// The prompt lies in the context from before, so that no pass ran.
pub const AGAIN: &str = "same context without a pass";

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(side: &str, what: &str, ms: f64, slow: usize) -> Answer {
        let gap = |token: usize| if token < slow { 3.0 * ms } else { ms };
        let arrivals_ms = (0..100).map(|token| (0..=token).map(gap).sum()).collect();
        Answer { side: side.into(), what: what.into(), arrivals_ms }
    }

    #[test]
    fn decoding_after_a_prompt_is_compared() {
        let answers =
            vec![answer("ours", WITHOUT, 5.0, 0), answer("ours", AFTER, 5.5, 30), answer("ours", AGAIN, 5.5, 0)];
        let mut curve = Curve { prompt: 1000, from: 40, answers };
        assert!((curve.ratio("ours", AGAIN).unwrap() - 1.0).abs() < 1e-9);
        assert!((curve.ratio("ours", WITHOUT).unwrap() - 5.0 / 5.5).abs() < 1e-9);
        assert_eq!(curve.ratio("stock", AGAIN), None);
        curve.from = 10;
        assert!(curve.ratio("ours", AGAIN).unwrap() < 0.8, "the slow beginning counts");
        let csv = curve.csv();
        let row: Vec<&str> = csv.lines().nth(1).unwrap().split(',').collect();
        assert_eq!((csv.lines().count(), row), (101, vec!["1", "5.000", "16.500", "5.500"]));
        assert!(curve.words().contains("from token 10 after 1000 tokens"));
        let svg = curve.svg("x");
        assert!(svg.matches("<polyline").count() == 3 && svg.contains(WITHOUT), "{svg}");
        assert_eq!(curve.json()["ratios"][0]["side"], "ours");
        assert_eq!(Answer::default().rate(0, 5), None);
    }
}
