//! Timelines: lanes above each other on one axis of time, each with the intervals in which something ran.
//!
//! Owns: their drawing, with the colours and texts of the other charts.
//! Invariants: an interval that has no length is left out; what overlaps in a lane is drawn one over the other.
//! Threads: none. Does not: know what ran.

use std::fmt::Write as _;

use super::{COLOURS, LEFT, TOP, axis, number, page, text, ticks};

/// What one thing did.
#[derive(Clone, Debug, PartialEq)]
pub struct Lane {
    /// Its name.
    pub name: String,
    /// When it ran: begin and end.
    pub intervals: Vec<(f64, f64)>,
}

/// One axis of time.
#[derive(Clone, Debug, PartialEq)]
pub struct LanePanel {
    /// What stands above it.
    pub title: String,
    /// From when to when.
    pub span: (f64, f64),
    /// The lanes; the n-th has the n-th colour.
    pub lanes: Vec<Lane>,
}

/// A picture.
#[derive(Clone, Debug, PartialEq)]
pub struct Lanes {
    /// The heading.
    pub title: String,
    /// What goes to the right.
    pub across: String,
    /// The panels, below each other.
    pub panels: Vec<LanePanel>,
}

const WIDTH: f64 = 1100.0;
const NAMES: f64 = 90.0;
const LANE: f64 = 26.0;
const BELOW: f64 = 56.0;

impl LanePanel {
    fn height(&self) -> f64 {
        LANE * self.lanes.len() as f64
    }

    fn draw(&self, out: &mut String, top: f64) {
        let left = LEFT + NAMES;
        let (begin, end) = self.span;
        let (length, step) = (end - begin, axis(end - begin).1);
        text(out, (LEFT, top - 12.0), "start", 12.0, &self.title);
        if !(length.is_finite() && length > 0.0) {
            return;
        }
        let x_at = |time: f64| left + WIDTH * ((time - begin) / length).clamp(0.0, 1.0);
        // Ticks at round numbers.
        let first = (begin / step).ceil() * step;
        for tick in ticks(length, step).map(|tick| first + tick).filter(|tick| *tick <= end) {
            let x = x_at(tick);
            let _ = writeln!(out, "<path d=\"M{x:.1} {top:.1}v{:.1}\" stroke=\"#dddddd\"/>", self.height());
            text(out, (x, top + self.height() + 16.0), "middle", 11.0, &number(tick));
        }
        for ((index, lane), colour) in self.lanes.iter().enumerate().zip(COLOURS.iter().cycle()) {
            let y = top + LANE * index as f64;
            text(out, (left - 8.0, y + LANE * 0.65), "end", 12.0, &lane.name);
            for &(from, to) in lane.intervals.iter().filter(|(from, to)| to > from && *to > begin && *from < end) {
                let x = x_at(from);
                // A line between neighbours, where there is room for one.
                let width = (x_at(to) - x - 0.4).max(0.3);
                let _ = writeln!(
                    out,
                    "<rect x=\"{x:.2}\" y=\"{:.1}\" width=\"{width:.2}\" height=\"{:.1}\" fill=\"{colour}\"/>",
                    y + 3.0,
                    LANE - 6.0
                );
            }
        }
        let _ = writeln!(
            out,
            "<path d=\"M{left:.1} {top:.1}v{:.1}h{WIDTH}\" fill=\"none\" stroke=\"#555555\"/>",
            self.height()
        );
    }
}

impl Lanes {
    /// The picture as text.
    pub fn svg(&self) -> String {
        let heights: f64 = self.panels.iter().map(|panel| panel.height() + BELOW).sum();
        let mut out = page((LEFT + NAMES + WIDTH + 24.0, TOP + heights + 20.0), &self.title);
        let mut top = TOP;
        for panel in &self.panels {
            panel.draw(&mut out, top);
            top += panel.height() + BELOW;
        }
        text(&mut out, (LEFT + NAMES + WIDTH / 2.0, top - BELOW + 38.0), "middle", 12.0, &self.across);
        out.push_str("</svg>\n");
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_have_their_places() {
        let lane = |name: &str, intervals: &[(f64, f64)]| Lane { name: name.into(), intervals: intervals.to_vec() };
        let lanes = vec![lane("copy", &[(0.0, 5.0), (5.0, 5.0), (f64::NAN, 1.0)]), lane("<idle>", &[(7.5, 20.0)])];
        let panel = LanePanel { title: "all".into(), span: (0.0, 10.0), lanes };
        let empty = LanePanel { title: "nothing".into(), span: (1.0, 1.0), lanes: Vec::new() };
        let svg = Lanes { title: "t & u".into(), across: "ms".into(), panels: vec![panel, empty] }.svg();
        assert_eq!(svg.matches("<rect x=").count(), 2, "{svg}");
        assert!(svg.contains("&lt;idle&gt;") && svg.contains("t &amp; u") && !svg.contains("NaN"));
        let widths: Vec<f64> = svg
            .split("<rect x=")
            .skip(1)
            .filter_map(|rest| rest.split("width=\"").nth(1)?.split('"').next()?.parse().ok())
            .collect();
        assert!((widths[0] - 549.6).abs() < 0.1 && (widths[1] - 274.6).abs() < 0.1, "{widths:?}: cut at the end");
    }
}
