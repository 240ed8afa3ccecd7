//! How fast decoding is, and what follows from it: rates for the policy, cache or stock mode.
//!
//! Owns: the time per step, the governor and what it is told, the measured rates. Pure: times come in as microseconds of one clock.
//!
//! What counts as the time of a step: from the start of its graph to the start of the next one, if that follows soon, because the device may
//! still work when the call returns, and sampling belongs to a token. If it does not follow soon (a request ended), the duration of the
//! call. Steps much longer than usual (the machine was busy, a request waited) are left out.
//!
//! Invariants: the governor compares steps of the same number of tokens only; while blocks move in stock mode nothing is measured.
//! Threads: one at a time. Does not: read a clock, move blocks or print.

use std::fmt::Write as _;

use crate::config::{ExpertSettings, PolicyOrder};
use crate::experts::heat::Heat;
use crate::experts::policy::{
    Governor, GovernorSettings, Mode, Rates, Reason, Regime, Settings, Verdict, whole_layers,
};
use crate::experts::shape::{GroupId, Shape};

/// A pause longer than this part of the call before it is no part of the step.
const LONGEST_PAUSE: f64 = 0.5;
/// A step that takes so many times the usual is left out.
const OUTLIER: f64 = 4.0;
/// Weight of a new step in the usual time.
const FRESH: f64 = 1.0 / 16.0;
/// Steps until the policy is told the rates again, and a prediction is made.
const TELL_STEPS: u64 = 32;
/// Steps with another number of tokens until the governor follows them.
const STRANGERS: u32 = 32;
/// What the settings say to the policy.
pub(super) fn policy_settings(settings: &ExpertSettings) -> Settings {
    Settings {
        window: settings.window,
        admit: settings.admit,
        swaps_per_step: settings.swaps_per_step,
        upload_share: settings.upload_share.unwrap_or(Settings::default().upload_share),
        regime: match settings.order {
            PolicyOrder::Auto | PolicyOrder::Layers => None,
            PolicyOrder::Window => Some(Regime::Recency),
            PolicyOrder::Frequency => Some(Regime::Frequency),
        },
        ..Settings::default()
    }
}

/// Bytes of weights that the team reads per token in stock mode with so many slots per pool. `block_bytes` has a block's size for each pool.
pub(super) fn stock_bytes(shape: &Shape, slots: &[u32], block_bytes: &[u64], heat: &Heat) -> f64 {
    let mut placed = vec![0_u32; shape.groups().len()];
    for block in whole_layers(shape, slots, heat) {
        placed[shape.key(block).0.0 as usize] += 1;
    }
    let groups = (0..).map(GroupId).zip(shape.groups()).zip(placed);
    let bytes = groups.map(|((id, group), placed)| {
        let bytes = block_bytes.get(usize::from(group.pool)).copied().unwrap_or(0) as f64 * f64::from(group.used);
        if placed == 0 || placed == group.experts {
            return if placed == 0 { bytes } else { 0.0 };
        }
        // A part of a layer holds its hottest experts.
        let mut rates: Vec<f32> = shape.blocks_of(id).map(|block| heat.rate(block)).collect();
        rates.sort_by(|a, b| b.total_cmp(a));
        let (all, held): (f32, f32) = (rates.iter().sum(), rates.iter().take(placed as usize).sum());
        let share = if all > 0.0 { held / all } else { placed as f32 / group.experts as f32 };
        bytes * f64::from(1.0 - share)
    });
    bytes.sum()
}

/// A graph of the cache.
#[derive(Clone, Copy, Debug)]
struct Step {
    began_us: u64,
    ended_us: u64,
    tokens: u32,
    /// Blocks were on the move in it.
    moving: bool,
}

/// The pace of one cache.
#[derive(Debug)]
pub(super) struct Pace {
    governor: Option<Governor>,
    began_us: u64,
    last: Option<Step>,
    /// The usual time of a step; 0 while unknown.
    step_us: f64,
    steps: u64,
    /// Tokens per graph that the governor compares.
    width: u32,
    strangers: u32,
    team_bytes_per_us: Option<f32>,
    link_bytes_per_us: Option<f32>,
}

impl Pace {
    /// A pace that knows nothing yet.
    pub(super) fn new(settings: &ExpertSettings) -> Self {
        let defaults = GovernorSettings::default();
        let retest_tokens = settings.retest.unwrap_or(defaults.retest_tokens);
        let governor = settings.governs().then(|| {
            let longest_retest_tokens = defaults.longest_retest_tokens.max(retest_tokens);
            Governor::new(GovernorSettings { retest_tokens, longest_retest_tokens, ..defaults })
        });
        Self {
            governor,
            began_us: 0,
            last: None,
            step_us: 0.0,
            steps: 0,
            width: 1,
            strangers: 0,
            team_bytes_per_us: None,
            link_bytes_per_us: None,
        }
    }

    /// The team was measured.
    pub(super) fn set_team(&mut self, bytes_per_us: Option<f32>) {
        self.team_bytes_per_us = bytes_per_us;
    }

    /// The link was measured.
    pub(super) fn set_link(&mut self, bytes_per_us: Option<f32>) {
        self.link_bytes_per_us = bytes_per_us.or(self.link_bytes_per_us);
    }

    /// A graph starts: the step before it is over. Returns a change of mode.
    pub(super) fn begin(&mut self, now_us: u64) -> Option<Verdict> {
        self.began_us = now_us;
        let step = self.last.take()?;
        let call = step.ended_us.saturating_sub(step.began_us) as f64;
        let pause = now_us.saturating_sub(step.ended_us) as f64;
        let us = if pause <= call * LONGEST_PAUSE { call + pause } else { call };
        let usual = self.step_us;
        let is_outlier = usual > 0.0 && us > usual * OUTLIER;
        let counted = if is_outlier { usual * OUTLIER } else { us };
        self.step_us = if usual > 0.0 { usual + FRESH * (counted - usual) } else { us };
        self.follow_width(step.tokens);
        let governor = self.governor.as_mut()?;
        let steady = !is_outlier && step.tokens == self.width && !(step.moving && governor.now().mode == Mode::Stock);
        if steady { governor.measured(step.tokens, us) } else { None }
    }

    /// Its graph was handed on. `moving`: uploads were under way.
    pub(super) fn end(&mut self, now_us: u64, tokens: u32, moving: bool) {
        self.steps += 1;
        self.last = Some(Step { began_us: self.began_us, ended_us: now_us, tokens, moving });
    }

    /// What the policy is to be told of rates, every few steps.
    pub(super) fn rates(&self) -> Option<Rates> {
        let due = self.steps.is_multiple_of(TELL_STEPS) && self.steps > 0;
        let (team, link) = (self.team_bytes_per_us?, self.link_bytes_per_us?);
        #[expect(clippy::cast_possible_truncation, reason = "a duration in microseconds")]
        let step_us = self.step_us as f32;
        due.then_some(Rates { cpu_bytes_per_us: team, link_bytes_per_us: link, step_us })
    }

    /// Whether the governor wants to know what stock mode would take: [`Pace::expect_stock`].
    pub(super) fn wants_prediction(&self) -> bool {
        let open = |governor: &Governor| {
            governor.now().mode == Mode::Cache && governor.time(Mode::Stock).is_none_or(|(_, measured)| !measured)
        };
        self.steps.is_multiple_of(TELL_STEPS) && self.steps > 0 && self.governor.as_ref().is_some_and(open)
    }

    /// Predicts the time per token of stock mode: what it takes now, and the time in which the team reads the difference of the bytes.
    pub(super) fn expect_stock(&mut self, cache_bytes: f64, stock_bytes: f64) {
        let Some(team) = self.team_bytes_per_us else { return };
        let cache_us = self.step_us / f64::from(self.width.max(1));
        if let Some(governor) = &mut self.governor {
            governor.predict(Mode::Stock, cache_us + (stock_bytes - cache_bytes) / f64::from(team));
        }
    }

    fn follow_width(&mut self, tokens: u32) {
        self.strangers = if tokens == self.width { 0 } else { self.strangers + 1 };
        if self.strangers >= STRANGERS {
            (self.width, self.strangers) = (tokens, 0);
            if let Some(governor) = &mut self.governor {
                governor.forget_times();
            }
        }
    }

    /// The change of mode in words, with the figures.
    pub(super) fn tell(&self, verdict: Verdict) -> String {
        let time = |mode| match self.governor.as_ref().and_then(|governor| governor.time(mode)) {
            Some((us, true)) => format!("{:.2} ms", us / 1e3),
            Some((us, false)) => format!("{:.2} ms (expected)", us / 1e3),
            None => "an unknown time".to_owned(),
        };
        let (cache, stock) = (time(Mode::Cache), time(Mode::Stock));
        match verdict.reason {
            Reason::Slower => format!(
                "stock mode: whole layers stay on the device and nothing is loaded; a token took {cache} with the cache and takes {stock} so"
            ),
            Reason::Retest => {
                format!("the cache is tried again; a token took {stock} in stock mode, {cache} with the cache before")
            }
            Reason::Faster | Reason::Default => {
                format!("the cache is used: a token takes {cache} with it and {stock} in stock mode")
            }
        }
    }

    /// The measured rates in words; `None` while they are not known.
    pub(super) fn rates_in_words(&self) -> Option<String> {
        let gbs = |rate: f32| rate / 1e3;
        let mut line = format!("experts in RAM are read at {:.1} GB/s", gbs(self.team_bytes_per_us?));
        if let Some(link) = self.link_bytes_per_us {
            // Writing to a String cannot fail.
            let _ = write!(line, ", the link moves {:.1} GB/s", gbs(link));
        }
        Some(line)
    }
}

#[cfg(test)]
#[path = "pace_tests.rs"]
mod tests;
