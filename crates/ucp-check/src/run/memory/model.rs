//! `model` and `threads`: random allocations, frees, copies, queries and exports, compared with what
//! a ledger of live ranges says.

use super::ledger::Ledger;
use super::{Scene, Tally, process};
use crate::pattern::{fill, mix};
use crate::uct::{Copier, Memory};
use anyhow::Result;
use rustix::fs::SeekFrom;
use std::sync::{Mutex, PoisonError};

/// Threads of `threads`.
const THREADS: u64 = 4;
/// Allocations that one sequence keeps alive.
const LIVE: usize = 40;

pub(super) fn run(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let before = settled(scene)?;
    sequence(scene, tally, scene.options.seed, &Mutex::default())?;
    tally.equal(&process::descriptors()?, &before, "descriptors left open");
    Ok(())
}

/// Descriptors once everything that is kept on purpose is there: the card, and the export of the
/// page that is kept for the next allocation.
fn settled(scene: &Scene<'_>) -> Result<usize> {
    let memory = scene.domain.allocate(1, false)?;
    drop(Copier::open(scene.domain, scene.transport())?);
    drop(scene.domain.export(memory.address(), 1)?);
    process::descriptors()
}

pub(super) fn threads(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let before = settled(scene)?;
    let shared = Mutex::default();
    let parts = std::thread::scope(|scope| {
        let running: Vec<_> = (0..THREADS)
            .map(|thread| {
                let mut part = tally.part(thread);
                let (seed, shared) = (mix(scene.options.seed ^ thread), &shared);
                scope.spawn(move || sequence(scene, &mut part, seed, shared).map(|()| part))
            })
            .collect();
        running
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| anyhow::bail!("a thread panicked")))
            .collect::<Result<Vec<Tally>>>()
    })?;
    parts.iter().for_each(|part| tally.merge(part));
    tally.equal(&process::descriptors()?, &before, "descriptors left open");
    Ok(())
}

/// A live allocation and the pattern in it.
struct Piece<'d> {
    memory: Memory<'d>,
    key: u64,
}

/// One sequence; `shared` knows the allocations of all threads.
fn sequence(scene: &Scene<'_>, tally: &mut Tally, seed: u64, shared: &Mutex<Ledger>) -> Result<()> {
    println!("model seed {seed}");
    let ledger = || shared.lock().unwrap_or_else(PoisonError::into_inner);
    let copier = Copier::open(scene.domain, scene.transport())?;
    let offers = scene.domain.attributes()?.dmabuf.gaudi();
    let mut live: Vec<Piece<'_>> = Vec::new();
    let mut held = Vec::new();
    for step in 0..u64::from(scene.options.steps) {
        scene.dog.step(format_args!("model, seed {seed}, step {step}"));
        let draw = mix(seed ^ mix(step));
        let pick = (draw >> 32) as usize;
        match draw % 8 {
            0..3 if live.len() < LIVE => {
                let size = size(pick, scene.options.max);
                let memory = scene.domain.allocate(size, false)?;
                let (address, length) = (memory.address(), memory.len());
                tally.expect(ledger().add(address, length), || {
                    format!("step {step}: {length} bytes at {address:#x} overlap live memory")
                });
                let piece = Piece { memory, key: draw };
                write(&copier, &piece)?;
                live.push(piece);
            }
            0..4 if !live.is_empty() => {
                let piece = live.swap_remove(pick % live.len());
                verify(tally, &copier, &piece, step)?;
                let address = piece.memory.address();
                // Before it is free, or another thread could get it and find it taken.
                ledger().remove(address);
                drop(piece);
            }
            4 | 5 if !live.is_empty() => {
                let piece = &live[pick % live.len()];
                let (address, length) = question(piece, mix(draw));
                let wanted = live
                    .iter()
                    .map(|piece| (piece.memory.address(), piece.memory.len()))
                    .find(|&(base, size)| inside(address, 0, base, size));
                let found = scene.domain.query(address, length).ok();
                let found = found.filter(|it| it.gaudi).map(|it| (it.base, it.length));
                // Beyond our own memory another thread's may begin.
                let foreign = wanted.is_none()
                    && found.is_some_and(|(base, size)| inside(address, 0, base, size))
                    && live.iter().all(|piece| Some(piece.memory.address()) != found.map(|f| f.0));
                tally.expect(found == wanted || foreign, || {
                    format!(
                        "step {step}: {length} bytes at {address:#x}: {found:x?}, not {wanted:x?}"
                    )
                });
            }
            6 if !live.is_empty() && offers => {
                let piece = &live[pick % live.len()];
                let length = 1 + pick % piece.memory.len();
                let offset_in = mix(draw) as usize % (piece.memory.len() - length + 1);
                let address = piece.memory.address() + offset_in as u64;
                let exported = scene.domain.export(address, length)?;
                let covers = exported.as_ref().is_some_and(|(fd, offset)| {
                    rustix::fs::seek(fd, SeekFrom::End(0))
                        .is_ok_and(|size| offset + length as u64 <= size)
                });
                tally.expect(covers, || format!("step {step}: dma-buf of {length} bytes"));
                held.extend(exported);
                if held.len() > 20 {
                    held.swap_remove(pick % held.len());
                }
            }
            _ if !live.is_empty() => {
                verify(tally, &copier, &live[pick % live.len()], step)?;
            }
            _ => {}
        }
    }
    for piece in live {
        verify(tally, &copier, &piece, u64::MAX)?;
        ledger().remove(piece.memory.address());
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

fn inside(address: u64, length: usize, base: u64, size: usize) -> bool {
    address
        .checked_sub(base)
        .is_some_and(|offset| offset < size as u64 && length as u64 <= size as u64 - offset)
}

/// A range that is inside, touches an end, or sticks out.
fn question(piece: &Piece<'_>, draw: u64) -> (u64, usize) {
    let (base, size) = (piece.memory.address(), piece.memory.len());
    let span = size as u64 + 4;
    let address = base - 2 + draw % span;
    (address, (mix(draw) % (span + 2)) as usize)
}

fn write(copier: &Copier<'_>, piece: &Piece<'_>) -> Result<()> {
    let mut bytes = vec![0; piece.memory.len()];
    fill(piece.key, 0, &mut bytes);
    Ok(copier.put(&bytes, piece.memory.address())?)
}

fn verify(tally: &mut Tally, copier: &Copier<'_>, piece: &Piece<'_>, step: u64) -> Result<()> {
    let (mut wanted, mut found) = (vec![0; piece.memory.len()], vec![0; piece.memory.len()]);
    fill(piece.key, 0, &mut wanted);
    copier.get(piece.memory.address(), &mut found)?;
    tally.expect(wanted == found, || {
        format!("step {step}: {:#x} does not hold what was written", piece.memory.address())
    });
    Ok(())
}
