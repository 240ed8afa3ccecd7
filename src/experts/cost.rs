//! What a pass of a few tokens to a few hundred costs by each way to its experts, and so the way that it takes.
//!
//! Owns: the model of the costs of one layer, its constants, and the threshold that follows from it. Pure: the same figures give the same way.
//!
//! Three ways. **In RAM**: the device computes with what the cache holds, the processor with the rest (the waiting engine). **Fetched**: the
//! ids are waited for, and the experts that are used and not held come over the link. **Streamed**: all experts that are not held come
//! over the link, behind the work on the layers before; nobody waits. The fewer tokens, the fewer experts are used, and the more is saved by
//! asking which; the more tokens, the more often each expert that comes is used.
//!
//! Invariants: more tokens never make fetching or computing in RAM cheaper; streaming costs the same for any number. Figures that are not
//! finite or not positive count as not measured.
//! Threads: none. Does not: measure (`cache::rates` does) or know a graph (`backend` does).

/// What a link is taken to move before it was measured: between PCIe 3.0 and 4.0 with 16 lanes, in bytes per microsecond.
const PRIOR_LINK: f64 = 20_000.0;
/// What one thread is taken to read of weights while it multiplies, in bytes per microsecond, and what all of them do at most.
const PRIOR_THREAD: f64 = 5_000.0;
const PRIOR_MOST: f64 = 60_000.0;
/// What the device copies in its own memory, in bytes per microsecond: the least that cards of interest do.
const ON_DEVICE: f64 = 200_000.0;
/// From the device's last work before ids to the host's first copy after them, in microseconds.
const ROUND_TRIP_US: f64 = 40.0;
/// What a copy costs beside its bytes, in microseconds.
const COPY_US: f64 = 2.0;
/// Matrices of an expert, each a copy of its own.
const MATRICES: f64 = 3.0;
/// Everything else in a layer, in microseconds: hidden behind streams, added to the other ways.
const LAYER_US: f64 = 100.0;
/// Neighbouring tokens use the same experts more often than chance: each more token counts as this part of one.
const LOCALITY: f64 = 0.6;
/// How much faster a row is multiplied with weights that the processor just read for another row.
const NEXT_ROW: f64 = 1.3;
/// The cache holds what is used often: uses miss it by the share that it lacks to this power.
const SKEW: f64 = 1.5;
/// What is computed in RAM is rounded as the processor rounds, so it must be worth it.
const WORTH: f64 = 0.9;
/// The most tokens of which the threshold is looked for.
const MOST_TOKENS: u32 = 4096;

/// Measured rates, in bytes per microsecond (1,000 are 1 GB/s).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// What the processor reads of weights while it multiplies.
    pub cpu: Option<f32>,
    /// What the link moves.
    pub link: Option<f32>,
    /// Threads that compute in RAM, for what is not measured.
    pub threads: usize,
}

/// A layer of a model, and how much of it is held on the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layer {
    /// Experts.
    pub experts: u32,
    /// Those that one token uses.
    pub used: u32,
    /// Bytes of an expert's weights.
    pub expert_bytes: u64,
    /// Share of the experts that lies on the device.
    pub resident: f64,
}

/// A way to the experts of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// What the device holds is computed there, the rest by the processor.
    InRam,
    /// The experts that are used are brought.
    Fetch,
    /// All experts are brought.
    Stream,
}

/// What a layer of a pass takes by each way, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// By [`Way::InRam`].
    pub in_ram_us: f64,
    /// By [`Way::Fetch`].
    pub fetch_us: f64,
    /// By [`Way::Stream`].
    pub stream_us: f64,
}

impl Rates {
    fn or(measured: Option<f32>, prior: f64) -> f64 {
        measured.map(f64::from).filter(|rate| rate.is_finite() && *rate > 0.0).unwrap_or(prior)
    }

    /// What the processor reads, measured or taken.
    pub fn cpu_bytes_per_us(&self) -> f64 {
        let threads = u32::try_from(self.threads.max(1)).unwrap_or(u32::MAX);
        Self::or(self.cpu, (f64::from(threads) * PRIOR_THREAD).min(PRIOR_MOST))
    }

    /// What the link moves, measured or taken.
    pub fn link_bytes_per_us(&self) -> f64 {
        Self::or(self.link, PRIOR_LINK)
    }

    /// The rates in words.
    pub fn words(&self) -> String {
        let gbs = |rate: f64, measured: Option<f32>| {
            format!("{:.1} GB/s{}", rate / 1e3, if measured.is_none() { " (not measured)" } else { "" })
        };
        format!(
            "the link moves {}, experts in RAM are read at {}",
            gbs(self.link_bytes_per_us(), self.link),
            gbs(self.cpu_bytes_per_us(), self.cpu)
        )
    }
}

impl Layer {
    fn shares(&self) -> (f64, f64, f64) {
        let experts = f64::from(self.experts.max(1));
        let resident = if self.resident.is_finite() { self.resident.clamp(0.0, 1.0) } else { 0.0 };
        (experts, f64::from(self.used.clamp(1, self.experts.max(1))), resident)
    }

    /// How many experts so many tokens are expected to use.
    pub fn distinct(&self, tokens: u32) -> f64 {
        let (experts, used, _) = self.shares();
        let by_chance = 1.0 + f64::from(tokens.max(1) - 1) * LOCALITY;
        experts * (1.0 - (1.0 - used / experts).powf(by_chance))
    }

    /// What the layer takes in a pass of so many tokens.
    pub fn costs(&self, tokens: u32, rates: &Rates) -> Costs {
        let (experts, used, resident) = self.shares();
        let bytes = self.expert_bytes as f64;
        let (cpu, link) = (rates.cpu_bytes_per_us(), rates.link_bytes_per_us());
        // What is held is copied one by one, missing neighbours at once: so many runs there are by chance.
        let runs = |missing: f64| missing * (1.0 - missing / experts);
        let brought = |asked: f64, runs: f64| {
            let (missing, held) = (asked * (1.0 - resident), asked * resident);
            missing * bytes / link + held * bytes / ON_DEVICE + MATRICES * (runs + held + 1.0) * COPY_US
        };
        let asked = self.distinct(tokens);
        let missed_uses = f64::from(tokens.max(1)) * used * (1.0 - resident).powf(SKEW);
        let missed_experts = (asked * (1.0 - resident)).min(missed_uses);
        let multiplied = missed_experts + (missed_uses - missed_experts) / NEXT_ROW;
        Costs {
            in_ram_us: ROUND_TRIP_US + LAYER_US + multiplied * bytes / cpu,
            // More experts in fewer runs are not worth less.
            fetch_us: ROUND_TRIP_US + LAYER_US + brought(asked, runs((asked * (1.0 - resident)).min(experts / 2.0))),
            stream_us: brought(experts, runs(experts * (1.0 - resident))).max(LAYER_US),
        }
    }

    /// The way of a pass of so many tokens. `in_ram` and `stream` say which ways may be taken beside fetching.
    pub fn way(&self, tokens: u32, rates: &Rates, in_ram: bool, stream: bool) -> Way {
        let costs = self.costs(tokens, rates);
        let (way, best) = if stream && costs.stream_us <= costs.fetch_us {
            (Way::Stream, costs.stream_us)
        } else {
            (Way::Fetch, costs.fetch_us)
        };
        if in_ram && costs.in_ram_us < best * WORTH { Way::InRam } else { way }
    }

    /// The fewest tokens, from `least` on, that are streamed if nothing is computed in RAM.
    pub fn threshold(&self, least: u32, rates: &Rates) -> u32 {
        // The cost of fetching never falls with more tokens: the answer can be searched by halves.
        let streams = |tokens: u32| self.way(tokens, rates, false, true) == Way::Stream;
        let (mut low, mut high) = (least, MOST_TOKENS.max(least));
        while low < high {
            let middle = low + (high - low) / 2;
            if streams(middle) { high = middle } else { low = middle + 1 }
        }
        low
    }
}

#[cfg(test)]
#[path = "cost_tests.rs"]
mod tests;
