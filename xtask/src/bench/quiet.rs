//! How busy other programs kept the processors during a measurement.

use std::time::Instant;

use anyhow::Result;
use procfs::{CurrentSI, KernelStats};

/// How many processors other programs may have used for figures to count.
const QUIET: f64 = 0.2;

/// Measures until other programs used hardly any processor time meanwhile, but at most this many times.
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

/// Seconds of processor time that programs other than this process and its children used.
fn others() -> Result<f64> {
    let all = KernelStats::current()?.total;
    let later = [all.irq, all.softirq, all.steal].into_iter().flatten();
    let busy = all.user + all.nice + all.system + later.sum::<u64>();
    let own = procfs::process::Process::myself()?.stat()?;
    let children = u64::try_from(own.cutime + own.cstime).unwrap_or(0);
    let own = own.utime + own.stime + children;
    Ok(busy.saturating_sub(own) as f64 / procfs::ticks_per_second() as f64)
}
