//! Perplexities compared chunk by chunk.
//!
//! Owns: the figures of single chunks out of what llama-perplexity prints, which are means over all chunks so far, and the paired
//! comparison with its standard error.
//!
//! `--ppl-output-type 1` prints for each chunk the perplexity so far with four decimals and its logarithm with six. Whichever is finer is
//! taken; chunk i is then `i * mean(i) - (i - 1) * mean(i - 1)`, exact to `(2 i - 1)` roundings, and the mean over all chunks to one.
//! The logarithm is needed: from a perplexity of 8 with four decimals the 500th chunk would be known to 0.6%. Log-probabilities saved
//! with `--kl-divergence-base` are no better (16 bits over a range of up to 16) and take 2 bytes for each token and word.
//!
//! Threads: none. Does not: start a program.

use std::fmt::Write as _;

use super::stats::mean_and_error;

/// Half of the last decimal of a printed logarithm.
const LOG_ROUNDING: f64 = 5e-7;
/// Half of the last decimal of a printed perplexity.
const PERPLEXITY_ROUNDING: f64 = 5e-5;

/// The mean logarithm over the chunks so far, and how far it may be off.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Running {
    /// Mean negative log-likelihood per token.
    pub mean: f64,
    /// What rounding may have changed.
    pub rounding: f64,
}

/// The running figures of one run, in order, and how many chunks it announced. An error names a chunk without a number.
pub fn running(output: &str) -> Result<(Vec<Running>, Option<usize>), String> {
    let mut figures = Vec::new();
    let mut announced = None;
    for line in output.lines() {
        if let Some((_, rest)) = line.split_once("calculating perplexity over ") {
            announced = rest.split(' ').next().and_then(|count| count.parse().ok());
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        let &[position, perplexity, log, spread] = &words[..] else { continue };
        let numbers = [perplexity, log, spread].map(str::parse::<f64>);
        let (Ok(_), [Ok(perplexity), Ok(log), Ok(_)]) = (position.parse::<u64>(), numbers) else { continue };
        if !(perplexity.is_finite() && log.is_finite()) {
            return Err(format!("chunk {} is no number: {}", figures.len() + 1, line.trim()));
        }
        let coarse = PERPLEXITY_ROUNDING / perplexity.max(1.0);
        figures.push(if coarse < LOG_ROUNDING {
            Running { mean: perplexity.ln(), rounding: coarse }
        } else {
            Running { mean: log, rounding: LOG_ROUNDING }
        });
    }
    Ok((figures, announced))
}

/// The logarithms of single chunks.
fn chunks(figures: &[Running]) -> Vec<f64> {
    let sums: Vec<f64> = figures.iter().enumerate().map(|(index, figure)| (index + 1) as f64 * figure.mean).collect();
    sums.iter().enumerate().map(|(index, sum)| sum - index.checked_sub(1).map_or(0.0, |before| sums[before])).collect()
}

/// Two runs, paired.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Logarithms of each chunk's perplexity: stock's and ours.
    pub chunks: Vec<(f64, f64)>,
    /// Mean of the differences, ours less stock's.
    pub mean: f64,
    /// Its standard error.
    pub error: f64,
    /// What rounding may have changed of the mean.
    pub rounding: f64,
    /// Chunks whose printed figures are the same.
    pub equal: usize,
}

impl Comparison {
    /// Pairs two runs of equally many chunks, at least two.
    pub fn new(stock: &[Running], ours: &[Running]) -> Result<Self, String> {
        if stock.len() != ours.len() {
            return Err(format!("stock printed {} chunks, the plugin's side {}", stock.len(), ours.len()));
        }
        let (Some(last_stock), Some(last_ours)) = (stock.last(), ours.last()) else {
            return Err("no chunk was printed".to_owned());
        };
        let pairs: Vec<(f64, f64)> = chunks(stock).into_iter().zip(chunks(ours)).collect();
        let differences: Vec<f64> = pairs.iter().map(|(stock, ours)| ours - stock).collect();
        let error = mean_and_error(&differences).and_then(|(_, error)| error);
        Ok(Self {
            // The sum of all chunks is printed; summing what was made of it would add the roundings of all.
            mean: last_ours.mean - last_stock.mean,
            error: error.ok_or("a standard error needs two chunks")?,
            rounding: last_ours.rounding + last_stock.rounding,
            equal: stock.iter().zip(ours).filter(|(stock, ours)| stock == ours).count(),
            chunks: pairs,
        })
    }

    /// Whether the mean lies within the limit (in percent) and within two standard errors of zero, rounding apart.
    pub fn passes(&self, limit_percent: f64) -> bool {
        let mean = (self.mean.abs() - self.rounding).max(0.0);
        100.0 * mean <= limit_percent && mean <= 2.0 * self.error
    }

    /// One row per chunk.
    pub fn table(&self) -> String {
        let mut out = String::from("chunk     stock      ours  difference\n");
        for (index, (stock, ours)) in self.chunks.iter().enumerate() {
            let _ = writeln!(
                out,
                "{:>5}  {:>8.4}  {:>8.4}  {:>+9.4}%",
                index + 1,
                stock.exp(),
                ours.exp(),
                100.0 * (ours - stock)
            );
        }
        out
    }

    /// The last line.
    pub fn verdict(&self, limit_percent: f64) -> String {
        let count = self.chunks.len();
        let mean = 100.0 * self.mean;
        let how = if self.equal == count {
            "equal to the last decimal: ok".to_owned()
        } else if self.passes(limit_percent) {
            format!("limit {limit_percent}% and 2 standard errors: ok")
        } else if 100.0 * (self.mean.abs() - self.rounding) > limit_percent {
            format!("more than the limit of {limit_percent}%")
        } else {
            "more than 2 standard errors".to_owned()
        };
        format!(
            "ppl: mean difference {mean:+.4}% (standard error {:.4}%) over {count} chunks, {how}\n",
            100.0 * self.error
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What llama-perplexity prints for chunks of these logarithms.
    fn printed(logs: &[f64]) -> String {
        let mut out =
            format!("perplexity: calculating perplexity over {} chunks, n_ctx=64\n0.00 minutes\n", logs.len());
        let mut sum = 0.0;
        for (index, log) in logs.iter().enumerate() {
            sum += log;
            let mean = sum / (index + 1) as f64;
            let _ = writeln!(out, "{:8}  {:.4}  {mean:4.6}  {:4.6}", 64 * index, mean.exp(), 0.25);
        }
        out
    }

    fn compared(stock: &[f64], ours: &[f64]) -> Comparison {
        let [stock, ours] = [stock, ours].map(|logs| running(&printed(logs)).unwrap());
        assert_eq!(stock.1, Some(stock.0.len()));
        Comparison::new(&stock.0, &ours.0).unwrap()
    }

    #[test]
    fn equal_runs_pass() {
        let logs = [3.3, 2.7, 3.8, 4.5];
        let comparison = compared(&logs, &logs);
        assert_eq!((comparison.mean, comparison.error, comparison.equal), (0.0, 0.0, 4));
        assert!(comparison.passes(0.2));
        assert!(comparison.verdict(0.2).ends_with("over 4 chunks, equal to the last decimal: ok\n"));
        assert!(comparison.table().lines().nth(2).unwrap().starts_with("    2   14.8797   14.8797    +0.0000%"));
    }

    #[test]
    fn a_mean_beyond_the_limit_or_the_noise_fails() {
        let stock = [3.0, 3.5, 2.5, 3.2];
        let far: Vec<f64> = stock.iter().zip([0.01, -0.002, 0.012, 0.02]).map(|(log, off)| log + off).collect();
        assert!(!compared(&stock, &far).passes(0.2));
        assert!(compared(&stock, &far).verdict(0.2).contains("more than the limit of 0.2%"));
        let steady: Vec<f64> = stock.iter().map(|log| log + 0.001).collect();
        let comparison = compared(&stock, &steady);
        assert!(!comparison.passes(0.2) && comparison.verdict(0.2).contains("more than 2 standard errors"));
        let noisy: Vec<f64> = stock.iter().zip([0.002, -0.003, 0.001, 0.002]).map(|(log, off)| log + off).collect();
        let comparison = compared(&stock, &noisy);
        assert!(comparison.passes(0.2), "{comparison:?}");
        assert!(comparison.verdict(0.2).contains("limit 0.2% and 2 standard errors: ok"));
        let last_decimal: Vec<f64> = stock.iter().map(|log| log + 4e-7).collect();
        assert!(compared(&stock, &last_decimal).passes(0.2), "rounding is no difference");
    }

    #[test]
    fn what_is_no_pair_is_told() {
        let read = |logs: &[f64]| running(&printed(logs)).unwrap().0;
        assert!(Comparison::new(&read(&[1.0, 2.0]), &read(&[1.0])).unwrap_err().contains("stock printed 2 chunks"));
        assert!(Comparison::new(&[], &[]).unwrap_err().contains("no chunk"));
        assert!(Comparison::new(&read(&[1.0]), &read(&[1.0])).unwrap_err().contains("two chunks"));
        assert_eq!(running("       0  nan  nan  0.1\n").unwrap_err(), "chunk 1 is no number: 0  nan  nan  0.1");
        assert_eq!(running("nothing\n1 2 3\na 1 2 3\n").unwrap(), (Vec::new(), None));
    }

    #[test]
    fn large_perplexities_are_finer_than_their_logarithms() {
        let (figures, _) = running("0  5000.1234  8.517218  0.1\n").unwrap();
        assert!(figures[0].rounding < 2e-8);
    }

    proptest! {
        /// Chunks come back within the roundings that the page names, and the mean within one.
        #[test]
        fn chunks_come_back(logs in proptest::collection::vec((0.5_f64..6.0, -0.01_f64..0.01), 2..60)) {
            let stock: Vec<f64> = logs.iter().map(|(log, _)| *log).collect();
            let ours: Vec<f64> = logs.iter().map(|(log, off)| log + off).collect();
            let comparison = compared(&stock, &ours);
            for (index, (pair, (log, off))) in comparison.chunks.iter().zip(&logs).enumerate() {
                let bound = (2 * index + 1) as f64 * 5.01e-7;
                prop_assert!((pair.0 - log).abs() <= bound && (pair.1 - log - off).abs() <= bound);
            }
            let mean = logs.iter().map(|(_, off)| off).sum::<f64>() / logs.len() as f64;
            prop_assert!((comparison.mean - mean).abs() <= comparison.rounding * 1.01);
        }
    }
}
