//! `atomics`: every atomic operation, 32 and 64 bits wide, on a peer's memory or our own.
//!
//! UCX carries an atomic operation out with the processor of the process that owns the memory unless
//! a transport can do it. On device memory that is a load from an address no processor can reach:
//! the owner dies. This shows what happens, whatever it is.

use super::siblings::{Sibling, Siblings, describe};
use super::surroundings::Surroundings;
use crate::rig::{Rig, RigOptions};
use crate::ucp::{Atomic, Endpoint, Features, Memory, PackedRegion, Region, RemoteKey, Ucx};
use crate::watchdog::Watchdog;
use anyhow::{Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Name of the hidden subcommand that runs one side.
pub const ROLE: &str = "atomics-side";

/// Rank of the process that asks for the operations; the other one has the memory.
const INITIATOR: u8 = 0;
/// Where the variable is: not at the start, so that its address is no mistake for the region's.
const OFFSET: usize = 64;
/// Length of the regions.
const LENGTH: usize = 4096;

/// What to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Options {
    /// Where UCX is.
    pub ucx: Option<PathBuf>,
    /// Where the variable is.
    pub memory: Memory,
    /// Seconds for a step.
    pub timeout_s: f64,
}

#[derive(Serialize, Deserialize)]
enum Message {
    /// An operation ended: its name, and what was wrong with it.
    Ended(String, Option<String>),
    Error(String),
}

/// One operation: what it is called, whether the old value is asked for, and its effect.
struct Row {
    name: &'static str,
    operation: Atomic,
    fetches: bool,
    effect: fn(u64, u64, u64) -> u64,
}

const ROWS: [Row; 8] = [
    Row {
        name: "add",
        operation: Atomic::Add,
        fetches: false,
        effect: |old, x, _| old.wrapping_add(x),
    },
    Row { name: "and", operation: Atomic::And, fetches: false, effect: |old, x, _| old & x },
    Row { name: "or", operation: Atomic::Or, fetches: false, effect: |old, x, _| old | x },
    Row { name: "xor", operation: Atomic::Xor, fetches: false, effect: |old, x, _| old ^ x },
    Row {
        name: "fetch-add",
        operation: Atomic::Add,
        fetches: true,
        effect: |old, x, _| old.wrapping_add(x),
    },
    Row { name: "fetch-xor", operation: Atomic::Xor, fetches: true, effect: |old, x, _| old ^ x },
    Row { name: "swap", operation: Atomic::Swap, fetches: true, effect: |_, x, _| x },
    Row {
        name: "compare-swap",
        operation: Atomic::CompareSwap,
        fetches: true,
        effect: |old, x, new| if old == x { new } else { old },
    },
];

/// Two processes; the lines say how each operation ended. An error when one went wrong.
pub fn run(options: &Options, around: &Surroundings) -> Result<()> {
    let mut twins: Siblings<Message> = Siblings::twins(ROLE, options, around)?;
    let limit = Duration::from_secs_f64(options.timeout_s * 4.0 + 60.0);
    let (mut right, mut wrong) = (0, 0);
    let mut deaths = Vec::new();
    for _ in 0..2 {
        let rank = loop {
            match twins.next(limit)? {
                (_, Some(Message::Ended(name, error))) => {
                    println!("{} {name}: {}", options.memory, error.as_deref().unwrap_or("right"));
                    if error.is_some() { wrong += 1 } else { right += 1 }
                }
                (rank, Some(Message::Error(error))) => bail!("process {rank}: {error}"),
                (rank, None) => break rank,
            }
        };
        let status = twins.ended(rank)?;
        if !status.success() {
            let role = if rank == INITIATOR { "initiator" } else { "target" };
            deaths.push(format!("{role}: {}", describe(rank, status)));
            break; // dropping the twins ends the other one
        }
    }
    println!("{right} right, {wrong} wrong");
    ensure!(deaths.is_empty(), "{}", deaths.join(", "));
    ensure!(wrong == 0 && right == ROWS.len() * 2, "not every atomic operation is right");
    Ok(())
}

/// The variable is our own.
pub fn run_alone(options: &Options) -> Result<()> {
    let dog = Watchdog::start("atomics", Duration::from_secs_f64(options.timeout_s));
    let rig = rig(options, &dog)?;
    let region = rig.region(options.memory, LENGTH)?;
    let address = rig.worker().address()?;
    // SAFETY: the address of our own worker.
    let endpoint = unsafe { rig.connect(&address, false) }?;
    // SAFETY: our own region, which lives longer than the key.
    let key = unsafe { endpoint.unpack(&region.pack()?) }?;
    operations(&rig, &endpoint, &key, |name, error| {
        println!("{} {name}: {}", options.memory, error.as_deref().unwrap_or("right"));
        ensure!(error.is_none(), "not every atomic operation is right");
        Ok(())
    })?;
    drop(key);
    rig.finish(endpoint.close(false)?)?;
    println!("{} right, 0 wrong", ROWS.len() * 2);
    Ok(())
}

/// One of the two processes; `Ok(false)`: it failed and told the parent.
pub fn side(rank: u8, parent: u32, options: &Options) -> Result<bool> {
    let twin = Sibling::begin(rank, parent, Duration::from_secs_f64(options.timeout_s))?;
    twin.run(Message::Error, |twin| run_side(rank, twin, options))
}

fn rig(options: &Options, dog: &Watchdog) -> Result<Rig> {
    let ucx = Ucx::load(options.ucx.as_deref())?;
    Rig::new(ucx, RigOptions { features: Features::ATOMIC, hint: false, multi: false }, dog)
}

fn run_side(rank: u8, mut twin: Sibling, options: &Options) -> Result<()> {
    let mut parent = twin.reporter()?;
    let rig = rig(options, &twin.dog)?;
    let worker = rig.worker();
    let mut control = twin.only_line()?;
    let address: Vec<u8> = control.exchange(worker, &worker.address()?)?;
    // SAFETY: the address of the worker of our twin, which runs the same UCX.
    let endpoint = unsafe { rig.connect(&address, false) }?;
    let region = rig.region(options.memory, LENGTH)?;
    let packed: PackedRegion = control.exchange(worker, &region.pack()?)?;
    if rank == INITIATOR {
        // SAFETY: the twin keeps its region until we meet.
        let key = unsafe { endpoint.unpack(&packed) }?;
        operations(&rig, &endpoint, &key, |name, error| parent.tell(&Message::Ended(name, error)))?;
    }
    rig.step("waiting for the other process");
    control.barrier(worker, 1)?;
    rig.finish(endpoint.close(false)?)?;
    control.barrier(worker, 2)
}

/// All operations in both widths; `ended` hears how each went.
fn operations(
    rig: &Rig,
    endpoint: &Endpoint,
    key: &RemoteKey,
    mut ended: impl FnMut(String, Option<String>) -> Result<()>,
) -> Result<()> {
    // Operand, reply, and room for the variable's value.
    let scratch = rig.region(Memory::Host, 64)?;
    for width in [4, 8] {
        for row in &ROWS {
            let name = format!("{} {}", row.name, width * 8);
            rig.step(&name);
            let outcome = one(rig, endpoint, key, &scratch, width, row);
            ended(name, outcome.err().map(|error| format!("{error:#}")))?;
        }
    }
    Ok(())
}

fn one(
    rig: &Rig,
    endpoint: &Endpoint,
    key: &RemoteKey,
    scratch: &Arc<Region>,
    width: usize,
    row: &Row,
) -> Result<()> {
    let cut = |value: u64| if width == 4 { value & u64::from(u32::MAX) } else { value };
    let (old, new) = (cut(0x0123_4567_fedc_ba98), cut(0x1111_2222_3333_4444));
    // Swapping must happen, so the value that is compared with is the one that is there.
    let operand =
        if row.operation == Atomic::CompareSwap { old } else { cut(0x5a5a_a5a5_0ff0_f00f) };
    let write = |at: usize, value: u64| scratch.write(at, &value.to_le_bytes()[..width]);
    let read = |at: usize| {
        let mut bytes = [0; 8];
        scratch.read(at, &mut bytes[..width]);
        u64::from_le_bytes(bytes)
    };
    write(16, old);
    let put = endpoint.put(&scratch.span(16, width), key, OFFSET)?;
    rig.finish(put)?;
    rig.finish(endpoint.flush()?)?;
    write(0, operand);
    write(8, new);
    let reply = scratch.span(8, width);
    let reply = row.fetches.then_some(&reply);
    let request = endpoint.atomic(row.operation, &scratch.span(0, width), key, OFFSET, reply)?;
    rig.finish(request)?;
    rig.finish(endpoint.flush()?)?;
    rig.finish(endpoint.get(&scratch.span(16, width), key, OFFSET)?)?;
    let (found, wanted) = (read(16), cut((row.effect)(old, operand, new)));
    ensure!(found == wanted, "the variable is {found:#x} instead of {wanted:#x}");
    if row.fetches {
        ensure!(read(8) == old, "the old value came back as {:#x} instead of {old:#x}", read(8));
    }
    Ok(())
}
