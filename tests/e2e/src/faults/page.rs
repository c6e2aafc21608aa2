//! The page with the results of the matrix.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::{Kind, Phase, Played, SCENARIOS, Scenario, Way, why_not};

/// What came of a scenario on one way.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    /// What went wrong.
    pub kind: Kind,
    /// When.
    pub phase: Phase,
    /// How bytes travelled.
    pub way: Way,
    /// How it was played.
    pub how: String,
    /// Of which commit.
    pub commit: String,
    /// What came of it.
    pub played: Played,
}

impl Row {
    /// Whether it is about this scenario and way.
    pub fn is_of(&self, scenario: &Scenario, way: Way) -> bool {
        scenario.is(self.kind, self.phase, self.way) && self.way == way && self.how == how(scenario)
    }

    /// What came of a scenario.
    pub fn new(scenario: &Scenario, way: Way, commit: &str, played: Played) -> Self {
        let (commit, how) = (commit.to_owned(), how(scenario));
        Row { kind: scenario.kind, phase: scenario.phase, way, how, commit, played }
    }
}

/// The whole page. `about`: rows of the table at its head.
pub fn page(about: &[(&str, String)], played: &[Row]) -> String {
    let mut text = String::from(
        "# Results: faults\n\n\
         What a program sees when something breaks: kind of fault × phase × way. What each outcome means and what is \
         promised: [reliability.md](../reliability.md). A phase or way that is not listed, or `–`, makes no sense for the \
         fault; the rules are at the end. *longest*: from the fault to the end of the program (from a death to the error), where it came \
         while bytes travelled.\n\n| | |\n|---|---|\n",
    );
    for (name, value) in about {
        let _ = writeln!(text, "| {name} | {value} |");
    }
    let ways: Vec<_> = Way::ALL.iter().map(|way| way.name()).collect();
    let _ = writeln!(text, "\n| kind | phase | {} | longest |", ways.join(" | "));
    let _ = writeln!(text, "|---|---|{}", "---|".repeat(ways.len() + 1));
    for kind in Kind::ALL {
        for &phase in kind.phases() {
            let cells: Vec<_> =
                Way::ALL.iter().map(|&way| cell(played, kind, phase, way)).collect();
            let longest = played.iter().filter(|row| (row.kind, row.phase) == (kind, phase));
            let longest = longest.filter_map(|row| row.played.longest).max();
            let longest = longest.map(|it| format!("{:.1} s", it.as_secs_f64()));
            let (kind, phase) = (kind.name(), phase.name());
            let longest = longest.unwrap_or_default();
            let _ = writeln!(text, "| {kind} | {phase} | {} | {longest} |", cells.join(" | "));
        }
    }
    text.push_str("\n## How each was played\n\n| kind | phase | ways | how |\n|---|---|---|---|\n");
    for scenario in SCENARIOS {
        let ways: Vec<_> = scenario.ways.iter().map(|way| way.name()).collect();
        let (kind, phase) = (scenario.kind.name(), scenario.phase.name());
        let _ = writeln!(text, "| {kind} | {phase} | {} | {} |", ways.join(", "), how(scenario));
    }
    text.push_str("\n## What makes no sense\n\n| why | cells |\n|---|---|\n");
    for (why, count) in rules() {
        let _ = writeln!(text, "| {why} | {count} |");
    }
    text
}

fn cell(played: &[Row], kind: Kind, phase: Phase, way: Way) -> String {
    let is_here = |row: &&Row| (row.kind, row.phase, row.way) == (kind, phase, way);
    let here: Vec<_> = played.iter().filter(is_here).map(|row| &row.played).collect();
    if here.iter().any(|played| !played.wrong.is_empty()) {
        return "**FAILED**".to_owned();
    }
    let mut names: Vec<_> = here.iter().flat_map(|played| played.outcomes.iter()).collect();
    names.sort();
    names.dedup();
    match (why_not(kind, phase, way), names.is_empty()) {
        (Some(_), _) => "–".to_owned(),
        (None, true) => "not played".to_owned(),
        (None, false) => names.iter().map(|it| it.name()).collect::<Vec<_>>().join(", "),
    }
}

fn how(scenario: &Scenario) -> String {
    use super::Play::*;
    match scenario.play {
        Rules(rules, points) => {
            let rules = rules.replace('\n', "`, `");
            match points {
                [0] => format!("`{rules}`"),
                points => format!("`{rules}`, at {points:?}"),
            }
        }
        Live(rules) => format!("while bytes travel: `{rules}`"),
        Limits(limits) => format!("`prlimit {}`", limits.join("`, `")),
        Variables(variables) => {
            let one = |(name, value): &(&str, &str)| format!("`{name}={value}`");
            variables.iter().map(one).collect::<Vec<_>>().join(", ")
        }
        Stopped(seconds) => format!("SIGSTOP for {seconds} s while bytes travel"),
        Killed => "SIGKILL in a transfer (`ucp-check peer-errors`)".to_owned(),
        Test(file, name) => format!("`{name}` in `{file}`"),
    }
}

/// Each reason why cells make no sense, and how many.
fn rules() -> BTreeMap<&'static str, usize> {
    let mut rules = BTreeMap::new();
    for kind in Kind::ALL {
        for phase in Phase::ALL {
            for why in Way::ALL.iter().filter_map(|&way| why_not(kind, phase, way)) {
                *rules.entry(why).or_insert(0) += 1;
            }
        }
    }
    rules
}
