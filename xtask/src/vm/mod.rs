//! `cargo xtask vm`: the kernel's own driver on an emulated Gaudi2, in a virtual machine.
//!
//! QEMU, a kernel and its modules come from Debian's packages and are unpacked into `target/vm`; nothing is installed.
//! `pci-gaudi` emulates the card. Stock UCX, the plugin and its tools run inside on `kernel-thunk`.
//! `docs/design/pci-gaudi.md` explains everything.

mod cpio;
mod image;
mod kernel_module;
mod machine;
mod packages;
mod sets;

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Subcommand;
use clap::builder::PossibleValuesParser;

use crate::dist;
use crate::repo::Repo;
use crate::setup;

/// What to do with the machine.
#[derive(Debug, Subcommand)]
pub(crate) enum What {
    /// Run sets of checks inside, or all
    Test {
        /// Only these sets
        #[arg(value_parser = PossibleValuesParser::new(sets::SETS.iter().map(|set| set.name)))]
        set: Vec<String>,
        /// Log every register the driver touches (slower)
        #[arg(long)]
        trap_all: bool,
        /// Interpret the guest (TCG) even where KVM works
        #[arg(long)]
        tcg: bool,
    },
    /// A shell inside, on this terminal; `poweroff -f` ends it. Input from elsewhere is run to its end
    Shell {
        /// Cards in the machine
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4))]
        cards: u32,
        /// Interpret the guest (TCG) even where KVM works
        #[arg(long)]
        tcg: bool,
    },
}

/// Folders of the machine, all under `target/vm`.
#[derive(Debug)]
struct Folders {
    root: PathBuf,
}

impl Folders {
    fn of(repo: &Repo) -> Self {
        Self { root: repo.layout().target().join("vm") }
    }

    /// The private package manager.
    fn apt(&self) -> PathBuf {
        self.root.join("apt")
    }

    /// Unpacked packages.
    fn packages(&self) -> PathBuf {
        self.root.join("packages")
    }

    /// The logs of the last run: the kernel's and the device's.
    fn logs(&self) -> PathBuf {
        self.root.join("logs")
    }

    /// The root file system of the guest.
    fn initramfs(&self) -> PathBuf {
        self.root.join("initramfs")
    }
}

pub(crate) fn run(repo: &Repo, what: What) -> Result<()> {
    if !cfg!(target_arch = "x86_64") {
        bail!("the virtual machine is an x86-64 one, and so must be the machine it runs on");
    }
    let folders = Folders::of(repo);
    let debian = packages::fetch(&folders)?;
    setup::fetch(repo, &e2e::Ucx::ALL)?;
    dist::build(repo, dist::Profile::Release)?;
    let programs = image::build_programs(repo)?;
    image::write(repo, &folders, &debian, &programs)?;
    let (What::Test { tcg, .. } | What::Shell { tcg, .. }) = what;
    let card = &programs.card;
    let parts = machine::Parts { repo, folders: &folders, debian: &debian, card, tcg };
    match what {
        What::Shell { cards, .. } => machine::shell(&parts, cards),
        What::Test { set, trap_all, .. } => {
            let is_chosen = |it: &&sets::Set| set.is_empty() || set.iter().any(|s| s == it.name);
            let chosen: Vec<_> = sets::SETS.iter().filter(is_chosen).collect();
            let mut results = machine::Results::default();
            for sets in chosen.chunk_by(|a, b| a.machine == b.machine) {
                machine::test(&parts, sets, trap_all, &mut results)?;
            }
            results.print();
            match results.failed() {
                0 => Ok(()),
                failed => {
                    bail!("{failed} checks failed; logs are in {}", repo.shown(&folders.logs()))
                }
            }
        }
    }
}
