//! What the registration cache costs and saves in the engine, as `cargo xtask bench rcache` shows it.
//!
//! Prints one figure a line: its name, a tab, nanoseconds (or what the name says). Needs a driver
//! library, which `HL_THUNK_LIBRARY` may name.

mod timing;

use std::hint::black_box;
use std::process::ExitCode;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Instant;

use gaudi::rcache::{CacheLimits, invalidate};
use gaudi::{Device, DeviceChoice, HostRegion, Segment, Side, runtime};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use timing::{shuffled, time};

/// Ranges of the lookups: this long, and this far apart.
const RANGE: usize = 80 << 10;
const STRIDE: usize = 128 << 10;
/// The same pages under many addresses, so that many ranges fit a small machine.
const PAGES: usize = 64 << 20;

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

/// Addresses of `count` ranges, over as few pages as will do.
fn ranges(count: usize) -> *mut u8 {
    let len = (count * STRIDE).next_multiple_of(PAGES);
    let file = rustix::fs::memfd_create("pages", MemfdFlags::CLOEXEC).expect("a file in memory");
    rustix::fs::ftruncate(&file, PAGES as u64).expect("its size");
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: new mappings: all addresses, then the file at each part of them.
    unsafe {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let all = rustix::mm::mmap_anonymous(null_mut(), len, access, flags).expect("addresses");
        for at in (0..len).step_by(PAGES) {
            let (at, flags) = (all.byte_add(at), MapFlags::SHARED | MapFlags::FIXED);
            rustix::mm::mmap(at, PAGES, access, flags, &file, 0).expect("pages");
        }
        all.cast()
    }
}

fn prepare(device: &Arc<Device>, start: *mut u8, len: usize) {
    let region = HostRegion::record(start, len);
    // SAFETY: the examples' memory stays until the end.
    assert!(unsafe { region.prepare(device) }.expect("pinned"));
}

/// Looks ranges up one after the other, each only when the last answer is known: that is how long
/// a copy waits.
fn lookups(device: &Device, all: *mut u8, count: usize) -> f64 {
    let order = shuffled(count);
    // Each once before: a batch is too short for all of many ranges.
    for &number in &order {
        device.cached_at(all.wrapping_add(number * STRIDE), RANGE).expect("kept");
    }
    let (mut at, mut carry) = (0, 0);
    time(|| {
        at = if at + 1 == count { 0 } else { at + 1 };
        let start = all.wrapping_add(order[at] * STRIDE + carry);
        let found = device.cached_at(start, RANGE).expect("kept").0 as usize;
        // Nothing, but the processor cannot know before it has read the answer.
        carry = black_box(found) ^ found;
    })
}

fn floors() {
    #[inline(never)]
    fn nothing(value: u64) -> u64 {
        value
    }
    let call: fn(u64) -> u64 = black_box(nothing);
    let called = time(|| {
        black_box(call(1));
    });
    println!("floor call\t{called}");
    // Memory as a lookup finds it: as much for each range as the cache has for a lookup to read, in an
    // order that cannot be predicted, each only when the last is known.
    for count in [1024, 65536] {
        let order = shuffled(count);
        let mut records = vec![[0_usize; 4]; count];
        for (at, &record) in order.iter().enumerate() {
            records[record][0] = order[(at + 1) % count];
        }
        let mut at = 0;
        let read = time(|| at = black_box(records[at][0]));
        println!("floor record {count}\t{read}");
    }
}

fn counter(name: &str) -> u64 {
    let page = stats_reader::read(std::process::id()).expect("our own page");
    page.get(name).expect("a counter")
}

/// A hundred buffers, copied from and to in turn.
fn steady(device: &Arc<Device>) {
    const BUFFERS: usize = 100;
    const LEN: usize = 256 << 10;
    let there = device.alloc(LEN as u64, 1).expect("memory");
    let mut buffers = vec![vec![1_u8; LEN]; BUFFERS];
    let before = ["reg_cache_hits", "reg_cache_misses"].map(counter);
    for round in 0..200 {
        for buffer in &mut buffers {
            let host = Side::Host(buffer.as_mut_ptr());
            let device_side = Side::Device(there.addr());
            let (dst, src) = if round % 2 == 0 { (device_side, host) } else { (host, device_side) };
            // SAFETY: the buffer stays until the copy has ended, which is waited for.
            let started =
                unsafe { device.copy(&[Segment { dst, src, len: LEN, host_region: None }]) };
            started.expect("room").wait().expect("copied");
        }
    }
    let after = ["reg_cache_hits", "reg_cache_misses"].map(counter);
    let [hits, misses] = [0, 1].map(|at| (after[at] - before[at]) as f64);
    println!("steady miss rate\t{}", 100.0 * misses / (hits + misses));
    // Of a process that has had no others.
    let info = device.registration_cache();
    println!("steady overhead\t{}", 100.0 * info.overhead as f64 / info.bytes as f64);
    invalidate(0, usize::MAX);
}

fn again(device: &Arc<Device>) {
    const LEN: usize = 16 << 20;
    let mut buffer = vec![1_u8; LEN];
    let start = buffer.as_mut_ptr();
    let first = |_| {
        invalidate(start as usize, LEN);
        assert!(device.cached_at(start, LEN).is_none());
        let begin = Instant::now();
        prepare(device, start, LEN);
        begin.elapsed().as_nanos() as f64
    };
    println!("first\t{}", median((0..31).map(first).collect()));
    println!("again\t{}", time(|| prepare(device, start, LEN)));
    invalidate(start as usize, LEN);
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
    // Code here that unmaps memory reports it.
    let limits = CacheLimits { regions: 1 << 20, bytes: u64::MAX };
    runtime().cache_registrations(limits, Box::new(|| true));
    floors();
    steady(&device);
    again(&device);
    let all = ranges(65536 + 1);
    let other = vec![0_u8; 4096];
    let mut count = 0;
    for live in [1, 1024, 65536] {
        while count < live {
            prepare(&device, all.wrapping_add(count * STRIDE), RANGE);
            count += 1;
        }
        println!("hit {live}\t{}", lookups(&device, all, live));
        let last = all.wrapping_add(65536 * STRIDE);
        let one_more = time(|| {
            prepare(&device, last, RANGE);
            invalidate(last as usize, 1);
        });
        println!("one more {live}\t{one_more}");
        let told = time(|| invalidate(black_box(other.as_ptr() as usize), 4096));
        println!("told {live}\t{told}");
    }
    ExitCode::SUCCESS
}
