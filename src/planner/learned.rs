//! Hits that a state file promises.
//!
//! Owns: the curve of hits over share. The file names a model by bytes of its experts, which no header has, so the model is found by the names
//! and sizes of its tables; of several that fit the one used last counts.
//! Invariants: hits grow with the share, from 0 to 1. Threads: none. Does not: read the file.

use crate::experts::statefile::{ModelState, State};
use crate::model::moe::{MoeShape, expert_layer};

/// Tokens that a table must rest on.
const LEAST_TOKENS: u64 = 256;
/// Shares at which hits are told, in percent.
const SHARES: [usize; 14] = [2, 5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 80, 90, 100];

/// The curve: pairs of share and hits. Empty if nothing is known of the model.
pub fn curve(state: &State, shape: &MoeShape) -> Vec<(f64, f64)> {
    let known = state.models.values().filter(|model| model.tokens >= LEAST_TOKENS && fits(model, shape));
    let Some(model) = known.max_by_key(|model| model.stamp) else { return Vec::new() };
    let mut rates: Vec<u64> = model.heat.values().flatten().map(|rate| u64::from(*rate)).collect();
    rates.sort_unstable_by(|one, other| other.cmp(one));
    let all: u64 = rates.iter().sum();
    let hits = |percent: usize| {
        let hottest: u64 = rates.iter().take(rates.len() * percent / 100).sum();
        (percent as f64 / 100.0, hottest as f64 / all as f64)
    };
    if all == 0 { Vec::new() } else { SHARES.into_iter().map(hits).collect() }
}

/// Whether the tables of a state are those of the model: one per layer with experts, with as many.
fn fits(model: &ModelState, shape: &MoeShape) -> bool {
    let experts_of =
        |number: u32| shape.expert_layers.iter().find(|layer| layer.layer == number).map(|layer| layer.experts);
    let is_table = |(name, rates): (&String, &Vec<u32>)| {
        expert_layer(name).and_then(experts_of).is_some_and(|experts| experts == rates.len() as u64)
    };
    model.heat.len() >= shape.expert_layers.len() && !shape.expert_layers.is_empty() && model.heat.iter().all(is_table)
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;

    fn state(layers: u32, experts: usize, stamp: u64) -> ModelState {
        // An eighth of the experts has nine tenths of the uses.
        let rates: Vec<u32> = (0..experts).map(|expert| if expert.is_multiple_of(8) { 6300 } else { 100 }).collect();
        let heat = (0..layers).map(|layer| (format!("blk.{layer}.ffn_gate_exps.weight"), rates.clone())).collect();
        ModelState { stamp, tokens: 5000, heat, ..ModelState::default() }
    }

    #[test]
    fn the_model_is_found_by_its_tables() {
        let mut known = State::default();
        known.models.insert("a".into(), state(48, 64, 9));
        known.models.insert("b".into(), state(47, 128, 9));
        let shape = samples::qwen().shape;
        assert!(curve(&known, &shape).is_empty());
        known.models.insert("c".into(), state(48, 128, 1));
        let curve = curve(&known, &shape);
        assert_eq!(curve.last(), Some(&(1.0, 1.0)));
        assert!(curve.windows(2).all(|pair| pair[0].1 <= pair[1].1));
        let tenth = curve.iter().find(|(share, _)| (share - 0.1).abs() < 1e-9).unwrap().1;
        assert!((0.7..0.75).contains(&tenth), "{tenth}");
    }
}
