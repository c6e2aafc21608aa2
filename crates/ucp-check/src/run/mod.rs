//! The subcommands: who runs which cases, in how many processes, threads and copies of UCX.

pub mod alloc;
pub mod asleep;
pub mod atomics;
pub mod costs;
pub mod loopback;
pub mod memory;
pub mod mesh;
pub mod pair;
pub mod peer_errors;
mod process;
pub mod reconnect;
pub mod rotate;
mod siblings;
pub mod soak;
pub mod surroundings;
pub mod threads;

use crate::report::Report;
use anyhow::{Result, bail};
use std::path::Path;

/// Prints the verdict of a run; an error if anything failed.
pub fn conclude(report: &Report, json: Option<&Path>) -> Result<()> {
    report.print_summary();
    report.print_timings();
    if let Some(path) = json {
        report.write_json(path)?;
    }
    let (passed, failed) = report.counts();
    println!("{passed} passed, {failed} failed");
    if failed > 0 {
        bail!("{failed} cases failed");
    }
    if passed == 0 {
        bail!("nothing was run: no operation applies to these sizes");
    }
    Ok(())
}
