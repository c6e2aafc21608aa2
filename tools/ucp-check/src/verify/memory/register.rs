//! `register`: host and device memory, odd ranges of every kind, and copies with the registrations.

use super::host_map::{HostMap, NONE, READ, WRITE};
use super::{Checker, range, usage};
use crate::uct::{MemoryType, Status};
use anyhow::Result;
use rustix::fs::MemfdFlags;
use std::fs::File;
use std::io::Write;

static READ_ONLY: [u8; 3 * 4096] = [0x5a; 3 * 4096];

pub(super) fn run(check: &Checker<'_>) -> Result<()> {
    host_memory(check)?;
    device_memory(check)?;
    read_only_sources(check)?;
    unmapped(check)
}

/// Unaligned, overlapping and equal ranges: copies must work with each as long as it is registered.
fn host_memory(check: &Checker<'_>) -> Result<()> {
    let (domain, copier) = (check.domain, check.copier()?);
    let (memory, host) = (domain.allocate(1 << 20)?, check.bytes(0, 1 << 20));
    let start = range(&host).0;
    check.refused(domain.register(start, 0, None), Status::INVALID_PARAM, "registering 0 bytes");
    for (at, length) in [(0, 1 << 20), (1, 1), (3, 5000), (4096, 4096), (4095, 65_537)] {
        let first = domain.register(start + at as u64, length, None)?;
        let again = domain.register(start + at as u64, length, Some(MemoryType::HOST))?;
        let around = domain.register(start, at + length, None)?;
        let part = &host[at..at + length];
        for (name, registration) in [("first", &first), ("again", &again), ("around", &around)] {
            let to = memory.address() + (at as u64 ^ 1) % 4096;
            let length = length.min(memory.len() - 4096);
            copier.put_zcopy(&part[..length], Some(registration), to)?;
            let mut back = vec![0; length];
            let by = domain.register_slice(&back)?;
            copier.get_zcopy(to, &mut back, Some(&by))?;
            expect!(check, back == part[..length], "{length} bytes at {at}, {name}");
        }
        // Each registration is independent of the others.
        drop(first);
        copier.put_zcopy(&part[..1], Some(&again), memory.address())?;
        drop(around);
        let back = copier.read(memory.address(), 1)?;
        check.equal(&back[0], &part[0], "a byte by the registration that is left");
    }
    Ok(())
}

fn device_memory(check: &Checker<'_>) -> Result<()> {
    let (domain, gaudi) = (check.domain, Some(MemoryType::GAUDI));
    let (start, length) = {
        let memory = domain.allocate(100_000)?;
        let (start, length) = memory.range();
        for kind in [None, gaudi] {
            for (at, size) in [(0, length), (0, 1), (4096, 4096), (1, 7), (length - 1, 1)] {
                let register = || domain.register(start + at as u64, size, kind);
                let (one, two) = (register(), register());
                let right = one.is_ok() && two.is_ok();
                let errors = (one.err(), two.err());
                expect!(check, right, "{size} bytes at {at} of device memory: {errors:?}");
            }
        }
        (start, length)
    };
    assert!(length > 50_000);
    let other = domain.allocate(4096)?;
    let end = other.address() + other.len() as u64;
    for (address, size, what) in [
        (end - 1, 2, "a range past the end"),
        (other.address(), 4097, "a range that is too long"),
        (start + 50_000, 1, "freed memory"),
        (0x1000, 1, "host memory"),
    ] {
        let refused = domain.register(address, size, gaudi);
        let what = format_args!("{what}, registered as Gaudi memory");
        check.refused(refused, Status::INVALID_ADDR, what);
    }
    Ok(())
}

/// Memory that devices may not write to can still be a source of copies.
fn read_only_sources(check: &Checker<'_>) -> Result<()> {
    let (size, copier) = (1 << 20, check.copier()?);
    let memory = check.domain.allocate(size)?;
    let file = rustix::fs::memfd_create("ucp-check", MemfdFlags::CLOEXEC)?;
    File::from(file.try_clone()?).write_all(&check.bytes(77, size))?;
    let maps = [
        ("a read-only shared file", HostMap::file(&file, READ, libc::MAP_SHARED, size)?),
        ("a read-only private file", HostMap::file(&file, READ, libc::MAP_PRIVATE, size)?),
        (
            "the program's own file",
            HostMap::file(File::open("/proc/self/exe")?, READ, libc::MAP_PRIVATE, size)?,
        ),
        ("untouched read-only memory", HostMap::anonymous(READ, size)?),
    ];
    // SAFETY: readable mappings of files that are not written to while this runs.
    let mapped = maps.iter().map(|(what, map)| (*what, unsafe { map.bytes() }));
    for (what, source) in [("read-only data", &READ_ONLY[..])].into_iter().chain(mapped) {
        for (at, length) in [(0, source.len()), (1, 4097), (5, 3)] {
            let part = &source[at..at + length];
            let by = check.domain.register_slice(part)?;
            copier.put(&vec![0xee; length], memory.address())?;
            let done = copier.put_zcopy(part, Some(&by), memory.address());
            let right = done.is_ok() && copier.read(memory.address(), length)? == part;
            expect!(check, right, "{length} bytes from {what}: {done:?}");
        }
    }
    Ok(())
}

/// A range where nothing is mapped can be registered and deregistered like any other.
fn unmapped(check: &Checker<'_>) -> Result<()> {
    let gone = HostMap::anonymous(NONE, 1 << 20)?.address();
    for (address, length) in [(gone, 1 << 20), (gone + 1, 1), (1, 1), (u64::MAX - 4096, 4096)] {
        let register = || check.domain.register(address, length, None).map(drop);
        let what = format_args!("{length} unmapped bytes at {address:#x}");
        check.equal(&register(), &register(), what);
    }
    // The domain must work as before.
    check.expect(check.domain.allocate(1).is_ok(), "nothing works any more");
    Ok(())
}

/// A program that never uses a Gaudi must pay nothing for registering its memory.
pub(super) fn host_only(check: &Checker<'_>) -> Result<()> {
    const SIZE: usize = 8 << 30;
    const PIECE: usize = 1 << 20;
    let host = HostMap::anonymous(WRITE, SIZE)?;
    let mut registrations = Vec::with_capacity(SIZE / PIECE + 1);
    let before = usage::Usage::now()?;
    registrations.push(check.domain.register(host.address(), SIZE, None)?);
    for at in (0..SIZE).step_by(PIECE) {
        let address = host.address() + at as u64;
        registrations.push(check.domain.register(address, PIECE, Some(MemoryType::HOST))?);
    }
    let now = usage::Usage::now()?;
    let grown = now.resident.saturating_sub(before.resident);
    // This allows for the bookkeeping of 8193 registrations, but not for the pages behind them.
    expect!(check, grown < 64 << 20, "{grown} bytes became resident");
    check.equal(&now.descriptors, &before.descriptors, "descriptors: a card was opened");
    let more = now.mappings.saturating_sub(before.mappings);
    expect!(check, more <= 16, "{more} mappings were added");
    println!("{} registrations of {} GiB, {grown} bytes resident", registrations.len(), SIZE >> 30);
    Ok(())
}
