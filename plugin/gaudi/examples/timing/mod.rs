//! What the examples that measure have in common.

#![allow(dead_code, reason = "each example uses its own part of this")]

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

/// All numbers below `count`, each once, in no order that a processor could guess.
pub(crate) fn shuffled(count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for at in (1..count).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        order.swap(at, (state % (at as u64 + 1)) as usize);
    }
    order
}
