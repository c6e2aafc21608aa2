//! `import` and `import-cards`: a memory domain registers dma-bufs, and copies use the registrations.
//!
//! The CPU may neither read nor write the registered addresses, like those of a GPU: a copy either goes through the
//! dma-buf, or ends the process.

use super::host_map::{HostMap, NONE};
use super::{Checker, range, usage};
use crate::uct::{Completion, Copier, Domain, Memory, Piece, Registration, Rma, Status};
use anyhow::{Context, Result};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::{AsFd, OwnedFd};

/// More than the bounce buffer of one packet, and not a whole number of pages.
const SIZE: usize = (3 << 20) + 77;
const POISON: u8 = 0xee;

/// Card memory registered by its dma-buf, at unused addresses.
struct Foreign<'d> {
    memory: Memory<'d>,
    fd: OwnedFd,
    offset: u64,
    stands_for: HostMap,
}

impl<'d> Foreign<'d> {
    fn new(domain: &'d Domain) -> Result<Self> {
        let memory = domain.allocate(SIZE)?;
        // The dma-buf covers the driver's whole page, so the memory has an offset in it.
        let (fd, offset) = domain.export(memory.address(), SIZE)?.context("no dma-buf")?;
        Ok(Foreign { memory, fd, offset, stands_for: HostMap::anonymous(NONE, SIZE)? })
    }

    fn register<'c>(&self, domain: &'c Domain) -> crate::ucx::Result<Registration<'c>> {
        let address = self.stands_for.address();
        domain.register_dmabuf((address, SIZE), self.fd.as_fd(), self.offset)
    }

    /// Copies between a part of it and `remote`, and waits.
    fn copy(
        &self,
        copier: &Copier<'_>,
        way: Rma,
        (at, length): (usize, usize),
        by: &Registration<'_>,
        remote: u64,
    ) -> crate::ucx::Result<()> {
        let local = Piece::plain(self.stands_for.address() + at as u64, length);
        let completion = Completion::default();
        // SAFETY: the local addresses belong to the handle; the remote ones are live memory of the caller, and nothing
        // else uses either until the copy has ended.
        unsafe { copier.start(way, &[local], by.handle(), remote, &completion)? };
        copier.wait(&completion)
    }
}

const PARTS: [(usize, usize); 7] =
    [(0, SIZE), (0, 1), (SIZE - 1, 1), (1, 7), (4095, 4098), (12_345, 70_001), (3, SIZE - 10)];

pub(super) fn run(check: &Checker<'_>) -> Result<()> {
    if !check.domain.exports()? {
        println!("skipped: no dma-bufs are offered to import");
        return Ok(());
    }
    let foreign = Foreign::new(check.domain)?;
    let before = usage::descriptors()?;
    own_memory(check, &foreign)?;
    match foreign.register(check.domain) {
        Err(error) if error.status == Status::UNSUPPORTED => {
            println!("the driver imports no dma-bufs");
            check.equal(&usage::descriptors()?, &before, "descriptors after a refusal");
            return Ok(());
        }
        registration => exchange(check, check.domain, &foreign, &registration?)?,
    }
    check.equal(&usage::descriptors()?, &before, "descriptors after the registration has gone");
    refusals(check, &foreign)?;
    check.equal(&usage::descriptors()?, &before, "descriptors after refusals");
    // The descriptor is the caller's: the registration must stay valid after the caller closes it.
    let Foreign { memory, fd, offset, stands_for } = foreign;
    let start = stands_for.address();
    let registration = check.domain.register_dmabuf((start, SIZE), fd.as_fd(), offset)?;
    let foreign =
        Foreign { memory, fd: std::fs::File::open("/dev/null")?.into(), offset, stands_for };
    drop(fd);
    exchange(check, check.domain, &foreign, &registration)?;
    println!("copied by dma-buf");
    Ok(())
}

/// One registration must serve the memory of every card, whichever exported it.
pub(super) fn cards(check: &Checker<'_>) -> Result<()> {
    let domains = [0, 1, 2].map(|index| super::cards::on(check, index));
    let [first, second, third] = domains;
    let (first, second, third) = (first?, second?, third?);
    let foreign = Foreign::new(&second)?;
    let registration = foreign.register(&first)?;
    for domain in [&first, &third, &second, &first] {
        exchange(check, domain, &foreign, &registration)?;
    }
    println!("copied by dma-buf");
    Ok(())
}

/// Copies both ways between the dma-buf and Gaudi memory of `domain`, and host memory; bytes around must not change.
fn exchange(
    check: &Checker<'_>,
    domain: &Domain,
    foreign: &Foreign<'_>,
    by: &Registration<'_>,
) -> Result<()> {
    let copier = Copier::open(domain, check.transport())?;
    let target = domain.allocate(SIZE + 1000)?;
    let base = check.bytes(11, SIZE);
    for (n, (at, length)) in PARTS.into_iter().enumerate() {
        let place = 500 - n; // odd and even
        let to = target.address() + place as u64;
        copier.put(&base, foreign.memory.address())?;
        copier.put(&vec![POISON; SIZE + 1000], target.address())?;
        foreign.copy(&copier, Rma::Put, (at, length), by, to)?;
        let mut expected = vec![POISON; SIZE + 1000];
        expected[place..place + length].copy_from_slice(&base[at..at + length]);
        let found = copier.read(target.address(), SIZE + 1000)?;
        expect!(check, found == expected, "{length} bytes from {at} of a dma-buf");
        let other = check.bytes(100 + n as u64, length);
        copier.put(&other, to)?;
        foreign.copy(&copier, Rma::Get, (at, length), by, to)?;
        let mut expected = base.clone();
        expected[at..at + length].copy_from_slice(&other);
        let found = copier.read(foreign.memory.address(), SIZE)?;
        expect!(check, found == expected, "{length} bytes to {at} of a dma-buf");
        // The same with host memory as the other side.
        let mut host = vec![POISON; length + 2];
        let there = host.as_mut_ptr().expose_provenance() as u64 + 1;
        foreign.copy(&copier, Rma::Put, (at, length), by, there)?;
        let right = host[1..=length] == other && host[0] == POISON && host[length + 1] == POISON;
        expect!(check, right, "{length} bytes from {at} of a dma-buf to host memory");
    }
    let outside = foreign.copy(&copier, Rma::Put, (1, SIZE), by, target.address());
    check.refused(outside, Status::INVALID_PARAM, "a copy past the end of what was registered");
    Ok(())
}

/// UCP passes a domain the dma-buf of the domain's own memory: the domain must not import it.
fn own_memory(check: &Checker<'_>, foreign: &Foreign<'_>) -> Result<()> {
    let before = usage::descriptors()?;
    let (address, length) = foreign.memory.range();
    let own =
        check.domain.register_dmabuf((address, length), foreign.fd.as_fd(), foreign.offset)?;
    check.equal(&usage::descriptors()?, &before, "descriptors: own memory was imported");
    drop(own);
    Ok(())
}

fn refusals(check: &Checker<'_>, foreign: &Foreign<'_>) -> Result<()> {
    let (reader, _writer) = rustix::pipe::pipe()?;
    let memfd = memfd_create("ucp-check", MemfdFlags::CLOEXEC)?;
    ftruncate(&memfd, 1 << 20)?;
    let start = foreign.stands_for.address();
    let size = rustix::fs::fstat(&foreign.fd)?.st_size as u64;
    for (what, fd, offset, length) in [
        ("a pipe", reader.as_fd(), 0, 4096),
        ("a memfd", memfd.as_fd(), 0, 4096),
        ("a range past the end", foreign.fd.as_fd(), size - 4096, 4097),
        ("an offset past the end", foreign.fd.as_fd(), size, 1),
        ("an offset without end", foreign.fd.as_fd(), u64::MAX, 2),
    ] {
        let refused = check.domain.register_dmabuf((start, length), fd, offset);
        check.refused(refused, Status::INVALID_PARAM, what);
    }
    let closed = check.domain.register_raw_dmabuf((start, 4096), 1 << 20, 0);
    check.refused(closed, Status::INVALID_PARAM, "a descriptor that is not open");
    // Without a descriptor the range is host memory, as usual.
    let host = vec![0_u8; 100];
    let plain = check.domain.register_raw_dmabuf(range(&host), -1, 0);
    expect!(check, plain.is_ok(), "host memory without a dma-buf");
    Ok(())
}
