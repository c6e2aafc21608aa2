//! `attach`: another process attaches our memory and copies inside it with its own card.

use super::Checker;
use crate::uct::{MemoryType, Status};
use anyhow::{Context, Result, bail, ensure};
use std::io::{Read, Write};
use std::process::{Command, Stdio};

const LENGTH: usize = 100_003;

/// The owner: allocates twice, fills the first allocation, has a child copy it to the second, and compares. With two
/// allocations the child needs two mappings at once, even if it may cache none (`UCX_GAUDI_IPC_CACHE_MAX_REGIONS=0`).
pub(super) fn run(check: &Checker<'_>) -> Result<()> {
    let memory = [check.domain.allocate(LENGTH)?, check.domain.allocate(LENGTH)?];
    let [source, target] = memory.each_ref().map(|memory| memory.address());
    let copier = check.copier()?;
    let sent: Vec<u8> = (0..LENGTH).map(|at| (at * 7 + at / 251) as u8).collect();
    copier.put(&sent, source)?;
    copier.put(&vec![0; LENGTH], target)?;

    let sharing = check.domain.ucx().open_domain("gaudi_ipc", &[])?;
    let mut registered = Vec::new();
    let mut keys: Vec<(Vec<u8>, u64)> = Vec::new();
    for address in [source, target] {
        let registration = sharing.register(address, LENGTH, Some(MemoryType::GAUDI))?;
        let mut key = vec![0; sharing.attributes()?.rkey_packed_size];
        registration.pack(address, LENGTH, &mut key)?;
        registered.push(registration);
        keys.push((key, address));
    }
    let mut child = Command::new(std::env::current_exe()?);
    child.args(["memory", "attached", "--component", "gaudi_ipc"]);
    child.args(check.folder.iter().flat_map(|folder| ["--ucx".as_ref(), folder.as_os_str()]));
    let mut child = child.stdin(Stdio::piped()).spawn().context("starting the other process")?;
    child.stdin.take().context("no pipe")?.write_all(&serde_json::to_vec(&keys)?)?;
    ensure!(child.wait()?.success(), "the other process failed");
    let arrived = copier.read(target, LENGTH)? == sent;
    check.expect(arrived, "the other process's copy has not arrived");
    Ok(())
}

pub(super) fn attached(check: &Checker<'_>) -> Result<()> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).context("no key on standard input")?;
    let keys: Vec<(Vec<u8>, u64)> = serde_json::from_str(&text).context("the keys")?;
    let [(source_key, source), (target_key, target)] = &keys[..] else {
        bail!("two keys, two addresses")
    };
    // A key with another token, which belongs to no shared memory.
    let mut forged = source_key.clone();
    forged[35] ^= 1;
    check.refused(check.domain.attach(&forged), Status::UNREACHABLE, "a forged key");

    let memory = check.domain.attach(source_key)?;
    let remote = check.domain.unpack(target_key, None)?;
    let copier = check.copier()?;
    copier.put_attached(*source, LENGTH, &memory, *target, &remote)?;
    // The handle and the key are valid for this memory, and not for the bytes behind it.
    let outside =
        copier.put_attached(*source, LENGTH, &memory, target + 2 * LENGTH as u64, &remote);
    check.refused(outside, Status::INVALID_ADDR, "a copy beyond the key's memory");
    Ok(())
}
