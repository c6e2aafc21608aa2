//! `ucp-check memory` on the machines that the memory tests look at.

// Each test file uses its part of this.
#![allow(dead_code)]

use std::ffi::OsStr;
use std::marker::PhantomData;
use std::path::PathBuf;

use e2e::{Device, Finished, Running, SoftNode, Tool, Ucx, Workbench};

/// A machine in software, and what to call it.
pub(crate) struct Machine {
    pub(crate) name: &'static str,
    pub(crate) generation: &'static str,
    pub(crate) node: String,
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
        let node = settings(node);
        Self { name, generation, node: node.name().to_owned(), device: Device::Software(node) }
    }

    /// A Gaudi2 with eight cards.
    pub(crate) fn eight_cards() -> Self {
        Self::new("Gaudi2 with eight cards", "gaudi2", 8)
    }

    /// Those that every memory test runs on.
    pub(crate) fn all() -> [Self; 3] {
        [
            Self::new("Gaudi2 with one card", "gaudi2", 1),
            Self::eight_cards(),
            Self::new("Gaudi1 with one card", "gaudi1", 1),
        ]
    }

    /// The client's memory checks on this machine.
    pub(crate) fn check(&self, ucx: Ucx, words: &str) -> Check<'_> {
        let words = format!("memory {words}");
        let tool = Workbench::from_env().client(ucx, &self.device, &words);
        Check { tool, machine: PhantomData }
    }

    /// The folder that is this machine, where the software Gaudi would make it.
    pub(crate) fn folder(&self) -> PathBuf {
        let user = format!("soft-gaudi-{}", rustix::process::geteuid().as_raw());
        let shm = PathBuf::from("/dev/shm");
        let base = if shm.is_dir() { shm } else { std::env::temp_dir() };
        base.join(user).join(&self.node).join(self.generation)
    }

    /// The cards that were ever opened on this machine: their memory has a file.
    pub(crate) fn cards_opened(&self) -> usize {
        let Ok(entries) = self.folder().read_dir() else { return 0 };
        entries
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().starts_with("hbm"))
            .count()
    }

    /// Makes calls of the driver fail (a machine with SOFT_GAUDI_FAULTS=yes).
    pub(crate) fn faults(&self, rules: &str) {
        use std::os::unix::fs::DirBuilderExt;
        let folder = self.folder();
        std::fs::DirBuilder::new()
            .mode(0o700)
            .recursive(true)
            .create(folder.join("dmabuf"))
            .expect("the machine's folder");
        std::fs::write(folder.join("faults"), rules).expect("the file of faults");
    }
}

/// The client about to be run. It borrows the machine, which is removed when dropped: a program
/// that ran after that would make it anew and leave it behind.
pub(crate) struct Check<'a> {
    tool: Tool,
    machine: PhantomData<&'a Machine>,
}

impl Check<'_> {
    pub(crate) fn env(self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        Self { tool: self.tool.env(name, value), ..self }
    }

    pub(crate) fn arg(self, arg: impl AsRef<OsStr>) -> Self {
        Self { tool: self.tool.arg(arg), ..self }
    }

    #[track_caller]
    pub(crate) fn run(&self) -> Finished {
        self.tool.run()
    }

    #[track_caller]
    pub(crate) fn start(&self) -> Running {
        self.tool.start()
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
