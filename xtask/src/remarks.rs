//! Remarks on tests that passed: those that could not test their subject on this machine (each prints a line `skipped:
//! REASON`), and those that failed once and passed on a retry.
//!
//! Runners hide the output of tests that pass, so the lines are collected from nextest's JUnit report,
//! or from what libtest prints with `--show-output`.

use std::collections::BTreeMap;

/// What starts the reason, anywhere in a line.
const MARK: &str = "skipped: ";

/// The reason, if the line says that something was skipped.
pub(crate) fn skipped(line: &str) -> Option<&str> {
    line.split_once(MARK).map(|(_, reason)| reason.trim())
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Remarks {
    /// Names of tests by reason.
    skipped: BTreeMap<String, Vec<String>>,
    /// Names of tests that failed at first, with their output.
    second_try: Vec<(String, String)>,
}

impl Remarks {
    /// Parses a report in JUnit's format.
    pub(crate) fn from_junit(report: &str) -> Self {
        let mut remarks = Self::default();
        for case in report.split("<testcase ").skip(1) {
            let test = attribute(case, "name").unwrap_or("a test without a name");
            if let Some((_, failure)) = case.split_once("<flakyFailure") {
                // The location of the panic, then its message.
                let text = failure.split_once('>').map_or(failure, |(_, text)| text);
                let said: Vec<&str> = text.lines().take(2).collect();
                remarks.second_try.push((test.to_owned(), unescape(&said.join(" "))));
            }
            for line in case.lines() {
                let line = line.split("</system-").next().unwrap_or(line);
                remarks.note(test, &unescape(line));
            }
        }
        remarks
    }

    /// Parses what libtest printed with `--show-output`.
    pub(crate) fn from_libtest(output: &str) -> Self {
        let mut remarks = Self::default();
        let mut test = "";
        for line in output.lines() {
            match line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
                Some(name) => test = name,
                None => remarks.note(test, line),
            }
        }
        remarks
    }

    fn note(&mut self, test: &str, line: &str) {
        let Some(reason) = skipped(line) else { return };
        let tests = self.skipped.entry(reason.to_owned()).or_default();
        if tests.last().is_none_or(|last| last != test) {
            tests.push(test.to_owned());
        }
    }

    /// Adds the remarks of another run.
    pub(crate) fn extend(&mut self, more: Self) {
        for (reason, tests) in more.skipped {
            self.skipped.entry(reason).or_default().extend(tests);
        }
        self.second_try.extend(more.second_try);
    }

    /// The text for people: a line for each reason, then the tests.
    pub(crate) fn text(&self) -> String {
        let mut lines = Vec::new();
        if !self.second_try.is_empty() {
            lines.push(
                "failed once and passed when tried again (a defect of test or product):".into(),
            );
            for (test, message) in &self.second_try {
                lines.push(format!("  {test}: {message}"));
            }
        }
        if self.skipped.is_empty() {
            lines.push("no test was skipped".to_owned());
        } else {
            let count: usize = self.skipped.values().map(Vec::len).sum();
            lines.push(format!("skipped, in whole or in part: {count}"));
        }
        for (reason, tests) in &self.skipped {
            lines.push(format!("  {reason}"));
            lines.extend(tests.iter().map(|test| format!("      {test}")));
        }
        lines.join("\n")
    }
}

fn attribute<'a>(tag: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = tag.split_once(&format!("{name}=\""))?;
    rest.split('"').next()
}

fn unescape(text: &str) -> String {
    let entities =
        [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&apos;", "'"), ("&amp;", "&")];
    entities.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_in_a_junit_report_are_listed_with_their_tests() {
        let report = r#"<testsuites><testsuite name="e2e::ipc">
  <testcase name="first" classname="e2e::ipc" time="0.1">
    <system-out>running 1 test
skipped: no Landlock (&quot;ENOSYS&quot; &amp; more)
</system-out></testcase>
  <testcase name="second" classname="e2e::ipc"><system-err>skipped: no network</system-err></testcase>
  <testcase name="third" classname="e2e::ipc"><system-out>test third ... ok</system-out></testcase>
"#;
        let text = Remarks::from_junit(report).text();
        assert_eq!(
            text,
            "skipped, in whole or in part: 2\n  no Landlock (\"ENOSYS\" & more)\n      first\n  \
             no network\n      second"
        );
    }

    #[test]
    fn libtest_names_the_test_before_its_output() {
        let output = "running 2 tests\n\nsuccesses:\n\n---- a::b stdout ----\nskipped: no card\n\
                      ---- c stdout ----\nfine\n";
        let mut remarks = Remarks::from_libtest(output);
        assert_eq!(remarks.text(), "skipped, in whole or in part: 1\n  no card\n      a::b");
        remarks.extend(Remarks::from_libtest("---- d stdout ----\nskipped: no card\n"));
        assert!(remarks.text().ends_with("a::b\n      d"), "{}", remarks.text());
    }

    #[test]
    fn a_test_that_passed_at_the_second_try_is_named() {
        let report = r#"<testcase name="first" classname="e2e::ipc">
    <flakyFailure timestamp="now" type="test failure">thread panicked at a.rs:1:
253 &gt; 188
stack backtrace</flakyFailure>
  </testcase><testcase name="second" classname="e2e::ipc"></testcase>"#;
        let text = Remarks::from_junit(report).text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[1..],
            ["  first: thread panicked at a.rs:1: 253 > 188", "no test was skipped"]
        );
    }
}
