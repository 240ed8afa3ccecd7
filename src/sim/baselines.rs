//! Policies to compare with: LRU, LFU, the list that is best in hindsight, Belady's rule, and whole layers.
//!
//! Owns: straightforward replays of a trace. The cache is cut into equal parts, one per layer, except for `static`, which is one list
//! over all layers. A token's experts are all looked up before any of them is touched.
//! Invariants: none of them looks ahead but `belady`, and `fixed_list` as far as it is told to.
//! Threads: none. Does not: bound uploads: these rules know no cost.

use super::series::Series;
use super::trace::Trace;

/// Replays one rule for one layer at a time. `step` gives hits and uploads of one token.
fn by_layer<S>(
    trace: &Trace,
    state: impl Fn() -> S,
    mut step: impl FnMut(&mut S, usize, usize, &[u16]) -> (usize, usize),
) -> Series {
    let mut series = Series::new(trace);
    for layer in 0..trace.layers() {
        let mut state = state();
        for token in 0..trace.tokens() {
            let used = trace.at(token, layer);
            let (hits, uploads) = step(&mut state, token, layer, used);
            series.add(token, used.len(), hits, uploads);
        }
    }
    series
}

/// Replaces the member of `held` with the least key, or fills up.
fn put(held: &mut Vec<u16>, slots: usize, expert: u16, key: impl Fn(u16) -> u64) {
    if held.len() < slots {
        held.push(expert);
    } else if let Some(at) = (0..held.len()).min_by_key(|&at| key(held[at])) {
        held[at] = expert;
    }
}

/// The least recently used expert leaves.
pub fn lru(trace: &Trace, slots: usize) -> Series {
    let state = || (vec![0_u64; trace.experts()], Vec::new());
    by_layer(trace, state, |(last, held), token, _, used| {
        let missing: Vec<u16> = used.iter().copied().filter(|expert| !held.contains(expert)).collect();
        for (&expert, order) in used.iter().zip(1_u64..) {
            last[usize::from(expert)] = (token * used.len()) as u64 + order;
        }
        for &expert in &missing {
            put(held, slots, expert, |held| last[usize::from(held)]);
        }
        (used.len() - missing.len(), missing.len())
    })
}

/// The expert that was used least often since the beginning leaves; among equals the least recently used.
pub fn lfu(trace: &Trace, slots: usize) -> Series {
    let state = || (vec![0_u64; trace.experts()], Vec::new());
    by_layer(trace, state, |(key, held), token, _, used| {
        let missing: Vec<u16> = used.iter().copied().filter(|expert| !held.contains(expert)).collect();
        for &expert in used {
            let count = (key[usize::from(expert)] >> 32) + 1;
            key[usize::from(expert)] = count << 32 | token as u64;
        }
        for &expert in &missing {
            put(held, slots, expert, |held| key[usize::from(held)]);
        }
        (used.len() - missing.len(), missing.len())
    })
}

/// Belady's rule with the choice not to bring an expert in: of those held and those used, the ones that are needed soonest stay.
pub fn belady(trace: &Trace, slots: usize) -> Series {
    // For each token and layer, when each of its experts is used again.
    let never = trace.tokens();
    let row = trace.layers() * trace.used();
    let mut again = vec![never; trace.tokens() * row];
    let mut next = vec![never; trace.layers() * trace.experts()];
    for token in (0..trace.tokens()).rev() {
        for layer in 0..trace.layers() {
            for (slot, &expert) in trace.at(token, layer).iter().enumerate() {
                let next = &mut next[layer * trace.experts() + usize::from(expert)];
                again[token * row + layer * trace.used() + slot] = std::mem::replace(next, token);
            }
        }
    }
    let state = || Vec::<(usize, u16)>::new();
    by_layer(trace, state, |held, token, layer, used| {
        let (mut hits, mut uploads) = (0, 0);
        let mut missing = Vec::new();
        for (slot, &expert) in used.iter().enumerate() {
            let again = again[token * row + layer * used.len() + slot];
            match held.iter_mut().find(|(_, held)| *held == expert) {
                Some((next, _)) => {
                    *next = again;
                    hits += 1;
                }
                None => missing.push((again, expert)),
            }
        }
        for (again, expert) in missing.into_iter().filter(|&(again, _)| again < never) {
            if held.len() < slots {
                held.push((again, expert));
                uploads += 1;
            } else if let Some(latest) = held.iter_mut().max().filter(|latest| latest.0 > again) {
                *latest = (again, expert);
                uploads += 1;
            }
        }
        (hits, uploads)
    })
}

/// The list of the experts used most in `learn`, over all layers; nothing is brought in.
pub fn fixed_list(trace: &Trace, slots: usize, learn: std::ops::Range<usize>) -> Series {
    let mut uses: Vec<(u32, usize)> = (0..trace.layers() * trace.experts()).map(|block| (0, block)).collect();
    for token in learn {
        for layer in 0..trace.layers() {
            trace.at(token, layer).iter().for_each(|&e| uses[layer * trace.experts() + usize::from(e)].0 += 1);
        }
    }
    uses.sort_unstable_by(|a, b| b.cmp(a));
    let mut listed = vec![false; uses.len()];
    uses.iter().take(slots * trace.layers()).for_each(|&(_, block)| listed[block] = true);
    by_layer(
        trace,
        || (),
        |(), _, layer, used| (used.iter().filter(|&&e| listed[layer * trace.experts() + usize::from(e)]).count(), 0),
    )
}

/// Whole layers, the last ones first, as llama.cpp's `-ncmoe` places them.
pub fn layers(trace: &Trace, slots: usize) -> Series {
    let whole = slots * trace.layers() / trace.experts();
    by_layer(trace, || (), |(), _, layer, used| (if layer + whole >= trace.layers() { used.len() } else { 0 }, 0))
}
