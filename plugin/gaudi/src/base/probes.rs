//! USDT probes of the provider `ucx_gaudi` (docs/statistics.md), which perf, bpftrace, gdb and
//! SystemTap find in the library's notes. A probe is one `nop` until a tracer attaches.
//!
//! A number in the arguments matches each `_end` to its `_start`; the last argument of an end is 1 on success.

use std::sync::atomic::{AtomicU64, Ordering};

use hl_thunk::Direction;
use hl_thunk::packet::LinDma;
use probe::{probe, probe_lazy};

/// A submission was accepted. `card` identifies the open card; `sequence` is the driver's number on it.
#[inline]
pub(crate) fn copy_start(card: usize, sequence: u64, direction: Direction, moves: &[LinDma]) {
    // Computed only while a tracer is attached.
    probe_lazy!(ucx_gaudi, copy_start, card, sequence, direction as u64, bytes_of(moves));
}

fn bytes_of(moves: &[LinDma]) -> u64 {
    let len = |dma: &LinDma| match *dma {
        LinDma::Copy { len, .. } | LinDma::Fill { len, .. } => u64::from(len),
    };
    moves.iter().map(len).sum()
}

/// A submission was seen to have ended.
#[inline]
pub(crate) fn copy_end(card: usize, sequence: u64, well: bool) {
    probe!(ucx_gaudi, copy_end, card, sequence, u64::from(well));
}

/// Asks the driver to pin host memory: a probe before it, and one with the result.
#[inline]
pub(crate) fn pin<T, E>(
    address: u64,
    len: u64,
    ask: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    probe!(ucx_gaudi, pin_start, address, len);
    let answer = ask();
    probe!(ucx_gaudi, pin_end, address, len, u64::from(answer.is_ok()));
    answer
}

/// Device memory is exported as a dma-buf.
#[inline]
pub(crate) fn export<T, E>(
    address: u64,
    len: u64,
    make: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    probe!(ucx_gaudi, export_start, address, len);
    let made = make();
    probe!(ucx_gaudi, export_end, address, len, u64::from(made.is_ok()));
    made
}

/// A peer is asked to hand over its memory.
#[inline]
pub(crate) fn hand_over<T, E>(ask: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    probe!(ucx_gaudi, hand_over_start, number);
    let answer = ask();
    probe!(ucx_gaudi, hand_over_end, number, u64::from(answer.is_ok()));
    answer
}
