//! Copies that are under way when the next call comes: pieces, fences, flushes, errors, and an
//! interface that is closed before they are done.

use super::{Scene, Tally};
use crate::pattern::mix;
use crate::uct::{Copier, Memory, Piece, Registration, Ticket, Way};
use anyhow::Result;

const LEN: usize = 1 << 20;

/// A host buffer with its registration, and as much device memory.
struct Stage<'d> {
    copier: Copier<'d>,
    host: Vec<u8>,
    handle: Registration<'d>,
    device: Memory<'d>,
}

impl<'d> Stage<'d> {
    fn new(scene: &'d Scene<'d>, seed: u64) -> Result<Stage<'d>> {
        let host: Vec<u8> = (0..LEN as u64)
            .map(|at| mix((at / 8) ^ (seed << 32)).to_le_bytes()[(at % 8) as usize])
            .collect();
        Ok(Stage {
            copier: Copier::open(scene.domain, scene.transport())?,
            handle: scene.domain.register(host.as_ptr() as u64, LEN, Some(false))?,
            device: scene.domain.allocate(LEN, false)?,
            host,
        })
    }

    /// Starts a put of `[from, from + length)` of the host buffer to `to` in the device's.
    fn put(&self, from: usize, to: usize, length: usize, ticket: &Ticket) -> Result<()> {
        let local = (self.host.as_ptr() as u64 + from as u64, length);
        let remote = self.device.address() + to as u64;
        // SAFETY: inside both; the stage outlives the copier's work, which is waited for.
        unsafe { self.copier.start(Way::Put, local, self.handle.handle(), remote, ticket)? };
        Ok(())
    }

    fn wait(&self, ticket: &Ticket) -> Result<()> {
        while !ticket.is_free() {
            self.copier.progress();
        }
        Ok(self.copier.outcome(Way::Put, ticket)?)
    }

    fn read(&self, at: usize, length: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.copier.get(self.device.address() + at as u64, &mut bytes)?;
        Ok(bytes)
    }
}

fn check(tally: &mut Tally, what: &str, right: bool) {
    tally.expect(right, || format!("not so: {what}"));
}

pub(super) fn run(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    pieces(scene, tally)?;
    fences(scene, tally)?;
    flushes(scene, tally)?;
    more_than_there_is_room_for(scene, tally)?;
    beside_one_that_does_not_progress(scene, tally)?;
    closed_in_flight(scene, tally)
}

/// Some copies fail: each ends all the same, and those that failed say so.
pub(super) fn failing(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let stage = Stage::new(scene, 6)?;
    let tickets: Vec<Ticket> = (0..32).map(|_| Ticket::default()).collect();
    let mut failed = 0;
    for (n, ticket) in tickets.iter().enumerate() {
        failed += usize::from(stage.put(n * 30_000, n * 30_000, 30_000, ticket).is_err());
    }
    let flushed = Ticket::default();
    stage.copier.flush(&flushed)?;
    for ticket in &tickets {
        failed += usize::from(stage.wait(ticket).is_err());
    }
    stage.wait(&flushed)?;
    check(tally, "those that failed say so", failed > 0);
    println!("{failed} of {} copies failed", tickets.len());
    Ok(())
}

/// Many pieces, strided ones, odd lengths, none at all: they arrive one behind the other.
fn pieces(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let stage = Stage::new(scene, 1)?;
    let base = stage.host.as_ptr() as u64;
    let plain = |n: usize| Piece {
        address: base + (n * 5000) as u64,
        length: n * 257 % 4001,
        stride: 0,
        count: 1,
    };
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
    let ticket = Ticket::default();
    let (memh, to) = (stage.handle.handle(), stage.device.address());
    // SAFETY: inside the buffers; waited for below.
    unsafe { stage.copier.start_pieces(Way::Put, &pieces, memh, to, &ticket)? };
    stage.wait(&ticket)?;
    check(tally, "103 pieces arrive in order", stage.read(0, expected.len())? == expected);
    // SAFETY: there are none.
    unsafe { stage.copier.start_pieces(Way::Put, &[], memh, to, &ticket)? };
    check(tally, "no piece at all is over at once", ticket.is_free());
    Ok(())
}

/// What is behind a fence is written after what is in front of it, also by other queues.
fn fences(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let stage = Stage::new(scene, 2)?;
    let tickets: Vec<Ticket> = (0..64).map(|_| Ticket::default()).collect();
    // Each writes the same place, long and short in turn; the last must win.
    for (n, ticket) in tickets.iter().enumerate() {
        let length = if n % 2 == 0 { 200_000 } else { 1000 + n };
        stage.put(n * 1000, 0, length, ticket)?;
        stage.copier.fence()?;
    }
    for ticket in &tickets {
        stage.wait(ticket)?;
    }
    let last = tickets.len() - 1;
    let (front, back) = (1000 + last, 200_000);
    let mut expected = stage.host[(last - 1) * 1000..(last - 1) * 1000 + back].to_vec();
    expected[..front].copy_from_slice(&stage.host[last * 1000..last * 1000 + front]);
    check(tally, "fences order what writes one place", stage.read(0, back)? == expected);
    // A short copy behind a fence overtakes nothing either.
    stage.put(0, 0, 200_000, &tickets[0])?;
    stage.copier.fence()?;
    stage.copier.put(&[9; 8], stage.device.address())?;
    check(tally, "a short put waits for the fence", stage.read(0, 8)? == [9; 8]);
    stage.wait(&tickets[0])
}

/// A flush ends when everything before it has ended, and not earlier.
fn flushes(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let stage = Stage::new(scene, 3)?;
    let tickets: Vec<Ticket> = (0..32).map(|_| Ticket::default()).collect();
    let flushed = Ticket::default();
    stage.copier.flush(&flushed)?;
    check(tally, "with nothing under way a flush is over at once", flushed.is_free());
    for (n, ticket) in tickets.iter().enumerate() {
        stage.put(n * 30_000, n * 30_000, 30_000, ticket)?;
    }
    let busy = tickets.iter().any(|ticket| !ticket.is_free());
    stage.copier.flush(&flushed)?;
    check(tally, "a flush is under way while copies are", !busy || !flushed.is_free());
    let mut early = false;
    while !flushed.is_free() {
        stage.copier.progress();
        early |= flushed.is_free() && tickets.iter().any(|ticket| !ticket.is_free());
    }
    check(tally, "a flush does not end before the copies in front of it", !early);
    check(tally, "what was flushed has arrived", stage.read(0, 960_000)? == stage.host[..960_000]);
    Ok(())
}

/// More copies than the device takes: they wait their turn, and none is lost.
fn more_than_there_is_room_for(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let stage = Stage::new(scene, 4)?;
    let tickets: Vec<Ticket> = (0..300).map(|_| Ticket::default()).collect();
    for (n, ticket) in tickets.iter().enumerate() {
        stage.put(n * 3000, n * 3000, 3000, ticket)?;
    }
    for ticket in &tickets {
        stage.wait(ticket)?;
    }
    check(tally, "300 copies at once arrive", stage.read(0, 900_000)? == stage.host[..900_000]);
    Ok(())
}

/// An interface that posts copies and is never called again keeps nothing from others.
fn beside_one_that_does_not_progress(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let (stuck, other) = (Stage::new(scene, 7)?, Stage::new(scene, 8)?);
    let tickets: Vec<Ticket> = (0..300).map(|_| Ticket::default()).collect();
    let (local, memh) = (stuck.host.as_ptr() as u64, stuck.handle.handle());
    stuck.copier.put(&stuck.host, stuck.device.address())?;
    for (n, ticket) in tickets.iter().enumerate() {
        let at = (n * 3000) as u64;
        // The same bytes back to where they came from, through bounce slots.
        // SAFETY: inside the buffers; waited for below.
        unsafe {
            let from = stuck.device.address() + at;
            stuck.copier.start(Way::Get, (local + at, 3000), memh, from, ticket)?;
        }
    }
    let ticket = Ticket::default();
    for n in 0..100 {
        other.put(n * 9000, n * 9000, if n % 2 == 0 { 9000 } else { 500 }, &ticket)?;
        other.wait(&ticket)?;
    }
    let right = other.read(99 * 9000, 500)? == other.host[99 * 9000..99 * 9000 + 500];
    check(tally, "others go on beside an interface that does not progress", right);
    for ticket in &tickets {
        stuck.wait(ticket)?;
    }
    Ok(())
}

/// Endpoint and interface go while copies are under way: the hardware is done with them first.
fn closed_in_flight(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let stage = Stage::new(scene, 5)?;
    const PIECE: usize = 9000;
    const BEFORE: u8 = 0x11;
    stage.copier.put(&[BEFORE; 100 * PIECE], stage.device.address())?;
    let tickets: Vec<Ticket> = (0..100).map(|_| Ticket::default()).collect();
    for (n, ticket) in tickets.iter().enumerate() {
        stage.put(n * PIECE, n * PIECE, PIECE, ticket)?;
    }
    let Stage { copier, mut host, handle, device } = stage;
    let sent = host.clone();
    drop(copier);
    // Theirs again: whatever the hardware had begun has ended, and reads this no more.
    host.fill(0);
    let again = Copier::open(scene.domain, scene.transport())?;
    let mut bytes = vec![0; 100 * PIECE];
    again.get(device.address(), &mut bytes)?;
    let pieces = || bytes.chunks(PIECE).zip(sent.chunks(PIECE));
    let whole = pieces().filter(|(is, sent)| is == sent).count();
    let untouched = pieces().filter(|(is, _)| is.iter().all(|byte| *byte == BEFORE)).count();
    check(tally, "some copies were begun", whole > 0);
    check(tally, "a copy was made before the end or not at all", whole + untouched == 100);
    drop((again, handle, device));
    // Tickets of copies that never ended are left to UCX, as `Ticket::drop` says.
    Ok(())
}
