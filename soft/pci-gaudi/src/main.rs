//! `pci-gaudi`: waits for a QEMU on a socket and is a Gaudi2 to it until it goes.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::thread;

use anyhow::{Context, Result};
use clap::Parser;
use pci_gaudi::card::{Card, Options};
use pci_gaudi::endpoint::Endpoint;
use pci_gaudi::vfio_user;
use soft_gaudi::asic::PciId;

/// A Gaudi2 for QEMU's vfio-user-pci
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Socket to listen on; it must not exist
    #[arg(long)]
    socket: PathBuf,
    /// Position of the card in its machine, as the firmware reports it
    #[arg(long, default_value_t = 0)]
    module_id: u32,
    /// PCI device id, and revision, as 0x1021 (HL-288, a Gaudi2 as a PCIe card) or 0x1020:4
    #[arg(long, value_name = "ID", default_value = "0x1020", value_parser = pci_id)]
    pci_id: PciId,
    /// Let EDMA queues fetch packets from host memory, which silicon cannot
    #[arg(long)]
    edma_fetch: bool,
    /// Trap every access to BAR 0, slower, so that unexpected ones are logged
    #[arg(long)]
    trap_all: bool,
}

fn pci_id(text: &str) -> Result<PciId, &'static str> {
    PciId::parse(text).ok_or("want an id such as 0x1021, or 0x1021:4 with a revision")
}

/// Engines work while QEMU's messages are answered.
const ENGINE_THREADS: usize = 2;

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let Arguments { module_id, pci_id, edma_fetch, .. } = arguments;
    let options = Options { module_id, pci_id: Some(pci_id), edma_fetch };
    let card = Card::new(options).context("no memory for the card")?;
    let listener = UnixListener::bind(&arguments.socket)
        .with_context(|| format!("cannot listen on {}", arguments.socket.display()))?;
    let (stream, _) = listener.accept()?;
    let _ = std::fs::remove_file(&arguments.socket);
    let endpoint = Endpoint { card: &card, trap_all: arguments.trap_all };
    let served = thread::scope(|scope| {
        for _ in 0..ENGINE_THREADS {
            scope.spawn(|| card.queues.work(&card));
        }
        let served = vfio_user::serve(&endpoint, stream);
        for _ in 0..ENGINE_THREADS {
            card.queues.end();
        }
        served
    });
    card.log.summary();
    served.context("connection to QEMU")
}
