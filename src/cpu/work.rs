//! One job at work: its lists, its intermediate results, and what each of its tasks does.
//!
//! Owns: scratch for inputs and hidden rows in the forms that the kernels take. It grows to what the largest job so far has needed.
//! Invariants: tasks write to places of their own; a slab's hidden rows belong to the task that completes the slab, and afterwards they
//! are only read. Memory of the host is read and written through raw pointers.
//! Threads: written by the thread that starts the job, then read by all who take tasks (see `handover`).
//! Does not: decide who does which task, or when.
// UNSAFETY: weights, inputs and outputs lie in memory of the host; scratch is shared by the threads of the team.
#![expect(unsafe_code, reason = "weights, inputs and outputs lie in memory of the host; scratch is shared by the team")]

use super::cut::{Kind, Sizes, Task, cut};
use super::handover::{Latch, Tasks};
use super::shape::{After, Group, Job, JobError, Matrix, Pair, Shape};
use crate::abi::cpu_kernels::Form;

/// A cache line, so that rows of scratch share none.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "used through its address alone")] [u8; LINE]);

const LINE: usize = 64;

/// Rows whose results are activated together, where the form of hidden rows packs fewer. A multiple of every vector of floats, so that
/// parts of a row are computed as the whole row would be.
const SLAB: usize = 256;

/// What tasks share.
#[derive(Default)]
pub(super) struct Work {
    plan: Option<Plan>,
    groups: Vec<Group>,
    /// Of each group, its first pair.
    firsts: Vec<usize>,
    /// As the job's, with inputs numbered in the order of their first use.
    pairs: Vec<Pair>,
    /// The job's row of each used input.
    inputs: Vec<u32>,
    /// By the job's row: its number among the used ones and one more, or 0.
    numbers: Vec<u32>,
    tasks: Vec<Task>,
    /// All inputs; each group's hidden rows; each slab of each group.
    latches: Vec<Latch>,
    storage: Vec<Line>,
    /// Fails the task of this number, to see what becomes of the job.
    #[cfg(test)]
    pub(super) fault: Option<usize>,
}

/// The current job.
#[derive(Clone, Copy)]
struct Plan {
    shape: Shape,
    inputs: (*const f32, usize),
    outputs: (*mut f32, usize),
    slab: usize,
    slabs: usize,
    scratch: Scratch,
}

/// Where things lie in scratch: areas of equal rows.
#[derive(Clone, Copy)]
struct Scratch {
    base: *mut u8,
    for_up: Area,
    for_gate: Area,
    gate: Area,
    up: Area,
    hidden: Area,
}

#[derive(Clone, Copy, Default)]
struct Area {
    start: usize,
    stride: usize,
}

impl Scratch {
    /// Address of a row of an area.
    fn row(&self, area: Area, row: usize) -> *mut u8 {
        self.base.wrapping_add(area.start + row * area.stride)
    }
}

/// Hands out areas one behind the other.
struct Layout(usize);

impl Layout {
    fn area(&mut self, rows: usize, bytes: usize) -> Area {
        let area = Area { start: self.0, stride: bytes.next_multiple_of(LINE) };
        self.0 += rows * area.stride;
        area
    }
}

impl Work {
    /// Takes a job over: copies its lists, cuts it, and makes room. Returns the number of tasks.
    pub(super) fn prepare(&mut self, job: &Job<'_>, threads: usize) -> Result<usize, JobError> {
        job.check()?;
        let shape = *job.shape;
        self.plan = None;
        self.lists(job)?;
        let slab = slab(shape.down.kernel.form);
        let slabs = shape.n_ff.div_ceil(slab);
        let gate_stride = shape.gate.map_or(0, |gate| gate.stride);
        let sizes = Sizes {
            threads,
            inputs: self.inputs.len(),
            groups: self.groups.len(),
            n_embd: shape.n_embd,
            n_ff: shape.n_ff,
            input_block: shape.up.kernel.form.block().max(shape.gate.map_or(1, |gate| gate.kernel.form.block())),
            slab,
            half_row_bytes: shape.up.stride + gate_stride,
            down_row_bytes: shape.down.stride,
        };
        cut(&sizes, &mut self.tasks);
        self.close_latches(slabs);
        let scratch = self.scratch(&shape)?;
        self.plan = Some(Plan { shape, inputs: job.inputs, outputs: job.outputs, slab, slabs, scratch });
        Ok(self.tasks.len())
    }

    fn lists(&mut self, job: &Job<'_>) -> Result<(), JobError> {
        self.groups.clear();
        self.firsts.clear();
        self.pairs.clear();
        self.inputs.clear();
        self.numbers.clear();
        let rows = job.pairs.iter().map(|pair| pair.input as usize + 1).max().unwrap_or(0);
        self.numbers.try_reserve(rows).map_err(|_| JobError::OutOfMemory)?;
        self.numbers.resize(rows, 0);
        let mut first = 0;
        for group in job.groups {
            self.groups.push(*group);
            self.firsts.push(first);
            first += group.pairs as usize;
        }
        for pair in job.pairs {
            let number = &mut self.numbers[pair.input as usize];
            if *number == 0 {
                self.inputs.push(pair.input);
                *number = u32::try_from(self.inputs.len()).unwrap_or(u32::MAX);
            }
            self.pairs.push(Pair { input: *number - 1, output: pair.output });
        }
        Ok(())
    }

    fn close_latches(&mut self, slabs: usize) {
        let groups = self.groups.len();
        let count = 1 + groups * (1 + slabs);
        if self.latches.len() < count {
            self.latches.resize_with(count, Latch::new);
        }
        // The list of numbers has served its purpose for this job; its memory counts arrivals now.
        let arrivals = &mut self.numbers;
        arrivals.clear();
        arrivals.resize(count, 0);
        for task in &self.tasks {
            match task.kind {
                Kind::Input => arrivals[0] += 1,
                Kind::Half => arrivals[1 + groups + task.group as usize * slabs + task.slab as usize] += 1,
                Kind::Down => {}
            }
        }
        let slabs = u32::try_from(slabs).unwrap_or(u32::MAX);
        for (index, latch) in self.latches.iter().enumerate().take(count) {
            latch.close(if (1..=groups).contains(&index) { slabs } else { arrivals[index] });
        }
    }

    fn scratch(&mut self, shape: &Shape) -> Result<Scratch, JobError> {
        let mut layout = Layout(0);
        let (inputs, pairs) = (self.inputs.len(), self.pairs.len());
        let for_up = layout.area(inputs, shape.up.kernel.form.bytes(shape.n_embd));
        let for_gate = match shape.gate {
            Some(gate) if shape.gate_form_differs() => layout.area(inputs, gate.kernel.form.bytes(shape.n_embd)),
            _ => for_up,
        };
        let floats = shape.n_ff * size_of::<f32>();
        let gate = if shape.gate.is_some() { layout.area(pairs, floats) } else { Area::default() };
        let up = layout.area(pairs, floats);
        let hidden = layout.area(pairs, shape.down.kernel.form.bytes(shape.n_ff));
        let lines = layout.0.div_ceil(LINE);
        if self.storage.len() < lines {
            self.storage.try_reserve_exact(lines - self.storage.len()).map_err(|_| JobError::OutOfMemory)?;
            self.storage.resize(lines, Line([0; LINE]));
        }
        Ok(Scratch { base: self.storage.as_mut_ptr().cast(), for_up, for_gate, gate, up, hidden })
    }

    /// Does one task.
    ///
    /// # Safety
    /// The task was taken from `tasks`, which were published for this job, and the job's addresses are valid as `Team::start` says.
    pub(super) unsafe fn run(&self, number: usize, tasks: &Tasks) {
        #[cfg(test)]
        assert_ne!(self.fault, Some(number), "a task that fails on purpose");
        let (Some(plan), Some(task)) = (&self.plan, self.tasks.get(number)) else { return };
        let group = task.group as usize;
        match task.kind {
            Kind::Input => {
                // SAFETY: the caller's contract.
                unsafe { self.input(plan, task) };
                self.latches[0].arrive();
            }
            Kind::Half => {
                let inputs = &self.latches[0];
                let weights = &self.groups[group];
                if !inputs.is_open() {
                    if let Some(gate) = &plan.shape.gate {
                        // SAFETY: these rows are the task's.
                        unsafe { touch(weights.gate, gate, plan.shape.n_embd, task) };
                    }
                    // SAFETY: as above.
                    unsafe { touch(weights.up, &plan.shape.up, plan.shape.n_embd, task) };
                }
                if !inputs.wait(tasks) {
                    return;
                }
                // SAFETY: the caller's contract; the inputs are there.
                unsafe { self.half(plan, task) };
                let slab = task.slab as usize;
                if self.latches[1 + self.groups.len() + group * plan.slabs + slab].arrive() {
                    // SAFETY: as above; all rows of the slab are there and nobody else comes to it.
                    unsafe { self.activate(plan, group, slab) };
                    self.latches[1 + group].arrive();
                }
            }
            Kind::Down => {
                let hidden = &self.latches[1 + group];
                if !hidden.is_open() {
                    // SAFETY: these rows are the task's.
                    unsafe { touch(self.groups[group].down, &plan.shape.down, plan.shape.n_ff, task) };
                }
                if hidden.wait(tasks) {
                    // SAFETY: the caller's contract; the group's hidden rows are there.
                    unsafe { self.down(plan, task) };
                }
            }
        }
    }

    /// Brings a part of an input row into the forms that up and gate take.
    unsafe fn input(&self, plan: &Plan, task: &Task) {
        let (row, range) = (task.group as usize, task.range());
        let (base, stride) = plan.inputs;
        let source = base.wrapping_byte_add(stride * self.inputs[row] as usize).wrapping_add(range.start);
        let form = &plan.shape.up.kernel.form;
        let target = plan.scratch.row(plan.scratch.for_up, row).wrapping_add(form.bytes(range.start));
        // SAFETY: the input row holds the values; this part of the scratch row is this task's.
        unsafe { form.write(source, target, range.len()) };
        if let Some(gate) = plan.shape.gate.filter(|_| plan.shape.gate_form_differs()) {
            let form = &gate.kernel.form;
            let target = plan.scratch.row(plan.scratch.for_gate, row).wrapping_add(form.bytes(range.start));
            // SAFETY: as above.
            unsafe { form.write(source, target, range.len()) };
        }
    }

    /// Rows of gate, then of up, each for all pairs of the group.
    unsafe fn half(&self, plan: &Plan, task: &Task) {
        let (shape, scratch, group) = (&plan.shape, &plan.scratch, &self.groups[task.group as usize]);
        if let Some(gate) = &shape.gate {
            // SAFETY: the gate of this expert, inputs in its form, and hidden rows of this group.
            unsafe { self.products(plan, task, group.gate, gate, (scratch.for_gate, scratch.gate)) };
        }
        // SAFETY: as above, with up.
        unsafe { self.products(plan, task, group.up, &shape.up, (scratch.for_up, scratch.up)) };
    }

    unsafe fn products(&self, plan: &Plan, task: &Task, base: *const u8, matrix: &Matrix, areas: (Area, Area)) {
        let (first, pairs) = self.pairs_of(task.group as usize);
        for row in task.range() {
            let weights = base.wrapping_add(row * matrix.stride);
            fetch(weights, matrix.stride);
            for (place, pair) in pairs.iter().enumerate() {
                let input = plan.scratch.row(areas.0, pair.input as usize);
                // SAFETY: a whole row of weights of the matrix's type and an input in the form of its kernel.
                let product = unsafe { matrix.kernel.dot(weights, input, plan.shape.n_embd) };
                let target = plan.scratch.row(areas.1, first + place).cast::<f32>().wrapping_add(row);
                // SAFETY: a row of `n_ff` floats of this pair; this place is this task's.
                unsafe { target.write(product) };
            }
        }
    }

    /// What follows the products of a slab: scales, biases, the activation, and the form that down takes.
    unsafe fn activate(&self, plan: &Plan, group: usize, slab: usize) {
        let shape = &plan.shape;
        let start = slab * plan.slab;
        let count = plan.slab.min(shape.n_ff - start);
        let expert = self.groups[group].expert as usize;
        let (first, pairs) = self.pairs_of(group);
        for pair in first..first + pairs.len() {
            let of = |area| plan.scratch.row(area, pair).cast::<f32>().wrapping_add(start);
            // SAFETY: scratch of this pair, written by tasks that have arrived; only this thread uses the slab now.
            let up = unsafe { core::slice::from_raw_parts_mut(of(plan.scratch.up), count) };
            // SAFETY: the tables have a row for each expert.
            unsafe { follow(&shape.after_up, up, expert, start) };
            let row = if shape.gate.is_some() {
                // SAFETY: as for up, in another area.
                let gate = unsafe { core::slice::from_raw_parts_mut(of(plan.scratch.gate), count) };
                // SAFETY: as above.
                unsafe { follow(&shape.after_gate, gate, expert, start) };
                shape.activation.apply(&shape.values, gate, up);
                gate
            } else {
                shape.activation.apply(&shape.values, up, &[]);
                up
            };
            let form = &shape.down.kernel.form;
            let target = plan.scratch.row(plan.scratch.hidden, pair).wrapping_add(form.bytes(start));
            // SAFETY: `row` holds the values; this part of the hidden row belongs to the slab.
            unsafe { form.write(row.as_ptr(), target, count) };
        }
    }

    /// Rows of down, each for all pairs of the group, into the outputs.
    unsafe fn down(&self, plan: &Plan, task: &Task) {
        let (shape, group) = (&plan.shape, &self.groups[task.group as usize]);
        let (first, pairs) = self.pairs_of(task.group as usize);
        let (base, stride) = plan.outputs;
        for row in task.range() {
            let weights = group.down.wrapping_add(row * shape.down.stride);
            fetch(weights, shape.down.stride);
            for (place, pair) in pairs.iter().enumerate() {
                let hidden = plan.scratch.row(plan.scratch.hidden, first + place);
                // SAFETY: a whole row of down, and a hidden row in the form of its kernel.
                let mut product = [unsafe { shape.down.kernel.dot(weights, hidden, shape.n_ff) }];
                // SAFETY: the tables have a row for each expert.
                unsafe { follow(&shape.after_down, &mut product, group.expert as usize, row) };
                let target = base.wrapping_byte_add(stride * pair.output as usize).wrapping_add(row);
                // SAFETY: the output row of this pair; this place is this task's.
                unsafe { target.write(product[0]) };
            }
        }
    }

    fn pairs_of(&self, group: usize) -> (usize, &[Pair]) {
        let first = self.firsts[group];
        (first, &self.pairs[first..first + self.groups[group].pairs as usize])
    }
}

/// Rows that are activated together: a multiple of what the form packs.
fn slab(form: Form) -> usize {
    SLAB.next_multiple_of(form.block())
}

/// Scale and bias of an expert, over values that begin at `start` of a row.
///
/// # Safety
/// The tables hold a row for the expert, of one value and of as many values as the row has.
unsafe fn follow(after: &After, values: &mut [f32], expert: usize, start: usize) {
    if let Some(scales) = &after.scale {
        // SAFETY: the caller's contract.
        let scale = unsafe { scales.data.wrapping_byte_add(scales.stride * expert).read() };
        values.iter_mut().for_each(|value| *value *= scale);
    }
    if let Some(biases) = &after.bias {
        let row = biases.data.wrapping_byte_add(biases.stride * expert).wrapping_add(start);
        for (place, value) in values.iter_mut().enumerate() {
            // SAFETY: as above.
            *value += unsafe { row.wrapping_add(place).read() };
        }
    }
}

/// Reads a byte of each line of the task's rows, of `count` values each, so that they are on their way while the thread waits for others.
///
/// # Safety
/// `base` is the first row of a matrix that has the task's rows.
unsafe fn touch(base: *const u8, matrix: &Matrix, count: usize, task: &Task) {
    let (first, last) = (task.range().start, task.range().end - 1);
    for place in (first * matrix.stride..last * matrix.stride + matrix.kernel.bytes(count)).step_by(LINE) {
        // SAFETY: between the first byte of the first row and the last byte of the last one.
        unsafe { base.wrapping_add(place).read_volatile() };
    }
}

/// How far before their use weights are asked for.
const FETCH_AHEAD: usize = 4096;

/// Asks for the lines that follow a row at some distance: a kernel's own reads of one short row after the other do not keep the memory busy.
fn fetch(row: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for place in (0..bytes).step_by(LINE) {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch has no effect but on caches, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(FETCH_AHEAD + place).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (row, bytes);
}
