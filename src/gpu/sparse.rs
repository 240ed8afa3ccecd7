//! Which pieces of physical memory lie behind which addresses, where a driver maps memory in pieces of many sizes.
//!
//! Owns: the list of pieces, the cut of ranges into new ones, and what is to be done with each so that only some ranges stay.
//! Invariants: pieces are sorted and do not overlap; a piece is a multiple of the unit and at most [`LARGEST`] bytes. Threads: that of the
//! driver's lock. Does not: call a driver.

use std::ops::Range;

use crate::graph::Ranges;

/// The largest piece: a call costs the same for one of these as for a small one.
pub(super) const LARGEST: usize = 64 << 20;

/// A piece of physical memory and where it is mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece<H> {
    pub(super) range: Range<usize>,
    pub(super) handle: H,
}

/// All pieces of one memory.
#[derive(Debug)]
pub(super) struct Pieces<H> {
    list: Vec<Piece<H>>,
}

impl<H> Default for Pieces<H> {
    fn default() -> Self {
        Self { list: Vec::new() }
    }
}

impl<H> Pieces<H> {
    /// What has memory behind it.
    pub(super) fn mapped(&self) -> Ranges {
        self.list.iter().map(|piece| piece.range.clone()).collect()
    }

    /// Bytes of all pieces.
    pub(super) fn bytes(&self) -> usize {
        self.list.iter().map(|piece| piece.range.len()).sum()
    }

    /// The pieces to make so that all of `ranges` has memory, in order.
    pub(super) fn missing(&self, ranges: &Ranges) -> Vec<Range<usize>> {
        cut(&ranges.without(&self.mapped()))
    }

    /// A piece was mapped where nothing was.
    pub(super) fn add(&mut self, piece: Piece<H>) {
        let at = self.list.partition_point(|other| other.range.start < piece.range.start);
        self.list.insert(at, piece);
    }

    /// Takes all pieces out that hold a byte outside `kept`, each with the new pieces that are to take over what stays of it.
    pub(super) fn take_beside(&mut self, kept: &Ranges) -> Vec<(Piece<H>, Vec<Range<usize>>)> {
        let (stay, go): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.list).into_iter().partition(|piece| kept.covers(&piece.range));
        self.list = stay;
        let with_rest = |piece: Piece<H>| {
            let rest = cut(&Ranges::from(piece.range.clone()).within(kept));
            (piece, rest)
        };
        go.into_iter().map(with_rest).collect()
    }

    /// Takes all pieces out.
    pub(super) fn take_all(&mut self) -> Vec<Piece<H>> {
        std::mem::take(&mut self.list)
    }
}

fn cut(ranges: &Ranges) -> Vec<Range<usize>> {
    ranges
        .iter()
        .flat_map(|run| {
            run.clone().step_by(LARGEST).map(move |start| start..run.end.min(start.saturating_add(LARGEST)))
        })
        .collect()
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "one run of bytes is meant")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const UNIT: usize = 2 << 20;
    const UNITS: usize = 150;

    fn some() -> impl Strategy<Value = Ranges> {
        let range = (0..UNITS, 0_usize..90).prop_map(|(start, count)| start * UNIT..(start + count).min(UNITS) * UNIT);
        proptest::collection::vec(range, 0..6).prop_map(|ranges| ranges.into_iter().collect())
    }

    proptest! {
        /// Against one number for each unit that stands for its content: what stays keeps it, what goes is gone, what comes is new; pieces
        /// never overlap and none is larger than it may be.
        #[test]
        fn pieces_follow_a_model(steps in proptest::collection::vec((some(), any::<bool>(), any::<bool>()), 1..30)) {
            let mut pieces = Pieces::<u64>::default();
            let mut model: Vec<Option<u64>> = vec![None; UNITS];
            let mut content: Vec<Option<u64>> = vec![None; UNITS];
            let mut number = 0;
            for (ranges, maps, refuses) in steps {
                let units = |range: &Range<usize>| range.start / UNIT..range.end / UNIT;
                if maps {
                    for range in pieces.missing(&ranges) {
                        prop_assert!(range.len() <= LARGEST && !range.is_empty());
                        number += 1;
                        for unit in units(&range) {
                            prop_assert_eq!(content[unit], None);
                            content[unit] = Some(number);
                        }
                        pieces.add(Piece { range, handle: number });
                    }
                    for range in ranges.iter() {
                        for unit in units(&range) {
                            model[unit] = content[unit];
                        }
                    }
                } else {
                    for (piece, rest) in pieces.take_beside(&ranges) {
                        let stays: Ranges = rest.iter().cloned().collect();
                        prop_assert_eq!(&stays, &Ranges::from(piece.range.clone()).within(&ranges));
                        if refuses && !rest.is_empty() {
                            pieces.add(piece); // it could not be split: all of it stays
                            continue;
                        }
                        for unit in units(&piece.range) {
                            if !stays.covers(&(unit * UNIT..(unit + 1) * UNIT)) {
                                content[unit] = None;
                            }
                        }
                        for range in rest {
                            number += 1;
                            pieces.add(Piece { range, handle: number }); // the content is copied
                        }
                    }
                    for unit in (0..UNITS).filter(|unit| !ranges.covers(&(unit * UNIT..(unit + 1) * UNIT))) {
                        model[unit] = None;
                    }
                }
                for unit in 0..UNITS {
                    let mapped = pieces.mapped().covers(&(unit * UNIT..(unit + 1) * UNIT));
                    prop_assert_eq!(mapped, content[unit].is_some());
                    prop_assert!(model[unit].is_none() || model[unit] == content[unit]);
                }
                prop_assert_eq!(pieces.bytes(), pieces.mapped().bytes());
                prop_assert!(pieces.list.windows(2).all(|pair| pair[0].range.end <= pair[1].range.start));
            }
        }
    }

    #[test]
    fn long_runs_are_few_pieces_around_what_is_there() {
        let mut pieces = Pieces::default();
        pieces.add(Piece { range: 10 * UNIT..11 * UNIT, handle: 1 });
        let sizes: Vec<usize> =
            pieces.missing(&Ranges::from(0..100 * UNIT)).iter().map(|range| range.len() / UNIT).collect();
        assert_eq!(sizes, [10, 32, 32, 25]);
        let mut mapped = Pieces::default();
        mapped.add(Piece { range: 0..32 * UNIT, handle: 7 });
        let taken = mapped.take_beside(&Ranges::from(3 * UNIT..5 * UNIT));
        assert_eq!(taken, [(Piece { range: 0..32 * UNIT, handle: 7 }, vec![3 * UNIT..5 * UNIT])]);
    }
}
