//! How many uploads a step may start, and what a swap must bring.
//!
//! Owns: the bounds `swaps-per-step` and `upload-share` (the part of the link's time that uploads may take), and the price of an
//! upload in uses, B_cpu / B_link: reading a block on the CPU once takes 1/B_cpu per byte, moving it takes 1/B_link.
//! Invariants: credit that is not used is kept for a few steps, never for longer, so that a pause does not end in a burst.
//! Threads: none. Does not: measure anything.

/// Measured or assumed rates. A step time of 0 is unknown: then only `swaps-per-step` bounds uploads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// What the CPU team reads of expert weights, bytes per microsecond.
    pub cpu_bytes_per_us: f32,
    /// What the link moves to the device, bytes per microsecond.
    pub link_bytes_per_us: f32,
    /// Duration of a step, microseconds.
    pub step_us: f32,
}

impl Rates {
    /// Uses on the CPU that take as long as one upload.
    pub fn payback(self) -> Option<f32> {
        let ratio = self.cpu_bytes_per_us / self.link_bytes_per_us;
        (ratio.is_finite() && ratio > 0.0).then_some(ratio)
    }
}

/// Steps whose unused credit is kept.
const KEPT_STEPS: f32 = 4.0;

/// Uploads into free slots that a step may start while rates are not known: there the step's uses are no bound after a prompt.
const ROOM_PER_STEP: u32 = 96;

/// Where nobody has to leave, uploads may take so many times the share, but no more than this part of the link: what comes into a free slot is
/// a miss less, and the copies of the next step are not to wait for it.
const ROOM_FACTOR: f32 = 3.0;
const ROOM_SHARE: f32 = 0.75;

/// The bounds of uploads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Budget {
    swaps_per_step: u32,
    upload_share: f32,
    step_bytes: Option<f32>,
    credit: f32,
    swaps: u32,
    /// Uploads into free slots.
    into_room: u32,
    /// As `credit`, for all uploads of a step that fills free slots.
    room_credit: f32,
}

impl Budget {
    pub(super) fn new(swaps_per_step: Option<u32>, upload_share: f32) -> Self {
        let swaps_per_step = swaps_per_step.unwrap_or(u32::MAX);
        Self { swaps_per_step, upload_share, step_bytes: None, credit: 0.0, swaps: 0, into_room: 0, room_credit: 0.0 }
    }

    pub(super) fn set_rates(&mut self, rates: Rates) {
        let bytes = self.upload_share * rates.step_us * rates.link_bytes_per_us;
        self.step_bytes = Some(bytes).filter(|bytes| bytes.is_finite() && *bytes > 0.0);
    }

    /// A step begins.
    pub(super) fn open(&mut self) {
        (self.swaps, self.into_room) = (0, 0);
        if let Some(bytes) = self.step_bytes {
            self.credit = (self.credit + bytes).min(bytes * KEPT_STEPS);
            let all = bytes * (ROOM_SHARE / self.upload_share.max(f32::MIN_POSITIVE)).clamp(1.0, ROOM_FACTOR);
            // Unused share is kept, the rest is not.
            self.room_credit = (self.room_credit + all).min(all.max(self.credit));
        }
    }

    /// Takes one upload out of the budget, if it is there. The last one of a step may overdraw it: a block larger than a step's
    /// share is paid off by the steps after it.
    pub(super) fn take(&mut self, bytes: u64, into_room: bool) -> bool {
        if self.swaps >= self.swaps_per_step {
            return false;
        }
        let open = if into_room { self.take_room(bytes) } else { self.step_bytes.is_none() || self.credit > 0.0 };
        if open {
            self.swaps += 1;
            if self.step_bytes.is_some() && !into_room {
                (self.credit, self.room_credit) = (self.credit - bytes as f32, self.room_credit - bytes as f32);
            }
        }
        open
    }

    /// The same for an upload in the background, which replaces nothing.
    pub(super) fn take_room(&mut self, bytes: u64) -> bool {
        if self.step_bytes.is_none() {
            self.into_room += 1;
            return self.into_room <= ROOM_PER_STEP;
        }
        let open = self.room_credit > 0.0;
        if open {
            self.room_credit -= bytes as f32;
            // What replaces comes after it, but owes nothing.
            self.credit = (self.credit - bytes as f32).max(self.credit.min(0.0));
        }
        open
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(budget: &mut Budget, bytes: u64) -> usize {
        budget.open();
        (0..1000).take_while(|_| budget.take(bytes, false)).count()
    }

    #[test]
    fn without_rates_only_the_number_bounds() {
        assert_eq!(taken(&mut Budget::new(Some(3), 0.25), 1 << 20), 3);
        assert_eq!(taken(&mut Budget::new(None, 0.25), 1 << 20), 1000);
    }

    #[test]
    fn free_slots_are_filled_by_and_by() {
        let mut budget = Budget::new(None, 0.25);
        budget.open();
        let fill = |budget: &mut Budget| (0..1000).take_while(|_| budget.take_room(1 << 20)).count();
        assert_eq!((fill(&mut budget), budget.take(1, true), budget.take(1, false)), (96, false, true));
        budget.open();
        assert_eq!((0..1000).take_while(|_| budget.take(1, true)).count(), 96);
        // With rates it is the share of the link, whatever it is used for.
        budget.set_rates(Rates { cpu_bytes_per_us: 40_000.0, link_bytes_per_us: 10_000.0, step_us: 80_000.0 });
        budget.open();
        assert_eq!((fill(&mut budget), budget.take(1, false)), (573, false), "three quarters of 80 ms");
        assert_eq!(taken(&mut Budget::new(Some(3), 0.25), 1), 3);
    }

    #[test]
    fn the_share_of_the_link_bounds() {
        let mut budget = Budget::new(None, 0.25);
        // 8 ms at 10 GB/s: a quarter moves 20 MB.
        budget.set_rates(Rates { cpu_bytes_per_us: 40_000.0, link_bytes_per_us: 10_000.0, step_us: 8_000.0 });
        assert_eq!(taken(&mut budget, 2_000_000), 10);
        // A block of three steps' worth is uploaded every third step.
        let large: usize = (0..30).map(|_| taken(&mut budget, 60_000_000)).sum();
        assert!((9..=11).contains(&large), "{large}");
        // Credit is kept for four steps.
        for _ in 0..100 {
            budget.open();
        }
        assert_eq!(taken(&mut budget, 2_000_000), 40);
    }

    #[test]
    fn the_price_is_the_ratio_of_rates() {
        let rates = |cpu, link| Rates { cpu_bytes_per_us: cpu, link_bytes_per_us: link, step_us: 0.0 };
        assert_eq!(rates(38_000.0, 13_000.0).payback(), Some(38.0 / 13.0));
        assert_eq!(rates(0.0, 0.0).payback(), None);
        assert_eq!(rates(1.0, 0.0).payback(), None);
        let mut budget = Budget::new(None, 0.25);
        budget.set_rates(rates(1.0, 1.0));
        assert_eq!(taken(&mut budget, 1), 1000, "a step of unknown length bounds nothing");
    }
}
