//! The PCI configuration space of the card. QEMU emulates BARs and the MSI-X table; the rest is here.

use std::sync::Mutex;

use soft_gaudi::asic::PciId;

use crate::registers::{BAR0, BAR2, BAR4};

/// Interrupt vectors: the driver asks for exactly this many.
pub const VECTORS: u32 = 128;
/// Bytes of the configuration space.
pub const LEN: u64 = 4096;

const MSIX: u8 = 0x50;
const EXPRESS: u8 = 0x70;

/// The space.
#[derive(Debug)]
pub struct PciConfig(Mutex<Vec<u8>>);

impl PciConfig {
    /// Of a Gaudi2 with this id.
    pub fn new(pci_id: PciId) -> Self {
        let mut bytes = vec![0; LEN as usize];
        let mut put = |at: usize, data: &[u8]| bytes[at..at + data.len()].copy_from_slice(data);
        let [low, high, ..] = pci_id.device.to_le_bytes();
        let id = [0xa3, 0x1d, low, high];
        put(0, &id);
        // Status: there is a list of capabilities.
        put(6, &[0x10, 0]);
        // Class: processing accelerator.
        put(8, &[pci_id.revision, 0, 0, 0x12]);
        for (at, _) in [(0x10, BAR0), (0x18, BAR2), (0x20, BAR4)] {
            // Memory, 64 bits, prefetchable.
            put(at, &[0x0c]);
        }
        put(0x2c, &id);
        put(0x34, &[MSIX]);
        put(MSIX.into(), &[0x11, EXPRESS, (VECTORS - 1) as u8, 0]);
        // Table at 0 of BAR 2, pending bits at 0x2000.
        put(usize::from(MSIX) + 4, &[2, 0, 0, 0, 2, 0x20, 0, 0]);
        // An endpoint with a link of 16 lanes, generation 4.
        put(EXPRESS.into(), &[0x10, 0, 2, 0, 0x02, 0x80, 0, 0]);
        put(usize::from(EXPRESS) + 0x0c, &[0x04, 0x01, 0, 0, 0, 0, 0x04, 0x01]);
        Self(Mutex::new(bytes))
    }

    /// Reads inside the space.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        let bytes = self.0.lock().unwrap();
        let at = offset as usize;
        if let Some(from) = bytes.get(at..at + into.len()) {
            into.copy_from_slice(from);
        }
    }

    /// Writes where writes have an effect: the command register, and the capabilities.
    pub fn write(&self, offset: u64, data: &[u8]) {
        let mut bytes = self.0.lock().unwrap();
        for (at, byte) in (offset as usize..).zip(data) {
            let writable = (4..6).contains(&at) || (0x10..0x28).contains(&at) || at >= 0x40;
            if let (true, Some(place)) = (writable, bytes.get_mut(at)) {
                *place = *byte;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_shows_the_id_and_the_revision_that_it_was_given() {
        let read = |pci_id: &str| {
            let config = PciConfig::new(PciId::parse(pci_id).unwrap());
            let mut head = [0; 12];
            config.read(0, &mut head);
            let mut subsystem = [0; 4];
            config.read(0x2c, &mut subsystem);
            assert_eq!(subsystem, head[..4]);
            (
                u16::from_le_bytes([head[0], head[1]]),
                u16::from_le_bytes([head[2], head[3]]),
                head[8],
            )
        };
        assert_eq!(read("0x1020"), (0x1da3, 0x1020, 1));
        assert_eq!(read("0x1021:4"), (0x1da3, 0x1021, 4), "the PCIe card, stepping D");
    }
}
