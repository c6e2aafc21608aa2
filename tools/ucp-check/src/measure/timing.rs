//! Clocks and statistics of all measurements.

use anyhow::Result;
use std::hint::black_box;
use std::time::Instant;

pub fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Seconds that `work` takes.
pub(super) fn seconds(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Nanoseconds per call in the fastest of several batches: other load on the machine can only add time.
pub(super) fn time(mut f: impl FnMut()) -> f64 {
    let mut batch = |calls: u32| {
        let start = Instant::now();
        (0..calls).for_each(|_| f());
        start.elapsed().as_nanos() as f64
    };
    let mut calls = 1;
    while batch(calls) < 2e6 {
        calls *= 2;
    }
    (0..40).map(|_| batch(calls)).fold(f64::INFINITY, f64::min) / f64::from(calls)
}

/// Nanoseconds of a call that does nothing.
pub(super) fn time_of_a_call() -> f64 {
    #[inline(never)]
    fn nothing(value: u64) -> u64 {
        value
    }
    let call: fn(u64) -> u64 = black_box(nothing);
    time(|| _ = black_box(call(1)))
}

/// All numbers below `count`, each once, in an order that the CPU cannot predict.
pub(super) fn shuffled(count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    fastrand::Rng::with_seed(1).shuffle(&mut order);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_ignores_order_and_outliers() {
        assert_eq!(median(vec![9.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 1000.0]), 4.0);
        assert!(median(Vec::new()).is_nan());
    }
}
