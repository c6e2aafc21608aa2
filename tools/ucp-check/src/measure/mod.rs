//! The subcommands that measure: each figure is a [`Record`], printed as a line of JSON, with a floor from the same run.
//!
//! Samples alternate with their floors, so that a noisy minute affects both. Progress goes to standard error. `cargo
//! xtask bench` runs these subcommands and compares the figures of several runs.

mod card;
mod copies;
mod driver;
mod memory;
pub(crate) mod messages;
mod processor_time;
mod rcache;
mod record;
pub(crate) mod sharing;
mod timing;
mod working_set;

pub use messages::Rotation;
pub use record::{Record, size_name};
pub use timing::median;

use crate::matrix::size;
use crate::processes::Environment;
use crate::ucp::{Context, Features, Memory, Region, Ucx};
use anyhow::Result;
use clap::Subcommand;
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

/// What is measured without a plan of messages.
#[derive(Subcommand)]
pub enum Cost {
    /// Copies through libuct; floors: memcpy, and the driver's submission for short ones
    Copies {
        /// Only show that it works: the figures mean nothing
        #[arg(long)]
        quick: bool,
        /// Only these sizes (and always the short ones)
        #[arg(long, value_delimiter = ',', value_parser = size)]
        sizes: Vec<usize>,
    },
    /// The first ucp_init of a process
    Init,
    /// memcpy, as hot or cold as the buffers of `pair` are
    Memcpy {
        #[arg(long, value_delimiter = ',', value_parser = size)]
        sizes: Vec<usize>,
    },
    /// Registering Gaudi memory with UCX, the first time and when it is cached; floor: host memory
    Registration,
    /// Allocation, detection and export in the engine, without UCX
    Memory,
    /// The engine's registration cache, without UCX
    Rcache,
    /// Opening memory of another process in the engine, without UCX (three cards)
    Sharing,
    /// Submissions to a card by its driver library alone
    Card,
}

impl Cost {
    pub fn measure(&self, ucx: Option<&Path>) -> Result<()> {
        match self {
            Cost::Copies { quick, sizes } => copies::run(ucx, *quick, sizes),
            Cost::Init => init(ucx),
            Cost::Memcpy { sizes } => sizes.iter().try_for_each(|size| memcpy(*size)),
            Cost::Registration => registration(ucx),
            Cost::Memory => memory::run(),
            Cost::Rcache => rcache::run(),
            Cost::Sharing => sharing::run(),
            Cost::Card => card::run(),
        }
    }
}

/// Bandwidth of messages over a working set.
pub fn messages(rotation: Rotation, environment: &Environment) -> Result<()> {
    messages::run(rotation, environment)
}

/// The first `ucp_init` of this process, with the modules it loads.
fn init(ucx: Option<&Path>) -> Result<()> {
    let ucx = Ucx::load(ucx)?;
    let start = Instant::now();
    let context = Context::new(ucx, Features::ALL, false)?;
    let spent = start.elapsed().as_secs_f64() * 1e3;
    drop(context);
    Ok(Record::new("ucp_init", spent, "ms", spent, None).print()?)
}

fn memcpy(size: usize) -> Result<()> {
    let (from, mut to) = (vec![1u8; size], vec![0u8; size]);
    let repeat = (1 << 16) / size.max(1) + 1;
    let sample = |_| {
        let start = Instant::now();
        for _ in 0..repeat {
            black_box(&mut to).copy_from_slice(black_box(&from));
        }
        (repeat * size) as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    let gbps = median((0..15).map(sample).collect());
    Ok(Record::new(size_name(size), gbps, "GB/s", gbps, None).print()?)
}

/// Registering memory with all domains: the first time, including the allocation (UCX registers Gaudi memory when it
/// allocates it), and when UCX has it in its cache.
fn registration(ucx: Option<&Path>) -> Result<()> {
    let context = Context::new(Ucx::load(ucx)?, Features::ALL, false)?;
    for mib in [1, 64] {
        let [host, gaudi] = [Memory::Host, Memory::Gaudi].map(|memory| -> Result<[f64; 2]> {
            let (mut first, mut cached) = (Vec::new(), Vec::new());
            for _ in 0..5 {
                let mut start = Instant::now();
                let region = Region::new(&context, memory, mib << 20)?;
                first.push(start.elapsed().as_secs_f64() * 1e6);
                region.register()?;
                for _ in 0..100 {
                    start = Instant::now();
                    region.register()?;
                    cached.push(start.elapsed().as_secs_f64() * 1e6);
                }
            }
            Ok([median(first), median(cached)])
        });
        let (host, gaudi) = (host?, gaudi?);
        for (at, when) in ["first", "cached"].into_iter().enumerate() {
            let name = format!("registering {mib} MiB of Gaudi memory, {when}, floor: host memory");
            Record::new(name, gaudi[at], "µs", host[at], None).print()?;
        }
    }
    Ok(())
}
