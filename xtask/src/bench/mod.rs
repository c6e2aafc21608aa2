//! `cargo xtask bench NAME`: measurements whose floor is taken in the same run, on the terminal as a
//! table and, on request, as JSON.

mod host_latency;
mod memory;
mod record;

use std::path::Path;

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::dist::{self, Profile};
use crate::repo::Repo;
use crate::setup;

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Name {
    /// Host-only latency of stock UCX with the plugin absent, loaded, and in use
    HostLatency,
    /// Allocation, detection and export with few and many live allocations
    Memory,
}

impl Name {
    fn needs_stock_ucx(self) -> bool {
        match self {
            Name::HostLatency => true,
            Name::Memory => false,
        }
    }
}

/// Measures, prints, writes.
pub(crate) fn run(repo: &Repo, name: Name, json: Option<&Path>) -> Result<()> {
    if name.needs_stock_ucx() {
        setup::run(repo)?;
    }
    dist::build(repo, Profile::Release)?;
    let records = match name {
        Name::HostLatency => host_latency::run(repo)?,
        Name::Memory => memory::run(repo)?,
    };
    println!("{}", record::table(&records));
    if let Some(path) = json {
        let text = serde_json::to_string_pretty(&records).context("cannot write JSON")?;
        std::fs::write(path, text + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?;
        eprintln!("written: {}", path.display());
    }
    Ok(())
}
