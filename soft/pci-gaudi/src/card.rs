//! The card: its memories, what addresses mean on its internal bus, and what writes to registers do.
//!
//! QEMU's messages are handled on one thread, engines run on others (`queues`). Both call in here. Locks are held
//! briefly, and an engine never takes the firmware's lock: firmware that resets the engines waits for them.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use soft_gaudi::asic::{Generation, PciId};
use soft_gaudi::processor::Fault;
use soft_gaudi::sync_manager::{Effect, Layout, SyncManager, Writer};

use crate::events::Events;
use crate::firmware::Firmware;
use crate::interrupts::Interrupts;
use crate::log::Log;
use crate::memory::{GuestMemory, OwnMemory};
use crate::mmu::{Kind, Mmu};
use crate::pci_config::PciConfig;
use crate::queues::Queues;
use crate::registers::{self as reg, Block, stlb};

/// How an engine addresses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// Trusted: physical addresses.
    Physical,
    /// Through the MMUs, in an address space.
    Virtual(u32),
}

impl View {
    /// Of an address space; 0 is the driver's, which uses physical addresses.
    pub fn of(asid: u32) -> Self {
        if asid == 0 { Self::Physical } else { Self::Virtual(asid) }
    }
}

/// What lies at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Guest memory.
    Host(u64),
    /// HBM, from its start.
    Hbm(u64),
    /// SRAM, from the start of BAR 0.
    Sram(u64),
    /// A register.
    Config(u32),
}

/// Options in which cards differ.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Position in the machine.
    pub module_id: u32,
    /// How it shows itself on the bus; by default a Gaudi2 of the first stepping.
    pub pci_id: Option<PciId>,
    /// Lets EDMA queues fetch packets from host memory, which silicon cannot and the vendor's older tests do.
    pub edma_fetch: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Card {
    /// See [`Options`].
    pub options: Options,
    /// BAR 0: registers and SRAM.
    pub bar0: OwnMemory,
    /// BAR 4: HBM.
    pub hbm: OwnMemory,
    /// The guest's memory.
    pub guest: GuestMemory,
    /// Vectors.
    pub interrupts: Interrupts,
    /// PCI configuration.
    pub config: PciConfig,
    /// Page tables.
    pub mmu: Mmu,
    /// Engines.
    pub queues: Queues,
    /// Events for the driver.
    pub events: Mutex<Events>,
    /// The log.
    pub log: Log,
    firmware: Mutex<Firmware>,
    sync: Vec<Mutex<SyncManager>>,
    blocks: HashMap<u32, Block>,
    /// Guest page where writes raise interrupts; 0 for none.
    doorbell: AtomicU64,
}

/// Most register writes that one write may cause: monitors can be chained into a cycle.
const MAX_CHAIN: usize = 4096;

impl Card {
    /// The card after power-on.
    pub fn new(options: Options) -> io::Result<Self> {
        let card = Self {
            options,
            bar0: OwnMemory::new("gaudi2-bar0", reg::BAR0)?,
            hbm: OwnMemory::new("gaudi2-hbm", reg::BAR4)?,
            guest: GuestMemory::default(),
            interrupts: Interrupts::new(),
            config: PciConfig::new(options.pci_id.unwrap_or(PciId::GAUDI2)),
            mmu: Mmu::default(),
            queues: Queues::new(),
            events: Mutex::default(),
            log: Log::new(),
            firmware: Mutex::new(Firmware::new(options.module_id)),
            sync: (0..reg::DCORES).map(|_| Mutex::new(sync_manager())).collect(),
            blocks: reg::blocks().into_iter().collect(),
            doorbell: AtomicU64::new(0),
        };
        card.reset();
        Ok(card)
    }

    /// A register's stored value.
    pub fn get(&self, register: u32) -> u32 {
        self.bar0.load(reg::BAR0_CFG + u64::from(register))
    }

    /// Two registers that make an address: low, then high.
    pub fn get_long(&self, register: u32) -> u64 {
        u64::from(self.get(register)) | u64::from(self.get(register + 4)) << 32
    }

    /// Stores a register's value, without side effects.
    pub fn set(&self, register: u32, value: u32) {
        self.bar0.store(reg::BAR0_CFG + u64::from(register), value);
    }

    /// Sets the guest page where writes raise interrupts.
    pub fn set_doorbell(&self, page: u64) {
        self.doorbell.store(page, Ordering::Release);
    }

    /// A reset from the bus, or power-on.
    pub fn reset(&self) {
        self.firmware.lock().unwrap().reset(self);
    }

    /// Resets everything except the firmware to the state after power-on.
    pub fn clear(&self) {
        self.reset_engines();
        self.mmu.reset();
        self.set_doorbell(0);
        *self.events.lock().unwrap() = Events::default();
        self.bar0.clear(0, reg::BAR0);
        self.hbm.clear(0, reg::BAR4);
        for (register, value) in reg::after_reset() {
            self.set(register, value);
        }
    }

    /// Stops the engines; resets their queues and the sync managers.
    pub fn reset_engines(&self) {
        self.queues.reset(self);
        for manager in &self.sync {
            *manager.lock().unwrap() = sync_manager();
        }
    }

    /// What lies at an address, and for how many bytes; `write` says what for.
    pub fn place(&self, view: View, addr: u64, write: bool) -> Result<(Place, u64), Fault> {
        let inside = |base: u64, len: u64| addr.checked_sub(base).filter(|offset| *offset < len);
        if let Some(offset) = inside(reg::CFG, reg::CFG_LEN) {
            return Ok((Place::Config(offset as u32), reg::CFG_LEN - offset));
        }
        if let Some(offset) = inside(reg::SRAM, reg::SRAM_LEN) {
            return Ok((Place::Sram(reg::BAR0_SRAM + offset), reg::SRAM_LEN - offset));
        }
        let (addr, len) = match view {
            View::Physical => (addr, u64::MAX - addr),
            View::Virtual(asid) => {
                let entry = |kind, at: u64| match kind {
                    Kind::Host => self.guest.long(at),
                    Kind::Hbm => {
                        let mut bytes = [0; 8];
                        self.hbm.read(at.checked_sub(reg::HBM)?, &mut bytes)?;
                        Some(u64::from_le_bytes(bytes))
                    }
                };
                let found = self.mmu.translate(asid, addr, entry).ok_or(Fault::Page { addr })?;
                (found.addr, found.len)
            }
        };
        match addr.checked_sub(reg::HBM) {
            Some(offset) if offset < reg::HBM_LEN => {
                Ok((Place::Hbm(offset), len.min(reg::HBM_LEN - offset)))
            }
            // The host's memory is below 2^56, where the bus sees its addresses unchanged.
            _ if addr < 1 << 56 => Ok((Place::Host(addr), len)),
            _ => Err(Fault::Razwi { addr, write }),
        }
    }

    /// Reads memory as an engine does.
    pub fn read(&self, view: View, addr: u64, into: &mut [u8]) -> Result<(), Fault> {
        let mut done = 0;
        while done < into.len() {
            let at = addr.wrapping_add(done as u64);
            let (place, len) = self.place(view, at, false)?;
            let len = len.min((into.len() - done) as u64) as usize;
            let piece = &mut into[done..done + len];
            match place {
                Place::Host(at) => self.guest.read(at, piece),
                Place::Hbm(at) => self.hbm.read(at, piece),
                Place::Sram(at) => self.bar0.read(at, piece),
                Place::Config(at) => self.bar0.read(reg::BAR0_CFG + u64::from(at), piece),
            }
            .ok_or(Fault::Razwi { addr: at, write: false })?;
            done += len;
        }
        Ok(())
    }

    /// Writes memory as an engine does.
    pub fn write(&self, view: View, addr: u64, data: &[u8]) -> Result<(), Fault> {
        let mut done = 0;
        while done < data.len() {
            let at = addr.wrapping_add(done as u64);
            let (place, len) = self.place(view, at, true)?;
            let len = len.min((data.len() - done) as u64) as usize;
            let piece = &data[done..done + len];
            match place {
                Place::Host(at) => self.guest.write(at, piece),
                Place::Hbm(at) => self.hbm.write(at, piece),
                Place::Sram(at) => self.bar0.write(at, piece),
                // Memory of the embedded cores; registers are written word by word.
                Place::Config(at) if view == View::Physical => {
                    self.bar0.write(reg::BAR0_CFG + u64::from(at), piece)
                }
                Place::Config(_) => None,
            }
            .ok_or(Fault::Razwi { addr: at, write: true })?;
            done += len;
        }
        Ok(())
    }

    /// Writes a word as a message does: to memory, a register or the interrupt page.
    pub fn write_word(&self, view: View, addr: u64, value: u32) -> Result<(), Fault> {
        match self.place(view, addr, true)?.0 {
            Place::Config(register) => {
                if !self.engines_may_write(view, register) {
                    return Err(Fault::Razwi { addr, write: true });
                }
                self.write_register(register, value);
                Ok(())
            }
            Place::Host(at) if self.is_doorbell(at) => {
                self.interrupt(value);
                Ok(())
            }
            _ => self.write(view, addr, &value.to_le_bytes()),
        }
    }

    fn is_doorbell(&self, addr: u64) -> bool {
        let page = self.doorbell.load(Ordering::Acquire);
        page != 0 && addr & !0xfff == page & !0xfff
    }

    fn interrupt(&self, vector: u32) {
        if !self.interrupts.raise(vector) {
            self.log.unexpected(format!("interrupt {vector}, which has no eventfd"));
        }
    }

    /// Which registers users may write: sync managers, fences and the interrupt doorbell.
    fn users_may_write(&self, register: u32) -> bool {
        match self.blocks.get(&(register & !0xfff)) {
            Some(Block::Sync(_)) => true,
            Some(Block::Qman(_)) => {
                (reg::qman::FENCE_RAISE..reg::qman::FENCE_COUNT).contains(&(register & 0xfff))
            }
            _ => register == reg::MSIX_DOORBELL,
        }
    }

    /// Which registers an engine or a sync manager may write. Even a trusted write must not reach registers whose
    /// handlers wait for streams, because the write may come from a stream.
    fn engines_may_write(&self, view: View, register: u32) -> bool {
        const PQ_CI: u32 = reg::qman::PQ_CI;
        match self.blocks.get(&(register & !0xfff)) {
            Some(Block::Psoc) => false,
            Some(Block::Qman(_)) if (PQ_CI..PQ_CI + 16).contains(&(register & 0xfff)) => false,
            _ => view == View::Physical || self.users_may_write(register),
        }
    }

    /// Reads a register of a trapped page.
    pub fn read_register(&self, register: u32) -> u32 {
        if let Some(Block::Sync(dcore)) = self.blocks.get(&(register & !0xfff)) {
            let index = (register - reg::sync(*dcore)) / 4;
            if let Some(value) = self.sync[*dcore].lock().unwrap().sob(index as usize) {
                return value.into();
            }
        }
        self.get(register)
    }

    /// Writes a register, with all side effects.
    pub fn write_register(&self, register: u32, value: u32) {
        let mut pending = VecDeque::from([(register, value)]);
        for _ in 0..MAX_CHAIN {
            let Some((register, value)) = pending.pop_front() else { return };
            self.write_one(register, value, &mut pending);
        }
        self.log.unexpected(format!("write to CFG {register:#x} sets off writes without end"));
    }

    fn write_one(&self, register: u32, value: u32, pending: &mut VecDeque<(u32, u32)>) {
        let (page, offset) = (register & !0xfff, register & 0xfff);
        self.set(register, value);
        match self.blocks.get(&page) {
            Some(Block::Psoc) => self.firmware.lock().unwrap().write(self, register, value),
            Some(Block::HostMmu) => self.write_mmu(Kind::Host, page, offset, value),
            Some(Block::HbmMmu) => self.write_mmu(Kind::Hbm, page, offset, value),
            Some(Block::Kdma) if offset == reg::core::COMMIT => {
                self.queues.commit(self, page, value)
            }
            Some(Block::Kdma) => {}
            Some(Block::Qman(number)) => self.queues.write(self, *number, offset, value),
            Some(Block::Sync(dcore)) => {
                self.write_sync(*dcore, register - reg::sync(*dcore), value, pending);
            }
            Some(Block::Decoder) => {
                // A decoder that is asked to stop has stopped at once.
                if offset == reg::DECODER_GRACEFUL && value & 1 != 0 {
                    self.set(register, value | 0x10);
                }
            }
            None if register == reg::MSIX_DOORBELL => self.interrupt(value),
            None => self.log.unexpected(format!("write to CFG {register:#x}")),
        }
    }

    fn write_mmu(&self, kind: Kind, page: u32, offset: u32, value: u32) {
        match offset {
            stlb::BUSY if value >> 31 != 0 => {
                let low = u64::from(self.get(page + stlb::HOP0_LOW)) << 12;
                let high = u64::from(self.get(page + stlb::HOP0_HIGH)) << 44;
                self.mmu.set_root(kind, self.get(page + stlb::ASID), low | high);
                self.set(page + offset, value & !(1 << 31));
            }
            // Nothing is cached here, so invalidation is done at once.
            stlb::INVALIDATE_ALL | stlb::INVALIDATE_RANGE => self.set(page + offset, 0),
            stlb::INVALIDATE_CACHE => self.set(page + stlb::INVALIDATE_CACHE_STATUS, 1),
            _ => {}
        }
    }

    fn write_sync(
        &self,
        dcore: usize,
        offset: u32,
        value: u32,
        pending: &mut VecDeque<(u32, u32)>,
    ) {
        let mut effects = Vec::new();
        self.sync[dcore].lock().unwrap().write(offset.into(), value, &mut effects);
        for effect in effects {
            if let Err(fault) = self.carry_out(dcore, effect, pending) {
                self.log.unexpected(format!("sync manager {dcore}: {effect:x?} gives {fault:x?}"));
            }
        }
    }

    fn carry_out(
        &self,
        dcore: usize,
        effect: Effect,
        pending: &mut VecDeque<(u32, u32)>,
    ) -> Result<(), Fault> {
        // The driver's own monitors and queues use physical addresses.
        let view = |by: Writer| match by {
            Writer::Monitor(n) if dcore == 0 && n < reg::USER_MONITORS => View::Physical,
            Writer::Queue(n) if dcore == 0 && n < reg::USER_QUEUES => View::Physical,
            _ => View::Virtual(1),
        };
        let (view, addr, value) = match effect {
            Effect::Write { addr, value, by } => (view(by), addr, value),
            Effect::Add { addr, value, by } => {
                let mut bytes = [0; 8];
                self.read(view(by), addr, &mut bytes)?;
                let sum = u64::from_le_bytes(bytes).wrapping_add(value.into());
                return self.write(view(by), addr, &sum.to_le_bytes());
            }
            Effect::Interrupt { enabled: false, .. } => return Ok(()),
            // The driver's doorbell is a physical address; the users' doorbell is not in guest memory either.
            Effect::Interrupt { id, addr, .. } if self.is_doorbell(addr) => {
                self.interrupt(id);
                return Ok(());
            }
            Effect::Interrupt { id, addr, .. } => (View::Virtual(1), addr, id),
        };
        match self.place(view, addr, true)?.0 {
            Place::Config(register) if self.engines_may_write(view, register) => {
                pending.push_back((register, value));
            }
            Place::Config(_) => return Err(Fault::Razwi { addr, write: true }),
            _ => self.write_word(view, addr, value)?,
        }
        Ok(())
    }
}

fn sync_manager() -> SyncManager {
    SyncManager::new(Layout::of(Generation::Gaudi2))
}
