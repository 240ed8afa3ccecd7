//! Cache or stock mode, by measured time.
//!
//! Owns: for each mode the best knowledge of the time per token (a prediction until it was measured), and when to look again. The cache
//! is left when stock mode promises to be faster by more than a margin; after a while the cache is tried again, after each failed
//! try twice as late.
//! Invariants: the mode changes at most once per `settle + trial` tokens; times measured while blocks are still moving after a
//! change are not used. The same inputs give the same decisions.
//! Threads: one at a time. Does not: read a clock or move blocks.

/// How experts are placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// By use.
    Cache,
    /// Whole layers, no uploads.
    Stock,
}

/// Why a mode holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Nothing speaks against the cache.
    Default,
    /// Stock mode is faster, by measurement or prediction.
    Slower,
    /// The cache gets another try.
    Retest,
    /// The cache is faster: it was tried again, or stock mode is slower than was expected.
    Faster,
}

/// A change of mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The mode from now on.
    pub mode: Mode,
    /// Why.
    pub reason: Reason,
}

/// When and how decisions are made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GovernorSettings {
    /// How much faster the other mode must be, as a share.
    pub margin: f64,
    /// The same where its time is a prediction: what works is not left for a guess.
    pub guess_margin: f64,
    /// Tokens after a change whose times are not used.
    pub settle_tokens: u32,
    /// Tokens that a measurement takes.
    pub trial_tokens: u32,
    /// Tokens in stock mode until the cache is tried again; 0 never tries.
    pub retest_tokens: u32,
    /// The longest such time.
    pub longest_retest_tokens: u32,
}

impl Default for GovernorSettings {
    fn default() -> Self {
        Self {
            margin: 0.03,
            guess_margin: 0.15,
            settle_tokens: 128,
            trial_tokens: 64,
            retest_tokens: 2_048,
            longest_retest_tokens: 65_536,
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Knowledge {
    predicted_us: Option<f64>,
    measured_us: Option<f64>,
}

impl Knowledge {
    fn best(self) -> Option<f64> {
        self.measured_us.or(self.predicted_us)
    }
}

/// The state of the decision.
#[derive(Clone, Debug)]
pub struct Governor {
    settings: GovernorSettings,
    mode: Mode,
    reason: Reason,
    cache: Knowledge,
    stock: Knowledge,
    /// Tokens since the change of mode.
    age_tokens: u32,
    /// The measurement that is going on.
    trial: (u32, f64),
    retest_tokens: u32,
    /// Tokens with the cache before stock mode is tried again, once it was not what it promised.
    hold_tokens: u32,
}

/// How long the cache is kept at first after stock mode was not what it promised; doubled each time. Times change with what else the machine
/// does, and every change moves experts.
const FIRST_HOLD_TOKENS: u32 = 2_048;
/// Weight of a new measurement against those before.
const FRESH: f64 = 0.25;

impl Governor {
    /// Begins with the cache.
    pub fn new(settings: GovernorSettings) -> Self {
        Self {
            settings,
            mode: Mode::Cache,
            reason: Reason::Default,
            cache: Knowledge::default(),
            stock: Knowledge::default(),
            age_tokens: 0,
            trial: (0, 0.0),
            retest_tokens: settings.retest_tokens,
            hold_tokens: 0,
        }
    }

    /// What a mode is expected to take per token; used until it was measured. Values that are no time are ignored.
    pub fn predict(&mut self, mode: Mode, us_per_token: f64) {
        if us_per_token.is_finite() && us_per_token > 0.0 {
            self.knowledge(mode).predicted_us = Some(us_per_token);
        }
    }

    /// A step of some tokens took this long in the present mode. Returns a change of mode, if it is time for one.
    pub fn measured(&mut self, tokens: u32, us: f64) -> Option<Verdict> {
        self.age_tokens = self.age_tokens.saturating_add(tokens);
        if tokens == 0 || !us.is_finite() || us <= 0.0 || self.age_tokens <= self.settings.settle_tokens {
            return None;
        }
        self.trial = (self.trial.0.saturating_add(tokens), self.trial.1 + us);
        if self.trial.0 < self.settings.trial_tokens {
            return None;
        }
        let (tokens, us) = std::mem::take(&mut self.trial);
        let new = us / f64::from(tokens);
        let retesting = self.reason == Reason::Retest;
        let knowledge = self.knowledge(self.mode);
        // A retest is asked how it is now, not how it was.
        let old = knowledge.measured_us.filter(|_| !retesting);
        knowledge.measured_us = Some(old.map_or(new, |old| old + FRESH * (new - old)));
        self.decide(retesting)
    }

    /// What is measured from now on cannot be compared with what was (another number of tokens per graph): forgets all times. The mode
    /// stays.
    pub fn forget_times(&mut self) {
        (self.cache, self.stock) = (Knowledge::default(), Knowledge::default());
        self.trial = (0, 0.0);
    }

    /// The time per token of a mode in microseconds, as far as known, and whether it was measured.
    pub fn time(&self, mode: Mode) -> Option<(f64, bool)> {
        let knowledge = match mode {
            Mode::Cache => self.cache,
            Mode::Stock => self.stock,
        };
        knowledge.best().map(|us| (us, knowledge.measured_us.is_some()))
    }

    /// The mode and why.
    pub fn now(&self) -> Verdict {
        Verdict { mode: self.mode, reason: self.reason }
    }

    fn knowledge(&mut self, mode: Mode) -> &mut Knowledge {
        match mode {
            Mode::Cache => &mut self.cache,
            Mode::Stock => &mut self.stock,
        }
    }

    fn decide(&mut self, retesting: bool) -> Option<Verdict> {
        let clear = 1.0 - self.settings.margin;
        let guessed = self.mode == Mode::Cache && self.stock.measured_us.is_none();
        let promising = if guessed { 1.0 - self.settings.guess_margin } else { clear };
        let held = self.age_tokens < self.hold_tokens;
        let due = self.retest_tokens > 0 && self.age_tokens >= self.retest_tokens;
        match (self.mode, self.cache.best(), self.stock.best()) {
            (Mode::Cache, Some(cache), Some(stock)) if retesting && cache < stock * clear => {
                self.retest_tokens = self.settings.retest_tokens;
                self.reason = Reason::Faster;
                Some(self.now())
            }
            (Mode::Cache, Some(cache), Some(stock)) if retesting || (stock < cache * promising && !held) => {
                if retesting {
                    let doubled = self.retest_tokens.saturating_mul(2);
                    self.retest_tokens = doubled.min(self.settings.longest_retest_tokens);
                }
                Some(self.change(Mode::Stock, Reason::Slower))
            }
            // What sent us here, a prediction or an old time, was wrong.
            (Mode::Stock, Some(cache), Some(stock)) if cache < stock * clear => {
                let doubled = self.hold_tokens.saturating_mul(2).max(FIRST_HOLD_TOKENS);
                self.hold_tokens = doubled.min(self.settings.longest_retest_tokens);
                Some(self.change(Mode::Cache, Reason::Faster))
            }
            (Mode::Stock, _, _) if due => Some(self.change(Mode::Cache, Reason::Retest)),
            (Mode::Cache | Mode::Stock, _, _) => None,
        }
    }

    fn change(&mut self, mode: Mode, reason: Reason) -> Verdict {
        (self.mode, self.reason) = (mode, reason);
        (self.age_tokens, self.trial) = (0, (0, 0.0));
        self.now()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs tokens whose time depends on the mode; returns the changes with the token at which they came.
    fn run(governor: &mut Governor, tokens: u32, us: impl Fn(Mode, u32) -> f64) -> Vec<(u32, Verdict)> {
        let verdicts = (0..tokens).filter_map(|token| {
            let us = us(governor.now().mode, token);
            governor.measured(1, us).map(|verdict| (token, verdict))
        });
        verdicts.collect()
    }

    fn governor() -> Governor {
        Governor::new(GovernorSettings::default())
    }

    #[test]
    fn the_cache_stays_while_it_is_faster() {
        let mut governor = governor();
        governor.predict(Mode::Stock, 10_000.0);
        assert_eq!(run(&mut governor, 10_000, |_, _| 8_000.0), []);
        assert_eq!(governor.now(), Verdict { mode: Mode::Cache, reason: Reason::Default });
    }

    #[test]
    fn nothing_happens_without_knowing_the_other_mode() {
        assert_eq!(run(&mut governor(), 10_000, |_, _| 1e9), []);
    }

    #[test]
    fn a_small_difference_changes_nothing() {
        let mut governor = governor();
        governor.predict(Mode::Stock, 9_800.0);
        assert_eq!(run(&mut governor, 10_000, |_, _| 10_000.0), []);
    }

    #[test]
    fn a_slower_cache_is_left_and_tried_again_ever_later() {
        let mut governor = governor();
        governor.predict(Mode::Stock, 8_000.0);
        let us = |mode, _| if mode == Mode::Cache { 10_000.0 } else { 8_000.0 };
        let verdicts = run(&mut governor, 20_000, us);
        let reasons: Vec<Reason> = verdicts.iter().map(|(_, verdict)| verdict.reason).collect();
        assert!(
            reasons.chunks(2).all(|pair| pair[0] == Reason::Slower && pair.get(1).is_none_or(|r| *r == Reason::Retest))
        );
        let retests: Vec<u32> =
            verdicts.iter().filter(|(_, v)| v.reason == Reason::Retest).map(|(at, _)| *at).collect();
        assert_eq!(verdicts[0].0, 128 + 64 - 1, "settle, then one trial");
        assert!(retests.len() == 3, "after about 2048, 4096 and 8192 tokens: {retests:?}");
    }

    #[test]
    fn a_cache_that_became_faster_comes_back() {
        let mut governor = governor();
        governor.predict(Mode::Stock, 8_000.0);
        let us = |mode, token| match mode {
            Mode::Cache if token < 1_000 => 12_000.0,
            Mode::Cache => 6_000.0,
            Mode::Stock => 8_000.0,
        };
        let verdicts = run(&mut governor, 10_000, us);
        let reasons: Vec<Reason> = verdicts.iter().map(|(_, verdict)| verdict.reason).collect();
        assert_eq!(reasons, [Reason::Slower, Reason::Retest, Reason::Faster]);
        assert_eq!(governor.now().mode, Mode::Cache);
    }

    #[test]
    fn retest_zero_never_tries_again() {
        let mut governor = Governor::new(GovernorSettings { retest_tokens: 0, ..GovernorSettings::default() });
        governor.predict(Mode::Stock, 1_000.0);
        assert_eq!(run(&mut governor, 200_000, |_, _| 5_000.0).len(), 1);
    }

    #[test]
    fn a_wrong_prediction_is_taken_back_once() {
        let mut governor = governor();
        governor.predict(Mode::Stock, 7_000.0);
        let us = |mode, _| if mode == Mode::Cache { 10_000.0 } else { 12_000.0 };
        let verdicts = run(&mut governor, 20_000, us);
        let reasons: Vec<Reason> = verdicts.iter().map(|(_, verdict)| verdict.reason).collect();
        assert_eq!(reasons, [Reason::Slower, Reason::Faster]);
        assert_eq!(governor.time(Mode::Stock), Some((12_000.0, true)));
    }

    #[test]
    fn times_that_go_up_and_down_cause_few_changes() {
        let mut governor = governor();
        governor.predict(Mode::Stock, 9_000.0);
        // Both modes take the same; the machine is slower now and then.
        let us = |_, token: u32| if (token / 700).is_multiple_of(2) { 10_000.0 } else { 14_000.0 };
        let verdicts = run(&mut governor, 50_000, us);
        assert!(verdicts.len() <= 20, "{verdicts:?}");
    }

    #[test]
    fn stock_mode_is_left_for_a_try_also_when_nothing_is_known() {
        let mut governor = governor();
        governor.predict(Mode::Stock, 8_000.0);
        run(&mut governor, 200, |_, _| 10_000.0);
        assert_eq!(governor.now().mode, Mode::Stock);
        governor.forget_times();
        assert_eq!((governor.time(Mode::Cache), governor.time(Mode::Stock)), (None, None));
        let verdicts = run(&mut governor, 2_200, |_, _| 9_000.0);
        assert_eq!(verdicts.len(), 1);
        assert_eq!(verdicts[0].1.reason, Reason::Retest);
    }

    #[test]
    fn times_that_are_none_are_ignored() {
        let mut governor = governor();
        governor.predict(Mode::Stock, f64::NAN);
        governor.predict(Mode::Stock, -1.0);
        for us in [f64::NAN, f64::INFINITY, 0.0, -3.0] {
            assert_eq!(governor.measured(1000, us), None);
        }
        assert_eq!(governor.stock.best(), None);
        assert_eq!(governor.cache.best(), None);
    }
}
