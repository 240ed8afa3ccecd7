//! The cut of a graph into steps, and the cache of plans.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::{ExpertWeight, Kind, Node, block};

/// One step of a plan. Steps run in order; each covers a run of nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nodes that the inner backend runs unchanged.
    Segment(Range<usize>),
    /// Nodes among which are products whose experts are copied to the device first: a MoE block, foreign nodes inside its range
    /// included, or a single product that belongs to none.
    Copied {
        /// All its nodes.
        range: Range<usize>,
        /// The products whose experts are copied.
        products: Vec<usize>,
    },
    /// A MoE block of so many tokens that all its experts are brought to the device, behind the work on the blocks before.
    Streamed {
        /// All its nodes.
        range: Range<usize>,
        /// Its products.
        products: Vec<usize>,
        /// Those whose experts must be copied when there is no memory to bring them all.
        copied: Vec<usize>,
    },
    /// A MoE block whose experts may be computed where they are: on the device those of the cache, in RAM the others.
    Cached {
        /// All its nodes.
        range: Range<usize>,
        /// Its products.
        products: Vec<usize>,
        /// Those whose experts must be copied when the cache cannot be used.
        copied: Vec<usize>,
    },
}

impl Step {
    /// The nodes of this step.
    pub fn range(&self) -> Range<usize> {
        match self {
            Self::Segment(range)
            | Self::Copied { range, .. }
            | Self::Streamed { range, .. }
            | Self::Cached { range, .. } => range.clone(),
        }
    }
}

/// How a graph runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The steps, in node order, covering every node once.
    pub steps: Vec<Step>,
    /// How many blocks were recognised.
    pub blocks: usize,
    /// The expert products outside every block.
    pub unrecognised: Vec<usize>,
}

/// How a block is to be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Treatment {
    /// Its experts are copied where the device does not read them in place.
    Plain,
    /// See [`Step::Streamed`].
    Streamed,
    /// See [`Step::Cached`].
    Cached,
}

/// Cuts a graph into steps. `treat` says of a block's products, in node order, how the block is to be run.
pub fn plan(nodes: &[Node], treat: &mut dyn FnMut(&[usize]) -> Treatment) -> Plan {
    let blocks = block::find(nodes);
    let mut in_block = vec![false; nodes.len()];
    let mut plan = Plan { blocks: blocks.len(), ..Plan::default() };
    let mut copied: Vec<Step> = Vec::new();
    for block in blocks {
        block.products.iter().for_each(|&product| in_block[product] = true);
        let needs: Vec<usize> = block.products.iter().copied().filter(|&product| is_copied(&nodes[product])).collect();
        let (range, products) = (block.range, block.products);
        match treat(&products) {
            Treatment::Cached => copied.push(Step::Cached { range, products, copied: needs }),
            Treatment::Streamed => copied.push(Step::Streamed { range, products, copied: needs }),
            Treatment::Plain if needs.is_empty() => {}
            Treatment::Plain => copied.push(Step::Copied { range, products: needs }),
        }
    }
    for (index, node) in nodes.iter().enumerate().filter(|(index, _)| !in_block[*index]) {
        if matches!(node.kind, Kind::ExpertProduct { .. }) {
            plan.unrecognised.push(index);
        }
        if is_copied(node) {
            copied.push(Step::Copied { range: index..index + 1, products: vec![index] });
        }
    }
    copied.sort_by_key(|step| step.range().start);
    let mut done = 0;
    for step in copied {
        let Range { start, end } = step.range();
        if done < start {
            plan.steps.push(Step::Segment(done..start));
        }
        plan.steps.push(step);
        done = end;
    }
    if done < nodes.len() {
        plan.steps.push(Step::Segment(done..nodes.len()));
    }
    plan
}

fn is_copied(node: &Node) -> bool {
    matches!(node.kind, Kind::ExpertProduct { weight: ExpertWeight::Copied, .. })
}

/// What makes a cached plan valid: the host's graph id (never 0), its first node and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanKey {
    /// The host's graph id; two graphs with the same non-zero id are the same graph.
    pub uid: u64,
    /// Address of the first node.
    pub first: usize,
    /// Number of nodes.
    pub count: usize,
}

/// The plans of the graphs seen last. Graphs without an id are planned afresh each time.
#[derive(Debug)]
pub struct PlanCache<T> {
    plans: VecDeque<(PlanKey, Arc<T>)>,
}

impl<T> Default for PlanCache<T> {
    fn default() -> Self {
        Self { plans: VecDeque::new() }
    }
}

impl<T> PlanCache<T> {
    /// The most plans that are kept.
    pub const CAPACITY: usize = 64;

    /// The plan of this graph, made by `make` when it is not known.
    pub fn get(&mut self, key: PlanKey, make: impl FnOnce() -> T) -> Arc<T> {
        if key.uid == 0 {
            return Arc::new(make());
        }
        if let Some(position) = self.plans.iter().position(|(known, _)| *known == key)
            && let Some(entry) = self.plans.remove(position)
        {
            let plan = Arc::clone(&entry.1);
            self.plans.push_front(entry);
            return plan;
        }
        let plan = Arc::new(make());
        self.plans.truncate(Self::CAPACITY - 1);
        self.plans.push_front((key, Arc::clone(&plan)));
        plan
    }

    /// Forgets every plan: the memory behind the graphs was laid out anew.
    pub fn clear(&mut self) {
        self.plans.clear();
    }

    /// How many plans are kept.
    pub fn len(&self) -> usize {
        self.plans.len()
    }

    /// Whether none is kept.
    pub fn is_empty(&self) -> bool {
        self.plans.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{IdsKey, TensorKey};
    use proptest::prelude::*;

    fn arbitrary_graph() -> impl Strategy<Value = Vec<Node>> {
        let reads = proptest::collection::vec(0_usize..1000, 0..4);
        // The owners of the ids are 0 and 1; most writes go elsewhere.
        proptest::collection::vec((0_u8..8, reads, proptest::option::weighted(0.1, 0_usize..3)), 0..60).prop_map(
            |raw| {
                raw.into_iter()
                    .enumerate()
                    .map(|(index, (kind, reads, writes))| Node {
                        writes: writes.map(TensorKey),
                        kind: match kind {
                            0..=3 => Kind::ExpertProduct {
                                weight: if kind % 2 == 0 { ExpertWeight::Copied } else { ExpertWeight::InPlace },
                                ids: IdsKey {
                                    owner: TensorKey(usize::from(kind / 2)),
                                    offset: 0,
                                    used: 2,
                                    tokens: 1,
                                    id_stride: 4,
                                    token_stride: 16,
                                },
                            },
                            4..=6 => Kind::PairWise,
                            _ => Kind::Foreign,
                        },
                        reads: reads.into_iter().filter(|_| index > 0).map(|read| read % index.max(1)).collect(),
                    })
                    .collect()
            },
        )
    }

    proptest! {
        #[test]
        fn steps_cover_every_node_once_in_order(nodes in arbitrary_graph()) {
            let plan = plan(&nodes, &mut |_| Treatment::Plain);
            let covered: Vec<usize> = plan.steps.iter().flat_map(Step::range).collect();
            prop_assert_eq!(covered, (0..nodes.len()).collect::<Vec<_>>());
            prop_assert!(plan.steps.iter().all(|step| !step.range().is_empty()));
        }

        #[test]
        fn every_product_that_must_be_copied_is_copied_once(nodes in arbitrary_graph()) {
            let mut handled = 0;
            for step in &plan(&nodes, &mut |_| Treatment::Plain).steps {
                match step {
                    Step::Segment(range) => prop_assert!(!nodes[range.clone()].iter().any(is_copied)),
                    Step::Cached { .. } | Step::Streamed { .. } => prop_assert!(false, "all are plain here"),
                    Step::Copied { range, products } => {
                        let inside: Vec<usize> = range.clone().filter(|&index| is_copied(&nodes[index])).collect();
                        prop_assert_eq!(&inside, products);
                        handled += products.len();
                    }
                }
            }
            prop_assert_eq!(handled, nodes.iter().filter(|node| is_copied(node)).count());
        }

        #[test]
        fn nobody_inside_a_block_reads_its_results_but_its_own_nodes(nodes in arbitrary_graph()) {
            for step in plan(&nodes, &mut |_| Treatment::Plain).steps {
                if let Step::Copied { range, products } = step {
                    for index in range.clone().filter(|&index| nodes[index].kind == Kind::Foreign) {
                        prop_assert!(!nodes[index].reads.iter().any(|read| products.contains(read)));
                    }
                }
            }
        }

        #[test]
        fn the_ids_of_a_block_stay_as_they_were_read(nodes in arbitrary_graph()) {
            for step in plan(&nodes, &mut |_| Treatment::Plain).steps {
                if let Step::Copied { range, products } = step {
                    let owners: Vec<_> = products.iter().filter_map(|&index| match nodes[index].kind {
                        Kind::ExpertProduct { ids, .. } => Some(ids.owner),
                        _ => None,
                    }).collect();
                    prop_assert!(owners.windows(2).all(|pair| pair[0] == pair[1]), "a block has one id operand");
                    let last = products.last().copied().unwrap_or(range.start);
                    let written = nodes[range.start..last].iter().filter_map(|node| node.writes);
                    prop_assert!(written.into_iter().all(|written| !owners.contains(&written)));
                }
            }
        }

        #[test]
        fn blocks_and_products_outside_are_all_products(nodes in arbitrary_graph()) {
            let plan = plan(&nodes, &mut |_| Treatment::Plain);
            let is_product = |index: usize| matches!(nodes[index].kind, Kind::ExpertProduct { .. });
            prop_assert!(plan.unrecognised.iter().all(|&index| is_product(index)));
            prop_assert!(plan.unrecognised.windows(2).all(|pair| pair[0] < pair[1]));
            let all = (0..nodes.len()).filter(|&index| is_product(index)).count();
            // A block has at least two products, and each product is in one block or outside.
            prop_assert!(plan.unrecognised.len() + 2 * plan.blocks <= all);
            prop_assert!(plan.blocks > 0 || plan.unrecognised.len() == all);
        }

        #[test]
        fn a_graph_whose_experts_are_read_in_place_is_not_cut(nodes in arbitrary_graph()) {
            let in_place: Vec<Node> = nodes.into_iter().map(|mut node| {
                if let Kind::ExpertProduct { weight, .. } = &mut node.kind {
                    *weight = ExpertWeight::InPlace;
                }
                node
            }).collect();
            prop_assert!(plan(&in_place, &mut |_| Treatment::Plain).steps.len() <= 1);
        }
    }

    #[test]
    fn cache_keeps_the_latest_and_never_graphs_without_id() {
        let mut cache = PlanCache::<Plan>::default();
        let key = |uid| PlanKey { uid, first: 1, count: 2 };
        for uid in 0..200 {
            cache.get(key(uid), Plan::default);
        }
        assert_eq!(cache.len(), PlanCache::<Plan>::CAPACITY);
        cache.get(key(199), || unreachable!("the newest plan is kept"));
        let mut made = 0;
        for _ in 0..2 {
            cache.get(key(0), || {
                made += 1;
                Plan::default()
            });
            cache.get(key(1), || {
                made += 10;
                Plan::default()
            });
        }
        assert_eq!(made, 12, "uid 0 is planned each time, an evicted plan once");
        cache.clear();
        assert!(cache.is_empty());
    }
}
