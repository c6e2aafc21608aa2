//! `alloc`: every size, all alive at once, disjoint, freed in any order, and again.

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
