//! How busy other programs kept the processors during a measurement.

use std::time::Instant;

use anyhow::Result;
use procfs::{CurrentSI, KernelStats};

/// Measures the load by others from its start on.
pub(super) struct Watch {
    start: Instant,
    others: f64,
}

impl Watch {
    pub(super) fn start() -> Result<Self> {
        Ok(Self { start: Instant::now(), others: others()? })
    }

    /// Mean number of processors that others kept busy since the start. This process and its children
    /// that have ended do not count.
    pub(super) fn others(&self) -> Result<f64> {
        Ok(((others()? - self.others) / self.start.elapsed().as_secs_f64()).max(0.0))
    }
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
