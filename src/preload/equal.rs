//! Passes of equal length: which batches are cut otherwise than the host would, and what has to be known for it.
//!
//! Owns: the rule ([`cut`]), what is known of contexts and of batches that are being built, and where in a batch the outputs of its last part
//! begin.
//! Invariants: a batch is cut only if everything in it is known: tokens of one sequence at positions that follow each other, outputs in the last
//! part alone. What a function here cannot make sense of makes the batch one that is left alone. An index is moved at most once, however often it
//! is asked for: what is moved lies before the part that outputs come from.
//! Threads: any; a context and a batch are used by one at a time. No lock is held across a call into the host.
//! Does not: call the host (`abi::llama::passes` does).

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

/// Tokens below which a host's last pass is short enough: it uses few of the experts, which are then computed in RAM or come one by one.
const LEAST_REST: usize = 128;
/// The last pass must gain more than this part of the others' length: one that is nearly as long hides its copies behind its work as they do.
const WORTH: usize = 8;
/// Kernels work on tiles of tokens, so lengths are rounded up to a multiple of this,
const TILE: usize = 32;
/// where that leaves the last pass at most this part shorter than the others.
const SLACK: usize = 16;

/// Tokens of each pass but the last, for a batch that the host would run in passes of `micro_batch` and a rest; `None` where that is as good. There
/// are as many passes as without it, and none is longer than `micro_batch`.
pub(crate) fn cut(tokens: usize, micro_batch: usize) -> Option<usize> {
    let passes = tokens.checked_sub(1)?.checked_div(micro_batch)? + 1;
    let rest = tokens - (passes - 1) * micro_batch;
    let even = tokens.div_ceil(passes);
    let tiles = even.next_multiple_of(TILE);
    let length = if (tiles - even) * passes * SLACK <= even && tiles <= micro_batch { tiles } else { even };
    let last = tokens.checked_sub((passes - 1) * length)?;
    (passes > 1 && rest >= LEAST_REST && last > rest + length / WORTH).then_some(length)
}

/// A token of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) token: i32,
    pub(crate) position: i32,
    pub(crate) output: bool,
}

/// How a batch is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Parts {
    pub(crate) sequence: i32,
    pub(crate) entries: Vec<Entry>,
    /// Entries of each part but the last.
    pub(crate) length: usize,
}

impl Parts {
    /// Where the last part begins.
    pub(crate) fn last(&self) -> usize {
        (self.entries.len().saturating_sub(1) / self.length.max(1)) * self.length
    }

    /// The position of the first entry.
    pub(crate) fn position(&self) -> i32 {
        self.entries.first().map_or(0, |entry| entry.position)
    }

    /// What is told of them.
    pub(crate) fn line(&self, micro_batch: usize) -> String {
        let tokens = self.entries.len();
        let passes = tokens.div_ceil(self.length.max(1));
        let rest = tokens - (passes - 1) * micro_batch;
        let before = match passes - 1 {
            1 => format!("one of {micro_batch}"),
            count => format!("{count} of {micro_batch}"),
        };
        format!(
            "a prompt of {tokens} tokens runs as {passes} passes of {} tokens instead of {before} and one of {rest}, because each pass brings the experts once (equal-passes)",
            self.length
        )
    }
}

/// A batch that the host builds.
#[derive(Debug, Default)]
struct Batch {
    sequence: i32,
    entries: Vec<Entry>,
    /// There is something in it that is not understood.
    odd: bool,
    /// There are embeddings in it.
    embeds: bool,
}

impl Batch {
    fn clear(&mut self) {
        self.entries.clear();
        (self.odd, self.embeds) = (false, false);
    }

    /// A token was added; `index` is what the host got for it.
    fn add(&mut self, sequence: i32, token: i32, index: i32) {
        if self.entries.is_empty() {
            self.sequence = sequence;
        }
        self.odd |= usize::try_from(index).ok() != Some(self.entries.len()) || sequence != self.sequence;
        if !self.odd {
            self.entries.push(Entry { token, position: i32::MIN, output: false });
        }
    }

    fn entry(&mut self, index: i32) -> Option<&mut Entry> {
        let entry = usize::try_from(index).ok().and_then(|index| self.entries.get_mut(index));
        self.odd |= entry.is_none();
        entry
    }

    fn parts(&self, micro_batch: usize) -> Option<Parts> {
        if self.odd {
            return None;
        }
        let length = cut(self.entries.len(), micro_batch)?;
        let follows = |pair: &[Entry]| pair[0].position.checked_add(1) == Some(pair[1].position);
        let parts = Parts { sequence: self.sequence, entries: self.entries.clone(), length };
        let (before, _) = parts.entries.split_at_checked(parts.last())?;
        let whole =
            parts.position() >= 0 && parts.entries.windows(2).all(follows) && before.iter().all(|entry| !entry.output);
        whole.then_some(parts)
    }
}

/// A context whose batches may be cut.
#[derive(Debug)]
struct Context {
    address: usize,
    micro_batch: usize,
    /// Experts of it run on a device of ours.
    helped: bool,
    /// Something is read of every token, or its memory holds what no position tells.
    refused: bool,
    /// Where in the host's batch the part begins whose outputs there are.
    offset: i32,
}

static CONTEXTS: Mutex<Vec<Context>> = Mutex::new(Vec::new());
/// Batches of such contexts, by their address.
static BATCHES: Mutex<Vec<(usize, Batch)>> = Mutex::new(Vec::new());
/// How many batches there are, so that nobody waits for a lock where there are none.
static BATCH_COUNT: AtomicUsize = AtomicUsize::new(0);
/// How many contexts have an offset.
static MOVED: AtomicUsize = AtomicUsize::new(0);

fn of_context<T>(address: usize, act: impl FnOnce(&mut Context) -> T) -> Option<T> {
    CONTEXTS.lock().iter_mut().find(|context| context.address == address).map(act)
}

fn of_batch(address: usize, act: impl FnOnce(&mut Batch)) {
    if BATCH_COUNT.load(Ordering::Relaxed) > 0
        && let Some((_, batch)) = BATCHES.lock().iter_mut().find(|(it, _)| *it == address)
    {
        act(batch);
    }
}

fn move_to(context: &mut Context, offset: i32) {
    match (context.offset, offset) {
        (0, 1..) => MOVED.fetch_add(1, Ordering::Relaxed),
        (1.., 0) => MOVED.fetch_sub(1, Ordering::Relaxed),
        _ => 0,
    };
    context.offset = offset;
}

/// A context was made whose batches are longer than its micro-batches.
pub(crate) fn add_context(address: usize, micro_batch: usize) {
    forget_context(address);
    CONTEXTS.lock().push(Context { address, micro_batch, helped: false, refused: false, offset: 0 });
}

/// A context is about to be freed.
pub(crate) fn forget_context(address: usize) {
    CONTEXTS.lock().retain_mut(|context| {
        let other = context.address != address;
        if !other {
            move_to(context, 0);
        }
        other
    });
}

/// Something is read of every token of a context.
pub(crate) fn refuse_context(address: usize) {
    of_context(address, |context| context.refused = true);
}

/// Experts of a context ran on a device of ours.
pub(crate) fn note_help(address: usize) {
    of_context(address, |context| context.helped = true);
}

/// A context is about to compute something: the outputs that there were are gone.
pub(crate) fn begin(address: usize) {
    if MOVED.load(Ordering::Relaxed) > 0 {
        of_context(address, |context| move_to(context, 0));
    }
}

/// A batch was computed in parts; the last began here.
pub(crate) fn computed(address: usize, last: usize) {
    let offset = i32::try_from(last).unwrap_or(0);
    of_context(address, |context| move_to(context, offset));
}

/// Where an output lies that the host asks for by its index in the batch. The last part is no longer than what lies before it, so that
/// an index that was moved is not moved again.
pub(crate) fn index(address: usize, index: i32) -> i32 {
    if MOVED.load(Ordering::Relaxed) == 0 {
        return index;
    }
    let offset = of_context(address, |context| context.offset).unwrap_or(0);
    if index >= offset { index - offset } else { index }
}

/// A batch was made for a context.
pub(crate) fn add_batch(address: usize, context: usize) {
    if of_context(context, |_| ()).is_some() {
        let mut batches = BATCHES.lock();
        batches.push((address, Batch::default()));
        BATCH_COUNT.store(batches.len(), Ordering::Relaxed);
    }
}

/// A batch is about to be freed.
pub(crate) fn forget_batch(address: usize) {
    if BATCH_COUNT.load(Ordering::Relaxed) > 0 {
        let mut batches = BATCHES.lock();
        batches.retain(|(it, _)| *it != address);
        BATCH_COUNT.store(batches.len(), Ordering::Relaxed);
    }
}

/// A batch was emptied.
pub(crate) fn clear_batch(address: usize) {
    of_batch(address, Batch::clear);
}

/// A token was added to a batch; the host got `index`.
pub(crate) fn add_token(address: usize, sequence: i32, token: i32, index: i32) {
    of_batch(address, |batch| batch.add(sequence, token, index));
}

/// A token of a batch got its position.
pub(crate) fn set_position(address: usize, index: i32, position: i32) {
    of_batch(address, |batch| {
        if let Some(entry) = batch.entry(index) {
            entry.position = position;
        }
    });
}

/// Whether a token of a batch has an output.
pub(crate) fn set_output(address: usize, index: i32, output: bool) {
    of_batch(address, |batch| {
        if let Some(entry) = batch.entry(index) {
            entry.output = output;
        }
    });
}

/// Something was done to a batch that is not understood.
pub(crate) fn refuse_batch(address: usize) {
    of_batch(address, |batch| batch.odd = true);
}

/// Something with an embedding was added to a batch.
pub(crate) fn embed(address: usize) {
    of_batch(address, |batch| (batch.odd, batch.embeds) = (true, true));
}

/// How a batch of a context is cut, and the length that its micro-batches have; `None` if it is left alone.
pub(crate) fn parts(context: usize, batch: usize) -> Option<(Parts, usize)> {
    let (mut parts, mut embeds) = (None, false);
    let micro_batch = of_context(context, |it| (it.helped && !it.refused).then_some(it.micro_batch)).flatten();
    of_batch(batch, |batch| {
        embeds = batch.embeds;
        parts = micro_batch.and_then(|micro_batch| batch.parts(micro_batch));
    });
    if embeds {
        // Positions no longer tell how much of the memory is in use.
        refuse_context(context);
    }
    parts.zip(micro_batch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn short_rests_are_shared_out() {
        assert_eq!(cut(12_500, 4096), Some(3136));
        assert_eq!(cut(400, 256), Some(200), "no room for whole tiles");
        assert_eq!(cut(4096, 4096), None);
        assert_eq!(cut(8192, 4096), None);
        assert_eq!(cut(8000, 4096), None, "nearly as long");
        assert_eq!(cut(4096 + 127, 4096), None, "a rest that uses few experts");
        assert_eq!(cut(4096 + 128, 4096), Some(2112));
        assert_eq!([cut(0, 512), cut(1, 512), cut(600, 0)], [None; 3]);
    }

    proptest! {
        #[test]
        fn passes_are_equal_and_as_many(tokens in 0_usize..70_000, micro_batch in 1_usize..9_000) {
            if let Some(length) = cut(tokens, micro_batch) {
                let passes = tokens.div_ceil(length);
                let last = tokens - (passes - 1) * length;
                prop_assert_eq!(passes, tokens.div_ceil(micro_batch));
                prop_assert!(passes > 1 && length <= micro_batch && last <= length, "{length} and {last}");
                prop_assert!(length - last <= passes + length / SLACK, "{length} and {last}");
                prop_assert!(last > tokens - (passes - 1) * micro_batch, "it was no shorter before");
                // An index that was moved is not moved again.
                prop_assert!(last <= (passes - 1) * length);
            }
        }
    }

    fn batch(tokens: i32, outputs: &[i32]) -> Batch {
        let mut batch = Batch::default();
        for at in 0..tokens {
            batch.add(3, 100 + at, at);
            batch.entry(at).unwrap().position = 50 + at;
        }
        for &at in outputs {
            batch.entry(at).unwrap().output = true;
        }
        batch
    }

    #[test]
    fn plain_prompts_are_cut() {
        let parts = batch(400, &[399]).parts(256).unwrap();
        assert_eq!((parts.sequence, parts.length, parts.last(), parts.position()), (3, 200, 200, 50));
        assert_eq!(parts.entries[399], Entry { token: 499, position: 449, output: true });
        assert!(batch(400, &[]).parts(256).is_some(), "a piece of a longer prompt");
        assert!(batch(400, &[200, 399]).parts(256).is_some());
        assert_eq!(batch(400, &[199, 399]).parts(256), None, "an output in the middle");
        assert_eq!(
            parts.line(256),
            "a prompt of 400 tokens runs as 2 passes of 200 tokens instead of one of 256 and one of 144, because each pass brings the experts once (equal-passes)"
        );
    }

    #[test]
    fn what_is_not_understood_is_left_alone() {
        let refused = |act: &dyn Fn(&mut Batch)| {
            let mut batch = batch(400, &[399]);
            act(&mut batch);
            assert_eq!(batch.parts(256), None);
            batch.clear();
            batch.add(0, 1, 0);
            assert!(!batch.odd, "it may be used again");
        };
        refused(&|batch| batch.add(4, 1, 400));
        refused(&|batch| batch.add(3, 1, -2));
        refused(&|batch| batch.add(3, 1, 7));
        refused(&|batch| batch.add(3, 1, 400)); // without a position
        refused(&|batch| batch.entry(8).unwrap().position = 9);
        refused(&|batch| assert!(batch.entry(400).is_none()));
        refused(&|batch| assert!(batch.entry(-1).is_none()));
        refused(&|batch| batch.odd = true);
    }

    #[test]
    fn contexts_are_known_by_their_address() {
        const CONTEXT: usize = 0x10;
        let fill = |address| {
            add_batch(address, CONTEXT);
            for at in 0..400 {
                add_token(address, 0, at, at);
                set_position(address, at, at);
            }
            set_output(address, 399, true);
        };
        add_batch(0x20, CONTEXT);
        assert!(parts(CONTEXT, 0x20).is_none(), "a context that is not known");
        add_context(CONTEXT, 256);
        fill(0x30);
        assert!(parts(CONTEXT, 0x30).is_none(), "nothing of it ran on a device of ours");
        note_help(CONTEXT);
        assert_eq!(parts(CONTEXT, 0x30).map(|(parts, length)| (parts.last(), length)), Some((200, 256)));
        assert_eq!(index(CONTEXT, 399), 399);
        computed(CONTEXT, 200);
        assert_eq!([399, 200, 199, -1].map(|at| index(CONTEXT, index(CONTEXT, at))), [199, 0, 199, -1]);
        assert_eq!(index(0x11, 399), 399, "another context");
        begin(CONTEXT);
        assert_eq!(index(CONTEXT, 399), 399);
        clear_batch(0x30);
        assert!(parts(CONTEXT, 0x30).is_none());
        fill(0x40);
        embed(0x30);
        assert!(parts(CONTEXT, 0x40).is_some() && parts(CONTEXT, 0x30).is_none());
        assert!(parts(CONTEXT, 0x40).is_none(), "its memory holds an image");
        computed(CONTEXT, 200);
        forget_context(CONTEXT);
        assert_eq!(index(CONTEXT, 399), 399);
        forget_batch(0x30);
        forget_batch(0x40);
        add_context(CONTEXT, 256);
        note_help(CONTEXT);
        refuse_context(CONTEXT);
        fill(0x50);
        assert!(parts(CONTEXT, 0x50).is_none());
        refuse_batch(0x50);
        forget_batch(0x50);
        forget_context(CONTEXT);
        assert_eq!((MOVED.load(Ordering::Relaxed), BATCH_COUNT.load(Ordering::Relaxed)), (0, 0));
    }
}
