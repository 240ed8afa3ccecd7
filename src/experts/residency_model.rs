//! Residency against a copy stream and a device stream that do as they like: every order of a few steps, searched in breadth.
//!
//! The table is used by one thread at a time and shares no atomics, so loom has nothing to reorder. What runs at the same time are uploads
//! and graphs, which the table only hears of; here they are steps of their own, taken in every order. Where a slot is in use, its memory says
//! what lies in it. A graph may look at everything that it was promised at any moment until it is done.

use std::collections::{BTreeMap, HashSet, VecDeque};

use super::residency::{Reader, Residency, Slot, State};
use super::shape::{Block, Group, GroupId, Shape};

/// What lies in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// Nothing that was ever whole.
    Poison,
    /// In the middle of an upload.
    Torn,
    Whole(Block),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Queued,
    Writes,
    /// The mark is reached; the host has not looked yet.
    Written,
}

/// A graph: what it was promised, and whether it is done on the device.
#[derive(Debug)]
struct Graph {
    reader: Option<Reader>,
    promised: BTreeMap<Block, Slot>,
    done: bool,
}

struct World {
    table: Residency,
    memory: Vec<Content>,
    /// In the order of the copy stream; the first are further.
    uploads: VecDeque<(Block, Slot, Progress)>,
    graphs: Vec<Graph>,
}

/// One step of the host, the device or the copy stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Load(usize),
    Leave(usize),
    Start,
    /// The oldest graph ends on the device.
    End,
    /// The host learns that a graph is done.
    Finish(usize),
    /// The copy stream goes on with its first upload.
    Copy,
    /// The host looks at the first mark.
    Look,
    /// The number of open slots changes.
    Open(u32),
}

const BLOCKS: u32 = 3;
const MOST_GRAPHS: usize = 3;

fn shape() -> (Shape, Vec<Block>) {
    let shape = Shape::new(vec![Group { experts: BLOCKS, used: 1, pool: 0 }]).unwrap();
    let blocks = shape.blocks_of(GroupId(0)).collect();
    (shape, blocks)
}

impl World {
    fn new(slots: u32) -> Self {
        let mut table = Residency::new(&shape().0);
        table.set_slots(0, slots);
        let memory = vec![Content::Poison; slots as usize];
        Self { table, memory, uploads: VecDeque::new(), graphs: Vec::new() }
    }

    /// Takes a step; false if it cannot be taken now.
    fn take(&mut self, step: Step, blocks: &[Block]) -> bool {
        match step {
            Step::Load(block) => {
                let Ok(slot) = self.table.load(blocks[block]) else { return false };
                self.uploads.push_back((blocks[block], slot, Progress::Queued));
            }
            Step::Leave(block) => {
                let before = self.table.state(blocks[block]);
                self.table.leave(blocks[block]);
                return matches!(before, State::Loading(_) | State::Resident(_));
            }
            Step::Start if self.graphs.len() < MOST_GRAPHS => {
                let reader = self.table.start();
                let find = |&block: &Block| self.table.find(&reader, block).map(|slot| (block, slot));
                let promised = blocks.iter().filter_map(find).collect();
                self.graphs.push(Graph { reader: Some(reader), promised, done: false });
            }
            Step::End => {
                let Some(graph) = self.graphs.iter_mut().find(|graph| !graph.done) else { return false };
                graph.done = true;
            }
            Step::Finish(graph) => {
                let Some(graph) = self.graphs.get_mut(graph).filter(|graph| graph.done) else { return false };
                let Some(reader) = graph.reader.take() else { return false };
                self.table.finish(reader);
            }
            Step::Copy => {
                let next = self.uploads.iter_mut().find(|(_, _, progress)| *progress != Progress::Written);
                let Some((block, slot, progress)) = next else { return false };
                let (content, then) = match progress {
                    Progress::Queued => (Content::Torn, Progress::Writes),
                    Progress::Writes | Progress::Written => (Content::Whole(*block), Progress::Written),
                };
                self.memory[slot.0 as usize] = content;
                *progress = then;
            }
            Step::Look => match self.uploads.front() {
                Some(&(block, _, Progress::Written)) => {
                    self.uploads.pop_front();
                    self.table.loaded(block);
                }
                _ => return false,
            },
            Step::Open(slots) => self.table.set_slots(0, slots),
            Step::Start => return false,
        }
        true
    }

    /// What must hold after every step.
    fn check(&self, path: &[Step]) {
        for graph in self.graphs.iter().filter(|graph| !graph.done) {
            for (block, slot) in &graph.promised {
                let content = self.memory[slot.0 as usize];
                assert_eq!(content, Content::Whole(*block), "{slot:?} is read by a graph after {path:?}");
            }
            let reader = graph.reader.as_ref().expect("a graph that runs was not given back");
            let (_, blocks) = shape();
            let view = blocks.iter().filter_map(|&block| self.table.find(reader, block).map(|slot| (block, slot)));
            assert_eq!(view.collect::<BTreeMap<_, _>>(), graph.promised, "a view changed after {path:?}");
        }
        let mut written = HashSet::new();
        for (_, slot, progress) in &self.uploads {
            assert!(written.insert(*slot) || *progress == Progress::Written, "two uploads to {slot:?} after {path:?}");
        }
    }

    /// Equal for worlds that go on alike.
    fn key(&self) -> String {
        format!("{:?} {:?} {:?} {:?}", self.table, self.memory, self.uploads, self.graphs)
    }
}

fn replayed(slots: u32, path: &[Step], blocks: &[Block]) -> Option<World> {
    let mut world = World::new(slots);
    path.iter().all(|&step| world.take(step, blocks)).then_some(world)
}

/// Searches all worlds that so many steps lead to. Returns how many there are.
fn search(slots: u32, steps: &[Step], most: usize) -> usize {
    let (_, blocks) = shape();
    let mut seen = HashSet::new();
    let mut level: Vec<Vec<Step>> = vec![Vec::new()];
    for _ in 0..most {
        let mut next = Vec::new();
        for path in level {
            for &step in steps {
                let longer = [&path[..], &[step]].concat();
                let Some(world) = replayed(slots, &longer, &blocks) else { continue };
                world.check(&longer);
                if seen.insert(world.key()) {
                    next.push(longer);
                }
            }
        }
        level = next;
    }
    seen.len()
}

#[test]
fn no_graph_reads_what_is_being_written() {
    let blocks = (0..BLOCKS as usize).flat_map(|block| [Step::Load(block), Step::Leave(block)]);
    let graphs = (0..MOST_GRAPHS).map(Step::Finish);
    let steps: Vec<Step> = blocks.chain(graphs).chain([Step::Start, Step::End, Step::Copy, Step::Look]).collect();
    for (slots, most, least) in [(1, 22, 4000), (2, 11, 5000)] {
        let worlds = search(slots, &steps, most);
        println!("{slots} slots, {most} steps: {worlds} worlds");
        assert!(worlds > least, "only {worlds} worlds");
    }
}

/// The same while slots are closed and opened, with fewer steps.
#[test]
fn closed_slots_change_nothing_for_graphs_that_run() {
    let steps = [
        Step::Load(0),
        Step::Load(1),
        Step::Leave(0),
        Step::Leave(1),
        Step::Start,
        Step::End,
        Step::Finish(0),
        Step::Finish(1),
        Step::Copy,
        Step::Look,
        Step::Open(0),
        Step::Open(1),
        Step::Open(2),
    ];
    let worlds = search(2, &steps, 9);
    println!("{worlds} worlds");
    assert!(worlds > 1000, "only {worlds} worlds");
}
