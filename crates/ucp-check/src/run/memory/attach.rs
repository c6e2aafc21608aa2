//! `attach`: another process attaches our memory and copies inside it, with a card of its own.

use super::{Scene, Tally};
use crate::uct::{Copier, Status};
use anyhow::{Context, Result, bail, ensure};
use std::fmt::Write as _;
use std::io::{Read, Write as _};
use std::process::{Command, Stdio};

const LENGTH: usize = 100_003;

/// The owner: allocates twice, fills the first, has a child copy it to the second, and looks. With two
/// allocations the child needs two mappings at once, also where it may keep none
/// (`UCX_GAUDI_IPC_CACHE_MAX_REGIONS=0`).
pub(super) fn run(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let source = scene.domain.allocate(LENGTH, false)?;
    let target = scene.domain.allocate(LENGTH, false)?;
    let copier = Copier::open(scene.domain, scene.transport())?;
    let sent: Vec<u8> = (0..LENGTH).map(|at| (at * 7 + at / 251) as u8).collect();
    copier.put(&sent, source.address())?;
    copier.put(&vec![0; LENGTH], target.address())?;

    let sharing = scene.domain.uct().open("gaudi_ipc", &[])?;
    let mut registered = Vec::new();
    let mut words = String::new();
    for address in [source.address(), target.address()] {
        let memory = sharing.register(address, LENGTH, Some(true))?;
        let mut key = vec![0; sharing.attributes()?.key_size];
        memory.pack(address, LENGTH, &mut key)?;
        registered.push(memory);
        for byte in &key {
            write!(words, "{byte:02x}")?;
        }
        write!(words, " {address} ")?;
    }
    let mut child = Command::new(std::env::current_exe()?);
    child.args(["memory", "attached", "--component", "gaudi_ipc"]);
    if let Some(ucx) = scene.options.ucx {
        child.arg("--ucx").arg(ucx);
    }
    let mut child = child.stdin(Stdio::piped()).spawn().context("starting the other process")?;
    let mut pipe = child.stdin.take().context("no pipe")?;
    pipe.write_all(words.as_bytes())?;
    drop(pipe);
    ensure!(child.wait()?.success(), "the other process failed");

    let mut received = vec![0; LENGTH];
    copier.get(target.address(), &mut received)?;
    tally.expect(received == sent, || "the other process's copy has not arrived".into());
    Ok(())
}

/// The other process.
pub(super) fn attached(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).context("no key on standard input")?;
    let words: Vec<&str> = text.split_whitespace().collect();
    let [source_key, source, target_key, target] = words[..] else {
        bail!("two keys, two addresses")
    };
    let (source_key, target_key) = (from_hex(source_key)?, from_hex(target_key)?);
    let source: u64 = source.parse().context("an address")?;
    let target: u64 = target.parse().context("an address")?;

    // A key of memory that is not shared: the token is another.
    let mut forged = source_key.clone();
    forged[35] ^= 1;
    let refused = scene.domain.attach(&forged).err().map(|error| error.status);
    tally.equal(&refused, &Some(Status::UNREACHABLE), "a forged key");

    let memory = scene.domain.attach(&source_key)?;
    let remote = scene.domain.unpack(&target_key, None)?;
    let copier = Copier::open(scene.domain, scene.transport())?;
    copier.put_attached(source, LENGTH, &memory, target, &remote)?;
    // The handle and the key are for this memory and not for what lies behind it.
    let beyond = target + 2 * LENGTH as u64;
    let outside = copier.put_attached(source, LENGTH, &memory, beyond, &remote);
    let refused = outside.err().map(|error| error.status);
    tally.equal(&refused, &Some(Status::INVALID_ADDR), "a copy beyond the key's memory");
    Ok(())
}

fn from_hex(text: &str) -> Result<Vec<u8>> {
    let digits = |at: usize| text.get(at..at + 2).context("half a byte");
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(digits(at)?, 16).context("a key in hex"))
        .collect()
}
