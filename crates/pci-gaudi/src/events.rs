//! The event queue: what the firmware reports to the driver by itself.

use crate::card::Card;
use crate::mmu::{self, Kind, Mmu};
use crate::registers::{self as reg, cpu};

/// Entries of the queue, and bytes of one.
const ENTRIES: u32 = 64;
const ENTRY: u64 = 64;
/// The vector of the event queue.
const VECTOR: u32 = 0;
/// Errors of the host's MMU, and of the first of HBM's.
const HOST_MMU: u16 = 520;
const HBM_MMU: u16 = 503;

/// State of the queue.
#[derive(Debug, Default)]
pub struct Events {
    /// The driver wants events; never before its initialisation is over.
    pub enabled: bool,
    produced: u32,
}

impl Events {
    /// Reports an event, with what its entry holds besides the header.
    pub fn raise(&mut self, card: &Card, id: u16, data: &[u8]) {
        const READY: u32 = 1 << 31;
        if !self.enabled {
            card.log.unexpected(format!("event {id} before the driver wants events"));
            return;
        }
        let offset = ENTRY * u64::from(self.produced % ENTRIES);
        let at = card.get_long(cpu::EQ_BASE).saturating_add(offset);
        self.produced = self.produced.wrapping_add(1);
        let control = READY | u32::from(id) << 16 | self.produced & 0xffff;
        let written = card
            .guest
            .write(at.saturating_add(8), &data[..data.len().min(ENTRY as usize - 8)])
            .and_then(|()| card.guest.write(at.saturating_add(4), &control.to_le_bytes()));
        if written.is_none() {
            card.log.unexpected(format!("event queue at {at:#x}: no memory"));
        }
        card.interrupts.raise(VECTOR);
    }
}

/// Reports an address without translation: the MMU's registers say which, the event that they do.
pub fn page_fault(card: &Card, addr: u64) {
    let (page, event, seen) = match Mmu::kind_of(addr) {
        Some(Kind::Hbm) => (reg::mmu::HBM, HBM_MMU, mmu::scramble(addr)),
        _ => (reg::mmu::HOST, HOST_MMU, addr),
    };
    card.set(page + reg::mmu::FAULT_HIGH, (seen >> 32) as u32);
    card.set(page + reg::mmu::FAULT_LOW, seen as u32);
    card.set(page + reg::mmu::FAULT_VALID, 1);
    card.set(page + reg::mmu::CAUSE, 1);
    card.events.lock().unwrap().raise(card, event, &[0; 56]);
}
