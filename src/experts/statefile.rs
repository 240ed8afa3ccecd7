//! The text of `moe-state.ini`: what was learned about models.
//!
//! Owns: the format, its reading and writing, and the merging of two states. Pure: text to struct and back.
//!
//! ```text
//! format = 1
//!
//! [model 8f3a09c2d4e5b617]
//! stamp = 1790000000
//! tokens = 51234
//! heat.blk.0.ffn_gate_exps.weight = 812 0 33 1250
//! ```
//!
//! A section is a model, named by its identity. `stamp` says when it was last used, in seconds; `tokens` how many tokens its heat
//! rests on; `heat.NAME` has one number per expert of the group that begins with the tensor NAME: uses per 10,000 tokens. `#` and `;`
//! begin comments, which are not kept.
//!
//! Invariants: unknown keys and sections are kept in place and written back. A file of a later format is refused as such. Size is bounded
//! by [`MOST_MODELS`] and [`MOST_BYTES`]: the models unused for longest go first.
//! Threads: none. Does not: open files (`statestore`), or know which group of a running model a name is.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::heat::Heat;
use super::shape::{GroupId, Shape};

/// The format that is written.
pub const FORMAT: u32 = 1;
/// Models that a file keeps.
pub const MOST_MODELS: usize = 64;
/// Bytes that a file may have.
pub const MOST_BYTES: usize = 16 << 20;
/// Experts that one group may have.
const MOST_EXPERTS: usize = 1 << 16;
/// Tokens that count when two states are merged: what fading converges to ([`Heat::most_tokens`]).
const MOST_WEIGHT: u64 = 23_637;
/// What a rate of one use per token is written as.
const SCALE: f32 = 10_000.0;
/// The largest rate: far above any real one.
const LARGEST: u32 = 10_000_000;

/// What is known of one model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelState {
    /// When it was last used, seconds since 1970.
    pub stamp: u64,
    /// Tokens that the heat rests on.
    pub tokens: u64,
    /// Uses per 10,000 tokens, for each group by the name of its first tensor.
    pub heat: BTreeMap<String, Vec<u32>>,
    /// Keys that this release does not know.
    pub other: Vec<(String, String)>,
}

/// The content of a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    /// By identity.
    pub models: BTreeMap<String, ModelState>,
    /// Keys before the first section that this release does not know.
    pub other: Vec<(String, String)>,
    /// Sections that this release does not know: heading and keys.
    pub sections: Vec<(String, Vec<(String, String)>)>,
}

/// Why a text is no state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// A line that cannot be understood.
    #[error("line {line}: {what}")]
    Line {
        /// Its number, from 1.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
    /// Written by a later release: to be left alone.
    #[error("line {line}: format {format} is newer than this release, which knows {FORMAT}")]
    Newer {
        /// The line that says so.
        line: usize,
        /// The format.
        format: u32,
    },
    /// Longer than any file of ours.
    #[error("{bytes} bytes are more than the {MOST_BYTES} of a state file")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
}

/// A rate as it is written.
pub fn written(rate: f32) -> u32 {
    let scaled = (rate * SCALE).round().clamp(0.0, LARGEST as f32);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped; NaN becomes 0")]
    let scaled = scaled as u32;
    scaled
}

/// A rate as it was before it was written.
pub fn rate(written: u32) -> f32 {
    written as f32 / SCALE
}

impl ModelState {
    /// The state that a table of heat amounts to. `groups` names each group of the shape by its first tensor.
    pub fn from_heat(heat: &Heat, shape: &Shape, groups: &[String], stamp: u64) -> Self {
        let rates = (0..).map(GroupId).zip(groups).map(|(group, name)| {
            let rates = shape.blocks_of(group).map(|block| written(heat.rate(block))).collect();
            (name.clone(), rates)
        });
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a number of tokens, not negative")]
        let tokens = heat.tokens().round() as u64;
        Self { stamp, tokens, heat: rates.collect(), other: Vec::new() }
    }

    /// The table that this state gives a model. A group that is not in it, or has another number of experts, begins cold.
    pub fn to_heat(&self, shape: &Shape, groups: &[String]) -> Heat {
        let mut rates = vec![0.0; shape.blocks()];
        for (group, name) in (0..).map(GroupId).zip(groups) {
            let known = self.heat.get(name).filter(|known| known.len() == shape.blocks_of(group).count());
            for (block, &known) in shape.blocks_of(group).zip(known.into_iter().flatten()) {
                rates[block.index()] = rate(known);
            }
        }
        Heat::from_rates(rates, self.tokens as f64)
    }

    /// Adds what another state saw. Rates are averaged by tokens, of which no more count than a table of heat can rest on, so that what is
    /// new stays visible in a file that has seen a lot; a group whose number of experts differs is taken from the state that
    /// saw more tokens.
    pub fn merge(&mut self, other: &Self) {
        let (mine, theirs) = (self.tokens, other.tokens);
        for (name, rates) in &other.heat {
            match self.heat.get_mut(name) {
                Some(own) if own.len() == rates.len() => {
                    let (mine, theirs) = (mine.min(MOST_WEIGHT), theirs.min(MOST_WEIGHT));
                    own.iter_mut().zip(rates).for_each(|(own, &rate)| *own = average((*own, mine), (rate, theirs)));
                }
                Some(own) => {
                    if theirs > mine {
                        own.clone_from(rates);
                    }
                }
                None => {
                    self.heat.insert(name.clone(), rates.clone());
                }
            }
        }
        self.tokens = mine.saturating_add(theirs);
        self.stamp = self.stamp.max(other.stamp);
        keep_unknown(&mut self.other, &other.other);
    }
}

fn average((a, a_weight): (u32, u64), (b, b_weight): (u32, u64)) -> u32 {
    let sum = u128::from(a) * u128::from(a_weight) + u128::from(b) * u128::from(b_weight);
    let weight = u128::from(a_weight) + u128::from(b_weight);
    let rounded = (sum + weight / 2).checked_div(weight);
    rounded.map_or(a.max(b), |average| u32::try_from(average).unwrap_or(LARGEST))
}

fn keep_unknown(own: &mut Vec<(String, String)>, other: &[(String, String)]) {
    for (key, value) in other {
        if !own.iter().any(|(known, _)| known == key) {
            own.push((key.clone(), value.clone()));
        }
    }
}

impl State {
    /// Reads a text.
    pub fn parse(text: &str) -> Result<Self, StateError> {
        if text.len() > MOST_BYTES {
            return Err(StateError::TooLong { bytes: text.len() });
        }
        let mut state = Self::default();
        let mut place = Place::Top;
        for (number, line) in (1..).zip(text.lines()) {
            let line_error = |what: String| StateError::Line { line: number, what };
            let content = line.trim();
            if content.is_empty() || content.starts_with(['#', ';']) {
                continue;
            }
            if let Some(heading) = content.strip_prefix('[') {
                let heading =
                    heading.strip_suffix(']').ok_or_else(|| line_error("a heading without \"]\"".to_owned()))?;
                place = state.open(heading.trim()).map_err(line_error)?;
                continue;
            }
            let (key, value) = content
                .split_once('=')
                .ok_or_else(|| line_error("no \"key = value\" and no \"[heading]\"".to_owned()))?;
            let (key, value) = (key.trim(), value.trim());
            if key.is_empty() {
                return Err(line_error("a value without a key".to_owned()));
            }
            if matches!(place, Place::Top) && key == "format" {
                match value.parse() {
                    Ok(FORMAT) => {}
                    Ok(format) if format > FORMAT => return Err(StateError::Newer { line: number, format }),
                    _ => return Err(line_error("format is not a number from 1".to_owned())),
                }
                continue;
            }
            state.put(&place, key, value).map_err(line_error)?;
        }
        Ok(state)
    }

    fn open(&mut self, heading: &str) -> Result<Place, String> {
        match heading.split_once(char::is_whitespace).map(|(word, rest)| (word, rest.trim())) {
            Some(("model", identity)) => {
                if self.models.contains_key(identity) {
                    return Err(format!("model {} stands twice", crate::config::shown(identity)));
                }
                if self.models.len() >= MOST_MODELS {
                    return Err(format!("more than {MOST_MODELS} models"));
                }
                self.models.insert(identity.to_owned(), ModelState::default());
                Ok(Place::Model(identity.to_owned()))
            }
            _ if heading.is_empty() => Err("an empty heading".to_owned()),
            _ if heading == "model" => Err("a model without identity".to_owned()),
            _ => {
                self.sections.push((heading.to_owned(), Vec::new()));
                Ok(Place::Unknown)
            }
        }
    }

    fn put(&mut self, place: &Place, key: &str, value: &str) -> Result<(), String> {
        let pair = || (key.to_owned(), value.to_owned());
        let number = |value: &str| value.parse().map_err(|_| format!("{} is no number", crate::config::shown(key)));
        match place {
            Place::Top => self.other.push(pair()),
            Place::Unknown => {
                if let Some((_, keys)) = self.sections.last_mut() {
                    keys.push(pair());
                }
            }
            Place::Model(identity) => {
                let Some(model) = self.models.get_mut(identity) else { return Ok(()) };
                match key {
                    "stamp" => model.stamp = number(value)?,
                    "tokens" => model.tokens = number(value)?,
                    _ => match key.strip_prefix("heat.").filter(|name| !name.is_empty()) {
                        Some(name) => {
                            if model.heat.insert(name.to_owned(), rates(value)?).is_some() {
                                return Err(format!("heat.{} stands twice", crate::config::shown(name)));
                            }
                        }
                        None => model.other.push(pair()),
                    },
                }
            }
        }
        Ok(())
    }

    /// The text. If it would be too long, the models unused for longest are left out.
    pub fn format(&self) -> String {
        let mut out = format!(
            "# What ggml-moe learned about models. Deleting this file loses nothing else.\nformat = {FORMAT}\n"
        );
        write_pairs(&mut out, &self.other);
        let mut order: Vec<(&String, &ModelState)> = self.models.iter().collect();
        order.sort_by(|a, b| b.1.stamp.cmp(&a.1.stamp).then_with(|| a.0.cmp(b.0)));
        let mut unknown = String::new();
        for (heading, pairs) in &self.sections {
            let _ = writeln!(unknown, "\n[{heading}]");
            write_pairs(&mut unknown, pairs);
        }
        order.retain(|(identity, _)| fits_a_line(identity));
        for (identity, model) in order.into_iter().take(MOST_MODELS) {
            let text = model_text(identity, model);
            if out.len() + unknown.len() + text.len() <= MOST_BYTES {
                out.push_str(&text);
            }
        }
        out.push_str(&unknown);
        out
    }

    /// Adds what another state saw.
    pub fn merge(&mut self, other: &Self) {
        for (identity, model) in &other.models {
            self.models.entry(identity.clone()).or_default().merge(model);
        }
        keep_unknown(&mut self.other, &other.other);
        for (heading, pairs) in &other.sections {
            match self.sections.iter_mut().find(|(known, _)| known == heading) {
                Some((_, own)) => keep_unknown(own, pairs),
                None => self.sections.push((heading.clone(), pairs.clone())),
            }
        }
    }
}

/// Where a line belongs.
enum Place {
    Top,
    Model(String),
    Unknown,
}

fn rates(value: &str) -> Result<Vec<u32>, String> {
    let mut rates = Vec::new();
    for word in value.split_ascii_whitespace() {
        let rate = word.parse().ok().filter(|rate| *rate <= LARGEST);
        rates.push(rate.ok_or_else(|| format!("{} is no rate from 0 to {LARGEST}", crate::config::shown(word)))?);
        if rates.len() > MOST_EXPERTS {
            return Err(format!("more than {MOST_EXPERTS} experts"));
        }
    }
    Ok(rates)
}

fn write_pairs(out: &mut String, pairs: &[(String, String)]) {
    for (key, value) in pairs {
        let _ = writeln!(out, "{key} = {value}");
    }
}

/// Whether a name can be read back: names come from model files, which may hold anything.
fn fits_a_line(name: &str) -> bool {
    let plain = |c: char| !c.is_control() && !c.is_whitespace() && !matches!(c, '=' | '[' | ']');
    !name.is_empty() && name.chars().all(plain)
}

fn model_text(identity: &str, model: &ModelState) -> String {
    let mut out = format!("\n[model {identity}]\nstamp = {}\ntokens = {}\n", model.stamp, model.tokens);
    for (name, rates) in model.heat.iter().filter(|(name, _)| fits_a_line(name)) {
        let _ = write!(out, "heat.{name} =");
        rates.iter().for_each(|rate| out.push_str(&format!(" {rate}")));
        out.push('\n');
    }
    write_pairs(&mut out, &model.other);
    out
}

#[cfg(test)]
mod tests;
