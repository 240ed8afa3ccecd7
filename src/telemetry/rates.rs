//! What happened in the last seconds.
//!
//! Owns: one sum per second for a few seconds. Invariants: a second that is too old is never counted.
//! Threads: one at a time. Does not: read a clock.

use super::Counters;
use super::json::Object;

/// Whole seconds that are looked back on; the one that goes on comes on top.
const SECONDS: usize = 5;

#[derive(Clone, Copy, Debug, Default)]
struct Second {
    number: u64,
    work: Counters,
}

/// Sums of the last seconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rates {
    seconds: [Second; SECONDS + 1],
}

impl Rates {
    /// Something was counted.
    pub(crate) fn add(&mut self, now_us: u64, work: &Counters) {
        let number = now_us / 1_000_000;
        let place = usize::try_from(number).unwrap_or(0) % self.seconds.len();
        let second = &mut self.seconds[place];
        if second.number != number {
            *second = Second { number, work: Counters::default() };
        }
        second.work.add(work);
    }

    /// All that was counted in the time that is looked back on, and how long that is, in seconds.
    fn look(&self, now_us: u64) -> (Counters, f64) {
        let now = now_us / 1_000_000;
        let oldest = now.saturating_sub(SECONDS as u64);
        let mut sum = Counters::default();
        for second in self.seconds.iter().filter(|second| (oldest..=now).contains(&second.number)) {
            sum.add(&second.work);
        }
        (sum, (now_us - oldest * 1_000_000) as f64 / 1e6)
    }

    /// As JSON: per second.
    pub(crate) fn json(&self, now_us: u64) -> String {
        let (sum, seconds) = self.look(now_us);
        let per_second = |count: u64| (seconds > 0.0).then(|| count as f64 / seconds);
        let mut object = Object::new();
        object.real("window_s", Some(seconds), 1);
        for (name, count) in [
            ("tokens", sum.tokens),
            ("prompt_tokens", sum.prompt_tokens),
            ("uploads", sum.uploads),
            ("cpu_bytes", sum.cpu_bytes),
            ("link_bytes", sum.link_bytes()),
        ] {
            object.real(name, per_second(count), 2);
        }
        object.real("hit_share", sum.hit_share(), 4);
        object.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_seconds_are_forgotten() {
        let mut rates = Rates::default();
        for ms in (0..20_000).step_by(100) {
            rates.add(ms * 1000, &Counters { tokens: 2, ..Counters::default() });
        }
        let (sum, seconds) = rates.look(20_000_000 - 1);
        assert_eq!(sum.tokens, 120, "six seconds of twenty tokens");
        assert!((seconds - 6.0).abs() < 0.01);
        assert_eq!(rates.look(24_500_000).0.tokens, 20, "of the twentieth second only");
        assert_eq!(rates.look(60_000_000).0.tokens, 0);
        let value: serde_json::Value = serde_json::from_str(&rates.json(20_000_000 - 1)).unwrap();
        assert!((value["tokens"].as_f64().unwrap() - 20.0).abs() < 0.1, "{value}");
        assert_eq!(value["hit_share"], serde_json::Value::Null);
    }

    #[test]
    fn the_first_second_is_not_divided_by_zero() {
        let mut rates = Rates::default();
        rates.add(0, &Counters { tokens: 1, ..Counters::default() });
        assert!(rates.json(0).contains("\"tokens\":null"));
    }
}
