//! Blocks that run ahead of the host: the device finds the slots of a block's ids by itself, so nobody waits before the block starts.
//!
//! Owns: the nodes of ours in front of a block, and what the host does when the ids have arrived:
//!
//! 1. [`Cache::stage`] makes the block's products read the arena and slots, and puts nodes in front of them: rows of activations and ids
//!    are written to host memory, slots are looked up in a table on the device. The block is handed on with the nodes before it, as one part.
//! 2. [`Cache::answer`] waits for the ids, by looking at the host memory. While the device computes the block, the team computes the rows of
//!    missed experts; they are written over those of the slots of zeros, before the next part is handed on.
//!
//! Invariants: as those of `engine`. Words count as arrived when they differ from a value that the device does not write; who waits for too
//! long waits for the stream instead, so a wrong guess costs time only.
//! Threads: the one that drives the backend, and the team's.
// UNSAFETY: addresses of the lane are handed to copies; each block says what bounds them.
#![expect(unsafe_code, reason = "addresses of the lane are handed to copies")]

use std::time::{Duration, Instant};

use super::arena::ZERO_SLOTS;
use super::engine::{BlockRun, EngineError, Outcome, Work, passport, since_ns};
use super::lane::{Lane, MOST_PAIRS};
use super::{Cache, Candidate};
use crate::abi::inner;
use crate::abi::own::{F32, Form, I32, OwnTensor};
use crate::abi::tensor::{Patch, Retired, Tensor};
use crate::device::Device;
use crate::experts::residency::Reader;
use crate::experts::shape::{Block, GroupId, Shape};

/// The most tokens of such a block: device kernels for more may rely on a token using no expert twice, and missed experts share slots.
const MOST_TOKENS: i64 = 4;
/// How long the arrival of words is looked for before the stream is waited for.
const PATIENCE: Duration = Duration::from_millis(20);
/// Looks between two looks at the clock.
const LOOKS: u32 = 256;

/// A block that is ready to be handed on. The host's nodes are restored when it is dropped.
pub(crate) struct Staged<'a> {
    pub(crate) operands: Operands<'a>,
    // Dropped before what the nodes are made to read.
    patches: Vec<Patch<'a>>,
    read: Vec<OwnTensor>,
    nodes: Vec<OwnTensor>,
    /// Stands for everything that was patched or put in front.
    pub(crate) variant: u64,
}

impl Staged<'_> {
    /// It was handed on: restores the host's nodes, and keeps what the device may still look at until the stream is idle.
    pub(crate) fn retire(self) -> impl Iterator<Item = Retired> {
        let patched = self.patches.into_iter().filter_map(Patch::retire).collect::<Vec<_>>();
        patched.into_iter().chain(self.read.into_iter().chain(self.nodes).map(OwnTensor::retire))
    }

    /// The nodes to put in front of the block.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = Tensor<'_>> {
        self.nodes.iter().map(OwnTensor::tensor)
    }
}

/// The operands of a block, read before its nodes are patched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands<'a> {
    group: GroupId,
    down: Tensor<'a>,
    ids: Tensor<'a>,
    input: Tensor<'a>,
    used: usize,
    tokens: usize,
    /// Elements of a row of activations, and rows.
    row: usize,
    rows: usize,
}

impl Cache {
    /// Whether the blocks of a graph may run ahead on this device.
    pub(super) fn may_run_ahead(lane: &Lane, device: &Device) -> bool {
        let table = OwnTensor::operand(Form::rows(I32, lane.device_table(), lane.device().passport(), [1, 2, 1]));
        let ids = OwnTensor::operand(Form::rows(I32, lane.counted(), lane.device().passport(), [2, 1, 1]));
        let form = Form::rows(I32, lane.device_slots(0), lane.device().passport(), [1, 2, 1]);
        let node = OwnTensor::pick(form, table.tensor(), ids.tensor());
        lane.is_reached(device) && node.is_some_and(|node| device.inner.supports_op(node.tensor()))
    }

    /// Whether a block may run ahead: few tokens, weights in a type whose kernels take any ids.
    pub(crate) fn runs_ahead(&self, nodes: &[Tensor<'_>], block: &Candidate) -> bool {
        let quantized = |product: usize| {
            nodes[product].source(0).is_some_and(|weight| crate::abi::host().is_quantized(weight.type_()))
        };
        let tokens = nodes[block.pattern.down].source(2).map_or(i64::MAX, |ids| ids.ne()[1]);
        let floats = |tensor: Option<Tensor<'_>>| tensor.is_some_and(|tensor| tensor.type_() == F32);
        self.runs_ahead
            && tokens <= MOST_TOKENS
            && block.products.iter().all(|&product| quantized(product))
            && floats(nodes[block.pattern.up.product].source(1))
    }

    /// Where the slots of a group's experts begin in the table.
    fn table_at(&self, group: GroupId) -> usize {
        self.policy.shape().block(group, 0).map_or(0, Block::index)
    }

    /// Blocks moved: the next graph finds all of them anew.
    pub(super) fn renew_whole_table(&mut self) {
        self.changed = Self::all_blocks(self.policy.shape());
    }

    /// All blocks of a model.
    pub(super) fn all_blocks(shape: &Shape) -> Vec<Block> {
        let groups = u32::try_from(shape.groups().len()).unwrap_or(0);
        (0..groups).flat_map(|group| shape.blocks_of(GroupId(group))).collect()
    }

    /// Writes the slots of blocks that came or left into the table, as this graph sees them.
    pub(super) fn renew_table(&mut self, reader: &Reader) {
        self.table_is_old |= !self.changed.is_empty();
        for block in self.changed.drain(..) {
            let (_, expert) = self.policy.shape().key(block);
            let slot = self.residency.find(reader, block).map_or(expert % ZERO_SLOTS, |slot| slot.0 + ZERO_SLOTS);
            let place = self.lane.table().wrapping_add(block.index());
            // SAFETY: the table has an entry for each block.
            unsafe { place.write(i32::try_from(slot).unwrap_or(0)) };
        }
    }

    fn operands<'a>(&self, nodes: &[Tensor<'a>], block: &Candidate) -> Result<Operands<'a>, EngineError> {
        let down = nodes[block.pattern.down];
        let up = nodes[block.pattern.up.product];
        let missing = || EngineError::Operand(down.name());
        let (ids, input) = (down.source(2).ok_or_else(missing)?, up.source(1).ok_or_else(missing)?);
        let size = |number: i64| usize::try_from(number).unwrap_or(0);
        let [used, tokens, ..] = ids.ne().map(size);
        let row = size(input.ne()[0]);
        Ok(Operands {
            group: self.group(down).ok_or_else(missing)?,
            down,
            ids,
            input,
            used,
            tokens,
            row,
            rows: size(input.ne()[1]) * size(input.ne()[2]),
        })
    }

    /// Whether blocks may run ahead on this device.
    pub(crate) fn may_run_blocks_ahead(&self) -> bool {
        self.runs_ahead
    }

    /// A graph begins: the table of slots is brought up to date, and with a simulated routing its ids.
    pub(crate) fn begin_ahead(&mut self, inner: &inner::Backend, nodes: &[Tensor<'_>], blocks: &[Candidate]) {
        let buffer = self.lane.device().passport();
        if core::mem::take(&mut self.table_is_old) {
            let (address, source, bytes) = self.lane.table_copy();
            // SAFETY: the lane's own memory, written again only when ids of the graph have arrived, which lie behind this copy.
            unsafe { inner.write_async(buffer, address, source, bytes) };
        }
        if let Some(replay) = &self.replay {
            for (number, block) in blocks.iter().enumerate() {
                let down = nodes[block.pattern.down];
                let tokens = down.source(2).map_or(0, |ids| usize::try_from(ids.ne()[1]).unwrap_or(0));
                let Some(group) = self.group(down) else { continue };
                let experts = (0..tokens).flat_map(|token| replay.experts(group, token));
                for (pair, &expert) in experts.enumerate().take(MOST_PAIRS) {
                    let place = self.lane.given(number).cast::<i32>().wrapping_add(pair);
                    // SAFETY: a block has room for MOST_PAIRS ids.
                    unsafe { place.write(i32::from(expert)) };
                }
            }
            let (address, source, bytes) = self.lane.given_copy();
            // SAFETY: as above.
            unsafe { inner.write_async(buffer, address, source, bytes) };
        }
    }

    /// Makes a block ready to run ahead of its ids.
    pub(crate) fn stage<'a>(&self, run: &BlockRun<'_, 'a>) -> Result<Staged<'a>, EngineError> {
        let operands = self.operands(run.nodes, run.block)?;
        let Operands { down, ids, input, used, tokens, row, rows, .. } = operands;
        let missing = || EngineError::Operand(down.name());
        let (lane, number) = (&self.lane, run.number);
        let own = lane.device().passport();
        let experts = self.policy.shape().groups()[operands.group.0 as usize].experts as usize;
        let table = |address: usize| {
            let mut form = Form::rows(I32, address, own, [1, experts, tokens]);
            (form.nb[2], form.nb[3]) = (0, 0); // the same for every token
            OwnTensor::operand(form)
        };
        let numbers = table(lane.counted());
        let slots_of = table(lane.device_table() + self.table_at(operands.group) * size_of::<i32>());
        let from = Form::rows(F32, input.data(), passport(input).ok_or_else(missing)?, [row, rows, 1]);
        let activations = OwnTensor::operand(from);
        let order = OwnTensor::operand(Form::rows(I32, lane.counted(), own, [rows, 1, 1]));
        let given = self
            .replay
            .as_ref()
            .map(|_| OwnTensor::operand(Form::rows(I32, lane.device_given(number), own, [used, tokens, 1])));
        let chosen = given.as_ref().map_or(ids, OwnTensor::tensor);

        let to = |address: usize, type_: u32, size: [usize; 3]| Form::rows(type_, address, own, size);
        let copy = OwnTensor::pick(to(lane.inputs().addr(), F32, [row, rows, 1]), activations.tensor(), order.tensor());
        let size = [1, used, tokens];
        let slots = OwnTensor::pick(to(lane.device_slots(number), I32, size), slots_of.tensor(), chosen);
        let arrival = OwnTensor::pick(to(lane.arrivals(number).addr(), I32, size), numbers.tensor(), chosen);
        let nodes: Vec<OwnTensor> = [copy, arrival, slots].into_iter().flatten().collect();
        let (patches, read, variant) = self.patched(run, operands.group, used, tokens)?;
        let mut all = vec![numbers, slots_of, activations, order, read];
        all.extend(given);
        Ok(Staged { patches, operands, read: all, nodes, variant })
    }

    /// A staged block is about to be handed on; the block before was answered.
    pub(crate) fn arm(&self, number: usize, operands: &Operands<'_>) {
        self.lane.unwrite(self.lane.arrivals(number), operands.used * operands.tokens);
        self.lane.unwrite(self.lane.inputs(), operands.row * operands.rows);
    }

    /// The block was handed on: waits for its ids, and gives the rows of missed experts.
    pub(crate) fn answer(&mut self, run: &BlockRun<'_, '_>, operands: &Operands<'_>) -> Result<Outcome, EngineError> {
        let &Operands { group, down, input, used, tokens, row, rows, .. } = operands;
        let pairs = used * tokens;
        let place = self.lane.arrivals(run.number);
        let early_bytes = self.load_early(run.device)?;
        let begin = Instant::now();
        self.arrive(run.inner, place, pairs);
        let wait_ns = since_ns(begin);
        // What the device did before this part is done.
        let upload_bytes = early_bytes + self.idle(run.device)?;
        let mut outcome = Outcome { upload_bytes, wait_ns, ..Outcome::default() };
        let experts = self.policy.shape().groups()[group.0 as usize].experts;
        let mut chosen = Vec::with_capacity(pairs);
        let mut missed = Vec::new();
        for pair in 0..pairs {
            // SAFETY: a block has room for MOST_PAIRS ids, which `suits` asked for; they have arrived.
            let id = unsafe { place.cast::<i32>().wrapping_add(pair).read_volatile() };
            let expert = u32::try_from(id).ok().filter(|expert| *expert < experts);
            let expert = expert.ok_or(EngineError::BadId { id, experts })?;
            chosen.push(expert);
            // SAFETY: the table has an entry for each expert of each group.
            let slot = unsafe { self.lane.table().wrapping_add(self.table_at(group) + expert as usize).read() };
            if u32::try_from(slot).is_ok_and(|slot| slot < ZERO_SLOTS) {
                missed.push((pair, expert));
            }
        }
        self.policy.note_use(group, chosen.iter().copied());
        outcome.misses = missed.len() as u64;
        outcome.hits = chosen.len() as u64 - outcome.misses;
        if missed.is_empty() {
            return Ok(outcome);
        }
        self.arrive(run.inner, self.lane.inputs(), row * rows);
        if run.device.poisons() {
            self.lane.poison_results();
        }
        let per_pair = input.ne()[1] > 1;
        let weights = &self.weights[group.0 as usize];
        let work = Work::new(weights, &missed, used, per_pair);
        self.read_ahead.ask(work.ranges(weights));
        let job = self.job(weights, &work, (row * size_of::<f32>(), down.nb()[1]));
        let begin = Instant::now();
        // SAFETY: the weights lie in RAM of the model for as long as the cache is current; inputs have arrived, outputs are the lane's own
        // and large enough; both stay until the ticket was waited for, and each pair has a row of its own.
        let ticket = unsafe { self.team.start(&job) }?;
        ticket.wait()?;
        outcome.team_ns = since_ns(begin);
        outcome.cpu_bytes = work.bytes;
        self.merge(run, down, &missed, used)?;
        Ok(outcome)
    }

    /// Looks until all of these words have arrived.
    fn arrive(&self, inner: &inner::Backend, place: *mut u8, words: usize) {
        let start = Instant::now();
        let mut looks = 0_u32;
        while !self.lane.are_written(place, words) {
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(LOOKS) && start.elapsed() > PATIENCE {
                inner.synchronize();
                return;
            }
            core::hint::spin_loop();
        }
    }
}
