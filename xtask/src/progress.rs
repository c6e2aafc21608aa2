//! Progress of long work, on standard error: a moving line on a terminal, plain lines elsewhere (logs,
//! CI).

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::units::seconds;

/// Work in progress. If it is dropped without [`Work::done`], it reports a failure.
pub(crate) struct Work {
    what: String,
    started: Instant,
    bar: Option<ProgressBar>,
    finished: bool,
}

impl Work {
    /// Work of unknown length.
    pub(crate) fn start(what: impl Into<String>) -> Self {
        Self::with_bar(what.into(), "{spinner} {msg} [{elapsed}]", 0)
    }

    /// Work measured in bytes.
    pub(crate) fn start_bytes(what: impl Into<String>, total: u64) -> Self {
        Self::with_bar(
            what.into(),
            "{spinner} {msg} [{bar:30}] {bytes}/{total_bytes} [{elapsed}]",
            total,
        )
    }

    fn with_bar(what: String, template: &str, total: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(total);
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style);
            }
            bar.set_message(what.clone());
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        if bar.is_none() {
            eprintln!("{what} …");
        }
        Self { what, started: Instant::now(), bar, finished: false }
    }

    /// Bytes done so far.
    pub(crate) fn set_bytes(&self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(bytes);
        }
    }

    /// Shows how far the work is.
    pub(crate) fn note(&self, how_far: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!("{}: {how_far}", self.what));
        }
    }

    /// Whether it is shown as a moving line.
    pub(crate) fn is_shown(&self) -> bool {
        self.bar.is_some()
    }

    /// Ends the work, with a remark or without.
    pub(crate) fn done(mut self, outcome: &str) {
        self.finished = true;
        self.end(if outcome.is_empty() { "done" } else { outcome });
    }

    fn end(&self, outcome: &str) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        eprintln!("{}: {outcome} ({})", self.what, seconds(self.started.elapsed()));
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if !self.finished {
            self.end("FAILED");
        }
    }
}
