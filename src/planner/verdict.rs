//! Whether the plugin takes part.
//!
//! Owns: that decision, for plans and for a preloaded library, and its reason as a sentence.
//! Invariants: settings of the user hold; a cache that was not asked for is planned only where it is predicted to be faster than stock's best placement.
//! Threads: none. Does not: size a cache, or predict.

use super::MIB;
use super::cache::CachePlan;
use super::choose::{CardPlan, Mode, Plan};
use super::machine::{HOST, Machine};
use super::model::Model;
use super::stock::request_seconds;
use super::usage::Usage;
use crate::config::CacheSize;
use crate::explicit::Standing;

/// The smallest cache worth having.
const LEAST_ARENA: u64 = 64 * MIB;

impl Plan {
    /// The plugin, or stock alone: what a preloaded library decides as well.
    pub(super) fn choose_mode(&mut self, model: &Model, machine: &Machine, usage: &Usage, best: Option<CachePlan>) {
        let reason = self.reason_for_stock(model, machine, usage, best.as_ref());
        let Some(reason) = reason else {
            self.helps = true;
            let words = self.words_of_cache(usage, best.as_ref());
            if let Some(cache) = best {
                self.take(cache);
            }
            self.mode = Mode::Cache;
            return self.choose("experts", "cache", words);
        };
        self.take_stock();
        self.choose("experts", "stock", reason);
        if machine.cards_and_others().0.is_empty() || self.stock.as_ref().is_some_and(|stock| stock.fits) {
            return;
        }
        self.warnings.push(self.no_room());
    }

    /// Why llama.cpp by itself would not start.
    pub fn no_room(&self) -> String {
        match &self.stock {
            Some(_) => {
                "the flags that were set ask for more memory than the cards have free: llama.cpp would fail to start"
                    .to_owned()
            }
            None => format!(
                "not even the buffers for computing fit the cards with {} tokens of context; take a shorter one (-c), or a smaller -ub",
                self.context
            ),
        }
    }

    /// Why the plugin stays out, as a sentence; `None` if it does not.
    fn reason_for_stock(
        &self,
        model: &Model,
        machine: &Machine,
        usage: &Usage,
        best: Option<&CachePlan>,
    ) -> Option<String> {
        let (cards, _) = machine.cards_and_others();
        if !model.has_experts() {
            return Some("The model has no experts.".to_owned());
        }
        if let Standing::Left(words) = &usage.standing {
            return Some(format!("{words}."));
        }
        if cards.is_empty() {
            let reason = machine.no_cards.clone();
            return Some(format!("{}.", reason.unwrap_or_else(|| "no local GPU was found".to_owned())));
        }
        if matches!(usage.standing, Standing::Ours(_)) {
            return None;
        }
        if self.fits {
            return Some("Everything fits the cards, and then nothing is faster than stock.".to_owned());
        }
        // Processors in the place of a card were asked for; how fast that is nobody asks.
        if cards.iter().any(|card| card.is_host()) {
            return None;
        }
        if usage.cache == CacheSize::Off {
            return Some("The cache is off (cache=off).".to_owned());
        }
        let Some(cache) = best else {
            return Some(format!(
                "Dense weights, context and buffers do not fit beside the {} MiB of vram-reserve-mb.",
                usage.reserve / MIB
            ));
        };
        let arena: u64 = cache.cards.iter().map(|card| card.arena).sum();
        if arena < LEAST_ARENA && !usage.cache_asked {
            let sized = if cards.iter().all(|card| card.may_cache(usage)) {
                ""
            } else {
                " Over this kind of device there is a cache only with a size (cache=MIB) or with vram-budget-mb."
            };
            return Some(format!("Only {} MiB would be left for experts.{sized}", arena / MIB));
        }
        let (ours, theirs) = self.seconds(usage, cache);
        (theirs.is_some_and(|theirs| ours >= theirs) && !usage.cache_asked)
            .then(|| "Stock's placement is predicted to serve a request as fast as the cache.".to_owned())
    }

    /// Seconds of a request with the cache, and with stock's best placement.
    fn seconds(&self, usage: &Usage, cache: &CachePlan) -> (f64, Option<f64>) {
        let stocks = self.stock.as_ref().filter(|stock| stock.fits);
        let theirs = stocks.map(|stock| request_seconds(usage, &stock.prompt, &stock.decode));
        (request_seconds(usage, &cache.prompt, &cache.decode), theirs)
    }

    fn words_of_cache(&self, usage: &Usage, cache: Option<&CachePlan>) -> String {
        let named = match &usage.standing {
            Standing::Ours(words) => format!(" {words} names it."),
            _ => String::new(),
        };
        let Some(cache) = cache else {
            return format!(
                "Experts stay in RAM. Dense weights, context and buffers do not fit beside the {} MiB of vram-reserve-mb, so there is no cache.{named}",
                usage.reserve / MIB
            );
        };
        let (ours, theirs) = self.seconds(usage, cache);
        let (prompt, answer) = usage.request();
        let times = theirs.filter(|_| !cache.cards.iter().any(|card| card.name == HOST)).map_or_else(String::new, |theirs| {
            format!(" A request of {prompt} and {answer} tokens should take {ours:.1} s, {theirs:.1} s with stock's best placement.")
        });
        let sum = |of: fn(&CardPlan) -> u64| cache.cards.iter().map(of).sum::<u64>();
        format!(
            "{} MiB of the cards hold the experts in use, {:.0}% of all; the processors compute the others.{times}{named}",
            sum(|card| card.arena) / MIB,
            100.0 * sum(|card| card.slots) as f64 / sum(|card| card.blocks).max(1) as f64
        )
    }
}
