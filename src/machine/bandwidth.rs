//! How fast the processors read RAM.
//!
//! Owns: one measurement: each thread reads memory of its own, larger than the caches, again and again for a while.
//! Invariants: it takes less than a second and no more than a quarter of the RAM that is free. Threads: its own, which end before it returns.
//! Does not: bind threads to processors, because the programs that are predicted do not either.

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

/// Memory that each thread reads, at most.
const MOST_BYTES: u64 = 128 << 20;
/// Less than that would be measured in caches.
const LEAST_BYTES: u64 = 16 << 20;
/// All threads together, at most.
const ALL_BYTES: u64 = 2 << 30;
/// How long is read.
const TIME: Duration = Duration::from_millis(350);
/// How long filling the memory may take; with less memory then.
const FILL: Duration = Duration::from_millis(300);
/// The unit of filling and of looking at the clock.
const BLOCK: usize = 1 << 20;

/// 10^9 bytes per second that so many threads read together, with `room` bytes of RAM free; `None` if that is too little.
pub fn read_gbs(threads: usize, room: u64) -> Option<f64> {
    let threads = threads.clamp(1, 256);
    let each = (ALL_BYTES.min(room / 4) / threads as u64).min(MOST_BYTES);
    if each < LEAST_BYTES {
        return None;
    }
    let words = usize::try_from(each / 8).ok()?;
    let start = Barrier::new(threads);
    let rates: Vec<f64> = thread::scope(|scope| {
        let readers: Vec<_> = (0..threads).map(|_| scope.spawn(|| reader(words, &start))).collect();
        readers.into_iter().map(|reader| reader.join().unwrap_or(0.0)).collect()
    });
    let sum: f64 = rates.iter().sum();
    (sum > 0.0).then_some(sum / 1e9)
}

/// Bytes per second of one thread.
fn reader(words: usize, start: &Barrier) -> f64 {
    let began = Instant::now();
    let mut memory: Vec<u64> = Vec::with_capacity(words);
    // The thread that reads memory writes it first, so that it lies on its own node.
    while memory.len() < words && (began.elapsed() < FILL || memory.len() * 8 < BLOCK) {
        let more = (words - memory.len()).min(BLOCK / 8);
        memory.extend(std::iter::repeat_n(memory.len() as u64, more));
    }
    start.wait();
    let began = Instant::now();
    let (mut bytes, mut sum) = (0.0, 0_u64);
    'time: loop {
        for block in memory.chunks(BLOCK / 8) {
            sum = block.iter().fold(sum, |sum, word| sum.wrapping_add(*word));
            bytes += size_of_val(block) as f64;
            if began.elapsed() > TIME {
                break 'time;
            }
        }
    }
    black_box(sum);
    bytes / began.elapsed().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn something_is_read_and_time_is_bounded() {
        let began = Instant::now();
        let rate = read_gbs(2, 1 << 30).unwrap();
        assert!((0.01..2000.0).contains(&rate), "{rate}");
        assert!(began.elapsed() < Duration::from_secs(60), "less than a second on a machine that does nothing else");
        assert_eq!(read_gbs(4, 1 << 20), None);
    }
}
