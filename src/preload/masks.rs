//! How the mask of a long pass is shared out: into how many parts, by how many threads, and whether the host's function may be called for parts.
//!
//! Owns: the cut, and what the check of the host's function found. Invariants: every token is in one part; nothing is shared out before a check
//! that could have failed. Threads: any. Does not: know the host's types or call its function (`abi::llama::mask` does),
//! or choose the number of threads (`planner::usage` does, because it is part of a prediction).

use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};

use super::{ASKED, Asked, HELPED};

/// Cells of a mask from which on threads are worth their start: the host needs some milliseconds for so many.
const LEAST_CELLS: usize = 1 << 21;
/// Parts for each thread, because the first ones of a prompt take longer: all cells from their own position on may differ between tokens.
const PARTS: usize = 4;
/// Tokens of a part: its first one is compared with every cell.
const LEAST_PART: usize = 32;
/// What a row takes that is compared with every cell, in rows that are copied from another of the same sequence; timed with 3,500 cells.
const COMPARED: usize = 8;
/// As many sequences as the host can tell apart.
const SEQUENCES: usize = 256;

/// What is known of the host's function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trust {
    /// Nothing yet.
    Unknown,
    /// Called for a part it writes what it writes there when called for all.
    Checked,
    /// It does not, or failed.
    Refused,
}

static TRUST: AtomicU8 = AtomicU8::new(0);

/// What is known of the host's function in this process.
pub(crate) fn trust() -> Trust {
    match TRUST.load(Ordering::Acquire) {
        0 => Trust::Unknown,
        1 => Trust::Checked,
        _ => Trust::Refused,
    }
}

/// The check succeeded or not; what was refused once stays so.
pub(crate) fn note_check(equal: bool) {
    let found = if equal { 1 } else { 2 };
    let _ = TRUST.fetch_max(found, Ordering::AcqRel);
}

/// Whether any mask is to be shared out: only where a device of ours may compute.
pub(crate) fn is_wanted() -> bool {
    let ours = |asked: &Asked| asked.named || HELPED.load(Ordering::Relaxed);
    ASKED.get().is_some_and(|asked| asked.mask_threads > 1 && ours(asked))
}

/// Threads for a mask of so many tokens and cells for each; `None` where the host fills it alone.
pub(crate) fn threads(tokens: usize, cells: usize) -> Option<usize> {
    of_wanted(ASKED.get()?.mask_threads, tokens, cells)
}

/// None is made without a part to fill: few tokens over many cells are a mask of each token that is generated.
fn of_wanted(wanted: usize, tokens: usize, cells: usize) -> Option<usize> {
    let threads = wanted.min(tokens / LEAST_PART);
    (tokens.saturating_mul(cells) >= LEAST_CELLS && threads > 1).then_some(threads)
}

/// Whether so many threads should be done sooner than one, by the sequence of each token. The host's function compares the first token of each sequence
/// with every cell and copies that row for the others; where tokens of many sequences take turns, parts have far more first tokens than the whole.
pub(crate) fn pays(sequences: impl ExactSizeIterator<Item = i32>, threads: usize) -> bool {
    let tokens = sequences.len();
    let part = part(tokens, threads);
    // The part in which each sequence was found last.
    let mut last = [usize::MAX; SEQUENCES];
    let (mut of_whole, mut of_parts) = (0_usize, 0_usize);
    for (at, sequence) in sequences.enumerate() {
        let Some(found) = usize::try_from(sequence).ok().and_then(|sequence| last.get_mut(sequence)) else {
            return false;
        };
        of_whole += usize::from(*found == usize::MAX);
        of_parts += usize::from(*found != at / part);
        *found = at / part;
    }
    let work = |compared: usize| tokens + compared * (COMPARED - 1);
    work(of_parts) < threads.saturating_mul(work(of_whole))
}

/// Tokens of each part.
pub(crate) fn part(tokens: usize, threads: usize) -> usize {
    tokens.div_ceil(threads.saturating_mul(PARTS).max(1)).max(LEAST_PART)
}

/// The positions of some tokens: of all their first positions, all their second ones, and so on.
pub(crate) fn positions(all: &[i32], tokens: usize, part: &Range<usize>) -> Vec<i32> {
    all.chunks(tokens.max(1)).filter_map(|section| section.get(part.clone())).flatten().copied().collect()
}

/// Tokens whose rows the check compares: the first, some in the middle and the last ones, each range a call of its own.
pub(crate) fn samples(tokens: usize) -> Vec<Range<usize>> {
    let length = (tokens / 2).min(LEAST_PART);
    let mut starts = vec![0, (tokens - length) / 2, tokens - length];
    starts.dedup();
    starts.into_iter().filter(|_| length > 0).map(|start| start..start + length).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_was_refused_stays_so() {
        assert_eq!(trust(), Trust::Unknown);
        note_check(true);
        assert_eq!(trust(), Trust::Checked);
        note_check(false);
        note_check(true);
        assert_eq!(trust(), Trust::Refused);
    }

    /// A mask of 65536 cells is a long one for a few tokens, too: each of many slots generates one.
    #[test]
    fn no_thread_is_made_without_a_part() {
        assert_eq!(of_wanted(15, 12_288, 12_288), Some(15));
        assert_eq!(of_wanted(15, 2048, 512), None, "too small");
        assert_eq!(of_wanted(1, 12_288, 12_288), None);
        for (tokens, threads) in [(2, None), (32, None), (63, None), (64, Some(2)), (100, Some(3)), (512, Some(15))] {
            assert_eq!(of_wanted(15, tokens, 1 << 20), threads, "{tokens}");
            assert!(threads.is_none_or(|threads| tokens.div_ceil(part(tokens, threads)) >= threads), "{tokens}");
        }
    }

    #[test]
    fn sequences_that_take_turns_are_not_shared_out_where_that_takes_longer() {
        let turns = |tokens: i32, sequences: i32| (0..tokens).map(move |at| at % sequences).collect::<Vec<i32>>();
        let pays = |sequences: Vec<i32>, threads| pays(sequences.into_iter(), threads);
        // One text, and one behind the other.
        for threads in 2..=16 {
            assert!(pays(vec![7; 2048], threads), "{threads}");
            assert!(pays((0..2048).map(|at| at / 8).collect(), threads), "{threads}");
        }
        // 2048 rows would be compared with every cell in place of 256.
        assert!(!pays(turns(2048, 256), 2));
        assert!(!pays(turns(2048, 64), 2));
        assert!(pays(turns(2048, 256), 16));
        assert!(pays(turns(256, 256), 2), "the whole compares each row as well");
        assert!(!pays(vec![0, -1, 0, 0], 2) && !pays(vec![0, 256, 0, 0], 2), "no sequences");
    }

    #[test]
    fn positions_keep_their_sections() {
        let all = [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23];
        assert_eq!(positions(&all, 4, &(1..3)), [1, 2, 11, 12, 21, 22]);
        assert_eq!(positions(&all[..4], 4, &(0..4)), [0, 1, 2, 3]);
        assert_eq!(positions(&[], 0, &(0..0)), Vec::<i32>::new());
    }

    proptest! {
        #[test]
        fn samples_lie_in_the_mask_and_do_not_all_begin_at_its_start(tokens in 0_usize..20_000) {
            let samples = samples(tokens);
            prop_assert_eq!(samples.is_empty(), tokens < 2);
            for rows in &samples {
                prop_assert!(rows.end <= tokens && !rows.is_empty() && rows.len() <= LEAST_PART);
            }
            prop_assert!(tokens < 2 || samples.iter().any(|rows| rows.start > 0));
            prop_assert!(tokens < 2 || samples.last().is_some_and(|rows| rows.end == tokens));
        }

        #[test]
        fn parts_are_enough_for_all_threads(tokens in 1_usize..70_000, threads in 1_usize..64) {
            let part = part(tokens, threads);
            prop_assert!(part >= LEAST_PART);
            prop_assert!(tokens.div_ceil(part) <= threads * PARTS);
            prop_assert!(part == LEAST_PART || tokens.div_ceil(part) >= threads.min(tokens / LEAST_PART));
        }
    }
}
