//! Synthetic routing: which experts a token uses, with the locality that was measured on real models.
//!
//! Owns: the presets and the model. For each layer, token t and expert e
//!
//! ```text
//! logit = -skew * ln(rank of e) + slow_weight * A(t) + fast_weight * B(t) + Gumbel noise
//! ```
//!
//! where A and B are autoregressive processes of unit variance with one coefficient each, the ranks are a random order per
//! layer, and a token uses the experts of the largest logits. [`Redraw`] changes ranks, or ranks and A, in the middle: a change
//! of subject.
//! Invariants: without a redraw, preset, layers and seed give the same experts as the Python model that the presets were
//! calibrated with (tests/fixtures/routing has a trace of it).
//! Threads: none. Does not: model dependence between layers, so it cannot judge predictors that look across layers.

use super::random::Random;
use super::trace::Trace;

/// Parameters of the model for one kind of language model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Preset {
    /// The name on the command line.
    pub name: &'static str,
    /// Experts per layer.
    pub experts: u16,
    /// Experts per token and layer.
    pub used: u16,
    /// Layers of the language model.
    pub layers: u16,
    /// How much more often low ranks are used.
    pub skew: f64,
    /// Weight and coefficient of the slow process.
    pub slow: (f64, f64),
    /// Weight and coefficient of the fast process.
    pub fast: (f64, f64),
}

/// Every preset.
pub const PRESETS: &[Preset] = &[
    preset("qwen3-30b", (128, 8, 48), 0.47, (3.32, 0.9970), (2.07, 0.34)),
    preset("gemma4-26b", (128, 8, 30), 1.04, (3.38, 0.9961), (2.63, 0.31)),
    preset("gpt-oss", (128, 4, 36), 0.57, (3.31, 0.9902), (2.06, 0.17)),
    preset("qwen3.8-next", (512, 10, 48), 1.23, (2.11, 0.9979), (2.18, 0.26)),
    preset("frequency", (256, 8, 43), 1.0, (0.0, 0.0), (0.0, 0.0)),
    preset("uniform", (128, 8, 48), 0.0, (0.0, 0.0), (0.0, 0.0)),
];

const fn preset(
    name: &'static str,
    (experts, used, layers): (u16, u16, u16),
    skew: f64,
    slow: (f64, f64),
    fast: (f64, f64),
) -> Preset {
    Preset { name, experts, used, layers, skew, slow, fast }
}

/// What is drawn again in the middle of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Redraw {
    /// The ranks.
    Ranks,
    /// The ranks and the slow process.
    All,
}

/// The routing of a number of tokens.
#[derive(Clone, Debug)]
pub struct Routing {
    preset: Preset,
    layers: usize,
    random: Random,
    base: Vec<f64>,
    slow: Vec<f64>,
    fast: Vec<f64>,
    logits: Vec<(f64, u16)>,
}

impl Routing {
    /// A stream of tokens.
    pub fn new(preset: &Preset, layers: u16, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let layers = usize::from(layers);
        let count = layers * usize::from(preset.experts);
        let base = ranks(preset, layers, &mut random);
        let slow = (0..count).map(|_| random.normal()).collect();
        let fast = (0..count).map(|_| random.normal()).collect();
        Self { preset: *preset, layers, random, base, slow, fast, logits: Vec::with_capacity(preset.experts.into()) }
    }

    /// Appends one token's experts, layer by layer.
    pub fn token(&mut self, ids: &mut Vec<u16>) {
        let (experts, used) = (usize::from(self.preset.experts), usize::from(self.preset.used));
        let (slow_weight, fast_weight) = (self.preset.slow.0, self.preset.fast.0);
        advance(&mut self.slow, self.preset.slow.1, &mut self.random);
        advance(&mut self.fast, self.preset.fast.1, &mut self.random);
        for layer in 0..self.layers {
            let at = layer * experts;
            self.logits.clear();
            for (expert, id) in (at..at + experts).zip(0_u16..) {
                let logit = self.base[expert]
                    + slow_weight * self.slow[expert]
                    + fast_weight * self.fast[expert]
                    + self.random.gumbel();
                self.logits.push((logit, id));
            }
            if used < experts {
                self.logits.select_nth_unstable_by(used - 1, |a, b| b.0.total_cmp(&a.0));
            }
            ids.extend(self.logits[..used].iter().map(|&(_, id)| id));
        }
    }

    /// Draws a part of the state again.
    pub fn redraw(&mut self, what: Redraw) {
        self.base = ranks(&self.preset, self.layers, &mut self.random);
        if what == Redraw::All {
            let random = &mut self.random;
            self.slow.iter_mut().for_each(|value| *value = random.normal());
        }
    }
}

fn ranks(preset: &Preset, layers: usize, random: &mut Random) -> Vec<f64> {
    (0..layers)
        .flat_map(|_| random.permutation(preset.experts.into()))
        .map(|rank| -preset.skew * (f64::from(rank) + 1.0).ln())
        .collect()
}

fn advance(process: &mut [f64], coefficient: f64, random: &mut Random) {
    let rest = (1.0 - coefficient * coefficient).sqrt();
    for value in process {
        *value = coefficient * *value + rest * random.normal();
    }
}

/// A whole trace. `redraw` names a token and what is drawn again before it.
pub fn trace(preset: &Preset, tokens: usize, layers: u16, seed: u64, redraw: Option<(usize, Redraw)>) -> Trace {
    let mut routing = Routing::new(preset, layers, seed);
    let mut ids = Vec::with_capacity(tokens * usize::from(layers) * usize::from(preset.used));
    for token in 0..tokens {
        if let Some((_, what)) = redraw.filter(|&(at, _)| at == token) {
            routing.redraw(what);
        }
        routing.token(&mut ids);
    }
    Trace::from_parts(ids, layers.into(), preset.used.into(), preset.experts.into())
}
