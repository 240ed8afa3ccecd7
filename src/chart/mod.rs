//! Charts as SVG.
//!
//! Owns: the drawing: lines here, bars in `bars`, timelines in `lanes`; panels side by side with a common legend, axes from 0 with round steps, colours that
//! differ in brightness, too.
//! Invariants: every text is escaped; numbers that are not finite are left out.
//! Threads: none. Does not: know what is drawn.

mod bars;
mod lanes;

use std::fmt::Write as _;

pub use bars::{Bar, BarChart, BarPanel, Group};
pub use lanes::{Lane, LanePanel, Lanes};

/// One line.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// Its name in the legend.
    pub name: String,
    /// Points from left to right.
    pub points: Vec<(f64, f64)>,
}

/// One pair of axes.
#[derive(Clone, Debug, PartialEq)]
pub struct Panel {
    /// What goes upwards.
    pub title: String,
    /// Its lines; lines of one name have one colour in all panels.
    pub lines: Vec<Line>,
}

/// A picture.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// The heading.
    pub title: String,
    /// What goes to the right.
    pub across: String,
    /// The panels.
    pub panels: Vec<Panel>,
}

const COLOURS: [&str; 6] = ["#0b5394", "#e69138", "#38761d", "#990000", "#674ea7", "#000000"];
const WIDTH: f64 = 360.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 52.0;
const TOP: f64 = 58.0;
const GAP: f64 = 62.0;

impl Chart {
    /// The picture as text.
    pub fn svg(&self) -> String {
        let panels = self.panels.len().max(1) as f64;
        let mut out = page((LEFT + panels * (WIDTH + GAP) - GAP + 24.0, TOP + HEIGHT + 78.0), &self.title);
        let mut left = LEFT;
        for panel in &self.panels {
            panel.draw(&mut out, left);
            text(&mut out, (left + WIDTH / 2.0, TOP + HEIGHT + 38.0), "middle", 12.0, &self.across);
            left += WIDTH + GAP;
        }
        let lines = self.panels.first().map_or(&[][..], |panel| &panel.lines);
        legend(&mut out, 2.5, lines.iter().map(|line| line.name.as_str()));
        out.push_str("</svg>\n");
        out
    }
}

impl Panel {
    fn draw(&self, out: &mut String, left: f64) {
        let points = || self.lines.iter().flat_map(|line| &line.points).filter(|(x, y)| x.is_finite() && y.is_finite());
        let (right_most, x_step) = axis(points().map(|&(x, _)| x).fold(0.0, f64::max));
        let (top_most, y_step) = axis(points().map(|&(_, y)| y).fold(0.0, f64::max));
        let x_at = |x: f64| left + WIDTH * x / right_most;
        let y_at = |y: f64| TOP + HEIGHT * (1.0 - y / top_most);
        text(out, (left, TOP - 12.0), "start", 12.0, &self.title);
        for value in ticks(top_most, y_step) {
            let y = y_at(value);
            let _ = writeln!(out, "<path d=\"M{left:.1} {y:.1}h{WIDTH}\" stroke=\"#dddddd\"/>");
            text(out, (left - 7.0, y + 4.0), "end", 11.0, &number(value));
        }
        for value in ticks(right_most, x_step) {
            text(out, (x_at(value), TOP + HEIGHT + 18.0), "middle", 11.0, &number(value));
        }
        let _ = writeln!(out, "<path d=\"M{left:.1} {TOP}v{HEIGHT}h{WIDTH}\" fill=\"none\" stroke=\"#555555\"/>");
        for (line, colour) in self.lines.iter().zip(COLOURS.iter().cycle()) {
            let places: Vec<(f64, f64)> = line
                .points
                .iter()
                .filter(|(x, y)| x.is_finite() && y.is_finite())
                .map(|&(x, y)| (x_at(x), y_at(y)))
                .collect();
            let path: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let _ = writeln!(
                out,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2.5\"/>",
                path.join(" ")
            );
            for (x, y) in places {
                let _ = writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.2\" fill=\"{colour}\"/>");
            }
        }
    }
}

/// The beginning of a picture.
fn page((width, height): (f64, f64), title: &str) -> String {
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    text(&mut out, (LEFT, 22.0), "start", 15.0, title);
    out
}

/// What each colour means, below the panels.
fn legend<'a>(out: &mut String, stroke: f64, names: impl Iterator<Item = &'a str>) {
    let mut at = LEFT;
    for (name, colour) in names.zip(COLOURS.iter().cycle()) {
        let y = TOP + HEIGHT + 62.0;
        let _ = writeln!(out, "<path d=\"M{at:.1} {:.1}h22\" stroke=\"{colour}\" stroke-width=\"{stroke}\"/>", y - 4.0);
        text(out, (at + 28.0, y), "start", 12.0, name);
        at += 48.0 + 7.5 * name.chars().count() as f64;
    }
}

/// Where an axis ends and the distance of its ticks: 1, 2 or 5 times a power of ten, five to ten of them.
fn axis(largest: f64) -> (f64, f64) {
    if largest.is_nan() || largest <= 0.0 {
        return (1.0, 0.2);
    }
    let rough = largest / 8.0;
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].iter().map(|unit| unit * power).find(|step| *step >= rough).unwrap_or(rough);
    ((largest / step - 1e-9).ceil() * step, step)
}

fn ticks(end: f64, step: f64) -> impl Iterator<Item = f64> {
    (0..=20).map(move |tick| f64::from(tick) * step).take_while(move |value| *value <= end + step / 1000.0)
}

fn number(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn text(out: &mut String, (x, y): (f64, f64), anchor: &str, size: f64, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\" fill=\"#222222\">{words}</text>"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_round_numbers() {
        assert_eq!(axis(96.8), (100.0, 20.0));
        assert_eq!(axis(40.0), (40.0, 5.0));
        assert_eq!(axis(0.0), (1.0, 0.2));
        assert_eq!(number(0.2), "0.2");
        assert_eq!(number(100.0), "100");
        assert_eq!(ticks(1.0, 0.2).count(), 6);
    }

    #[test]
    fn a_chart_holds_every_line_and_no_foreign_markup() {
        let line = |name: &str| Line { name: name.to_owned(), points: vec![(10.0, 1.0), (f64::NAN, 2.0), (20.0, 3.0)] };
        let panel = |title: &str| Panel { title: title.to_owned(), lines: vec![line("a<b"), line("c")] };
        let chart = Chart { title: "x & y".into(), across: "share".into(), panels: vec![panel("p"), panel("q")] };
        let svg = chart.svg();
        assert_eq!(svg.matches("<polyline").count(), 4);
        assert_eq!(svg.matches("<circle").count(), 8, "the point that is no number is left out");
        assert!(svg.contains("x &amp; y") && svg.contains("a&lt;b") && !svg.contains("NaN"));
        assert_eq!(svg.matches("<svg").count(), svg.matches("</svg>").count());
    }
}
