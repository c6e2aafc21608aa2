//! `dmabuf`: descriptors and offsets for any range, and, through an importer, their content.

use super::{Checker, range, usage};
use crate::processes::descriptors;
use crate::uct::Memory;
use anyhow::{Context, Result, ensure};
use rustix::fs::SeekFrom;
use rustix::io::FdFlags;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Small allocations share a driver page; the last is large enough to cross many host pages.
const SIZES: [usize; 6] = [1, 100, 4096, 4097, 70_000, 3 << 20];

pub(super) fn run(check: &Checker<'_>) -> Result<()> {
    let live: Vec<Memory<'_>> =
        SIZES.into_iter().map(|size| check.domain.allocate(size)).collect::<Result<_, _>>()?;
    if !check.domain.exports()? {
        return offers_none(check, &live);
    }
    let before = usage::descriptors()?;
    drop(check.domain.export(live[0].address(), 1)?);
    let settled = usage::descriptors()?;
    let added = settled as i64 - before as i64;
    println!("the first export added {added} descriptors to the process");
    let mut pages: Vec<(u64, (u64, u64))> = Vec::new();
    for memory in &live {
        for (offset, length) in parts(memory.len()) {
            pages.extend(descriptor(check, memory.address() + offset as u64, length)?);
        }
    }
    let mut shared = false;
    for (n, (start, file)) in pages.iter().enumerate() {
        for (other_start, other_file) in &pages[n + 1..] {
            // Ranges in the same page must have the same dma-buf, ranges in different pages different ones.
            expect!(
                check,
                (start == other_start) == (file == other_file),
                "dma-bufs {file:?} from {start:#x}, {other_file:?} from {other_start:#x}"
            );
            shared |= file == other_file;
        }
    }
    check.expect(shared, "no two small allocations share the dma-buf of a page");
    rounded_up(check)?;
    refusals(check, &live)?;
    check.equal(&usage::descriptors()?, &settled, "descriptors left open");
    outlives_its_memory(check)?;
    match &check.options.importer {
        Some(socket) => content(check, &live, &mut Importer::connect(socket)?),
        None => {
            println!("content of dma-bufs not checked: no --importer");
            Ok(())
        }
    }
}

/// Ranges to check in an allocation: all of it, its first and last byte, and odd parts.
fn parts(size: usize) -> Vec<(usize, usize)> {
    let mut parts = vec![(0, size), (0, 1), (size - 1, 1)];
    if size > 8 {
        parts.extend([(size / 3, size / 3), (size / 2 + 1, 1)]);
    }
    if size > 8192 {
        parts.extend([(4096, 4096), (4095, 2), (4097, size - 4097)]);
    }
    parts
}

/// Asks twice for the same range; returns where the dma-buf starts, and the identity of its file.
fn descriptor(
    check: &Checker<'_>,
    address: u64,
    length: usize,
) -> Result<Option<(u64, (u64, u64))>> {
    let what = format!("dma-buf of {length} bytes at {address:#x}");
    let before = usage::descriptors()?;
    let (first, second) =
        (check.domain.export(address, length)?, check.domain.export(address, length)?);
    let (Some((fd, offset)), Some((again, same_offset))) = (first, second) else {
        expect!(check, false, "{what}: none");
        return Ok(None);
    };
    expect!(check, fd.as_raw_fd() != again.as_raw_fd(), "{what}: not a fresh one");
    equal!(check, &same_offset, &offset, "{what}: offset, asked again");
    check.equal(&check.domain.export_offset(address, length)?, &offset, &what);
    check.equal(&usage::descriptors()?, &(before + 2), "descriptors with two handed out");
    for fd in [&fd, &again] {
        let flags = rustix::io::fcntl_getfd(fd)?;
        expect!(check, flags.contains(FdFlags::CLOEXEC), "{what}: not close-on-exec");
        let size = rustix::fs::seek(fd, SeekFrom::End(0)).context("lseek on a dma-buf")?;
        let end = offset + length as u64;
        expect!(check, end <= size, "{what}: ends at {end}, but its size is {size}");
    }
    let file = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).map(|stat| (stat.st_dev, stat.st_ino));
    let (identity, other) = (file(fd.as_fd())?, file(again.as_fd())?);
    equal!(check, &other, &identity, "{what}: the file");
    drop(fd);
    // Closing one descriptor must not affect the other.
    expect!(check, file(again.as_fd()).is_ok(), "{what}: closed more than once");
    drop(again);
    check.equal(&usage::descriptors()?, &before, "descriptors after closing what was handed out");
    Ok(Some((address.wrapping_sub(offset), identity)))
}

fn offers_none(check: &Checker<'_>, live: &[Memory<'_>]) -> Result<()> {
    let before = usage::descriptors()?;
    for memory in live {
        let found = check.domain.export(memory.address(), memory.len());
        let none = matches!(found, Ok(None) | Err(_));
        expect!(check, none, "a dma-buf, though none are offered: {found:?}");
        let still = check.domain.query(memory.address(), memory.len());
        check.expect(still.is_ok_and(|it| it.gaudi().is_some()), "not even detected any more");
    }
    check.equal(&usage::descriptors()?, &before, "descriptors");
    println!("no dma-bufs are offered");
    Ok(())
}

/// UCP rounds ranges up before it asks: there must be a dma-buf up to the end of the last page.
fn rounded_up(check: &Checker<'_>) -> Result<()> {
    let memory = check.domain.allocate(8257)?;
    for (at, length) in [(0, 8272), (0, 3 * 4096), (8256, 16), (8256, 1)] {
        let found = check.domain.export(memory.address() + at, length);
        let some = matches!(found, Ok(Some(_)));
        expect!(check, some, "dma-buf of {length} bytes at {at} of 8257: {found:?}");
    }
    Ok(())
}

/// Host memory, ranges past the end, freed memory: no descriptor, and no descriptor leaked.
fn refusals(check: &Checker<'_>, live: &[Memory<'_>]) -> Result<()> {
    let host = vec![0u8; 8192];
    let freed = check.domain.allocate(5000)?.address();
    let (start, length) = live[live.len() - 1].range();
    let before = usage::descriptors()?;
    for ((address, length), what) in [
        (range(&host), "host memory"),
        ((start, length.next_multiple_of(4096) + 1), "a range past the last page"),
        ((start, usize::MAX), "a range without end"),
        ((freed, 5000), "freed memory"),
        ((0, 1), "nothing"),
    ] {
        let found = check.domain.export(address, length);
        let none = !matches!(found, Ok(Some(_)));
        expect!(check, none, "dma-buf of {what}: {found:?}");
    }
    check.equal(&usage::descriptors()?, &before, "descriptors after refusals");
    Ok(())
}

/// An exported descriptor is ours: freeing the memory must not close it.
fn outlives_its_memory(check: &Checker<'_>) -> Result<()> {
    let memory = check.domain.allocate(4096)?;
    let (fd, _) = check.domain.export(memory.address(), 4096)?.context("no dma-buf")?;
    drop(memory);
    let open = rustix::io::fcntl_getfd(&fd);
    expect!(check, open.is_ok(), "closed with the memory: {open:?}");
    Ok(())
}

/// The importer must read the bytes written through the copy path, and the other way round.
fn content(check: &Checker<'_>, live: &[Memory<'_>], importer: &mut Importer) -> Result<()> {
    let copier = check.copier()?;
    let mut images: Vec<Vec<u8>> = Vec::new();
    for (n, memory) in live.iter().enumerate() {
        let image = check.bytes(n as u64, memory.len());
        copier.put(&image, memory.address())?;
        images.push(image);
    }
    for (memory, image) in live.iter().zip(&mut images) {
        for (at, length) in parts(memory.len()) {
            let address = memory.address() + at as u64;
            let what = format!("{length} bytes at {address:#x}");
            let exported = check.domain.export(address, length)?;
            let (fd, offset) = exported.with_context(|| format!("no dma-buf of {what}"))?;
            let part = &mut image[at..at + length];
            let same = importer.read(fd.as_fd(), offset, length)? == part;
            expect!(check, same, "{what}: the importer reads something else at {offset}");
            part.iter_mut().for_each(|byte| *byte = !*byte);
            importer.write(fd.as_fd(), offset, part)?;
        }
    }
    // Compare all at the end: a write to the wrong place has damaged a neighbour.
    for (memory, image) in live.iter().zip(&images) {
        let same = &copier.read(memory.address(), memory.len())? == image;
        let address = memory.address();
        expect!(check, same, "what the importer wrote is not in {address:#x}");
    }
    println!("the importer read and wrote {} allocations", live.len());
    Ok(())
}

/// A peer that maps dma-bufs: a program at the other end of a socket. It receives a descriptor and reads or writes the
/// memory behind it, as a network device would.
///
/// A request is the letter `r` or `w`, offset and length (8 bytes each, little endian), sent together with the
/// descriptor; the bytes to write follow. The answer is one byte, 0 for success, and for `r` the bytes.
struct Importer(UnixStream);

impl Importer {
    fn connect(socket: &Path) -> Result<Importer> {
        let stream = UnixStream::connect(socket);
        Ok(Importer(stream.with_context(|| format!("no importer at {}", socket.display()))?))
    }

    /// Reads `length` bytes at `offset` of a dma-buf.
    fn read(&mut self, fd: BorrowedFd<'_>, offset: u64, length: usize) -> Result<Vec<u8>> {
        self.ask(b'r', fd, offset, length)?;
        self.answer()?;
        let mut bytes = vec![0; length];
        self.0.read_exact(&mut bytes).context("the importer's bytes")?;
        Ok(bytes)
    }

    /// Writes bytes at `offset` of a dma-buf.
    fn write(&mut self, fd: BorrowedFd<'_>, offset: u64, bytes: &[u8]) -> Result<()> {
        self.ask(b'w', fd, offset, bytes.len())?;
        self.0.write_all(bytes).context("bytes for the importer")?;
        self.answer()
    }

    fn ask(&mut self, what: u8, fd: BorrowedFd<'_>, offset: u64, length: usize) -> Result<()> {
        let request = [&[what][..], &offset.to_le_bytes(), &(length as u64).to_le_bytes()].concat();
        descriptors::send(&self.0, &request, &[fd]).context("handing the dma-buf to the importer")
    }

    fn answer(&mut self) -> Result<()> {
        let mut answer = [0];
        self.0.read_exact(&mut answer).context("the importer's answer")?;
        ensure!(answer[0] == 0, "the importer could not map the dma-buf (errno {})", answer[0]);
        Ok(())
    }
}
