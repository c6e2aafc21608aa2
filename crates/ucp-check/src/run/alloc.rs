//! `alloc`: device memory allocated and freed many times, in many sizes, while earlier pieces live.

use crate::buffer::Buffer;
use crate::client::Client;
use crate::matrix::Size;
use crate::pattern::{Image, Layout, mix};
use crate::ucp::{Features, Memory, Ucx, WorkerOptions};
use crate::watchdog::Watchdog;
use anyhow::{Result, ensure};
use std::path::Path;
use std::time::{Duration, Instant};

/// Pieces that live at the same time.
const LIVE: usize = 8;

/// What to allocate.
#[derive(clap::Args)]
pub struct Options {
    /// How many allocations
    #[arg(long, default_value_t = 100)]
    count: u64,
    /// Which memory: gaudi or host
    #[arg(long, default_value = "gaudi")]
    memory: Memory,
    /// Largest message size
    #[arg(long, default_value = "8M")]
    max: Size,
    /// Makes sizes and patterns
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seconds that one step may take
    #[arg(long, default_value_t = 60.0)]
    timeout: f64,
}

struct Piece {
    buffer: Buffer,
    image: Image,
    range: std::ops::Range<u64>,
}

impl Piece {
    fn verify(&self, client: &Client) -> Result<()> {
        let found = self.buffer.verify(client, &self.image)?;
        ensure!(found.is_ok(), "allocation {:#x?} changed: {found:?}", self.range);
        Ok(())
    }
}

/// Allocates, fills, re-checks after its neighbours came and went, frees.
pub fn run(folder: Option<&Path>, options: &Options) -> Result<()> {
    let watchdog = Watchdog::start("alloc", Duration::from_secs_f64(options.timeout));
    let ucx = Ucx::load(folder)?;
    let client = Client::new(ucx, Features::ALL, WorkerOptions::default(), &watchdog)?;
    let mut live: Vec<Piece> = Vec::new();
    let (mut bytes, mut spent) = (0u64, Duration::ZERO);
    for n in 0..options.count {
        let body = (mix(options.seed ^ n) as usize) % (options.max.0 + 1);
        // Small and large mixed: two of three allocations are small.
        let body = if n % 3 == 0 { body } else { body % 4097 };
        let staging = client.region(Memory::Host, Layout::allocation(body))?;
        let start = Instant::now();
        let buffer = Buffer::new(&client, options.memory, body, &staging)?;
        spent += start.elapsed();
        let range = buffer.address()..buffer.address() + Layout::allocation(body) as u64;
        for Piece { range: other, .. } in &live {
            ensure!(
                range.end <= other.start || other.end <= range.start,
                "allocation {n} at {range:#x?} overlaps a live one at {other:#x?}"
            );
        }
        let image = Image::message(Layout::new(body, n), options.seed ^ n, n);
        buffer.prove(&client, &image)?;
        bytes += range.end - range.start;
        live.push(Piece { buffer, image, range });
        if live.len() > LIVE {
            live.remove(mix(n) as usize % LIVE).verify(&client)?;
        }
    }
    live.into_iter().try_for_each(|piece| piece.verify(&client))?;
    println!(
        "UCX {}: {} allocations of {} memory, {bytes} bytes in all, {:.1} µs each; none overlapped, every \
         byte was kept",
        ucx.version(),
        options.count,
        options.memory,
        spent.as_secs_f64() * 1e6 / options.count.max(1) as f64,
    );
    println!("{} passed, 0 failed", options.count);
    watchdog.step("ucp_cleanup");
    Ok(())
}
