//! `rcache`: copies from host memory that comes and goes. A registration that is remembered for too
//! long would show the device pages which the program gave back; so every byte is compared.
//!
//! Memory is mapped and unmapped with the C library's functions, as programs do: UCX hooks those.

use std::ptr::null_mut;

use anyhow::{Result, ensure};

use super::{Scene, Tally};
use crate::pattern::{fill, mix};
use crate::uct::{Copier, Memory};

/// Larger than what is copied through bounce buffers.
const SIZE: usize = 256 << 10;
const PAGE: usize = 4096;
/// Buffers of the steady loop, and how often it goes round.
const BUFFERS: usize = 100;
const ROUNDS: usize = 120;

struct Bench<'a> {
    scene: &'a Scene<'a>,
    copier: Copier<'a>,
    memory: Memory<'a>,
}

pub(super) fn run(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let copier = Copier::open(scene.domain, scene.transport())?;
    let memory = scene.domain.allocate(SIZE, false)?;
    let bench = Bench { scene, copier, memory };
    let cycles = (scene.options.cycles / 100).max(1) as usize;
    remapped(&bench, tally, cycles)?;
    replaced(&bench, tally, cycles)?;
    emptied(&bench, tally, cycles)?;
    moved(&bench, tally)?;
    on_the_heap(&bench, tally, cycles)?;
    steady(&bench, tally)?;
    println!("{cycles} cycles each, {BUFFERS} buffers {ROUNDS} times");
    Ok(())
}

impl Bench<'_> {
    /// To the device and back, by each way; the bytes must be those that are there now.
    fn check(&self, host: &[u8], round: usize, tally: &mut Tally, what: &str) -> Result<()> {
        let there = self.memory.address();
        if round.is_multiple_of(2) {
            self.copier.put_unregistered(host, there)?;
        } else {
            let domain = self.scene.domain;
            let by = domain.register(host.as_ptr().addr() as u64, host.len(), None)?;
            self.copier.put_registered(host, &by, there)?;
        }
        let mut back = vec![0; host.len()];
        self.copier.get(there, &mut back)?;
        let wrong = back.iter().zip(host).position(|(back, host)| back != host);
        tally.expect(wrong.is_none(), || format!("{what}, round {round}: byte {wrong:?} is old"));
        Ok(())
    }

    fn fill(&self, host: &mut [u8], round: usize) {
        fill(mix(self.scene.options.seed ^ (round as u64) << 20), 0, host);
    }
}

/// Memory at `at`, or anywhere if that is null, with `more` flags.
fn map(at: *mut u8, more: i32) -> Result<*mut u8> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | more;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the caller names no address, or one where nothing or its own memory is.
    let start = unsafe { libc::mmap(at.cast(), SIZE, access, flags, -1, 0) };
    ensure!(start != libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
    Ok(start.cast())
}

fn unmap(start: *mut u8) {
    // SAFETY: mapped by us, and nothing refers to it.
    unsafe { libc::munmap(start.cast(), SIZE) };
}

/// The bytes of a mapping.
///
/// # Safety
/// They must be ours alone until the next call for the same place.
unsafe fn bytes<'a>(start: *mut u8) -> &'a mut [u8] {
    // SAFETY: mapped with this length; the rest is the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(start, SIZE) }
}

/// `munmap`, then `mmap` at the same address.
fn remapped(bench: &Bench<'_>, tally: &mut Tally, cycles: usize) -> Result<()> {
    let mut start = map(null_mut(), 0)?;
    for round in 0..cycles {
        // SAFETY: mapped just now.
        let host = unsafe { bytes(start) };
        bench.fill(host, round);
        bench.check(host, round, tally, "mapped anew")?;
        unmap(start);
        let again = map(start, libc::MAP_FIXED_NOREPLACE)?;
        ensure!(again == start, "the kernel maps elsewhere");
        start = again;
    }
    unmap(start);
    Ok(())
}

/// `mmap` over what is there.
fn replaced(bench: &Bench<'_>, tally: &mut Tally, cycles: usize) -> Result<()> {
    let start = map(null_mut(), 0)?;
    for round in 0..cycles {
        // SAFETY: mapped just now.
        let host = unsafe { bytes(start) };
        bench.fill(host, round ^ 1);
        bench.check(host, round, tally, "mapped over")?;
        map(start, libc::MAP_FIXED)?;
    }
    unmap(start);
    Ok(())
}

/// `madvise` takes a page of it away.
fn emptied(bench: &Bench<'_>, tally: &mut Tally, cycles: usize) -> Result<()> {
    let start = map(null_mut(), 0)?;
    for round in 0..cycles {
        // SAFETY: mapped, and ours.
        let host = unsafe { bytes(start) };
        bench.fill(host, round);
        bench.check(host, round, tally, "before madvise")?;
        let at = (round * PAGE) % SIZE;
        // SAFETY: a page of our own memory, whose bytes become zero.
        let done = unsafe { libc::madvise(start.add(at).cast(), PAGE, libc::MADV_DONTNEED) };
        ensure!(done == 0, "madvise: {}", std::io::Error::last_os_error());
        // SAFETY: as above.
        let host = unsafe { bytes(start) };
        tally.expect(host[at] == 0, || "the page is not empty".into());
        bench.check(host, round, tally, "after madvise")?;
    }
    unmap(start);
    Ok(())
}

/// `mremap` takes the pages elsewhere, and others come in their place.
fn moved(bench: &Bench<'_>, tally: &mut Tally) -> Result<()> {
    let start = map(null_mut(), 0)?;
    // SAFETY: mapped just now.
    bench.fill(unsafe { bytes(start) }, 5);
    // SAFETY: as above.
    bench.check(unsafe { bytes(start) }, 0, tally, "before it moved")?;
    let elsewhere = map(null_mut(), 0)?;
    // SAFETY: both are ours; what is at the new place goes.
    let moved = unsafe {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        libc::mremap(start.cast(), SIZE, SIZE, flags, elsewhere)
    };
    ensure!(moved == elsewhere.cast(), "mremap: {}", std::io::Error::last_os_error());
    map(start, libc::MAP_FIXED_NOREPLACE)?;
    // SAFETY: mapped just now, and what was moved there.
    let (new, old) = unsafe { (bytes(start), bytes(elsewhere)) };
    bench.fill(new, 6);
    bench.check(new, 0, tally, "in place of what moved")?;
    bench.check(old, 0, tally, "what moved")?;
    unmap(start);
    unmap(elsewhere);
    Ok(())
}

/// `malloc` and `free`, of memory large enough to come from the kernel and go back to it.
fn on_the_heap(bench: &Bench<'_>, tally: &mut Tally, cycles: usize) -> Result<()> {
    let mut addresses = std::collections::BTreeSet::new();
    for round in 0..cycles {
        let mut host = vec![0u8; SIZE];
        addresses.insert(host.as_ptr().addr());
        bench.fill(&mut host, round);
        bench.check(&host, round, tally, "on the heap")?;
    }
    println!("{} addresses of {cycles} heap buffers", addresses.len());
    Ok(())
}

/// The same buffers again and again, with new bytes, in both directions.
fn steady(bench: &Bench<'_>, tally: &mut Tally) -> Result<()> {
    let mut buffers = vec![vec![0u8; SIZE]; BUFFERS];
    for round in 0..ROUNDS {
        for (number, buffer) in buffers.iter_mut().enumerate() {
            let stamp = (round * BUFFERS + number).to_ne_bytes();
            buffer[..8].copy_from_slice(&stamp);
            buffer[SIZE - 8..].copy_from_slice(&stamp);
            bench.copier.put_unregistered(buffer, bench.memory.address())?;
            buffer[..8].fill(0);
            buffer[SIZE - 8..].fill(0);
            bench.copier.get_unregistered(bench.memory.address(), buffer)?;
            let right = buffer[..8] == stamp && buffer[SIZE - 8..] == stamp;
            tally.expect(right, || format!("buffer {number} in round {round}"));
        }
    }
    Ok(())
}
