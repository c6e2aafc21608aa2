//! Tests that could not do what they are for on this machine: each prints a line `skipped: REASON`.
//!
//! Runners hide the output of tests that pass, so the lines are collected from nextest's JUnit report,
//! or from what libtest prints with `--show-output`.

use std::collections::BTreeMap;

/// What starts the reason, anywhere in a line.
const MARK: &str = "skipped: ";

/// Names of tests by the reason they gave.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Skipped(BTreeMap<String, Vec<String>>);

impl Skipped {
    /// What a report in JUnit's format says.
    pub(crate) fn from_junit(report: &str) -> Self {
        let mut skipped = Self::default();
        for case in report.split("<testcase ").skip(1) {
            let test = attribute(case, "name").unwrap_or("a test without a name");
            for line in case.lines() {
                let line = line.split("</system-").next().unwrap_or(line);
                skipped.note(test, &unescape(line));
            }
        }
        skipped
    }

    /// What libtest printed with `--show-output`.
    pub(crate) fn from_libtest(output: &str) -> Self {
        let mut skipped = Self::default();
        let mut test = "";
        for line in output.lines() {
            match line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
                Some(name) => test = name,
                None => skipped.note(test, line),
            }
        }
        skipped
    }

    fn note(&mut self, test: &str, line: &str) {
        let Some((_, reason)) = line.split_once(MARK) else { return };
        let tests = self.0.entry(reason.trim().to_owned()).or_default();
        if tests.last().is_none_or(|last| last != test) {
            tests.push(test.to_owned());
        }
    }

    /// Both together.
    pub(crate) fn extend(&mut self, more: Self) {
        for (reason, tests) in more.0 {
            self.0.entry(reason).or_default().extend(tests);
        }
    }

    /// For people: a line for each reason, then the tests.
    pub(crate) fn text(&self) -> String {
        if self.0.is_empty() {
            return "no test was skipped".to_owned();
        }
        let count: usize = self.0.values().map(Vec::len).sum();
        let mut lines = vec![format!("skipped, in whole or in part: {count}")];
        for (reason, tests) in &self.0 {
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
        let text = Skipped::from_junit(report).text();
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
        let mut skipped = Skipped::from_libtest(output);
        assert_eq!(skipped.text(), "skipped, in whole or in part: 1\n  no card\n      a::b");
        skipped.extend(Skipped::from_libtest("---- d stdout ----\nskipped: no card\n"));
        assert!(skipped.text().ends_with("a::b\n      d"), "{}", skipped.text());
    }

    #[test]
    fn a_run_without_skips_says_so() {
        assert_eq!(Skipped::from_junit("<testsuites/>").text(), "no test was skipped");
    }
}
