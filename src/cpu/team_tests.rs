//! Jobs on plain kernels: any shape, any number of threads, several callers, failures.

use super::*;
use crate::abi::cpu_kernels::tests::{plain, plain_values};
use crate::cpu::activation::Activation;
use crate::cpu::shape::{After, Group, Matrix, Pair, Shape, Table};
use proptest::prelude::*;

const EXPERTS: usize = 5;

/// A job with all that it points to.
#[derive(Clone, Debug)]
struct Given {
    n_embd: usize,
    n_ff: usize,
    gated: bool,
    biased: bool,
    /// Of each named expert, its pairs of input and output row.
    groups: Vec<(usize, Vec<(u32, u32)>)>,
    weights: Vec<f32>,
    x: Vec<f32>,
}

/// Whole numbers, so that sums are the same in any order.
fn number(index: usize) -> f32 {
    f32::from(i16::try_from(index * 7919 % 7).unwrap() - 3)
}

fn given() -> impl Strategy<Value = Given> {
    let numbers = (1_usize..60, 1_usize..400, any::<bool>(), any::<bool>(), 1_usize..6);
    let pairs = prop::collection::vec((0..EXPERTS, 0_u32..6), 0..20);
    (numbers, pairs).prop_map(|((n_embd, n_ff, gated, biased, inputs), pairs)| {
        let mut groups: Vec<(usize, Vec<(u32, u32)>)> = Vec::new();
        for (output, (expert, input)) in pairs.into_iter().enumerate() {
            let pair = (input % u32::try_from(inputs).unwrap(), u32::try_from(output).unwrap());
            match groups.iter_mut().find(|group| group.0 == expert) {
                Some(group) => group.1.push(pair),
                None => groups.push((expert, vec![pair])),
            }
        }
        make(n_embd, n_ff, (gated, biased), groups, inputs)
    })
}

fn make(
    n_embd: usize,
    n_ff: usize,
    (gated, biased): (bool, bool),
    groups: Vec<(usize, Vec<(u32, u32)>)>,
    inputs: usize,
) -> Given {
    let weights = (0..EXPERTS * n_embd * n_ff + n_ff.max(n_embd)).map(number).collect();
    let x = (0..inputs * n_embd).map(|index| number(index + 3)).collect();
    Given { n_embd, n_ff, gated, biased, groups, weights, x }
}

impl Given {
    fn outputs(&self) -> usize {
        self.groups.iter().map(|group| group.1.len()).sum()
    }

    /// What must come out, by plain loops. Gate, up and down of an expert are the same numbers read in rows of another length.
    fn expected(&self) -> Vec<f32> {
        let (n_embd, n_ff) = (self.n_embd, self.n_ff);
        let mut out = vec![0.0; self.outputs() * n_embd];
        let bias = |expert: usize, row: usize| if self.biased { self.weights[expert + row] } else { 0.0 };
        for (expert, pairs) in &self.groups {
            let weights = &self.weights[expert * n_embd * n_ff..];
            let dot = |row: usize, x: &[f32]| weights[row * x.len()..].iter().zip(x).map(|(w, x)| w * x).sum::<f32>();
            for &(input, output) in pairs {
                let x = &self.x[input as usize * n_embd..][..n_embd];
                let hidden: Vec<f32> = (0..n_ff)
                    .map(|row| dot(row, x) + bias(*expert, row))
                    .map(|up| if self.gated && up > 0.0 { up * up } else { up.max(0.0) })
                    .collect();
                for row in 0..n_embd {
                    out[output as usize * n_embd + row] = dot(row, &hidden) + bias(*expert, row);
                }
            }
        }
        out
    }

    fn shape(&self) -> Shape {
        let matrix = |count: usize| Matrix { kernel: plain(1), stride: count * 4 };
        let bias = self.biased.then_some(Table { data: self.weights.as_ptr(), stride: 4 });
        let after = After { scale: None, bias };
        Shape {
            n_embd: self.n_embd,
            n_ff: self.n_ff,
            gate: self.gated.then(|| matrix(self.n_embd)),
            up: matrix(self.n_embd),
            down: matrix(self.n_ff),
            activation: if self.gated { Activation::Reglu } else { Activation::Relu },
            values: plain_values(),
            after_gate: after,
            after_up: after,
            after_down: after,
        }
    }

    /// Starts it, lets `meanwhile` run, and waits.
    fn by(&self, team: &Team, fault: Option<usize>, meanwhile: impl FnOnce(&Ticket<'_>)) -> Result<Vec<f32>, JobError> {
        let of = |expert: usize| self.weights[expert * self.n_embd * self.n_ff..].as_ptr().cast::<u8>();
        let group = |group: &(usize, Vec<(u32, u32)>)| Group {
            expert: u32::try_from(group.0).unwrap(),
            gate: of(group.0),
            up: of(group.0),
            down: of(group.0),
            pairs: u32::try_from(group.1.len()).unwrap(),
        };
        let groups: Vec<Group> = self.groups.iter().map(group).collect();
        let named = self.groups.iter().flat_map(|group| &group.1);
        let pairs: Vec<Pair> = named.map(|&(input, output)| Pair { input, output }).collect();
        let mut out = vec![f32::NAN; self.outputs() * self.n_embd];
        let stride = self.n_embd * 4;
        let shape = self.shape();
        let (inputs, outputs) = ((self.x.as_ptr(), stride), (out.as_mut_ptr(), stride));
        let job = Job { shape: &shape, groups: &groups, pairs: &pairs, inputs, outputs };
        // SAFETY: everything lives until the ticket has been waited for.
        let ticket = unsafe { team.start_with(&job, |work| work.fault = fault) }?;
        meanwhile(&ticket);
        ticket.wait()?;
        Ok(out)
    }
}

fn team(threads: usize) -> Team {
    Team::new(Options { threads, pin: false, spin_us: 5 }).unwrap()
}

/// A job with many tasks.
fn large() -> Given {
    make(64, 640, (true, false), vec![(1, vec![(0, 0), (1, 1)]), (3, vec![(1, 2)]), (0, vec![(0, 3)])], 2)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]
    #[test]
    fn every_job_is_computed(jobs in prop::collection::vec(given(), 1..6), threads in 0_usize..9) {
        let team = team(threads);
        for job in &jobs {
            prop_assert_eq!(job.by(&team, None, |_| ()).unwrap(), job.expected());
        }
    }
}

/// Jobs of several callers at once, over and over, each with its own results.
#[test]
fn callers_share_the_team() {
    let team = team(3);
    let (first, second) = (large(), make(7, 300, (false, true), vec![(2, vec![(0, 0)])], 1));
    let (first_expected, second_expected) = (first.expected(), second.expected());
    std::thread::scope(|scope| {
        for (job, expected) in [(&first, &first_expected), (&second, &second_expected)] {
            for _ in 0..2 {
                let team = &team;
                scope.spawn(move || {
                    for _ in 0..150 {
                        assert_eq!(job.by(team, None, |_| ()).as_ref(), Ok(expected));
                    }
                });
            }
        }
    });
}

/// Threads that sleep between jobs wake up for the next one; a job ends without its caller's help.
#[test]
fn sleepers_wake() {
    let team = Team::new(Options { threads: 2, pin: true, spin_us: 0 }).unwrap();
    assert_eq!(team.threads(), 2);
    let (job, expected) = (large(), large().expected());
    for round in 0..30 {
        let done = job.by(&team, None, |ticket| {
            while round % 2 == 0 && !ticket.is_done() {
                std::thread::yield_now();
            }
        });
        assert_eq!(done.as_ref(), Ok(&expected));
    }
}

#[test]
fn a_panic_fails_the_job_and_nothing_else() {
    let team = team(2);
    let (job, expected) = (large(), large().expected());
    for task in [0, 1, 2, 3, 10] {
        assert_eq!(job.by(&team, Some(task), |_| ()), Err(JobError::Failed), "task {task}");
        assert_eq!(job.by(&team, None, |_| ()).as_ref(), Ok(&expected));
    }
}

/// A ticket that is dropped waits; places are given back, also by jobs that were refused; more jobs than places are refused.
#[test]
fn places_are_given_back() {
    let team = team(1);
    let (job, expected) = (large(), large().expected());
    fn nested(team: &Team, job: &Given, depth: usize) {
        let ended = job.by(team, None, |_| {
            if depth < PLACES {
                nested(team, job, depth + 1)
            }
        });
        assert_eq!(ended.is_err(), depth == PLACES);
        assert!(depth < PLACES || ended == Err(JobError::Busy));
    }
    for _ in 0..3 {
        nested(&team, &job, 0);
    }
    let mut wrong = job.clone();
    wrong.groups[0].1.clear();
    for _ in 0..2 * PLACES {
        assert!(matches!(wrong.by(&team, None, |_| ()), Err(JobError::Unsupported(_))));
    }
    assert_eq!(job.by(&team, None, |_| ()).as_ref(), Ok(&expected));
    let nothing = make(8, 8, (true, true), Vec::new(), 1);
    assert_eq!(nothing.by(&team, None, |ticket| assert!(ticket.is_done())), Ok(Vec::new()));
}

/// Fewer and more threads from job to job: results stay, and nobody is lost when the team ends.
#[test]
fn any_number_of_threads_may_work() {
    let team = team(2);
    let (job, expected) = (large(), large().expected());
    for (count, threads) in [(1, 1), (5, 5), (2, 2), (0, 1), (3, 3), (5, 5)] {
        team.use_threads(count);
        assert_eq!(team.threads(), threads);
        assert_eq!(job.by(&team, None, |_| ()).as_ref(), Ok(&expected), "{count} threads");
    }
    assert_eq!(team.threads.lock().len(), 5, "made once");
    team.use_threads(1);
}

/// One team for all, as long as somebody holds it; then its threads are gone.
#[test]
fn the_process_has_one_team() {
    let options = Options { threads: 2, pin: false, spin_us: 5 };
    let first = shared(options).unwrap();
    let second = shared(Options { threads: 5, ..options }).unwrap();
    assert!(Arc::ptr_eq(&first, &second));
    drop(first);
    assert_eq!(large().by(&second, None, |_| ()), Ok(large().expected()));
    let threads = Arc::downgrade(&second.shared);
    drop(second);
    assert!(threads.upgrade().is_none(), "the threads were joined");
    assert_eq!(shared(Options { threads: 1, ..options }).unwrap().threads(), 1);
}
