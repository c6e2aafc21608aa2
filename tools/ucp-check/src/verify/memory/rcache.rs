//! `rcache`: copies from host memory that is unmapped and mapped again. If a registration were kept too long, the
//! device would read pages that the program has given back; so every byte is compared.

use super::Checker;
use super::host_map::{HostMap, WRITE};
use crate::uct::{Copier, Memory};
use anyhow::Result;

/// Larger than copies that go through bounce buffers.
const SIZE: usize = 256 << 10;
const PAGE: usize = 4096;
/// Number of buffers of the steady loop, and its rounds.
const BUFFERS: usize = 40;
const ROUNDS: usize = 75;

struct Bench<'a> {
    check: &'a Checker<'a>,
    copier: Copier<'a>,
    memory: Memory<'a>,
}

pub(super) fn run(check: &Checker<'_>) -> Result<()> {
    let bench = Bench { check, copier: check.copier()?, memory: check.domain.allocate(SIZE)? };
    let cycles = (check.options.cycles / 100).max(1) as usize;
    remapped(&bench, cycles)?;
    replaced(&bench, cycles)?;
    emptied(&bench, cycles)?;
    moved(&bench)?;
    on_the_heap(&bench, cycles)?;
    steady(&bench)?;
    println!("{cycles} cycles each, {BUFFERS} buffers {ROUNDS} times");
    Ok(())
}

impl Bench<'_> {
    /// Copies to the device and back, alternately registered and not; the result must be the current bytes.
    fn compare(&self, host: &[u8], round: usize, what: &str) -> Result<()> {
        let by = self.check.domain.register_slice(host)?;
        let by = (!round.is_multiple_of(2)).then_some(&by);
        self.copier.put_zcopy(host, by, self.memory.address())?;
        let back = self.copier.read(self.memory.address(), host.len())?;
        let wrong = back.iter().zip(host).position(|(back, host)| back != host);
        let right = wrong.is_none();
        expect!(self.check, right, "{what}, round {round}: byte {wrong:?} is stale");
        Ok(())
    }

    /// Writes new bytes, and compares.
    fn refill(&self, host: &mut [u8], round: usize, what: &str) -> Result<()> {
        host.copy_from_slice(&self.check.bytes((round as u64) << 20, host.len()));
        self.compare(host, round, what)
    }

    fn refill_map(&self, map: &mut HostMap, round: usize, what: &str) -> Result<()> {
        // SAFETY: all maps here are writable and private.
        self.refill(unsafe { map.bytes_mut() }, round, what)
    }
}

/// `munmap`, then `mmap` at the same address.
fn remapped(bench: &Bench<'_>, cycles: usize) -> Result<()> {
    let mut map = HostMap::anonymous(WRITE, SIZE)?;
    for round in 0..cycles {
        bench.refill_map(&mut map, round, "mapped anew")?;
        let address = map.address();
        drop(map);
        map = HostMap::at(address, SIZE)?;
    }
    Ok(())
}

/// `mmap` over an existing mapping.
fn replaced(bench: &Bench<'_>, cycles: usize) -> Result<()> {
    let mut map = HostMap::anonymous(WRITE, SIZE)?;
    for round in 0..cycles {
        bench.refill_map(&mut map, round, "mapped over")?;
        map.replace()?;
    }
    Ok(())
}

/// `madvise` drops a page of it.
fn emptied(bench: &Bench<'_>, cycles: usize) -> Result<()> {
    let mut map = HostMap::anonymous(WRITE, SIZE)?;
    for round in 0..cycles {
        bench.refill_map(&mut map, round, "before madvise")?;
        let at = (round * PAGE) % SIZE;
        map.empty(at)?;
        // SAFETY: readable, and not written to.
        let host = unsafe { map.bytes() };
        bench.check.expect(host[at] == 0, "the page is not empty");
        bench.compare(host, round, "after madvise")?;
    }
    Ok(())
}

/// `mremap` moves the pages, and other pages are mapped in their place.
fn moved(bench: &Bench<'_>) -> Result<()> {
    let mut map = HostMap::anonymous(WRITE, SIZE)?;
    bench.refill_map(&mut map, 5, "before it moved")?;
    let address = map.address();
    let map = map.move_to(HostMap::anonymous(WRITE, SIZE)?)?;
    let mut new = HostMap::at(address, SIZE)?;
    bench.refill_map(&mut new, 6, "in place of what moved")?;
    // SAFETY: readable, and not written to.
    bench.compare(unsafe { map.bytes() }, 0, "what moved")
}

/// `malloc` and `free` of memory so large that it comes from the kernel and goes back to it.
fn on_the_heap(bench: &Bench<'_>, cycles: usize) -> Result<()> {
    let mut addresses = std::collections::BTreeSet::new();
    for round in 0..cycles {
        let mut host = vec![0u8; SIZE];
        addresses.insert(host.as_ptr().addr());
        bench.refill(&mut host, round, "on the heap")?;
    }
    println!("{} addresses of {cycles} heap buffers", addresses.len());
    Ok(())
}

/// The same buffers again and again, with new bytes, in both directions.
fn steady(bench: &Bench<'_>) -> Result<()> {
    let mut buffers = vec![vec![0u8; SIZE]; BUFFERS];
    for round in 0..ROUNDS {
        for (number, buffer) in buffers.iter_mut().enumerate() {
            let stamp = (round * BUFFERS + number).to_ne_bytes();
            let ends = |buffer: &mut [u8], bytes: &[u8]| {
                buffer[..8].copy_from_slice(bytes);
                buffer[SIZE - 8..].copy_from_slice(bytes);
            };
            ends(buffer, &stamp);
            bench.copier.put_zcopy(buffer, None, bench.memory.address())?;
            ends(buffer, &[0; 8]);
            bench.copier.get_zcopy(bench.memory.address(), buffer, None)?;
            let right = buffer[..8] == stamp && buffer[SIZE - 8..] == stamp;
            expect!(bench.check, right, "buffer {number} in round {round}");
        }
    }
    Ok(())
}
