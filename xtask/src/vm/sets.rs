//! The sets of checks that run inside the machine. The checks are shell functions of `guest.sh`: one per set, with the
//! set's name.

use std::time::Duration;

/// A machine, booted once for all chosen sets that use it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Machine {
    /// Also the name of the folder with its logs.
    pub(super) name: &'static str,
    /// Cards in it.
    pub(super) cards: u32,
}

const ONE_CARD: &Machine = &Machine { name: "one-card", cards: 1 };
const TWO_CARDS: &Machine = &Machine { name: "two-cards", cards: 2 };

/// A set of checks.
#[derive(Debug)]
pub(super) struct Set {
    pub(super) name: &'static str,
    pub(super) machine: &'static Machine,
    /// The machine is stopped after the sum of its sets' limits.
    pub(super) limit: Duration,
}

const fn set(name: &'static str, machine: &'static Machine, seconds: u64) -> Set {
    Set { name, machine, limit: Duration::from_secs(seconds) }
}

/// Sets of the same machine must be adjacent.
pub(super) const SETS: &[Set] = &[
    // The driver finds the card, boots its firmware and unloads again.
    set("probe", ONE_CARD, 120),
    // Debian's module unchanged: nobody can open the card, and the tools say why.
    set("unpatched", ONE_CARD, 60),
    // The driver library on the kernel's driver: open, memory, copies, export.
    set("card", ONE_CARD, 170),
    // Stock UCX with the plugin.
    set("ucx", ONE_CARD, 170),
    // With an RDMA device that does not import dma-bufs.
    set("rdma", ONE_CARD, 120),
    // A hard reset while the plugin copies.
    set("reset", ONE_CARD, 120),
    // Mistakes of queues: the driver resets the card and ends its users.
    set("faults", ONE_CARD, 170),
    // Stock UCX with the plugin, between two cards.
    set("two_cards", TWO_CARDS, 170),
];

/// The first line of a guest about a set: `VM-SET NAME`.
pub(super) fn begun(line: &str) -> Option<&str> {
    line.strip_prefix("VM-SET ")
}

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
    fn a_machine_is_booted_once() {
        let machines: Vec<_> = SETS.chunk_by(|a, b| a.machine == b.machine).collect();
        for (n, sets) in machines.iter().enumerate() {
            let name = sets[0].machine.name;
            assert!(machines[..n].iter().all(|other| other[0].machine.name != name), "{name}");
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
