//! What the last tokens of a prompt used: read back behind the work of a long pass, looked at when that is done.
//!
//! Owns: host memory for the ids of the last tokens of every block, and which passes lie in it. A short pass is put behind the one before it.
//! Invariants: nobody waits: copies are queued on the stream that computes the ids, in front of the block that reads them, and the memory stays
//! until the cache goes, for which the stream is waited for. Ids are looked at only after it was waited for, and checked like any others.
//! Threads: the one that drives the backend. Does not: decide what follows (`policy` does), or choose passes (`backend` does).
// UNSAFETY: addresses of the tail's memory are handed to copies and read; each block says what bounds them.
#![expect(unsafe_code, reason = "ids are copied to memory of the tail and read there")]

use super::engine::passport;
use super::{Cache, REPLAY_TOKENS};
use crate::abi::inner;
use crate::abi::tensor::Tensor;
use crate::device::Device;
use crate::experts::HostMemory;
use crate::experts::policy::PromptTail;
use crate::experts::shape::GroupId;
use crate::gpu::Registration;

/// The most tokens that are looked at.
const MOST_TOKENS: usize = 256;
/// The most memory for that.
const MOST_BYTES: usize = 32 << 20;
const WORD: usize = size_of::<i32>();
/// No expert.
const NOBODY: u32 = u32::MAX;

/// The memory, and what lies in it.
pub(super) struct Tail {
    // Dropped before the memory that it registers.
    _registration: Option<Box<dyn Registration>>,
    host: HostMemory,
    /// Bytes for a token of a group, and tokens.
    stride: usize,
    tokens: usize,
    /// The passes in it: the first token of each, and their number.
    passes: Vec<(usize, usize)>,
    /// Of each pass, what was read of which group.
    parts: Vec<Part>,
    /// All tokens of the pass that is under way, of which the last are kept; 0 before its first block.
    open: usize,
    /// Tokens of passes since it was looked at.
    passed: usize,
}

/// Ids of one group in one pass.
#[derive(Clone, Copy, Debug)]
struct Part {
    group: GroupId,
    /// The place of its first row, in the tokens of the memory.
    first: usize,
    tokens: usize,
    used: usize,
    /// From id to id, and from row to row.
    strides: (usize, usize),
}

impl Tail {
    /// Memory for ids whose rows lie so far apart. It is for no tokens where copies to it would wait.
    fn new(device: &Device, groups: usize, stride: usize) -> Option<Self> {
        let tokens = (MOST_BYTES / groups.checked_mul(stride).filter(|bytes| *bytes > 0)?).min(MOST_TOKENS);
        let host = HostMemory::map(groups * stride * tokens).ok()?;
        host.fill(host.address(), 0xff, host.bytes()).ok()?;
        let registration = host.range(host.address(), host.bytes()).and_then(|range| {
            // SAFETY: the registration is dropped before the memory, which stays mapped until then.
            unsafe { device.driver().register(range) }.ok()
        });
        // CUDA waits for a copy to memory that it does not know.
        let tokens = if registration.is_none() && device.captures_graphs { 0 } else { tokens };
        let (passes, parts) = (Vec::new(), Vec::new());
        Some(Self { _registration: registration, host, stride, tokens, passes, parts, open: 0, passed: 0 })
    }

    /// A pass of so many tokens comes to its first block.
    fn open(&mut self, tokens: usize) {
        let kept = tokens.min(self.tokens);
        let used = self.passes.iter().map(|(_, tokens)| tokens).sum::<usize>();
        if used + kept > self.tokens {
            self.passes.clear();
            self.parts.clear();
        }
        let first = self.passes.last().map_or(0, |(first, tokens)| first + tokens);
        self.passes.push((first, kept));
        (self.open, self.passed) = (tokens, self.passed.saturating_add(tokens));
    }

    /// Where a group's rows begin, from the start of the memory.
    fn region(&self, group: GroupId) -> usize {
        group.0 as usize * self.stride * self.tokens
    }

    /// An expert that was read.
    fn expert(&self, part: &Part, token: usize, place: usize) -> u32 {
        let row = part.first * self.stride + (token - part.first) * part.strides.1;
        let offset = self.region(part.group) + row + place * part.strides.0;
        let Some(word) = self.host.range(self.host.address() + offset, WORD) else { return NOBODY };
        // SAFETY: the range holds a word; the copy to it was waited for.
        let id = unsafe { word.as_ptr().cast::<i32>().read_unaligned() };
        u32::try_from(id).unwrap_or(NOBODY)
    }
}

impl Cache {
    /// A block of a long pass, of which this is a product, is about to be handed on: its last ids are read behind the work in front of it.
    pub(crate) fn read_tail(&mut self, device: &Device, inner: &inner::Backend, product: Tensor<'_>) {
        let (Some(weight), Some(ids)) = (product.source(0), product.source(2)) else { return };
        let (Some(located), Some(memory)) = (self.locate(weight.data()), passport(ids)) else { return };
        let group = located.group();
        let [used, tokens, ..] = ids.ne().map(|count| usize::try_from(count).unwrap_or(0));
        let strides = (ids.nb()[0], ids.nb()[1]);
        if used == 0 || tokens == 0 || used == weight.ne()[2].try_into().unwrap_or(0) {
            return; // a warm-up says nothing
        }
        let row = (used - 1) * strides.0 + WORD;
        if self.tail.as_ref().is_none_or(|tail| tail.passes.is_empty() && tail.stride < strides.1.max(row)) {
            // What the device still writes to is not freed: nothing was begun, or there is none.
            self.tail = Tail::new(device, self.groups.len(), strides.1.max(row));
        }
        let Some(tail) = self.tail.as_mut().filter(|tail| tail.tokens > 0) else { return };
        if tail.open == 0 {
            tail.open(tokens);
        }
        let Some(&(first, kept)) = tail.passes.last().filter(|_| tail.open == tokens) else { return };
        if strides.1.max(row) > tail.stride {
            return;
        }
        let bytes = (kept - 1) * strides.1 + row;
        let offset = tail.region(group) + first * tail.stride;
        let Some(target) = tail.host.range(tail.host.address() + offset, bytes) else { return };
        // SAFETY: the rows are the last ones of the ids; the target has room for them (a range was made of it) and stays, see `Invariants`.
        unsafe {
            inner.read_async(memory, ids.data() + (tokens - kept) * strides.1, target.as_ptr().cast_mut(), bytes);
        }
        tail.parts.push(Part { group, first, tokens: kept, used, strides });
    }

    /// All blocks of a long pass were handed on.
    pub(super) fn close_tail(&mut self) {
        if let Some(tail) = &mut self.tail {
            tail.open = 0;
        }
    }

    /// Whether passes left something to look at, once the stream was waited for.
    pub(crate) fn has_tail(&self) -> bool {
        self.tail.as_ref().is_some_and(|tail| !tail.passes.is_empty())
    }

    /// The stream was waited for: the policy learns what the passes since the last call ended with, and what it wants then is begun with the next
    /// graph.
    pub(crate) fn learn_tail(&mut self) {
        let Some(mut tail) = self.tail.take() else { return };
        if let Some(replay) = &mut self.replay {
            replay.token = (replay.token + tail.passed) % REPLAY_TOKENS;
        }
        let seen = self.collect(&tail);
        self.policy.note_prompt(&seen);
        self.choose(0);
        tail.passes.clear();
        tail.parts.clear();
        tail.passed = 0;
        self.tail = Some(tail);
    }

    fn collect(&self, tail: &Tail) -> PromptTail {
        let tokens = tail.passes.iter().map(|(_, tokens)| tokens).sum::<usize>();
        let mut groups = vec![(0, Vec::new()); self.groups.len()];
        for part in &tail.parts {
            let Some((used, experts)) = groups.get_mut(part.group.0 as usize) else { continue };
            if experts.is_empty() {
                (*used, *experts) = (part.used, vec![NOBODY; part.used * tokens]);
            }
            if *used != part.used {
                continue;
            }
            for token in part.first..part.first + part.tokens {
                let to = &mut experts[token * part.used..(token + 1) * part.used];
                match &self.replay {
                    // The tokens in front of the next one.
                    Some(replay) => {
                        let back = (tokens - token).min(REPLAY_TOKENS);
                        let routed = replay.experts(part.group, REPLAY_TOKENS - back);
                        to.iter_mut().zip(routed).for_each(|(to, &expert)| *to = u32::from(expert));
                    }
                    None => to.iter_mut().enumerate().for_each(|(place, to)| *to = tail.expert(part, token, place)),
                }
            }
        }
        PromptTail { tokens: u32::try_from(tokens).unwrap_or(0), groups }
    }
}
