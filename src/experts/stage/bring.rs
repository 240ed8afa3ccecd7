//! The copies that bring experts of weights to a buffer: from the cache's slots on the device, the others from RAM.
//!
//! Owns: the division of experts by where they come from, and the order of the copies.
//! Invariants: copies on the device run beside those from RAM; neighbours in RAM are one copy. Behind the last expert, and behind a run of experts
//! that is followed by none, lie zeros or bytes of the next expert, because kernels read past the last row.
//! Threads: the one that drives the backend. Does not: know buffers and their order (`stage` does).

use std::ops::Range;

use super::super::cache::{Cache, uploads};
use super::super::plain;
use crate::abi::tensor::Tensor;
use crate::buffer::BufferError;
use crate::device::Device;
use crate::gpu::{ListedCopy, Place};

/// Bytes that were asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moved {
    /// From RAM.
    pub(crate) ram: u64,
    /// On the device.
    pub(crate) device: u64,
}

impl std::ops::AddAssign for Moved {
    fn add_assign(&mut self, more: Self) {
        self.ram += more.ram;
        self.device += more.device;
    }
}

/// Where experts of a weight come from.
#[derive(Debug, Default, PartialEq, Eq)]
struct Sources {
    /// From the device, one by one.
    resident: Vec<usize>,
    /// From RAM: runs of neighbours, each one copy.
    missing: Vec<Range<usize>>,
}

/// Divides experts, given as runs in ascending order, by where they come from.
fn divide(wanted: &[Range<usize>], resident: impl Fn(usize) -> bool) -> Sources {
    let mut sources = Sources::default();
    for expert in wanted.iter().cloned().flatten() {
        if resident(expert) {
            sources.resident.push(expert);
            continue;
        }
        match sources.missing.last_mut() {
            Some(run) if run.end == expert => run.end += 1,
            _ => sources.missing.push(expert..expert + 1),
        }
    }
    sources
}

/// Whether nobody asked for the expert behind this one.
fn ends_a_run(wanted: &[Range<usize>], expert: usize) -> bool {
    !wanted.iter().any(|run| run.contains(&(expert + 1)))
}

/// Bytes of the runs in RAM, with what kernels read behind one that is followed by an expert that nobody asked for.
fn spans(sources: &Sources, wanted: &[Range<usize>], expert_bytes: usize, whole: usize) -> Vec<Range<usize>> {
    let behind = |end: usize| {
        let open = ends_a_run(wanted, end.saturating_sub(1));
        if open { plain::RUN_PADDING.min(expert_bytes) } else { 0 }
    };
    let span =
        |run: &Range<usize>| run.start * expert_bytes..(run.end * expert_bytes + behind(run.end)).min(whole.max(1));
    sources.missing.iter().map(span).collect()
}

/// Brings experts of weights to their places, given for each: all of them, or the runs of `used`, in ascending order. Two copies of one expert never
/// overlap, so nothing has an order but what is loaded into the cache on the way.
pub(crate) fn bring(
    device: &Device,
    weights: &[(Tensor<'_>, Place<'_>)],
    used: Option<&[Range<usize>]>,
    mut cache: Option<&mut Cache>,
) -> Result<Moved, BufferError> {
    let mut moved = Moved::default();
    if let Some(cache) = cache.as_deref_mut() {
        for (weight, _) in weights {
            moved.ram += cache.load_on_the_way(device, weight.data())?;
        }
    }
    let cache = cache.as_deref();
    let (mut copies, mut uploads) = (Vec::new(), Vec::new());
    for &(weight, target) in weights {
        let (experts, expert_bytes) = (usize::try_from(weight.ne()[2]).unwrap_or(0), weight.nb()[2]);
        let all = 0..experts;
        let wanted = used.unwrap_or(std::slice::from_ref(&all));
        let whole = weight.bytes();
        let located = cache.and_then(|cache| cache.locate(weight.data()));
        let padding = located.as_ref().map_or(0, |located| located.padding());
        // Behind the last expert of a run lie zeros in its slot, or, over devices whose slots have none, nothing that may be read.
        let resident = |expert: usize| {
            let place = located.as_ref().and_then(|located| located.find(expert));
            place.filter(|_| padding > 0 || expert + 1 == experts || !ends_a_run(wanted, expert))
        };
        let sources = divide(wanted, |expert| resident(expert).is_some());
        for &expert in &sources.resident {
            let Some(source) = resident(expert) else { continue };
            let start = expert * expert_bytes;
            let behind = if expert + 1 < experts && ends_a_run(wanted, expert) { padding.min(expert_bytes) } else { 0 };
            let bytes = (expert_bytes + behind).min(whole - start);
            moved.device += bytes as u64;
            copies.push(ListedCopy { target: Place { address: target.address + start, ..target }, source, bytes });
        }
        for span in spans(&sources, wanted, expert_bytes, whole) {
            uploads.push((
                Place { address: target.address + span.start, ..target },
                weight.data() + span.start,
                span.len(),
            ));
        }
    }
    if !copies.is_empty() && !device.driver().copy_list(&copies)? {
        // Whatever was copied is copied again.
        for copy in &copies {
            let Some((weight, target)) = weights.iter().find(|(weight, target)| {
                (target.address..target.address + weight.bytes()).contains(&copy.target.address)
            }) else {
                continue;
            };
            let start = copy.target.address - target.address;
            uploads.push((copy.target, weight.data() + start, copy.bytes.min(weight.bytes() - start)));
        }
        moved.device = 0;
    }
    for (place, source, bytes) in uploads {
        moved.ram += bytes as u64;
        uploads::upload(device, place, source, bytes)?;
    }
    Ok(moved)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn one(run: Range<usize>) -> Vec<Range<usize>> {
        std::iter::once(run).collect()
    }

    #[test]
    fn neighbours_that_are_missing_are_one_copy() {
        let held = |expert: usize| [2, 3, 6].contains(&expert);
        assert_eq!(divide(&one(0..8), held), Sources { resident: vec![2, 3, 6], missing: vec![0..2, 4..6, 7..8] });
        assert_eq!(divide(&[1..3, 5..6, 7..8], held), Sources { resident: vec![2], missing: vec![1..2, 5..6, 7..8] });
        assert_eq!(divide(&[0..4, 4..8], |_| false).missing, one(0..8));
        assert_eq!(divide(&[], held), Sources::default());
    }

    #[test]
    fn what_kernels_read_behind_a_run_comes_with_it() {
        let spans = |wanted: &[Range<usize>], held: &[usize]| {
            spans(&divide(wanted, |expert| held.contains(&expert)), wanted, 1000, 8000)
        };
        assert_eq!(spans(&one(0..8), &[2]), [0..2000, 3000..8000]);
        assert_eq!(spans(&[1..3, 5..6], &[]), [1000..3512, 5000..6512]);
        assert_eq!(spans(&one(1..3), &[2]), one(1000..2000), "what follows is brought, from the device");
        assert_eq!(spans(&one(7..8), &[]), one(7000..8000), "the end of the weight is padded by itself");
    }

    proptest! {
        /// Every expert that is wanted comes once, from one side, and copies never overlap.
        #[test]
        fn each_comes_once(wanted in proptest::collection::vec(any::<bool>(), 1..40), held in proptest::collection::vec(any::<bool>(), 40)) {
            let mut runs: Vec<Range<usize>> = Vec::new();
            for expert in (0..wanted.len()).filter(|expert| wanted[*expert]) {
                match runs.last_mut() {
                    Some(run) if run.end == expert => run.end += 1,
                    _ => runs.push(expert..expert + 1),
                }
            }
            let sources = divide(&runs, |expert| held[expert]);
            let mut times = vec![0; wanted.len()];
            sources.resident.iter().chain(&sources.missing.iter().cloned().flatten().collect::<Vec<_>>()).for_each(|&e| times[e] += 1);
            prop_assert!(times.iter().zip(&wanted).all(|(times, wanted)| *times == i32::from(*wanted)));
            let spans = spans(&sources, &runs, 700, wanted.len() * 700);
            prop_assert!(spans.windows(2).all(|pair| pair[0].end <= pair[1].start));
            prop_assert!(spans.iter().all(|span| !sources.resident.iter().any(|e| span.contains(&(e * 700)))));
        }
    }
}
