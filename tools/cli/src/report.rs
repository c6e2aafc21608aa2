//! A list of checks, as shown by `check-card` and `doctor`: findings and remedies.

use serde::{Deserialize, Serialize};

use crate::failure::{Exit, Failure, out_of_descriptors};
use crate::output::{DIM, GREEN, RED, YELLOW};

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    /// As expected.
    Good,
    /// It works, but could work better.
    Warning,
    /// It does not work.
    Bad,
    /// Not tried; `found` says why.
    Skipped,
}

/// The result of one check.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Finding {
    /// A short name that stays the same from version to version.
    pub(crate) check: String,
    pub(crate) verdict: Verdict,
    pub(crate) found: String,
    /// Empty if nothing has to be done.
    pub(crate) remedy: String,
    /// Figures for programs.
    #[serde(default)]
    pub(crate) data: serde_json::Value,
}

impl Finding {
    fn new(check: &str, verdict: Verdict, found: String, remedy: String) -> Self {
        let remedy = out_of_descriptors(&found).unwrap_or(remedy);
        Self { check: check.to_owned(), verdict, found, remedy, data: serde_json::Value::Null }
    }

    pub(crate) fn good(check: &str, found: impl Into<String>) -> Self {
        Self::new(check, Verdict::Good, found.into(), String::new())
    }

    pub(crate) fn warning(
        check: &str,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::new(check, Verdict::Warning, found.into(), remedy.into())
    }

    pub(crate) fn bad(check: &str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(check, Verdict::Bad, found.into(), remedy.into())
    }

    pub(crate) fn skipped(check: &str, why: impl Into<String>) -> Self {
        Self::new(check, Verdict::Skipped, why.into(), String::new())
    }

    pub(crate) fn failed(check: &str, failure: &Failure) -> Self {
        Self::bad(check, failure.what.clone(), failure.remedy.clone())
    }

    pub(crate) fn with(self, data: serde_json::Value) -> Self {
        Self { data, ..self }
    }

    /// One line, and one for the remedy.
    pub(crate) fn print(&self) {
        let (style, mark) = match self.verdict {
            Verdict::Good => (GREEN, "✓"),
            Verdict::Warning => (YELLOW, "!"),
            Verdict::Bad => (RED, "✗"),
            Verdict::Skipped => (DIM, "–"),
        };
        anstream::println!("{style}{mark}{style:#} {:<14} {}", self.check, self.found);
        if !self.remedy.is_empty() {
            anstream::println!("  {:<14} {DIM}→ {}{DIM:#}", "", self.remedy);
        }
    }
}

/// How many checks ended how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Summary {
    good: usize,
    warning: usize,
    bad: usize,
    skipped: usize,
}

impl Summary {
    pub(crate) fn of(findings: &[Finding]) -> Self {
        let count = |verdict| findings.iter().filter(|finding| finding.verdict == verdict).count();
        Self {
            good: count(Verdict::Good),
            warning: count(Verdict::Warning),
            bad: count(Verdict::Bad),
            skipped: count(Verdict::Skipped),
        }
    }

    pub(crate) fn print(self) {
        let Self { good, warning, bad, skipped } = self;
        println!("\n{good} good, {warning} to look at, {bad} wrong, {skipped} not tried");
    }

    pub(crate) fn exit(self) -> Exit {
        if self.bad == 0 { Exit::Fine } else { Exit::Problem }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_few_descriptors_have_their_own_remedy_wherever_they_are_met() {
        let what = "hlthunk_open: Too many open files (os error 24)";
        for remedy in
            [Finding::bad("open", what, "other").remedy, Failure::unable(what, "other").remedy]
        {
            assert!(remedy.contains("`ulimit -n 1024`"), "{remedy}");
        }
        assert_eq!(Finding::bad("open", "no", "other").remedy, "other");
    }
}
