//! `attach`: another process attaches our memory and copies inside it, with a card of its own.

use super::{Scene, Tally};
use crate::uct::{Copier, Status};
use anyhow::{Context, Result, ensure};
use std::fmt::Write as _;
use std::io::{Read, Write as _};
use std::process::{Command, Stdio};

const LENGTH: usize = 100_003;

/// The owner: allocates, fills, has a child copy the first half to the second, and looks.
pub(super) fn run(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let memory = scene.domain.allocate(2 * LENGTH, false)?;
    let copier = Copier::open(scene.domain, scene.transport())?;
    let sent: Vec<u8> = (0..LENGTH).map(|at| (at * 7 + at / 251) as u8).collect();
    copier.put(&sent, memory.address())?;
    copier.put(&vec![0; LENGTH], memory.address() + LENGTH as u64)?;

    let sharing = scene.domain.uct().open("gaudi_ipc", &[])?;
    let registered = sharing.register(memory.address(), 2 * LENGTH, Some(true))?;
    let mut key = vec![0; sharing.attributes()?.key_size];
    registered.pack(memory.address(), 2 * LENGTH, &mut key)?;
    let mut text = String::new();
    for byte in &key {
        write!(text, "{byte:02x}")?;
    }
    let mut child = Command::new(std::env::current_exe()?);
    child.args(["memory", "attached", "--component", "gaudi_ipc"]);
    if let Some(ucx) = scene.options.ucx {
        child.arg("--ucx").arg(ucx);
    }
    let mut child = child.stdin(Stdio::piped()).spawn().context("starting the other process")?;
    let mut pipe = child.stdin.take().context("no pipe")?;
    write!(pipe, "{text} {}", memory.address())?;
    drop(pipe);
    ensure!(child.wait()?.success(), "the other process failed");

    let mut received = vec![0; LENGTH];
    copier.get(memory.address() + LENGTH as u64, &mut received)?;
    tally.expect(received == sent, || "the other process's copy has not arrived".into());
    Ok(())
}

/// The other process.
pub(super) fn attached(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).context("no key on standard input")?;
    let (key, address) = text.split_once(' ').context("a key and an address")?;
    let address: u64 = address.trim().parse().context("an address")?;
    let digits = |at: usize| u8::from_str_radix(&key[at..at + 2], 16).context("a key in hex");
    let key: Vec<u8> = (0..key.len()).step_by(2).map(digits).collect::<Result<_>>()?;

    // A key of memory that is not shared: the token is another.
    let mut forged = key.clone();
    forged[35] ^= 1;
    let refused = scene.domain.attach(&forged).err().map(|error| error.status);
    tally.equal(&refused, &Some(Status::UNREACHABLE), "a forged key");

    let memory = scene.domain.attach(&key)?;
    let remote = scene.domain.unpack(&key, None)?;
    let copier = Copier::open(scene.domain, scene.transport())?;
    copier.put_attached(address, LENGTH, &memory, address + LENGTH as u64, &remote)?;
    // The handle and the key are for this memory and not for what lies behind it.
    let beyond = address + 3 * LENGTH as u64;
    let outside = copier.put_attached(address, LENGTH, &memory, beyond, &remote);
    let refused = outside.err().map(|error| error.status);
    tally.equal(&refused, &Some(Status::INVALID_ADDR), "a copy beyond the key's memory");
    Ok(())
}
