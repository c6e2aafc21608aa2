//! The event queue: what the firmware reports to the driver by itself.

use soft_gaudi::processor::Fault;

use crate::card::Card;
use crate::mmu::{self, Kind, Mmu};
use crate::registers::{self as reg, Engine, QmanPlace, cpu, qman, router};

/// Entries of the queue, and bytes of one.
const ENTRIES: u32 = 64;
const ENTRY: u64 = 64;
/// The vector of the event queue.
const VECTOR: u32 = 0;
/// Errors of the host's MMU, and of the first of HBM's.
const HOST_MMU: u16 = 520;
const HBM_MMU: u16 = 503;
/// An access of the first PDMA got an error as its answer; the second PDMA has the next number.
const PDMA_ACCESS: u16 = 540;
/// The event of the first PDMA's queue manager.
const PDMA_QMAN: u16 = 1244;

/// State of the queue.
#[derive(Debug, Default)]
pub struct Events {
    /// The driver has enabled events; it never does before its initialisation is over.
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

/// Reports why a stream has stopped: registers hold the cause, the event says that there is one. Of a fetch that an
/// engine cannot do, nothing is reported to the driver: the engine hangs.
pub fn stream_fault(card: &Card, place: QmanPlace, stream: usize, fault: Fault) {
    let (page, engine, event) = place;
    let error = |bit| card.set(page + qman::ERROR + 4 * stream as u32, bit);
    let event = match fault {
        Fault::Page { addr } => return page_fault(card, addr),
        // The engines here take every length, so there is no broken rule.
        Fault::Fetch { .. } | Fault::Rule { .. } => return,
        Fault::Opcode => {
            error(qman::OPCODE_ERROR);
            event
        }
        Fault::Razwi { addr, write } => {
            let register = addr.checked_sub(reg::CFG).filter(|offset| *offset < reg::CFG_LEN);
            error(if register.is_some() { qman::REGISTER_ERROR } else { qman::MEMORY_ERROR });
            if engine == Engine::Pdma {
                card.set(page + qman::SEI, 1);
                unanswered(card, addr, register, write);
                PDMA_ACCESS + event - PDMA_QMAN
            } else {
                event
            }
        }
    };
    card.events.lock().unwrap().raise(card, event, &[0; 56]);
}

/// Stores the address of an unanswered access in the router of the PDMAs.
fn unanswered(card: &Card, addr: u64, register: Option<u64>, write: bool) {
    let way = usize::from(!write);
    if let Some(offset) = register {
        card.set(router::REGISTER + router::REGISTER_OFFSET[way], offset as u32);
        card.set(router::REGISTER + router::REGISTER_VALID[way], 1);
    } else {
        card.set(router::MEMORY + router::MEMORY_HIGH[way], (addr >> 32) as u32);
        card.set(router::MEMORY + router::MEMORY_LOW[way], addr as u32);
        card.set(router::MEMORY + router::MEMORY_VALID[way], 1);
    }
}

/// Reports an address without translation: the MMU's registers hold the address, the event says that there is one.
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
