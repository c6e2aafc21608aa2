//! `cargo xtask faults`: plays the fault matrix (`e2e::faults`). It writes `docs/results/faults.md` once all cells were
//! played, now or before; the file of `--json` has earlier results.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use e2e::faults::{Kind, Phase, Play, Row, SCENARIOS, Scenario, Tested, Way, page, play};
use e2e::{Ucx, Workbench};

use crate::bench::report;
use crate::dist::{self, Profile};
use crate::repo::Repo;
use crate::{json, remarks, setup};

const PAGE: &str = "docs/results/faults.md";

/// Cells that tests of the repository stand for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Tests {
    #[default]
    With,
    Without,
    Only,
}

/// What the command line asks for.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Only faults of this kind, e.g. "reset"
    #[arg(long)]
    kind: Option<Kind>,
    /// Only in this phase, e.g. "in flight"
    #[arg(long)]
    phase: Option<Phase>,
    /// Only on this way: staged, import, relay, hca or loopback
    #[arg(long)]
    way: Option<Way>,
    /// Keep what happened there; cells that are not played now stay as they are in it
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Fetch and build nothing: use what is in the target directory
    #[arg(long)]
    prebuilt: bool,
    /// Whether to run the tests that stand for cells, or only these
    #[arg(long, value_enum, default_value_t)]
    tests: Tests,
}

/// Plays the chosen cells; an error if one of them did not end as promised.
pub(crate) fn run(repo: &Repo, options: &Options) -> Result<()> {
    if !options.prebuilt {
        setup::run(repo)?;
        dist::build(repo, Profile::Shipped)?;
    }
    let bench = Workbench::ready(repo.layout().clone(), &Ucx::ALL)?;
    // One test may play several cells.
    let tests = RefCell::new(BTreeMap::new());
    let run_test = |file: &str, name: &str| -> Result<Tested, String> {
        let mut tests = tests.borrow_mut();
        let run = || test(repo, file, name).map_err(|error| format!("{error:#}"));
        tests.entry(format!("{file} {name}")).or_insert_with(run).clone()
    };
    let commit = report::head(repo)?;
    let mut rows: Vec<Row> = match options.json.as_ref().filter(|file| file.exists()) {
        Some(file) => serde_json::from_str(&std::fs::read_to_string(file)?)
            .with_context(|| format!("{}: not what this command wrote", file.display()))?,
        None => Vec::new(),
    };
    let (mut cells, mut failed) = (0, 0);
    let chosen = SCENARIOS.iter().filter(|it| {
        options.kind.is_none_or(|kind| kind == it.kind)
            && options.phase.is_none_or(|phase| phase == it.phase)
    });
    for scenario in chosen {
        let without = match scenario.play {
            Play::Test(..) => Tests::Without,
            _ => Tests::Only,
        };
        if options.tests == without {
            continue;
        }
        let ways = scenario.ways.iter().filter(|way| options.way.is_none_or(|it| it == **way));
        for &way in ways {
            let mut result = play(&bench, scenario, way, &run_test);
            if result.is_late(scenario.kind) {
                result.wrong.push("the first error came later than promised".to_owned());
            }
            let mut words: Vec<_> = result.outcomes.iter().map(ToString::to_string).collect();
            words.extend(result.skipped.iter().map(|why| format!("skipped: {why}")));
            let verdict = match (result.wrong.is_empty(), &result.skipped) {
                (false, _) => "FAILED",
                (true, Some(_)) => "skipped",
                (true, None) => "ok",
            };
            let (Scenario { kind, phase, .. }, words) = (scenario, words.join(", "));
            eprintln!("{verdict:<7}  {kind} / {phase} / {way}: {words} ({} runs)", result.runs);
            result.wrong.iter().for_each(|wrong| eprintln!("        {wrong}"));
            cells += 1;
            failed += usize::from(!result.wrong.is_empty());
            rows.retain(|row| !row.is_of(scenario, way));
            rows.push(Row::new(scenario, way, &commit, result));
            if let Some(file) = &options.json {
                json::write(file, &rows)?;
            }
        }
    }
    ensure!(cells > 0, "no cell is of this kind and way");
    eprintln!("{cells} cells, {failed} failed");
    let has = |scenario: &Scenario, way: &Way| rows.iter().any(|row| row.is_of(scenario, *way));
    if SCENARIOS.iter().all(|scenario| scenario.ways.iter().all(|way| has(scenario, way))) {
        rows.retain(|row| SCENARIOS.iter().any(|scenario| row.is_of(scenario, row.way)));
        let commits: BTreeSet<_> = rows.iter().map(|row| row.commit.clone()).collect();
        let wrong = rows.iter().filter(|row| !row.played.wrong.is_empty()).count();
        let runs: usize = rows.iter().map(|row| row.played.runs).sum();
        let about = [
            ("date", report::today()?),
            ("commit", commits.into_iter().collect::<Vec<_>>().join(", ")),
            ("machine", report::this_machine()?),
            ("command", "`cargo xtask faults`".to_owned()),
            ("runs", runs.to_string()),
            ("failed", wrong.to_string()),
        ];
        let path = repo.path(PAGE);
        std::fs::write(&path, page(&about, &rows)).with_context(|| format!("writing {PAGE}"))?;
        eprintln!("{PAGE} is written");
    }
    if failed > 0 {
        bail!("{failed} cells did not end as promised");
    }
    Ok(())
}

/// Runs one test of the repository.
fn test(repo: &Repo, file: &str, name: &str) -> Result<Tested> {
    let parts: Vec<_> = file.split('/').collect();
    let package = *parts.get(1).context("no crate")?;
    let mut command = repo.cargo_for_tests();
    command.args(["test", "--package", package]);
    match parts.get(2) {
        Some(&"tests") => {
            let binary = parts.last().and_then(|name| name.strip_suffix(".rs"));
            command.args(["--test", binary.context("no file of tests")?]);
        }
        _ => drop(command.arg("--lib")),
    }
    // With one thread, libtest prints the name before the test runs, and output of processes may follow on that line.
    command.args(["--", "--show-output", "--test-threads=2", name]);
    let output = command.output().context("cannot run cargo")?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    tested(&text, name).with_context(|| format!("did not run: {text}"))
}

/// libtest's result for the test with this name in any module; `None` if it printed none.
fn tested(text: &str, name: &str) -> Option<Tested> {
    let passed = |line: &str| {
        let path = line.strip_prefix("test ")?.strip_suffix(" ... ok")?;
        (path.rsplit("::").next() == Some(name)).then_some(())
    };
    text.lines().find_map(passed)?;
    let skipped = text.lines().find_map(remarks::skipped);
    Some(skipped.map_or(Tested::Passed, |reason| Tested::Skipped(reason.to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_test_of_that_name_that_was_not_skipped_has_passed() {
        let ran = "running 11 tests\ntest ends::b ... ok\ntest a_and_more ... ok\n\
                   test c ... ignored\ntest result: ok. 11 passed; 0 failed\n";
        assert_eq!(tested(ran, "b"), Some(Tested::Passed));
        for name in ["a", "c", "d"] {
            assert_eq!(tested(ran, name), None, "{name}");
        }
        let skipped = "test b ... ok\n\nsuccesses:\n\n---- b stdout ----\nskipped: no HCA\n";
        assert_eq!(tested(skipped, "b"), Some(Tested::Skipped("no HCA".to_owned())));
    }
}
