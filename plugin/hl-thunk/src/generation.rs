//! The generations of Gaudi and their differences, as one table keyed by the PCI device id.

use std::fmt;
use std::ops::Range;

use crate::sys;

/// Which way a copy goes, seen from the device; decides the queues that may carry it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Host memory to device memory.
    HostToDevice,
    /// Device memory to host memory.
    DeviceToHost,
    /// Within one device.
    DeviceToDevice,
}

/// A generation of Gaudi.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Generation {
    /// First generation: physical device addresses, command buffers from the kernel.
    Gaudi,
    /// Second generation: device MMU, command buffers in mapped host memory.
    Gaudi2,
    /// Third generation: no copies through the kernel's submission call.
    Gaudi3,
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Generation::Gaudi => "Gaudi",
            Generation::Gaudi2 => "Gaudi2",
            Generation::Gaudi3 => "Gaudi3",
        })
    }
}

impl Generation {
    /// All of them. The compiler reports a new one in [`Generation::pci_ids`], but not here: add it to both.
    pub const ALL: [Self; 3] = [Generation::Gaudi, Generation::Gaudi2, Generation::Gaudi3];

    /// The PCI device ids of its cards: those of Linux's driver, of Habana's own, and of the vendor's simulators.
    pub fn pci_ids(self) -> &'static [u32] {
        match self {
            // With and without secured firmware; HL-2000M.
            Generation::Gaudi => {
                &[sys::PCI_ID_GAUDI, sys::PCI_ID_GAUDI_SEC, 0x1001, 0x1011, 0xff02]
            }
            Generation::Gaudi2 => &[sys::PCI_ID_GAUDI2, sys::PCI_ID_HL288, 0xff07],
            // Its second die, one with a single die.
            Generation::Gaudi3 => &[sys::PCI_ID_GAUDI3, 0x1061, 0x1062, sys::PCI_ID_HL338, 0xff0b],
        }
    }

    /// The generation with this PCI device id; `None` for anything else (such as Goya).
    pub fn from_pci_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|generation| generation.pci_ids().contains(&id))
    }

    /// The stepping of the chip that a PCI revision stands for, of a Gaudi2 and a Gaudi3.
    pub fn stepping(self, revision: u8) -> Option<char> {
        match self {
            Generation::Gaudi => None,
            Generation::Gaudi2 | Generation::Gaudi3 => {
                (1..=5).contains(&revision).then(|| char::from(b'A' + revision - 1))
            }
        }
    }

    /// Whether device memory is allocated and mapped by the driver. Without it addresses are
    /// physical and the driver's allocator only counts.
    pub fn has_dram_mmu(self) -> bool {
        match self {
            Generation::Gaudi => false,
            Generation::Gaudi2 | Generation::Gaudi3 => true,
        }
    }

    /// Whether copies can be submitted as command buffers.
    pub fn accepts_submissions(self) -> bool {
        match self {
            Generation::Gaudi | Generation::Gaudi2 => true,
            Generation::Gaudi3 => false,
        }
    }

    /// Whether the driver maps any register block at all for user programs.
    pub fn maps_register_blocks(self) -> bool {
        match self {
            Generation::Gaudi => false,
            Generation::Gaudi2 | Generation::Gaudi3 => true,
        }
    }

    /// How many submissions the driver keeps before its library starts to spin.
    pub fn max_pending_submissions(self) -> u64 {
        match self {
            Generation::Gaudi => 16384,
            Generation::Gaudi2 | Generation::Gaudi3 => 64,
        }
    }

    /// Device addresses that the driver reserves for callers' hints.
    pub fn hint_range(self) -> Option<Range<u64>> {
        match self {
            Generation::Gaudi => None,
            Generation::Gaudi2 => Some(0x1001_5000_0000_0000..0x1001_7000_0000_0000),
            Generation::Gaudi3 => Some(0x0201_e000_0000_0000..0x0202_0000_0000_0000),
        }
    }

    /// Where in [`Generation::hint_range`] the vendor's runtime (SCAL) places its own pool. On a Gaudi2 with
    /// five HBM stacks it is the first address, on one with six, whose pages do not divide that, the second.
    pub fn framework_pools(self) -> &'static [u64] {
        match self {
            Generation::Gaudi => &[],
            Generation::Gaudi2 => &[0x1001_5000_0000_0000, 0x1001_6000_0000_0000],
            Generation::Gaudi3 => &[0x0201_e000_0000_0000],
        }
    }

    /// The queues that may carry copies and fills in `direction`; empty where there are none.
    ///
    /// A Gaudi2 copies on its PDMA engines in every direction, also inside its own memory. Its EDMA
    /// engines cannot fetch a command buffer from host memory: the driver accepts such a submission,
    /// the engine hangs, and the watchdog resets the card under all its users.
    pub fn queues(self, direction: Direction) -> &'static [u32] {
        match (self, direction) {
            (Generation::Gaudi, Direction::DeviceToHost) => &[4, 5, 6, 7],
            (Generation::Gaudi, _) => &[0, 1, 2, 3],
            // Streams 2 and 3 of the first and 1 to 3 of the second PDMA belong to the firmware.
            (Generation::Gaudi2, Direction::HostToDevice) => &[0, 1],
            (Generation::Gaudi2, Direction::DeviceToHost) => &[4],
            (Generation::Gaudi2, Direction::DeviceToDevice) => &[0, 1, 4],
            (Generation::Gaudi3, _) => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_ids_of_both_drivers_name_their_generation_and_no_other_does() {
        use Generation::{Gaudi, Gaudi2, Gaudi3};
        let known = [
            (0x1000, Gaudi),
            (0x1001, Gaudi),
            (0x1010, Gaudi),
            (0x1011, Gaudi),
            (0x1020, Gaudi2),
            (0x1021, Gaudi2),
            (0x1060, Gaudi3),
            (0x1063, Gaudi3),
        ];
        for (id, generation) in known {
            assert_eq!(Generation::from_pci_id(id), Some(generation), "{id:#x}");
        }
        let all: Vec<u32> = Generation::ALL.iter().flat_map(|it| it.pci_ids()).copied().collect();
        assert!((1..all.len()).all(|at| !all[..at].contains(&all[at])), "{all:x?}");
        for id in [0x0001, 0x1022, 0x1064, 0x1070] {
            assert_eq!(Generation::from_pci_id(id), None, "{id:#x}");
        }
        assert_eq!(
            [0, 1, 4, 5, 6].map(|revision| Gaudi2.stepping(revision)),
            [None, Some('A'), Some('D'), Some('E'), None]
        );
    }

    /// Queues 0 to 7 are the PDMA engines'; all others of a Gaudi2 are EDMA's, TPC's, MME's or NIC's.
    #[test]
    fn gaudi2_submits_to_pdma_queues_of_the_user_only() {
        use Direction::{DeviceToDevice, DeviceToHost, HostToDevice};
        for direction in [HostToDevice, DeviceToHost, DeviceToDevice] {
            let queues = Generation::Gaudi2.queues(direction);
            assert!(!queues.is_empty(), "{direction:?}");
            assert!(queues.iter().all(|queue| [0, 1, 4].contains(queue)), "{direction:?}");
        }
    }
}
