//! The stopwatch of the examples that measure.

use std::time::Instant;

/// Nanoseconds per call in the fastest of several batches: other work on the machine only adds.
pub(crate) fn time(mut f: impl FnMut()) -> f64 {
    let mut calls = 1_u32;
    loop {
        let start = Instant::now();
        (0..calls).for_each(|_| f());
        if start.elapsed().as_millis() >= 2 {
            break;
        }
        calls *= 2;
    }
    let batch = |_| {
        let start = Instant::now();
        (0..calls).for_each(|_| f());
        start.elapsed().as_nanos() as f64 / f64::from(calls)
    };
    (0..40).map(batch).fold(f64::INFINITY, f64::min)
}
