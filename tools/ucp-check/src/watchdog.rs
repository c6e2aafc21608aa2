//! Bounded waiting: each wait names its step, and a hang ends the process with that name.
//!
//! UCX may spin inside one call, so a separate thread watches.

use std::fmt::Display;
use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

pub const HUNG: i32 = 3;

/// Ends the process if one step takes longer than the limit. Clones watch the same steps.
#[derive(Clone)]
pub struct Watchdog {
    step: Arc<Mutex<Step>>,
    limit: Duration,
}

struct Step {
    what: String,
    since: Instant,
    /// There is nothing more to watch.
    over: bool,
}

impl Watchdog {
    /// Starts watching steps of at most `seconds` each; `who` begins the message about a hang.
    pub fn start(who: &str, seconds: f64) -> Watchdog {
        let limit = Duration::from_secs_f64(seconds);
        let step = Step { what: "starting".into(), since: Instant::now(), over: false };
        let watchdog = Watchdog { step: Arc::new(Mutex::new(step)), limit };
        let (watch, who) = (watchdog.clone(), who.to_owned());
        thread::spawn(move || {
            loop {
                thread::sleep(watch.limit.min(Duration::from_millis(200)));
                let step = watch.lock();
                if step.over {
                    return;
                }
                if step.since.elapsed() > watch.limit {
                    die(&who, &step.what, watch.limit);
                }
            }
        });
        watchdog
    }

    pub fn step(&self, what: impl Display) {
        let mut step = self.lock();
        step.what = what.to_string();
        step.since = Instant::now();
    }

    pub fn retire(&self) {
        self.lock().over = true;
    }

    pub fn current(&self) -> String {
        self.lock().what.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Step> {
        self.step.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn die(who: &str, what: &str, limit: Duration) -> ! {
    // Written in one piece: the other process may be printing the same.
    let line = format!("HUNG  {who}: {what}: nothing for {} s\n", limit.as_secs_f32());
    let _ = std::io::stderr().write_all(line.as_bytes());
    // SAFETY: ends the process without running destructors, which might wait for the hung thread.
    unsafe { libc::_exit(HUNG) }
}
