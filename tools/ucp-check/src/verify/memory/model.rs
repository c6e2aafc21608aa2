//! `model` and `threads`: random allocations, frees, copies, queries and exports, compared with a model of the live
//! ranges.

use super::alloc::add;
use super::ranges::LiveRanges;
use super::{Checker, usage};
use crate::pattern::{fill, mix};
use crate::uct::{Copier, Memory};
use anyhow::Result;
use rustix::fs::SeekFrom;
use std::sync::{Mutex, PoisonError};

/// Number of threads of `threads`.
const THREADS: u64 = 4;
/// Steps of each sequence.
const STEPS: u64 = 2000;
/// Allocations that one sequence keeps alive.
const LIVE: usize = 40;

pub(super) fn run(check: &Checker<'_>) -> Result<()> {
    sequences(check, &[check.options.seed])
}

pub(super) fn threads(check: &Checker<'_>) -> Result<()> {
    let seeds: Vec<u64> = (0..THREADS).map(|thread| mix(check.options.seed ^ thread)).collect();
    sequences(check, &seeds)
}

/// Runs one sequence per seed, all at once.
fn sequences(check: &Checker<'_>, seeds: &[u64]) -> Result<()> {
    // After the first allocation everything exists that is kept on purpose: the card, and the export of the page that
    // is kept for the next allocation.
    let memory = check.domain.allocate(1)?;
    drop(check.copier()?);
    drop(check.domain.export(memory.address(), 1)?);
    drop(memory);
    let before = usage::descriptors()?;
    let shared = Mutex::default();
    std::thread::scope(|scope| {
        let start = |&seed| {
            let shared = &shared;
            scope.spawn(move || sequence(check, seed, shared))
        };
        let running: Vec<_> = seeds.iter().map(start).collect();
        running.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|_| anyhow::bail!("a thread panicked"))
        })
    })?;
    check.equal(&usage::descriptors()?, &before, "descriptors left open");
    Ok(())
}

/// A live allocation and the pattern in it.
struct Piece<'d> {
    memory: Memory<'d>,
    key: u64,
}

impl Piece<'_> {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.memory.len()];
        fill(self.key, 0, &mut bytes);
        bytes
    }

    fn verify(&self, check: &Checker<'_>, copier: &Copier<'_>, step: u64) -> Result<()> {
        let (address, length) = self.memory.range();
        let same = copier.read(address, length)? == self.bytes();
        expect!(check, same, "step {step}: {address:#x} does not hold what was written");
        Ok(())
    }
}

/// One sequence; `shared` holds the allocations of all threads.
fn sequence(check: &Checker<'_>, seed: u64, shared: &Mutex<LiveRanges>) -> Result<()> {
    println!("model seed {seed}");
    let ranges = || shared.lock().unwrap_or_else(PoisonError::into_inner);
    let (domain, copier, offers) = (check.domain, check.copier()?, check.domain.exports()?);
    let mut live: Vec<Piece<'_>> = Vec::new();
    let mut exports = Vec::new();
    for step in 0..STEPS {
        check.watchdog.step(format_args!("model, seed {seed}, step {step}"));
        let draw = mix(seed ^ mix(step));
        let pick = (draw >> 32) as usize;
        match draw % 8 {
            0..3 if live.len() < LIVE => {
                let memory = domain.allocate(size(pick, check.options.max))?;
                add(check, &mut ranges(), &memory);
                let piece = Piece { memory, key: draw };
                copier.put(&piece.bytes(), piece.memory.address())?;
                live.push(piece);
            }
            0..4 if !live.is_empty() => {
                let piece = live.swap_remove(pick % live.len());
                piece.verify(check, &copier, step)?;
                // Remove it from the model first: once it is free, another thread could get the same range and find it taken.
                ranges().remove(piece.memory.address());
            }
            4 | 5 if !live.is_empty() => {
                let (address, length) = question(&live[pick % live.len()].memory, mix(draw));
                let mut ours = live.iter().map(|piece| piece.memory.range());
                let wanted = ours.clone().find(|&range| inside(address, range));
                let found = domain.query(address, length).ok().and_then(|it| it.gaudi());
                // Right after our own memory another thread's may begin.
                let foreign = wanted.is_none()
                    && found.is_some_and(|range| {
                        inside(address, range) && ours.all(|(base, _)| base != range.0)
                    });
                expect!(
                    check,
                    found == wanted || foreign,
                    "step {step}: {length} bytes at {address:#x}: {found:x?}, not {wanted:x?}"
                );
            }
            6 if !live.is_empty() && offers => {
                let (base, size) = live[pick % live.len()].memory.range();
                let length = 1 + pick % size;
                let offset = mix(draw) as usize % (size - length + 1);
                let exported = domain.export(base + offset as u64, length)?;
                let covers = exported.as_ref().is_some_and(|(fd, offset)| {
                    rustix::fs::seek(fd, SeekFrom::End(0))
                        .is_ok_and(|size| offset + length as u64 <= size)
                });
                expect!(check, covers, "step {step}: dma-buf of {length} bytes");
                exports.extend(exported);
                if exports.len() > 20 {
                    exports.swap_remove(pick % exports.len());
                }
            }
            _ if !live.is_empty() => live[pick % live.len()].verify(check, &copier, step)?,
            _ => {}
        }
    }
    for piece in live {
        piece.verify(check, &copier, u64::MAX)?;
        ranges().remove(piece.memory.address());
    }
    Ok(())
}

/// Many small sizes, some of pages, few large ones.
fn size(draw: usize, max: usize) -> usize {
    let limit = match draw % 16 {
        0 => 8 << 20,
        1..4 => 1 << 20,
        4..8 => 65_536,
        _ => 5000,
    };
    1 + mix(draw as u64) as usize % limit.min(max)
}

fn inside(address: u64, (base, size): (u64, usize)) -> bool {
    address.checked_sub(base).is_some_and(|at| at < size as u64)
}

/// A range that lies inside, touches an end, or reaches past it.
fn question(memory: &Memory<'_>, draw: u64) -> (u64, usize) {
    let span = memory.len() as u64 + 4;
    (memory.address() - 2 + draw % span, (mix(draw) % (span + 2)) as usize)
}
