//! `detect`: which ranges are Gaudi memory, by address and length, and that no host memory is.

use super::ledger::Ledger;
use super::mapping::Map;
use super::{Scene, Tally, process};
use crate::uct::{Memory, Uct};
use anyhow::Result;
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

/// `ucs_memory_type_t` of Gaudi memory, as the memory-type cache stores it.
const GAUDI: u32 = 9;

static READ_ONLY: [u8; 8192] = [7; 8192];

pub(super) fn run(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let uct = scene.domain.uct();
    let live: Vec<Memory<'_>> = [1, 7, 4096, 4097, 8192, 1 << 20, 200 << 20]
        .into_iter()
        .filter(|&size| size <= scene.options.max)
        .map(|size| scene.domain.allocate(size, false))
        .collect::<Result<_, _>>()?;
    let mut ledger = Ledger::default();
    for memory in &live {
        ledger.add(memory.address(), memory.len());
    }
    for memory in &live {
        let (start, length) = (memory.address(), memory.len());
        for (address, length) in questions(start, length) {
            ask(scene, tally, &ledger, address, length);
        }
        let cached = uct.cached_type(start, length);
        tally.equal(&cached, &Some(GAUDI), format_args!("UCX's cache on {start:#x}"));
    }
    same_device(tally, scene, &live);
    host(scene, tally, &ledger)?;
    // Freed memory is nobody's.
    let freed: Vec<(u64, usize)> =
        live.iter().map(|memory| (memory.address(), memory.len())).collect();
    drop(live);
    for (address, length) in freed {
        ledger.remove(address);
        ask(scene, tally, &ledger, address, length);
        ask(scene, tally, &ledger, address, 1);
        ask(scene, tally, &ledger, address, 0);
    }
    host(scene, tally, &ledger)
}

/// Ranges inside, at the ends, across the ends and beyond.
fn questions(start: u64, length: usize) -> Vec<(u64, usize)> {
    let end = start + length as u64;
    let mid = start + length as u64 / 2;
    vec![
        (start, 1),
        (start, length),
        (start, 0),
        (mid, 1),
        (mid, (end - mid) as usize),
        (mid, 0),
        (end - 1, 1),
        (end - 1, 0),
        // Across an end, or beyond it.
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
    ]
}

fn ask(scene: &Scene<'_>, tally: &mut Tally, ledger: &Ledger, address: u64, length: usize) {
    // `mem_query` answers for the allocation that the range begins in; detection, which cannot say how
    // far that goes, for ranges inside one.
    let wanted = ledger.holds(address, 0);
    let inside = ledger.holds(address, length).is_some();
    let found = scene.domain.query(address, length);
    let range = match &found {
        Ok(answer) if answer.gaudi && answer.registrable => Some((answer.base, answer.length)),
        Ok(_) => Some((0, 0)),
        Err(_) => None,
    };
    let what = || format!("{length} bytes at {address:#x}");
    tally.expect(range == wanted, || format!("{}: {found:?}, not {wanted:?}", what()));
    let older = scene.domain.query_older(address, length);
    tally.equal(&older, &[wanted.is_some(), inside], format_args!("{}, the older calls", what()));
}

/// One domain, one card: all memory has the same, known device.
fn same_device(tally: &mut Tally, scene: &Scene<'_>, live: &[Memory<'_>]) {
    let devices: Vec<Option<String>> = live
        .iter()
        .map(|memory| {
            let answer = scene.domain.query(memory.address(), 1).ok()?;
            scene.domain.uct().bus_id(answer.sys_device)
        })
        .collect();
    let same = devices.windows(2).all(|pair| pair[0] == pair[1]) && devices[0].is_some();
    tally.expect(same, || format!("system devices of one card: {devices:?}"));
}

/// Host memory of every kind, and every mapping that this process has.
fn host(scene: &Scene<'_>, tally: &mut Tally, ledger: &Ledger) -> Result<()> {
    let uct = scene.domain.uct();
    let heap = vec![1u8; 100_000];
    let stack = [0u8; 4096];
    let code = questions as fn(u64, usize) -> Vec<(u64, usize)>;
    let file = std::fs::File::open("/proc/self/exe")?;
    let memfd = rustix::fs::memfd_create("ucp-check", MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&memfd, 1 << 20)?;
    let read = ProtFlags::READ;
    let write = ProtFlags::READ | ProtFlags::WRITE;
    let anonymous = |prot, length| Map::anonymous(prot, length);
    let maps = [
        anonymous(write, 1 << 20)?,
        anonymous(ProtFlags::empty(), 1 << 30)?,
        anonymous(write, 64 << 30)?,
        Map::file(&file, read, MapFlags::PRIVATE, 4096)?,
        Map::file(&memfd, write, MapFlags::SHARED, 1 << 20)?,
    ];
    let mut places = vec![
        (0, 1),
        (0, 0),
        (1, usize::MAX),
        (u64::MAX, 1),
        (u64::MAX - 10, 100),
        (heap.as_ptr().addr() as u64, heap.len()),
        (stack.as_ptr().addr() as u64, stack.len()),
        (READ_ONLY.as_ptr().addr() as u64, READ_ONLY.len()),
        (code as usize as u64, 16),
    ];
    places.extend(maps.iter().map(|map| (map.address(), map.length)));
    for (address, length) in places {
        ask(scene, tally, ledger, address, length);
        uncached(uct, tally, address, length.min(1 << 40));
    }
    for map in process::mappings()? {
        let length = (map.end - map.start) as usize;
        let mid = map.start + length as u64 / 2;
        for (address, length) in [(map.start, length), (mid, 1), (map.end - 1, 1)] {
            ask(scene, tally, ledger, address, length);
            // A first-generation card's addresses are kept free of host memory by a reservation.
            if map.accessible {
                let cached = uct.cached_type(address, length);
                tally.expect(cached != Some(GAUDI), || format!("UCX's cache on {}", map.line));
            }
        }
    }
    Ok(())
}

fn uncached(uct: &Uct, tally: &mut Tally, address: u64, length: usize) {
    let Some(_) = address.checked_add(length as u64) else { return };
    let cached = uct.cached_type(address, length);
    tally.expect(cached != Some(GAUDI), || {
        format!("UCX's cache takes {length} bytes of host memory at {address:#x} for Gaudi memory")
    });
}
