//! `measure memory`: the cost of device memory in the engine, without UCX: allocation, freeing, detection and export,
//! with few and with many live allocations.

use super::record::Record;
use super::timing::{shuffled, time, time_of_a_call};
use anyhow::Result;
use gaudi::{Allocation, DeviceAddr, DeviceChoice, runtime};
use std::alloc::{Layout, alloc, dealloc};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// UCX asks about every pointer that it does not know, so this must be too fast to matter.
const DETECTION_LIMIT_NS: f64 = 50.0;

pub(super) fn run() -> Result<()> {
    let device = runtime().open(&DeviceChoice::Any)?;
    eprintln!("{device}, driver library {}", device.info().driver_version);
    let call = time_of_a_call();
    let layout = Layout::from_size_align(256, 64)?;
    let (malloc, free) = time_pair(|| Block::new(layout));
    let file = std::fs::File::open("/dev/null")?;
    let dup = time(|| drop(file.try_clone().expect("a descriptor")));

    let mut records = Vec::new();
    let mut live: Vec<Allocation> = Vec::new();
    for count in [16, 1024, 65536] {
        while live.len() < count {
            live.push(device.alloc(4096, 1)?);
        }
        let order = shuffled(count);
        let at = |offset| order.iter().map(|&at| live[at].addr().0 + offset).collect::<Vec<u64>>();
        let inside = at(8);
        let host: Vec<u64> = (0..64).map(|at| live.as_ptr() as u64 + at).collect();
        let addr = DeviceAddr(inside[0]);
        let costs = time_pair(|| device.alloc(4096, 1).expect("memory"));
        let export = time(|| drop(device.export(addr, 100).expect("a dma-buf")));
        let alone = time(|| drop(device.export_alone(addr, 100).expect("a dma-buf")));
        let of = |what: &str| format!("{what}, {count} live");
        let found = |what: &str, addresses: &[u64], expect| {
            let value = lookups(addresses, expect);
            Record::within(
                of(&format!("{what}, floor: a call")),
                value,
                "ns",
                call,
                DETECTION_LIMIT_NS,
            )
        };
        let all = [
            Record::new(of("allocate 4 KiB, floor: malloc"), costs.0, "ns", malloc, None),
            Record::new(of("free 4 KiB, floor: free"), costs.1, "ns", free, None),
            found("detect Gaudi memory", &inside, true),
            found("detect host memory", &host, false),
            // In the card's window, but one byte too long.
            found("detect a range that sticks out", &at(4000), false),
            Record::new(of("export a shared dma-buf, floor: dup"), export, "ns", dup, None),
            Record::new(of("export a dma-buf of its own, floor: dup"), alone, "ns", dup, None),
        ];
        records.extend(all.into_iter().enumerate());
    }
    records.sort_by_key(|(row, _)| *row);
    let counter = AtomicU64::new(0);
    let update = time(|| _ = counter.fetch_add(black_box(1), Ordering::Relaxed));
    let clock = time(|| _ = black_box(Instant::now()));
    let last = [
        ("update of a counter, floor: a call", update),
        ("reading the clock, floor: a call", clock),
    ];
    let last = last.map(|(name, value)| Record::new(name, value, "ns", call, None));
    for record in records.into_iter().map(|(_, record)| record).chain(last) {
        record.print()?;
    }
    Ok(())
}

/// Times the two halves of a pair separately, in batches: make many, then drop them.
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
        let each = |time: Duration| time.as_nanos() as f64 / BATCH as f64;
        best = (best.0.min(each(middle - start)), best.1.min(each(end - middle)));
    }
    best
}

/// Looks addresses up one after the other. Each lookup depends on the last answer, so this measures latency, as a caller sees it.
fn lookups(addresses: &[u64], expect: bool) -> f64 {
    let (mut at, mut carry) = (0, 0);
    time(|| {
        at = if at + 1 == addresses.len() { 0 } else { at + 1 };
        let found = runtime().locate(addresses[at] + carry, 100);
        assert_eq!(found.is_some(), expect);
        // Always zero, but the CPU cannot know that before it has the answer.
        carry = found.map_or(0, |found| found.offset & 1);
    })
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
