//! Which experts are worth a place on the device. Pure: the same calls give the same answers.
//!
//! Owns: the order of blocks (`ranking`), recent use (`window`), the choice between recency and frequency (`regime`), the bounds
//! of uploads (`budget`), static placement of whole layers (`layers`) and the choice between cache and stock mode (`governor`).
//!
//! The rule, per pool: a block's score is its uses in the last 64 tokens plus those in the last 24. After each step the best
//! absent block takes the place of the worst held one, if it was used at least twice in the window and if what it was used more
//! often in a window is more than an upload costs (B_cpu / B_link uses); and so on until one of these fails or the budget of the
//! step is spent. Lifetime heat decides between equal scores, and who comes first when there is room. Where a list by lifetime
//! heat would find more, that list is kept instead. A pool that cannot hold one token's experts holds whole layers.
//!
//! Invariants: a block is held or absent; never more held than slots; a block is not evicted while it loads. Noting a use and
//! ending a step cost constant time per use and allocate nothing once the window is full.
//! Threads: one at a time. Does not: know slots, bytes or events (`residency` does); decide about prompts and warm-up graphs, which
//! must not be noted here.

mod budget;
mod expectation;
mod governor;
mod layers;
mod offer;
mod prompt;
mod ranking;
mod regime;
mod room;
mod settings;
#[cfg(test)]
mod tests;
mod window;

pub use budget::Rates;
pub use expectation::{Expectation, Ground, expected_hits};
pub use governor::{Governor, GovernorSettings, Mode, Reason, Verdict};
pub use layers::whole_layers;
pub use prompt::PromptTail;
pub use regime::Regime;
pub use settings::{Admission, Pool, Settings, Tally};

use super::heat::Heat;
use super::shape::{Block, GroupId, Shape};
use budget::Budget;
use ranking::{End, LEVELS, Ranking};
use regime::Comparison;
use window::{Counts, Lost, Window};

/// The short window, as a part of the window: 24 of 64 tokens.
const SHORT: (u32, u32) = (3, 8);
/// Sublevels of a score, by lifetime heat.
const SUBLEVELS: u16 = 8;
/// How many members of a level are tried when the first may not leave.
const TRIES: usize = 8;

/// How a pool orders its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    By(Regime),
    /// Whole layers, or nothing else.
    Layers,
}

#[derive(Clone, Debug)]
struct PoolState {
    pool: Pool,
    order: Order,
    regime: Regime,
    /// What one token uses of the pool.
    used: u32,
    comparison: Comparison,
}

/// The policy of one device.
#[derive(Clone, Debug)]
pub struct Policy {
    shape: Shape,
    settings: Settings,
    mode: Mode,
    pools: Vec<PoolState>,
    pool_of: Vec<u16>,
    ranking: Ranking<Counts>,
    window: Window,
    heat: Heat,
    budget: Budget,
    payback: f32,
    loading: Vec<bool>,
    /// Blocks that stock mode wants.
    wanted: Vec<bool>,
    /// What is loaded while there is room, the best first, and how far that went.
    preload: (Vec<Block>, usize),
    /// Tokens since that list was made.
    preload_age: u32,
    tally: Tally,
    /// The pool that was first to spend the budget.
    turn: u16,
    out: Vec<Admission>,
    left: Vec<Block>,
}

const fn held_row(pool: u16) -> u16 {
    2 * pool + 1
}

const fn absent_row(pool: u16) -> u16 {
    2 * pool
}

impl Policy {
    /// A policy that holds nothing yet. `heat` is what earlier runs learned; `pools` may be fewer than the shape names: what has no
    /// pool has no slots.
    pub fn new(shape: Shape, pools: &[Pool], settings: Settings, heat: Heat) -> Self {
        let blocks = shape.blocks();
        let pool_of: Vec<u16> =
            shape.groups().iter().flat_map(|group| std::iter::repeat_n(group.pool, group.experts as usize)).collect();
        let window_tokens = settings.window.clamp(8, Window::LONGEST);
        let settings = Settings { window: window_tokens, admit: settings.admit.max(1), ..settings };
        let uses_per_token = shape.groups().iter().map(|group| group.used as usize).sum();
        let heat = if heat.blocks() == blocks { heat } else { Heat::new(blocks) };
        let states = (0..shape.pools()).map(|number| {
            let groups = || shape.groups().iter().filter(move |group| usize::from(group.pool) == number);
            let regime = settings.regime.unwrap_or(Regime::Recency);
            PoolState {
                pool: pools.get(number).copied().unwrap_or(Pool { slots: 0, block_bytes: 0 }),
                order: Order::By(regime),
                regime,
                used: groups().map(|group| group.used).sum(),
                comparison: Comparison::new(groups().map(|group| group.experts).sum()),
            }
        });
        let pools: Vec<PoolState> = states.collect();
        let mut policy = Self {
            ranking: Ranking::new(&pool_of, pools.len()),
            window: Window::new(window_tokens, window_tokens * SHORT.0 / SHORT.1, uses_per_token),
            budget: Budget::new(settings.swaps_per_step, settings.upload_share),
            payback: settings.payback.max(0.0),
            loading: vec![false; blocks],
            wanted: vec![false; blocks],
            preload: (heat.hottest(), 0),
            preload_age: 0,
            mode: Mode::Cache,
            tally: Tally::default(),
            turn: 0,
            out: Vec::new(),
            left: Vec::new(),
            shape,
            settings,
            pools,
            pool_of,
            heat,
        };
        for pool in policy.pool_numbers() {
            let levels = policy.blocks_of(pool).map(|block| policy.heat_level(block)).collect::<Vec<_>>();
            policy.pools[usize::from(pool)].comparison.recount_heat(levels.into_iter());
        }
        policy.reorder();
        policy
    }

    /// One MoE block of the graph used these experts. An id that does not exist is ignored; whoever reads ids checks them.
    pub fn note_use(&mut self, group: GroupId, experts: impl IntoIterator<Item = u32, IntoIter: Clone>) {
        let experts = experts.into_iter();
        // The tables are larger than a core's cache. Looked up in a loop of its own, the records arrive at the same time.
        for expert in experts.clone() {
            let Some(block) = self.shape.block(group, expert) else { continue };
            self.tally.uses += 1;
            self.tally.hits += u64::from(self.found(block));
        }
        for expert in experts {
            let Some(block) = self.shape.block(group, expert) else { continue };
            let (found, heat) = (self.found(block), self.heat_level(block));
            let Some(score) = self.add_to_window(block) else { continue };
            self.pools[usize::from(self.ranking.row(block) / 2)].comparison.ask(score, heat, found);
            self.add_to_heat(block);
            self.place_anew(block);
        }
    }

    /// A use in the open step; its score before. `None` if it is not the first of the step.
    fn add_to_window(&mut self, block: Block) -> Option<u16> {
        let counts = self.ranking.record_mut(block);
        let score = counts.score();
        if !self.window.add(block, counts) {
            return None;
        }
        let pool = self.ranking.row(block) / 2;
        self.pools[usize::from(pool)].comparison.shift_score(score, score + 2);
        Some(score)
    }

    fn add_to_heat(&mut self, block: Block) {
        let before = self.heat_level(block);
        self.heat.add(block);
        let pool = self.ranking.row(block) / 2;
        let after = self.heat_level(block);
        self.pools[usize::from(pool)].comparison.shift_heat(before, after);
    }

    /// Its score or heat changed.
    fn place_anew(&mut self, block: Block) {
        let row = self.ranking.row(block);
        if self.order(row / 2) != Order::Layers {
            self.ranking.place(block, row, self.level(block), End::Back);
        }
    }

    /// Ends a step of some tokens and says what to upload. Every admitted block must be answered by [`Policy::loaded`] or
    /// [`Policy::failed`].
    pub fn end_of_step(&mut self, tokens: u32) -> &[Admission] {
        self.close_window(tokens);
        self.preload_age = self.preload_age.saturating_add(tokens);
        if self.heat.advance(tokens) {
            self.recount_heat();
        }
        self.choose_regimes(tokens);
        self.out.clear();
        self.budget.open();
        // Another pool begins each time, so that a small budget serves all of them.
        let pools = u16::try_from(self.pools.len()).unwrap_or(u16::MAX);
        self.turn = (self.turn + 1) % pools.max(1);
        for pool in (self.turn..pools).chain(0..self.turn) {
            while let Some(admission) = self.next_admission(pool) {
                let (bytes, into_room) = (self.pools[usize::from(pool)].pool.block_bytes, admission.evicts.is_none());
                if !self.budget.take(bytes, into_room) {
                    return &self.out;
                }
                self.carry_out(pool, admission);
            }
        }
        &self.out
    }

    /// The upload of an admitted block is complete.
    pub fn loaded(&mut self, block: Block) {
        self.loading[block.index()] = false;
    }

    /// The upload of an admitted block did not happen: the block is absent again.
    pub fn failed(&mut self, block: Block) {
        self.loading[block.index()] = false;
        let pool = self.pool_of[block.index()];
        self.ranking.place(block, absent_row(pool), self.ranking.level(block), End::Front);
    }

    /// Changes the size of a pool. Returns the blocks that lose their place, the least useful first.
    pub fn resize(&mut self, pool: u16, slots: u32) -> &[Block] {
        self.left.clear();
        let Some(state) = self.pools.get_mut(usize::from(pool)) else { return &self.left };
        state.pool.slots = slots;
        while self.ranking.count(held_row(pool)) > slots {
            let Some(block) = self.ranking.lowest(held_row(pool), 1, |_| true) else { break };
            self.loading[block.index()] = false;
            self.ranking.place(block, absent_row(pool), self.ranking.level(block), End::Back);
            self.left.push(block);
        }
        self.preload.1 = 0; // what was passed over may have room, and what was there may be gone
        self.reorder();
        &self.left
    }

    /// Cache or stock mode, as the governor says. The steps after it move blocks accordingly, within their budget.
    pub fn set_mode(&mut self, mode: Mode) {
        if self.mode != mode {
            self.mode = mode;
            self.reorder();
        }
    }

    /// Rates were measured. Not called when decisions must not depend on time.
    pub fn set_rates(&mut self, rates: Rates) {
        self.budget.set_rates(rates);
        self.payback = rates.payback().unwrap_or(self.payback);
    }

    /// Whether a block is held, loaded or not.
    pub fn holds(&self, block: Block) -> bool {
        self.ranking.row(block) == held_row(self.pool_of[block.index()])
    }

    /// Number of blocks that a pool holds.
    pub fn held(&self, pool: u16) -> u32 {
        if usize::from(pool) < self.pools.len() { self.ranking.count(held_row(pool)) } else { 0 }
    }

    /// Whether a pool is too small for one token's experts, so that it holds whole layers in every mode.
    pub fn below_floor(&self, pool: u16) -> bool {
        self.pools.get(usize::from(pool)).is_some_and(|state| state.pool.slots < state.used)
    }

    /// Cache or stock mode.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The regime of a pool.
    pub fn regime(&self, pool: u16) -> Option<Regime> {
        self.pools.get(usize::from(pool)).map(|state| state.regime)
    }

    /// What was counted so far.
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// The heat, with what this policy saw.
    pub fn heat(&self) -> &Heat {
        &self.heat
    }

    /// The numbering.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    fn found(&self, block: Block) -> bool {
        let row = self.ranking.row(block);
        row == held_row(row / 2) && !self.loading[block.index()]
    }

    fn pool_numbers(&self) -> impl Iterator<Item = u16> + use<> {
        0..u16::try_from(self.pools.len()).unwrap_or(u16::MAX)
    }

    fn blocks_of(&self, pool: u16) -> impl Iterator<Item = Block> {
        (0_u32..).zip(&self.pool_of).filter(move |&(_, &own)| own == pool).map(|(number, _)| Block(number))
    }

    fn order(&self, pool: u16) -> Order {
        self.pools[usize::from(pool)].order
    }

    fn has_room(&self, pool: u16) -> bool {
        self.ranking.count(held_row(pool)) < self.pools[usize::from(pool)].pool.slots
    }

    /// Heat as a level: the exponent and three bits of the mantissa, so that levels lie 6 to 12% apart.
    fn heat_level(&self, block: Block) -> u16 {
        u16::try_from(self.heat.raw(block).to_bits() >> 20).unwrap_or(0).min(LEVELS - 1)
    }

    fn level(&self, block: Block) -> u16 {
        match self.order(self.ranking.row(block) / 2) {
            Order::By(Regime::Recency) => {
                // Among blocks that nobody used lately, the order in which they went out of use is the best guess.
                let score = self.ranking.record(block).score();
                if score == 0 { 0 } else { (score * SUBLEVELS + self.tie(block)).min(LEVELS - 1) }
            }
            Order::By(Regime::Frequency) => self.heat_level(block),
            Order::Layers => u16::from(self.wanted[block.index()]),
        }
    }

    /// Lifetime heat as a sublevel: octaves of the rate, the middle one around one use in 16 tokens.
    fn tie(&self, block: Block) -> u16 {
        let octave = (self.heat.rate(block) * 16.0).to_bits() >> 23;
        u16::try_from((octave + u32::from(SUBLEVELS) / 2).saturating_sub(127)).unwrap_or(0).min(SUBLEVELS - 1)
    }

    fn close_window(&mut self, tokens: u32) {
        let Self { window, ranking, pools, .. } = self;
        window.close(tokens, |block, lost| {
            let counts = ranking.record_mut(block);
            match lost {
                Lost::Long => counts.long -= 1,
                Lost::Short => counts.short -= 1,
            }
            let score = counts.score();
            let state = &mut pools[usize::from(ranking.row(block) / 2)];
            state.comparison.shift_score(score + 1, score);
            if state.order == Order::By(Regime::Recency) {
                let sublevel = ranking.level(block) % SUBLEVELS;
                let (level, end) = if score == 0 { (0, End::Back) } else { (score * SUBLEVELS + sublevel, End::Front) };
                ranking.place(block, ranking.row(block), level.min(LEVELS - 1), end);
            }
        });
    }

    fn choose_regimes(&mut self, tokens: u32) {
        if self.settings.regime.is_some() {
            return;
        }
        let mut changed = false;
        for state in &mut self.pools {
            if let Some(regime) = state.comparison.look(state.regime, tokens, state.pool.slots, self.payback) {
                state.regime = regime;
                changed = true;
            }
        }
        if changed {
            self.reorder();
        }
    }

    fn recount_heat(&mut self) {
        for pool in self.pool_numbers() {
            let levels: Vec<u16> = self.blocks_of(pool).map(|block| self.heat_level(block)).collect();
            self.pools[usize::from(pool)].comparison.recount_heat(levels.into_iter());
        }
        self.reorder();
    }

    /// Orders and levels follow from mode, floor and regime.
    fn reorder(&mut self) {
        let mut layers = false;
        for pool in self.pool_numbers() {
            let floor = self.below_floor(pool);
            let state = &mut self.pools[usize::from(pool)];
            state.order = if self.mode == Mode::Stock || floor { Order::Layers } else { Order::By(state.regime) };
            layers |= state.order == Order::Layers;
        }
        if layers {
            let slots: Vec<u32> = self.pools.iter().map(|state| state.pool.slots).collect();
            self.wanted.fill(false);
            for block in whole_layers(&self.shape, &slots, &self.heat) {
                self.wanted[block.index()] = true;
            }
        }
        for number in 0..u32::try_from(self.pool_of.len()).unwrap_or(u32::MAX) {
            let block = Block(number);
            self.ranking.place(block, self.ranking.row(block), self.level(block), End::Back);
        }
    }

    fn next_admission(&self, pool: u16) -> Option<Admission> {
        let state = &self.pools[usize::from(pool)];
        let block = self.ranking.highest(absent_row(pool), 1, |_| true)?;
        let level = self.ranking.level(block);
        if self.has_room(pool) {
            let useful = match state.order {
                Order::By(_) => self.ranking.record(block).long > 0,
                Order::Layers => level > 0,
            };
            return useful.then_some(Admission { block, evicts: None });
        }
        let victim = self.ranking.lowest(held_row(pool), TRIES, |block| !self.loading[block.index()])?;
        let worst = self.ranking.level(victim);
        let better = match state.order {
            Order::By(Regime::Recency) => {
                // With sublevels: of equal scores, the hotter block is worth a part of a use more.
                let more = (f32::from(level) - f32::from(worst)) / f32::from(SUBLEVELS);
                let window = self.settings.window as f32;
                let uses = u32::from(self.ranking.record(block).long);
                // What only passed by, and nobody ever used, is as good as a free slot.
                let unproven = self.heat.raw(victim) <= 0.0 && uses > 0;
                let proven = uses >= self.settings.admit && more * window >= self.payback * self.window.full_score();
                level > worst && (unproven || proven)
            }
            Order::By(Regime::Frequency) => {
                let more = self.heat.rate(block) - self.heat.rate(victim);
                // Two levels apart are at least 12% more heat; the list is meant to stay for long.
                level > worst + 1 && more * FREQUENCY_HORIZON_TOKENS >= self.payback
            }
            Order::Layers => level > worst,
        };
        better.then_some(Admission { block, evicts: Some(victim) })
    }

    fn carry_out(&mut self, pool: u16, admission: Admission) {
        if let Some(victim) = admission.evicts {
            self.ranking.place(victim, absent_row(pool), self.ranking.level(victim), End::Back);
            self.pools[usize::from(pool)].comparison.count_upload();
        }
        self.loading[admission.block.index()] = true;
        self.ranking.place(admission.block, held_row(pool), self.ranking.level(admission.block), End::Back);
        self.out.push(admission);
    }
}

/// How long a place in the list by heat is counted on.
const FREQUENCY_HORIZON_TOKENS: f32 = 1024.0;
