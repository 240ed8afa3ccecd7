//! A device's memory budget at work: room for allocations of ours, and the size of the cache from graph to graph.
//!
//! Owns: the account, the rule of the arena's size, the times of the looks at what is free.
//! Invariants: the cache changes its size only while this thread has taken it, between graphs. What cannot shrink is dropped, and made again
//! when there is room. With no cache and no budget nothing is asked of the device.
//! Threads: any. No lock is held while the device is asked or the cache works.
//! Does not: move experts (`experts::cache` does) or allocate (`buffer` does).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Device;
use crate::config::CacheSize;
use crate::experts::cache::{Cache, ResizeError};
use crate::memory::{Account, Change, Control, Figures, Lease, Limits, Use, Why};
use crate::telemetry::log;

/// How often the device is asked what is free, in ms.
const LOOK_MS: u64 = 100;
/// When a cache for which there was no room is tried again, in ms.
const RETRY_MS: u64 = 3_000;
/// How much an arena grows by with each graph, so that no single one waits for all of it.
const STEP_BYTES: usize = 256 << 20;
/// The smallest automatic cache of a GPU.
const LEAST_BYTES: usize = 64 << 20;
/// How long an allocation waits for the graph that has the cache.
const PATIENCE: Duration = Duration::from_secs(2);
/// A change of at least this part of the arena is told at the detail `notice`.
const LARGE_PART: usize = 8;

/// For how long memory is taken from the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Term {
    /// The cache gets along without it.
    Lasting,
    /// For a long pass: the cache has it again when the pass is over.
    Lent,
}

/// The memory that a cache is made with, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheRoom {
    /// What it starts with.
    pub(crate) start: usize,
    /// What it may have now.
    pub(crate) may: usize,
    /// What the device and the budget have for it, whatever the user asked for.
    pub(crate) limit: usize,
    /// The most that it can ever have.
    pub(crate) most: usize,
}

/// The state behind it.
pub(super) struct Budget {
    account: Arc<Account>,
    control: Mutex<Control>,
    began: Instant,
    looked_ms: AtomicU64,
    /// No cache is made before this time.
    retry_ms: AtomicU64,
    /// What an allocation missed while its own thread, or one that did not end in time, had the cache.
    owed: AtomicUsize,
    /// The next cache starts with everything: it takes the place of one that had to go to grow.
    at_once: AtomicBool,
    told: AtomicBool,
    /// Before this time there is nothing for the cache to grow into.
    full_ms: AtomicU64,
    /// Whether the cache lent memory that it does not have back yet.
    lends: AtomicBool,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            account: Arc::default(),
            control: Mutex::default(),
            began: Instant::now(),
            looked_ms: AtomicU64::new(0),
            retry_ms: AtomicU64::new(0),
            owed: AtomicUsize::new(0),
            at_once: AtomicBool::new(false),
            full_ms: AtomicU64::new(0),
            lends: AtomicBool::new(false),
            told: AtomicBool::new(false),
        }
    }
}

impl Budget {
    fn now_ms(&self) -> u64 {
        // Never zero, which stands for never.
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1)
    }
}

impl Device {
    /// Who has how much of the inner device's memory.
    pub(crate) fn account(&self) -> &Arc<Account> {
        &self.budget.account
    }

    fn limits(&self) -> Limits {
        let bytes = |mib: u64| usize::try_from(mib.saturating_mul(1 << 20)).unwrap_or(usize::MAX);
        let budget = self.config.vram_budget_mb.filter(|_| !self.passes_through());
        Limits { budget: budget.map(bytes), reserve: bytes(self.config.vram_reserve_mb) }
    }

    fn figures(&self, free: usize) -> Figures {
        let account = &self.budget.account;
        Figures { free, leased: account.total(), arena: account.leased(Use::Arena) }
    }

    /// What keeps a cache from taking everything, in words.
    pub(crate) fn limit_words(&self) -> String {
        let reserve = format!("the {} MiB of vram-reserve-mb", self.config.vram_reserve_mb);
        match self.budget_mib() {
            Some(mib) => format!("{reserve}, within the {mib} MiB of vram-budget-mb"),
            None => reserve,
        }
    }

    /// Whether what is free says something about the room of a cache: over the CPU it is all RAM, and the size of the cache the user's.
    fn watches_memory(&self) -> bool {
        self.is_gpu() || self.limits().budget.is_some()
    }

    /// Free and total memory, as far as the budget goes, with the cache counted as free and compute buffers as if all of their memory were there.
    pub(crate) fn free_and_total(&self) -> (usize, usize) {
        let (free, total) = self.inner.memory();
        self.limits().reported(self.figures(free), self.budget.account.promised(), total)
    }

    /// A plan has so many bytes beside dense weights for a context and for computing; 0 is no plan.
    pub(crate) fn plan_room(&self, bytes: u64) {
        self.planned.store(usize::try_from(bytes).unwrap_or(usize::MAX), Ordering::Relaxed);
    }

    /// Whether a cache may change its size. Otherwise it is dropped and made again.
    pub(crate) fn may_resize(&self) -> bool {
        !self.config.debug_fixed_memory
    }

    /// What staging may be cut from: what the cache has or is free, less the reserve. Without bounds where nobody watches.
    pub(crate) fn lendable(&self) -> usize {
        if !self.watches_memory() {
            return usize::MAX;
        }
        self.limits().arena(self.figures(self.inner.memory().0))
    }

    /// The memory for a cache that is made now; `None` if there is not enough of it yet.
    /// `slots_bytes` is what the slots take that the user asked for in each layer.
    pub(crate) fn cache_room(&self, slots_bytes: usize) -> Option<CacheRoom> {
        let (free, total) = self.inner.memory();
        let (cap, automatic) = match self.config.cache {
            CacheSize::Off => return None,
            CacheSize::Mib(mib) => (mib << 20, false),
            CacheSize::SlotsPerLayer(_) => (slots_bytes, false),
            CacheSize::Auto => (usize::MAX, true),
        };
        let limits = self.limits();
        let may = if self.watches_memory() { limits.arena(self.figures(free)) } else { usize::MAX };
        let size = cap.min(may);
        if size < LEAST_BYTES.min(cap) && self.is_gpu() || size == 0 {
            self.tell_no_cache(&format!(
                "only {} MiB are free beside the reserve (vram-reserve-mb); it is made when there are more",
                size >> 20
            ));
            return None;
        }
        let at_once = self.budget.at_once.swap(false, Ordering::Relaxed) || !automatic;
        let start = self.budget.control.lock().begin(size, at_once);
        if at_once && automatic {
            self.settle(start); // a long pass may have some of what it can have
        }
        Some(CacheRoom { start, may: size, limit: may, most: cap.min(limits.budget.unwrap_or(total)) })
    }

    /// There was no room for a cache: it is tried again later.
    pub(crate) fn postpone_cache(&self) {
        self.budget.retry_ms.store(self.budget.now_ms() + RETRY_MS, Ordering::Relaxed);
    }

    /// Whether it is too early to try again to make a cache.
    pub(crate) fn waits_for_room(&self) -> bool {
        let retry = self.budget.retry_ms.load(Ordering::Relaxed);
        retry != 0 && self.budget.now_ms() < retry
    }

    /// Room for `bytes` bytes more, and a lease of them; `None` if the budget does not hold them, even without a cache.
    pub(crate) fn lease_room(&self, what: Use, bytes: usize, term: Term) -> Option<Lease> {
        self.make_room(what, bytes, term);
        let lease = || self.budget.account.lease(what, bytes, self.limits().budget);
        // Staging is kept between passes; it is made again when it is needed.
        lease().or_else(|| if self.drop_ring() > 0 { lease() } else { None })
    }

    /// Room for `bytes` bytes more under a lease, for a long pass; false if the budget does not hold them, even without a cache.
    pub(crate) fn lend_room(&self, lease: &Lease, what: Use, bytes: usize) -> bool {
        self.make_room(what, bytes, Term::Lent);
        let grow = || lease.grow(bytes, self.limits().budget);
        grow() || self.drop_ring() > 0 && grow()
    }

    fn make_room(&self, what: Use, bytes: usize, term: Term) {
        if self.budget.account.leased(Use::Arena) > 0 && self.watches_memory() {
            let missing = self.limits().missing(self.figures(self.inner.memory().0), bytes);
            if missing > 0 {
                self.reclaim(missing, what, bytes, term);
            }
        }
    }

    /// Whether compute buffers have memory only for what graphs touch: where there may be a cache that uses it otherwise.
    pub(crate) fn lends(&self) -> bool {
        self.config.lend && !self.passes_through() && self.may_cache()
    }

    /// Whether that is only pretended: everything has memory at all times, and the rest is as if it had not (tests only).
    pub(crate) fn maps_all(&self) -> bool {
        self.config.debug_map_all
    }

    /// Memory of a long pass went back.
    pub(crate) fn note_returned(&self) {
        self.budget.full_ms.store(0, Ordering::Relaxed);
    }

    /// The budget, in MiB, if there is one.
    pub(crate) fn budget_mib(&self) -> Option<u64> {
        self.limits().budget.and(self.config.vram_budget_mb)
    }

    /// An allocation of `bytes` bytes failed: takes memory back from the cache, more with each try. False if there is nothing to take.
    pub(crate) fn reclaim_for(&self, what: Use, bytes: usize, tries: usize, term: Term) -> bool {
        let missing = match tries {
            0 => bytes,
            1 => bytes.saturating_mul(2).saturating_add(LEAST_BYTES),
            _ => usize::MAX,
        };
        self.drop_ring() > 0 || self.budget.account.leased(Use::Arena) > 0 && self.reclaim(missing, what, bytes, term)
    }

    /// Takes `missing` bytes back from the cache, waiting for the graph that has it. False if nothing came back.
    fn reclaim(&self, missing: usize, what: Use, bytes: usize, term: Term) -> bool {
        let Some(slot) = self.take_cache_within(PATIENCE) else {
            self.budget.owed.fetch_max(missing, Ordering::Relaxed);
            return false;
        };
        let Some(cache) = slot else {
            self.put_cache(None);
            return false;
        };
        let reason = format!("{} MiB are needed for {}", bytes.div_ceil(1 << 20), what.name());
        let to = cache.arena_bytes().saturating_sub(missing);
        match term {
            Term::Lasting => self.settle(to),
            Term::Lent => self.budget.lends.store(true, Ordering::Relaxed),
        }
        let cache = self.shrunk(cache, to, &reason, term);
        self.put_cache(cache);
        true
    }

    /// The cache is to keep this size, beside what it lent.
    fn settle(&self, bytes: usize) {
        self.budget.control.lock().settle(bytes.saturating_add(self.budget.account.lent()));
    }

    /// A graph is about to start: looks now and then at what is free, and gives memory back if the reserve was touched.
    pub(crate) fn tend_cache(&self) {
        if self.budget.account.leased(Use::Arena) == 0 || !self.watches_memory() {
            return;
        }
        let now = self.budget.now_ms();
        if now < self.budget.looked_ms.load(Ordering::Relaxed) + LOOK_MS {
            return;
        }
        self.budget.looked_ms.store(now, Ordering::Relaxed);
        // If another backend has it, that one looks.
        let Some(slot) = self.take_cache() else { return };
        let cache = slot.and_then(|cache| self.look(cache, now));
        self.put_cache(cache);
    }

    fn look(&self, cache: Cache, now: u64) -> Option<Cache> {
        let (arena, cap) = (cache.arena_bytes(), self.cap(&cache));
        let may = self.limits().arena(self.figures(self.inner.memory().0)).min(cap.max(arena));
        let lent = self.budget.account.lent().min(cap.max(arena).saturating_sub(may));
        let change = self.budget.control.lock().look(now, arena, may, lent);
        match change {
            None => Some(cache),
            Some(Change::Shrink(to, _)) => {
                self.shrunk(cache, to, "the reserve (vram-reserve-mb), or the budget, was touched", Term::Lasting)
            }
            Some(Change::Grow(to, why)) => {
                let reason = match why {
                    Why::Request => "a request is being answered, so nothing more is loaded before it",
                    Why::Surplus | Why::Reserve => "memory stayed free",
                };
                // What has one size is made again, once, if it does not hold everything.
                let (slots, blocks) = cache.slots();
                let again = !cache.is_elastic() && why == Why::Request && (slots as usize) < blocks;
                if cache.is_elastic() || again {
                    self.tell("grows", arena, to, &cache, reason, Term::Lasting);
                }
                self.budget.at_once.store(again, Ordering::Relaxed);
                (!again).then_some(cache) // by steps, as graphs end
            }
        }
    }

    /// The most that the arena may have.
    fn cap(&self, cache: &Cache) -> usize {
        let cap = match self.config.cache {
            CacheSize::Mib(mib) => mib << 20,
            CacheSize::SlotsPerLayer(_) => cache.most_bytes(),
            CacheSize::Auto | CacheSize::Off => usize::MAX,
        };
        if cache.is_elastic() { cap.min(cache.most_bytes()) } else { cap }
    }

    /// The cache with no more than `to` bytes; `None` if it had to be dropped.
    fn shrunk(&self, mut cache: Cache, to: usize, reason: &str, term: Term) -> Option<Cache> {
        let before = cache.arena_bytes();
        // What was made for a model that is gone is of no use to anybody.
        let done = if cache.is_current(self) { cache.shrink(self, to) } else { Err(ResizeError::Whole) };
        match done {
            Ok(()) => {
                self.tell("shrinks", before, cache.arena_bytes(), &cache, reason, term);
                Some(cache)
            }
            Err(error) => {
                if !matches!(error, ResizeError::Whole) {
                    log::error(&format!("{}: memory of the cache could not be given back: {error}", self.label()));
                }
                if self.opened_driver().is_some_and(|driver| driver.settle().is_err()) {
                    self.poison();
                }
                drop(cache);
                self.postpone_cache();
                log::notice(&format!("{}: the cache of {} MiB is dropped: {reason}", self.label(), before >> 20));
                None
            }
        }
    }

    /// A graph of so many tokens was handed to the device: the cache grows by a step, or gives what an allocation missed.
    pub(crate) fn step_cache(&self, mut cache: Cache, tokens: u32) -> Option<Cache> {
        let owed = self.budget.owed.swap(0, Ordering::Relaxed);
        let arena = cache.arena_bytes();
        if owed > 0 {
            let to = arena.saturating_sub(owed);
            self.settle(to);
            return self.shrunk(cache, to, "memory was needed while a graph ran", Term::Lasting);
        }
        let target = {
            let mut control = self.budget.control.lock();
            control.note_tokens(tokens);
            control.target()
        };
        let lends = self.budget.lends.load(Ordering::Relaxed);
        if (target > arena || lends)
            && cache.is_elastic()
            && self.budget.now_ms() >= self.budget.full_ms.load(Ordering::Relaxed)
        {
            self.grow(&mut cache, target);
        }
        Some(cache)
    }

    /// A long pass is about to run and has what it needs: the cache takes what it is to go to and what is left, because its experts come to it
    /// on the pass's way.
    pub(crate) fn fill_cache(&self, cache: &mut Cache) {
        if !cache.is_elastic() || !self.watches_memory() {
            return;
        }
        let (arena, target) = (cache.arena_bytes(), self.budget.control.lock().target().min(self.cap(cache)));
        if target <= arena {
            return;
        }
        let may = self.limits().arena(self.figures(self.inner.memory().0));
        if may > arena
            && let Err(error) = cache.grow(self, target.min(may))
        {
            log::info(&format!("{}: the cache stays at {} MiB: {error}", self.label(), arena >> 20));
            self.settle(cache.arena_bytes());
        }
    }

    /// A buffer that was allocated as a whole gave its memory back, because it is used on demand.
    pub(crate) fn note_on_demand(&self, bytes: usize) {
        self.budget.control.lock().returned(bytes);
    }

    /// What a cache may hold with so many bytes more in use.
    pub(crate) fn room_beside(&self, bytes: usize) -> usize {
        let cap = if let CacheSize::Mib(mib) = self.config.cache { mib << 20 } else { usize::MAX };
        self.lendable().saturating_sub(bytes).min(cap)
    }

    /// Grows by a step, as far as memory is there: a long pass may still have some of it.
    fn grow(&self, cache: &mut Cache, target: usize) {
        let arena = cache.arena_bytes();
        let step = target.min(self.cap(cache)).max(arena).min(arena.saturating_add(STEP_BYTES));
        let may = if self.watches_memory() { self.limits().arena(self.figures(self.inner.memory().0)) } else { step };
        let done = if may > arena { cache.grow(self, step.min(may)) } else { Ok(()) };
        if let Err(error) = done {
            log::info(&format!("{}: the cache stays at {} MiB: {error}", self.label(), arena >> 20));
            self.settle(cache.arena_bytes());
        }
        if cache.arena_bytes() > arena {
            return;
        }
        // It is not asked with every token.
        self.budget.full_ms.store(self.budget.now_ms() + LOOK_MS, Ordering::Relaxed);
        if self.budget.account.lent() == 0 && self.budget.lends.swap(false, Ordering::Relaxed) {
            let (arena, target) = (arena >> 10, target >> 10);
            log::info(&format!("{}: the cache has {arena} of {target} KiB again, after a long pass", self.label()));
        }
    }

    /// Whether an allocation missed what the cache has; it is asked once.
    pub(crate) fn take_owed(&self) -> bool {
        self.budget.owed.swap(0, Ordering::Relaxed) > 0
    }

    fn tell(&self, how: &str, from: usize, to: usize, cache: &Cache, reason: &str, term: Term) {
        let (slots, blocks) = cache.slots();
        let slots = if how == "grows" { String::new() } else { format!(" ({slots} of {blocks} experts)") };
        let line =
            format!("{}: the cache {how} from {} to {} MiB{slots}: {reason}", self.label(), from >> 20, to >> 20);
        if term == Term::Lent {
            return log::info(&line); // with every long prompt
        }
        let first = !self.budget.told.swap(true, Ordering::Relaxed);
        if first || from.abs_diff(to) >= from / LARGE_PART { log::notice(&line) } else { log::info(&line) }
    }
}
