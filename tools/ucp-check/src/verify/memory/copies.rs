//! Calls while copies are in flight: pieces, fences, flushes, errors, and an interface that is closed before its copies
//! have ended.

use super::Checker;
use crate::uct::{Completion, Copier, Memory, MemoryType, Piece, Registration, Rma};
use anyhow::{Result, ensure};

const LENGTH: usize = 1 << 20;

/// A host buffer with its registration, and as much device memory.
struct Stage<'d> {
    copier: Copier<'d>,
    host: Vec<u8>,
    handle: Registration<'d>,
    device: Memory<'d>,
}

impl<'d> Stage<'d> {
    fn new(check: &'d Checker<'d>, n: u64) -> Result<Stage<'d>> {
        let host = check.bytes(n, LENGTH);
        Ok(Stage {
            copier: check.copier()?,
            handle: check.domain.register(host.as_ptr() as u64, LENGTH, Some(MemoryType::HOST))?,
            device: check.domain.allocate(LENGTH)?,
            host,
        })
    }

    /// Starts a copy between `[host, host + length)` of the host buffer and `device` in the device's.
    fn start(
        &self,
        way: Rma,
        (host, device): (usize, usize),
        length: usize,
        done: &Completion,
    ) -> Result<()> {
        assert!(host + length <= LENGTH && device + length <= LENGTH);
        let local = [Piece::plain(self.host.as_ptr() as u64 + host as u64, length)];
        let remote = self.device.address() + device as u64;
        // SAFETY: inside both buffers; the stage lives until the copier's work has ended, as we wait for it.
        unsafe { self.copier.start(way, &local, self.handle.handle(), remote, done)? };
        Ok(())
    }

    fn put(&self, from: usize, to: usize, length: usize, done: &Completion) -> Result<()> {
        self.start(Rma::Put, (from, to), length, done)
    }

    /// Starts as many puts as there are completions, next to each other.
    fn put_all(&self, length: usize, done: &[Completion]) -> Result<()> {
        let mut all = done.iter().enumerate();
        all.try_for_each(|(n, done)| self.put(n * length, n * length, length, done))
    }

    fn wait_all(&self, done: &[Completion]) -> Result<()> {
        Ok(done.iter().try_for_each(|done| self.copier.wait(done))?)
    }

    fn read(&self, length: usize) -> Result<Vec<u8>> {
        Ok(self.copier.read(self.device.address(), length)?)
    }
}

pub(super) fn run(check: &Checker<'_>) -> Result<()> {
    pieces(check)?;
    fences(check)?;
    flushes(check)?;
    more_than_fit(check)?;
    beside_one_that_does_not_progress(check)?;
    closed_in_flight(check)
}

/// Some copies fail: every copy must end, and the failed ones must report an error.
pub(super) fn failing(check: &Checker<'_>) -> Result<()> {
    let stage = Stage::new(check, 6)?;
    let (done, flushed) = (Completion::several(32), Completion::default());
    let mut failed = 0;
    for (n, done) in done.iter().enumerate() {
        failed += usize::from(stage.put(n * 30_000, n * 30_000, 30_000, done).is_err());
    }
    stage.copier.flush(&flushed)?;
    failed += done.iter().filter(|done| stage.copier.wait(done).is_err()).count();
    stage.copier.wait(&flushed)?;
    check.expect(failed > 0, "no failed copy said so");
    println!("{failed} of {} copies failed", done.len());
    Ok(())
}

/// Many pieces, strided ones, odd lengths, none at all: they must arrive one after the other.
fn pieces(check: &Checker<'_>) -> Result<()> {
    let stage = Stage::new(check, 1)?;
    let base = stage.host.as_ptr() as u64;
    let plain = |n: usize| Piece::plain(base + (n * 5000) as u64, n * 257 % 4001);
    let mut pieces: Vec<Piece> = (0..100).map(plain).collect();
    pieces.push(Piece { address: base + 7, length: 3, stride: 4099, count: 200 });
    pieces.push(Piece { address: base, length: 70_001, stride: 100_000, count: 3 });
    pieces.push(Piece { address: base, length: 9, stride: 9, count: 0 });
    let mut expected = Vec::new();
    for piece in &pieces {
        for n in 0..piece.count as usize {
            let at = (piece.address - base) as usize + n * piece.stride;
            expected.extend_from_slice(&stage.host[at..at + piece.length]);
        }
    }
    let (done, memh, to) = (Completion::default(), stage.handle.handle(), stage.device.address());
    // SAFETY: inside the buffers; we wait for the copy below.
    unsafe { stage.copier.start(Rma::Put, &pieces, memh, to, &done)? };
    stage.copier.wait(&done)?;
    check.expect(stage.read(expected.len())? == expected, "103 pieces did not arrive in order");
    // SAFETY: there are none.
    unsafe { stage.copier.start(Rma::Put, &[], memh, to, &done)? };
    check.expect(done.is_free(), "a copy of no piece at all was not over at once");
    Ok(())
}

/// Writes after a fence must come after the writes before it, also those of other queues.
fn fences(check: &Checker<'_>) -> Result<()> {
    let (stage, done) = (Stage::new(check, 2)?, Completion::several(64));
    // All copies write the same place, alternately long and short; the last must win.
    for (n, done) in done.iter().enumerate() {
        stage.put(n * 1000, 0, if n % 2 == 0 { 200_000 } else { 1000 + n }, done)?;
        stage.copier.fence()?;
    }
    stage.wait_all(&done)?;
    let last = done.len() - 1;
    let (front, back) = (1000 + last, 200_000);
    let mut expected = stage.host[(last - 1) * 1000..][..back].to_vec();
    expected[..front].copy_from_slice(&stage.host[last * 1000..][..front]);
    check.expect(stage.read(back)? == expected, "fences did not order writes to one place");
    // A short copy after a fence must not overtake either.
    stage.put(0, 0, 200_000, &done[0])?;
    stage.copier.fence()?;
    stage.copier.put(&[9; 8], stage.device.address())?;
    check.expect(stage.read(8)? == [9; 8], "a short put did not wait for the fence");
    Ok(stage.copier.wait(&done[0])?)
}

/// A flush must end when everything before it has ended, not earlier.
fn flushes(check: &Checker<'_>) -> Result<()> {
    let stage = Stage::new(check, 3)?;
    let (done, flushed) = (Completion::several(32), Completion::default());
    let busy = || done.iter().any(|done| !done.is_free());
    stage.copier.flush(&flushed)?;
    check.expect(flushed.is_free(), "with nothing in flight a flush was not over at once");
    stage.put_all(30_000, &done)?;
    let before = busy();
    stage.copier.flush(&flushed)?;
    check.expect(!before || !flushed.is_free(), "a flush was over with copies in flight");
    let mut early = false;
    while !flushed.is_free() {
        stage.copier.progress();
        early |= flushed.is_free() && busy();
    }
    check.expect(!early, "a flush ended before the copies in front of it");
    check.expect(stage.read(960_000)? == stage.host[..960_000], "what was flushed has not arrived");
    Ok(())
}

/// More copies than the device takes: they wait for a free slot, and none is lost.
fn more_than_fit(check: &Checker<'_>) -> Result<()> {
    let (stage, done) = (Stage::new(check, 4)?, Completion::several(300));
    stage.put_all(3000, &done)?;
    stage.wait_all(&done)?;
    check.expect(stage.read(900_000)? == stage.host[..900_000], "of 300 copies one was lost");
    Ok(())
}

/// An interface that posts copies and is never progressed must not block others.
fn beside_one_that_does_not_progress(check: &Checker<'_>) -> Result<()> {
    let (stuck, other) = (Stage::new(check, 7)?, Stage::new(check, 8)?);
    let done = Completion::several(300);
    stuck.copier.put(&stuck.host, stuck.device.address())?;
    for (n, done) in done.iter().enumerate() {
        // Copies the same bytes back to where they came from, through bounce slots.
        stuck.start(Rma::Get, (n * 3000, n * 3000), 3000, done)?;
    }
    let one = Completion::default();
    for n in 0..100 {
        other.put(n * 9000, n * 9000, if n % 2 == 0 { 9000 } else { 500 }, &one)?;
        other.copier.wait(&one)?;
    }
    let last = other.copier.read(other.device.address() + 99 * 9000, 500)?;
    let right = last == other.host[99 * 9000..][..500];
    check.expect(right, "others did not go on next to an interface that does not progress");
    stuck.wait_all(&done)
}

/// Closes endpoint and interface while copies are in flight: the hardware must have finished them by then.
fn closed_in_flight(check: &Checker<'_>) -> Result<()> {
    const PIECE: usize = 9000;
    const BEFORE: u8 = 0x11;
    let (stage, done) = (Stage::new(check, 5)?, Completion::several(100));
    stage.copier.put(&[BEFORE; 100 * PIECE], stage.device.address())?;
    stage.put_all(PIECE, &done)?;
    let Stage { copier, mut host, handle, device } = stage;
    let sent = host.clone();
    drop(copier);
    // The source is ours again: the hardware has ended whatever it had begun, and reads it no more.
    host.fill(0);
    let again = check.copier()?;
    let bytes = again.read(device.address(), 100 * PIECE)?;
    let pieces = || bytes.chunks(PIECE).zip(sent.chunks(PIECE));
    let whole = pieces().filter(|(is, sent)| is == sent).count();
    let untouched = pieces().filter(|(is, _)| is.iter().all(|byte| *byte == BEFORE)).count();
    check.expect(whole > 0, "no copy was begun");
    check.expect(whole + untouched == 100, "a copy was made in part, or after the end");
    drop((again, handle, device));
    // The completions of copies that never ended are leaked, see `Completion::drop`.
    Ok(())
}

/// Closes an interface with unregistered copies in flight, and reuses their sources at once.
pub(super) fn closing(check: &Checker<'_>) -> Result<()> {
    const COPIES: usize = 8;
    const LENGTH: usize = 256 << 10;
    let target = check.domain.allocate(COPIES * LENGTH)?;
    let expected = check.bytes(0, COPIES * LENGTH);
    let mut sources = expected.clone();
    let copier = check.copier()?;
    let done = Completion::several(COPIES);
    let start = sources.as_mut_ptr().expose_provenance() as u64;
    for (n, done) in done.iter().enumerate() {
        let at = (n * LENGTH) as u64;
        let (local, remote) = ([Piece::plain(start + at, LENGTH)], target.address() + at);
        // SAFETY: the source stays alive, and is written only after the interface is closed.
        unsafe { copier.start(Rma::Put, &local, std::ptr::null_mut(), remote, done)? };
    }
    let in_flight = done.iter().filter(|done| !done.is_free()).count();
    ensure!(in_flight > 0, "all copies were done at once: set SOFT_GAUDI_LATENCY");
    println!("{in_flight} copies under way when the interface is closed");
    drop(copier);
    sources.fill(0xee);
    let copier = check.copier()?;
    let mut found = vec![0; COPIES * LENGTH];
    for (n, part) in found.chunks_mut(LENGTH).enumerate() {
        copier.get(target.address() + (n * LENGTH) as u64, part)?;
    }
    let right = found == expected;
    check.expect(right, "a copy went on after its interface was closed, or was lost");
    Ok(())
}
