//! `costs`: what things cost, a name and a figure a line on standard output, for `cargo xtask bench`.
//!
//! Figures are medians of samples taken in turn with their floors, so that a noisy minute hits all
//! of them. What is being measured is said on standard error.

mod copies;
mod driver;
mod working_set;

use crate::report::median;
use crate::ucp::{Context, Features, Memory, Region, Ucx};
use anyhow::Result;
use std::path::Path;
use std::time::Instant;

pub use copies::run as copies;

/// Milliseconds of the first `ucp_init` of this process, with the modules it loads.
pub fn init(ucx: Option<&Path>) -> Result<()> {
    let ucx = Ucx::load(ucx)?;
    let start = Instant::now();
    let context = Context::new(ucx, Features::ALL, false)?;
    let spent = start.elapsed().as_secs_f64() * 1e3;
    drop(context);
    println!("ucp_init\t{spent}");
    Ok(())
}

/// Microseconds to register memory with all domains there are: the first time, with the allocation (UCX
/// registers Gaudi memory when it allocates it), and when UCX has it in its cache.
pub fn registration(ucx: Option<&Path>) -> Result<()> {
    let context = Context::new(Ucx::load(ucx)?, Features::ALL, false)?;
    for memory in [Memory::Host, Memory::Gaudi] {
        for mib in [1, 64] {
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
            println!("{memory} {mib} MiB first\t{}", median(first));
            println!("{memory} {mib} MiB cached\t{}", median(cached));
        }
    }
    Ok(())
}
