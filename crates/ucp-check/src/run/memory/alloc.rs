//! `alloc`: every size, all alive at once, disjoint, freed in any order, and again.
//! `exhaust`: as much as there is, again and again.

use super::ledger::Ledger;
use super::{Scene, Tally};
use crate::pattern::mix;
use crate::uct::{Memory, Status};
use anyhow::Result;

const SIZES: [usize; 15] = [
    1,
    2,
    63,
    64,
    65,
    4095,
    4096,
    4097,
    65536,
    (1 << 20) - 1,
    1 << 20,
    (1 << 20) + 1,
    16 << 20,
    100 << 20,
    256 << 20,
];
/// More than any card has.
const TOO_MUCH: usize = 1 << 50;

pub(super) fn run(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let sizes: Vec<usize> = SIZES.into_iter().filter(|&size| size <= scene.options.max).collect();
    for round in 0..3 {
        let mut ledger = Ledger::default();
        let mut live: Vec<Memory<'_>> = Vec::new();
        for &size in &sizes {
            for _ in 0..if size <= 65536 { 3 } else { 1 } {
                let memory = scene.domain.allocate(size, false)?;
                let (address, length) = (memory.address(), memory.len());
                tally.expect(length >= size, || format!("{size} bytes asked for, {length} given"));
                tally.expect(ledger.add(address, length), || {
                    format!("{length} bytes at {address:#x} overlap live memory")
                });
                live.push(memory);
            }
        }
        for memory in &live {
            check_whole(scene, tally, memory);
        }
        let mut draw = mix(scene.options.seed ^ round);
        while !live.is_empty() {
            draw = mix(draw);
            let memory = live.swap_remove(draw as usize % live.len());
            let (address, length) = (memory.address(), memory.len());
            drop(memory);
            ledger.remove(address);
            let found = scene.domain.query(address, length);
            tally.expect(found.is_err(), || format!("{address:#x} is freed, but {found:?}"));
            if let Some(other) = live.first() {
                check_whole(scene, tally, other);
            }
        }
    }
    let nothing = scene.domain.allocate(0, true).err().map(|error| error.status);
    tally.equal(&nothing, &Some(Status::INVALID_PARAM), "allocating 0 bytes");
    let too_much = scene.domain.allocate(TOO_MUCH, true).err().map(|error| error.status);
    tally.equal(&too_much, &Some(Status::NO_MEMORY), "allocating more than there is");
    let after = scene.domain.allocate(4096, false);
    tally.expect(after.is_ok(), || format!("allocating after a refusal: {:?}", after.err()));
    Ok(())
}

/// Fills the card in pieces until there is no more, gives all back, and gets as many again.
pub(super) fn exhaust(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let piece = scene.options.max;
    let mut counts = Vec::new();
    for round in 0..4 {
        let mut ledger = Ledger::default();
        let mut live = Vec::new();
        let refused = loop {
            match scene.domain.allocate(piece, true) {
                Ok(memory) => live.push(memory),
                Err(error) => break error.status,
            }
            let (address, length) = live.last().map_or((0, 0), |m| (m.address(), m.len()));
            tally.expect(ledger.add(address, length), || {
                format!("{length} bytes at {address:#x} overlap live memory")
            });
        };
        tally.equal(&refused, &Status::NO_MEMORY, "the end of the card's memory");
        counts.push(live.len());
        // Another order each time, with a dma-buf left open across the frees now and then.
        let mut kept = None;
        while !live.is_empty() {
            let at = mix(scene.options.seed ^ (live.len() as u64) << round) as usize % live.len();
            let memory = live.swap_remove(at);
            if round % 2 == 1 && kept.is_none() {
                kept = scene.domain.export(memory.address(), 1)?;
            }
        }
        if kept.is_some() {
            // The driver keeps what is exported; the rest is to be had again.
            let some = scene.domain.allocate(piece, false);
            tally.expect(some.is_ok(), || format!("beside an open dma-buf: {:?}", some.err()));
        }
    }
    let same = counts.windows(2).all(|pair| pair[0] == pair[1]) && counts[0] > 0;
    tally.expect(same, || format!("pieces of {piece} bytes, round by round: {counts:?}"));
    println!("{} pieces of {piece} bytes, each round", counts[0]);
    Ok(())
}

fn check_whole(scene: &Scene<'_>, tally: &mut Tally, memory: &Memory<'_>) {
    let (address, length) = (memory.address(), memory.len());
    match scene.domain.query(address, length) {
        Ok(answer) => {
            let found = (answer.gaudi, answer.base, answer.length);
            tally.equal(&found, &(true, address, length), "what an allocation is");
        }
        Err(error) => {
            tally.expect(false, || format!("{length} bytes at {address:#x}: {error}"));
        }
    }
}
