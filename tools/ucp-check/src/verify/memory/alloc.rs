//! `alloc`: allocations of every size, all alive at once, disjoint, freed in any order, and again. `exhaust`: allocates
//! all there is, repeatedly. `keys`: remote keys packed, unpacked and released.

use super::ranges::LiveRanges;
use super::{Checker, range, usage};
use crate::pattern::mix;
use crate::uct::{Memory, Status};
use anyhow::Result;
use std::cmp::Ordering;

const SIZES: [usize; 15] = [
    1,
    2,
    63,
    64,
    65,
    4095,
    4096,
    4097,
    65536,
    (1 << 20) - 1,
    1 << 20,
    (1 << 20) + 1,
    16 << 20,
    100 << 20,
    256 << 20,
];
/// More bytes than any card has.
const TOO_MUCH: usize = 1 << 50;

pub(super) fn run(check: &Checker<'_>) -> Result<()> {
    let domain = check.domain;
    for round in 0..3 {
        let mut ranges = LiveRanges::default();
        let mut live: Vec<Memory<'_>> = Vec::new();
        for size in SIZES.into_iter().filter(|&size| size <= check.options.max) {
            for _ in 0..if size <= 65536 { 3 } else { 1 } {
                let memory = domain.allocate(size)?;
                let length = memory.len();
                expect!(check, length >= size, "{size} bytes asked for, {length} given");
                add(check, &mut ranges, &memory);
                live.push(memory);
            }
        }
        live.iter().for_each(|memory| whole(check, memory));
        let mut draw = mix(check.options.seed ^ round);
        while !live.is_empty() {
            draw = mix(draw);
            let (address, length) = live.swap_remove(draw as usize % live.len()).range();
            ranges.remove(address);
            let found = domain.query(address, length);
            expect!(check, found.is_err(), "{address:#x} is freed, but {found:?}");
            live.first().into_iter().for_each(|other| whole(check, other));
        }
    }
    let quiet = |length| domain.allocate_on(length, true, None);
    check.refused(quiet(0), Status::INVALID_PARAM, "allocating 0 bytes");
    check.refused(quiet(TOO_MUCH), Status::NO_MEMORY, "allocating more than there is");
    let after = domain.allocate(4096);
    expect!(check, after.is_ok(), "allocating after a refusal: {:?}", after.err());
    Ok(())
}

/// Adds an allocation to the live ones, which it must not overlap.
pub(super) fn add(check: &Checker<'_>, ranges: &mut LiveRanges, memory: &Memory<'_>) {
    let (address, length) = memory.range();
    let free = ranges.add((address, length));
    expect!(check, free, "{length} bytes at {address:#x} overlap live memory");
}

fn whole(check: &Checker<'_>, memory: &Memory<'_>) {
    let found = check.domain.query(memory.address(), memory.len());
    check.equal(&found.map(|it| it.gaudi()), &Ok(Some(memory.range())), "what an allocation is");
}

/// Fills the card in pieces until it is full, frees all of them, and must get as many again.
pub(super) fn exhaust(check: &Checker<'_>) -> Result<()> {
    let (domain, piece) = (check.domain, check.options.max);
    let mut counts = Vec::new();
    for round in 0..4 {
        let (mut ranges, mut live) = (LiveRanges::default(), Vec::new());
        let refused = loop {
            match domain.allocate_on(piece, true, None) {
                Err(error) => break error.status,
                Ok(memory) => {
                    add(check, &mut ranges, &memory);
                    live.push(memory);
                }
            }
        };
        check.equal(&refused, &Status::NO_MEMORY, "the end of the card's memory");
        counts.push(live.len());
        // Another order each time; now and then a dma-buf stays open across the frees.
        let mut kept = None;
        while !live.is_empty() {
            let at = mix(check.options.seed ^ (live.len() as u64) << round) as usize % live.len();
            let memory = live.swap_remove(at);
            if round % 2 == 1 && kept.is_none() {
                kept = domain.export(memory.address(), 1)?;
            }
        }
        if kept.is_some() {
            // The driver keeps exported memory; the rest can be allocated again.
            let some = domain.allocate(piece);
            expect!(check, some.is_ok(), "with an open dma-buf: {:?}", some.err());
        }
    }
    let same = counts.windows(2).all(|pair| pair[0] == pair[1]) && counts[0] > 0;
    expect!(check, same, "pieces of {piece} bytes, round by round: {counts:?}");
    println!("{} pieces of {piece} bytes, each round", counts[0]);
    Ok(())
}

pub(super) fn keys(check: &Checker<'_>) -> Result<()> {
    /// Bytes behind a key must not change.
    const GUARD: u8 = 0xa5;
    let domain = check.domain;
    let size = domain.attributes()?.rkey_packed_size;
    let (memory, host) = (domain.allocate(10_000)?, vec![0u8; 10_000]);
    let (device, start) = (memory.address(), range(&host).0);
    let of_device = domain.register(device, 10_000, None)?;
    let of_host = domain.register_slice(&host)?;
    let sys_device = domain.query(device, 1)?.sys_device;
    let descriptors = usage::descriptors()?;
    for round in 0..1000 {
        for which in 0..3 {
            let mut buffer = vec![GUARD; size + 64];
            match which {
                0 => memory.pack(&mut buffer)?,
                1 => of_device.pack(device + 4096, 100, &mut buffer)?,
                _ => of_host.pack(start + 1, 100, &mut buffer)?,
            }
            let intact = buffer[size..].iter().all(|&byte| byte == GUARD);
            expect!(check, intact, "key {which} is longer than {size} bytes");
            let key = domain.unpack(&buffer[..size], (round % 2 == 0).then_some(sys_device));
            expect!(check, key.is_ok(), "key {which} does not unpack: {:?}", key.err());
        }
    }
    let mut buffer = vec![0; size];
    memory.pack(&mut buffer)?;
    let (one, other) = (domain.unpack(&buffer, None)?, domain.unpack(&buffer, None)?);
    check.equal(&one.compare(&one)?, &Ordering::Equal, "a key and itself");
    let (there, back) = (one.compare(&other)?, other.compare(&one)?);
    check.equal(&there, &back.reverse(), "two keys, compared both ways");
    drop((one, other));
    check.refused(domain.pack_nothing(size), Status::INVALID_PARAM, "a key of no memory");
    check.equal(&usage::descriptors()?, &descriptors, "descriptors after 3000 keys");
    println!("keys of {size} bytes");
    Ok(())
}
