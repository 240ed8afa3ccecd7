//! Expert ids as the router leaves them: 32-bit integers, one row per token, ids and rows possibly far apart.

use std::ops::Range;

/// An id operand as bytes, with its shape.
#[derive(Clone, Copy, Debug)]
pub struct Ids<'a> {
    /// From the first id to behind the last, gaps between rows included.
    pub bytes: &'a [u8],
    /// Ids per token.
    pub used: usize,
    /// Tokens.
    pub tokens: usize,
    /// Bytes from one id to the next of the same token.
    pub id_stride: usize,
    /// Bytes from one token to the next.
    pub token_stride: usize,
}

/// An id that names no expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadId {
    /// What stands where an id must be; -1 where nothing stands.
    pub id: i64,
}

impl Ids<'_> {
    /// Which of `experts` experts are named, as runs of neighbours in ascending order.
    pub fn runs(&self, experts: usize) -> Result<Vec<Range<usize>>, BadId> {
        let mut named = vec![false; experts];
        self.each(experts, |id| named[id] = true)?;
        Ok(runs(&named))
    }

    /// Calls `note` with every id, token by token, until one names none of `experts` experts.
    pub fn each(&self, experts: usize, mut note: impl FnMut(usize)) -> Result<(), BadId> {
        for token in 0..self.tokens {
            for slot in 0..self.used {
                let at = token.saturating_mul(self.token_stride).saturating_add(slot.saturating_mul(self.id_stride));
                let word = self.bytes.get(at..).and_then(|rest| rest.first_chunk::<4>());
                let id = word.map_or(-1, |word| i64::from(i32::from_ne_bytes(*word)));
                note(usize::try_from(id).ok().filter(|id| *id < experts).ok_or(BadId { id })?);
            }
        }
        Ok(())
    }
}

fn runs(named: &[bool]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for expert in (0..named.len()).filter(|&expert| named[expert]) {
        match runs.last_mut() {
            Some(run) if run.end == expert => run.end += 1,
            _ => runs.push(expert..expert + 1),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn bytes(rows: &[Vec<i32>], row_ids: usize) -> Vec<u8> {
        let mut out = Vec::new();
        for row in rows {
            let mut row = row.clone();
            row.resize(row_ids, 0x7fff_ffff); // what lies between the rows of a view must not be read
            out.extend(row.iter().flat_map(|id| id.to_ne_bytes()));
        }
        out
    }

    fn ids(bytes: &[u8], used: usize, tokens: usize, row_ids: usize) -> Ids<'_> {
        Ids { bytes, used, tokens, id_stride: 4, token_stride: 4 * row_ids }
    }

    #[test]
    fn neighbours_form_runs() {
        let bytes = bytes(&[vec![5, 0, 1], vec![2, 7, 5]], 8);
        assert_eq!(ids(&bytes, 3, 2, 8).runs(8).unwrap(), [0..3, 5..6, 7..8]);
    }

    #[test]
    fn no_token_names_nobody() {
        assert_eq!(ids(&[], 4, 0, 8).runs(8).unwrap(), []);
    }

    #[test]
    fn ids_out_of_range_are_refused() {
        for bad in [-1, 8, i32::MAX] {
            let bytes = bytes(&[vec![0, bad]], 2);
            assert_eq!(ids(&bytes, 2, 1, 2).runs(8), Err(BadId { id: bad.into() }));
        }
        assert_eq!(ids(&[0; 6], 2, 1, 2).runs(8), Err(BadId { id: -1 }), "a short operand is refused, too");
    }

    proptest! {
        #[test]
        fn runs_hold_exactly_the_named(rows in proptest::collection::vec(proptest::collection::vec(0_i32..64, 4), 0..20)) {
            let bytes = bytes(&rows, 9);
            let runs = ids(&bytes, 4, rows.len(), 9).runs(64).unwrap();
            let found: Vec<usize> = runs.iter().cloned().flatten().collect();
            let mut each = Vec::new();
            ids(&bytes, 4, rows.len(), 9).each(64, |id| each.push(id)).unwrap();
            prop_assert_eq!(each, rows.iter().flatten().map(|&id| usize::try_from(id).unwrap()).collect::<Vec<_>>());
            let named: BTreeSet<usize> = rows.iter().flatten().map(|&id| usize::try_from(id).unwrap()).collect();
            prop_assert_eq!(found, named.into_iter().collect::<Vec<_>>());
            prop_assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start));
        }
    }
}
