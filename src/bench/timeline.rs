//! Timelines of long passes: what the key `timeline` writes, read again, summed and drawn.
//!
//! Owns: [`Pass`] with its sums, and its picture. The form is in docs/telemetry.md.
//! Invariants: sums are made of the intervals, not taken from the file; what the file says must agree with them.
//! Threads: none. Does not: touch a file.

use serde_json::{Value, json};

use crate::chart::{Lane, LanePanel, Lanes};

/// Begin and end in microseconds from the pass's begin.
pub type Interval = (f64, f64);

/// One pass.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pass {
    /// The device.
    pub device: String,
    /// Its number in its backend.
    pub number: u64,
    /// Tokens.
    pub tokens: u64,
    /// Blocks whose experts were brought.
    pub blocks: u64,
    /// What a buffer holds, and how many there are.
    pub staging: (String, u64),
    /// Whose clock: the device's or the host's.
    pub clock: String,
    /// Bytes over the link, and copied on the device.
    pub bytes: (u64, u64),
    /// When copies ran.
    pub copies: Vec<Interval>,
    /// When the device computed.
    pub computes: Vec<Interval>,
}

/// Where the time of a pass went, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sums {
    /// From the pass's begin to the last end.
    pub span: f64,
    /// Copies ran.
    pub copy: f64,
    /// The device computed.
    pub compute: f64,
    /// Both.
    pub both: f64,
    /// Neither.
    pub idle: f64,
}

impl Sums {
    /// Both in percent of the shorter of copying and computing.
    pub fn overlap_percent(&self) -> Option<f64> {
        let shorter = self.copy.min(self.compute);
        (shorter > 0.0).then(|| 100.0 * self.both / shorter)
    }
}

impl Pass {
    /// Reads one line; an error says what is wrong with it.
    pub fn read(line: &str) -> Result<Self, String> {
        let row: Value = serde_json::from_str(line).map_err(|error| error.to_string())?;
        if row["format"].as_u64() != Some(1) {
            return Err(format!("format {}, known is 1", row["format"]));
        }
        let count = |name: &str| row[name].as_u64().unwrap_or(0);
        let text = |name: &str| row[name].as_str().unwrap_or("?").to_owned();
        let intervals = |name: &str| {
            let rows = row[name].as_array().ok_or_else(|| format!("no {name}"))?;
            rows.iter().map(interval).collect::<Option<Vec<_>>>().ok_or_else(|| format!("{name}: no intervals"))
        };
        let pass = Self {
            device: text("device"),
            number: count("pass"),
            tokens: count("tokens"),
            blocks: count("blocks"),
            staging: (text("unit"), count("buffers")),
            clock: text("clock"),
            bytes: (count("ram_bytes"), count("device_bytes")),
            copies: intervals("copies")?,
            computes: intervals("computes")?,
        };
        // Times are rounded where they are written.
        let (told, found) = (row["both_us"].as_f64(), pass.sums().both);
        match told {
            Some(told) if (told - found).abs() > 1.0 + 0.001 * found => {
                Err(format!("both_us is {told:.1}, its intervals say {found:.1}"))
            }
            _ => Ok(pass),
        }
    }

    /// All passes of a file; lines that are none are told.
    pub fn all(text: &str) -> (Vec<Self>, Vec<String>) {
        let (mut passes, mut wrong) = (Vec::new(), Vec::new());
        for (line, number) in text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty()) {
            match Self::read(line) {
                Ok(pass) => passes.push(pass),
                Err(why) => wrong.push(format!("line {number}: {why}")),
            }
        }
        (passes, wrong)
    }

    /// Where its time went.
    pub fn sums(&self) -> Sums {
        let (copies, computes) = (merged(&self.copies), merged(&self.computes));
        let any = merged(&[&copies[..], &computes[..]].concat());
        let span = any.last().map_or(0.0, |last| last.1);
        let [copy, compute, either] = [&copies, &computes, &any].map(|all| length(all));
        Sums { span, copy, compute, both: (copy + compute - either).max(0.0), idle: span - either }
    }

    /// When neither ran.
    pub fn idle(&self) -> Vec<Interval> {
        let any = merged(&[&self.copies[..], &self.computes[..]].concat());
        let mut from = 0.0;
        let mut gaps = Vec::new();
        for (begin, end) in any {
            if begin > from {
                gaps.push((from, begin));
            }
            from = end;
        }
        gaps
    }

    /// One line.
    pub fn words(&self) -> String {
        let sums = self.sums();
        let share =
            sums.overlap_percent().map_or("nothing to overlap".to_owned(), |share| format!("{share:.1}% overlap"));
        let gbs = if sums.copy > 0.0 { self.bytes.0 as f64 / sums.copy / 1e3 } else { 0.0 };
        format!(
            "pass {} of {} tokens on {}: {share}; {:.1} ms: copy {:.1}, compute {:.1}, both {:.1}, idle {:.1}; {} MB at {gbs:.1} GB/s; {} buffers of a {}",
            self.number,
            self.tokens,
            self.device,
            sums.span / 1e3,
            sums.copy / 1e3,
            sums.compute / 1e3,
            sums.both / 1e3,
            sums.idle / 1e3,
            self.bytes.0 / 1_000_000,
            self.staging.1,
            self.staging.0
        )
    }

    /// For a report.
    pub fn json(&self) -> Value {
        let sums = self.sums();
        json!({
            "device": self.device, "pass": self.number, "tokens": self.tokens, "blocks": self.blocks, "clock": self.clock,
            "ram_bytes": self.bytes.0, "device_bytes": self.bytes.1, "span_us": sums.span, "copy_us": sums.copy,
            "compute_us": sums.compute, "both_us": sums.both, "idle_us": sums.idle, "overlap_percent": sums.overlap_percent(),
        })
    }

    /// Copy, compute and idle: the whole pass, and its middle tenth.
    pub fn svg(&self) -> String {
        let sums = self.sums();
        let ms = |intervals: Vec<Interval>| intervals.iter().map(|(from, to)| (from / 1e3, to / 1e3)).collect();
        let lane = |name: &str, intervals: Vec<Interval>| Lane { name: name.to_owned(), intervals: ms(intervals) };
        let panel = |title: String, from: f64, to: f64| LanePanel {
            title,
            span: (from * sums.span / 1e3, to * sums.span / 1e3),
            lanes: vec![
                lane("copy", self.copies.clone()),
                lane("compute", self.computes.clone()),
                lane("idle", self.idle()),
            ],
        };
        Lanes {
            title: self.words(),
            across: "ms from the begin of the pass".to_owned(),
            panels: vec![panel("the whole pass".to_owned(), 0.0, 1.0), panel("its middle".to_owned(), 0.45, 0.55)],
        }
        .svg()
    }
}

/// `[block, part, begin, end]`.
fn interval(row: &Value) -> Option<Interval> {
    let (begin, end) = (row.get(2)?.as_f64()?, row.get(3)?.as_f64()?);
    (begin.is_finite() && end >= begin).then_some((begin, end))
}

/// The union, in order.
fn merged(intervals: &[Interval]) -> Vec<Interval> {
    let mut sorted = intervals.to_vec();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut union: Vec<Interval> = Vec::new();
    for (begin, end) in sorted {
        match union.last_mut() {
            Some(last) if begin <= last.1 => last.1 = last.1.max(end),
            _ => union.push((begin, end)),
        }
    }
    union
}

fn length(intervals: &[Interval]) -> f64 {
    intervals.iter().map(|(begin, end)| end - begin).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LINE: &str = r#"{"format":1,"device":"MoE0","pass":3,"clock":"device","unit":"layer","buffers":2,"tokens":2048,"blocks":2,
        "ram_bytes":9000000,"device_bytes":7,"copies":[[0,0,10.0,110.0],[1,0,110.0,210.0]],"computes":[[-1,0,0.0,5.0],[0,0,110.0,190.0],[1,0,220.0,300.0]],
        "span_us":300.0,"copy_us":200.0,"compute_us":165.0,"both_us":80.0,"idle_us":15.0,"overlap_percent":48.5}"#;

    #[test]
    fn a_pass_is_read_and_summed() {
        let line = LINE.replace('\n', " ");
        let pass = Pass::read(&line).unwrap();
        let sums = pass.sums();
        assert_eq!(sums, Sums { span: 300.0, copy: 200.0, compute: 165.0, both: 80.0, idle: 15.0 });
        assert!((sums.overlap_percent().unwrap() - 48.48).abs() < 0.01);
        assert_eq!(pass.idle(), [(5.0, 10.0), (210.0, 220.0)]);
        let svg = pass.svg();
        assert!(svg.contains("48.5% overlap") && svg.contains(">idle<") && svg.contains("45.0 GB/s"), "{svg}");
        assert!(svg.matches("<rect x=").count() >= 7, "all intervals of the whole pass");
        let (passes, wrong) = Pass::all(&format!("{line}\n\nbroken\n{}\n", line.replace("80.0,\"idle", "90.0,\"idle")));
        assert_eq!((passes.len(), wrong.len()), (1, 2));
        assert!(wrong[0].starts_with("line 3: ") && wrong[1].contains("both_us is 90.0"), "{wrong:?}");
        assert!(Pass::read("{\"format\":2}").unwrap_err().contains("known is 1"));
        assert!(Pass::read(&line.replace("110.0,210.0", "110.0,10.0")).unwrap_err().contains("no intervals"));
        assert_eq!(Pass::default().sums().overlap_percent(), None);
    }

    proptest! {
        /// Whatever ran: the parts add up, and gaps are what is left.
        #[test]
        fn sums_add_up(copies in intervals(), computes in intervals()) {
            let pass = Pass { copies, computes, ..Pass::default() };
            let sums = pass.sums();
            prop_assert!((sums.copy + sums.compute - sums.both + sums.idle - sums.span).abs() < 1e-6);
            prop_assert!((length(&pass.idle()) - sums.idle).abs() < 1e-6);
            prop_assert!(sums.both >= -1e-9 && sums.both <= sums.copy.min(sums.compute) + 1e-9);
        }
    }

    fn intervals() -> impl Strategy<Value = Vec<Interval>> {
        proptest::collection::vec((0.0_f64..1e6, 0.0_f64..1e5).prop_map(|(begin, long)| (begin, begin + long)), 0..40)
    }
}
