//! What runs inside the machine: sets of checks. The checks themselves are shell functions of `guest.sh`,
//! one per set, of the set's name.

use std::time::Duration;

/// A set of checks, run in one boot.
#[derive(Debug)]
pub(super) struct Set {
    pub(super) name: &'static str,
    /// Cards in the machine.
    pub(super) cards: u32,
    /// What the cards allow although silicon does not: an option of `pci-gaudi`.
    pub(super) kind: Option<&'static str>,
    /// The machine is stopped after that.
    pub(super) limit: Duration,
}

/// The set that needs programs from outside.
pub(super) const VENDOR: &str = "vendor";

pub(super) const SETS: &[Set] = &[
    // The driver finds the card, boots its firmware and leaves again.
    Set { name: "probe", cards: 1, kind: None, limit: Duration::from_secs(120) },
    // The driver library on the driver: open, memory, copies, export.
    Set { name: "card", cards: 1, kind: None, limit: Duration::from_secs(170) },
    // Stock UCX with the plugin, on one card and between two.
    Set { name: "ucx", cards: 1, kind: None, limit: Duration::from_secs(170) },
    Set { name: "two_cards", cards: 2, kind: None, limit: Duration::from_secs(170) },
    // A hard reset while the plugin copies.
    Set { name: "reset", cards: 1, kind: None, limit: Duration::from_secs(170) },
    // Page fault and watchdog: the driver resets the card and ends its users.
    Set { name: "faults", cards: 1, kind: None, limit: Duration::from_secs(170) },
    // The vendor's test programs; those of 2023 have EDMA fetch from host memory.
    Set { name: VENDOR, cards: 1, kind: Some("--edma-fetch"), limit: Duration::from_secs(220) },
];

/// One line of the guest: `VM-RESULT ok|failed NAME MILLISECONDS`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Outcome<'a> {
    pub(super) verdict: Verdict,
    pub(super) name: &'a str,
    pub(super) milliseconds: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Ok,
    Failed,
}

/// The last line of a guest that has done all its checks.
pub(super) const END: &str = "VM-END";

impl<'a> Outcome<'a> {
    pub(super) fn parse(line: &'a str) -> Option<Self> {
        let mut words = line.strip_prefix("VM-RESULT ")?.split_whitespace();
        let verdict = match words.next()? {
            "ok" => Verdict::Ok,
            "failed" => Verdict::Failed,
            _ => return None,
        };
        Some(Self { verdict, name: words.next()?, milliseconds: words.next()?.parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_told_from_other_lines() {
        let outcome = Outcome { verdict: Verdict::Failed, name: "open", milliseconds: 20 };
        assert_eq!(Outcome::parse("VM-RESULT failed open 20"), Some(outcome));
        for line in ["VM-RESULT", "VM-RESULT maybe open 1", "VM-RESULT ok open", "open 20"] {
            assert_eq!(Outcome::parse(line), None, "{line}");
        }
    }

    #[test]
    fn every_set_is_a_function_of_the_guest() {
        let script = include_str!("guest.sh");
        for set in SETS {
            assert!(script.contains(&format!("\nset_{}() {{", set.name)), "{}", set.name);
        }
    }
}
