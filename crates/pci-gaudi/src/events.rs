//! The event queue: what the firmware reports to the driver by itself.

use crate::card::Card;
use crate::registers::cpu;

/// Entries of the queue, and bytes of one.
const ENTRIES: u32 = 64;
const ENTRY: u64 = 64;
/// The vector of the event queue.
const VECTOR: u32 = 0;

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
        let at = card.get_long(cpu::EQ_BASE) + ENTRY * u64::from(self.produced % ENTRIES);
        self.produced = self.produced.wrapping_add(1);
        let control = READY | u32::from(id) << 16 | self.produced & 0xffff;
        let written = card
            .guest
            .write(at + 8, &data[..data.len().min(ENTRY as usize - 8)])
            .and_then(|()| card.guest.write(at + 4, &control.to_le_bytes()));
        if written.is_none() {
            card.log.unexpected(format!("event queue at {at:#x}: no memory"));
        }
        card.interrupts.raise(VECTOR);
    }
}
