//! The team against graphs on the stock CPU backend, bit for bit. Run with `--ignored` and `GGML_MOE_STOCK`, the folder of the stock
//! libraries.
#![expect(unsafe_code, reason = "starts jobs on memory of the test")]

use super::activation::Activation;
use super::shape::{After, Group, Job, JobError, Matrix, Pair, Shape, Table};
use super::team::{Options, Team};
use crate::abi::cpu_kernels::{CpuKernels, cpu_kernels};
use crate::abi::cpu_reference::{Block, F32, IQ4_XS, MXFP4, Q4_K, Q6_K, Q8_0, TQ2_0, TYPES};
use crate::abi::cpu_reference::{quantize, row_bytes, type_name};

fn kernels() -> &'static CpuKernels {
    let folder = std::env::var("GGML_MOE_STOCK").expect("GGML_MOE_STOCK is the folder of the stock libraries");
    crate::abi::load_for_tests(&folder);
    cpu_kernels().unwrap()
}

/// Numbers that repeat with the seed, around zero, a few of them large.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next()).unwrap() % limit
    }

    /// Drawn numbers, over and over: drawing each of millions takes unoptimised code seconds.
    fn floats(&mut self, count: usize, scale: f32) -> Vec<f32> {
        let mut one = || (f32::from(u16::try_from(self.next() & 0xffff).unwrap()) / 32768.0 - 1.0) * scale;
        let drawn: Vec<f32> = (0..4099).map(|index| if index % 97 == 5 { one() * 8.0 } else { one() }).collect();
        let mut all = drawn.repeat(count / drawn.len() + 1);
        all.truncate(count);
        all
    }
}

/// What varies between the cases.
#[derive(Clone, Copy)]
struct Case {
    types: [u32; 3],
    activation: Activation,
    merged: bool,
    extras: bool,
    x_per_pair: bool,
    n_embd: usize,
    n_ff: usize,
    n_used: usize,
    n_tokens: usize,
}

const PLAIN: Case = Case {
    types: [Q4_K; 3],
    activation: Activation::Swiglu,
    merged: false,
    extras: false,
    x_per_pair: false,
    n_embd: 256,
    n_ff: 512,
    n_used: 2,
    n_tokens: 3,
};

const EXPERTS: usize = 4;

fn block(case: &Case, seed: u64) -> Block {
    let mut numbers = Numbers(seed);
    let Case { n_embd, n_ff, n_used, n_tokens, activation, merged, .. } = *case;
    let mut matrix = |type_, rows: usize, columns: usize| {
        // Few distinct rows: some types take the host long to make.
        const DISTINCT: usize = 13;
        let mut bytes = quantize(type_, &numbers.floats(DISTINCT * columns, 0.2), columns);
        bytes = bytes.repeat(EXPERTS * rows / DISTINCT + 1);
        bytes.truncate(EXPERTS * rows * row_bytes(type_, columns));
        (type_, bytes)
    };
    let gated = activation.is_gated();
    let gate = (gated && !merged).then(|| matrix(case.types[0], n_ff, n_embd));
    let up = matrix(case.types[1], n_ff * if merged { 2 } else { 1 }, n_embd);
    let down = matrix(case.types[2], n_embd, n_ff);
    let mut table = |wanted: bool, row: usize, scale| wanted.then(|| numbers.floats(EXPERTS * row, scale));
    let (extras, own_gate) = (case.extras, case.extras && gated && !merged);
    let wide = n_ff * if merged { 2 } else { 1 };
    let biases = [table(own_gate, n_ff, 2.0), table(extras, wide, 2.0), table(extras, n_embd, 2.0)];
    let scales = [table(own_gate, 1, 1.5), table(extras, 1, 1.5), table(extras, 1, 1.5)];
    let rows = n_tokens * if case.x_per_pair { n_used } else { 1 };
    let x = numbers.floats(rows * n_embd, 1.0);
    // The experts of a token are different ones.
    let ids = (0..n_tokens).flat_map(|_| {
        let first = numbers.below(EXPERTS);
        (0..n_used).map(move |step| i32::try_from((first + step) % EXPERTS).unwrap())
    });
    let ids = ids.collect();
    Block {
        n_embd,
        n_ff,
        n_expert: EXPERTS,
        n_used,
        n_tokens,
        activation,
        merged,
        gate,
        up,
        down,
        biases,
        scales,
        x,
        ids,
    }
}

fn shape(kernels: &CpuKernels, block: &Block) -> Shape {
    let matrix = |type_, columns| Matrix { kernel: kernels.kernel(type_).unwrap(), stride: row_bytes(type_, columns) };
    let table = |values: &Option<Vec<f32>>, offset: usize| {
        let values = values.as_ref()?;
        Some(Table { data: values[offset..].as_ptr(), stride: values.len() / EXPERTS * 4 })
    };
    let after = |place: usize, offset| After {
        scale: table(&block.scales[place], 0),
        bias: table(&block.biases[place], offset),
    };
    let up = matrix(block.up.0, block.n_embd);
    let gate = if block.merged { Some(up) } else { block.gate.as_ref().map(|gate| matrix(gate.0, block.n_embd)) };
    Shape {
        n_embd: block.n_embd,
        n_ff: block.n_ff,
        gate,
        up,
        down: matrix(block.down.0, block.n_ff),
        activation: block.activation,
        values: kernels.values(),
        after_gate: if block.merged { after(1, 0) } else { after(0, 0) },
        after_up: after(1, if block.merged { block.n_ff } else { 0 }),
        after_down: after(2, 0),
    }
}

/// The block's experts by the team.
fn by_team(team: &Team, shape: &Shape, block: &Block) -> Vec<f32> {
    let (mut groups, mut pairs) = (Vec::new(), Vec::new());
    let per_pair = block.x.len() / block.n_embd > block.n_tokens;
    for expert in 0..EXPERTS {
        let before = pairs.len();
        let named = block.ids.iter().enumerate().filter(|&(_, &id)| usize::try_from(id).unwrap() == expert);
        pairs.extend(named.map(|(output, _)| {
            let input = if per_pair { output } else { output / block.n_used };
            Pair { input: u32::try_from(input).unwrap(), output: u32::try_from(output).unwrap() }
        }));
        if pairs.len() > before {
            let of = |bytes: &Vec<u8>| bytes[bytes.len() / EXPERTS * expert..].as_ptr();
            let up = of(&block.up.1);
            groups.push(Group {
                expert: u32::try_from(expert).unwrap(),
                gate: if block.merged { up } else { block.gate.as_ref().map_or(core::ptr::null(), |gate| of(&gate.1)) },
                up: up.wrapping_add(if block.merged { block.n_ff * shape.up.stride } else { 0 }),
                down: of(&block.down.1),
                pairs: u32::try_from(pairs.len() - before).unwrap(),
            });
        }
    }
    let mut out = vec![f32::NAN; block.ids.len() * block.n_embd];
    let row = block.n_embd * 4;
    let outputs = (out.as_mut_ptr(), row);
    let job = Job { shape, groups: &groups, pairs: &pairs, inputs: (block.x.as_ptr(), row), outputs };
    // SAFETY: all of it lives until the wait below has returned.
    let ticket = unsafe { team.start(&job) }.unwrap();
    ticket.wait().unwrap();
    out
}

fn team(threads: usize) -> Team {
    Team::new(Options { threads, pin: false, spin_us: 20 }).unwrap()
}

/// Compares a case; the result says where it first differs.
fn difference(team: &Team, case: &Case, seed: u64) -> Option<String> {
    let block = block(case, seed);
    let stock = block.compute();
    let ours = by_team(team, &shape(kernels(), &block), &block);
    assert!(stock.iter().any(|&value| value != 0.0 && value.is_finite()), "a block of nothing proves nothing");
    let differing = stock.iter().zip(&ours).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|value| f64::from(value).powi(2)).sum::<f64>();
    let error = square(&mut stock.iter().zip(&ours).map(|(a, b)| a - b)) / square(&mut stock.iter().copied());
    let types = case.types.map(type_name).join(" ");
    let what = format!("{types} {:?}: {differing} of {} differ, NMSE {error:e}", case.activation, stock.len());
    (differing > 0).then_some(what)
}

fn assert_equal(cases: &[Case]) {
    kernels();
    let team = team(2);
    let found = |(seed, case): (usize, &Case)| difference(&team, case, u64::try_from(seed).unwrap() + 1);
    let differences: Vec<String> = cases.iter().enumerate().filter_map(found).collect();
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

#[test]
#[ignore = "needs the stock libraries"]
fn all_types() {
    kernels();
    let mut cases: Vec<Case> = TYPES.iter().map(|&type_| Case { types: [type_; 3], ..PLAIN }).collect();
    // Types that want the inputs in different forms, as mixed models have them.
    cases.extend(
        [[Q4_K, Q8_0, Q6_K], [Q8_0, Q4_K, F32], [IQ4_XS, IQ4_XS, MXFP4], [TQ2_0, F32, Q4_K]].map(|types| Case {
            types,
            extras: true,
            ..PLAIN
        }),
    );
    assert_equal(&cases);
}

const GATED: [Activation; 10] = [
    Activation::Swiglu,
    Activation::Geglu,
    Activation::GegluErf,
    Activation::GegluQuick,
    Activation::Reglu,
    Activation::SwigluOai { alpha: 1.702, limit: 7.0 },
    Activation::SwigluOai { alpha: 1.0, limit: 0.5 },
    Activation::SwigluClamp { limit: 1.5 },
    Activation::SwigluLimited { limit: 1.0 },
    Activation::SwigluLimited { limit: 100.0 },
];

const GATELESS: [Activation; 6] = [
    Activation::Silu,
    Activation::Gelu,
    Activation::GeluErf,
    Activation::GeluQuick,
    Activation::Relu,
    Activation::ReluSqr,
];

#[test]
#[ignore = "needs the stock libraries"]
fn all_activations_with_biases_and_scales() {
    let mut cases = Vec::new();
    for activation in GATED.into_iter().chain(GATELESS) {
        for (extras, types) in [(true, [F32; 3]), (false, [Q8_0; 3]), (true, [Q4_K, Q4_K, Q6_K])] {
            cases.push(Case { activation, extras, types, ..PLAIN });
            if activation.is_gated() && extras {
                cases.push(Case { activation, extras, types, merged: true, ..PLAIN });
            }
        }
    }
    assert_equal(&cases);
}

#[test]
#[ignore = "needs the stock libraries"]
fn shapes_and_batches() {
    let mut cases = Vec::new();
    // Hidden rows that end within a slab, and within a vector.
    for (types, n_embd, n_ff) in
        [([Q8_0; 3], 96, 352), ([F32; 3], 40, 777), ([F32; 3], 7, 5), ([MXFP4; 3], 2880, 288), ([Q4_K; 3], 1024, 256)]
    {
        for (n_tokens, n_used) in [(1, 1), (1, 4), (7, 3)] {
            for (x_per_pair, merged) in [(false, false), (true, true)] {
                cases.push(Case { types, n_embd, n_ff, n_tokens, n_used, x_per_pair, merged, extras: true, ..PLAIN });
            }
        }
    }
    assert_equal(&cases);
}

#[test]
#[ignore = "needs the stock libraries"]
fn the_count_of_threads_changes_nothing() {
    kernels();
    let block = block(&Case { n_tokens: 5, n_used: 3, ..PLAIN }, 9);
    let stock = block.compute();
    for threads in [0, 1, 3, 8] {
        let team = team(threads);
        let shape = shape(kernels(), &block);
        for _ in 0..3 {
            assert_eq!(by_team(&team, &shape, &block), stock, "{threads} threads");
        }
    }
}

#[test]
#[ignore = "needs the stock libraries"]
fn shapes_that_no_kernel_takes_are_refused() {
    let kernels = kernels();
    let good = shape(kernels, &block(&PLAIN, 1));
    assert_eq!(good.check(), Ok(()));
    let refused = |shape: Shape| assert!(matches!(shape.check(), Err(JobError::Unsupported(_))));
    refused(Shape { n_ff: 700, ..good });
    refused(Shape { n_embd: 0, ..good });
    refused(Shape { gate: None, ..good });
    refused(Shape { activation: Activation::Relu, ..good });
    refused(Shape { up: Matrix { stride: 10, ..good.up }, ..good });
    // Integers and types of activations are not multiplied.
    assert!(kernels.kernel(26).is_none() && kernels.kernel(15).is_none() && kernels.kernel(4).is_none());
    assert!(kernels.kernel(u32::MAX).is_none());
}
