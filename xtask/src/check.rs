//! `cargo xtask test`: everything that CI checks, step by step, with a summary. `.ci/run` calls it.
//!
//! A failing lint does not hide a failing test: independent steps all run, and the exit code says whether all passed.
//! Only a failure of what later steps need (packages, the build) stops the run.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::dist::{self, Profile};
use crate::remarks::Remarks;
use crate::repo::Repo;
use crate::sets::{MACHINES, Machine, SETS, Set};
use crate::setup;
use crate::units::seconds;

/// Exit code of cargo-nextest when a filter matches no test.
const NEXTEST_NO_TESTS: i32 = 4;

/// Runs all steps, or the tests of one set; `long` runs tests again on other software machines.
pub(crate) fn run(repo: &Repo, set: Option<&str>, long: bool) -> Result<()> {
    let set = match set {
        Some(name) => Some(SETS.iter().find(|set| set.name == name).context("no such set")?),
        None => None,
    };
    if long {
        require_nextest(repo, "--long")?;
    }
    let mut steps = Steps::default();
    steps.required("stock UCX", || setup::run(repo))?;
    if set.is_none() {
        steps.step("formatting", || {
            cargo(repo, &["fmt", "--all", "--", "--check"], &[]).map(passed)
        });
        steps.step("clippy", || {
            let arguments =
                ["clippy", "--workspace", "--all-targets", "--locked", "--", "-Dwarnings"];
            cargo(repo, &arguments, &[]).map(passed)
        });
        steps.step("documentation", || {
            let arguments = ["doc", "--workspace", "--no-deps", "--locked"];
            cargo(repo, &arguments, &[("RUSTDOCFLAGS", "-Dwarnings")]).map(passed)
        });
    }
    steps.required("build", || dist::build(repo, Profile::Release))?;
    let mut remarks = Remarks::default();
    let name = set.map_or("tests".to_owned(), |set| format!("tests: {}", set.name));
    steps.step(&name, || tests(repo, set, &mut remarks));
    for machine in MACHINES.iter().filter(|_| long) {
        let name = format!("{name}, {}", machine.about);
        steps.step(&name, || tests_again(repo, set, machine, &mut remarks));
    }
    if set.is_none() {
        steps.step("documentation tests", || {
            cargo(repo, &["test", "--workspace", "--doc", "--locked"], &[]).map(passed)
        });
        steps.step("dependencies", || dependencies(repo));
    }
    eprintln!("\n{}", remarks.text());
    eprintln!(
        "not part of this: `cargo xtask vm test`, the kernel's own driver in a virtual machine"
    );
    steps.summary()
}

/// Runs the tests of a set, or all.
fn tests(repo: &Repo, set: Option<&Set>, remarks: &mut Remarks) -> Result<Outcome> {
    if has_nextest(repo) {
        let filter = set.map(Set::nextest_filter);
        return nextest(repo, filter.as_deref(), &[], remarks);
    }
    let everything = ["--workspace", "--lib", "--bins", "--tests"].map(str::to_owned).to_vec();
    let calls = set.map_or_else(|| vec![everything], Set::cargo_test_calls);
    let mut ran = 0;
    for call in calls {
        ran += libtest(repo, &call, remarks)?;
    }
    ensure!(ran > 0, "no such tests: nothing was shown to work");
    Ok(Outcome::Passed(
        "with `cargo test`; cargo-nextest is not installed, so no time limits".into(),
    ))
}

/// Runs those tests on another software machine that do not choose a machine themselves.
fn tests_again(
    repo: &Repo,
    set: Option<&Set>,
    machine: &Machine,
    remarks: &mut Remarks,
) -> Result<Outcome> {
    let filter = match set {
        Some(set) => format!("({}) & ({})", set.nextest_filter(), machine.tests),
        None => machine.tests.to_owned(),
    };
    nextest(repo, Some(&filter), machine.variables, remarks)
}

/// Runs nextest, and collects remarks on its tests from its report.
fn nextest(
    repo: &Repo,
    filter: Option<&str>,
    variables: &[(&str, &str)],
    remarks: &mut Remarks,
) -> Result<Outcome> {
    let report = repo.layout().target().join("nextest/default/junit.xml");
    // A run that ends early writes no report, and an old one must not be taken for it.
    let _ = std::fs::remove_file(&report);
    let mut command = repo.cargo_for_tests();
    command.args(["nextest", "run", "--workspace", "--locked", "--no-tests=fail"]);
    // Two processes that poll compete on a busy machine: a failed test runs again, and is named at the end.
    command.args(["--retries", "1"]);
    if let Some(filter) = filter {
        command.args(["--filterset", filter]);
    }
    let names: Vec<&str> = variables.iter().map(|(name, _)| *name).collect();
    command.envs(variables.iter().copied()).env(e2e::KEEP, names.join(","));
    let status = command.status().context("cannot run cargo")?;
    if let Ok(text) = std::fs::read_to_string(&report) {
        remarks.extend(Remarks::from_junit(&text));
    }
    match status.code() {
        Some(0) => Ok(passed(())),
        Some(NEXTEST_NO_TESTS) => bail!("no such tests: nothing was shown to work"),
        _ => bail!("cargo nextest: {status}"),
    }
}

/// Runs `cargo test`, shows its output, and collects remarks; returns how many tests ran.
fn libtest(repo: &Repo, arguments: &[String], remarks: &mut Remarks) -> Result<usize> {
    let mut command = repo.cargo_for_tests();
    command.args(["test", "--locked"]).args(arguments);
    if !arguments.iter().any(|argument| argument == "--") {
        command.arg("--");
    }
    // One test at a time: two processes of an end-to-end test fill a small machine, and libtest has no weights.
    command.args(["--show-output", "--test-threads=1"]).stdout(Stdio::piped());
    let mut child = command.spawn().context("cannot run cargo")?;
    let mut output = String::new();
    for line in child.stdout.take().into_iter().flat_map(|out| BufReader::new(out).lines()) {
        let line = line.context("cannot read cargo's output")?;
        println!("{line}");
        output += &line;
        output.push('\n');
    }
    remarks.extend(Remarks::from_libtest(&output));
    let status = child.wait().context("cannot wait for cargo")?;
    ensure!(status.success(), "cargo test: {status}");
    Ok(output.lines().filter(|line| line.starts_with("test ") && line.ends_with(" ... ok")).count())
}

fn dependencies(repo: &Repo) -> Result<Outcome> {
    if !succeeds(repo.cargo().args(["deny", "--version"])) {
        return Ok(Outcome::Skipped(
            "cargo-deny is not installed; licences and sources of dependencies were not checked"
                .into(),
        ));
    }
    // A scheduled job checks advisories: they need a database from the network, and a new advisory must not fail a
    // commit that was good yesterday.
    cargo(repo, &["deny", "--offline", "--locked", "check", "bans", "licenses", "sources"], &[])
        .map(passed)
}

fn has_nextest(repo: &Repo) -> bool {
    succeeds(repo.cargo().args(["nextest", "--version"]))
}

/// An error that says what needs cargo-nextest, if it is not installed.
pub(crate) fn require_nextest(repo: &Repo, who: &str) -> Result<()> {
    ensure!(
        has_nextest(repo),
        "{who} needs cargo-nextest, which is not installed: https://nexte.st"
    );
    Ok(())
}

fn succeeds(command: &mut Command) -> bool {
    command
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

fn cargo(repo: &Repo, arguments: &[&str], envs: &[(&str, &str)]) -> Result<()> {
    let status = repo
        .cargo_for_tests()
        .args(arguments)
        .envs(envs.iter().copied())
        .status()
        .context("cannot run cargo")?;
    if !status.success() {
        bail!("cargo {}: {status}", arguments.join(" "));
    }
    Ok(())
}

/// How a step ended, if nothing failed.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Passed(String),
    Skipped(String),
}

fn passed((): ()) -> Outcome {
    Outcome::Passed(String::new())
}

#[derive(Debug, Default)]
struct Steps {
    lines: Vec<(String, Duration, Result<Outcome, String>)>,
}

impl Steps {
    /// Runs a step, and goes on even if it fails.
    fn step(&mut self, name: &str, work: impl FnOnce() -> Result<Outcome>) {
        eprintln!("\n── {name} ──");
        let started = Instant::now();
        let result = work().map_err(|error| format!("{error:#}"));
        if let Err(error) = &result {
            eprintln!("{name}: {error}");
        }
        let took = started.elapsed();
        eprintln!("── {name}: {} ({}) ──", word(&result), seconds(took));
        self.lines.push((name.to_owned(), took, result));
    }

    /// Runs a step that later steps need.
    fn required(&mut self, name: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut failed = false;
        self.step(name, || {
            let result = work();
            failed = result.is_err();
            result.map(passed)
        });
        if failed { self.summary() } else { Ok(()) }
    }

    /// Prints the table; an error if a step failed.
    fn summary(&self) -> Result<()> {
        eprintln!("\n{}", self.table());
        let failed: Vec<&str> = self
            .lines
            .iter()
            .filter(|(_, _, result)| result.is_err())
            .map(|(name, _, _)| name.as_str())
            .collect();
        if !failed.is_empty() {
            bail!("failed: {}", failed.join(", "));
        }
        Ok(())
    }

    fn table(&self) -> String {
        let width = self.lines.iter().map(|(name, _, _)| name.len()).max().unwrap_or(0);
        let lines: Vec<String> = self
            .lines
            .iter()
            .map(|(name, took, result)| {
                let note = match result {
                    Ok(Outcome::Passed(note) | Outcome::Skipped(note)) => note.as_str(),
                    Err(error) => error.lines().next().unwrap_or_default(),
                };
                let line =
                    format!("{:<8}{name:<width$}  {:>10}  {note}", word(result), seconds(*took));
                line.trim_end().to_owned()
            })
            .collect();
        lines.join("\n")
    }
}

fn word(result: &Result<Outcome, String>) -> &'static str {
    match result {
        Ok(Outcome::Passed(_)) => "ok",
        Ok(Outcome::Skipped(_)) => "skipped",
        Err(_) => "FAILED",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_does_not_stop_later_steps_but_fails_the_run() {
        let mut steps = Steps::default();
        let mut ran = false;
        steps.step("first", || bail!("no"));
        steps.step("second", || {
            ran = true;
            Ok(Outcome::Skipped("not installed".into()))
        });
        steps.step("third", || Ok(Outcome::Passed(String::new())));
        assert!(ran);
        assert_eq!(steps.summary().expect_err("one failed").to_string(), "failed: first");
        let table = steps.table();
        assert!(table.contains("FAILED  first"), "{table}");
        assert!(table.contains("skipped second") && table.contains("not installed"), "{table}");
    }

    #[test]
    fn required_step_stops_the_run() {
        let mut steps = Steps::default();
        assert!(steps.required("build", || bail!("broken")).is_err());
        assert!(steps.required("next", || Ok(())).is_ok());
    }
}
