//! What a device tells about itself while it works: sums of its counters, the state of its cache, its requests.
//!
//! Owns: a [`Board`] for each device, the list of all, and whether anything of this process runs now.
//! Invariants: a backend adds what it counted since it did so last, so sums hold backends that are gone, too; no lock is held while
//! something is printed or sent.
//! Threads: whoever ran a graph holds a board's lock to add some numbers; the service's thread, to copy them.
//! Does not: count (`backend` does), or leave the process (`service` does).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use super::json::{self, Object};
use super::rates::Rates;
use super::requests::{IDLE_US, Pass, Request, Requests};
use super::{Counters, log, service};

/// How uses of experts are served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Without a cache.
    #[default]
    Plain,
    /// The cache holds what was used lately.
    Recency,
    /// The cache holds what was used most in its life.
    Frequency,
    /// Both, in different pools.
    Mixed,
    /// Whole layers, and no uploads.
    Layers,
}

impl Mode {
    /// Its name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Recency => "recency",
            Self::Frequency => "frequency",
            Self::Mixed => "mixed",
            Self::Layers => "layers",
        }
    }

    /// Its name in a line.
    pub fn words(self) -> &'static str {
        match self {
            Self::Plain => "no cache",
            Self::Recency => "cache by recent use",
            Self::Frequency => "cache by lifetime use",
            Self::Mixed => "cache by recent and lifetime use",
            Self::Layers => "cache of whole layers",
        }
    }
}

/// A cache between two graphs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CacheState {
    /// Memory of the device that it takes.
    pub bytes: u64,
    /// Experts for which it has room.
    pub slots: u64,
    /// Experts of the model.
    pub blocks: u64,
    /// Experts that graphs find in it.
    pub resident: u64,
    /// Experts on their way into it.
    pub loading: u64,
    /// How it chooses.
    pub mode: Mode,
    /// Tokens that its lifetime use rests on; old ones count less.
    pub heat_tokens: f64,
    /// Hits that were expected when it was made, as a share of uses.
    pub expected_hits: f64,
    /// Threads that compute the others.
    pub threads: u64,
}

impl CacheState {
    fn json(&self) -> String {
        let mut object = Object::new();
        object.text("mode", self.mode.name()).number("bytes", self.bytes);
        object.number("slots", self.slots).number("experts", self.blocks);
        object.real("share", (self.blocks > 0).then(|| self.slots as f64 / self.blocks as f64), 4);
        object.number("resident", self.resident).number("loading", self.loading);
        object.real("heat_tokens", Some(self.heat_tokens), 0);
        object.real("expected_hit_share", Some(self.expected_hits), 4).number("threads", self.threads);
        object.end()
    }
}

/// How many calls into this process's backends go on, and when the last one ended. Of all devices, because a pause of one may be the work of
/// another.
static RUNNING: AtomicUsize = AtomicUsize::new(0);
static LAST_US: AtomicU64 = AtomicU64::new(0);

/// Microseconds since the first call.
pub(crate) fn now_us() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    u64::try_from(START.get_or_init(Instant::now).elapsed().as_micros()).unwrap_or(u64::MAX)
}

/// While it lives, a backend computes or waits.
#[derive(Debug)]
pub(crate) struct Busy {
    start_us: u64,
    idle_since_us: u64,
}

impl Busy {
    pub(crate) fn new() -> Self {
        let start_us = now_us();
        let others = RUNNING.fetch_add(1, Ordering::Relaxed);
        let idle_since_us = if others > 0 { start_us } else { LAST_US.load(Ordering::Relaxed) };
        Self { start_us, idle_since_us }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        LAST_US.fetch_max(now_us(), Ordering::Relaxed);
        RUNNING.fetch_sub(1, Ordering::Relaxed);
    }
}

fn idle_us(now_us: u64) -> u64 {
    if RUNNING.load(Ordering::Relaxed) > 0 { 0 } else { now_us.saturating_sub(LAST_US.load(Ordering::Relaxed)) }
}

/// The tokens of a graph with experts, and how it begins; see [`Pass`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PassShape {
    pub(crate) tokens: u32,
    pub(crate) outputs: u32,
    pub(crate) leader: u64,
}

/// Graphs by which llama.cpp tries a new context before anybody asks: the warm-up, of one or two tokens, and llama-server's test of whether
/// tokens can be taken back, of two tokens with one output. They are no requests.
#[derive(Debug, Default)]
struct Trials {
    graphs: u32,
    over: bool,
}

impl Trials {
    /// Takes them out. Graphs without experts are none.
    fn filter(&mut self, shape: Option<PassShape>) -> Option<PassShape> {
        let shape = shape?;
        if self.over {
            return Some(shape);
        }
        let is_trial = match self.graphs {
            0 => shape.tokens <= 2,
            1 => shape.tokens == 2 && shape.outputs == 1,
            _ => false,
        };
        self.graphs += 1;
        self.over = !is_trial;
        (!is_trial).then_some(shape)
    }
}

/// What a backend has yet to add to its device's board.
#[derive(Debug, Default)]
pub(crate) struct Reporter {
    told: Counters,
    /// Graphs that ran, until one was more than a trial.
    trials: Trials,
    /// The graph that runs.
    pub(crate) pass: Option<PassShape>,
    /// The cache after it.
    pub(crate) cache: Option<CacheState>,
}

#[derive(Clone, Debug, Default)]
struct State {
    total: Counters,
    requests: Requests,
    rates: Rates,
    cache: Option<CacheState>,
    no_cache: Option<String>,
}

/// What one device tells.
#[derive(Debug)]
pub(crate) struct Board {
    name: String,
    inner: String,
    state: Mutex<State>,
}

static BOARDS: Mutex<Vec<&'static Board>> = Mutex::new(Vec::new());

impl Board {
    /// A board for a device, which lives as long as the process.
    pub(crate) fn new(name: String, inner: String) -> &'static Self {
        let board: &'static Self = Box::leak(Box::new(Self { name, inner, state: Mutex::new(State::default()) }));
        BOARDS.lock().push(board);
        board
    }

    /// A graph is over: adds what its backend counted since it did so last. The graph's tokens are added to `counters` as well.
    pub(crate) fn publish(&self, reporter: &mut Reporter, counters: &mut Counters, busy: &Busy) {
        let work = counters.since(&reporter.told);
        let shape = reporter.trials.filter(reporter.pass.take());
        let pass = shape.map(|shape| Pass {
            tokens: shape.tokens,
            outputs: shape.outputs,
            leader: shape.leader,
            start_us: busy.start_us,
            idle_since_us: busy.idle_since_us,
        });
        let mut state = self.state.lock();
        if let Some(cache) = reporter.cache.take() {
            state.cache = Some(cache);
        }
        let mode = state.cache.map_or(Mode::Plain, |cache| cache.mode);
        let noted = match &pass {
            Some(pass) => state.requests.pass(pass, &work, mode),
            None => {
                state.requests.add(&work);
                super::requests::Noted::default()
            }
        };
        counters.add(&noted.tokens);
        let work = counters.since(&reporter.told);
        state.total.add(&work);
        state.rates.add(busy.start_us, &work);
        drop(state);
        reporter.told = *counters;
        self.tell(noted.ended);
        if noted.began {
            service::ring();
        }
    }

    /// There is a cache.
    pub(crate) fn set_cache(&self, cache: CacheState) {
        let mut state = self.state.lock();
        state.cache = Some(cache);
        state.no_cache = None;
    }

    /// There is no cache any more, or none, for a reason.
    pub(crate) fn clear_cache(&self, reason: Option<&str>) {
        let mut state = self.state.lock();
        state.cache = None;
        if let Some(reason) = reason {
            state.no_cache = Some(reason.to_owned());
        }
    }

    /// A backend of the device ends: so does the request that ran.
    pub(crate) fn finish(&self) {
        let ended = self.state.lock().requests.finish();
        self.tell(ended);
    }

    fn tell(&self, ended: Option<Request>) {
        if let Some(request) = ended {
            log::info(&format!("{}: {}", self.name, request.line()));
        }
    }

    fn json(&self, now_us: u64) -> String {
        let state = self.state.lock().clone();
        let mut object = Object::new();
        object.text("name", &self.name).text("inner", &self.inner);
        object.value("cache", state.cache.map(|cache| cache.json()).as_deref());
        if let Some(reason) = &state.no_cache {
            object.text("no_cache", reason);
        }
        let mut counters = Object::new();
        state.total.write(&mut counters);
        object.value("counters", Some(&counters.end())).value("rates", Some(&state.rates.json(now_us)));
        let requests = state.requests.done().map(|request| request.json(false));
        let requests = requests.chain(state.requests.open().map(|request| request.json(true)));
        object.value("requests", Some(&json::list(requests)));
        object.end()
    }
}

/// Tells the requests that are over because nothing has run for a while. Returns when to look again, in microseconds from now, if there
/// is a request that runs.
pub(crate) fn tick() -> Option<u64> {
    let boards = BOARDS.lock().clone();
    let mut next = None;
    for board in boards {
        let mut state = board.state.lock();
        let idle_us = idle_us(now_us());
        let ended = state.requests.idle(idle_us);
        if state.requests.open().is_some() {
            next = Some(IDLE_US.saturating_sub(idle_us).max(1000));
        }
        drop(state);
        board.tell(ended);
    }
    next
}

/// All that this process tells, as one line of JSON.
pub(crate) fn snapshot(program: &str) -> String {
    let boards = BOARDS.lock().clone();
    let now_us = now_us();
    let mut object = Object::new();
    object.number("format", 1).text("version", env!("CARGO_PKG_VERSION"));
    object.number("pid", std::process::id().into()).text("program", program);
    object.real("uptime_s", Some(now_us as f64 / 1e6), 3);
    object.value("devices", Some(&json::list(boards.iter().map(|board| board.json(now_us)))));
    object.end()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn board() -> Board {
        Board { name: "MoE0".to_owned(), inner: "CPU".to_owned(), state: Mutex::default() }
    }

    fn graph(board: &Board, reporter: &mut Reporter, counters: &mut Counters, tokens: u32, outputs: u32) {
        let busy = Busy::new();
        counters.graphs += 1;
        counters.hits += 5;
        reporter.pass = Some(PassShape { tokens, outputs, leader: 1 });
        board.publish(reporter, counters, &busy);
    }

    #[test]
    fn sums_hold_all_backends_and_tokens_go_back_to_each() {
        let board = board();
        let (mut one, mut other) = ((Reporter::default(), Counters::default()), <(Reporter, Counters)>::default());
        graph(&board, &mut one.0, &mut one.1, 30, 1);
        graph(&board, &mut one.0, &mut one.1, 1, 1);
        other.0.trials.over = true;
        graph(&board, &mut other.0, &mut other.1, 1, 1);
        board.set_cache(CacheState { slots: 3, blocks: 12, mode: Mode::Frequency, ..CacheState::default() });
        assert_eq!((one.1.prompt_tokens, one.1.tokens, other.1.tokens), (30, 1, 1));
        let value: serde_json::Value = serde_json::from_str(&board.json(now_us())).unwrap();
        assert_eq!((&value["counters"]["hits"], &value["counters"]["tokens"]), (&15.into(), &2.into()));
        assert_eq!((&value["cache"]["share"], &value["cache"]["mode"]), (&0.25.into(), &"frequency".into()));
        let request = &value["requests"][0];
        assert_eq!((&request["open"], &request["tokens"], &request["hits"]), (&true.into(), &2.into(), &15.into()));
        board.finish();
        board.clear_cache(Some("no memory"));
        let value: serde_json::Value = serde_json::from_str(&board.json(now_us())).unwrap();
        assert_eq!((&value["requests"][0]["open"], &value["no_cache"]), (&false.into(), &"no memory".into()));
        assert_eq!(value["cache"], serde_json::Value::Null);
    }

    #[test]
    fn the_warm_up_is_no_request() {
        let board = board();
        let (mut reporter, mut counters) = (Reporter::default(), Counters::default());
        graph(&board, &mut reporter, &mut counters, 2, 1);
        assert_eq!((board.state.lock().requests.open(), counters.prompt_tokens), (None, 0));
        graph(&board, &mut reporter, &mut counters, 2, 1);
        assert_eq!(board.state.lock().requests.open(), None, "the server's test of its context");
        graph(&board, &mut reporter, &mut counters, 2, 1);
        assert_eq!(board.state.lock().requests.open().map(|request| request.work.prompt_tokens), Some(2));
        graph(&board, &mut reporter, &mut counters, 1, 1);
        assert_eq!((counters.prompt_tokens, counters.tokens), (2, 1));
        assert_eq!(board.state.lock().total.hits, 20, "their work counts");
    }

    #[test]
    fn a_snapshot_is_one_line_of_json() {
        let text = snapshot("a\nprogram");
        assert!(!text.contains('\n'));
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["pid"], std::process::id());
        assert!(value["devices"].is_array());
    }

    /// What a graph pays: two looks at the clock, a lock and some sums.
    #[test]
    #[ignore = "measures time: cargo test --release --lib publishing -- --ignored --nocapture"]
    fn publishing_costs_little() {
        // So few that some of the samples are not disturbed by whatever else the machine does.
        const GRAPHS: u32 = 200;
        let board = board();
        let (mut reporter, mut counters) = (Reporter::default(), Counters::default());
        let mut best = f64::INFINITY;
        for _ in 0..500 {
            let start = Instant::now();
            for _ in 0..GRAPHS {
                graph(&board, &mut reporter, &mut counters, 1, 1);
            }
            best = best.min(start.elapsed().as_secs_f64() * 1e6 / f64::from(GRAPHS));
        }
        println!("{best:.3} us per graph");
        assert!(best < 2.0, "{best} us per graph");
    }
}
