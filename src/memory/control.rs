//! How the arena of a cache grows and shrinks over time.
//!
//! It starts with a part of what is free, because a host loads more after a model is there (a draft model, an image encoder), and takes the
//! rest once a request is being answered. It shrinks as soon as the reserve is touched, and grows again only by what stayed free for a
//! while. What it lends to a long pass does not change the size that it goes to: it has that again as soon as the memory is back.

/// Tokens of decoding after which a request counts as real.
const FULL_AFTER_TOKENS: u32 = 64;
/// The part of its full size that an arena starts with.
const START_PART: usize = 4;
/// How long a surplus must stand, in ms.
const CALM_MS: u64 = 3_000;
/// The part of the arena that a surplus must be larger than.
const SURPLUS_PART: usize = 20;

/// Why the arena changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// A request is being answered.
    Request,
    /// Memory stayed free.
    Surplus,
    /// The reserve, or the budget, was touched.
    Reserve,
}

/// A new size, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// At once.
    Shrink(usize, Why),
    /// Step by step.
    Grow(usize, Why),
}

/// The rule for one device.
#[derive(Clone, Debug, Default)]
pub struct Control {
    tokens: u32,
    /// Whether the arena may have everything.
    full: bool,
    target: usize,
    /// Since when there is a surplus, in ms, and the least of it.
    calm: Option<(u64, usize)>,
}

impl Control {
    /// A cache is made; `size` is what its arena may have. Returns what it starts with: everything, if `at_once`.
    pub fn begin(&mut self, size: usize, at_once: bool) -> usize {
        let start = if at_once { size } else { size / START_PART };
        *self = Self { tokens: 0, full: at_once, target: start, calm: None };
        start
    }

    /// Tokens were decoded.
    pub fn note_tokens(&mut self, tokens: u32) {
        self.tokens = self.tokens.saturating_add(tokens);
    }

    /// Looks at the arena's size, at the size that it may have now, and at what comes back to it.
    pub fn look(&mut self, now_ms: u64, arena: usize, may: usize, lent: usize) -> Option<Change> {
        let later = may.saturating_add(lent);
        if may < arena {
            self.settle(later.min(self.target.max(arena)));
            return Some(Change::Shrink(may, Why::Reserve));
        }
        if !self.full {
            if self.tokens < FULL_AFTER_TOKENS {
                return None;
            }
            self.full = true;
            return self.grow(arena, later, Why::Request);
        }
        self.target = self.target.min(later);
        let surplus = may.saturating_sub(arena.max(self.target));
        if surplus <= arena / SURPLUS_PART {
            self.calm = None;
            return None;
        }
        let (since, least) = self.calm.map_or((now_ms, surplus), |(since, least)| (since, least.min(surplus)));
        self.calm = Some((since, least));
        if now_ms.saturating_sub(since) < CALM_MS {
            return None;
        }
        self.grow(arena, arena.max(self.target) + least, Why::Surplus)
    }

    fn grow(&mut self, arena: usize, to: usize, why: Why) -> Option<Change> {
        self.calm = None;
        self.target = to;
        (to > arena).then_some(Change::Grow(to, why))
    }

    /// Memory that was taken for good came back: what a context computes in is allocated as a whole, and only then known to come and go.
    pub fn returned(&mut self, bytes: usize) {
        if self.full {
            self.target = self.target.saturating_add(bytes); // a look limits it to what there is
            self.calm = None;
        }
    }

    /// The size to go to by steps.
    pub fn target(&self) -> usize {
        self.target
    }

    /// The arena has this size and is to keep it: it gave memory to somebody, or got no more.
    pub fn settle(&mut self, size: usize) {
        self.target = size;
        self.calm = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_comes_back_is_gone_to_again() {
        let mut control = Control::default();
        control.begin(1000, true);
        control.settle(400); // a context took the rest
        control.returned(700);
        assert_eq!((control.target(), control.look(0, 400, 1000, 0), control.target()), (1100, None, 1000));
        let mut early = Control::default();
        early.begin(1000, false);
        early.returned(700);
        assert_eq!(early.target(), 250, "no more than it starts with before a request is answered");
    }

    #[test]
    fn everything_after_sixty_four_tokens() {
        let mut control = Control::default();
        assert_eq!(control.begin(1000, false), 250);
        control.note_tokens(63);
        assert_eq!(control.look(0, 250, 1000, 0), None);
        control.note_tokens(1);
        assert_eq!(control.look(100, 250, 900, 0), Some(Change::Grow(900, Why::Request)));
        assert_eq!((control.target(), control.look(200, 600, 900, 0)), (900, None), "it is on its way");
        assert_eq!(Control::default().begin(1000, true), 1000);
    }

    #[test]
    fn it_shrinks_at_once_and_grows_when_it_is_calm() {
        let mut control = Control::default();
        control.begin(1000, true);
        assert_eq!(control.look(0, 1000, 400, 0), Some(Change::Shrink(400, Why::Reserve)));
        assert_eq!(control.look(100, 400, 420, 0), None, "5% are not worth it");
        assert_eq!(control.look(10_000, 400, 420, 0), None);
        assert_eq!(control.look(10_100, 400, 900, 0), None);
        assert_eq!(control.look(12_000, 400, 700, 0), None);
        assert_eq!(control.look(13_000, 400, 900, 0), None);
        assert_eq!(control.look(13_100, 400, 900, 0), Some(Change::Grow(700, Why::Surplus)), "the least that stood");
        assert_eq!(
            control.look(13_200, 500, 410, 0),
            Some(Change::Shrink(410, Why::Reserve)),
            "on its way it is stopped"
        );
        assert_eq!(control.target(), 410);
    }

    #[test]
    fn what_is_lent_comes_back_at_once() {
        let mut control = Control::default();
        control.begin(1000, true);
        // A pass takes 600, and something else 50 of the reserve.
        assert_eq!((control.look(0, 400, 400, 600), control.target()), (None, 1000));
        assert_eq!(control.look(100, 400, 350, 600), Some(Change::Shrink(350, Why::Reserve)));
        assert_eq!((control.look(200, 350, 950, 0), control.target()), (None, 950));
        assert_eq!((control.look(300, 950, 950, 0), control.target()), (None, 950));
        let mut control = Control::default();
        control.begin(1000, false);
        control.note_tokens(64);
        assert_eq!(
            control.look(0, 250, 300, 700),
            Some(Change::Grow(1000, Why::Request)),
            "by steps, as it comes back"
        );
    }

    #[test]
    fn a_surplus_that_goes_starts_over() {
        let mut control = Control::default();
        control.begin(400, true);
        for turn in 0..20 {
            assert_eq!(control.look(turn * 2_000, 400, 900, 0), None);
            assert_eq!(control.look(turn * 2_000 + 1_999, 400, 400, 0), None);
        }
    }

    proptest! {
        /// Whatever others take: never a size above what it may have, and with a steady surplus it gets there.
        #[test]
        fn it_follows(may in proptest::collection::vec(0_usize..10_000, 1..60)) {
            let mut control = Control::default();
            let mut arena = control.begin(may[0], false);
            let mut now = 0;
            for may in &may {
                for _ in 0..50 {
                    now += 100;
                    control.note_tokens(1);
                    match control.look(now, arena, *may, 0) {
                        Some(Change::Shrink(to, _)) => { prop_assert!(to < arena && to <= *may); arena = to; }
                        Some(Change::Grow(to, _)) => prop_assert!(to > arena && to <= *may),
                        None => {}
                    }
                    arena = arena.max((arena + 500).min(control.target()));
                    prop_assert!(arena <= *may);
                }
                if now > 10_000 {
                    prop_assert!(*may - arena <= arena / SURPLUS_PART + 1, "{} of {}", arena, may);
                }
            }
        }
    }
}
