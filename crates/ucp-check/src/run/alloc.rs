//! `alloc`: device memory allocated and freed many times, in many sizes, while earlier pieces live.

use crate::buffer::Buffer;
use crate::pattern::{Image, Layout, mix};
use crate::rig::{Rig, RigOptions};
use crate::ucp::{Features, Memory, Ucx};
use crate::watchdog::Watchdog;
use anyhow::{Result, ensure};
use std::path::Path;
use std::time::{Duration, Instant};

/// Pieces that live at the same time.
const LIVE: usize = 8;

/// What to allocate.
pub struct Options<'a> {
    /// Where UCX is.
    pub ucx: Option<&'a Path>,
    /// Which memory.
    pub memory: Memory,
    /// How many allocations.
    pub count: u64,
    /// The largest message size.
    pub max: usize,
    /// Makes the sizes and patterns.
    pub seed: u64,
    /// A step may take this long.
    pub timeout: Duration,
}

struct Piece {
    buffer: Buffer,
    image: Image,
    range: std::ops::Range<u64>,
}

/// Allocates, fills, re-checks after its neighbours came and went, frees.
pub fn run(options: &Options<'_>) -> Result<()> {
    let dog = Watchdog::start("alloc", options.timeout);
    let ucx = Ucx::load(options.ucx)?;
    let rig_options = RigOptions { features: Features::ALL, hint: false, multi: false };
    let rig = Rig::new(ucx, rig_options, &dog)?;
    let mut live: Vec<Piece> = Vec::new();
    let (mut bytes, mut spent) = (0u64, Duration::ZERO);
    for n in 0..options.count {
        let body = (mix(options.seed ^ n) as usize) % (options.max + 1);
        // Small and large mixed: two of three allocations are small.
        let body = if n % 3 == 0 { body } else { body % 4097 };
        let staging = rig.region(Memory::Host, Layout::allocation(body))?;
        let start = Instant::now();
        let buffer = Buffer::new(&rig, options.memory, body, &staging)?;
        spent += start.elapsed();
        let range = buffer.address()..buffer.address() + Layout::allocation(body) as u64;
        for other in &live {
            ensure!(
                range.end <= other.range.start || other.range.end <= range.start,
                "allocation {n} at {range:#x?} overlaps a live one at {:#x?}",
                other.range
            );
        }
        let image = Image::message(Layout::new(body, n), options.seed ^ n, n);
        buffer.prove(&rig, &image)?;
        bytes += range.end - range.start;
        live.push(Piece { buffer, image, range });
        if live.len() > LIVE {
            let victim = live.remove(mix(n) as usize % LIVE);
            let found = victim.buffer.verify(&rig, &victim.image)?;
            ensure!(found.is_ok(), "allocation {:#x?} changed: {found:?}", victim.range);
        }
    }
    for piece in live {
        let found = piece.buffer.verify(&rig, &piece.image)?;
        ensure!(found.is_ok(), "allocation {:#x?} changed: {found:?}", piece.range);
    }
    println!(
        "UCX {}: {} allocations of {} memory, {bytes} bytes in all, {:.1} µs each; none overlapped, \
         every byte held",
        ucx.version(),
        options.count,
        options.memory,
        spent.as_secs_f64() * 1e6 / options.count.max(1) as f64,
    );
    println!("{} passed, 0 failed", options.count);
    dog.step("ucp_cleanup");
    Ok(())
}
