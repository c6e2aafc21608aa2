//! `cargo xtask faults`: plays the fault matrix (`e2e::faults`), and writes `docs/results/faults.md` when all of it was played:
//! now, or before, by what the file of `--json` has.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use e2e::faults::{Kind, Phase, Play, Row, SCENARIOS, Scenario, Way, page, play};
use e2e::{Ucx, Workbench};

use crate::bench::report;
use crate::dist::{self, Profile};
use crate::repo::Repo;
use crate::setup;

const PAGE: &str = "docs/results/faults.md";

/// Cells that tests of the repository stand for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Tests {
    #[default]
    With,
    Without,
    Only,
}

/// What to play.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Choice<'a> {
    pub(crate) kind: Option<Kind>,
    pub(crate) phase: Option<Phase>,
    pub(crate) way: Option<Way>,
    pub(crate) json: Option<&'a Path>,
    pub(crate) prebuilt: bool,
    pub(crate) tests: Tests,
}

/// Plays the cells chosen; an error if one of them did not end as promised.
pub(crate) fn run(repo: &Repo, choice: Choice<'_>) -> Result<()> {
    if !choice.prebuilt {
        setup::run(repo)?;
        dist::build(repo, Profile::Release)?;
    }
    let bench = Workbench::ready(repo.layout().clone(), &Ucx::ALL)?;
    // A test may stand for several cells.
    let tests = RefCell::new(BTreeMap::new());
    let run_test = |file: &str, name: &str| -> Result<(), String> {
        let mut tests = tests.borrow_mut();
        let run = || test(repo, file, name).map_err(|error| format!("{error:#}"));
        tests.entry(format!("{file} {name}")).or_insert_with(run).clone()
    };
    let commit = report::head(repo)?;
    let mut rows: Vec<Row> = match choice.json.filter(|file| file.exists()) {
        Some(file) => serde_json::from_str(&std::fs::read_to_string(file)?)
            .with_context(|| format!("{}: not what this command wrote", file.display()))?,
        None => Vec::new(),
    };
    let (mut cells, mut failed) = (0, 0);
    let chosen = SCENARIOS.iter().filter(|it| {
        choice.kind.is_none_or(|kind| kind == it.kind)
            && choice.phase.is_none_or(|phase| phase == it.phase)
    });
    for scenario in chosen {
        let without = match scenario.play {
            Play::Test(..) => Tests::Without,
            _ => Tests::Only,
        };
        if choice.tests == without {
            continue;
        }
        let ways = scenario.ways.iter().filter(|way| choice.way.is_none_or(|it| it == **way));
        for &way in ways {
            let result = play(&bench, scenario, way, &run_test);
            let names: Vec<_> = result.outcomes.iter().map(|it| it.name()).collect();
            let verdict = if result.wrong.is_empty() { "ok    " } else { "FAILED" };
            let (kind, phase, way_name) = (scenario.kind.name(), scenario.phase.name(), way.name());
            let names = names.join(", ");
            eprintln!("{verdict}  {kind} / {phase} / {way_name}: {names} ({} runs)", result.runs);
            result.wrong.iter().for_each(|wrong| eprintln!("        {wrong}"));
            cells += 1;
            failed += usize::from(!result.wrong.is_empty());
            rows.retain(|row| !row.is_of(scenario, way));
            rows.push(Row::new(scenario, way, &commit, result));
            if let Some(file) = choice.json {
                let text = serde_json::to_string_pretty(&rows)?;
                std::fs::write(file, text)
                    .with_context(|| format!("cannot write {}", file.display()))?;
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
fn test(repo: &Repo, file: &str, name: &str) -> Result<()> {
    let parts: Vec<_> = file.split('/').collect();
    let package = *parts.get(1).context("no crate")?;
    let mut command = repo.cargo_for_tests();
    command.args(["test", "--quiet", "--package", package]);
    match parts.get(2) {
        Some(&"tests") => {
            let binary = parts.last().and_then(|name| name.strip_suffix(".rs"));
            command.args(["--test", binary.context("no file of tests")?]);
        }
        _ => drop(command.arg("--lib")),
    }
    let output = command.args(["--", name]).output().context("cannot run cargo")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    ensure!(text.contains("1 passed") || text.contains("2 passed"), "did not run: {text}");
    Ok(())
}
