//! `atomics`: every atomic operation, 32 and 64 bits wide, on a peer's memory or our own.
//!
//! Unless a transport can do an atomic operation, UCX does it with the CPU of the process that owns the memory. On
//! device memory that is a load from an address that no CPU can access, and the owner dies. This check shows what
//! happens.

use crate::client::Client;
use crate::processes::{self, Environment, Group, Member, Message, describe};
use crate::ucp::{
    Atomic, Endpoint, Features, Memory, PackedRegion, Region, RemoteKey, Ucx, WorkerOptions,
};
use crate::watchdog::Watchdog;
use anyhow::{Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Rank of the process that starts the operations; the other one has the memory.
const INITIATOR: u8 = 0;
/// Offset of the variable: not 0, so that its address cannot be confused with the region's.
const OFFSET: usize = 64;
/// Length of the regions.
const LENGTH: usize = 4096;

#[derive(clap::Args)]
pub struct Options {
    /// Where the variable is: gaudi or host
    #[arg(long, value_enum, default_value = "gaudi")]
    memory: Memory,
    /// In this process, not in another
    #[arg(long)]
    alone: bool,
    #[command(flatten)]
    environment: Environment,
    /// Seconds that one step may take
    #[arg(long, default_value_t = 60.0)]
    timeout: f64,
}

/// The job of the two processes.
#[derive(Serialize, Deserialize)]
pub(crate) struct Job {
    ucx: Option<PathBuf>,
    memory: Memory,
}

/// One operation: its name, whether it returns the old value, and its effect on the old value with the operand and, for
/// compare-swap, the new value.
type Row = (&'static str, Atomic, bool, fn(u64, u64, u64) -> u64);

const ROWS: [Row; 8] = [
    ("add", Atomic::Add, false, |old, x, _| old.wrapping_add(x)),
    ("and", Atomic::And, false, |old, x, _| old & x),
    ("or", Atomic::Or, false, |old, x, _| old | x),
    ("xor", Atomic::Xor, false, |old, x, _| old ^ x),
    ("fetch-add", Atomic::Add, true, |old, x, _| old.wrapping_add(x)),
    ("fetch-xor", Atomic::Xor, true, |old, x, _| old ^ x),
    ("swap", Atomic::Swap, true, |_, x, _| x),
    ("compare-swap", Atomic::CompareSwap, true, |old, x, new| if old == x { new } else { old }),
];

/// Prints how each operation ended. An error when one went wrong.
pub fn run(folder: Option<&Path>, options: Options) -> Result<()> {
    let (memory, timeout) = (options.memory, options.timeout);
    let job = Job { ucx: folder.map(Path::to_owned), memory };
    let (mut right, mut wrong) = (0, 0);
    let mut count = |name: &str, error: Option<String>| {
        println!("{memory} {name}: {}", error.as_deref().unwrap_or("right"));
        if error.is_some() { wrong += 1 } else { right += 1 }
    };
    let outcome = if options.alone {
        alone(&job, timeout, |name, error| {
            count(&name, error);
            Ok(())
        })
    } else {
        let job = processes::Job::Atomics(job);
        let group = Group::start(&job, 2, timeout, &options.environment)?;
        let on = |_: &mut Group, _, message| {
            if let Message::Checked(name, error) = message {
                count(&name, error);
            }
            Ok(())
        };
        group.collect(on, |rank, status| {
            let role = if rank == INITIATOR { "initiator" } else { "target" };
            ensure!(status.success(), "{role}: {}", describe(rank, status));
            Ok(())
        })
    };
    println!("{right} right, {wrong} wrong");
    outcome?;
    ensure!(wrong == 0 && right == ROWS.len() * 2, "not every atomic operation is right");
    Ok(())
}

/// Runs the operations on a variable of this process.
fn alone(
    job: &Job,
    timeout: f64,
    ended: impl FnMut(String, Option<String>) -> Result<()>,
) -> Result<()> {
    let watchdog = Watchdog::start("atomics", timeout);
    let client = client(job, &watchdog)?;
    let region = client.region(job.memory, LENGTH)?;
    let endpoint = Endpoint::to_itself(client.worker())?;
    // SAFETY: our own region, which lives longer than the key.
    let key = unsafe { endpoint.unpack(&region.pack()?) }?;
    operations(&client, &endpoint, &key, ended)?;
    drop(key);
    client.finish(endpoint.close(false)?)?;
    Ok(())
}

fn client(job: &Job, watchdog: &Watchdog) -> Result<Client> {
    let ucx = Ucx::load(job.ucx.as_deref())?;
    Client::new(ucx, Features::ATOMIC, WorkerOptions::default(), watchdog)
}

/// One of the two processes.
pub(crate) fn side(job: &Job, mut member: Member) -> Result<()> {
    let client = client(job, &member.watchdog)?;
    let (worker, mut control) = (client.worker(), member.only_channel()?);
    let address: Vec<u8> = control.exchange(worker, &worker.address()?)?;
    // SAFETY: the address of the worker of the other process, which runs the same UCX.
    let endpoint = unsafe { client.connect(&address, false) }?;
    let region = client.region(job.memory, LENGTH)?;
    let packed: PackedRegion = control.exchange(worker, &region.pack()?)?;
    if member.rank == INITIATOR {
        // SAFETY: the other process keeps its region until both meet.
        let key = unsafe { endpoint.unpack(&packed) }?;
        operations(&client, &endpoint, &key, |name, error| {
            member.report(&Message::Checked(name, error))
        })?;
    }
    client.step("waiting for the other process");
    control.barrier(worker, 1)?;
    client.finish(endpoint.close(false)?)?;
    control.barrier(worker, 2)
}

/// All operations in both widths; `ended` receives the result of each.
fn operations(
    client: &Client,
    endpoint: &Endpoint,
    key: &RemoteKey,
    mut ended: impl FnMut(String, Option<String>) -> Result<()>,
) -> Result<()> {
    // Operand, reply, and the variable's value.
    let scratch = client.region(Memory::Host, 64)?;
    for width in [4, 8] {
        for row in &ROWS {
            let name = format!("{} {}", row.0, width * 8);
            client.step(&name);
            let outcome = one(client, endpoint, key, &scratch, width, row);
            ended(name, outcome.err().map(|error| format!("{error:#}")))?;
        }
    }
    Ok(())
}

fn one(
    client: &Client,
    endpoint: &Endpoint,
    key: &RemoteKey,
    scratch: &Arc<Region>,
    width: usize,
    &(_, operation, fetches, effect): &Row,
) -> Result<()> {
    let cut = |value: u64| if width == 4 { value & u64::from(u32::MAX) } else { value };
    let (old, new) = (cut(0x0123_4567_fedc_ba98), cut(0x1111_2222_3333_4444));
    // The swap must happen, so compare with the current value.
    let swaps = operation == Atomic::CompareSwap;
    let operand = if swaps { old } else { cut(0x5a5a_a5a5_0ff0_f00f) };
    let write = |at: usize, value: u64| scratch.write(at, &value.to_le_bytes()[..width]);
    let read = |at: usize| {
        let mut bytes = [0; 8];
        scratch.read(at, &mut bytes[..width]);
        u64::from_le_bytes(bytes)
    };
    write(16, old);
    client.finish(endpoint.put(&scratch.span(16, width), key, OFFSET)?)?;
    client.finish(endpoint.flush()?)?;
    write(0, operand);
    write(8, new);
    let reply = scratch.span(8, width);
    let reply = fetches.then_some(&reply);
    client.finish(endpoint.atomic(operation, &scratch.span(0, width), key, OFFSET, reply)?)?;
    client.finish(endpoint.flush()?)?;
    client.finish(endpoint.get(&scratch.span(16, width), key, OFFSET)?)?;
    let (found, wanted) = (read(16), cut(effect(old, operand, new)));
    ensure!(found == wanted, "the variable is {found:#x} instead of {wanted:#x}");
    if fetches && read(8) != old {
        bail!("the old value came back as {:#x} instead of {old:#x}", read(8));
    }
    Ok(())
}
