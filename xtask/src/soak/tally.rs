//! The results of a soak's rounds by way and fault: a table for people, JSON, and the page `docs/results/soak.md`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use comfy_table::{CellAlignment, Table, presets};
use e2e::soak::{Fault, Outcome, Played, Violation};
use serde::{Deserialize, Serialize};

use crate::json;
use crate::repo::Repo;

/// All rounds of one run, or of several.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Tally {
    /// The command line.
    commands: Vec<String>,
    /// The build that ran: `shipped`, or `debug` with its assertions.
    build: String,
    /// Whether the run searched for files that were left.
    saw_files: bool,
    /// How long it took. Results are written after every round.
    pub(crate) seconds: f64,
    cells: Vec<Cell>,
    /// The broken promises.
    pub(crate) violations: Vec<Broken>,
}

/// The rounds of one way with one fault.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
struct Cell {
    way: String,
    fault: String,
    rounds: u64,
    skipped: u64,
    /// Rounds in which the fault came.
    came: u64,
    messages: u64,
    bytes: u64,
    outcomes: BTreeMap<String, u64>,
    violations: u64,
}

impl Cell {
    fn new(way: &str, fault: &str) -> Self {
        let (way, fault) = (way.to_owned(), fault.to_owned());
        Self { way, fault, ..Self::default() }
    }

    /// Whether its rounds have a fault.
    fn has_fault(&self) -> bool {
        self.fault != Fault::None.name()
    }
}

/// A promise that was broken.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Broken {
    /// The round that broke it.
    pub(crate) title: String,
    pub(crate) what: String,
    /// The command that repeats that round.
    pub(crate) repeat: String,
    /// The cause, if somebody has found it since.
    #[serde(default)]
    cause: String,
}

const OUTCOMES: [Outcome; 4] = [Outcome::Passed, Outcome::Error, Outcome::Aborted, Outcome::Killed];

impl Tally {
    pub(crate) fn new(repo: &Repo, command: String, saw_files: bool) -> Self {
        let profile = repo.layout().target().join("dist.profile");
        let build = std::fs::read_to_string(profile).unwrap_or_default().trim().to_owned();
        let (cells, violations) = (Vec::new(), Vec::new());
        Self { commands: vec![command], build, saw_files, seconds: 0.0, cells, violations }
    }

    /// The same, added to the results of an earlier run.
    pub(crate) fn added_to(self, file: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(file)
            .with_context(|| format!("cannot read {}", file.display()))?;
        let mut earlier: Self = serde_json::from_str(&text)
            .with_context(|| format!("{} is not of a soak", file.display()))?;
        ensure!(earlier.build == self.build, "{} is of another build", file.display());
        earlier.commands.extend(self.commands);
        earlier.saw_files &= self.saw_files;
        Ok(earlier)
    }

    /// Counts a round; returns whether it broke a promise.
    pub(crate) fn add(&mut self, way: &str, fault: &str, played: &Played) -> bool {
        let at = self.cells.iter().position(|cell| cell.way == way && cell.fault == fault);
        let at = at.unwrap_or_else(|| {
            self.cells.push(Cell::new(way, fault));
            self.cells.len() - 1
        });
        let (cell, judged) = (&mut self.cells[at], &played.judged);
        if played.skipped {
            cell.skipped += 1;
            return false;
        }
        cell.rounds += 1;
        cell.came += u64::from(judged.came == Some(true));
        cell.messages += judged.messages;
        cell.bytes += judged.bytes;
        *cell.outcomes.entry(judged.outcome.name().to_owned()).or_default() += 1;
        let broken = !judged.violations.is_empty();
        cell.violations += u64::from(broken);
        broken
    }

    pub(crate) fn violated(&mut self, title: &str, violation: &Violation, repeat: &str) {
        let (title, what) = (title.to_owned(), violation.to_string());
        let (repeat, cause) = (repeat.to_owned(), String::new());
        self.violations.push(Broken { title, what, repeat, cause });
    }

    fn sum(&self, of: impl Fn(&Cell) -> u64) -> u64 {
        self.cells.iter().map(of).sum()
    }

    /// One line.
    pub(crate) fn summary(&self) -> String {
        let skipped = match self.sum(|cell| cell.skipped) {
            0 => String::new(),
            some => format!(" ({some} more could not be run here)"),
        };
        format!(
            "{} rounds{skipped}, {} messages, {:.1} GB verified, {} violations",
            self.sum(|cell| cell.rounds),
            self.sum(|cell| cell.messages),
            self.sum(|cell| cell.bytes) as f64 / 1e9,
            self.violations.len()
        )
    }

    /// A sentence about the share of rounds with a fault.
    fn share_of_faults(&self) -> String {
        let of = |count: fn(&Cell) -> u64| {
            self.sum(|cell| if cell.has_fault() { count(cell) } else { 0 })
        };
        format!(
            "{} of the rounds ({} messages, {:.1} GB) had a fault; it came in {}",
            of(|cell| cell.rounds),
            of(|cell| cell.messages),
            of(|cell| cell.bytes) as f64 / 1e9,
            of(|cell| cell.came)
        )
    }

    pub(crate) fn write(&self, file: Option<&Path>) -> Result<()> {
        file.map_or(Ok(()), |file| json::write(file, self))
    }

    /// One row per way and fault, and the sums.
    fn rows(&self) -> Vec<[String; HEAD.len()]> {
        let row = |cell: &Cell| {
            let of = |outcome: Outcome| match cell.outcomes.get(outcome.name()) {
                None | Some(0) => String::new(),
                Some(count) => count.to_string(),
            };
            let [passed, error, aborted, killed] = OUTCOMES.map(of);
            let megabytes = format!("{:.1}", cell.bytes as f64 / 1e6);
            let (rounds, messages) = (cell.rounds.to_string(), cell.messages.to_string());
            let violations = cell.violations.to_string();
            let (way, fault) = (cell.way.clone(), cell.fault.clone());
            let came = if cell.has_fault() { cell.came.to_string() } else { String::new() };
            [
                way, fault, rounds, came, messages, megabytes, passed, error, aborted, killed,
                violations,
            ]
        };
        let mut cells = self.cells.clone();
        cells.sort_by(|a, b| (&a.way, &a.fault).cmp(&(&b.way, &b.fault)));
        let mut outcomes = BTreeMap::new();
        for (name, count) in cells.iter().flat_map(|cell| &cell.outcomes) {
            *outcomes.entry(name.clone()).or_default() += count;
        }
        cells.push(Cell {
            way: "all".to_owned(),
            fault: String::new(),
            rounds: self.sum(|cell| cell.rounds),
            skipped: self.sum(|cell| cell.skipped),
            came: self.sum(|cell| cell.came),
            messages: self.sum(|cell| cell.messages),
            bytes: self.sum(|cell| cell.bytes),
            outcomes,
            violations: self.sum(|cell| cell.violations),
        });
        cells.iter().map(row).collect()
    }

    /// For the terminal.
    pub(crate) fn terminal(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING).set_header(HEAD).add_rows(self.rows());
        for column in 2..HEAD.len() {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table
    }

    /// The whole page.
    pub(crate) fn page(&self, [date, commit, machine]: [&str; 3]) -> String {
        let mut table =
            format!("| {} |\n|---|---{}|\n", HEAD.join(" | "), "|--:".repeat(HEAD.len() - 2));
        for row in self.rows() {
            let _ = writeln!(table, "| {} |", row.join(" | "));
        }
        let mut broken = String::new();
        for Broken { title, what, repeat, cause } in &self.violations {
            let _ = writeln!(
                broken,
                "{}",
                format!("* {title}: {what} (`{repeat}`) {cause}").trim_end()
            );
        }
        let commands: Vec<_> =
            self.commands.iter().map(|line| format!("`{line} --json soak.json`")).collect();
        if broken.is_empty() {
            broken.push_str("No promise was broken.\n");
        }
        format!(
            "# Results: soak\n\n\
             Stock UCX moves verified messages in every way while something goes wrong, round after round. {}, in {:.0} minutes. {}.\n\n\
             | | |\n|---|---|\n\
             | date | {date} |\n\
             | commit | {commit} |\n\
             | machine | {machine} |\n\
             | build | {} |\n\
             | command | {} |\n\n\
             Written by `cargo xtask bench-report soak.json`.\n\n\
             ## Promises that were broken\n\n{broken}\n\
             ## What was run\n\n\
             A round has one way and one fault. Of each is judged: no wrong byte was taken for a right one; no step of `ucp-check` \
             took longer than 150 s, and no round longer than ten minutes (what UCX keeps of a peer that died, as `peer-errors` says, \
             is not waited for, nor is a process that still runs ten seconds after another failed: the fault matrix judges that); it passed, and had verified something, where it must (no fault, any that never came but hang and \
             few-descriptors, slow and late cards, a copy that fails once, a stopped process, a peer that dies, refused imports, \
             refused exports without an HCA, a port that is down for a moment), or ended with an error; no process crashed, but by \
             SIGABRT with the reason where a copy failed for good, memory was not mapped or the card was lost; no {} was left; and \
             after a fault two new processes could use the cards. *connected*: two processes that stay connected for ten minutes \
             while rounds come and go; their descriptors, threads, mappings and memory must not grow.\n\n\
             *came*: rounds in which the fault is known to have come: the rule of the software card applied, the process was killed \
             or stopped at work, a peer died, the HCA saw its port go down, something was verified though ends were late, a process \
             named the limit of open files. *messages* and *MB* were verified byte by byte; of NIXL they are blocks, and none where \
             its peer dies. A process that ends early may not have told of its messages.\n\n{table}",
            self.summary(),
            self.seconds / 60.0,
            self.share_of_faults(),
            self.build,
            commands.join("; "),
            if self.saw_files { "process, file, socket or shared memory" } else { "process" },
        )
    }
}

const HEAD: [&str; 11] = [
    "way",
    "fault",
    "rounds",
    "came",
    "messages",
    "MB",
    "passed",
    "error",
    "aborted",
    "killed",
    "violations",
];

#[cfg(test)]
mod tests {
    use super::*;
    use e2e::soak::Judged;

    fn played(outcome: Outcome, came: Option<bool>, violations: Vec<Violation>) -> Played {
        let judged = Judged { outcome, came, violations, messages: 3, bytes: 2_000_000 };
        Played { judged, report: String::new(), skipped: false }
    }

    #[test]
    fn rounds_are_counted_by_way_and_fault_and_violations_are_named() {
        let repo = Repo::find().expect("a checkout");
        let mut tally = Tally::new(&repo, "cargo xtask soak --hours 1 --seed 7".to_owned(), true);
        let (came, wrong) = (Some(true), vec![Violation::WrongBytes]);
        assert!(!tally.add("relay", "none", &played(Outcome::Passed, None, Vec::new())));
        assert!(!tally.add("relay", "reset", &played(Outcome::Aborted, came, Vec::new())));
        assert!(!tally.add("relay", "reset", &played(Outcome::Passed, Some(false), Vec::new())));
        assert!(tally.add("relay", "reset", &played(Outcome::Error, came, wrong)));
        tally.violated("round 3", &Violation::WrongBytes, "cargo xtask soak --seed 7 --round 3");
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("soak.json");
        tally.write(Some(&file)).expect("written");
        let more = Tally::new(&repo, "cargo xtask soak --hours 2 --seed 8 --add".to_owned(), true);
        let mut tally = more.added_to(&file).expect("the same and more");
        assert!(!tally.add("relay", "none", &played(Outcome::Passed, None, Vec::new())));
        let page = tally.page(["2026-01-02", "abc1234", "a machine"]);
        for row in [
            "| way | fault | rounds | came | messages | MB | passed | error | aborted | killed | violations |",
            "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n",
            "| relay | none | 2 |  | 6 | 4.0 | 2 |  |  |  | 0 |",
            "| relay | reset | 3 | 2 | 9 | 6.0 | 1 | 1 | 1 |  | 1 |",
            "| all |  | 5 | 2 | 15 | 10.0 | 3 | 1 | 1 |  | 1 |",
            "3 of the rounds (9 messages, 0.0 GB) had a fault; it came in 2.",
            "* round 3: wrong bytes (`cargo xtask soak --seed 7 --round 3`)",
            "| command | `cargo xtask soak --hours 1 --seed 7 --json soak.json`; `cargo xtask soak --hours 2 --seed 8 --add --json",
        ] {
            assert!(page.contains(row), "{row}\n{page}");
        }
    }
}
