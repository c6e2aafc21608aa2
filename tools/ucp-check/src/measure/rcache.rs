//! `measure rcache`: the costs and savings of the engine's registration cache, without UCX.

use super::record::Record;
use super::timing::{median, shuffled, time, time_of_a_call};
use anyhow::{Result, ensure};
use gaudi::rcache::{CacheLimits, invalidate};
use gaudi::{Device, DeviceChoice, HostRegion, Segment, Side, runtime};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use std::hint::black_box;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Instant;

/// A copy looks up each host side, and takes microseconds, so this must be too fast to matter.
const HIT_LIMIT_NS: f64 = 200.0;
/// Registering again may take this share of the first registration.
const AGAIN: f64 = 0.01;
/// Limits in percent: copies in a steady loop that miss the cache, and the cache's own memory compared with what it keeps.
const PERCENT: f64 = 1.0;

/// Length and distance of the ranges that are looked up.
const RANGE: usize = 80 << 10;
const STRIDE: usize = 128 << 10;
/// The same pages are mapped at many addresses, so that many ranges fit on a small machine.
const PAGES: usize = 64 << 20;
const MANY: usize = 65536;

pub(super) fn run() -> Result<()> {
    let device = runtime().open(&DeviceChoice::Any)?;
    eprintln!("{device}, driver library {}", device.info().driver_version);
    // Code here that unmaps memory reports it.
    let limits = CacheLimits { regions: 1 << 20, bytes: u64::MAX };
    runtime().cache_registrations(limits, Box::new(|| true));
    let (call, records) = (time_of_a_call(), [1024, MANY].map(time_of_a_record));
    let steady = steady(&device)?;
    let again = again(&device)?;

    let all = ranges(MANY + 1)?;
    let (last, other) = (all.wrapping_add(MANY * STRIDE), vec![0_u8; 4096]);
    let (mut hits, mut one_more, mut other_memory) = (Vec::new(), Vec::new(), Vec::new());
    let mut count = 0;
    for live in [1, 1024, MANY] {
        while count < live {
            prepare(&device, all.wrapping_add(count * STRIDE), RANGE)?;
            count += 1;
        }
        hits.push(lookups(&device, all, live));
        one_more.push(time(|| {
            prepare(&device, last, RANGE).expect("pinned");
            invalidate(last as usize, 1);
        }));
        other_memory.push(time(|| invalidate(black_box(other.as_ptr() as usize), 4096)));
    }
    let ns = |name, value, floor| Record::new(name, value, "ns", floor, None);
    let hit = |name, value, floor| Record::within(name, value, "ns", floor, HIT_LIMIT_NS);
    for record in [
        hit("hit, floor: a call, 1 range", hits[0], call),
        hit("hit, floor: a call, 1024 ranges", hits[1], call),
        hit("hit, floor: reading one of as many records, 65536 ranges", hits[2], records[1]),
        ns("reading one of 65536 records compared with one of 1024", records[1], records[0]),
        again,
        ns(
            "pinning 80 KiB and giving it back, 65536 ranges compared with 1024",
            one_more[2],
            one_more[1],
        ),
        ns("hearing of other memory that goes, floor: a call, 1024 ranges", other_memory[1], call),
        ns("hearing of other memory that goes, floor: a call, 65536 ranges", other_memory[2], call),
    ] {
        record.print()?;
    }
    Ok(steady.iter().try_for_each(Record::print)?)
}

/// Addresses of `count` ranges, backed by as few pages as possible.
fn ranges(count: usize) -> Result<*mut u8> {
    let len = (count * STRIDE).next_multiple_of(PAGES);
    let file = rustix::fs::memfd_create("pages", MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&file, PAGES as u64)?;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: new mappings: all addresses, then the file at each part of them.
    unsafe {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let all = rustix::mm::mmap_anonymous(null_mut(), len, access, flags)?;
        for at in (0..len).step_by(PAGES) {
            let (at, flags) = (all.byte_add(at), MapFlags::SHARED | MapFlags::FIXED);
            rustix::mm::mmap(at, PAGES, access, flags, &file, 0)?;
        }
        Ok(all.cast())
    }
}

fn prepare(device: &Arc<Device>, start: *mut u8, len: usize) -> Result<()> {
    let region = HostRegion::record(start, len);
    // SAFETY: the memory stays until the end.
    ensure!(unsafe { region.prepare(device) }?, "not pinned");
    Ok(())
}

/// Looks ranges up one after the other. Each lookup depends on the last answer, so this measures latency, as a copy sees it.
fn lookups(device: &Device, all: *mut u8, count: usize) -> f64 {
    let order = shuffled(count);
    // Look each range up once first: one batch may be too short to reach all of them.
    for &number in &order {
        device.cached_at(all.wrapping_add(number * STRIDE), RANGE).expect("kept");
    }
    let (mut at, mut carry) = (0, 0);
    time(|| {
        at = if at + 1 == count { 0 } else { at + 1 };
        let start = all.wrapping_add(order[at] * STRIDE + carry);
        let found = device.cached_at(start, RANGE).expect("kept").0 as usize;
        // Always zero, but the CPU cannot know that before it has read the answer.
        carry = black_box(found) ^ found;
    })
}

/// The memory accesses of a lookup alone: reads as much per range as a lookup in the cache does, in an unpredictable
/// order, each read depending on the last one.
fn time_of_a_record(count: usize) -> f64 {
    let order = shuffled(count);
    let mut records = vec![[0_usize; 4]; count];
    for (at, &record) in order.iter().enumerate() {
        records[record][0] = order[(at + 1) % count];
    }
    let mut at = 0;
    time(|| at = black_box(records[at][0]))
}

/// A hundred buffers, each copied from and to by turns.
fn steady(device: &Arc<Device>) -> Result<[Record; 2]> {
    const BUFFERS: usize = 100;
    const LEN: usize = 256 << 10;
    const ROUNDS: usize = 200;
    let there = device.alloc(LEN as u64, 1)?;
    let mut buffers = vec![vec![1_u8; LEN]; BUFFERS];
    let mut misses = 0;
    for round in 0..ROUNDS {
        for buffer in &mut buffers {
            misses += usize::from(device.cached_at(buffer.as_ptr(), LEN).is_none());
            let (host, card) = (Side::Host(buffer.as_mut_ptr()), Side::Device(there.addr()));
            let (dst, src) = if round % 2 == 0 { (card, host) } else { (host, card) };
            // SAFETY: the buffer stays until the copy has ended, which is waited for.
            let started =
                unsafe { device.copy(&[Segment { dst, src, len: LEN, host_region: None }]) };
            started?.wait()?;
        }
    }
    // The cache of a process that has registered nothing else.
    let info = device.registration_cache();
    let overhead = 100.0 * info.overhead as f64 / info.bytes as f64;
    invalidate(0, usize::MAX);
    let percent = |name, value| Record::within(name, value, "%", 100.0, PERCENT);
    Ok([
        percent(
            "misses in a steady loop over 100 buffers",
            100.0 * misses as f64 / (ROUNDS * BUFFERS) as f64,
        ),
        percent("the cache's own memory compared with 100 buffers of 256 KiB", overhead),
    ])
}

fn again(device: &Arc<Device>) -> Result<Record> {
    const LEN: usize = 16 << 20;
    let mut buffer = vec![1_u8; LEN];
    let start = buffer.as_mut_ptr();
    let mut first = Vec::new();
    for _ in 0..31 {
        invalidate(start as usize, LEN);
        ensure!(device.cached_at(start, LEN).is_none(), "still in the cache");
        let begin = Instant::now();
        prepare(device, start, LEN)?;
        first.push(begin.elapsed().as_nanos() as f64);
    }
    let again = time(|| prepare(device, start, LEN).expect("pinned"));
    invalidate(start as usize, LEN);
    Ok(Record::new(
        "registering 16 MiB again, compared with the first time",
        again,
        "ns",
        median(first),
        AGAIN,
    ))
}
