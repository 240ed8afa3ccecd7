//! The times of a long pass as a line of JSON, and what they say of copies and work running at once.
//!
//! Owns: the arithmetic on intervals, the form of the line (docs/telemetry.md) and the file that it is appended to.
//! Invariants: what is computed from intervals is that of their unions: order and overlap of the intervals do not matter.
//! Threads: any. Does not: take times (`gpu::clock` does).

use std::fmt::Write as _;
use std::io::Write as _;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use super::json::Object;

/// Something that ran for a while, in microseconds from the pass's begin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// The block, from 0; -1 for what lies between blocks.
    pub block: i64,
    /// The part of the block, from 0.
    pub part: usize,
    /// When it began.
    pub begin_us: f64,
    /// When it ended.
    pub end_us: f64,
}

/// What intervals of copies and of work say, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Overlap {
    /// From zero to the last end.
    pub span: f64,
    /// Some copy runs.
    pub copy: f64,
    /// Some work runs.
    pub compute: f64,
    /// Both run.
    pub both: f64,
    /// Neither runs.
    pub idle: f64,
}

impl Overlap {
    /// Of all intervals of a pass.
    pub fn of(copies: &[Interval], computes: &[Interval]) -> Self {
        let (copies, computes) = (union(copies), union(computes));
        let span = copies.iter().chain(&computes).map(|(_, end)| *end).fold(0.0, f64::max);
        let (copy, compute, both) = (length(&copies), length(&computes), common(&copies, &computes));
        Self { span, copy, compute, both, idle: (span - (copy + compute - both)).max(0.0) }
    }

    /// The part of the shorter of both, in percent, in which the other runs, too; `None` if one of them did not run.
    pub fn percent(&self) -> Option<f64> {
        let shorter = self.copy.min(self.compute);
        (shorter > 0.0).then(|| 100.0 * self.both / shorter)
    }
}

/// The times that are in some interval, as intervals that do not touch, in order. What ends before it begins counts as nothing.
fn union(intervals: &[Interval]) -> Vec<(f64, f64)> {
    let mut all: Vec<(f64, f64)> = intervals
        .iter()
        .map(|interval| (interval.begin_us.max(0.0), interval.end_us))
        .filter(|(begin, end)| begin < end)
        .collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut union: Vec<(f64, f64)> = Vec::new();
    for (begin, end) in all {
        match union.last_mut() {
            Some(last) if begin <= last.1 => last.1 = last.1.max(end),
            _ => union.push((begin, end)),
        }
    }
    union
}

fn length(union: &[(f64, f64)]) -> f64 {
    union.iter().map(|(begin, end)| end - begin).sum()
}

/// The time that is in both unions.
fn common(a: &[(f64, f64)], b: &[(f64, f64)]) -> f64 {
    let (mut left, mut right, mut sum) = (0, 0, 0.0);
    while let (Some(first), Some(second)) = (a.get(left), b.get(right)) {
        sum += (first.1.min(second.1) - first.0.max(second.0)).max(0.0);
        if first.1 <= second.1 { left += 1 } else { right += 1 }
    }
    sum
}

/// One long pass.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// `device` or `host`.
    pub clock: &'static str,
    /// The number of the pass, from 1.
    pub pass: u64,
    /// What a buffer holds, and how many there are.
    pub unit: &'static str,
    /// How many buffers there are.
    pub buffers: usize,
    /// Tokens of its first block.
    pub tokens: u64,
    /// Blocks whose experts were brought.
    pub blocks: usize,
    /// Bytes from RAM.
    pub ram_bytes: u64,
    /// Bytes that were copied on the device.
    pub device_bytes: u64,
    /// The fillings of buffers.
    pub copies: Vec<Interval>,
    /// The work.
    pub computes: Vec<Interval>,
}

impl Timeline {
    /// The line.
    pub fn json(&self, device: &str) -> String {
        let overlap = Overlap::of(&self.copies, &self.computes);
        let mut line = Object::new();
        line.number("format", 1).text("device", device).number("pass", self.pass).text("clock", self.clock);
        line.text("unit", self.unit).number("buffers", self.buffers as u64).number("tokens", self.tokens);
        line.number("blocks", self.blocks as u64).number("ram_bytes", self.ram_bytes);
        line.number("device_bytes", self.device_bytes);
        line.value("copies", Some(&listed(&self.copies))).value("computes", Some(&listed(&self.computes)));
        line.real("span_us", Some(overlap.span), 1).real("copy_us", Some(overlap.copy), 1);
        line.real("compute_us", Some(overlap.compute), 1).real("both_us", Some(overlap.both), 1);
        line.real("idle_us", Some(overlap.idle), 1).real("overlap_percent", overlap.percent(), 1);
        line.end()
    }

    /// Appends the line to a file.
    pub fn append(&self, device: &str, path: &Path) -> std::io::Result<()> {
        let mut options = std::fs::OpenOptions::new();
        let mut file = options.append(true).create(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        // The host must not wait for somebody who reads, and a reader that is gone would end it by a signal.
        if file.metadata()?.file_type().is_fifo() {
            return Err(std::io::Error::other("it is a pipe; name a file"));
        }
        // One call, so that lines of several devices do not mix.
        file.write_all(format!("{}\n", self.json(device)).as_bytes())
    }
}

fn listed(intervals: &[Interval]) -> String {
    let mut list = String::from("[");
    for (number, Interval { block, part, begin_us, end_us }) in intervals.iter().enumerate() {
        let comma = if number > 0 { "," } else { "" };
        // Writing to a String cannot fail.
        let _ = write!(list, "{comma}[{block},{part},{begin_us:.1},{end_us:.1}]");
    }
    list + "]"
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn interval((begin, length): (u16, u16)) -> Interval {
        Interval { block: 0, part: 0, begin_us: f64::from(begin), end_us: f64::from(begin) + f64::from(length) }
    }

    fn intervals(raw: &[(u16, u16)]) -> Vec<Interval> {
        raw.iter().copied().map(interval).collect()
    }

    #[test]
    fn a_pass_by_hand() {
        let copies = intervals(&[(0, 40), (40, 40), (100, 20)]);
        let computes = intervals(&[(40, 50), (110, 20)]);
        let overlap = Overlap::of(&copies, &computes);
        assert_eq!(overlap, Overlap { span: 130.0, copy: 100.0, compute: 70.0, both: 50.0, idle: 10.0 });
        assert!((overlap.percent().unwrap() - 100.0 * 50.0 / 70.0).abs() < 1e-9);
        assert_eq!(Overlap::of(&copies, &[]).percent(), None);
        assert_eq!(Overlap::of(&[], &[]), Overlap::default());
    }

    #[test]
    fn the_line_is_json() {
        let timeline = Timeline {
            clock: "host",
            pass: 2,
            unit: "tensor",
            buffers: 3,
            tokens: 512,
            blocks: 1,
            ram_bytes: 7,
            device_bytes: 8,
            copies: intervals(&[(0, 10)]),
            computes: vec![Interval { block: -1, part: 0, begin_us: 2.25, end_us: 5.0 }],
        };
        let line = timeline.json("MoE0");
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert!(!line.contains('\n'));
        assert_eq!(value["computes"][0][0], -1);
        assert_eq!((&value["span_us"], &value["overlap_percent"]), (&10.0.into(), &100.0.into()));
        assert_eq!((&value["unit"], &value["device_bytes"]), (&"tensor".into(), &8.into()));
    }

    #[test]
    fn what_lies_there_is_kept_and_no_pipe_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let (file, pipe) = (folder.path().join("file"), folder.path().join("pipe"));
        std::fs::write(&file, "before\n").unwrap();
        let timeline = Timeline {
            clock: "host",
            pass: 1,
            unit: "layer",
            buffers: 2,
            tokens: 9,
            blocks: 1,
            ram_bytes: 1,
            device_bytes: 0,
            copies: Vec::new(),
            computes: Vec::new(),
        };
        timeline.append("MoE0", &file).unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        assert_eq!((text.lines().next(), text.lines().count()), (Some("before"), 2));
        assert!(timeline.append("MoE0", folder.path()).is_err());
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        assert!(timeline.append("MoE0", &pipe).is_err(), "nobody reads it");
        let mut options = std::fs::OpenOptions::new();
        let _reader = options.read(true).custom_flags(libc::O_NONBLOCK).open(&pipe).unwrap();
        assert!(timeline.append("MoE0", &pipe).unwrap_err().to_string().contains("name a file"));
    }

    proptest! {
        /// Beside a count of every microsecond.
        #[test]
        fn as_counted(copies in proptest::collection::vec((0_u16..200, 0_u16..60), 0..12),
                      computes in proptest::collection::vec((0_u16..200, 0_u16..60), 0..12)) {
            let overlap = Overlap::of(&intervals(&copies), &intervals(&computes));
            let covers = |raw: &[(u16, u16)], at: u16| raw.iter().any(|(begin, length)| (*begin..begin + length).contains(&at));
            let count = |test: &dyn Fn(u16) -> bool| f64::from(u16::try_from((0..300).filter(|at| test(*at)).count()).unwrap());
            let ends = copies.iter().chain(&computes).filter(|(_, length)| *length > 0).map(|(begin, length)| begin + length);
            let span = ends.max().unwrap_or(0);
            prop_assert_eq!(overlap.span, f64::from(span));
            prop_assert_eq!(overlap.copy, count(&|at| covers(&copies, at)));
            prop_assert_eq!(overlap.compute, count(&|at| covers(&computes, at)));
            prop_assert_eq!(overlap.both, count(&|at| covers(&copies, at) && covers(&computes, at)));
            prop_assert_eq!(overlap.idle, count(&|at| at < span && !covers(&copies, at) && !covers(&computes, at)));
            prop_assert!(overlap.percent().is_none_or(|percent| (0.0..=100.0 + 1e-9).contains(&percent)));
            // The order does not matter.
            let backwards: Vec<_> = copies.iter().rev().copied().collect();
            prop_assert_eq!(Overlap::of(&intervals(&backwards), &intervals(&computes)), overlap);
        }
    }
}
