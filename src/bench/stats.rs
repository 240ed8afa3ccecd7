//! Medians, spreads and standard errors.
//!
//! Threads: none. Does not: know what the figures are.

/// A median with the lowest and the highest figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The lowest.
    pub low: f64,
    /// The highest.
    pub high: f64,
}

/// The median: of an even number of figures the mean of the middle two. `None` of none, or if one is no number.
pub fn median(figures: &[f64]) -> Option<f64> {
    let mut sorted = figures.to_vec();
    if sorted.is_empty() || sorted.iter().any(|figure| !figure.is_finite()) {
        return None;
    }
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    Some(if sorted.len() % 2 == 1 { sorted[middle] } else { f64::midpoint(sorted[middle - 1], sorted[middle]) })
}

/// Median, lowest and highest.
pub fn spread(figures: &[f64]) -> Option<Spread> {
    let median = median(figures)?;
    let low = figures.iter().copied().fold(f64::INFINITY, f64::min);
    let high = figures.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    Some(Spread { median, low, high })
}

/// The ratios of pairs: second by first.
pub fn ratios(pairs: &[(f64, f64)]) -> Vec<f64> {
    pairs.iter().map(|(first, second)| second / first).collect()
}

/// The mean, and its standard error; that needs two figures.
pub fn mean_and_error(figures: &[f64]) -> Option<(f64, Option<f64>)> {
    if figures.is_empty() {
        return None;
    }
    let count = figures.len() as f64;
    let mean = figures.iter().sum::<f64>() / count;
    let squares: f64 = figures.iter().map(|figure| (figure - mean).powi(2)).sum();
    let error = (figures.len() > 1).then(|| (squares / (count - 1.0) / count).sqrt());
    Some((mean, error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn figures() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&[1.0, f64::NAN]), None);
        assert_eq!(spread(&[2.0, 1.0, 9.0]), Some(Spread { median: 2.0, low: 1.0, high: 9.0 }));
        assert_eq!(ratios(&[(2.0, 4.0), (4.0, 2.0)]), [2.0, 0.5]);
        assert_eq!(mean_and_error(&[]), None);
        assert_eq!(mean_and_error(&[5.0]), Some((5.0, None)));
        let (mean, error) = mean_and_error(&[1.0, 2.0, 3.0, 4.0]).unwrap();
        assert_eq!(mean, 2.5);
        assert!((error.unwrap() - (5.0_f64 / 3.0 / 4.0).sqrt()).abs() < 1e-12);
    }

    proptest! {
        #[test]
        fn a_median_lies_within(mut figures in proptest::collection::vec(-1e6_f64..1e6, 1..40)) {
            let found = spread(&figures).unwrap();
            prop_assert!(found.low <= found.median && found.median <= found.high);
            let below = figures.iter().filter(|figure| **figure <= found.median).count();
            let above = figures.iter().filter(|figure| **figure >= found.median).count();
            prop_assert!(2 * below >= figures.len() && 2 * above >= figures.len());
            figures.reverse();
            prop_assert_eq!(spread(&figures), Some(found), "the order does not matter");
        }

        #[test]
        fn shifting_figures_shifts_the_mean_alone(figures in proptest::collection::vec(-1e3_f64..1e3, 2..40), by in -1e3_f64..1e3) {
            let (mean, error) = mean_and_error(&figures).unwrap();
            let moved: Vec<f64> = figures.iter().map(|figure| figure + by).collect();
            let (moved_mean, moved_error) = mean_and_error(&moved).unwrap();
            prop_assert!((moved_mean - mean - by).abs() < 1e-6);
            prop_assert!((moved_error.unwrap() - error.unwrap()).abs() < 1e-6);
        }
    }
}
