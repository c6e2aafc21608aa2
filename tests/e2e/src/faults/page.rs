//! The page with the results of the matrix.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::{Kind, Outcome, Phase, Play, Played, SCENARIOS, Scenario, Way, why_not};

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
    /// The commit on which it was played.
    pub commit: String,
    /// What came of it.
    pub played: Played,
}

impl Row {
    /// Whether this row belongs to this scenario and way.
    pub fn is_of(&self, scenario: &Scenario, way: Way) -> bool {
        scenario.is(self.kind, self.phase, self.way) && self.way == way && self.how == how(scenario)
    }

    /// The row for a scenario that was played.
    pub fn new(scenario: &Scenario, way: Way, commit: &str, played: Played) -> Self {
        let (commit, how) = (commit.to_owned(), how(scenario));
        Row { kind: scenario.kind, phase: scenario.phase, way, how, commit, played }
    }

    /// Whether the scenario is an existing test of the repository.
    fn is_test(&self) -> bool {
        let mut scenarios = SCENARIOS.iter().filter(|scenario| self.is_of(scenario, self.way));
        scenarios.any(|scenario| matches!(scenario.play, Play::Test(..)))
    }
}

/// The whole page. `about`: rows of the table at its head.
pub fn page(about: &[(&str, String)], played: &[Row]) -> String {
    let mut text = String::from(
        "# Results: faults\n\n\
         What a program sees when something breaks: kind of fault × phase × way. What is promised: [reliability.md](../reliability.md).\n\n\
         * **Outcomes.** *error*: the operation or call failed, and the process went on. *process ended*: with the reason in its log. \
         *refused*: by the engine, with the reason; what UCX does then was not observed. *closed*: no operation failed, the program noticed or gave up by itself and could close everything. \
         `–`: there is no such case. Phases that are not listed: [why](#phases-that-are-not-listed).\n\
         * ***(test)***: not observed on this way, but by the test that the list below names.\n\
         * **A lost card in the phases *map*, *export* and *import*** meets copies that UCX stages, of the program's own buffers or \
         of a tagged message, before or next to this way: so the process ends. So does a removal *in flight* with an HCA: the \
         driver tells of it at the next call, which is for a copy around the HCA's own.\n\
         * ***longest***: from the fault to the first error, with all that the program releases then, or to the end of its process, where \
         the fault came while bytes travelled; from a death to the error.\n\
         * **Where.** A software Gaudi2 of the process's own, UCX 1.22; *hca*: a software HCA by `rc`, NIXL's UCX 1.23. Not here: TCP, `ud` (the \
         [soak](soak.md) has it), `gaudi_gdr`, and cards of a framework.\n\
         * **Limits.** For `submission hang` the software driver's limit is 3 s (a real one's is 30 s), for stopped processes ten \
         minutes. *queue full*: the driver's library spins while the queue is full, so the call takes long. *memlock limit*: a \
         refusal of the software driver, and with an HCA the limit itself. *full /dev/shm* and *version mismatch* at *open*: one program, \
         whatever its way would be.\n\n| | |\n|---|---|\n",
    );
    for (name, value) in about {
        let _ = writeln!(text, "| {name} | {value} |");
    }
    let ways = Way::ALL.map(Way::name);
    let _ = writeln!(text, "\n| kind | phase | {} | longest |", ways.join(" | "));
    let _ = writeln!(text, "|---|---|{}", "---|".repeat(ways.len() + 1));
    for kind in Kind::ALL {
        for &phase in kind.phases().0 {
            let cells = Way::ALL.map(|way| cell(played, kind, phase, way));
            let longest = played.iter().filter(|row| (row.kind, row.phase) == (kind, phase));
            let longest = longest.filter_map(|row| row.played.longest).max();
            let longest = longest.map(|it| format!("{:.0} ms", it.as_secs_f64() * 1e3));
            let longest = longest.unwrap_or_default();
            let _ = writeln!(text, "| {kind} | {phase} | {} | {longest} |", cells.join(" | "));
        }
    }
    text.push_str("\n## How each was played\n\n| kind | phase | ways | how |\n|---|---|---|---|\n");
    for scenario in SCENARIOS {
        let ways: Vec<_> = scenario.ways.iter().map(|way| way.name()).collect();
        let Scenario { kind, phase, .. } = scenario;
        let _ = writeln!(text, "| {kind} | {phase} | {} | {} |", ways.join(", "), how(scenario));
    }
    text.push_str("\n## Phases that are not listed\n\n| kind | why only these |\n|---|---|\n");
    for (kind, why) in Kind::ALL.map(|kind| (kind, kind.phases().1)) {
        // An empty reason: the kind has all phases.
        if !why.is_empty() {
            let _ = writeln!(text, "| {kind} | {why} |");
        }
    }
    text
}

fn cell(played: &[Row], kind: Kind, phase: Phase, way: Way) -> String {
    if why_not(kind, phase, way).is_some() {
        return "–".to_owned();
    }
    let is_here = |row: &&Row| (row.kind, row.phase, row.way) == (kind, phase, way);
    let here: Vec<_> = played.iter().filter(is_here).collect();
    if here.iter().any(|row| !row.played.wrong.is_empty()) {
        return "**FAILED**".to_owned();
    }
    // The outcomes, and whether only tests showed them.
    let mut outcomes = BTreeMap::<Outcome, bool>::new();
    for row in &here {
        for outcome in &row.played.outcomes {
            *outcomes.entry(*outcome).or_insert(true) &= row.is_test();
        }
    }
    let word = |(outcome, test): (Outcome, bool)| {
        format!("{outcome}{}", if test { " (test)" } else { "" })
    };
    let mut words: Vec<_> = outcomes.into_iter().map(word).collect();
    if here.iter().any(|row| row.played.skipped.is_some()) {
        words.push("skipped (test)".to_owned());
    }
    if words.is_empty() { "not played".to_owned() } else { words.join(", ") }
}

fn how(scenario: &Scenario) -> String {
    use Play::*;
    match scenario.play {
        Rules(rules, points) => {
            let rules = rules.replace('\n', "`, `");
            match points {
                [0] => format!("`{rules}`"),
                points => format!("`{rules}`, at {points:?}"),
            }
        }
        Live(rules) => format!("while bytes travel: `{rules}`"),
        FewDescriptors => "`prlimit --nofile=56`, and ever less until it is too little".to_owned(),
        Variables(variables) => {
            let one = |(name, value): &(&str, &str)| format!("`{name}={value}`");
            variables.iter().map(one).collect::<Vec<_>>().join(", ")
        }
        Stopped(seconds) => format!("SIGSTOP for {seconds} s while bytes travel"),
        Killed => "SIGKILL in a transfer (`ucp-check peer-errors`)".to_owned(),
        GivenUp => {
            "SIGSTOP in a transfer, and two seconds later a forced close (`ucp-check peer-errors --stop`)".to_owned()
        }
        KilledClosing(times) => format!(
            "SIGKILL {times:?} ms after two processes began to connect, send and disconnect (`ucp-check reconnect`), whatever they are \
             at; with an HCA with the shorter times of [rdma.md](../rdma.md)"
        ),
        Test(file, name) => format!("`{name}` in `{file}`"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(scenario: &Scenario, outcomes: &[Outcome], skipped: Option<&str>) -> Row {
        let (outcomes, skipped) = (outcomes.iter().copied().collect(), skipped.map(str::to_owned));
        let played = Played { outcomes, skipped, ..Played::default() };
        Row::new(scenario, Way::Hca, "abc1234", played)
    }

    #[test]
    fn what_a_test_stands_for_is_marked_and_a_skipped_test_shows_nothing() {
        let of = |kind: Kind| SCENARIOS.iter().filter(move |it| it.is(kind, it.phase, Way::Hca));
        let here = |rows: &[Row]| cell(rows, rows[0].kind, rows[0].phase, Way::Hca);
        let [down, up] = [0, 1].map(|at| of(Kind::PortDown).nth(at).expect("a test"));
        let rows = [row(down, &[Outcome::Error], None), row(up, &[Outcome::Delivered], None)];
        assert_eq!(here(&rows), "delivered (test), error (test)");
        let rows = [row(down, &[], Some("no HCA")), row(up, &[Outcome::Delivered], None)];
        assert_eq!(here(&rows), "delivered (test), skipped (test)");
        let played = of(Kind::PeerStopped).next().expect("a scenario");
        assert_eq!(here(&[row(played, &[Outcome::Delivered], None)]), "delivered");
        assert_eq!(cell(&[], Kind::PortDown, Phase::InFlight, Way::Hca), "not played");
        assert_eq!(cell(&[], Kind::PortDown, Phase::InFlight, Way::Relay), "–");
    }
}
