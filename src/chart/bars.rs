//! Bar charts: groups of bars beside each other, each with the range of its figures.
//!
//! Owns: their drawing, with the axes, colours and texts of the other charts.
//! Threads: none. Does not: know what is drawn.

use std::fmt::Write as _;

use super::{COLOURS, GAP, HEIGHT, LEFT, TOP, WIDTH, axis, legend, number, page, text, ticks};

/// One bar.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bar {
    /// Its height.
    pub value: f64,
    /// The lowest and the highest of the figures behind it.
    pub range: (f64, f64),
}

/// Bars that belong together, one for each name of the legend.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// What stands below them, in lines.
    pub name: String,
    /// What stands above them.
    pub note: String,
    /// The bars; `None` where there is no figure.
    pub bars: Vec<Option<Bar>>,
}

/// One axis with groups.
#[derive(Clone, Debug, PartialEq)]
pub struct BarPanel {
    /// What goes upwards.
    pub title: String,
    /// The groups.
    pub groups: Vec<Group>,
}

/// A picture.
#[derive(Clone, Debug, PartialEq)]
pub struct BarChart {
    /// The heading.
    pub title: String,
    /// The legend: one colour each.
    pub names: Vec<String>,
    /// The panels.
    pub panels: Vec<BarPanel>,
}

impl BarChart {
    /// The picture as text.
    pub fn svg(&self) -> String {
        let panels = self.panels.len().max(1) as f64;
        let mut out = page((LEFT + panels * (WIDTH + GAP) - GAP + 24.0, TOP + HEIGHT + 78.0), &self.title);
        let mut left = LEFT;
        for panel in &self.panels {
            panel.draw(&mut out, left);
            left += WIDTH + GAP;
        }
        legend(&mut out, 9.0, self.names.iter().map(String::as_str));
        out.push_str("</svg>\n");
        out
    }
}

impl BarPanel {
    fn draw(&self, out: &mut String, left: f64) {
        let bars = || self.groups.iter().flat_map(|group| group.bars.iter().flatten());
        let heights = bars().flat_map(|bar| [bar.value, bar.range.1]).filter(|value| value.is_finite());
        // Room for the note above the highest bar.
        let (top_most, step) = axis(1.05 * heights.fold(0.0, f64::max));
        let y_at = |value: f64| TOP + HEIGHT * (1.0 - value.clamp(0.0, top_most) / top_most);
        text(out, (left, TOP - 12.0), "start", 12.0, &self.title);
        for value in ticks(top_most, step) {
            let y = y_at(value);
            let _ = writeln!(out, "<path d=\"M{left:.1} {y:.1}h{WIDTH}\" stroke=\"#dddddd\"/>");
            text(out, (left - 7.0, y + 4.0), "end", 11.0, &number(value));
        }
        let room = WIDTH / self.groups.len().max(1) as f64;
        for (index, group) in self.groups.iter().enumerate() {
            let start = left + room * (index as f64 + 0.15);
            let width = 0.7 * room / group.bars.len().max(1) as f64;
            let mut highest = 0.0_f64;
            for (place, (bar, colour)) in group.bars.iter().zip(COLOURS.iter().cycle()).enumerate() {
                let Some(bar) = bar.filter(|bar| bar.value.is_finite()) else { continue };
                let (x, y) = (start + width * place as f64, y_at(bar.value));
                let _ = writeln!(
                    out,
                    "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{colour}\"/>",
                    width * 0.92,
                    TOP + HEIGHT - y
                );
                highest = highest.max(bar.value);
                let (low, high) = bar.range;
                if low.is_finite() && high.is_finite() {
                    let middle = x + width * 0.46;
                    let _ = writeln!(
                        out,
                        "<path d=\"M{middle:.1} {:.1}V{:.1}\" stroke=\"#222222\" stroke-width=\"1.5\"/>",
                        y_at(low),
                        y_at(high)
                    );
                    highest = highest.max(high);
                }
            }
            let middle = start + 0.35 * room;
            text(out, (middle, y_at(highest) - 6.0), "middle", 12.0, &group.note);
            for (line, words) in group.name.lines().enumerate() {
                text(out, (middle, TOP + HEIGHT + 18.0 + 15.0 * line as f64), "middle", 11.0, words);
            }
        }
        let _ = writeln!(out, "<path d=\"M{left:.1} {TOP}v{HEIGHT}h{WIDTH}\" fill=\"none\" stroke=\"#555555\"/>");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_have_their_heights() {
        let bar = |value: f64| Some(Bar { value, range: (value * 0.9, value * 1.1) });
        let group = |name: &str, bars: Vec<Option<Bar>>| Group { name: name.into(), note: "2.0x".into(), bars };
        let chart = BarChart {
            title: "a < b".into(),
            names: vec!["stock".into(), "ours".into()],
            panels: vec![BarPanel {
                title: "t/s".into(),
                groups: vec![group("tg1\n20%", vec![bar(50.0), bar(100.0)]), group("45%", vec![None, bar(f64::NAN)])],
            }],
        };
        let svg = chart.svg();
        assert_eq!(svg.matches("<rect x=").count(), 2, "{svg}");
        assert!(
            svg.contains("a &lt; b")
                && svg.contains(">20%<")
                && svg.contains(">tg1<")
                && svg.contains("2.0x")
                && !svg.contains("NaN")
        );
        let heights: Vec<f64> = svg
            .split("height=\"")
            .skip(3)
            .filter_map(|rest| rest.split_once('"').and_then(|(number, _)| number.parse().ok()))
            .collect();
        assert!((heights[1] / heights[0] - 2.0).abs() < 0.01, "{heights:?}");
    }
}
