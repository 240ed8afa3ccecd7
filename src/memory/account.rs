//! Leases of one device's memory, and what is left.

use std::sync::Arc;

use parking_lot::Mutex;

/// What memory is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Weights that every token uses.
    Dense,
    /// KV caches and recurrent states.
    Kv,
    /// Intermediate results, and buffers whose use is not known yet.
    Compute,
    /// Experts on the device.
    Arena,
    /// Memory of our own: scratch, ids.
    Other,
}

impl Use {
    const ALL: [Self; 5] = [Self::Dense, Self::Kv, Self::Compute, Self::Arena, Self::Other];

    /// What the log calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dense => "dense weights",
            Self::Kv => "KV",
            Self::Compute => "compute",
            Self::Arena => "cache",
            Self::Other => "scratch",
        }
    }
}

/// All leases of one device.
#[derive(Debug, Default)]
pub struct Account {
    sums: Mutex<Sums>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    leased: [usize; Use::ALL.len()],
    lent: usize,
    promised: usize,
}

impl Sums {
    fn total(&self) -> usize {
        self.leased.iter().fold(0, |sum, part| sum.saturating_add(*part))
    }

    /// Whether so much more passes the budget.
    fn passes(&self, bytes: usize, budget: Option<usize>) -> bool {
        budget.is_some_and(|budget| self.total().saturating_add(bytes) > budget)
    }

    /// A lease changed.
    fn change(&mut self, from: Part, to: Part) {
        self.leased[from.what as usize] -= from.bytes;
        self.leased[to.what as usize] += to.bytes;
        self.lent = self.lent - from.lent + to.lent;
        self.promised = self.promised - from.promised + to.promised;
    }
}

/// What a lease adds to the sums.
#[derive(Clone, Copy, Debug)]
struct Part {
    what: Use,
    bytes: usize,
    lent: usize,
    promised: usize,
}

impl Account {
    /// Counts `bytes` bytes; `None` if the sum of all leases would pass `budget`.
    pub fn lease(self: &Arc<Self>, what: Use, bytes: usize, budget: Option<usize>) -> Option<Lease> {
        let mut sums = self.sums.lock();
        if sums.passes(bytes, budget) {
            return None;
        }
        sums.leased[what as usize] += bytes;
        let part = Part { what, bytes, lent: 0, promised: 0 };
        Some(Lease { account: Arc::clone(self), held: Mutex::new(part) })
    }

    /// Bytes under one use.
    pub fn leased(&self, what: Use) -> usize {
        self.sums.lock().leased[what as usize]
    }

    /// Bytes under all uses.
    pub fn total(&self) -> usize {
        self.sums.lock().total()
    }

    /// Of them, bytes that a long pass has and that come back when it is over.
    pub fn lent(&self) -> usize {
        self.sums.lock().lent
    }

    /// Bytes that are not leased and that a long pass will ask for: hosts count them as taken.
    pub fn promised(&self) -> usize {
        self.sums.lock().promised
    }
}

impl std::fmt::Display for Account {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let leased = self.sums.lock().leased;
        let parts = Use::ALL.iter().map(|what| format!("{} {} MiB", what.name(), leased[*what as usize] >> 20));
        f.write_str(&parts.collect::<Vec<_>>().join(", "))
    }
}

/// Some bytes of an account, counted until dropped.
#[derive(Debug)]
pub struct Lease {
    account: Arc<Account>,
    held: Mutex<Part>,
}

impl Lease {
    /// The use became known.
    pub fn used_for(&self, what: Use) {
        self.change(|part| part.what = what);
    }

    /// The size became known, or changed.
    pub fn resize(&self, bytes: usize) {
        self.change(|part| part.bytes = bytes);
    }

    /// Bytes that are lent, and those that are promised.
    pub fn lend(&self, lent: usize, promised: usize) {
        self.change(|part| (part.lent, part.promised) = (lent, promised));
    }

    /// Takes `bytes` bytes more; false if the sum of all leases would pass `budget`.
    pub fn grow(&self, bytes: usize, budget: Option<usize>) -> bool {
        let mut held = self.held.lock();
        let mut sums = self.account.sums.lock();
        if sums.passes(bytes, budget) {
            return false;
        }
        sums.leased[held.what as usize] += bytes;
        held.bytes += bytes;
        true
    }

    fn change(&self, change: impl FnOnce(&mut Part)) {
        let mut held = self.held.lock();
        let before = *held;
        change(&mut held);
        self.account.sums.lock().change(before, *held);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let part = *self.held.get_mut();
        self.account.sums.lock().change(part, Part { bytes: 0, lent: 0, promised: 0, ..part });
    }
}

/// What is known at one moment, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figures {
    /// What the device has free.
    pub free: usize,
    /// All leases.
    pub leased: usize,
    /// Of them, the arena.
    pub arena: usize,
}

/// What the user allows, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The most that all leases may have.
    pub budget: Option<usize>,
    /// What the arena leaves to the inner backend's own scratch and to other programs.
    pub reserve: usize,
}

impl Limits {
    /// What could still be taken; negative when more was taken than allowed.
    fn open(&self, figures: Figures) -> i128 {
        let within = self.budget.map_or(i128::MAX, |budget| budget as i128 - figures.leased as i128);
        within.min(figures.free as i128)
    }

    /// The size that the arena may have.
    pub fn arena(&self, figures: Figures) -> usize {
        let size = figures.arena as i128 + self.open(figures) - self.reserve as i128;
        usize::try_from(size.max(0)).unwrap_or(usize::MAX)
    }

    /// What the arena has to give so that `bytes` more can be taken and the reserve stays free.
    pub fn missing(&self, figures: Figures, bytes: usize) -> usize {
        let missing = bytes as i128 + self.reserve as i128 - self.open(figures);
        usize::try_from(missing.max(0)).unwrap_or(usize::MAX).min(figures.arena)
    }

    /// What a host is told to be free and to be there at all: the arena counts as free, because it is given back to whoever asks.
    /// What is promised counts as taken, whether a long pass has it now or the arena.
    pub fn reported(&self, figures: Figures, promised: usize, total: usize) -> (usize, usize) {
        let free = usize::try_from(self.open(figures).max(0)).unwrap_or(usize::MAX);
        (
            free.saturating_add(figures.arena).saturating_sub(promised),
            self.budget.map_or(total, |budget| budget.min(total)),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn leases_are_counted_while_they_live() {
        let account = Arc::new(Account::default());
        let weights = account.lease(Use::Compute, 100, None).unwrap();
        weights.used_for(Use::Dense);
        let arena = account.lease(Use::Arena, 50, Some(150)).unwrap();
        assert_eq!((account.leased(Use::Dense), account.leased(Use::Compute), account.total()), (100, 0, 150));
        assert!(account.lease(Use::Kv, 1, Some(150)).is_none());
        arena.resize(20);
        assert_eq!(account.total(), 120);
        let kv = account.lease(Use::Kv, 30, Some(150)).unwrap();
        assert!(!kv.grow(1, Some(150)) && kv.grow(1, Some(151)));
        kv.lend(20, 500);
        assert_eq!((account.total(), account.lent(), account.promised()), (151, 20, 500));
        drop((weights, kv));
        assert_eq!((account.lent(), account.promised()), (0, 0));
        assert_eq!((account.total(), account.leased(Use::Arena)), (20, 20));
        assert!(account.to_string().starts_with("dense weights 0 MiB, KV 0 MiB"));
    }

    #[test]
    fn the_arena_leaves_the_reserve_and_keeps_to_the_budget() {
        let limits = Limits { budget: None, reserve: 384 };
        assert_eq!(limits.arena(Figures { free: 1000, leased: 0, arena: 0 }), 616);
        assert_eq!(limits.arena(Figures { free: 100, leased: 900, arena: 700 }), 416);
        assert_eq!(limits.arena(Figures { free: 0, leased: 300, arena: 300 }), 0);
        let capped = Limits { budget: Some(2000), reserve: 100 };
        assert_eq!(capped.arena(Figures { free: 1 << 40, leased: 1500, arena: 0 }), 400);
        assert_eq!(capped.arena(Figures { free: 1 << 40, leased: 2500, arena: 800 }), 200, "overdrawn");
        assert_eq!(capped.missing(Figures { free: 1 << 40, leased: 1900, arena: 800 }, 300), 300);
        assert_eq!(capped.missing(Figures { free: 1 << 40, leased: 1900, arena: 10 }, 300), 10);
        assert_eq!(capped.missing(Figures { free: 1 << 40, leased: 1000, arena: 10 }, 300), 0);
    }

    /// A 30B-A3B model (48 layers, 128 experts, Q4_K) on a card of 24 GiB: what llama.cpp gives an unset context, by what it is told and the
    /// room of 1,024 MiB that it keeps itself, leaves the arena 70% of what the dense weights leave.
    #[test]
    fn a_context_of_unset_size_leaves_the_arena_its_part() {
        let (card, dense, room_kept) = (24 << 30, 1_150 * MIB, 1024 * MIB);
        for (free, budget) in [(card, None), (140 << 30, Some(card))] {
            let limits = Limits { budget, reserve: 384 * MIB };
            let before = Figures { free, leased: 0, arena: 0 };
            let (told, total) = limits.reported(before, 0, free);
            assert_eq!((told, total), (card, card));
            let reported = crate::device::reported_free(told, dense, 0.30);
            let context = reported - dense - room_kept; // KV and compute buffers: everything that fits
            let taken = dense + context;
            let arena = limits.arena(Figures { free: free - taken, leased: taken, arena: 0 });
            let share = arena as f64 / (card - dense) as f64;
            assert!((0.70..0.75).contains(&share), "{share}");
        }
    }

    proptest! {
        /// Whoever takes what it asked room for finds the reserve still free, unless the arena is empty.
        #[test]
        fn room_made_is_room_enough(free in 0_usize..1 << 20, others in 0_usize..1 << 20, arena in 0_usize..1 << 20,
                                    reserve in 0_usize..1 << 16, budget in proptest::option::of(0_usize..1 << 21), bytes in 0_usize..1 << 20) {
            let limits = Limits { budget, reserve };
            let figures = Figures { free, leased: others + arena, arena };
            let given = limits.missing(figures, bytes);
            prop_assert!(given <= arena);
            let after = Figures { free: free + given, leased: figures.leased - given, arena: arena - given };
            prop_assert!(after.arena == 0 || limits.open(after) >= (bytes + reserve) as i128);
            prop_assert!(given == 0 || limits.open(after) <= (bytes + reserve) as i128, "no more than needed");
            // The size that the arena may have is a fixed point.
            let size = limits.arena(figures);
            let resized = Figures { free: (free + arena).saturating_sub(size), leased: others + size, arena: size };
            prop_assert!(limits.arena(resized) <= size);
        }
    }
}
