//! The card as a PCI device: which region is what, and which parts of them QEMU maps.

use std::io;
use std::os::fd::OwnedFd;

use crate::card::Card;
use crate::pci_config;
use crate::registers::{self as reg, BAR0, BAR0_CFG, BAR2, BAR4};
use crate::vfio_user::{Device, Irqs, Region};

const CONFIG: u32 = 7;

/// The device that the protocol serves.
#[derive(Debug)]
pub struct Endpoint<'a> {
    /// What it is.
    pub card: &'a Card,
    /// Trap all of BAR 0, so that every access is seen.
    pub trap_all: bool,
}

impl Device for Endpoint<'_> {
    fn region(&self, index: u32) -> Region<'_> {
        let mapped = |size, memory| Region { size, memory: Some(memory) };
        match index {
            0 if self.trap_all => Region { size: BAR0, memory: None },
            0 => mapped(BAR0, (self.card.bar0.fd(), reg::mappable())),
            2 => Region { size: BAR2, memory: None },
            4 => mapped(BAR4, (self.card.hbm.fd(), vec![(0, BAR4)])),
            CONFIG => Region { size: pci_config::LEN, memory: None },
            _ => Region::default(),
        }
    }

    fn irqs(&self, index: u32) -> u32 {
        if index == 2 { pci_config::VECTORS } else { 0 }
    }

    fn read(&self, region: u32, offset: u64, into: &mut [u8]) {
        match (region, into.len()) {
            (CONFIG, _) => self.card.config.read(offset, into),
            (0, 4) if (BAR0_CFG..BAR0_CFG + reg::CFG_LEN).contains(&offset) => {
                let value = self.card.read_register((offset - BAR0_CFG) as u32);
                into.copy_from_slice(&value.to_le_bytes());
            }
            (0, _) => self.unmapped(offset, |card| card.bar0.read(offset, into)),
            (4, _) => self.unmapped(offset, |card| card.hbm.read(offset, into)),
            (_, len) => {
                self.card
                    .log
                    .unexpected(format!("{len} bytes read at {offset:#x} of BAR {region}"));
            }
        }
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) {
        match (region, <[u8; 4]>::try_from(data)) {
            (CONFIG, _) => self.card.config.write(offset, data),
            (0, Ok(word)) if (BAR0_CFG..BAR0_CFG + reg::CFG_LEN).contains(&offset) => {
                self.card.write_register((offset - BAR0_CFG) as u32, u32::from_le_bytes(word));
            }
            (0, _) => self.unmapped(offset, |card| card.bar0.write(offset, data)),
            (4, _) => self.unmapped(offset, |card| card.hbm.write(offset, data)),
            _ => {
                let len = data.len();
                self.card
                    .log
                    .unexpected(format!("{len} bytes written at {offset:#x} of BAR {region}"));
            }
        }
    }

    fn map(&self, addr: u64, size: u64, memory: Option<(OwnedFd, u64)>) -> io::Result<()> {
        // There is no descriptor for ROM and the BARs of this very device.
        self.card.guest.map(addr, size, memory).inspect_err(|error| {
            self.card.log.say(format_args!("map of {size:#x} bytes at {addr:#x} refused: {error}"));
        })
    }

    fn unmap(&self, addr: u64, size: u64) -> io::Result<()> {
        self.card.guest.unmap(addr, size).inspect_err(|error| {
            let log = &self.card.log;
            log.say(format_args!("unmap of {size:#x} bytes at {addr:#x} refused: {error}"));
        })
    }

    fn set_msix(&self, irqs: Irqs) {
        self.card.interrupts.set(irqs);
    }

    fn reset(&self) {
        self.card.log.say(format_args!("reset by QEMU"));
        self.card.reset();
    }
}

impl Endpoint<'_> {
    /// An access to memory that QEMU could have mapped.
    fn unmapped(&self, offset: u64, access: impl FnOnce(&Card) -> Option<()>) {
        if access(self.card).is_none() {
            self.card.log.unexpected(format!("access at {offset:#x}, outside of memory"));
        }
    }
}
