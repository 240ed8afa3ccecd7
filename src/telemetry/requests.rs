//! What ran from one prompt to the next: requests, as far as a backend can see them.
//!
//! A backend sees graphs, not requests. Of each graph that holds experts it knows the tokens and the outputs, that is, the tokens of the
//! last MoE layer, which llama.cpp computes only for tokens whose result is wanted. So a graph *holds a prompt* if it has more tokens
//! than outputs, or more tokens than any decoding has; every other graph *decodes*.
//!
//! Owns: the rule by which graphs become requests, and what the last requests did:
//!
//! - A graph that holds a prompt begins a request, unless the request that runs has decoded nothing yet: prompts that follow one another
//!   (pieces of one, or several without decoding between) belong together.
//! - A graph that decodes belongs to the request that runs; if none does, it begins one.
//! - A request ends when the next begins, or when nothing ran for [`IDLE_US`].
//!
//! Invariants: the same calls give the same answers; each pass belongs to one request at most; numbers count from 1.
//! Threads: one at a time. Does not: read a clock, or print.
//!
//! What that means: with several slots a request is what *all* of them did from one prompt to the next; a prompt of which all but the
//! last token was known from before looks like decoding, and goes to the request before it unless there was a pause.

use std::collections::VecDeque;
use std::fmt::Write as _;

use super::json::Object;
use super::{Counters, Mode};

/// A pause after which a request is over, in microseconds.
pub const IDLE_US: u64 = 1_000_000;
/// A graph of more tokens holds a prompt, whatever its outputs: perplexity wants them all, and of several devices only the last sees them.
/// Decoding has a token for each slot, and those of drafts.
pub const MOST_DECODED: u32 = 64;
/// Requests that are remembered.
const KEPT: usize = 8;

/// A graph with experts that ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// Tokens in its first MoE layer.
    pub tokens: u32,
    /// Tokens in its last.
    pub outputs: u32,
    /// What its first MoE layer reads. Tokens are counted of graphs that begin as the request's first one does: a token that a scheduler
    /// computes in several graphs, or a second model, adds work and no tokens.
    pub leader: u64,
    /// When it began, in microseconds.
    pub start_us: u64,
    /// When anything ran last before it.
    pub idle_since_us: u64,
}

impl Pass {
    fn holds_prompt(&self) -> bool {
        self.tokens > self.outputs || self.tokens > MOST_DECODED
    }
}

/// What a request did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// Its number on this device.
    pub number: u64,
    /// When it began, in microseconds.
    pub start_us: u64,
    /// What was counted, tokens included.
    pub work: Counters,
    /// How its last graph was computed.
    pub mode: Mode,
    leader: u64,
    /// First and last start of a graph that decodes.
    decode_us: Option<(u64, u64)>,
    /// Tokens decoded between those two.
    timed_tokens: u64,
    last_tokens: u64,
}

impl Request {
    /// Tokens decoded per second: from the start of the first graph that decodes to the start of the last, so that pauses of the host between
    /// tokens count, and what a device still computes when the call returns. `None` below two such graphs.
    pub fn tokens_per_second(&self) -> Option<f64> {
        let (first, last) = self.decode_us?;
        let us = last.checked_sub(first).filter(|us| *us > 0)?;
        Some(self.timed_tokens as f64 * 1e6 / us as f64)
    }

    /// The line for the log.
    pub fn line(&self) -> String {
        let work = &self.work;
        let mut line =
            format!("request {}: {} prompt tokens, {} decoded", self.number, work.prompt_tokens, work.tokens);
        // Writing to a String cannot fail.
        if let Some(rate) = self.tokens_per_second() {
            let _ = write!(line, " at {rate:.1} per second");
        }
        match work.hit_share() {
            Some(share) => {
                let _ = write!(
                    line,
                    "; {} hits ({:.1}%), {} misses, {} uploads",
                    work.hits,
                    100.0 * share,
                    work.misses,
                    work.uploads
                );
            }
            None => line.push_str("; no use of the cache"),
        }
        let mb = |bytes: u64| bytes as f64 / 1e6;
        let _ = write!(
            line,
            "; {:.1} MB computed by the CPU, {:.1} MB over the link; {}",
            mb(work.cpu_bytes),
            mb(work.link_bytes()),
            self.mode.words()
        );
        line
    }

    /// As JSON.
    pub fn json(&self, open: bool) -> String {
        let mut object = Object::new();
        object.number("number", self.number).flag("open", open).text("mode", self.mode.name());
        object.real("start_s", Some(self.start_us as f64 / 1e6), 3);
        object.real("tokens_per_second", self.tokens_per_second(), 2);
        object.real("hit_share", self.work.hit_share(), 4);
        self.work.write(&mut object);
        object.end()
    }
}

/// What a pass meant.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Noted {
    /// The request that it ended.
    pub ended: Option<Request>,
    /// Whether it began one.
    pub began: bool,
    /// The tokens that were counted of it, and nothing else.
    pub tokens: Counters,
}

/// The requests of one device.
#[derive(Clone, Debug, Default)]
pub struct Requests {
    open: Option<Request>,
    done: VecDeque<Request>,
    count: u64,
}

impl Requests {
    /// A graph ran, and `work` was counted meanwhile; its tokens are counted here.
    pub fn pass(&mut self, pass: &Pass, work: &Counters, mode: Mode) -> Noted {
        let prompt = pass.holds_prompt();
        let paused = pass.start_us.saturating_sub(pass.idle_since_us) >= IDLE_US;
        let over = self.open.as_ref().is_some_and(|open| paused || (prompt && open.work.tokens > 0));
        let mut noted = Noted { ended: if over { self.finish() } else { None }, ..Noted::default() };
        let open = match &mut self.open {
            Some(open) => open,
            None => {
                self.count += 1;
                noted.began = true;
                self.open.insert(Request {
                    number: self.count,
                    start_us: pass.start_us,
                    work: Counters::default(),
                    mode,
                    leader: pass.leader,
                    decode_us: None,
                    timed_tokens: 0,
                    last_tokens: 0,
                })
            }
        };
        open.work.add(work);
        open.mode = mode;
        if open.leader != pass.leader {
            return noted;
        }
        let tokens = u64::from(pass.tokens);
        if prompt {
            noted.tokens.prompt_tokens = tokens;
        } else {
            noted.tokens.tokens = tokens;
            let first = open.decode_us.map_or(pass.start_us, |(first, _)| first);
            open.decode_us = Some((first, pass.start_us));
            open.timed_tokens += open.last_tokens;
            open.last_tokens = tokens;
        }
        open.work.add(&noted.tokens);
        noted
    }

    /// Something else was counted (a graph without experts, say): it belongs to the request that runs, if one does.
    pub fn add(&mut self, work: &Counters) {
        if let Some(open) = &mut self.open {
            open.work.add(work);
        }
    }

    /// Nothing has run for so long. Returns the request that is over by that.
    pub fn idle(&mut self, idle_us: u64) -> Option<Request> {
        if idle_us >= IDLE_US { self.finish() } else { None }
    }

    /// Nothing more will run. Returns the request that ran.
    pub fn finish(&mut self) -> Option<Request> {
        let request = self.open.take()?;
        if self.done.len() == KEPT {
            self.done.pop_front();
        }
        self.done.push_back(request);
        Some(request)
    }

    /// The request that runs.
    pub fn open(&self) -> Option<&Request> {
        self.open.as_ref()
    }

    /// The last ones that ended, the newest last.
    pub fn done(&self) -> impl Iterator<Item = &Request> {
        self.done.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: u64 = 1000;

    /// A clock and passes that follow each other.
    #[derive(Default)]
    struct Host {
        requests: Requests,
        now_us: u64,
        idle_since_us: u64,
        ended: Vec<Request>,
    }

    impl Host {
        fn wait(&mut self, us: u64) -> &mut Self {
            self.now_us += us;
            self
        }

        fn run_as(&mut self, leader: u64, tokens: u32, outputs: u32) -> &mut Self {
            let pass = Pass { tokens, outputs, leader, start_us: self.now_us, idle_since_us: self.idle_since_us };
            let work = Counters { hits: 3, misses: 1, ..Counters::default() };
            self.ended.extend(self.requests.pass(&pass, &work, Mode::Recency).ended);
            self.now_us += 10 * MS;
            self.idle_since_us = self.now_us;
            self
        }

        fn run(&mut self, tokens: u32, outputs: u32) -> &mut Self {
            self.run_as(7, tokens, outputs)
        }

        fn decode(&mut self, graphs: u32, tokens: u32) -> &mut Self {
            (0..graphs).for_each(|_| {
                self.run(tokens, tokens);
            });
            self
        }

        /// Number, tokens of the prompt, tokens decoded.
        fn told(&mut self) -> Vec<(u64, u64, u64)> {
            self.ended.extend(self.requests.finish());
            self.ended.iter().map(|it| (it.number, it.work.prompt_tokens, it.work.tokens)).collect()
        }
    }

    #[test]
    fn a_prompt_begins_a_request_and_the_next_one_ends_it() {
        let mut host = Host::default();
        host.run(512, 0).run(88, 1).decode(31, 1).run(6, 1).decode(7, 1);
        assert_eq!(host.ended.len(), 1);
        assert_eq!(host.told(), [(1, 600, 31), (2, 6, 7)]);
        assert_eq!(host.ended[0].work.hits, 33 * 3);
        let rate = host.ended[0].tokens_per_second().unwrap();
        assert!((rate - 100.0).abs() < 1e-9, "one token in 10 ms: {rate}");
    }

    #[test]
    fn four_slots_decode_in_graphs_of_several_tokens() {
        let mut host = Host::default();
        host.run(40, 4).decode(20, 4).decode(3, 3).decode(2, 8);
        assert_eq!(host.told(), [(1, 40, 80 + 9 + 16)]);
        // A prompt beside three slots that go on: what follows is the next request.
        host.run(40, 4).decode(5, 4).run(515, 3).run(91, 4).decode(5, 4);
        assert_eq!(host.told()[1..], [(2, 40, 20), (3, 606, 20)]);
    }

    #[test]
    fn drafts_of_any_length_are_decoding() {
        let mut host = Host::default();
        host.run(12, 1);
        for width in [4, 9, 1, 17, 2] {
            host.run(width, width).run_as(8, 1, 1);
        }
        assert_eq!(host.told(), [(1, 12, 33)], "and the model that drafts adds no tokens");
        assert_eq!(host.ended[0].work.misses, 11, "but its work");
    }

    #[test]
    fn a_pause_ends_a_request_whoever_notices() {
        let mut host = Host::default();
        host.run(12, 1).decode(3, 1).wait(IDLE_US - 1).decode(1, 1).wait(IDLE_US).decode(2, 1);
        assert_eq!(host.told(), [(1, 12, 4), (2, 0, 2)]);
        let mut host = Host::default();
        host.run(12, 1);
        assert_eq!(host.requests.idle(IDLE_US - 1), None);
        assert_eq!(host.requests.idle(IDLE_US).map(|request| request.number), Some(1));
        assert_eq!(host.requests.idle(IDLE_US), None, "told once");
        assert_eq!(host.requests.done().count(), 1);
    }

    #[test]
    fn prompts_without_decoding_belong_together() {
        let mut host = Host::default();
        host.run(512, 512).run(512, 512).run(30, 1).run(20, 2).decode(1, 1);
        assert_eq!(host.told(), [(1, 1074, 1)]);
        assert_eq!(host.ended[0].tokens_per_second(), None);
    }

    #[test]
    fn parts_of_a_token_count_it_once() {
        let mut host = Host::default();
        host.run_as(1, 9, 9).run_as(2, 9, 1);
        for _ in 0..4 {
            host.run_as(1, 1, 1).run_as(2, 1, 1);
        }
        // The first part sees no outputs, so its short prompt looks like decoding; the second part ends that.
        let told = host.told();
        assert_eq!(told.iter().map(|(_, prompt, decoded)| prompt + decoded).sum::<u64>(), 9 + 9 + 4, "{told:?}");
    }

    #[test]
    fn work_beside_the_passes_goes_to_the_request_that_runs() {
        let mut host = Host::default();
        host.requests.add(&Counters { uploads: 5, ..Counters::default() });
        host.run(3, 1);
        host.requests.add(&Counters { uploads: 2, ..Counters::default() });
        host.told();
        assert_eq!(host.ended[0].work.uploads, 2);
    }

    #[test]
    fn a_line_says_all_of_it() {
        let mut host = Host::default();
        host.run(12, 1).decode(3, 1);
        host.requests.add(&Counters {
            uploads: 2,
            upload_bytes: 1_500_000,
            cpu_bytes: 2_000_000,
            ..Counters::default()
        });
        host.told();
        assert_eq!(
            host.ended[0].line(),
            "request 1: 12 prompt tokens, 3 decoded at 100.0 per second; 12 hits (75.0%), 4 misses, 2 uploads; 2.0 MB computed by the \
             CPU, 1.5 MB over the link; cache by recent use"
        );
        let value: serde_json::Value = serde_json::from_str(&host.ended[0].json(false)).unwrap();
        assert_eq!((value["tokens"].as_u64(), value["hits"].as_u64()), (Some(3), Some(12)));
        assert_eq!(value["mode"], "recency");
        assert_eq!(value["tokens_per_second"], 100.0);
    }

    proptest! {
        #[test]
        fn every_pass_is_told_once(passes in proptest::collection::vec((1_u32..600, 0_u32..9, 0_u64..3_000_000), 0..60)) {
            let mut host = Host::default();
            let mut tokens = 0;
            for &(count, outputs, wait) in &passes {
                host.wait(wait).run(count, outputs.min(count));
                tokens += u64::from(count);
            }
            let told = host.told();
            prop_assert_eq!(told.iter().map(|(_, prompt, decoded)| prompt + decoded).sum::<u64>(), tokens);
            prop_assert_eq!(host.ended.iter().map(|request| request.work.hits).sum::<u64>(), 3 * passes.len() as u64);
            prop_assert!(told.iter().zip(1..).all(|((number, ..), count)| *number == count));
            prop_assert!(host.requests.done().count() <= KEPT);
        }
    }
}
