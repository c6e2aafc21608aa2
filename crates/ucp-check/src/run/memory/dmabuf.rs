//! `dmabuf`: descriptors and offsets for any range, and, through an importer, the bytes behind them.

use super::importer::Importer;
use super::{Scene, Tally, process};
use crate::pattern::{fill, mix};
use crate::uct::{Copier, Memory};
use anyhow::{Context, Result};
use rustix::fs::SeekFrom;
use rustix::io::FdFlags;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Small ones share a page of the driver's; the last is large enough to cross many host pages.
const SIZES: [usize; 6] = [1, 100, 4096, 4097, 70_000, 3 << 20];

pub(super) fn run(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let live: Vec<Memory<'_>> = SIZES
        .into_iter()
        .map(|size| scene.domain.allocate(size, false))
        .collect::<Result<_, _>>()?;
    if !scene.domain.attributes()?.dmabuf.gaudi() {
        return offers_none(scene, tally, &live);
    }
    let before = process::descriptors()?;
    drop(scene.domain.export(live[0].address(), 1)?);
    let added = process::descriptors()? as i64 - before as i64;
    println!("the first export added {added} descriptors to the process");
    let settled = process::descriptors()?;
    let mut pages: Vec<(u64, (u64, u64))> = Vec::new();
    for memory in &live {
        for (offset, length) in parts(memory.len()) {
            let address = memory.address() + offset as u64;
            pages.extend(descriptor(scene, tally, address, length)?);
        }
    }
    let mut shared = false;
    for (n, (start, file)) in pages.iter().enumerate() {
        for (other_start, other_file) in &pages[n + 1..] {
            // Ranges of one page have one dma-buf, ranges of two have two.
            tally.expect((start == other_start) == (file == other_file), || {
                format!("dma-bufs {file:?} from {start:#x}, {other_file:?} from {other_start:#x}")
            });
            shared |= file == other_file;
        }
    }
    tally.expect(shared, || "no two small allocations share the dma-buf of a page".into());
    refusals(scene, tally, &live)?;
    tally.equal(&process::descriptors()?, &settled, "descriptors left open");
    outlives_its_memory(scene, tally)?;
    match scene.options.importer {
        Some(socket) => content(scene, tally, &live, &mut Importer::connect(socket)?),
        None => {
            println!("content of dma-bufs not checked: no --importer");
            Ok(())
        }
    }
}

/// Where to look in an allocation: the whole, its first and last byte, and odd parts of it.
fn parts(size: usize) -> Vec<(usize, usize)> {
    let mut parts = vec![(0, size), (0, 1), (size - 1, 1)];
    if size > 8 {
        parts.push((size / 3, size / 3));
        parts.push((size / 2 + 1, 1));
    }
    if size > 8192 {
        parts.extend([(4096, 4096), (4095, 2), (4097, size - 4097)]);
    }
    parts
}

/// Asks twice for the same range; returns where the dma-buf starts and which file it is.
fn descriptor(
    scene: &Scene<'_>,
    tally: &mut Tally,
    address: u64,
    length: usize,
) -> Result<Option<(u64, (u64, u64))>> {
    let what = format!("dma-buf of {length} bytes at {address:#x}");
    let before = process::descriptors()?;
    let first = scene.domain.export(address, length)?;
    let second = scene.domain.export(address, length)?;
    let (Some((fd, offset)), Some((again, same_offset))) = (first, second) else {
        tally.expect(false, || format!("{what}: none"));
        return Ok(None);
    };
    tally.expect(fd.as_raw_fd() != again.as_raw_fd(), || format!("{what}: not a fresh one"));
    tally.equal(&same_offset, &offset, format_args!("{what}: offset, asked again"));
    tally.equal(&scene.domain.export_offset(address, length)?, &offset, format_args!("{what}"));
    tally.equal(&process::descriptors()?, &(before + 2), "descriptors with two handed out");
    for fd in [&fd, &again] {
        let flags = rustix::io::fcntl_getfd(fd)?;
        tally.expect(flags.contains(FdFlags::CLOEXEC), || format!("{what}: not close-on-exec"));
        let size = rustix::fs::seek(fd, SeekFrom::End(0)).context("lseek on a dma-buf")?;
        let end = offset + length as u64;
        tally.expect(end <= size, || format!("{what}: ends at {end}, but its size is {size}"));
    }
    let file = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).map(|stat| (stat.st_dev, stat.st_ino));
    let (identity, other) = (file(fd.as_fd())?, file(again.as_fd())?);
    tally.equal(&other, &identity, format_args!("{what}: the file"));
    drop(fd);
    // Closing ours must leave the other alone.
    tally.expect(file(again.as_fd()).is_ok(), || format!("{what}: closed more than once"));
    drop(again);
    tally.equal(&process::descriptors()?, &before, "descriptors after closing what was handed out");
    Ok(Some((address.wrapping_sub(offset), identity)))
}

fn offers_none(scene: &Scene<'_>, tally: &mut Tally, live: &[Memory<'_>]) -> Result<()> {
    let before = process::descriptors()?;
    for memory in live {
        let found = scene.domain.export(memory.address(), memory.len());
        let none = matches!(found, Ok(None) | Err(_));
        tally.expect(none, || format!("a dma-buf, though none are offered: {found:?}"));
        let still = scene.domain.query(memory.address(), memory.len());
        tally.expect(still.is_ok_and(|it| it.gaudi), || "not even detected any more".into());
    }
    tally.equal(&process::descriptors()?, &before, "descriptors");
    println!("no dma-bufs are offered");
    Ok(())
}

/// Host memory, ranges that stick out, freed memory: no descriptor, nothing left open.
fn refusals(scene: &Scene<'_>, tally: &mut Tally, live: &[Memory<'_>]) -> Result<()> {
    let host = vec![0u8; 8192];
    let freed = {
        let memory = scene.domain.allocate(5000, false)?;
        memory.address()
    };
    let memory = &live[live.len() - 1];
    let end = memory.address() + memory.len() as u64;
    let before = process::descriptors()?;
    for (address, length, what) in [
        (host.as_ptr().addr() as u64, host.len(), "host memory"),
        (end - 1, 2, "a range that sticks out"),
        (memory.address(), usize::MAX, "a range without end"),
        (freed, 5000, "freed memory"),
        (0, 1, "nothing"),
    ] {
        let found = scene.domain.export(address, length);
        tally.expect(!matches!(found, Ok(Some(_))), || format!("dma-buf of {what}: {found:?}"));
    }
    tally.equal(&process::descriptors()?, &before, "descriptors after refusals");
    Ok(())
}

/// A descriptor that was handed out is ours: freeing the memory does not close it.
fn outlives_its_memory(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let memory = scene.domain.allocate(4096, false)?;
    let exported = scene.domain.export(memory.address(), 4096)?;
    let (fd, _) = exported.context("no dma-buf")?;
    drop(memory);
    let open = rustix::io::fcntl_getfd(&fd);
    tally.expect(open.is_ok(), || format!("closed with the memory: {open:?}"));
    Ok(())
}

/// Bytes written through the copy path are read by the importer, and the other way round.
fn content(
    scene: &Scene<'_>,
    tally: &mut Tally,
    live: &[Memory<'_>],
    importer: &mut Importer,
) -> Result<()> {
    let copier = Copier::open(scene.domain, scene.transport())?;
    let mut images: Vec<Vec<u8>> = Vec::new();
    for (n, memory) in live.iter().enumerate() {
        let mut image = vec![0; memory.len()];
        fill(mix(scene.options.seed ^ n as u64), 0, &mut image);
        copier.put(&image, memory.address())?;
        images.push(image);
    }
    for (memory, image) in live.iter().zip(&mut images) {
        for (at, length) in parts(memory.len()) {
            let address = memory.address() + at as u64;
            let what = format!("{length} bytes at {address:#x}");
            let exported = scene.domain.export(address, length)?;
            let (fd, offset) = exported.with_context(|| format!("no dma-buf of {what}"))?;
            let bytes = importer.read(fd.as_fd(), offset, length)?;
            tally.expect(bytes == image[at..at + length], || {
                format!("{what}: the importer reads something else at offset {offset}")
            });
            let fresh: Vec<u8> = image[at..at + length].iter().map(|byte| !byte).collect();
            importer.write(fd.as_fd(), offset, &fresh)?;
            image[at..at + length].copy_from_slice(&fresh);
        }
    }
    // All at the end: whatever was written in the wrong place has damaged a neighbour.
    for (memory, image) in live.iter().zip(&images) {
        let mut bytes = vec![0; memory.len()];
        copier.get(memory.address(), &mut bytes)?;
        tally.expect(&bytes == image, || {
            format!("what the importer wrote is not in {:#x}", memory.address())
        });
    }
    println!("the importer read and wrote {} allocations", live.len());
    Ok(())
}
