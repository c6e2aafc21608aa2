//! What the device logs: one line per event on standard error, and each unexpected access once, with a count.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;
use std::time::Instant;

/// The log of one device.
#[derive(Debug)]
pub struct Log {
    began: Instant,
    unexpected: Mutex<BTreeMap<String, u64>>,
}

impl Log {
    /// Empty.
    pub fn new() -> Self {
        Self { began: Instant::now(), unexpected: Mutex::default() }
    }

    /// A line with the time since the start.
    pub fn say(&self, line: fmt::Arguments<'_>) {
        eprintln!("[{:9.3}] {line}", self.began.elapsed().as_secs_f64());
    }

    /// Something that the model has no answer for: logged the first time, counted always.
    pub fn unexpected(&self, what: String) {
        let mut seen = self.unexpected.lock().unwrap();
        let count = seen.entry(what.clone()).or_default();
        *count += 1;
        if *count == 1 {
            drop(seen);
            self.say(format_args!("unexpected: {what}"));
        }
    }

    /// How many kinds of unexpected accesses there were.
    pub fn unexpected_kinds(&self) -> usize {
        self.unexpected.lock().unwrap().len()
    }

    /// All that was unexpected, at the end.
    pub fn summary(&self) {
        let seen = self.unexpected.lock().unwrap();
        self.say(format_args!("{} kinds of unexpected accesses", seen.len()));
        for (what, count) in seen.iter() {
            self.say(format_args!("  {count} x {what}"));
        }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self::new()
    }
}
