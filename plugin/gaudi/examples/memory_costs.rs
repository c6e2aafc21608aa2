//! What device memory costs in the engine, as `cargo xtask bench memory` shows it: allocation,
//! freeing, detection and export with few and many live allocations, compared with what the machine itself
//! takes for the like.
//!
//! Prints one figure a line: its name, a tab, nanoseconds. Needs a driver library, which
//! `HL_THUNK_LIBRARY` may name.

mod timing;

use std::alloc::{Layout, alloc, dealloc};
use std::hint::black_box;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use gaudi::{Allocation, DeviceAddr, DeviceChoice, runtime};
use timing::{shuffled, time};

/// The two halves of a pair timed apart, over batches: making many, then dropping them.
fn time_pair<T>(mut make: impl FnMut() -> T) -> (f64, f64) {
    const BATCH: usize = 64;
    let mut best = (f64::INFINITY, f64::INFINITY);
    for _ in 0..200 {
        let mut made = Vec::with_capacity(BATCH);
        let start = Instant::now();
        (0..BATCH).for_each(|_| made.push(make()));
        let middle = Instant::now();
        drop(made);
        let end = Instant::now();
        let each = |time: std::time::Duration| time.as_nanos() as f64 / BATCH as f64;
        best = (best.0.min(each(middle - start)), best.1.min(each(end - middle)));
    }
    best
}

/// Looks addresses up one after the other, each only when the last answer is known: that is how
/// long a caller waits.
fn lookups(addresses: &[u64], expect: bool) -> f64 {
    let (mut at, mut carry) = (0, 0);
    time(|| {
        at = if at + 1 == addresses.len() { 0 } else { at + 1 };
        let found = runtime().locate(addresses[at] + carry, 100);
        assert_eq!(found.is_some(), expect);
        // Always zero, which only the answer can tell.
        carry = found.map_or(0, |found| found.offset & 1);
    })
}

fn floors() {
    #[inline(never)]
    fn nothing(value: u64) -> u64 {
        value
    }
    let call: fn(u64) -> u64 = black_box(nothing);
    println!(
        "floor call\t{}",
        time(|| {
            black_box(call(1));
        })
    );
    println!(
        "floor clock\t{}",
        time(|| {
            black_box(Instant::now());
        })
    );
    let layout = Layout::from_size_align(256, 64).expect("a layout");
    let (malloc, free) = time_pair(|| Block::new(layout));
    println!("floor malloc\t{malloc}");
    println!("floor free\t{free}");
    let file = std::fs::File::open("/dev/null").expect("/dev/null");
    println!("floor dup\t{}", time(|| drop(file.try_clone().expect("a descriptor"))));
    let counter = AtomicU64::new(0);
    println!(
        "counter\t{}",
        time(|| {
            counter.fetch_add(black_box(1), Ordering::Relaxed);
        })
    );
}

/// Memory from malloc.
struct Block(*mut u8, Layout);

impl Block {
    fn new(layout: Layout) -> Self {
        // SAFETY: the layout is not empty.
        Block(unsafe { alloc(layout) }, layout)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated above with the same layout.
        unsafe { dealloc(self.0, self.1) };
    }
}

fn main() -> ExitCode {
    let device = match runtime().open(&DeviceChoice::Any) {
        Ok(device) => device,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    eprintln!("{device}, driver library {}", device.info().driver_version);
    floors();
    let mut live: Vec<Allocation> = Vec::new();
    for count in [16, 1024, 65536] {
        while live.len() < count {
            live.push(device.alloc(4096, 1).expect("memory"));
        }
        let order = shuffled(count);
        let inside: Vec<u64> = order.iter().map(|&at| live[at].addr().0 + 8).collect();
        let host: Vec<u64> = (0..64).map(|at| live.as_ptr() as u64 + at).collect();
        // In the card's window, one byte too long.
        let outside: Vec<u64> = order.iter().map(|&at| live[at].addr().0 + 4000).collect();
        let (alloc, free) = time_pair(|| device.alloc(4096, 1).expect("memory"));
        println!("alloc {count}\t{alloc}");
        println!("free {count}\t{free}");
        println!("hit {count}\t{}", lookups(&inside, true));
        println!("miss host {count}\t{}", lookups(&host, false));
        println!("miss window {count}\t{}", lookups(&outside, false));
        let addr = DeviceAddr(inside[0]);
        let export = || drop(device.export(addr, 100).expect("a dma-buf"));
        println!("export {count}\t{}", time(export));
        let alone = || drop(device.export_alone(addr, 100).expect("a dma-buf"));
        println!("export alone {count}\t{}", time(alone));
    }
    ExitCode::SUCCESS
}
