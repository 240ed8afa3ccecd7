//! How a job is cut into tasks: pure, and tried for all shapes.
//!
//! Owns: the order of the tasks and their sizes.
//! Invariants: every value of the used inputs and every row of both halves is in exactly one task; a task waits only for what stands
//! before it in the list, so that threads which take tasks in order can never wait for each other in a circle.
//! Threads: any; a function.
//! Does not: know addresses, kernels or threads.

use core::ops::Range;

/// What a task does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Values of an input row are brought into the form that the kernels take. The group is the number of the input.
    Input,
    /// Rows of gate and up of a group. They stay within a slab; whoever completes a slab computes its activation.
    Half,
    /// Rows of down of a group.
    Down,
}

/// A piece of a job that one thread does at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Task {
    pub(crate) kind: Kind,
    pub(crate) group: u32,
    /// Of its rows, for half a block.
    pub(crate) slab: u32,
    pub(crate) first: u32,
    pub(crate) end: u32,
}

impl Task {
    fn new(kind: Kind, group: usize, slab: usize, range: &Range<usize>) -> Self {
        // A shape's rows and a job's lists are far below 2^32.
        let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        Self { kind, group: number(group), slab: number(slab), first: number(range.start), end: number(range.end) }
    }

    /// Its rows or values.
    pub(crate) fn range(&self) -> Range<usize> {
        self.first as usize..self.end as usize
    }
}

/// What is cut.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) threads: usize,
    /// Input rows that are used.
    pub(crate) inputs: usize,
    pub(crate) groups: usize,
    pub(crate) n_embd: usize,
    pub(crate) n_ff: usize,
    /// Values that the inputs' form packs together.
    pub(crate) input_block: usize,
    /// Rows of gate and up whose results are activated together, a multiple of what the hidden rows' form packs.
    pub(crate) slab: usize,
    /// Bytes of a row of gate and one of up.
    pub(crate) half_row_bytes: usize,
    /// Bytes of a row of down.
    pub(crate) down_row_bytes: usize,
}

/// A task is no smaller, so that taking one is cheap beside doing it.
const LEAST_BYTES: usize = 4 << 10;
/// A task is no larger, so that what a thread touches ahead stays in its nearest caches.
const MOST_BYTES: usize = 48 << 10;
/// Values of an input in one task, at least.
const LEAST_VALUES: usize = 512;

/// Values up to the next multiple of `unit`.
fn up_to(value: usize, unit: usize) -> usize {
    value.div_ceil(unit) * unit
}

/// Writes the tasks of a job into `tasks`, in the order in which they are taken.
pub(crate) fn cut(sizes: &Sizes, tasks: &mut Vec<Task>) {
    tasks.clear();
    let spread = sizes.inputs * sizes.n_embd / sizes.threads.max(1);
    let part = up_to(spread.max(LEAST_VALUES), sizes.input_block);
    for input in 0..sizes.inputs {
        for start in (0..sizes.n_embd).step_by(part) {
            tasks.push(Task::new(Kind::Input, input, 0, &(start..sizes.n_embd.min(start + part))));
        }
    }
    rows(sizes, Kind::Half, sizes.n_ff, sizes.half_row_bytes, sizes.slab, tasks);
    rows(sizes, Kind::Down, sizes.n_embd, sizes.down_row_bytes, sizes.n_embd, tasks);
}

/// Cuts one half of all groups: large pieces first, ever smaller ones towards the end, none across the border of a slab. A piece is half of
/// a thread's fair share of what is left, within bounds. All threads wait while this runs, so it divides only for the last pieces.
fn rows(sizes: &Sizes, kind: Kind, count: usize, row_bytes: usize, slab_rows: usize, tasks: &mut Vec<Task>) {
    let row_bytes = row_bytes.max(1);
    let (least, most) = ((LEAST_BYTES / row_bytes).max(1), (MOST_BYTES / row_bytes).max(1));
    let shares = 2 * sizes.threads.max(1);
    let mut left = sizes.groups * count;
    for group in 0..sizes.groups {
        let (mut start, mut slab, mut border) = (0, 0, slab_rows.min(count));
        while start < count {
            let piece = if left >= most * shares { most } else { (left / shares).clamp(least, most) };
            let end = (start + piece).min(border);
            tasks.push(Task::new(kind, group, slab, &(start..end)));
            left -= end - start;
            start = end;
            if start == border {
                (slab, border) = (slab + 1, (border + slab_rows).min(count));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sizes() -> impl Strategy<Value = Sizes> {
        let counts = (1_usize..20, 0_usize..9, 0_usize..12);
        let rows = (1_usize..9, 1_usize..70, prop::sample::select(vec![1_usize, 32, 256]), 1_usize..3);
        (counts, rows, 1_usize..20_000, 1_usize..20_000).prop_map(
            |((threads, inputs, groups), (embd, ff, block, slabs), half_row_bytes, down_row_bytes)| Sizes {
                threads,
                inputs,
                groups,
                n_embd: embd * block,
                n_ff: ff * block.min(64),
                input_block: block,
                slab: slabs * block.max(16),
                half_row_bytes,
                down_row_bytes,
            },
        )
    }

    proptest! {
        #[test]
        fn each_row_is_in_exactly_one_task(sizes in sizes()) {
            let mut tasks = Vec::new();
            cut(&sizes, &mut tasks);
            let mut next = [(0, 0); 3];
            for task in &tasks {
                let kind = task.kind as usize;
                let count = if task.kind == Kind::Half { sizes.n_ff } else { sizes.n_embd };
                // In order, so that a group's end is where the next one begins.
                prop_assert_eq!(next[kind], (task.group as usize, task.range().start));
                prop_assert!(task.range().start < task.range().end && task.range().end <= count);
                next[kind] = if task.range().end == count { (next[kind].0 + 1, 0) } else { (next[kind].0, task.range().end) };
                if task.kind == Kind::Half {
                    prop_assert_eq!(task.range().start / sizes.slab, task.slab as usize);
                    prop_assert_eq!((task.range().end - 1) / sizes.slab, task.slab as usize);
                }
                if task.kind == Kind::Input {
                    prop_assert!(task.range().start.is_multiple_of(sizes.input_block));
                }
            }
            prop_assert_eq!(next, [(sizes.inputs, 0), (sizes.groups, 0), (sizes.groups, 0)]);
            // What a task waits for stands before it.
            prop_assert!(tasks.is_sorted_by_key(|task| task.kind as usize));
        }
    }

    #[test]
    fn the_last_tasks_are_small() {
        let sizes = Sizes {
            threads: 16,
            inputs: 1,
            groups: 4,
            n_embd: 2048,
            n_ff: 768,
            input_block: 256,
            slab: 256,
            half_row_bytes: 2304,
            down_row_bytes: 432,
        };
        let mut tasks = Vec::new();
        cut(&sizes, &mut tasks);
        let bytes = |task: &Task| {
            task.range().len() * if task.kind == Kind::Half { sizes.half_row_bytes } else { sizes.down_row_bytes }
        };
        let down: Vec<usize> = tasks.iter().filter(|task| task.kind == Kind::Down).map(bytes).collect();
        assert!(down[0] > 40 << 10 && *down.last().unwrap() <= LEAST_BYTES, "{down:?}");
        assert!(tasks.len() < 500, "{}", tasks.len());
        assert_eq!(tasks.iter().filter(|task| task.kind == Kind::Input).count(), 4);
    }
}
