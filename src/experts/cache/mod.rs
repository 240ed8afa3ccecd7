//! The live cache: experts in use lie on the device, the others are computed in RAM, in the same layer at the same time.
//!
//! Owns: what a device's cache is made of (`Cache`): the groups of a model, their slots (`arena`), who lies where (`residency`), what is
//! worth a slot (`policy`), and the uploads under way. `pattern` reads from the nodes what a block computes; `engine` runs one.
//! Invariants: a graph sees what was resident when it started; a block being written is never read; RAM holds every expert, so the cache
//! can be dropped at any time between graphs.
//! Threads: one at a time; whoever runs a graph takes the cache out of its device and puts it back.
//! Does not: run graphs (`backend` does), or compute in RAM (`cpu` does).

mod ahead;
mod arena;
mod engine;
mod identity;
mod lane;
mod learned;
mod middle;
mod pace;
mod pass;
pub(crate) mod pattern;
mod poison;
mod pools;
mod rates;
mod report;
mod resize;
mod room;
mod steering;
mod tail;
pub(crate) mod uploads;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use super::HostMemory;
use super::policy::{Admission, Policy, Pool};
use super::readahead::ReadAhead;
use super::residency::{LoadError, Reader, Residency};
use super::shape::{Block, Group, GroupId, Shape};
use crate::abi::tensor::Tensor;
use crate::buffer::{Buffer, BufferError};
use crate::config::CacheSize;
use crate::cpu::team::{self, Team};
use crate::device::Device;
use crate::gpu::Mark;
use crate::graph::TensorKey;
use crate::memory::Lease;
use crate::telemetry::log;

use arena::{Matrix, PoolMemory};
use identity::Identity;
use lane::Lane;
use pattern::Pattern;
use steering::Steering;

pub(crate) use ahead::Staged;
pub(crate) use engine::{BlockRun, EngineError, Outcome, suits, suits_middle};
pub(crate) use resize::ResizeError;

/// The largest number of tokens that a graph may have for its blocks to be computed by the cache: what device kernels for single
/// rows take.
pub(crate) const MOST_TOKENS: i64 = 8;
/// The largest number of tokens that a block may have which the cache computes because that is faster than bringing experts.
pub(crate) const MOST_MIDDLE_TOKENS: i64 = 32;
/// Blocks loaded in one step while there is room.
const PRELOAD_PER_STEP: usize = 24;
/// With each block of a graph this part of the uploads that wait begins, and at least so many bytes.
const WAITING_PART: usize = 8;
const LEAST_BYTES: u64 = 16 << 20;
/// Elements of a row that device kernels may read behind the last one.
const ROW_PADDING: i64 = 512;

/// A weight in RAM.
#[derive(Clone, Copy, Debug)]
struct Weight {
    address: usize,
    expert_bytes: usize,
}

/// The weights of one block of the graph.
struct Weights {
    pool: u16,
    /// Gate and up, or both in one, or up alone; then down. One per plane.
    matrices: Vec<Weight>,
    /// Gate and up lie in one matrix, up first.
    up_first: bool,
    shape: crate::cpu::shape::Shape,
    /// Tables that the shape points to.
    _tables: Vec<Vec<f32>>,
}

/// An upload under way.
struct Upload {
    block: Block,
    mark: Box<dyn Mark>,
    /// How many graphs had ended when it began.
    graph: u64,
}

/// The cache of one device, for one model.
pub(crate) struct Cache {
    model_epoch: u64,
    groups: HashMap<TensorKey, GroupId>,
    weights: Vec<Weights>,
    pools: Vec<PoolMemory>,
    /// The pools' bytes.
    lease: Lease,
    policy: Policy,
    residency: Residency,
    uploads: VecDeque<Upload>,
    /// Admitted blocks that wait for the next graph, or for a slot: who leaves is still read by the graph that runs.
    waiting: VecDeque<Block>,
    /// Blocks that have a slot and are loaded when a long pass comes to them.
    on_the_way: Vec<(Block, u32)>,
    /// What passes ended with, until it was looked at.
    tail: Option<tail::Tail>,
    /// The graph that ran last; it is done when the stream was waited for.
    reader: Option<Reader>,
    lane: Lane,
    /// Whether blocks may run before the host knows their ids.
    runs_ahead: bool,
    /// Blocks that came or left since the last graph.
    changed: Vec<Block>,
    /// Whether the device's table of slots is not the one in RAM.
    table_is_old: bool,
    team: Arc<Team>,
    replay: Option<Replay>,
    /// Graphs that ended.
    graph: u64,
    /// Bytes whose upload began outside of what is counted.
    uncounted_bytes: u64,
    steering: Steering,
    /// Slots that were poisoned since they were written (`debug-poison`).
    poisoned: HashSet<(u16, u32)>,
    moved: report::Moved,
    read_ahead: ReadAhead,
    expected_hits: f64,
}

/// A simulated routing that replaces the model's, for benchmarks.
struct Replay {
    /// Experts by token, group and place.
    ids: Vec<u16>,
    per_token: usize,
    used: usize,
    token: usize,
}

/// Tokens of a simulated routing before it repeats itself.
const REPLAY_TOKENS: usize = 2048;

impl Replay {
    /// `None` if the preset is of another shape than the model.
    fn new(preset: &crate::sim::Preset, shape: &Shape) -> Option<Self> {
        let groups = shape.groups();
        let fits = |group: &Group| group.experts == u32::from(preset.experts) && group.used == u32::from(preset.used);
        let layers = u16::try_from(groups.len()).ok().filter(|_| groups.iter().all(fits))?;
        let mut routing = crate::sim::Routing::new(preset, layers, 1);
        let mut ids = Vec::new();
        (0..REPLAY_TOKENS).for_each(|_| routing.token(&mut ids));
        let used = usize::from(preset.used);
        Some(Self { ids, per_token: usize::from(layers) * used, used, token: 0 })
    }

    /// The experts of a token of the graph that runs.
    fn experts(&self, group: GroupId, token: usize) -> &[u16] {
        let start = ((self.token + token) % REPLAY_TOKENS) * self.per_token + group.0 as usize * self.used;
        &self.ids[start..start + self.used]
    }
}

/// A block of the graph that the cache can compute.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    /// Its products, by place in the graph, in order.
    pub(crate) products: Vec<usize>,
    pub(crate) pattern: Pattern,
}

/// Why there is no cache.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoCache {
    /// The blocks cannot be cached.
    #[error("{0}")]
    Unsuitable(String),
    /// Memory is missing.
    #[error("what it may have is less than one expert and what the cache itself needs on {0}; set cache to more")]
    NoMemory(String),
    /// There is not enough memory beside what others have; later there may be.
    #[error("no room for it yet")]
    NoRoom,
    #[error(transparent)]
    Buffer(#[from] BufferError),
}

impl Cache {
    /// A cache for the blocks of one graph.
    pub(crate) fn new(device: &Device, nodes: &[Tensor<'_>], blocks: &[Candidate]) -> Result<Self, NoCache> {
        let team = team::shared(device.team_options())
            .map_err(|error| NoCache::Unsuitable(format!("no threads for experts in RAM ({error})")))?;
        let mut kinds: Vec<Vec<Matrix>> = Vec::new();
        let mut groups = Vec::new();
        let mut weights = Vec::new();
        let mut keys = HashMap::new();
        let (mut identity, mut names) = (Identity::new(), Vec::new());
        let mut from_file = false;
        let mut lane =
            lane::LaneSize { ids: 0, inputs: 0, outputs: 0, blocks: blocks.len(), experts: 0, most_experts: 0 };
        for block in blocks {
            let tensors = planes(nodes, block)?;
            tensors.iter().for_each(|weight| identity.add_weight(*weight));
            from_file |=
                tensors.iter().any(|weight| weight.our_buffer().is_some_and(|buffer| buffer.shows_file(*weight)));
            names.push(tensors.first().map_or_else(String::new, Tensor::name));
            let matrices: Vec<Matrix> = tensors.iter().map(|weight| matrix(device, *weight)).collect();
            let pool = kinds.iter().position(|known| *known == matrices).unwrap_or_else(|| {
                kinds.push(matrices);
                kinds.len() - 1
            });
            let pool = u16::try_from(pool).map_err(|_| NoCache::Unsuitable("too many kinds of blocks".to_owned()))?;
            let down = nodes[block.pattern.down];
            let ids = down.source(2).ok_or_else(|| NoCache::Unsuitable("a product without ids".to_owned()))?;
            let experts = down.source(0).map_or(0, |weight| weight.ne()[2]);
            let count = |number: i64| u32::try_from(number).unwrap_or(0);
            let id = u32::try_from(groups.len()).unwrap_or(u32::MAX);
            let key = tensors.last().map_or(TensorKey(0), Tensor::key);
            if keys.insert(key, GroupId(id)).is_some() {
                return Err(NoCache::Unsuitable("two blocks share their weights".to_owned()));
            }
            groups.push(Group { experts: count(experts), used: count(ids.ne()[0]), pool });
            weights.push(engine::weights(nodes, block, &tensors, pool)?);
            let used = usize::try_from(ids.ne()[0]).unwrap_or(0);
            let experts = usize::try_from(experts).unwrap_or(0);
            lane.experts += experts;
            lane.most_experts = lane.most_experts.max(experts);
            let tokens = usize::try_from(MOST_MIDDLE_TOKENS).unwrap_or(0);
            lane.ids = lane.ids.max(ids.nb()[1] * tokens + used * ids.nb()[0]);
            lane.inputs = lane.inputs.max(engine::input_bytes(nodes[block.pattern.up.product]) * tokens);
            lane.outputs = lane.outputs.max(down.nb()[1] * used * tokens);
        }
        let lane = Lane::new(device, lane)?; // before the rest of the memory is asked for
        let slots_bytes = match device.cache_size() {
            CacheSize::SlotsPerLayer(slots) => Self::bytes_for(device, nodes, blocks, slots),
            CacheSize::Auto | CacheSize::Off | CacheSize::Mib(_) => 0,
        };
        let room = device.cache_room(slots_bytes).ok_or(NoCache::NoRoom)?;
        let kinds = room::split(device, &mut groups, kinds, room.most);
        weights.iter_mut().zip(&groups).for_each(|(weights, group)| weights.pool = group.pool);
        let shape = Shape::new(groups).map_err(|error| NoCache::Unsuitable(error.to_string()))?;
        let (pools, lease) = room::pools(device, &shape, &kinds, room)?;
        let sizes: Vec<Pool> = pools
            .iter()
            .zip(&kinds)
            .map(|(pool, matrices)| Pool {
                slots: pool.opened(),
                block_bytes: PoolMemory::block_bytes(matrices) as u64,
            })
            .collect();
        let mut residency = Residency::new(&shape);
        for (number, pool) in (0_u16..).zip(&pools) {
            residency.set_slots(number, pool.opened());
        }
        let (steering, heat) = Steering::new(device, &shape, identity, names);
        let replay = device.replay().and_then(|preset| Replay::new(preset, &shape));
        if let Some(preset) = device.replay() {
            let how = if replay.is_some() { "REPLACED BY" } else { "NOT REPLACED (OTHER SHAPE) BY" };
            log::notice(&format!(
                "{}: ROUTING IS {how} THE PRESET {}: THE OUTPUT IS NONSENSE",
                device.label(),
                preset.name
            ));
        }
        let mut cache = Self {
            model_epoch: device.model_epoch(),
            read_ahead: ReadAhead::new(from_file),
            runs_ahead: Self::may_run_ahead(&lane, device),
            changed: Self::all_blocks(&shape),
            table_is_old: true,
            groups: keys,
            weights,
            policy: Policy::new(shape, &sizes, pace::policy_settings(device.expert_settings()), heat),
            residency,
            pools,
            lease,
            uploads: VecDeque::new(),
            waiting: VecDeque::new(),
            on_the_way: Vec::new(),
            tail: None,
            reader: None,
            lane,
            team,
            replay,
            graph: 0,
            uncounted_bytes: 0,
            steering,
            poisoned: HashSet::new(),
            moved: report::Moved::default(),
            expected_hits: 0.0,
        };
        cache.poison_free(device)?;
        cache.announce(device, room.may);
        cache.set_out(device);
        Ok(cache)
    }

    /// The bytes that so many slots for each layer take, with the slots of zeros of each pool.
    pub(crate) fn bytes_for(device: &Device, nodes: &[Tensor<'_>], blocks: &[Candidate], slots: u32) -> usize {
        let mut kinds: Vec<Vec<Matrix>> = Vec::new();
        let mut bytes = 0;
        for block in blocks {
            let Ok(tensors) = planes(nodes, block) else { continue };
            let matrices: Vec<Matrix> = tensors.iter().map(|weight| matrix(device, *weight)).collect();
            let experts = tensors.first().and_then(|weight| usize::try_from(weight.ne()[2]).ok()).unwrap_or(0);
            bytes += PoolMemory::block_bytes(&matrices) * experts.min(slots as usize);
            if !kinds.contains(&matrices) {
                bytes += PoolMemory::block_bytes(&matrices) * arena::ZERO_SLOTS as usize;
                kinds.push(matrices);
            }
        }
        bytes
    }

    /// Whether it was made for what lies in memory now.
    pub(crate) fn is_current(&self, device: &Device) -> bool {
        self.model_epoch == device.model_epoch()
    }

    /// Blocks that it was made for.
    pub(crate) fn blocks(&self) -> usize {
        self.groups.len()
    }

    /// The number of a block's weights, by its last product.
    fn group(&self, down: Tensor<'_>) -> Option<GroupId> {
        self.groups.get(&down.source(0)?.key()).copied()
    }

    /// Whether a block computes what the group computes that has its last weight: a host may use weights twice, in different ways.
    fn is_block(&self, group: GroupId, nodes: &[Tensor<'_>], block: &Candidate) -> bool {
        let Weights { matrices, shape, .. } = &self.weights[group.0 as usize];
        let Ok(tensors) = planes(nodes, block) else { return false };
        let same = |(tensor, weight): (&Tensor<'_>, &Weight)| tensor.data() == weight.address;
        let Pattern { gate, up, activation, .. } = block.pattern;
        let biases = (shape.after_gate.bias.is_some(), shape.after_up.bias.is_some());
        tensors.len() == matrices.len()
            && tensors.iter().zip(matrices).all(same)
            && shape.activation == activation
            && biases == (gate.is_some_and(|gate| gate.bias.is_some()), up.bias.is_some())
    }

    /// A graph starts: what was loaded meanwhile can be seen by it.
    pub(crate) fn start(&mut self) -> Result<Reader, BufferError> {
        self.begin_step();
        self.read_ahead.begin();
        while let Some(upload) = self.uploads.front() {
            if !upload.mark.is_reached()? {
                break;
            }
            let block = upload.block;
            self.uploads.pop_front();
            if self.residency.loaded(block) {
                self.policy.loaded(block);
                self.changed.push(block);
            }
        }
        let reader = self.residency.start();
        self.renew_table(&reader);
        Ok(reader)
    }

    /// The stream was waited for: the graph before is done, and what it alone still read can be written over. Returns the bytes whose upload
    /// began.
    fn idle(&mut self, device: &Device) -> Result<u64, BufferError> {
        let Some(reader) = self.reader.take() else { return Ok(0) };
        self.residency.finish(reader);
        self.poison_free(device)?;
        // In a graph of few blocks there is no other time.
        if self.groups.len() < WAITING_PART { self.load_waiting(device, false) } else { Ok(0) }
    }

    /// The device is on its way to a block's ids, the graph before is done: meanwhile some of the uploads that wait begin. Returns the bytes.
    fn load_early(&mut self, device: &Device) -> Result<u64, BufferError> {
        if self.reader.is_some() { Ok(0) } else { self.load_waiting(device, false) }
    }

    /// Begins some of the uploads that wait, or all. Called while a graph runs, so that what the host copies for the next one is
    /// not behind them. Returns the bytes.
    fn load_waiting(&mut self, device: &Device, all: bool) -> Result<u64, BufferError> {
        if self.waiting.is_empty() {
            return Ok(0);
        }
        let least = if all { self.waiting.len() } else { self.waiting.len().div_ceil(WAITING_PART) };
        let timing = self.time_uploads(device, self.waiting.iter().copied())?;
        let (mut bytes, mut begun) = (0, 0);
        for _ in 0..self.waiting.len() {
            if begun >= least && bytes >= LEAST_BYTES {
                break;
            }
            let Some(block) = self.waiting.pop_front() else { break };
            match self.residency.load(block) {
                Ok(slot) => (bytes, begun) = (bytes + self.upload(device, block, slot.0)?, begun + 1),
                Err(LoadError::NoSlot | LoadError::Leaving) => self.waiting.push_back(block),
                Err(LoadError::Present) => {}
            }
        }
        self.stop_timing(device, timing, bytes)?;
        Ok(bytes)
    }

    /// A graph of so many tokens was handed to the device: chooses what to load next.
    pub(crate) fn end(&mut self, reader: Reader, tokens: u32) -> u64 {
        self.reader = Some(reader);
        if let Some(replay) = &mut self.replay {
            replay.token = (replay.token + tokens as usize) % REPLAY_TOKENS;
        }
        self.choose(tokens);
        self.end_step(tokens);
        std::mem::take(&mut self.uncounted_bytes)
    }

    /// Chooses what to load next. It waits for the next graph.
    fn choose(&mut self, tokens: u32) {
        let mut admissions: Vec<Admission> = self.policy.end_of_step(tokens).to_vec();
        if self.uploads.len() + self.waiting.len() < 2 * PRELOAD_PER_STEP {
            admissions.extend_from_slice(self.policy.preload(PRELOAD_PER_STEP));
        }
        for admission in admissions {
            if let Some(evicted) = admission.evicts {
                self.residency.leave(evicted);
                self.changed.push(evicted);
                self.moved.evictions += 1;
            }
            self.waiting.push_back(admission.block);
        }
    }

    fn upload(&mut self, device: &Device, block: Block, slot: u32) -> Result<u64, BufferError> {
        let (group, expert) = self.policy.shape().key(block);
        let weights = &self.weights[group.0 as usize];
        let pool = &self.pools[usize::from(weights.pool)];
        self.poisoned.remove(&(weights.pool, slot));
        let mut bytes = 0;
        let at = |weight: &Weight| (weight.address + expert as usize * weight.expert_bytes, weight.expert_bytes);
        self.read_ahead.ask(weights.matrices.iter().map(at));
        for (plane, weight) in pool.planes.iter().zip(&weights.matrices) {
            let source = weight.address + expert as usize * weight.expert_bytes;
            uploads::upload(device, plane.place(slot), source, weight.expert_bytes)?;
            bytes += weight.expert_bytes as u64;
        }
        self.moved.uploads += 1;
        self.uploads.push_back(Upload { block, mark: device.driver().mark()?, graph: self.graph });
        Ok(bytes)
    }
}

/// The weights of a block, one per plane.
fn planes<'a>(nodes: &[Tensor<'a>], block: &Candidate) -> Result<Vec<Tensor<'a>>, NoCache> {
    let weight = |product: usize| {
        let weight = nodes[product].source(0).filter(|weight| host_memory(*weight).is_some());
        weight.ok_or_else(|| NoCache::Unsuitable(format!("{:?} reads no weights in RAM", nodes[product])))
    };
    let Pattern { gate, up, down, .. } = block.pattern;
    let mut products: Vec<usize> = gate.iter().map(|gate| gate.product).chain([up.product, down]).collect();
    products.dedup();
    products.into_iter().map(weight).collect()
}

fn host_memory(weight: Tensor<'_>) -> Option<&HostMemory> {
    weight.our_buffer().and_then(Buffer::host)
}

fn matrix(device: &Device, weight: Tensor<'_>) -> Matrix {
    if device.lends_contexts() {
        // Vulkan's kernels take the distance of two experts from the shape of the weight, whatever its strides are.
        return Matrix { type_: weight.type_(), bytes: weight.nb()[2], padding: 0, unit: 1, step: weight.nb()[0] };
    }
    let host = crate::abi::host();
    let quantized = host.is_quantized(weight.type_());
    let unit = weight.nb()[0];
    let padding = if quantized { host.row_size(weight.type_(), ROW_PADDING) } else { 512 };
    let step = unit;
    // Kernels for whole numbers of bytes load 16 at once.
    let unit = if quantized { unit } else { 16 };
    Matrix { type_: weight.type_(), bytes: weight.nb()[2], padding, unit, step }
}
