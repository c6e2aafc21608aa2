//! The fault matrix: what goes wrong (kind), when (phase), and how bytes travel meanwhile (way).
//!
//! `cargo xtask faults` plays every cell and writes `docs/results/faults.md`; `tests/e2e/tests/fault_matrix.rs` plays a
//! few of them in every run. Either scenarios play a cell ([`SCENARIOS`]), or a rule says why there is nothing to play
//! ([`why_not`]); a test checks that exactly one of the two holds.
//!
//! Faults come from outside: rules of the software Gaudi, settings of the software HCA, limits, signals. A cell fails if
//! its rule never applied, or if a run hangs, crashes or reports a wrong byte, whatever was expected. Delivered messages
//! are compared. If the fault comes while bytes travel (`Play::Live`), only the message before it is, and those under way
//! are not: `cargo xtask soak` compares every message.

mod cells;
mod page;
mod play;

pub use cells::{Play, SCENARIOS, Scenario};
pub use page::{Row, page};
pub use play::{Played, Tested, play};
pub(crate) use play::{applied, counted};

use crate::named::named;

named! {
    /// How bytes travel.
    Way {
        /// `gaudi_cpy` copies to host memory, UCX moves that: between two processes without `gaudi_ipc`.
        Staged = "staged",
        /// `gaudi_ipc`, one copy of a card that imports the peer's memory.
        Import = "import",
        /// `gaudi_ipc`, both processes copy through shared memory.
        Relay = "relay",
        /// A software HCA registers the card's memory by dma-buf.
        Hca = "hca",
        /// A process to itself.
        Loopback = "loopback",
    }
}

named! {
    /// When it goes wrong.
    Phase {
        /// A card is opened.
        Open = "open",
        /// Device memory is allocated.
        Alloc = "alloc",
        /// Device memory is mapped, or host memory pinned.
        Map = "map",
        /// A dma-buf is made of device memory.
        Export = "export",
        /// A dma-buf of another process is mapped or registered.
        Import = "import",
        /// A relay is connected.
        Relay = "relay",
        /// A copy is handed to the card.
        Submit = "submit",
        /// The card copies.
        InFlight = "in flight",
        /// The end of a copy is waited for.
        Completion = "completion",
        /// Memory is freed, the card closed.
        Teardown = "teardown",
    }
}

named! {
    /// What goes wrong.
    Kind {
        /// The driver has no memory.
        AllocationFailure = "allocation failure",
        /// The driver exports no dma-buf.
        ExportFailure = "export failure",
        /// The driver or HCA does not take a dma-buf.
        ImportRefused = "import refused",
        /// `ulimit -n`.
        DescriptorLimit = "descriptor limit",
        /// `ulimit -l`.
        MemlockLimit = "memlock limit",
        /// A message of another length than the protocol's.
        ShortMessage = "short message",
        /// SIGKILL.
        PeerKilled = "peer killed",
        /// SIGSTOP, for 30 seconds.
        PeerStopped = "peer stopped",
        /// Another process has the number of the one that a key is of.
        PidReused = "pid reused",
        /// The card fails a copy.
        DmaError = "DMA error",
        /// The card does not end a copy.
        DmaTimeout = "DMA timeout",
        /// The driver takes no more submissions.
        QueueFull = "queue full",
        /// Another process has the card.
        DeviceBusy = "device busy",
        /// Its last owner has not gone yet.
        DeviceReleased = "device being released",
        /// The driver resets the card.
        Reset = "reset",
        /// The card is gone.
        Removed = "device removed",
        /// Bits of a key are wrong.
        CorruptedKey = "corrupted key",
        /// A key, library or UCX of another version.
        VersionMismatch = "version mismatch",
        /// `GAUDI_MAPPING_TABLE` is no table.
        MappingTable = "broken mapping table",
        /// Copies take long.
        SlowEngine = "slow engine",
        /// Ends are reported in another order.
        OutOfOrder = "out-of-order completion",
        /// Host memory goes away under a copy.
        Unmapped = "host memory unmapped",
        /// No space for files.
        FullShm = "full /dev/shm",
        /// The link is down.
        PortDown = "HCA port down",
    }
}

named! {
    /// How it ends for the program.
    Outcome {
        /// Every byte arrived; a copy may have been made again.
        Delivered = "delivered",
        /// A call was refused for good, and every byte arrived all the same.
        FellBack = "fell back",
        /// The engine refused it with the reason. What UCX does then was not played here.
        Refused = "refused",
        /// The operation or call failed with an error in words, and the process goes on.
        Error = "error",
        /// No operation failed: the program noticed or gave up by itself, closed everything, and nothing held it up.
        Closed = "closed",
        /// The process was ended with the reason in its log.
        Ended = "process ended",
    }
}

impl Kind {
    /// The phases in which it is played, and why not in the others.
    pub fn phases(self) -> (&'static [Phase], &'static str) {
        use Phase::*;
        match self {
            Kind::AllocationFailure => {
                (&[Alloc, Map], "device memory is allocated and mapped then")
            }
            Kind::ExportFailure => (&[Export], "this is the export"),
            Kind::ImportRefused => (&[Import], "this is the import"),
            Kind::DescriptorLimit => {
                (&[Open, Export, Import, Relay], "descriptors are opened then")
            }
            Kind::MemlockLimit => (&[Map], "memory is pinned then, a relay's ring, too"),
            Kind::ShortMessage | Kind::CorruptedKey | Kind::PidReused => {
                (&[Import, Relay], "keys and messages of others are read then")
            }
            Kind::PeerKilled => (
                &[Import, Relay, InFlight, Teardown],
                "before, the peer is not known; submit and completion are its own, and in flight for the survivor",
            ),
            Kind::PeerStopped => (&[Import, Relay, InFlight, Teardown], "as a peer that is killed"),
            Kind::DmaError => (&[Submit, InFlight, Completion], "a copy is made then"),
            Kind::DmaTimeout => {
                (&[InFlight, Completion], "a copy that was not handed over cannot time out")
            }
            Kind::QueueFull => (&[Submit], "the queue takes submissions"),
            Kind::DeviceBusy | Kind::DeviceReleased => {
                (&[Open], "who has the card open has it alone")
            }
            Kind::MappingTable => (&[Open], "it is read then"),
            Kind::Reset => (
                &[Alloc, Map, Export, Import, Relay, Submit, InFlight, Completion, Teardown],
                "open: a card in reset is one being released",
            ),
            Kind::Removed => (
                &[Open, Alloc, Map, Export, Import, Relay, Submit, InFlight, Completion, Teardown],
                "",
            ),
            Kind::VersionMismatch => (&[Open, Import, Relay], "others' versions are read then"),
            Kind::SlowEngine => (&[InFlight], "copies are slow, and nothing else"),
            Kind::Unmapped => {
                (&[InFlight], "before, memory that is gone is an error of the program")
            }
            Kind::PortDown => {
                (&[InFlight], "UCX does not use a port that is down when a program starts")
            }
            Kind::OutOfOrder => (&[Completion], "it is about completions"),
            Kind::FullShm => (
                &[Alloc],
                "the memory of the software card is there; a socket goes to `/tmp` then, a ring takes no space in a file system",
            ),
        }
    }
}

/// Why a cell is not played; `None`: it must be played.
pub fn why_not(kind: Kind, phase: Phase, way: Way) -> Option<&'static str> {
    let (phases, elsewhere) = kind.phases();
    if !phases.contains(&phase) {
        return Some(elsewhere);
    }
    match (phase, way) {
        (Phase::Export | Phase::Import, Way::Staged | Way::Relay | Way::Loopback) => {
            return Some("this way uses no dma-buf");
        }
        (Phase::Relay, way) if way != Way::Relay => return Some("this way has no relay"),
        (Phase::Submit | Phase::Completion, Way::Hca) => {
            return Some("the HCA copies: the card is handed nothing");
        }
        _ => {}
    }
    let of_a_peer = [Kind::PeerKilled, Kind::PeerStopped];
    let of_our_sockets =
        [Kind::ShortMessage, Kind::PidReused, Kind::CorruptedKey, Kind::VersionMismatch];
    let of_the_card = [Kind::DmaError, Kind::DmaTimeout, Kind::SlowEngine, Kind::Unmapped];
    match way {
        Way::Import if (kind, phase) == (Kind::PeerStopped, Phase::Teardown) => {
            Some("puts and gets need nothing of the peer, and end")
        }
        Way::Loopback if of_a_peer.contains(&kind) => Some("there is no other process"),
        Way::Hca if phase != Phase::Open && of_our_sockets.contains(&kind) => {
            Some("keys and connections are the HCA's own")
        }
        Way::Hca if phase == Phase::Import && [Kind::Reset, Kind::Removed].contains(&kind) => {
            Some("the HCA imports, not the card")
        }
        Way::Hca if phase == Phase::Import && of_a_peer.contains(&kind) => {
            Some("an HCA registers memory of its own process")
        }
        Way::Hca if of_the_card.contains(&kind) => {
            Some("the HCA copies: the card is handed nothing")
        }
        Way::Staged | Way::Import | Way::Relay | Way::Loopback if kind == Kind::PortDown => {
            Some("this way has no HCA")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn every_cell_is_played_or_a_rule_says_why_not() {
        let mut wrong = Vec::new();
        for kind in Kind::ALL {
            for phase in Phase::ALL {
                for way in Way::ALL {
                    let played = SCENARIOS.iter().any(|it| it.is(kind, phase, way));
                    if played == why_not(kind, phase, way).is_some() {
                        let what =
                            if played { "played, though a rule says not to" } else { "not played" };
                        wrong.push(format!("{kind} / {phase} / {way}: {what}"));
                    }
                }
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
    }

    #[test]
    fn tests_that_stand_for_cells_exist() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for scenario in SCENARIOS {
            let Play::Test(file, name) = scenario.play else { continue };
            let text = std::fs::read_to_string(root.join(file)).unwrap_or_default();
            assert!(text.contains(&format!("fn {name}(")), "no {name} in {file}");
        }
    }
}
