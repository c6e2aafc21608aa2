//! `asleep`: one process that sleeps on its worker's event descriptor while a copy to or from Gaudi
//! memory is all that is under way, and counts whether it really slept or went round and round.

use crate::pattern::mix;
use crate::rig::{Rig, RigOptions};
use crate::ucp::{Features, Memory, Region, RemoteKey, Ucx, Waiting};
use crate::watchdog::Watchdog;
use anyhow::{Result, ensure};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Calls that one operation may take: a few wake-ups, each with a look before and after.
const CALLS_PER_OPERATION: u64 = 12;

/// What to do.
pub struct Options<'a> {
    /// Where UCX is.
    pub ucx: Option<&'a Path>,
    /// Bytes of the copies.
    pub sizes: &'a [usize],
    /// How often, for each size, there and back.
    pub count: u64,
    /// The device is known to take its time: most operations must have slept.
    pub slow: bool,
    /// A step may take this long.
    pub timeout: Duration,
}

/// Copies there and back, asleep meanwhile.
pub fn run(options: &Options<'_>) -> Result<()> {
    let dog = Watchdog::start("asleep", options.timeout);
    let ucx = Ucx::load(options.ucx)?;
    let features = Features::RMA.with_wakeup();
    let rig = Rig::new(ucx, RigOptions { features, hint: false, multi: false }, &dog)?;
    println!("{:>10} {:>6} {:>8} {:>8} {:>8}", "bytes", "copies", "slept", "busy", "progress");
    for &size in options.sizes {
        dog.step(format_args!("copies of {size} bytes"));
        let device = rig.region(Memory::Gaudi, size)?;
        let key = rig.own_key(&device.pack()?)?;
        let (sent, back) = (rig.region(Memory::Host, size)?, rig.region(Memory::Host, size)?);
        // Connections are made, and memory is pinned, by the first.
        copy(&rig, &sent, &back, &key, 0)?;
        let before = rig.worker().waiting();
        for n in 1..=options.count {
            copy(&rig, &sent, &back, &key, n)?;
        }
        // A put and a get; the flush of the put has nothing left to wait for.
        let operations = 2 * options.count;
        let Waiting { slept, busy, progressed } = rig.worker().waiting() - before;
        println!("{size:>10} {operations:>6} {slept:>8} {busy:>8} {progressed:>8}");
        let most = CALLS_PER_OPERATION * operations;
        ensure!(
            busy <= most,
            "{size} bytes: {busy} times told not to sleep in {operations} copies"
        );
        ensure!(progressed <= most, "{size} bytes: {progressed} calls of progress, spinning");
        // Not each: on a busy machine the device may be quicker than we are in falling asleep.
        ensure!(!options.slow || slept >= options.count, "{size} bytes: slept only {slept} times");
    }
    dog.step("ucp_cleanup");
    Ok(())
}

/// Other bytes each time, there and back, compared.
fn copy(rig: &Rig, sent: &Arc<Region>, back: &Arc<Region>, key: &RemoteKey, n: u64) -> Result<()> {
    let bytes: Vec<u8> =
        (0..sent.length() as u64).map(|at| (mix((at / 8) ^ (n << 40)) >> (at % 8)) as u8).collect();
    let mut came: Vec<u8> = bytes.iter().map(|byte| !byte).collect();
    sent.write(0, &bytes);
    back.write(0, &came);
    rig.ferry_in(&sent.whole(), key)?;
    rig.ferry_out(&back.whole(), key)?;
    back.read(0, &mut came);
    let wrong = bytes.iter().zip(&came).position(|(sent, came)| sent != came);
    ensure!(wrong.is_none(), "round {n}: the bytes differ from byte {} on", wrong.unwrap_or(0));
    Ok(())
}
