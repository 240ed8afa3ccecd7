//! How fast the team reads weights, beside how fast the machine can read at all. `tests/gpu/team.sh` runs it and prints the table.
//!
//! Run with `--ignored` and `GGML_MOE_STOCK`. Without `GGML_MOE_TEAM_SPEED` it only shows that it works, in a second; with it (a size in
//! MiB, larger than all caches; milliseconds for each figure; counts of threads) it prints a line of JSON for each figure.
#![expect(unsafe_code, reason = "starts jobs on memory of the test, and reads that memory")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::activation::Activation;
use super::shape::{After, Group, Job, Matrix, Pair, Shape};
use super::team::{Options, Team};
use crate::abi::cpu_kernels::{CpuKernels, cpu_kernels};
use crate::abi::cpu_reference::{IQ4_XS, MXFP4, Q4_K, Q6_K, Q8_0, quantize, row_bytes, type_name};
use crate::experts::HostMemory;

/// The shape of a 30B-A3B model: 48 layers of 128 experts, 8 of them used.
const N_EMBD: usize = 2048;
const N_FF: usize = 768;

struct Plan {
    bytes: usize,
    time: Duration,
    threads: Vec<usize>,
    spin_us: u32,
}

fn plan() -> Plan {
    let Ok(text) = std::env::var("GGML_MOE_TEAM_SPEED") else {
        return Plan { bytes: 16 << 20, time: Duration::from_millis(2), threads: vec![1], spin_us: 20 };
    };
    let mut words = text.split_whitespace().map(|word| word.parse::<usize>().expect("a number"));
    let bytes = words.next().expect("MiB") << 20;
    let time = Duration::from_millis(u64::try_from(words.next().expect("milliseconds")).unwrap());
    Plan { bytes, time, threads: words.collect(), spin_us: 200 }
}

/// Bytes per second in units of 10^9.
fn rate(bytes: u64, time: Duration) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a figure of three digits")]
    let bytes = bytes as f64;
    bytes / time.as_secs_f64() / 1e9
}

/// What so many threads read of the memory, each in pieces of its own, and do nothing with.
fn bandwidth(memory: &HostMemory, threads: usize, time: Duration) -> f64 {
    const PIECE: usize = 1 << 20;
    let pieces = memory.bytes() / PIECE;
    let (next, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                // A thread that gets no processor in all of that time still reads a piece.
                loop {
                    let piece = usize::try_from(next.fetch_add(1, Ordering::Relaxed)).unwrap() % pieces;
                    // SAFETY: a piece of the mapping, which nobody writes to now.
                    let words = unsafe {
                        core::slice::from_raw_parts((memory.address() + piece * PIECE) as *const [u64; 8], PIECE / 64)
                    };
                    let mut sums = [0_u64; 8];
                    for line in words {
                        for (sum, word) in sums.iter_mut().zip(line) {
                            *sum ^= word;
                        }
                    }
                    std::hint::black_box(sums);
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
        }
        std::thread::sleep(time);
        stop.store(true, Ordering::Relaxed);
    });
    rate(next.load(Ordering::Relaxed) * PIECE as u64, start.elapsed())
}

/// Experts of one type that fill the memory.
struct Model<'a> {
    shape: Shape,
    memory: &'a HostMemory,
    experts: usize,
    expert_bytes: usize,
}

impl<'a> Model<'a> {
    fn new(kernels: &CpuKernels, type_: u32, memory: &'a HostMemory) -> Self {
        let (row, down_row) = (row_bytes(type_, N_EMBD), row_bytes(type_, N_FF));
        let expert_bytes = 2 * N_FF * row + N_EMBD * down_row;
        let experts = memory.bytes() / expert_bytes;
        // One expert's worth of numbers, in every expert: what is read is the same to the memory.
        let values: Vec<f32> = (0_u16..4099).map(|index| f32::from(index % 64) / 320.0 - 0.1).collect();
        let rows = |rows: usize, columns: usize| {
            let some: Vec<f32> = values.iter().copied().cycle().take(16 * columns).collect();
            quantize(type_, &some, columns).repeat(rows / 16)
        };
        let bytes = [rows(2 * N_FF, N_EMBD), rows(N_EMBD, N_FF)].concat();
        assert_eq!(bytes.len(), expert_bytes);
        for expert in 0..experts {
            let target = memory.as_ptr().cast::<u8>().wrapping_add(expert * expert_bytes);
            // SAFETY: the expert lies in the mapping, and nothing reads it now.
            unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), target, expert_bytes) };
        }
        let kernel = kernels.kernel(type_).unwrap();
        let matrix = Matrix { kernel, stride: row };
        let after = After::default();
        let shape = Shape {
            n_embd: N_EMBD,
            n_ff: N_FF,
            gate: Some(matrix),
            up: matrix,
            down: Matrix { kernel, stride: down_row },
            activation: Activation::Swiglu,
            values: kernels.values(),
            after_gate: after,
            after_up: after,
            after_down: after,
        };
        Self { shape, memory, experts, expert_bytes }
    }

    /// Bytes of weights per second when a layer misses so many experts, each with so many tokens. Layers follow without a pause.
    fn measure(&self, team: &Team, misses: usize, tokens: usize, time: Duration) -> f64 {
        let x = vec![0.25_f32; tokens * N_EMBD];
        let mut out = vec![0.0_f32; misses * tokens * N_EMBD];
        let number = |value: usize| u32::try_from(value).unwrap();
        let pairs: Vec<Pair> =
            (0..misses * tokens).map(|pair| Pair { input: number(pair % tokens), output: number(pair) }).collect();
        let mut groups = Vec::new();
        // Every expert of the memory once before any comes again, in no order that a cache could guess.
        let mut next = 0;
        let mut layer = |out: &mut Vec<f32>| {
            groups.clear();
            for _ in 0..misses {
                let expert = self.memory.as_ptr().cast::<u8>().wrapping_add(next * self.expert_bytes).cast_const();
                next = (next + 1013) % self.experts;
                let up = expert.wrapping_add(N_FF * self.shape.up.stride);
                let down = up.wrapping_add(N_FF * self.shape.up.stride);
                groups.push(Group { expert: 0, gate: expert, up, down, pairs: number(tokens) });
            }
            let stride = N_EMBD * 4;
            let (inputs, outputs) = ((x.as_ptr(), stride), (out.as_mut_ptr(), stride));
            let job = Job { shape: &self.shape, groups: &groups, pairs: &pairs, inputs, outputs };
            // SAFETY: everything lives until the wait has returned.
            unsafe { team.start(&job) }.unwrap().wait().unwrap();
        };
        (0..3).for_each(|_| layer(&mut out));
        let (start, mut layers) = (Instant::now(), 0);
        while start.elapsed() < time || layers < 2 {
            layer(&mut out);
            layers += 1;
        }
        let elapsed = start.elapsed();
        assert!(out.iter().all(|value| value.is_finite()) && out.iter().any(|&value| value != 0.0));
        rate(layers * u64::try_from(misses * self.expert_bytes).unwrap(), elapsed)
    }
}

#[test]
#[ignore = "needs the stock libraries"]
fn of_the_team_beside_the_memory() {
    let folder = std::env::var("GGML_MOE_STOCK").expect("GGML_MOE_STOCK is the folder of the stock libraries");
    crate::abi::load_for_tests(&folder);
    let (kernels, plan) = (cpu_kernels().unwrap(), plan());
    let memory = HostMemory::map(plan.bytes).unwrap();
    memory.fill(memory.address(), 1, memory.bytes()).unwrap();
    for &threads in &plan.threads {
        let figure = bandwidth(&memory, threads, plan.time);
        println!("\nteam: {{\"what\": \"memory\", \"threads\": {threads}, \"gbs\": {figure:.2}}}");
        assert!(figure > 0.0);
    }
    for type_ in [Q4_K, Q6_K, Q8_0, MXFP4, IQ4_XS] {
        let model = Model::new(kernels, type_, &memory);
        for &threads in &plan.threads {
            // Whoever waits helps, so a team has one thread less.
            let options = Options { threads: threads - 1, pin: false, spin_us: plan.spin_us };
            let team = Team::new(options).unwrap();
            for (tokens, misses) in [(1, 1), (1, 2), (1, 4), (1, 8), (4, 1), (4, 2), (4, 4), (4, 8)] {
                let figure = model.measure(&team, misses, tokens, plan.time);
                println!(
                    "team: {{\"what\": \"{}\", \"threads\": {threads}, \"tokens\": {tokens}, \"misses\": {misses}, \"gbs\": {figure:.2}}}",
                    type_name(type_)
                );
            }
        }
    }
}
