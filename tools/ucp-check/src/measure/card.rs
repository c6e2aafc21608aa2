//! `measure card`: how fast a card is through its driver library alone. A submission is compared with a round trip
//! between two threads, and the bandwidth with memcpy over as much memory. This is for the software card, which must
//! not be the bottleneck of other figures.

use super::driver::Driver;
use super::record::Record;
use super::timing::{median, seconds};
use anyhow::Result;
use hl_thunk::Direction;
use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

const OUTSTANDING: usize = 16;
/// The target: a share of memcpy's bandwidth, for 1 MiB and more.
const TARGET: f64 = 0.8;

pub(super) fn run() -> Result<()> {
    let driver = Driver::open(4096, &[(Direction::HostToDevice, 0)], 8)?;
    let sample = || seconds(|| (0..1000).try_for_each(|_| driver.copy(0)));
    let times = (0..9).map(|_| sample()).collect::<Result<Vec<f64>>>()?;
    let (time, trip) = (median(times) / 1000.0 * 1e6, round_trip()? * 1e6);
    Record::new("8 B submit and wait, floor: futex round trip", time, "µs", trip, 1.0).print()?;
    drop(driver);
    for (kib, set) in [(64, 8), (1024, 8), (64, 256), (1024, 256), (65536, 256)] {
        bandwidth(kib << 10, set << 20)?;
    }
    Ok(())
}

/// Seconds for a round trip between two threads that sleep until they are woken.
fn round_trip() -> Result<f64> {
    const ROUNDS: usize = 2000;
    let turn = AtomicBool::new(false);
    let play = |mine: bool, other: &thread::Thread, rounds: usize| {
        for _ in 0..rounds {
            while turn.load(Ordering::Acquire) != mine {
                thread::park();
            }
            turn.store(!mine, Ordering::Release);
            other.unpark();
        }
    };
    let times: Result<Vec<f64>> = thread::scope(|scope| {
        let first = thread::current();
        let second = scope.spawn(move || play(true, &first, 5 * ROUNDS));
        let round = |_| {
            seconds(|| {
                play(false, second.thread(), ROUNDS);
                Ok(())
            })
        };
        (0..5).map(round).collect()
    });
    Ok(median(times?) / ROUNDS as f64)
}

/// Copies from host to device over a working set, alternating with memcpy over one of the same size.
fn bandwidth(size: usize, set: usize) -> Result<()> {
    let pieces = set / size;
    let copies: Vec<_> = (0..pieces).map(|n| (Direction::HostToDevice, n * size)).collect();
    let driver = Driver::open(set, &copies, size as u32)?;
    let rounds = ((512 << 20) / set).clamp(1, 64);
    let (from, mut to) = (vec![1_u8; set], vec![0_u8; set]);
    let mut memcpy = || {
        for (to, from) in to.chunks_exact_mut(size).zip(from.chunks_exact(size)) {
            black_box(to).copy_from_slice(black_box(from));
        }
        Ok(())
    };
    let copy = || {
        let mut in_flight = VecDeque::new();
        for n in 0..pieces {
            if in_flight.len() == OUTSTANDING {
                in_flight.pop_front().map_or(Ok(()), |sequence| driver.wait(sequence))?;
            }
            in_flight.push_back(driver.submit(n)?);
        }
        in_flight.into_iter().try_for_each(|sequence| driver.wait(sequence))
    };
    let (mut floor, mut moved) = (Vec::new(), Vec::new());
    // The first round touches all memory, and does not count.
    for round in 0..=5 {
        let plain = seconds(|| (0..rounds).try_for_each(|_| memcpy()))?;
        let by_card = seconds(|| (0..rounds).try_for_each(|_| copy()))?;
        if round > 0 {
            floor.push(plain);
            moved.push(by_card);
        }
    }
    let gbps = |times| (set * rounds) as f64 / median(times) / 1e9;
    let (kib, mib) = (size >> 10, set >> 20);
    let name = format!("{kib} KiB, {OUTSTANDING} outstanding, {mib} MiB set, floor: memcpy");
    let target = (size >= 1 << 20).then_some(TARGET);
    Ok(Record::new(name, gbps(moved), "GB/s", gbps(floor), target).print()?)
}
