//! One block of a graph: hits on the device, misses in RAM, at the same time.
//!
//! Owns: the steps of a block and the order between them:
//!
//! 1. ids and rows of activations come to the host; the stream is waited for;
//! 2. every (token, expert) pair is a hit or a miss; the misses are given to the team;
//! 3. the block's own nodes run on the device over the arena, with slots for ids; misses point to slots of zeros;
//! 4. the team's rows are written into the last product's result, behind those nodes and before the next segment.
//!
//! Invariants: every row of a missed pair is written in step 4, also when the team fails (then the graph fails); the host's nodes are
//! restored before the call returns.
//! Threads: the one that drives the backend, and the team's.
// UNSAFETY: addresses in RAM and of the lane are handed to copies and to the team; each block says what bounds them.
#![expect(unsafe_code, reason = "addresses in RAM are handed to copies and to the team")]

use core::ffi::c_void;
use std::sync::Arc;
use std::time::Instant;

use super::arena::ZERO_SLOTS;
use super::lane::MOST_PAIRS;
use super::{Cache, Candidate, MOST_MIDDLE_TOKENS, MOST_TOKENS, NoCache, Weight, Weights, host_memory};
use crate::abi::graph::GraphError;
use crate::abi::inner::{self, Passport, Status};
use crate::abi::own::{Form, I32, OwnTensor};
use crate::abi::tensor::{Patch, Replacement, Retired, Tensor};
use crate::buffer::BufferError;
use crate::cpu::shape::{After, Group, Job, JobError, Matrix, Pair, Shape, Table};
use crate::device::Device;
use crate::experts::residency::Reader;
use crate::experts::shape::GroupId;

/// A block could not be computed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EngineError {
    #[error(transparent)]
    Buffer(#[from] BufferError),
    #[error(transparent)]
    Graph(#[from] GraphError),
    #[error("experts in RAM: {0}")]
    Job(#[from] JobError),
    /// The router named an expert that does not exist.
    #[error("expert {id} of {experts} was asked for: the model or its routing is broken")]
    BadId { id: i32, experts: u32 },
    /// An operand is not where it must be.
    #[error("\"{0}\" has an operand that this plugin cannot reach")]
    Operand(String),
}

/// What a block did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) hits: u64,
    pub(crate) misses: u64,
    /// Bytes of weights that the team read.
    pub(crate) cpu_bytes: u64,
    /// Bytes whose upload began.
    pub(crate) upload_bytes: u64,
    /// Time in the wait for ids and rows.
    pub(crate) wait_ns: u64,
    /// Time from giving misses to the team until they were done.
    pub(crate) team_ns: u64,
}

/// A block about to run.
pub(crate) struct BlockRun<'r, 'a> {
    pub(crate) device: &'r Device,
    pub(crate) inner: &'r inner::Backend,
    pub(crate) nodes: &'r [Tensor<'a>],
    pub(crate) block: &'r Candidate,
    /// Its number within the graph.
    pub(crate) number: usize,
    pub(crate) reader: &'r Reader,
}

impl Cache {
    /// Whether this block is one of the model that the cache was made for, with operands for which the lane has room.
    pub(crate) fn knows(&self, nodes: &[Tensor<'_>], block: &Candidate) -> bool {
        let down = nodes[block.pattern.down];
        let (Some(ids), Some(input)) = (down.source(2), nodes[block.pattern.up.product].source(1)) else {
            return false;
        };
        let [used, tokens, ..] = ids.ne().map(|count| usize::try_from(count).unwrap_or(0));
        let room = self.lane.size();
        self.group(down).is_some_and(|group| self.is_block(group, nodes, block))
            && ids_bytes(ids) <= room.ids
            && input.bytes() <= room.inputs
            && used * tokens * down.nb()[1] <= room.outputs
    }

    /// Runs a block. `compute` hands its nodes to the inner stream; the number stands for what they were made to read. What they read is added
    /// to `retired`, to be kept until the stream is idle.
    pub(crate) fn run<'a>(
        &mut self,
        run: &BlockRun<'_, 'a>,
        retired: &mut Vec<Retired>,
        compute: impl FnOnce(u64) -> Result<Status, GraphError>,
    ) -> Result<(Status, Outcome), EngineError> {
        let down = run.nodes[run.block.pattern.down];
        let operand = |tensor: Tensor<'_>| EngineError::Operand(tensor.name());
        let group = self.group(down).ok_or_else(|| operand(down))?;
        let ids = down.source(2).ok_or_else(|| operand(down))?;
        let input = run.nodes[run.block.pattern.up.product].source(1).ok_or_else(|| operand(down))?;
        let [used, tokens, ..] = ids.ne().map(|count| usize::try_from(count).unwrap_or(0));
        let memory = |tensor: Tensor<'a>| passport(tensor).ok_or_else(|| operand(tensor));
        if run.device.poisons() {
            self.lane.poison_operands();
        }
        // SAFETY: both tensors lie in memory of the inner device, and the lane has room for them (`knows`); it is waited for below.
        unsafe {
            run.inner.read_async(memory(ids)?, ids.data(), self.lane.ids().cast(), ids_bytes(ids));
        }
        // SAFETY: as above.
        unsafe {
            run.inner.read_async(memory(input)?, input.data(), self.lane.inputs().cast(), input.bytes());
        }
        let early_bytes = self.load_early(run.device)?;
        let waits = Instant::now();
        run.inner.synchronize();
        let wait_ns = since_ns(waits);
        if run.device.poisons() {
            self.lane.poison_results();
        }
        retired.clear();
        let upload_bytes = early_bytes + self.idle(run.device)?;
        let mut outcome = Outcome { upload_bytes, wait_ns, ..Outcome::default() };

        let experts = self.read_ids(group, ids, used, tokens)?;
        self.policy.note_use(group, experts.iter().copied());
        let missed = self.write_slots(run, group, &experts, used);
        outcome.misses = missed.len() as u64;
        outcome.hits = experts.len() as u64 - outcome.misses;

        let weights = &self.weights[group.0 as usize];
        let work = Work::new(weights, &missed, used, input.ne()[1] > 1);
        self.read_ahead.ask(work.ranges(weights));
        outcome.cpu_bytes = work.bytes;
        let job = self.job(weights, &work, (input.nb()[1], down.nb()[1]));
        let team = Arc::clone(&self.team);
        let given = Instant::now();
        let ticket = if missed.is_empty() {
            None
        } else {
            // SAFETY: the weights lie in RAM of the model for as long as the cache is current; inputs were waited for, outputs are the lane's
            // own and large enough; both stay until the ticket was waited for, below, and each pair has a row of its own.
            Some(unsafe { team.start(&job) }?)
        };
        let (patches, read, variant) = self.patched(run, group, used, tokens)?;
        let slots = self.lane.slots(run.number);
        let bytes = used * tokens * size_of::<i32>();
        let target = self.lane.device();
        // SAFETY: the slots were written above and stay until the stream is waited for, which the next block does before it writes its own.
        unsafe {
            run.inner.write_async(
                target.passport(),
                self.lane.device_slots(run.number),
                slots.cast_const().cast(),
                bytes,
            );
        }
        let status = compute(variant)?;
        retired.extend(patches.into_iter().filter_map(Patch::retire));
        retired.push(read.retire());
        if let Some(ticket) = ticket {
            ticket.wait()?;
            outcome.team_ns = since_ns(given);
        }
        self.merge(run, down, &missed, used)?;
        Ok((status, outcome))
    }

    /// What the team is to compute; the strides are those of rows of inputs and outputs.
    pub(super) fn job<'w>(&self, weights: &'w Weights, work: &'w Work, (input, output): (usize, usize)) -> Job<'w> {
        Job {
            shape: &weights.shape,
            groups: &work.groups,
            pairs: &work.pairs,
            inputs: (self.lane.inputs().cast_const().cast(), input),
            outputs: (self.lane.outputs().cast(), output),
        }
    }

    /// The experts of every pair, token by token.
    fn read_ids(&self, group: GroupId, ids: Tensor<'_>, used: usize, tokens: usize) -> Result<Vec<u32>, EngineError> {
        let experts = self.policy.shape().groups()[group.0 as usize].experts;
        let mut out = Vec::with_capacity(used * tokens);
        for token in 0..tokens {
            if let Some(replay) = &self.replay {
                out.extend(replay.experts(group, token).iter().map(|&expert| u32::from(expert)));
                continue;
            }
            for place in 0..used {
                let offset = token * ids.nb()[1] + place * ids.nb()[0];
                let place = self.lane.ids().wrapping_add(offset).cast::<i32>();
                // SAFETY: the lane holds the span of the ids that was copied to it.
                let id = unsafe { place.read_unaligned() };
                let expert = u32::try_from(id).ok().filter(|expert| *expert < experts);
                out.push(expert.ok_or(EngineError::BadId { id, experts })?);
            }
        }
        Ok(out)
    }

    /// Writes the slot of every pair for the device; returns the pairs that are missed, with their experts.
    fn write_slots(&self, run: &BlockRun<'_, '_>, group: GroupId, experts: &[u32], used: usize) -> Vec<(usize, u32)> {
        let slots = self.lane.slots(run.number).cast::<i32>();
        let mut missed = Vec::new();
        let mut zero = 0;
        for (pair, &expert) in experts.iter().enumerate().take(MOST_PAIRS) {
            if pair % used == 0 {
                zero = 0;
            }
            let block = self.policy.shape().block(group, expert);
            let slot = match block.and_then(|block| self.residency.find(run.reader, block)) {
                Some(slot) => slot.0 + ZERO_SLOTS,
                None => {
                    missed.push((pair, expert));
                    zero += 1;
                    (zero - 1) % ZERO_SLOTS
                }
            };
            let place = slots.wrapping_add(pair);
            // SAFETY: a block has room for MOST_PAIRS slots.
            unsafe { place.write(i32::try_from(slot).unwrap_or(0)) };
        }
        missed
    }

    /// Makes the block's products read the arena and slots. The slots are one tensor for all: kernels that compute gate and up at once look
    /// for that. Returns it, and a number that stands for all that was patched.
    pub(super) fn patched<'a>(
        &self,
        run: &BlockRun<'_, 'a>,
        group: GroupId,
        used: usize,
        tokens: usize,
    ) -> Result<(Vec<Patch<'a>>, OwnTensor, u64), EngineError> {
        let pool = &self.pools[usize::from(self.weights[group.0 as usize].pool)];
        let buffer = self.lane.device().passport();
        let slots = Form::rows(I32, self.lane.device_slots(run.number), buffer, [used, tokens, 1]);
        let slots = OwnTensor::operand(slots);
        let mut patches = Vec::with_capacity(2 * run.block.products.len());
        for &index in &run.block.products {
            let product = run.nodes[index];
            let operand = || EngineError::Operand(product.name());
            let plane = plane_of(run.block, index).and_then(|plane| pool.planes.get(plane)).ok_or_else(operand)?;
            let weight = product.source(0).ok_or_else(operand)?;
            let (ne, nb) = (weight.ne(), weight.nb());
            let stride = plane.matrix.stride();
            let all = (pool.slots + ZERO_SLOTS) as usize;
            let arena = Replacement {
                address: plane.memory.base(),
                buffer: plane.memory.passport(),
                ne: [ne[0], ne[1], i64::try_from(all).unwrap_or(0), 1],
                nb: [nb[0], nb[1], stride, stride * all],
            };
            patches.push(Patch::with(product, 0, arena).ok_or_else(operand)?);
            patches.push(Patch::to(product, 2, &slots).ok_or_else(operand)?);
        }
        // The same addresses for the same block in every graph: one number stands for all of them, and for the number of tokens.
        let first = self.lane.device_slots(run.number) as u64;
        let variant = pool.planes.iter().fold(first, |sum, plane| sum.rotate_left(17) ^ plane.memory.base() as u64);
        Ok((patches, slots, variant ^ tokens as u64))
    }

    /// Writes the team's rows into the result of the last product.
    pub(super) fn merge(
        &self,
        run: &BlockRun<'_, '_>,
        down: Tensor<'_>,
        missed: &[(usize, u32)],
        used: usize,
    ) -> Result<(), EngineError> {
        let buffer = passport(down).ok_or_else(|| EngineError::Operand(down.name()))?;
        let row = down.nb()[1];
        let mut first = 0;
        while first < missed.len() {
            // Rows of one token that follow each other are one copy.
            let (pair, _) = missed[first];
            let follows = |at: usize| missed[at].0 == pair + (at - first) && missed[at].0 / used == pair / used;
            let mut end = first + 1;
            while end < missed.len() && follows(end) {
                end += 1;
            }
            let address = down.data() + (pair / used) * down.nb()[2] + (pair % used) * row;
            let source = self.lane.outputs().wrapping_add(pair * row).cast_const().cast::<c_void>();
            // SAFETY: the rows lie in the result; the lane's rows stay until the stream is waited for, which the next block does before its
            // team writes others.
            unsafe { run.inner.write_async(buffer, address, source, (end - first) * row) };
            first = end;
        }
        Ok(())
    }
}

pub(super) fn since_ns(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// The lists of a job.
pub(super) struct Work {
    groups: Vec<Group>,
    pairs: Vec<Pair>,
    pub(super) bytes: u64,
}

impl Work {
    /// Groups the missed pairs by expert, so that each weight is read once.
    pub(super) fn new(weights: &Weights, missed: &[(usize, u32)], used: usize, per_pair: bool) -> Self {
        let mut order: Vec<(u32, usize)> = missed.iter().map(|&(pair, expert)| (expert, pair)).collect();
        order.sort_unstable();
        let mut work = Self { groups: Vec::new(), pairs: Vec::with_capacity(order.len()), bytes: 0 };
        for (expert, pair) in order {
            let input = if per_pair { pair } else { pair / used };
            let narrow = |number: usize| u32::try_from(number).unwrap_or(0);
            work.pairs.push(Pair { input: narrow(input), output: narrow(pair) });
            match work.groups.last_mut().filter(|group| group.expert == expert) {
                Some(group) => group.pairs += 1,
                None => {
                    work.groups.push(weights.of(expert));
                    work.bytes += weights.matrices.iter().map(|weight| weight.expert_bytes as u64).sum::<u64>();
                }
            }
        }
        work
    }

    /// Where the weights of its experts lie.
    pub(super) fn ranges<'a>(&'a self, weights: &'a Weights) -> impl Iterator<Item = (usize, usize)> + 'a {
        self.groups.iter().flat_map(|group| {
            let at =
                |weight: &Weight| (weight.address + group.expert as usize * weight.expert_bytes, weight.expert_bytes);
            weights.matrices.iter().map(at)
        })
    }
}

// SAFETY: the shape points into the tables that lie beside it, on the heap, constant; nothing else in it is bound to a thread.
unsafe impl Send for Weights {}
// SAFETY: as above.
unsafe impl Sync for Weights {}

impl Weights {
    pub(super) fn of(&self, expert: u32) -> Group {
        let at = |weight: &Weight| {
            core::ptr::with_exposed_provenance::<u8>(weight.address + expert as usize * weight.expert_bytes)
        };
        let first = at(&self.matrices[0]);
        let down = self.matrices.last().map_or(first, at);
        let (gate, up) = match (&self.shape.gate, self.matrices.len()) {
            (None, _) => (first, first),
            (Some(_), 3) => (first, at(&self.matrices[1])),
            (Some(gate), _) => {
                let second = first.wrapping_add(self.shape.n_ff * gate.stride);
                if self.up_first { (second, first) } else { (first, second) }
            }
        };
        Group { expert, gate, up, down, pairs: 1 }
    }
}

/// Bytes from the first id of an operand to the end of the last, strides included.
fn ids_bytes(ids: Tensor<'_>) -> usize {
    let last = |dimension: usize| usize::try_from(ids.ne()[dimension]).unwrap_or(0).saturating_sub(1);
    last(1) * ids.nb()[1] + last(0) * ids.nb()[0] + size_of::<i32>()
}

/// Bytes of one token's rows of activations.
pub(super) fn input_bytes(product: Tensor<'_>) -> usize {
    product.source(1).map_or(0, |input| input.nb()[2])
}

pub(super) fn passport(tensor: Tensor<'_>) -> Option<Passport> {
    tensor.our_buffer()?.memory().map(|memory| memory.passport())
}

/// Which plane a product reads.
fn plane_of(block: &Candidate, product: usize) -> Option<usize> {
    let pattern = &block.pattern;
    let mut products: Vec<usize> =
        pattern.gate.iter().map(|gate| gate.product).chain([pattern.up.product, pattern.down]).collect();
    products.dedup();
    products.iter().position(|known| *known == product)
}

/// Whether the engine can compute a block in a graph of this form: few tokens, operands in rows, not a warm-up graph.
pub(crate) fn suits(nodes: &[Tensor<'_>], block: &Candidate) -> bool {
    suits_up_to(MOST_TOKENS, nodes, block)
}

/// Whether the engine could compute a block in a pass of some tokens more. Device kernels for those rely on a token using no expert twice, so
/// there must be a slot of zeros for each of a token's experts.
pub(crate) fn suits_middle(nodes: &[Tensor<'_>], block: &Candidate) -> bool {
    let used = nodes[block.pattern.down].source(2).map_or(i64::MAX, |ids| ids.ne()[0]);
    used <= ZERO_SLOTS.into() && suits_up_to(MOST_MIDDLE_TOKENS, nodes, block)
}

fn suits_up_to(most: i64, nodes: &[Tensor<'_>], block: &Candidate) -> bool {
    let down = nodes[block.pattern.down];
    let up = nodes[block.pattern.up.product];
    let (Some(ids), Some(weight), Some(input), Some(hidden)) =
        (down.source(2), down.source(0), up.source(1), down.source(1))
    else {
        return false;
    };
    let [used, tokens, ..] = ids.ne();
    let experts = weight.ne()[2];
    // llama.cpp's first graph uses all experts, to touch them; nothing is learned from it.
    let is_warm_up = used == experts && experts > 16;
    let few = (1..=most).contains(&tokens) && used >= 1 && used * tokens <= MOST_PAIRS as i64;
    let rows = input.is_contiguous() && input.ne()[2] == tokens && down.is_contiguous() && hidden.ne()[1] == used;
    few && !is_warm_up && rows && passport(ids).is_some() && passport(input).is_some() && passport(down).is_some()
}

/// What a block's experts compute, for the team; biases are copied to RAM once.
pub(super) fn weights(
    nodes: &[Tensor<'_>],
    block: &Candidate,
    tensors: &[Tensor<'_>],
    pool: u16,
) -> Result<Weights, NoCache> {
    let kernels = crate::abi::cpu_kernels().map_err(NoCache::Unsuitable)?;
    let unsuitable = |what: String| NoCache::Unsuitable(what);
    let kernel = |weight: Tensor<'_>| {
        let kernel = kernels.kernel(weight.type_());
        let kernel =
            kernel.ok_or_else(|| unsuitable(format!("{} has a type that cannot be computed in RAM", weight.name())));
        kernel.map(|kernel| Matrix { kernel, stride: weight.nb()[1] })
    };
    let pattern = &block.pattern;
    let mut tables: Vec<Vec<f32>> = Vec::new();
    let mut after = |origin: Option<super::pattern::Origin>, n_ff: usize| -> Result<After, NoCache> {
        let Some(bias) = origin.and_then(|origin| origin.bias) else { return Ok(After::default()) };
        let table = nodes[bias].source(1).and_then(crate::abi::slots::buffer::download);
        let bytes = table.ok_or_else(|| unsuitable(format!("the bias of {:?} cannot be read", nodes[bias])))?;
        let values: Vec<f32> =
            bytes.chunks_exact(4).map(|four| f32::from_ne_bytes([four[0], four[1], four[2], four[3]])).collect();
        let stride = nodes[bias].source(1).map_or(0, |bias| bias.nb()[1]);
        let skip = if origin.is_some_and(|origin| origin.second_half) { n_ff } else { 0 };
        let data = values.as_ptr().wrapping_add(skip);
        tables.push(values);
        Ok(After { scale: None, bias: Some(Table { data, stride }) })
    };
    let down = *tensors.last().ok_or_else(|| unsuitable("a block without weights".to_owned()))?;
    let size = |number: i64| usize::try_from(number).unwrap_or(0);
    let (n_embd, n_ff) = (size(tensors[0].ne()[0]), size(down.ne()[0]));
    let shape = Shape {
        n_embd,
        n_ff,
        gate: pattern.gate.map(|_| kernel(tensors[0])).transpose()?,
        up: kernel(if tensors.len() == 3 { tensors[1] } else { tensors[0] })?,
        down: kernel(down)?,
        activation: pattern.activation,
        values: kernels.values(),
        after_gate: after(pattern.gate, n_ff)?,
        after_up: after(Some(pattern.up), n_ff)?,
        after_down: After::default(),
    };
    shape.check().map_err(|error| unsuitable(error.to_string()))?;
    for tensor in tensors {
        if host_memory(*tensor).is_none() {
            return Err(unsuitable(format!("{} does not lie in RAM", tensor.name())));
        }
    }
    let matrices =
        tensors.iter().map(|weight| Weight { address: weight.data(), expert_bytes: weight.nb()[2] }).collect();
    let up_first = pattern.gate.is_some_and(|gate| gate.second_half);
    Ok(Weights { pool, matrices, shape, up_first, _tables: tables })
}
