//! How busy other programs kept the processors during a measurement.

use std::time::Instant;

use anyhow::Result;
use procfs::{CurrentSI, KernelStats};

/// Processors that others may have used for figures to count.
const QUIET: f64 = 0.2;

/// Measures until others used hardly any processor meanwhile, and at most so often.
pub(super) fn repeat(most: usize, mut measure: impl FnMut() -> Result<()>) -> Result<()> {
    for _ in 0..most {
        let (start, before) = (Instant::now(), others()?);
        measure()?;
        if others()? - before <= QUIET * start.elapsed().as_secs_f64() {
            break;
        }
    }
    Ok(())
}

/// Seconds that all processors worked for others than this process and its children.
fn others() -> Result<f64> {
    let all = KernelStats::current()?.total;
    let later = [all.irq, all.softirq, all.steal].into_iter().flatten();
    let busy = all.user + all.nice + all.system + later.sum::<u64>();
    let own = procfs::process::Process::myself()?.stat()?;
    let children = u64::try_from(own.cutime + own.cstime).unwrap_or(0);
    let own = own.utime + own.stime + children;
    Ok(busy.saturating_sub(own) as f64 / procfs::ticks_per_second() as f64)
}
