//! The counters of running processes (`docs/statistics.md`): printed once by [`stats`], shown live by [`top`], and
//! served to a monitoring system by [`exporter`].
//!
//! The counters are in memory that the process shares with every process that may read it; reading them does not
//! disturb it.

mod cards;
pub(crate) mod exporter;
mod openmetrics;
mod rates;
pub(crate) mod stats;
pub(crate) mod top;
mod users;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use stats_reader::{Counters, Snapshot, read};

/// A process and its counters.
#[derive(Debug)]
struct Process {
    pid: u32,
    user: String,
    command: String,
    snapshot: Snapshot,
}

impl Process {
    fn new(pid: u32, snapshot: Snapshot) -> Self {
        let command = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let command = command.trim().escape_debug().to_string();
        Self { pid, user: users::of_process(pid), command, snapshot }
    }

    /// The processes with counters that this user may read.
    fn all() -> Vec<Self> {
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let mut found: Vec<Self> =
            numbers.filter_map(|pid| Some(Self::new(pid, read(pid).ok()?))).collect();
        found.sort_by_key(|process| process.pid);
        let ours = std::env::var_os("SOFT_GAUDI_NODE");
        for process in &mut found {
            let environment = std::fs::read(format!("/proc/{}/environ", process.pid));
            let machine = other_machine(&environment.unwrap_or_default(), ours.as_deref());
            let cards = process.snapshot.cards.iter_mut();
            cards.for_each(|card| card.bus_id.extend(machine.iter().map(String::as_str)));
        }
        found
    }

    /// Whether it is the same process as one of another reading: pids are reused, and a process that executes another
    /// program starts with new counters.
    fn is_same(&self, other: &Self) -> bool {
        let identity = |one: &Self| (one.pid, one.snapshot.start_time, one.snapshot.created);
        identity(self) == identity(other)
    }
}

/// All software machines use the same bus ids. Returns a suffix for those of another machine than ours.
fn other_machine(environment: &[u8], ours: Option<&OsStr>) -> Option<String> {
    let mut variables = environment.split(|byte| *byte == 0);
    let node = variables.find_map(|one| one.strip_prefix(b"SOFT_GAUDI_NODE="))?;
    let is_other = Some(OsStr::from_bytes(node)) != ours;
    is_other.then(|| format!("@{}", String::from_utf8_lossy(node).escape_debug()))
}

/// A byte counter, with its name in the tool and the exporter.
struct Flow {
    name: &'static str,
    title: &'static str,
    counter: &'static str,
}

const fn flow(name: &'static str, title: &'static str, counter: &'static str) -> Flow {
    Flow { name, title, counter }
}

/// Bytes by direction.
const DIRECTIONS: [Flow; 5] = [
    flow("to_card", "to card", "h2d_bytes"),
    flow("from_card", "from card", "d2h_bytes"),
    flow("within_card", "within card", "d2d_bytes"),
    flow("between_cards", "between cards", "cross_card_bytes"),
    flow("fill", "fill", "fill_bytes"),
];

/// Bytes by path: the first two are paths between host and card, the next two between cards, the last is what the
/// process moved for peers that cannot import its memory.
const WAYS: [Flow; 5] = [
    flow("pinned", "pinned", "pinned_copy_bytes"),
    flow("bounced", "bounced", "bounced_copy_bytes"),
    flow("imported", "imported", "imported_copy_bytes"),
    flow("staged", "staged", "staged_copy_bytes"),
    flow("relayed", "relayed", "ipc_relay_bytes"),
];

/// Failures that the program got and that mean something is wrong. Even in a healthy job UCX makes requests that must
/// fail (for ranges that are not memory), and asks for cards that others use.
fn failures(counters: &Counters) -> u64 {
    let kinds = counters.iter().filter_map(|(counter, value)| {
        let kind = counter.name.strip_prefix("failures_")?;
        (!["invalid_params", "device_busy"].contains(&kind)).then_some(value)
    });
    kinds.fold(0, |sum: u64, value| sum.saturating_add(value))
}

/// An argument in seconds.
fn interval(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.05..=86400.0).contains(seconds));
    let seconds = seconds.ok_or("give seconds from 0.05 to 86400")?;
    Ok(Duration::from_secs_f64(seconds))
}

/// For the crate `fuzz`: passes a page of counters, as a process of another user could write it, through all code that shows it.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(bytes: &[u8]) {
    let half = bytes.len() / 2;
    let process = |bytes: &[u8]| {
        let snapshot = Snapshot::parse(bytes).ok()?;
        Some(Process {
            pid: 1,
            user: String::from("user"),
            command: String::from("program"),
            snapshot,
        })
    };
    // One page, or the same process at two moments.
    let (before, now) = (process(&bytes[..half]), process(&bytes[half..]));
    let Some(now) = now.or_else(|| process(bytes)) else { return };
    let texts = [
        stats::to_json(&now).to_string(),
        now.snapshot.to_string(),
        rates::fuzz(before.as_ref(), &now),
        openmetrics::fuzz(before, now),
    ];
    for text in texts {
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_seconds_within_reason() {
        assert_eq!(interval("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["0", "-1", "nan", "inf", "1e9", "soon"] {
            assert!(interval(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn cards_of_another_software_machine_have_its_name() {
        let environment = b"HOME=/\0SOFT_GAUDI_NODE=one\0SOFT_GAUDI_DEVICES=2\0";
        let machine = |ours: Option<&str>| other_machine(environment, ours.map(OsStr::new));
        assert_eq!(machine(None).as_deref(), Some("@one"));
        assert_eq!(machine(Some("two")).as_deref(), Some("@one"));
        assert_eq!(machine(Some("one")), None);
        assert_eq!(other_machine(b"HOME=/\0", Some(OsStr::new("one"))), None, "real cards");
    }

    #[test]
    fn every_flow_is_a_counter_of_the_plugin() {
        for Flow { counter, .. } in DIRECTIONS.iter().chain(&WAYS) {
            assert!(gaudi::stats::NAMES.contains(counter), "{counter}");
        }
    }
}
