//! Where things are: the address map of a Gaudi2, its blocks, and the registers that do something.
//!
//! Only what the kernel's driver was seen to use. A register is given by its offset in configuration
//! space (CFG); a block by its page, and a register inside it by its offset in that page.

/// Size of BAR 0.
pub const BAR0: u64 = 0x1000_0000;
/// Where configuration space begins in BAR 0.
pub const BAR0_CFG: u64 = 0x400_0000;
/// Where SRAM begins in BAR 0.
pub const BAR0_SRAM: u64 = 0xd00_0000;
/// Size of BAR 2, which holds only the MSI-X table.
pub const BAR2: u64 = 0x4000;
/// Size of BAR 4: a power of two that covers all of HBM, else the driver exports no dma-buf.
pub const BAR4: u64 = 128 << 30;

/// Configuration space, as engines address it.
pub const CFG: u64 = 0x1000_007f_f800_0000;
/// Bytes of configuration space.
pub const CFG_LEN: u64 = 128 << 20;
/// SRAM, as engines address it.
pub const SRAM: u64 = 0x1000_ffff_fd00_0000;
/// Bytes of SRAM.
pub const SRAM_LEN: u64 = 48 << 20;
/// Physical HBM, as engines address it.
pub const HBM: u64 = 0x1001_0000_0000_0000;
/// Bytes of HBM: six stacks.
pub const HBM_LEN: u64 = 96 << 30;
/// The virtual page through which a user's queues and monitors raise interrupts.
pub const PAGE: u64 = 0x1000;

/// First sync objects, monitors and completion queues (of dcore 0) that are not the driver's own.
pub const USER_MONITORS: usize = 289;
/// See [`USER_MONITORS`].
pub const USER_QUEUES: usize = 2;

/// Die clusters, each with a sync manager.
pub const DCORES: usize = 4;
/// Distance between the blocks of two dcores.
const DCORE: u32 = 0x20_0000;

/// Global configuration of the chip's controller: boot status, COMMS, doorbells.
pub mod psoc {
    /// Its page.
    pub const PAGE: u32 = 0x4c4_b000;
    /// The driver's "interrupt" registers are scratchpads here: one for a new CPU-CP message.
    pub const MESSAGE: u32 = PAGE + 0x124;
    /// One to halt, that is to reset the card.
    pub const HALT: u32 = PAGE + 0x128;
    /// One to begin with events.
    pub const EVENTS: u32 = PAGE + 0x12c;
    /// What the firmware can do.
    pub const STATUS0: u32 = PAGE + 0x150;
    /// More of the same; nothing is set.
    pub const STATUS1: u32 = PAGE + 0x154;
    /// Answer to a COMMS command.
    pub const COMMS_STATUS: u32 = PAGE + 0x15c;
    /// Errors at boot; none.
    pub const ERROR0: u32 = PAGE + 0x160;
    /// More of the same.
    pub const ERROR1: u32 = PAGE + 0x164;
    /// Stage of the boot.
    pub const BOOT_STATUS: u32 = PAGE + 0x300;
    /// A COMMS command.
    pub const COMMS_COMMAND: u32 = PAGE + 0x304;
    /// From here on: who may access the registers of the block.
    pub const PROTECTION: u32 = PAGE + 0xf80;
    /// Scratchpad n, for the register table of the firmware's descriptor.
    pub const fn scratchpad(n: u32) -> u32 {
        PAGE + 0x100 + 4 * n
    }
}

/// The firmware's queues.
pub mod cpu {
    /// Producer index of messages.
    pub const PQ_PI: u32 = 0x4cc_1200;
    /// Address of messages, low and high.
    pub const PQ_BASE: u32 = 0x4cc_1204;
    /// Address of events, low and high.
    pub const EQ_BASE: u32 = 0x4cc_1220;
    /// The driver writes 1, the firmware answers 2.
    pub const QUEUE_INIT: u32 = 0x4cc_1230;
}

/// A write of n here raises interrupt n: the doorbell that user programs know.
pub const MSIX_DOORBELL: u32 = 0x4c1_7000;

/// Registers of a queue manager, from its page on; stream s at +4s, command processor c at +4c.
pub mod qman {
    /// Bit s: stream s fetches descriptors.
    pub const ENABLE: u32 = 0x00;
    /// Bit s: stream s fetches no more descriptors.
    pub const STOP: u32 = 0x04;
    /// Trust of fetches and command processors.
    pub const PROT: u32 = 0x4c;
    /// Address of the descriptor ring, low.
    pub const PQ_BASE_LO: u32 = 0x50;
    /// And high.
    pub const PQ_BASE_HI: u32 = 0x60;
    /// Size of the descriptor ring, log2 of its entries.
    pub const PQ_SIZE: u32 = 0x70;
    /// Producer index: work for the stream.
    pub const PQ_PI: u32 = 0x80;
    /// Consumer index.
    pub const PQ_CI: u32 = 0x90;
    /// Why a command processor has stopped.
    pub const ERROR: u32 = 0x24;
    /// In it: the memory bus, bytes that are no packet, the register bus.
    pub const MEMORY_ERROR: u32 = 1 << 2;
    /// See there.
    pub const OPCODE_ERROR: u32 = 1 << 3;
    /// See there.
    pub const REGISTER_ERROR: u32 = 1 << 5;
    /// Bit 0: an access got an error as its answer.
    pub const SEI: u32 = 0x8f0;
    /// Bases of short messages, low; base b at +0x28 b, high at +0x14.
    pub const MESSAGE_BASE: u32 = 0x1f0;
    /// Fence counters are raised here: fence f at +20 f.
    pub const FENCE_RAISE: u32 = 0x290;
    /// Fence counters themselves.
    pub const FENCE_COUNT: u32 = 0x2e0;
    /// What a finished descriptor writes.
    pub const COMPLETION_DATA: u32 = 0x45c;
    /// Where to, low.
    pub const COMPLETION_LO: u32 = 0x46c;
    /// And high.
    pub const COMPLETION_HI: u32 = 0x47c;
    /// Bit 0: finished descriptors of all streams write.
    pub const COMPLETION_ENABLE: u32 = 0x48c;
    /// Address space of accesses that are not trusted.
    pub const ASID: u32 = 0xb80;
    /// Idle words: all ones when nothing runs.
    pub const IDLE: [u32; 3] = [0x1c, 0x20, 0xd84];
}

/// Registers of a DMA core, from its page on.
pub mod core {
    /// Address space: of reads in bits 25:16, of writes in 9:0.
    pub const ASID: u32 = 0x800;
    /// Physical addresses: writes bit 0, reads bit 4.
    pub const BYPASS: u32 = 0x804;
    /// Where a write completion goes, high.
    pub const COMPLETION_HI: u32 = 0x8bc;
    /// And low.
    pub const COMPLETION_LO: u32 = 0x8c0;
    /// What it writes.
    pub const COMPLETION_DATA: u32 = 0x8c4;
    /// Source, or the pattern of a fill; low, then high.
    pub const SRC: u32 = 0x8d8;
    /// Destination; low, then high.
    pub const DST: u32 = 0x8e0;
    /// Bytes.
    pub const SIZE: u32 = 0x8e8;
    /// Starts it.
    pub const COMMIT: u32 = 0x8ec;
}

/// The driver's own DMA core, without a queue manager.
pub const KDMA: u32 = 0x4e8_b000;

/// Registers of an MMU's second-level TLB, from its page on.
pub mod stlb {
    /// Bit 31 latches the root of an address space.
    pub const BUSY: u32 = 0x00;
    /// Which address space.
    pub const ASID: u32 = 0x04;
    /// Bits 43:12 of the root.
    pub const HOP0_LOW: u32 = 0x08;
    /// Bits 63:44 of the root.
    pub const HOP0_HIGH: u32 = 0x0c;
    /// Invalidate all; reads 0 when done.
    pub const INVALIDATE_ALL: u32 = 0x34;
    /// Invalidate the memory cache.
    pub const INVALIDATE_CACHE: u32 = 0x50;
    /// Bit 0: that is done.
    pub const INVALIDATE_CACHE_STATUS: u32 = 0x54;
    /// Invalidate a range; reads 0 when done.
    pub const INVALIDATE_RANGE: u32 = 0x8c;
}

/// Registers of an MMU, on the page before its TLB's: what a page fault leaves there.
pub mod mmu {
    /// Page of the host's.
    pub const HOST: u32 = 0x4d0_0000;
    /// Page of the first of HBM's.
    pub const HBM: u32 = 0x408_0000;
    /// Causes; bit 0 is a page fault.
    pub const CAUSE: u32 = 0x30;
    /// Bits 63:32 of the address.
    pub const FAULT_HIGH: u32 = 0x34;
    /// Bits 31:0 of the address.
    pub const FAULT_LOW: u32 = 0x38;
    /// Bit 0: there is an address of a page fault.
    pub const FAULT_VALID: u32 = 0x44;
}

/// Where the router of the PDMAs keeps an access that nobody answered (RAZWI): their memory bus, and their
/// register bus, of which only the offset in configuration space is kept.
pub mod router {
    /// Page of the memory bus's.
    pub const MEMORY: u32 = 0x414_2000;
    /// Bits 63:32 of the address: of a write, of a read.
    pub const MEMORY_HIGH: [u32; 2] = [0x158, 0x160];
    /// Bits 31:0.
    pub const MEMORY_LOW: [u32; 2] = [0x15c, 0x164];
    /// Bit 0: there is one.
    pub const MEMORY_VALID: [u32; 2] = [0x170, 0x174];
    /// Page of the register bus's.
    pub const REGISTER: u32 = 0x415_2000;
    /// The register: of a write, of a read.
    pub const REGISTER_OFFSET: [u32; 2] = [0x530, 0x534];
    /// Bit 0: there is one.
    pub const REGISTER_VALID: [u32; 2] = [0x540, 0x544];
}

/// The decoder's handshake: bit 4 answers bit 0.
pub const DECODER_GRACEFUL: u32 = 0x110;

/// What drives a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// DMA between host and card.
    Pdma,
    /// DMA inside the card. It cannot fetch from host memory.
    Edma,
    /// An engine that computes; here its queues only send messages.
    Compute,
}

/// A page of configuration space on which accesses do something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Block {
    /// [`psoc`].
    Psoc,
    /// [`stlb`] of the host's MMU.
    HostMmu,
    /// [`stlb`] of one of HBM's MMUs.
    HbmMmu,
    /// [`KDMA`].
    Kdma,
    /// A queue manager, by its number.
    Qman(usize),
    /// A page of a dcore's sync manager.
    Sync(usize),
    /// A video decoder's bridge.
    Decoder,
}

/// Pages of the sync manager of one dcore, from its first sync object on.
const SYNC_PAGES: u32 = 0x1f;

/// First sync object of a dcore.
pub const fn sync(dcore: usize) -> u32 {
    0x410_0000 + dcore as u32 * DCORE
}

/// Where a queue manager is, what it drives, and the event that reports its errors.
pub type QmanPlace = (u32, Engine, u16);

/// The queue managers, in the order of their numbers.
pub fn qmans() -> Vec<QmanPlace> {
    /// Of the first EDMA of each dcore.
    const EDMA_EVENTS: [u16; DCORES] = [1238, 1236, 1242, 1240];
    let mut all = vec![(0x4c8_a000, Engine::Pdma, 1244), (0x4c9_a000, Engine::Pdma, 1245)];
    for dcore in 0..DCORES as u16 {
        let base = u32::from(dcore) * DCORE;
        let edma = EDMA_EVENTS[usize::from(dcore)];
        all.push((0x41c_a000 + base, Engine::Edma, edma));
        all.push((0x41d_a000 + base, Engine::Edma, edma + 1));
        all.push((0x40c_a000 + base, Engine::Compute, 1232 + dcore));
        all.extend((0..6).map(|n| {
            let page = 0x400_a000 + u32::from(n) * 0x1_0000 + base;
            (page, Engine::Compute, 1206 + 6 * dcore + n)
        }));
    }
    // The last TPC is in the first dcore.
    all.push((0x406_a000, Engine::Compute, 1230));
    all.extend([(0x4e0_a000, Engine::Compute, 1249), (0x4e1_a000, Engine::Compute, 1250)]);
    all
}

/// All trapped pages.
pub fn blocks() -> Vec<(u32, Block)> {
    let mut all = vec![
        (psoc::PAGE, Block::Psoc),
        (0x4d0_1000, Block::HostMmu),
        (KDMA, Block::Kdma),
        (0x4f0_3000, Block::Decoder),
        (0x4f1_3000, Block::Decoder),
    ];
    all.extend(qmans().iter().enumerate().map(|(n, (page, ..))| (*page, Block::Qman(n))));
    for dcore in 0..DCORES {
        let base = dcore as u32 * DCORE;
        all.extend((0..4).map(|k| (0x408_1000 + base + k * 0x1_0000, Block::HbmMmu)));
        all.extend([0x41e_3000, 0x41f_3000].map(|page| (page + base, Block::Decoder)));
        // Sync objects, monitors, and the page of the completion queues.
        let pages = (0..SYNC_PAGES).filter(|page| *page <= 0x12 || *page == 0x1e);
        all.extend(pages.map(|page| (sync(dcore) + page * 0x1000, Block::Sync(dcore))));
    }
    all
}

/// Words that the driver reads and that are not zero after a reset.
pub fn after_reset() -> Vec<(u32, u32)> {
    let mut all = Vec::new();
    for (page, ..) in qmans() {
        all.extend(qman::IDLE.map(|offset| (page + offset, u32::MAX)));
    }
    for dcore in 0..DCORES as u32 {
        let base = dcore * DCORE;
        let tpcs = if dcore == 0 { 7 } else { 6 };
        all.extend((0..tpcs).map(|n| (0x400_bd84 + n * 0x1_0000 + base, u32::MAX)));
        all.push((0x40c_b000 + base, u32::MAX));
    }
    all
}

/// What QEMU may map of BAR 0 (offset, bytes): all but the trapped pages.
pub fn mappable() -> Vec<(u64, u64)> {
    let mut trapped: Vec<u64> =
        blocks().iter().map(|(page, _)| BAR0_CFG + u64::from(*page)).collect();
    trapped.sort_unstable();
    let mut areas = Vec::new();
    let mut from = 0;
    for page in trapped.into_iter().chain([BAR0]) {
        if page > from {
            areas.push((from, page - from));
        }
        from = page + PAGE;
    }
    areas
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_page_is_trapped_twice_or_mapped_as_well() {
        let mut pages: Vec<u32> = blocks().iter().map(|(page, _)| *page).collect();
        let count = pages.len();
        pages.sort_unstable();
        pages.dedup();
        assert_eq!(pages.len(), count);
        for page in pages {
            let at = BAR0_CFG + u64::from(page);
            assert!(mappable().iter().all(|(from, len)| at + PAGE <= *from || at >= from + len));
        }
        let mapped: u64 = mappable().iter().map(|(_, len)| len).sum();
        assert_eq!(mapped + count as u64 * PAGE, BAR0);
    }
}
