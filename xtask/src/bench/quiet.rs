//! How busy other programs kept the processors during a measurement.

use std::fs;
use std::time::Instant;

use anyhow::{Context, Result};

/// The kernel counts time in hundredths of a second for programs, whatever its own clock.
const TICKS: f64 = 100.0;

/// Measures the load by others from its start on.
pub(super) struct Watch {
    start: Instant,
    busy: f64,
    own: f64,
}

impl Watch {
    pub(super) fn start() -> Result<Self> {
        Ok(Self { start: Instant::now(), busy: busy()?, own: own()? })
    }

    /// Mean number of processors that others kept busy since the start. This process and its children
    /// that have ended do not count.
    pub(super) fn others(&self) -> Result<f64> {
        let (busy, own) = (busy()? - self.busy, own()? - self.own);
        Ok(((busy - own) / self.start.elapsed().as_secs_f64()).max(0.0))
    }
}

/// Seconds that all processors together were at work.
fn busy() -> Result<f64> {
    let path = "/proc/stat";
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    busy_ticks(&text)
        .map(|ticks| ticks / TICKS)
        .with_context(|| format!("cannot understand {path}"))
}

fn busy_ticks(stat: &str) -> Option<f64> {
    let mut all = stat.lines().next()?.split_whitespace();
    (all.next()? == "cpu").then_some(())?;
    // user, nice, system, idle, waiting for a disk, interrupts, the same later, taken by the host.
    let times = all.take(8).map(str::parse).collect::<Result<Vec<f64>, _>>().ok()?;
    let [user, nice, system, _idle, _waiting, hard, soft, stolen] = times[..] else { return None };
    Some(user + nice + system + hard + soft + stolen)
}

/// Seconds that this process and its children worked.
fn own() -> Result<f64> {
    let path = "/proc/self/stat";
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    own_ticks(&text).map(|ticks| ticks / TICKS).with_context(|| format!("cannot understand {path}"))
}

fn own_ticks(stat: &str) -> Option<f64> {
    // The second field is the program's name in brackets, which may have anything in it.
    let (_, fields) = stat.rsplit_once(')')?;
    let times = fields.split_whitespace().skip(11).take(4).map(str::parse);
    let times = times.collect::<Result<Vec<f64>, _>>().ok()?;
    (times.len() == 4).then(|| times.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_but_idling_and_waiting_is_work() {
        let text = "cpu  10 1 5 900 80 2 3 4 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n";
        assert_eq!(busy_ticks(text), Some(25.0));
        assert_eq!(busy_ticks("intr 1 2 3"), None);
    }

    #[test]
    fn own_time_is_found_behind_any_name() {
        let text = "7 (a) b) S 1 7 7 0 -1 0 0 0 0 0 11 12 13 14 20 0 1 0";
        assert_eq!(own_ticks(text), Some(50.0));
        assert_eq!(own_ticks("7 (short) S 1"), None);
    }
}
