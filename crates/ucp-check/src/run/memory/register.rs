//! `register`: host and device memory, every odd range, and copies with what was registered.

use super::mapping::Map;
use super::{Scene, Tally, process};
use crate::pattern::{fill, mix};
use crate::uct::{Copier, Status};
use anyhow::Result;
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::OwnedFd;

static READ_ONLY: [u8; 3 * 4096] = [0x5a; 3 * 4096];

pub(super) fn run(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    host_memory(scene, tally)?;
    device_memory(scene, tally)?;
    read_only_sources(scene, tally)?;
    unmapped(scene, tally)
}

/// Unaligned, overlapping and equal ranges, each good for copies as long as it is registered.
fn host_memory(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let copier = Copier::open(scene.domain, scene.transport())?;
    let memory = scene.domain.allocate(1 << 20, false)?;
    let mut host = vec![0u8; 1 << 20];
    fill(mix(scene.options.seed), 0, &mut host);
    let start = host.as_ptr().addr() as u64;
    let zero = scene.domain.register(start, 0, None).err().map(|error| error.status);
    tally.equal(&zero, &Some(Status::INVALID_PARAM), "registering 0 bytes");
    for (at, length) in [(0, 1 << 20), (1, 1), (3, 5000), (4096, 4096), (4095, 65_537)] {
        let first = scene.domain.register(start + at as u64, length, None)?;
        let again = scene.domain.register(start + at as u64, length, Some(false))?;
        let around = scene.domain.register(start, at + length, None)?;
        let part = &host[at..at + length];
        for (name, registration) in [("first", &first), ("again", &again), ("around", &around)] {
            let to = memory.address() + (at as u64 ^ 1) % 4096;
            let length = length.min(memory.len() - 4096);
            copier.put_registered(&part[..length], registration, to)?;
            let mut back = vec![0; length];
            let by = scene.domain.register(back.as_ptr().addr() as u64, length, None)?;
            copier.get_registered(to, &mut back, &by)?;
            tally.expect(back == part[..length], || format!("{length} bytes at {at}, {name}"));
        }
        // Each registration stands for itself.
        drop(first);
        copier.put_registered(&part[..1], &again, memory.address())?;
        drop(around);
        let mut back = [0];
        copier.get(memory.address(), &mut back)?;
        tally.equal(&back[0], &part[0], "a byte by the registration that is left");
    }
    Ok(())
}

fn device_memory(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let memory = scene.domain.allocate(100_000, false)?;
    let (start, length) = (memory.address(), memory.len());
    for hint in [None, Some(true)] {
        for (at, size) in [(0, length), (0, 1), (4096, 4096), (1, 7), (length - 1, 1)] {
            let one = scene.domain.register(start + at as u64, size, hint);
            let two = scene.domain.register(start + at as u64, size, hint);
            tally.expect(one.is_ok() && two.is_ok(), || {
                format!("{size} bytes at {at} of device memory: {:?} {:?}", one.err(), two.err())
            });
        }
    }
    drop(memory);
    let other = scene.domain.allocate(4096, false)?;
    let end = other.address() + other.len() as u64;
    for (address, size, what) in [
        (end - 1, 2, "a range that sticks out"),
        (other.address(), 4097, "a range that is too long"),
        (start + 50_000, 1, "freed memory"),
        (0x1000, 1, "host memory"),
    ] {
        let refused = scene.domain.register(address, size, Some(true));
        let status = refused.err().map(|error| error.status);
        let named = format!("{what}, registered as Gaudi memory");
        tally.equal(&status, &Some(Status::INVALID_ADDR), named);
    }
    Ok(())
}

/// Memory that no device may write to still is a source of copies.
fn read_only_sources(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let copier = Copier::open(scene.domain, scene.transport())?;
    let size = 1 << 20;
    let memory = scene.domain.allocate(size, false)?;
    let pattern = sealed_file(scene, size)?;
    let read = ProtFlags::READ;
    let shared = Map::file(&pattern, read, MapFlags::SHARED, size)?;
    let private = Map::file(&pattern, read, MapFlags::PRIVATE, size)?;
    let program = Map::file(std::fs::File::open("/proc/self/exe")?, read, MapFlags::PRIVATE, size)?;
    let zeroes = Map::anonymous(read, size)?;
    // SAFETY: readable mappings of files that nobody writes to while this runs.
    let (shared, private, program, zeroes) =
        unsafe { (shared.bytes(), private.bytes(), program.bytes(), zeroes.bytes()) };
    for (source, what) in [
        (&READ_ONLY[..], "read-only data"),
        (shared, "a read-only shared file"),
        (private, "a read-only private file"),
        (program, "the program's own file"),
        (zeroes, "untouched read-only memory"),
    ] {
        for (at, length) in [(0, source.len()), (1, 4097), (5, 3)] {
            let part = &source[at..at + length];
            let by = scene.domain.register(part.as_ptr().addr() as u64, length, None)?;
            copier.put(&vec![0xee; length], memory.address())?;
            let done = copier.put_registered(part, &by, memory.address());
            let mut back = vec![0; length];
            copier.get(memory.address(), &mut back)?;
            tally.expect(done.is_ok() && back == part, || {
                format!("{length} bytes from {what}: {done:?}")
            });
        }
    }
    Ok(())
}

/// A file in memory, full of a pattern.
fn sealed_file(scene: &Scene<'_>, size: usize) -> Result<OwnedFd> {
    let mut bytes = vec![0; size];
    fill(mix(scene.options.seed ^ 77), 0, &mut bytes);
    let file = rustix::fs::memfd_create("ucp-check", MemfdFlags::CLOEXEC)?;
    let mut at = 0;
    while at < size {
        at += rustix::io::pwrite(&file, &bytes[at..], at as u64)?;
    }
    Ok(file)
}

/// A range where nothing is mapped is recorded like any other, and given up again.
fn unmapped(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let gone = Map::anonymous(ProtFlags::empty(), 1 << 20)?.address();
    for (address, length) in [(gone, 1 << 20), (gone + 1, 1), (1, 1), (u64::MAX - 4096, 4096)] {
        let first = scene.domain.register(address, length, None).map(drop);
        let second = scene.domain.register(address, length, None).map(drop);
        tally.equal(&first, &second, format_args!("{length} unmapped bytes at {address:#x}"));
    }
    // The domain is as good as before.
    tally.expect(scene.domain.allocate(1, false).is_ok(), || "nothing works any more".into());
    Ok(())
}

/// What a program that never uses a Gaudi pays for registering its memory: nothing.
pub(super) fn host_only(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    const SIZE: usize = 8 << 30;
    const PIECE: usize = 1 << 20;
    let write = ProtFlags::READ | ProtFlags::WRITE;
    let host = Map::anonymous(write, SIZE)?;
    let mut registrations = Vec::with_capacity(SIZE / PIECE + 1);
    let (descriptors, mappings) = (process::descriptors()?, process::mappings()?.len());
    let resident = process::resident()?;
    registrations.push(scene.domain.register(host.address(), SIZE, None)?);
    for at in (0..SIZE).step_by(PIECE) {
        let address = host.address() + at as u64;
        registrations.push(scene.domain.register(address, PIECE, Some(false))?);
    }
    let grown = process::resident()?.saturating_sub(resident);
    // Bookkeeping for 8193 registrations, not the pages behind them.
    tally.expect(grown < 64 << 20, || format!("{grown} bytes became resident"));
    tally.equal(&process::descriptors()?, &descriptors, "descriptors: a card was opened");
    let more = process::mappings()?.len().saturating_sub(mappings);
    tally.expect(more <= 16, || format!("{more} mappings were added"));
    println!("{} registrations of {} GiB, {grown} bytes resident", registrations.len(), SIZE >> 30);
    Ok(())
}
