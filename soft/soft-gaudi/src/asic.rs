//! What each generation of the card reports and accepts: the numbers of the driver contract in
//! one table, and nothing that acts on them.

use crate::abi;

/// A generation of the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Generation {
    /// First generation: DRAM has physical addresses only.
    Gaudi1,
    /// Second generation: DRAM behind an MMU, user command buffers.
    Gaudi2,
    /// Third generation: takes no DMA submissions from users.
    Gaudi3,
}

/// PCI device ids of the cards that Linux's driver and Habana's own know, and the card's name where it is not that of
/// its generation.
const CARDS: [(u32, Generation, Option<&str>); 8] = [
    (abi::PCI_ID_GAUDI, Generation::Gaudi1, None),
    (0x1010, Generation::Gaudi1, None),
    (0x1001, Generation::Gaudi1, Some("HL2000M-soft")),
    (0x1011, Generation::Gaudi1, Some("HL2000M-soft")),
    (abi::PCI_ID_GAUDI2, Generation::Gaudi2, None),
    (0x1021, Generation::Gaudi2, Some("HL288-soft")),
    (abi::PCI_ID_GAUDI3, Generation::Gaudi3, None),
    (0x1063, Generation::Gaudi3, Some("HL338-soft")),
];

/// How a card shows itself on the PCI bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciId {
    /// Device id; may be one that no card has.
    pub device: u32,
    /// Revision: 1 is the stepping A.
    pub revision: u8,
}

impl PciId {
    /// A Gaudi2 of the first stepping.
    pub const GAUDI2: Self = Self { device: abi::PCI_ID_GAUDI2, revision: 1 };

    /// The generation of the card with this id; `None` if there is no such card.
    pub fn generation(self) -> Option<Generation> {
        CARDS.iter().find(|(id, ..)| *id == self.device).map(|(_, generation, _)| *generation)
    }

    /// The name of the card.
    pub(crate) fn card_name(self, profile: &Profile) -> &'static str {
        let known = CARDS.iter().find(|(id, ..)| *id == self.device);
        known.map_or("unknown-soft", |(.., name)| name.unwrap_or(profile.card_name))
    }

    /// Parses `0x1021` or `0x1021:4`.
    pub fn parse(text: &str) -> Option<Self> {
        let (device, revision) = text.split_once(':').unwrap_or((text, "1"));
        let device = u16::from_str_radix(device.strip_prefix("0x")?, 16).ok()?.into();
        Some(Self { device, revision: revision.parse().ok()? })
    }
}

impl Generation {
    /// The name used in variables and folder names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gaudi1 => "gaudi1",
            Self::Gaudi2 => "gaudi2",
            Self::Gaudi3 => "gaudi3",
        }
    }

    /// The numbers of a Gaudi2 with five stacks of HBM.
    pub fn five_hbm() -> &'static Profile {
        &GAUDI2_FIVE_HBM
    }

    /// The numbers of this generation, of a Gaudi2 with six stacks of HBM.
    pub fn profile(self) -> &'static Profile {
        match self {
            Self::Gaudi1 => &GAUDI1,
            Self::Gaudi2 => &GAUDI2,
            Self::Gaudi3 => &GAUDI3,
        }
    }
}

/// An address range, both ends included, as the driver keeps them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First address.
    pub first: u64,
    /// Last address.
    pub last: u64,
}

impl Span {
    const fn to(first: u64, end: u64) -> Self {
        Self { first, last: end - 1 }
    }

    /// Whether all of `[addr, addr + size)` lies inside.
    pub fn contains(self, addr: u64, size: u64) -> bool {
        size > 0
            && addr >= self.first
            && addr.checked_add(size - 1).is_some_and(|last| last <= self.last)
    }
}

/// How many queues SCAL has, after those of the driver (`api::scal`).
pub(crate) const SCAL_QUEUES: u32 = 8;

/// First queue of the two EDMA engines of each dcore of a Gaudi2.
const EDMA_QUEUES: [u32; 4] = [8, 48, 84, 120];

/// What one generation is made of.
#[derive(Debug)]
pub struct Profile {
    /// Which generation.
    pub generation: Generation,
    /// PCI device id.
    pub pci_id: u32,
    /// Value of `enum hlthunk_device_name`.
    pub device_name: abi::DeviceName,
    /// Name of the card, marked as software.
    pub card_name: &'static str,
    /// Whether DRAM is reached through virtual addresses.
    pub dram_mmu: bool,
    /// `dram_base_address` as reported; on Gaudi1 the first usable physical address.
    pub dram_base: u64,
    /// Granule of DRAM allocation and mapping.
    pub dram_page: u64,
    /// `dram_size` as the hardware reports it.
    pub dram_size: u64,
    /// DRAM the driver keeps for itself.
    pub dram_reserved: u64,
    /// Virtual addresses of DRAM (unused without MMU).
    pub dram_va: Span,
    /// The part of it that is used only for hints.
    pub dram_va_hints: Option<Span>,
    /// Virtual addresses of host memory in 4 KiB pages.
    pub host_va: Span,
    /// The part of it that is used only for hints.
    pub host_va_hints: Option<Span>,
    /// Virtual addresses of host memory in huge pages, if they have a range of their own.
    pub host_huge_va: Option<Span>,
    /// The part of it that is used only for hints.
    pub host_huge_va_hints: Option<Span>,
    /// Start of `host_va` where mapped command buffers live; 0 bytes where there are none.
    pub mapped_cb_pool: u64,
    /// Bytes of `host_va` that the driver takes for internal use after that pool.
    pub internal_cbs: u64,
    /// First SRAM address a user may touch.
    pub sram_base: u64,
    /// Bytes of SRAM a user may touch.
    pub sram_size: u64,
    /// Configuration space: registers.
    pub cfg: Span,
    /// Length of the array of `hlthunk_get_hw_events_arr`.
    pub events: u32,
    /// First interrupt a user may wait for.
    pub first_interrupt: u16,
    /// How many.
    pub interrupts: u16,
    /// Interrupt of the TPCs.
    pub tpc_interrupt: u16,
    /// TPCs present.
    pub tpc_mask: u64,
    /// EDMA engines present.
    pub edma_mask: u32,
    /// Submissions that may be in flight.
    pub max_pending: u64,
    /// Seconds until a stuck submission resets the device.
    pub cs_timeout_s: u64,
    /// Number of queue ids.
    pub queues: u32,
    /// First free sync object, monitor and completion queue of dcore 0.
    pub first_free: [u32; 3],
}

impl Profile {
    /// The EDMA engine of a Gaudi2's queue, as a bit number of [`Profile::edma_mask`].
    pub fn edma_engine(&self, queue: u32) -> Option<u32> {
        if self.generation != Generation::Gaudi2 {
            return None;
        }
        let dcore = EDMA_QUEUES.iter().position(|first| (*first..first + 8).contains(&queue))?;
        Some(2 * dcore as u32 + (queue - EDMA_QUEUES[dcore]) / 4)
    }

    /// Whether an address is one of host memory.
    pub fn is_host(&self, addr: u64) -> bool {
        self.host_va.contains(addr, 1)
            || self.host_huge_va.is_some_and(|range| range.contains(addr, 1))
    }
}

/// Where no interrupt or queue exists.
const NONE: u16 = 0xffff;

static GAUDI1: Profile = Profile {
    generation: Generation::Gaudi1,
    pci_id: abi::PCI_ID_GAUDI,
    device_name: abi::DEVICE_GAUDI,
    card_name: "HL205-soft",
    dram_mmu: false,
    dram_base: 0x2000_0000,
    dram_page: 2 << 20,
    dram_size: 0x7_e000_0000,
    dram_reserved: 0x2000_0000,
    dram_va: Span { first: 1, last: 0 },
    dram_va_hints: None,
    host_va: Span { first: 0x1_0000_0000_0000, last: 0x2_7fbf_ffff_ffff },
    host_va_hints: None,
    host_huge_va: None,
    host_huge_va_hints: None,
    mapped_cb_pool: 0,
    internal_cbs: 2 << 20,
    sram_base: 0x7f_f000_0080,
    sram_size: 0x13f_ff80,
    cfg: Span::to(0x7f_fc00_0000, 0x7f_fc00_0000 + 0x400_0000),
    events: 663,
    first_interrupt: NONE,
    interrupts: 0,
    tpc_interrupt: NONE,
    tpc_mask: 0xff,
    edma_mask: 0,
    max_pending: 16384,
    cs_timeout_s: 600,
    queues: 113,
    first_free: [144, 72, NONE as u32],
};

static GAUDI2: Profile = GAUDI2_SIX_HBM;

/// A Gaudi2 with five stacks of HBM: smaller pages, and one EDMA engine binned.
static GAUDI2_FIVE_HBM: Profile = Profile {
    dram_base: 0x1001_0014_0000_0000,
    dram_page: 640 << 20,
    dram_size: 0x13_d800_0000,
    dram_reserved: 640 << 20,
    dram_va: Span::to(0x1001_0014_0000_0000, 0x1001_a007_8000_0000),
    edma_mask: 0x7f,
    ..GAUDI2_SIX_HBM
};

const GAUDI2_SIX_HBM: Profile = Profile {
    generation: Generation::Gaudi2,
    pci_id: abi::PCI_ID_GAUDI2,
    device_name: abi::DEVICE_GAUDI2,
    card_name: "HL225-soft",
    dram_mmu: true,
    dram_base: 0x1001_0018_0000_0000,
    dram_page: 768 << 20,
    dram_size: 0x17_d000_0000,
    dram_reserved: 768 << 20,
    dram_va: Span::to(0x1001_0018_0000_0000, 0x1001_c006_0000_0000),
    dram_va_hints: Some(Span { first: 0x1001_5000_0000_0000, last: 0x1001_6fff_ffff_ffff }),
    host_va: Span::to(0xfff0_0000_0000_0000, 0xfff0_8000_0000_0000),
    host_va_hints: Some(Span { first: 0xfff0_77ff_ffff_0000, last: 0xfff0_7fff_ffff_ffff }),
    host_huge_va: Some(Span::to(0xfff0_8000_0000_0000, 0xfff1_0000_0000_0000)),
    host_huge_va_hints: Some(Span { first: 0xfff0_f800_0000_0000, last: 0xfff0_ffff_ffff_ffff }),
    mapped_cb_pool: 4 << 30,
    internal_cbs: 2 << 20,
    sram_base: 0x1000_ffff_fd00_0000,
    sram_size: 48 << 20,
    cfg: Span::to(0x1000_007f_f800_0000, 0x1000_0080_0000_0000),
    events: 1329,
    first_interrupt: 48,
    interrupts: 64,
    tpc_interrupt: 46,
    tpc_mask: 0xff_ffff,
    edma_mask: 0xff,
    max_pending: 64,
    cs_timeout_s: 30,
    queues: 261,
    first_free: [413, 289, 2],
};

/// The first address of DRAM, SRAM and the memory in use when idle are those of a public log of Synapse 1.18. The
/// public sources leave other gaps (VA ranges); the values chosen are plausible and marked as such in the documentation.
static GAUDI3: Profile = Profile {
    generation: Generation::Gaudi3,
    pci_id: abi::PCI_ID_GAUDI3,
    device_name: abi::DEVICE_GAUDI3,
    card_name: "HL325-soft",
    dram_mmu: true,
    dram_base: 0x0201_0020_0000_0000,
    dram_page: 32 << 20,
    dram_size: (128 << 30) - (672 << 20),
    dram_reserved: 672 << 20,
    dram_va: Span { first: 0x0201_0020_0000_0000, last: 0x0201_ffff_ffff_ffff },
    dram_va_hints: Some(Span { first: 0x0201_e000_0000_0000, last: 0x0201_ffff_ffff_ffff }),
    host_va: Span::to(0xff70_0000_0000_0000, 0xff70_8000_0000_0000),
    host_va_hints: Some(Span { first: 0xff70_7800_0000_0000, last: 0xff70_7fff_ffff_ffff }),
    host_huge_va: Some(Span::to(0xfff0_0000_0000_0000, 0xfff0_8000_0000_0000)),
    host_huge_va_hints: Some(Span { first: 0xfff0_7800_0000_0000, last: 0xfff0_7fff_ffff_ffff }),
    mapped_cb_pool: 4 << 30,
    internal_cbs: 2 << 20,
    sram_base: 0x0200_ffff_fa00_0000,
    sram_size: 0,
    cfg: Span::to(0x0300_007f_fc00_0000, 0x0300_0080_0000_0000),
    events: 1329,
    first_interrupt: 48,
    interrupts: 64,
    tpc_interrupt: 46,
    tpc_mask: u64::MAX,
    edma_mask: 0xff,
    max_pending: 64,
    cs_timeout_s: 30,
    queues: 0,
    first_free: [0, 0, 0],
};

/// PCI bus ids of the first cards; they look like a real eight-card machine.
const BUS_IDS: [&str; 8] = [
    "0000:33:00.0",
    "0000:4d:00.0",
    "0000:4e:00.0",
    "0000:34:00.0",
    "0000:9a:00.0",
    "0000:9b:00.0",
    "0000:b3:00.0",
    "0000:b4:00.0",
];

/// Module ids of the first cards. The first four are a server's in the field, whose mapping table the
/// documentation shows. Most differ from their index, so that mixing them up shows.
const MODULE_IDS: [u32; 8] = [2, 0, 1, 3, 6, 7, 5, 4];

/// PCI bus id of the card with this index.
pub fn bus_id(index: u32) -> String {
    match BUS_IDS.get(index as usize) {
        Some(id) => (*id).to_owned(),
        None => format!("{:04x}:{:02x}:00.0", 1 + index / 256, index % 256),
    }
}

/// Module id (slot) of the card with this index.
pub fn module_id(index: u32) -> u32 {
    MODULE_IDS.get(index as usize).copied().unwrap_or(index ^ 1)
}

/// NUMA node near the card: the first half of each eight cards on node 0, the rest on node 1.
pub fn numa_node(index: u32) -> u32 {
    index / 4 % 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn identities_are_unique_and_module_ids_differ_from_indices() {
        let bus: HashSet<_> = (0..256).map(bus_id).collect();
        let modules: HashSet<_> = (0..256).map(module_id).collect();
        assert_eq!((bus.len(), modules.len()), (256, 256));
        assert!(bus.iter().all(|id| id.len() == 12));
        assert!((0..256).all(|index| module_id(index) != index || index == 3));
    }

    /// A table that names them otherwise is refused (`docs/devices.md`).
    #[test]
    fn the_first_four_cards_are_those_of_the_documented_mapping_table() {
        let cards: Vec<_> = (0..4).map(|index| (index, module_id(index), bus_id(index))).collect();
        let table = [
            (0, 2, "0000:33:00.0"),
            (1, 0, "0000:4d:00.0"),
            (2, 1, "0000:4e:00.0"),
            (3, 3, "0000:34:00.0"),
        ];
        assert_eq!(cards, table.map(|(index, module, bus)| (index, module, bus.to_owned())));
    }

    #[test]
    fn gaudi2_dram_is_127_pages_of_768_or_640_mib() {
        for (profile, page) in
            [(Generation::Gaudi2.profile(), 768 << 20), (Generation::five_hbm(), 640 << 20)]
        {
            assert_eq!(profile.dram_page, page);
            assert_eq!(profile.dram_size, 127 * page);
            assert_eq!((profile.dram_base & 0xffff_ffff_ffff) % page, 0);
        }
    }

    #[test]
    fn edma_queues_belong_to_two_engines_of_four_dcores() {
        let profile = Generation::Gaudi2.profile();
        let engines = [0, 7, 8, 15, 16, 48, 55, 84, 120, 124, 127, 128]
            .map(|queue| profile.edma_engine(queue));
        let expected = [None, None, Some(0), Some(1), None, Some(2), Some(3), Some(4), Some(6)];
        assert_eq!(engines[..9], expected);
        assert_eq!(engines[9..], [Some(7), Some(7), None]);
        assert_eq!(Generation::Gaudi1.profile().edma_engine(9), None);
    }
}
