//! `asleep`: one process sleeps on its worker's event descriptor while only a copy to or from Gaudi memory is in
//! flight, and counts whether it really slept or polled.

use crate::client::Client;
use crate::matrix::size;
use crate::pattern::fill;
use crate::ucp::{Features, Memory, Region, RemoteKey, Ucx, WorkerOptions};
use crate::watchdog::Watchdog;
use anyhow::{Result, ensure};
use std::path::Path;
use std::sync::Arc;

/// Progress calls that one operation may take: a few wake-ups, each with a poll before and after.
const CALLS_PER_OPERATION: u64 = 12;

#[derive(clap::Args)]
pub struct Options {
    /// Bytes of the copies
    #[arg(long, value_delimiter = ',', value_parser = size, default_value = "8,4K,64K,1M,16M")]
    sizes: Vec<usize>,
    /// How often, there and back
    #[arg(long, default_value_t = 10)]
    count: u64,
    /// The device has a latency (SOFT_GAUDI_LATENCY): most copies must be slept for
    #[arg(long)]
    slow: bool,
    /// Seconds that one step may take
    #[arg(long, default_value_t = 60.0)]
    timeout: f64,
}

/// Copies there and back, and sleeps meanwhile.
pub fn run(folder: Option<&Path>, options: &Options) -> Result<()> {
    let watchdog = Watchdog::start("asleep", options.timeout);
    let features = Features::RMA.with_wakeup();
    let client = Client::new(Ucx::load(folder)?, features, WorkerOptions::default(), &watchdog)?;
    println!("{:>10} {:>6} {:>8} {:>8} {:>8}", "bytes", "copies", "slept", "busy", "progress");
    for &size in &options.sizes {
        watchdog.step(format_args!("copies of {size} bytes"));
        let device = client.region(Memory::Gaudi, size)?;
        let key = client.own_key(&device.pack()?)?;
        let (sent, back) = (client.region(Memory::Host, size)?, client.region(Memory::Host, size)?);
        // The first copy makes connections and pins memory.
        copy(&client, &sent, &back, &key, 0)?;
        let before = client.worker().waiting();
        (1..=options.count).try_for_each(|n| copy(&client, &sent, &back, &key, n))?;
        let now = client.worker().waiting();
        // A put and a get; the flush of the put has nothing left to wait for.
        let operations = 2 * options.count;
        let (slept, busy) = (now.slept - before.slept, now.busy - before.busy);
        let progressed = now.progressed - before.progressed;
        println!("{size:>10} {operations:>6} {slept:>8} {busy:>8} {progressed:>8}");
        let most = CALLS_PER_OPERATION * operations;
        ensure!(
            busy <= most,
            "{size} bytes: {busy} times told not to sleep in {operations} copies"
        );
        ensure!(progressed <= most, "{size} bytes: {progressed} calls of progress, polling");
        // Not every time: on a busy machine the device may be done before we sleep, and UCX returns "busy".
        let enough = slept > 0 && slept + busy >= options.count;
        ensure!(!options.slow || enough, "{size} bytes: slept only {slept} times");
    }
    watchdog.step("ucp_cleanup");
    Ok(())
}

/// Copies new bytes there and back, and compares them.
fn copy(
    client: &Client,
    sent: &Arc<Region>,
    back: &Arc<Region>,
    key: &RemoteKey,
    n: u64,
) -> Result<()> {
    let mut bytes = vec![0; sent.length()];
    fill(n, 0, &mut bytes);
    let mut came: Vec<u8> = bytes.iter().map(|byte| !byte).collect();
    sent.write(0, &bytes);
    back.write(0, &came);
    client.write_device(&sent.whole(), key)?;
    client.read_device(&back.whole(), key)?;
    back.read(0, &mut came);
    let wrong = bytes.iter().zip(&came).position(|(sent, came)| sent != came);
    ensure!(wrong.is_none(), "round {n}: the bytes differ from byte {} on", wrong.unwrap_or(0));
    Ok(())
}
