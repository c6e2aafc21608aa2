//! Plays a scenario on one way, and judges the result.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use super::{Kind, Outcome, Phase, Play, Scenario, Way};
use crate::observed::Observed;
use crate::rdma::{Fabric, IMPATIENT, RC};
use crate::{Device, Finished, Running, SoftNode, Tool, Ucx, Workbench};

/// The result of a scenario on one way.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Played {
    /// Every outcome, over all runs.
    pub outcomes: BTreeSet<Outcome>,
    /// How many runs.
    pub runs: usize,
    /// The longest time from a fault to its effect. For a fault while bytes travel: until the process ended, or had
    /// reported the error and released everything. For the death of a peer: until the error.
    pub longest: Option<Duration>,
    /// Why the test that plays it could not run here, in whole or in part.
    #[serde(default)]
    pub skipped: Option<String>,
    /// Each broken promise, with the output.
    pub wrong: Vec<String>,
}

/// What became of a test of this repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tested {
    /// It ran and passed.
    Passed,
    /// It could not test its subject on this machine, for this reason.
    Skipped(String),
}

/// A run that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(100);
/// The promise for a lost card and a killed peer. `cargo xtask faults` compares; tests do not: their machine may be busy.
const PROMISED: Duration = Duration::from_secs(1);
/// Once the cards of a process have got this many copies, bytes surely travel.
const TRAVELLING: u64 = 150;
/// A rule with `times=0` applies for ever and leaves no trace in the file. A rule with this high number counts down.
const FOR_EVER: &str = "times=0";
const VERY_OFTEN: &str = "times=1000000000";

/// Plays a scenario; `run_test` runs a test of this repository.
pub fn play(
    bench: &Workbench,
    scenario: &Scenario,
    way: Way,
    run_test: &dyn Fn(&str, &str) -> Result<Tested, String>,
) -> Played {
    let mut played = Played::default();
    match scenario.play {
        Play::Test(file, name) => match run_test(file, name) {
            Ok(Tested::Passed) => {
                played.runs = 1;
                played.outcomes.extend(scenario.expected);
            }
            Ok(Tested::Skipped(why)) => played.skipped = Some(why),
            Err(why) => played.wrong.push(format!("{file}: {name}: {why}")),
        },
        Play::Rules(rules, points) => {
            for point in points {
                let rules = rules.replace("{}", &point.to_string());
                let machine = Machine::new(way, &rules);
                let end = machine.tool(bench, &machine.verified(scenario)).run();
                played.judge(bench, scenario, &machine, &end);
            }
        }
        Play::Variables(variables) => {
            let machine = Machine::new(way, "");
            let end = machine.tool(bench, &machine.verified(scenario)).envs(variables).run();
            played.judge(bench, scenario, &machine, &end);
        }
        Play::FewDescriptors => {
            let is_met = |played: &Played| {
                !played.wrong.is_empty()
                    || played.outcomes.iter().any(|it| *it != Outcome::Delivered)
            };
            for limit in (16..=56).rev().step_by(2).map(|limit| format!("--nofile={limit}")) {
                let machine = Machine::new(way, "");
                let tool = machine.tool(bench, &machine.verified(scenario));
                let tool = match way {
                    Way::Loopback => tool.under("prlimit", &[&limit]),
                    _ => tool.arg("--via").arg(format!("1:prlimit {limit}")),
                };
                played.judge(bench, scenario, &machine, &tool.run());
                if is_met(&played) {
                    break;
                }
            }
            if !is_met(&played) {
                played.wrong.push("no limit was too low".to_owned());
            }
        }
        Play::Killed | Play::GivenUp => {
            let machine = Machine::new(way, "");
            let is_killed = matches!(scenario.play, Play::Killed);
            let words = if is_killed { "" } else { "--stop" };
            let end = machine.tool(bench, &machine.survived(words)).run();
            if machine.came_this_way(bench, &end) {
                played.judge_survivor(&end, is_killed);
            } else {
                played.wrong.push(format!("it went another way: {}", end.report()));
            }
            played.check_free(bench, &machine);
        }
        Play::KilledClosing(times) => {
            for &time in times {
                played.kill_closing(bench, way, Duration::from_millis(time));
            }
        }
        Play::Stopped(seconds) => {
            for traffic in Traffic::of(way) {
                let machine = Machine::new(way, "");
                // The software card stops together with its process, but its timeout keeps running; a real card would go on.
                let tool = machine.tool(bench, &traffic.words(way, 1000, "--timeout 90"));
                let running = tool.env("SOFT_GAUDI_CS_TIMEOUT", "600000").start();
                played.stop(bench, &machine, traffic, running, Duration::from_secs(seconds));
            }
        }
        Play::Live(rules) => {
            for traffic in Traffic::of(way) {
                for mode in Machine::modes(way) {
                    for rank in traffic.copying {
                        played.live(bench, scenario, way, rules, (traffic, mode, *rank));
                    }
                }
            }
        }
    }
    let unexpected = played.outcomes.iter().filter(|it| !scenario.expected.contains(it));
    let unexpected: Vec<_> = unexpected.map(|it| it.name()).collect();
    if !unexpected.is_empty() {
        let names: Vec<_> = scenario.expected.iter().map(|it| it.name()).collect();
        played.wrong.push(format!("{}: expected {}", unexpected.join(", "), names.join(", ")));
    }
    played
}

/// A software machine on which bytes travel one way.
struct Machine {
    way: Way,
    device: Device,
    fabric: Fabric,
    rules: String,
}

impl Machine {
    fn new(way: Way, rules: &str) -> Self {
        let node = SoftNode::unique()
            .with("SOFT_GAUDI_DEVICES", if way == Way::Loopback { "1" } else { "2" });
        let node = node.with("SOFT_GAUDI_LENIENT", if way == Way::Import { "import" } else { "" });
        let device = Device::Software(node.with("SOFT_GAUDI_FAULTS", "yes"));
        let mut machine = Machine { way, device, fabric: Fabric::new(), rules: String::new() };
        machine.set_rules(rules);
        machine
    }

    /// Replaces the rules, also while programs run.
    fn set_rules(&mut self, rules: &str) {
        self.rules = counted(rules);
        self.node().set_faults(&self.rules);
    }

    /// Whether one of the rules has applied, or there are none.
    fn rules_applied(&self) -> bool {
        let left = std::fs::read_to_string(self.node().faults());
        self.rules.is_empty() || left.is_ok_and(|left| applied(&self.rules, &left))
    }

    fn node(&self) -> &SoftNode {
        match &self.device {
            Device::Software(node) => node,
            _ => unreachable!("made above"),
        }
    }

    fn tool(&self, bench: &Workbench, words: &str) -> Tool {
        let ucx = if self.way == Way::Hca { Ucx::Nixl } else { Ucx::V1_22 };
        let tool = bench.client(ucx, &self.device, words).limit(LIMIT);
        match self.way {
            Way::Staged => tool.env("UCX_TLS", "^gaudi_ipc"),
            Way::Hca => self.fabric.under(tool.env("UCX_TLS", format!("{RC},gaudi_cpy"))),
            _ => tool,
        }
    }

    /// Two processes, or one.
    fn command(&self) -> &'static str {
        if self.way == Way::Loopback { "loopback --plain" } else { "pair --plain" }
    }

    /// The program compares every message on arrival, and frees the memory before it begins the next size. If the fault
    /// comes in that freeing, there is only one size.
    fn verified(&self, scenario: &Scenario) -> String {
        let sizes = if scenario.phase == Phase::Teardown { "64K+1" } else { "1,4097,1M+3" };
        let command = self.command();
        format!("{command} --ops tag,put,get --mem gaudi:gaudi,host:gaudi --sizes {sizes}")
    }

    /// Operations directly on the peer's memory must end, not only fail.
    fn survived(&self, words: &str) -> String {
        let ops = if self.way == Way::Staged { "tag,am" } else { "put,get --direct" };
        format!("peer-errors {words} --ops {ops} --mem gaudi:gaudi --sizes 1M+3")
    }

    /// With and without error handling of UCX.
    fn modes(way: Way) -> &'static [&'static str] {
        if way == Way::Loopback { &[""] } else { &["", "--peer-errors"] }
    }

    /// Whether the delivered bytes took the way that is named, as counted by the processes.
    fn came_this_way(&self, bench: &Workbench, end: &Finished) -> bool {
        let sum = |before: &str, after: &str| -> u64 {
            let number = |line: &str| {
                let (_, rest) = line.split_once(before)?;
                rest.split_once(after)?.0.parse::<u64>().ok()
            };
            end.stdout.lines().filter_map(number).sum()
        };
        let imported = sum("gaudi_ipc imported ", " allocations") > 0;
        self.is_it(bench, imported, sum(" and relayed ", " bytes") > 0)
    }

    /// The same, from what running processes have counted so far.
    fn comes_this_way(&self, bench: &Workbench, counted: &[stats_reader::Snapshot]) -> bool {
        let any = |name| counted.iter().any(|page| page.get(name).is_some_and(|count| count > 0));
        self.is_it(bench, any("ipc_handles_opened"), any("ipc_relay_bytes"))
    }

    /// Whether imports, relayed bytes and the HCA's bytes fit this way.
    fn is_it(&self, bench: &Workbench, imported: bool, relayed: bool) -> bool {
        match self.way {
            Way::Import => imported,
            Way::Relay => relayed && !imported,
            Way::Staged | Way::Loopback => !relayed && !imported,
            Way::Hca => self.sent(bench) > 0 && !relayed && !imported,
        }
    }

    /// Bytes that the HCA has sent.
    fn sent(&self, bench: &Workbench) -> u64 {
        self.fabric.port(bench.layout(), 0, "xmit_bytes").unwrap_or(0)
    }

    /// Whether bytes travel this way.
    fn travels(&self, bench: &Workbench, traffic: &Traffic, processes: &[u32]) -> bool {
        let counted = counted_by(processes);
        let is_busy = if self.way == Way::Hca {
            self.sent(bench) > 8 << 20
        } else {
            let submissions = counted.iter().filter_map(|page| page.get("submissions"));
            submissions.filter(|count| *count > TRAVELLING).count() >= traffic.copying.len()
        };
        is_busy && self.comes_this_way(bench, &counted)
    }
}

/// The counters of those of these processes that have cards.
fn counted_by(processes: &[u32]) -> Vec<stats_reader::Snapshot> {
    processes.iter().filter_map(|process| stats_reader::read(*process).ok()).collect()
}

/// One operation over and over, on one way.
struct Traffic {
    op: &'static str,
    /// The processes whose card copies.
    copying: &'static [u32],
}

impl Traffic {
    const fn new(op: &'static str, copying: &'static [u32]) -> Self {
        Self { op, copying }
    }

    /// Process 0 has the source, process 1 the destination: process 0 starts the puts, process 1 the gets.
    fn of(way: Way) -> &'static [Traffic] {
        match way {
            Way::Staged => const { &[Self::new("tag", &[0, 1])] },
            Way::Import => const { &[Self::new("put", &[0]), Self::new("get", &[1])] },
            Way::Relay => const { &[Self::new("put", &[0, 1]), Self::new("get", &[0, 1])] },
            Way::Hca => const { &[Self::new("put", &[]), Self::new("get", &[])] },
            Way::Loopback => const { &[Self::new("tag", &[0])] },
        }
    }

    /// One message after the other. The program compares one message before them, and the last one.
    fn words(&self, way: Way, iterations: u64, mode: &str) -> String {
        let command =
            if way == Way::Loopback { "loopback --plain" } else { "pair --plain --one-way" };
        let op = self.op;
        format!("{command} {mode} --ops {op} --mem gaudi:gaudi --sizes 256K+1 --iters {iterations}")
    }
}

impl Played {
    /// Whether the error came later than promised.
    pub fn is_late(&self, kind: Kind) -> bool {
        let is_promised = matches!(kind, Kind::Reset | Kind::Removed | Kind::PeerKilled);
        is_promised && self.longest.is_some_and(|longest| longest > PROMISED)
    }

    /// Judges a run, and checks that the cards work again.
    fn judge(&mut self, bench: &Workbench, scenario: &Scenario, machine: &Machine, end: &Finished) {
        self.runs += 1;
        let for_good = machine.rules.contains(VERY_OFTEN);
        let outcome = match outcome(end, scenario.says) {
            Err(why) => return self.wrong.push(format!("{why}: {}", end.report())),
            Ok(_) if !machine.rules_applied() => {
                return self.wrong.push(format!("no rule has applied: {}", end.report()));
            }
            Ok(outcome) if Observed::of(end).was_stuck && !may_wait(machine.way, outcome) => {
                return self.wrong.push(format!("a process did not end: {}", end.report()));
            }
            Ok(Outcome::Delivered)
                if for_good && scenario.expected.contains(&Outcome::FellBack) =>
            {
                Outcome::FellBack
            }
            Ok(Outcome::Delivered) if !machine.came_this_way(bench, end) => {
                return self.wrong.push(format!("it went another way: {}", end.report()));
            }
            Ok(outcome) => outcome,
        };
        self.outcomes.insert(outcome);
        if !scenario.expected.contains(&outcome) {
            self.wrong.push(format!("{}: {}", outcome.name(), end.report()));
        }
        // A removed card does not come back.
        let back = scenario.kind != Kind::Removed;
        let is_news = outcome != Outcome::Delivered || scenario.phase == Phase::Teardown;
        if back && is_news {
            self.check_free(bench, machine);
        }
    }

    /// Checks that the cards are free again: other processes can work on them.
    fn check_free(&mut self, bench: &Workbench, machine: &Machine) {
        let words = "loopback --plain --ops tag --mem gaudi:gaudi --sizes 64K+1";
        let tool = bench.client(Ucx::V1_22, &machine.device, words).env("SOFT_GAUDI_FAULTS", "no");
        for card in 0..machine.node().cards_opened().max(1) {
            let end = tool.clone().env("UCX_GAUDI_COPY_DEVICE", card.to_string()).run();
            if !end.success() {
                self.wrong.push(format!("card {card} is not free again: {}", end.report()));
            }
        }
    }

    /// A process that outlives its peer must get an error and work on; `ucp-check` checks that.
    fn judge_survivor(&mut self, end: &Finished, is_killed: bool) {
        for time in times(&end.stdout, "after the death") {
            self.runs += 1;
            // Otherwise the peer was only stopped, and the time includes the program's own waiting.
            if is_killed {
                self.longest = self.longest.max(Some(time));
            }
        }
        let Observed { wrong_bytes, hung, damaged, .. } = Observed::of(end);
        if end.success() && self.runs > 0 && !(wrong_bytes || hung || damaged) {
            self.outcomes.insert(if is_killed { Outcome::Error } else { Outcome::Closed });
        } else {
            self.wrong.push(end.report());
        }
    }

    fn live(
        &mut self,
        bench: &Workbench,
        scenario: &Scenario,
        way: Way,
        rules: &str,
        (traffic, mode, rank): (&Traffic, &str, u32),
    ) {
        let mut machine = Machine::new(way, "");
        let tool = machine.tool(bench, &traffic.words(way, 1_000_000, mode));
        // The driver's own limit, half a minute, is too long for a test.
        let tool =
            if rules.contains("hang") { tool.env("SOFT_GAUDI_CS_TIMEOUT", "3000") } else { tool };
        let tool = match way {
            Way::Loopback => tool,
            _ => tool.words(&format!("--env {}:SOFT_GAUDI_FAULTS=no", 1 - rank)),
        };
        let running = tool.start();
        if !running.wait_until(|processes| machine.travels(bench, traffic, processes)) {
            let end = running.finish(Duration::ZERO);
            return self.wrong.push(format!("nothing travelled: {}", end.report()));
        }
        machine.set_rules(rules);
        let start = Instant::now();
        let end = running.finish(LIMIT);
        // The time that the program gives the other process to report does not count.
        let aftermath = times(&end.stderr, "after the first failure").sum();
        self.longest = self.longest.max(Some(start.elapsed().saturating_sub(aftermath)));
        self.judge(bench, scenario, &machine, &end);
    }

    /// Two processes connect, move a message and disconnect, over and over. One of them is killed after some time: the
    /// other must close everything, and end.
    fn kill_closing(&mut self, bench: &Workbench, way: Way, time: Duration) {
        self.runs += 1;
        let machine = Machine::new(way, "");
        let op = Traffic::of(way)[0].op;
        let words = format!(
            "reconnect --count 1000000 --plain --peer-errors --ops {op} --mem gaudi:gaudi --sizes 4K+1"
        );
        let mut tool = machine.tool(bench, &words);
        if way == Way::Hca {
            // A connect to a dead process waits for `UCX_UD_TIMEOUT`, which is minutes by default.
            tool = tool.envs(&IMPATIENT);
        }
        let running = tool.start();
        let victim = std::cell::Cell::new(None);
        // Once bytes have come this way, rounds have begun.
        let began = running.wait_until(|processes| {
            victim.set(processes.get(2).copied());
            let counted = counted_by(processes);
            counted.len() > 1 && machine.comes_this_way(bench, &counted)
        });
        let pid = victim.get().and_then(|pid| Pid::from_raw(pid as i32));
        let (true, Some(pid)) = (began, pid) else {
            let end = running.finish(Duration::ZERO);
            return self.wrong.push(format!("no round began: {}", end.report()));
        };
        std::thread::sleep(time);
        let _ = kill_process(pid, Signal::KILL);
        let end = running.finish(LIMIT);
        let Observed { wrong_bytes, hung, damaged, was_stuck, signals } = Observed::of(&end);
        let killed = BTreeSet::from([Signal::KILL.as_raw()]);
        let is_stuck = was_stuck && !may_wait(way, Outcome::Error);
        if wrong_bytes || hung || damaged || signals != killed || is_stuck {
            return self.wrong.push(end.report());
        }
        if !was_stuck {
            // `ucp-check` does not print errors that only say that its control channel to the other process ended.
            let has_error = end.text().contains("process 0: ");
            self.outcomes.insert(if has_error { Outcome::Error } else { Outcome::Closed });
        }
        self.check_free(bench, &machine);
    }

    fn stop(
        &mut self,
        bench: &Workbench,
        machine: &Machine,
        traffic: &Traffic,
        running: Running,
        time: Duration,
    ) {
        self.runs += 1;
        let second = std::cell::Cell::new(None);
        let travels = running.wait_until(|processes| {
            second.set(processes.get(2).copied());
            machine.travels(bench, traffic, processes)
        });
        let pid = second.get().and_then(|pid| Pid::from_raw(pid as i32));
        let (true, Some(pid)) = (travels, pid) else {
            let end = running.finish(Duration::ZERO);
            return self.wrong.push(format!("nothing travelled: {}", end.report()));
        };
        let _ = kill_process(pid, Signal::STOP);
        std::thread::sleep(time);
        if running.has_ended() {
            self.wrong.push("it ended though its peer was only stopped".to_owned());
        }
        let _ = kill_process(pid, Signal::CONT);
        let end = running.finish(LIMIT);
        match outcome(&end, "") {
            Ok(_) if !machine.came_this_way(bench, &end) => {
                self.wrong.push(format!("it went another way: {}", end.report()));
            }
            Ok(outcome) => drop(self.outcomes.insert(outcome)),
            Err(why) => self.wrong.push(format!("{why}: {}", end.report())),
        }
    }
}

/// Whether a process may wait for ever for its peer: in a receive whose data was in flight, or in any receive from a
/// dead process, as UCX does not report the death here (docs/reliability.md).
fn may_wait(way: Way, outcome: Outcome) -> bool {
    way == Way::Staged || outcome == Outcome::Ended
}

/// The times in lines of `ucp-check` like `… 12.3 ms after the death …`.
fn times(text: &str, after: &str) -> impl Iterator<Item = Duration> {
    text.lines().filter_map(move |line| {
        let (before, _) = line.split_once(&format!(" ms {after}"))?;
        let time: f64 = before.rsplit(' ').next()?.parse().ok()?;
        Duration::try_from_secs_f64(time / 1e3).ok()
    })
}

/// The rules, changed so that [`applied`] also notices a rule that applies for ever.
pub(crate) fn counted(rules: &str) -> String {
    rules.replace(FOR_EVER, VERY_OFTEN)
}

/// Whether one of `rules` has applied, judged by what is left in the file: the card counts `times` down, and removes a
/// rule that is used up.
pub(crate) fn applied(rules: &str, left: &str) -> bool {
    let parts = |line: &str| {
        let words: Vec<_> = line.split_whitespace().map(str::to_owned).collect();
        let times = words.iter().find_map(|word| word.strip_prefix("times="));
        let times = times.map_or(Some(1), |times| times.parse::<u64>().ok());
        (words.into_iter().take(2).collect::<Vec<_>>(), times)
    };
    let as_it_was = |rule| left.lines().any(|line| parts(line) == parts(rule));
    !rules.lines().all(as_it_was)
}

/// How a run ended; an error if it ended as no run may.
fn outcome(end: &Finished, says: &str) -> Result<Outcome, String> {
    let Observed { wrong_bytes, hung, damaged, mut signals, .. } = Observed::of(end);
    if damaged {
        return Err("a panic, or a damaged heap".to_owned());
    }
    if hung {
        return Err("it hung".to_owned());
    }
    if wrong_bytes {
        return Err("wrong bytes".to_owned());
    }
    let aborted = signals.remove(&Signal::ABORT.as_raw());
    if !signals.is_empty() {
        return Err(format!("it died of signals {signals:?}"));
    }
    if end.success() {
        return Ok(Outcome::Delivered);
    }
    let text = end.text();
    if !says.split('|').any(|word| text.contains(word)) {
        return Err(format!("no word of `{says}`"));
    }
    Ok(if aborted { Outcome::Ended } else { Outcome::Error })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_from_what_the_program_says() {
        let text = "broken off 1002 ms after the first failure\nput: error 0.5 ms after the death (-25)\nms after the death\n";
        let read = |after| times(text, after).collect::<Vec<_>>();
        assert_eq!(read("after the first failure"), [Duration::from_millis(1002)]);
        assert_eq!(read("after the death"), [Duration::from_micros(500)]);
    }

    #[test]
    fn a_rule_has_applied_when_it_is_gone_or_was_counted_down() {
        for (rules, left, has) in [
            ("transfer reset", "transfer reset\n", false),
            ("transfer reset", "transfer reset after=0 times=1\n", false),
            ("transfer reset", "", true),
            // Three calls were let through; none has failed yet.
            (
                "hlthunk_open fail:EIO after=3 times=2",
                "hlthunk_open fail:EIO after=0 times=2\n",
                false,
            ),
            (
                "hlthunk_open fail:EIO after=3 times=2",
                "hlthunk_open fail:EIO after=0 times=1\n",
                true,
            ),
            ("a reset\nb reset", "a reset after=0 times=1\nb reset after=0 times=1\n", false),
            ("a reset\nb reset", "a reset after=0 times=1\n", true),
        ] {
            assert_eq!(applied(rules, left), has, "{rules}: {left}");
        }
    }
}
