//! `costs`: what things cost, a name and a figure a line on standard output, for `cargo xtask bench`.
//!
//! Figures are medians of samples taken in turn with their floors, so that a noisy minute hits all
//! of them. What is being measured is said on standard error.

mod copies;
mod driver;
mod working_set;

use crate::ucp::{Context, Features, Ucx};
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
