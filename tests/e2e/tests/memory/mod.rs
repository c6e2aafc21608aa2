//! `ucp-check memory` on the machines that the memory tests look at.

// Each test file uses its part of this.
#![allow(dead_code)]

use e2e::{Device, SoftNode, Tool, Ucx};
use stats_reader::Snapshot;

/// A machine in software, and what to call it. It is removed when dropped.
pub(crate) struct Machine {
    pub(crate) name: &'static str,
    pub(crate) device: Device,
}

impl Machine {
    pub(crate) fn new(name: &'static str, generation: &'static str, cards: u32) -> Self {
        Self::with(name, generation, cards, |node| node)
    }

    pub(crate) fn with(
        name: &'static str,
        generation: &'static str,
        cards: u32,
        settings: impl FnOnce(SoftNode) -> SoftNode,
    ) -> Self {
        let node = SoftNode::unique()
            .with("SOFT_GAUDI_GENERATION", generation)
            .with("SOFT_GAUDI_DEVICES", &cards.to_string());
        Self { name, device: Device::Software(settings(node)) }
    }

    /// A Gaudi2 with one card.
    pub(crate) fn one_card() -> Self {
        Self::new("Gaudi2 with one card", "gaudi2", 1)
    }

    /// A Gaudi2 with eight cards.
    pub(crate) fn eight_cards() -> Self {
        Self::new("Gaudi2 with eight cards", "gaudi2", 8)
    }

    /// Those that every memory test runs on.
    pub(crate) fn all() -> [Self; 3] {
        [Self::one_card(), Self::eight_cards(), Self::new("Gaudi1 with one card", "gaudi1", 1)]
    }

    /// The client's memory checks on this machine, which has to live longer.
    pub(crate) fn check(&self, ucx: Ucx, words: &str) -> Tool {
        e2e::client(ucx, &self.device, &format!("memory {words}"))
    }

    /// The cards that were ever opened on this machine.
    pub(crate) fn cards_opened(&self) -> usize {
        let Device::Software(node) = &self.device else { unreachable!("made above") };
        node.cards_opened()
    }
}

/// Runs a check on each stock UCX and each machine.
#[track_caller]
pub(crate) fn passes_everywhere(words: &str) {
    for ucx in Ucx::ALL {
        for machine in Machine::all() {
            let end = machine.check(ucx, words).run();
            assert!(end.success(), "{}, UCX {}: {}", machine.name, ucx.name(), end.report());
        }
    }
}

/// The plugin's counters of a process that has gone through a check and still has the memory domain
/// open.
#[track_caller]
pub(crate) fn counters_after(ucx: Ucx, words: &str, variables: &[(&str, &str)]) -> Snapshot {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("verdict");
    let check = Machine::eight_cards().check(ucx, words).arg("--stay").arg(&file);
    let client = check.envs(variables).start();
    let verdict = || std::fs::read_to_string(&file).unwrap_or_default();
    let in_time = client.wait_until(|_| verdict().ends_with('\n'));
    let verdict = verdict();
    assert!(in_time && verdict.contains(" 0 failed"), "{words}, {variables:?}: {verdict}");
    stats_reader::read(client.id()).expect("the client has a card open")
}
