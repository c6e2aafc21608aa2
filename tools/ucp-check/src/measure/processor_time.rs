//! Processor time of this process, without the threads of software devices, which do the work of hardware.

use anyhow::{Context, Result};
use procfs::process::Process;
use rustix::time::{ClockId, clock_gettime};

/// The prefixes of those threads' names.
const SOFTWARE_DEVICES: [&str; 2] = ["soft-gaudi", "soft-rdma"];

/// Seconds of processor time that this process has used so far, without the threads of software devices.
pub(crate) fn seconds() -> Result<f64> {
    let all = clock_gettime(ClockId::ProcessCPUTime);
    Ok(all.tv_sec as f64 + all.tv_nsec as f64 / 1e9 - of_devices()?)
}

fn of_devices() -> Result<f64> {
    let mut nanoseconds = 0;
    for task in Process::myself()?.tasks()? {
        // A thread may end meanwhile, and then has no entry any more.
        let Ok(task) = task else { continue };
        let Ok(stat) = task.stat() else { continue };
        if SOFTWARE_DEVICES.iter().any(|name| stat.comm.starts_with(name)) {
            let used = task.schedstat().context("this kernel has no schedstat of threads")?;
            nanoseconds += used.sum_exec_runtime;
        }
    }
    Ok(nanoseconds as f64 / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hint::black_box;
    use std::sync::mpsc::channel;

    /// Computes for as long as `seconds` of this thread's processor time.
    fn compute(seconds: f64) {
        let now = || {
            let time = clock_gettime(ClockId::ThreadCPUTime);
            time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
        };
        let start = now();
        while now() - start < seconds {
            black_box((0..1000u64).sum::<u64>());
        }
    }

    /// Measures a thread of this name while it is alive, as device threads are.
    fn seconds_of_a_thread_named(name: &str) -> f64 {
        let before = seconds().expect("readable");
        let (computed, is_computed) = channel();
        let (end, ended) = channel::<()>();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            compute(0.2);
            computed.send(()).expect("the test waits");
            let _ = ended.recv();
        });
        is_computed.recv().expect("it computes");
        let used = seconds().expect("readable") - before;
        drop(end);
        thread.expect("a thread").join().expect("it ends");
        used
    }

    #[test]
    fn threads_of_software_devices_do_not_count() {
        let (application, device) =
            (seconds_of_a_thread_named("application"), seconds_of_a_thread_named("soft-gaudi-0"));
        assert!(application >= 0.2, "{application}");
        assert!(device < application / 2.0, "{device} of {application}");
    }
}
