//! `detect` and `holes`: which ranges are Gaudi memory, and what UCX's memory-type cache says about them.

use super::host_map::{HostMap, NONE, READ, WRITE};
use super::ranges::LiveRanges;
use super::{Checker, range, usage};
use crate::uct::{Memory, MemoryType};
use anyhow::Result;
use rustix::fs::MemfdFlags;

const CACHED: Option<MemoryType> = Some(MemoryType::GAUDI);

static READ_ONLY: [u8; 8192] = [7; 8192];

pub(super) fn run(check: &Checker<'_>) -> Result<()> {
    let (domain, ucx) = (check.domain, check.domain.ucx());
    let sizes = [1, 7, 4096, 4097, 8192, 1 << 20, 200 << 20];
    let fit = sizes.into_iter().filter(|&size| size <= check.options.max);
    let live: Vec<Memory<'_>> = fit.map(|size| domain.allocate(size)).collect::<Result<_, _>>()?;
    let mut ranges = LiveRanges::default();
    live.iter().for_each(|memory| _ = ranges.add(memory.range()));
    let mut devices = Vec::new();
    for memory in &live {
        let (start, length) = memory.range();
        for (address, length) in questions(start, length) {
            ask(check, &ranges, address, length);
        }
        let device = domain.query(start, 1).ok().map(|answer| answer.sys_device);
        let known = device.map(|device| (MemoryType::GAUDI, device));
        equal!(check, &ucx.cached(start, length), &known, "UCX's cache on {start:#x}");
        devices.push(device.and_then(|device| ucx.bus_id(device)));
    }
    // One domain has one card: all memory must have the same, known device.
    let same = devices.windows(2).all(|pair| pair[0] == pair[1]) && devices[0].is_some();
    expect!(check, same, "system devices of one card: {devices:?}");
    host(check, &ranges)?;
    // Freed memory must not be recognised any more.
    let freed: Vec<_> = live.iter().map(Memory::range).collect();
    drop(live);
    for (address, length) in freed {
        ranges.remove(address);
        [length, 1, 0].into_iter().for_each(|length| ask(check, &ranges, address, length));
    }
    host(check, &ranges)
}

/// Ranges inside, at the ends, across the ends and outside.
fn questions(start: u64, length: usize) -> Vec<(u64, usize)> {
    let end = start + length as u64;
    let mid = start + length as u64 / 2;
    let inside = [
        (start, 1),
        (start, length),
        (start, 0),
        (mid, 1),
        (mid, (end - mid) as usize),
        (mid, 0),
        (end - 1, 1),
        (end - 1, 0),
    ];
    let across_or_beyond = [
        (end - 1, 2),
        (start, length + 1),
        (mid, length),
        (start - 1, 2),
        (start - 1, length + 2),
        (start - 1, 1),
        (end, 1),
        (end, 0),
        (start, usize::MAX),
        (end - 1, usize::MAX),
        (start, 1 << 47),
    ];
    inside.into_iter().chain(across_or_beyond).collect()
}

fn ask(check: &Checker<'_>, ranges: &LiveRanges, address: u64, length: usize) {
    // `mem_query` answers for the allocation in which the range begins. Detection does not return the length of the
    // allocation, so it answers only for ranges inside one.
    let wanted = ranges.containing(address, 0);
    let inside = ranges.containing(address, length).is_some();
    let found = check.domain.query(address, length);
    let range = found.as_ref().ok().map(|answer| match answer.gaudi() {
        Some(range) if answer.registrable => range,
        _ => (0, 0),
    });
    let what = format_args!("{length} bytes at {address:#x}");
    expect!(check, range == wanted, "{what}: {found:?}, not {wanted:?}");
    let older = check.domain.query_older(address, length);
    equal!(check, &older, &[wanted.is_some(), inside], "{what}, the older calls");
}

/// Host memory of every kind, and every mapping that this process has.
fn host(check: &Checker<'_>, ranges: &LiveRanges) -> Result<()> {
    let ucx = check.domain.ucx();
    let (heap, stack) = (vec![1u8; 100_000], [0u8; 4096]);
    let code = questions as fn(u64, usize) -> Vec<(u64, usize)>;
    let program = std::fs::File::open("/proc/self/exe")?;
    let memfd = rustix::fs::memfd_create("ucp-check", MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&memfd, 1 << 20)?;
    let maps = [
        HostMap::anonymous(WRITE, 1 << 20)?,
        HostMap::anonymous(NONE, 1 << 30)?,
        HostMap::anonymous(WRITE, 64 << 30)?,
        HostMap::file(&program, READ, libc::MAP_PRIVATE, 4096)?,
        HostMap::file(&memfd, WRITE, libc::MAP_SHARED, 1 << 20)?,
    ];
    let mut asked = vec![
        (0, 1),
        (0, 0),
        (1, usize::MAX),
        (u64::MAX, 1),
        (u64::MAX - 10, 100),
        range(&heap),
        range(&stack),
        range(&READ_ONLY),
        (code as usize as u64, 16),
    ];
    asked.extend(maps.iter().map(|map| (map.address(), map.length)));
    for (address, length) in asked {
        ask(check, ranges, address, length);
        let length = length.min(1 << 40);
        if address.checked_add(length as u64).is_some() {
            let right = ucx.cached_type(address, length) != CACHED;
            expect!(check, right, "UCX's cache on {length} bytes at {address:#x}");
        }
    }
    for map in usage::mappings()?.iter() {
        let (start, end) = map.address;
        let length = (end - start) as usize;
        let accessible = usage::MMPermissions::READ
            | usage::MMPermissions::WRITE
            | usage::MMPermissions::EXECUTE;
        for (address, length) in [(start, length), (start + length as u64 / 2, 1), (end - 1, 1)] {
            ask(check, ranges, address, length);
            // On a first-generation card, a reservation keeps the card's addresses free of host memory.
            if map.perms.intersects(accessible) {
                let right = ucx.cached_type(address, length) != CACHED;
                expect!(check, right, "UCX's cache on {map:?}");
            }
        }
    }
    Ok(())
}

/// UCX's memory-type cache must still report a range around freed memory as Gaudi memory. So freed memory stays in it: it
/// does not join pieces that only touch, and would not recognise a range across two of them.
pub(super) fn holes(check: &Checker<'_>) -> Result<()> {
    let cached = |address, length, what: &str| {
        check.equal(&check.domain.ucx().cached_type(address, length), &CACHED, what);
    };
    let mut live = Vec::new();
    for _ in 0..9 {
        live.push(check.domain.allocate(1 << 20)?);
    }
    let start = live.iter().map(Memory::address).min().unwrap_or(0);
    let end = live.iter().map(|memory| memory.address() + (1 << 20)).max().unwrap_or(0);
    let length = (end - start) as usize;
    cached(start, length, "before anything was freed");
    for n in [4, 6, 1] {
        drop(live.swap_remove(n));
        cached(start, length, "around freed memory");
    }
    // Reuse the hole with memory that crosses the ends of the old allocations.
    let again = check.domain.allocate((1 << 20) + 4096)?;
    cached(again.address(), again.len(), "in the place of freed memory");
    Ok(())
}
