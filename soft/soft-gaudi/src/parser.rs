//! What the driver checks when a submission arrives: which queues exist and how they take work,
//! and, on Gaudi1, the packets themselves. Pure.

use rustix::io::Errno;

use crate::asic::{Generation, Profile, Span};
use crate::packet::{self, Command, Malformed};

/// How a queue takes its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueueKind {
    /// Gaudi1: buffers of the driver, parsed and copied.
    External,
    /// Gaudi1: device addresses, no completion of its own.
    Internal,
    /// Gaudi2: device addresses of user buffers.
    Hardware,
}

/// The kind of a queue; `None` where a user may not submit.
///
/// `all_pdma` opens the streams that the embedded cores of a Gaudi2 have had since Linux 6.1.
pub(crate) fn queue_kind(profile: &Profile, queue: u32, all_pdma: bool) -> Option<QueueKind> {
    // A binned engine has no queues.
    if profile.edma_engine(queue).is_some_and(|engine| profile.edma_mask >> engine & 1 == 0) {
        return None;
    }
    match profile.generation {
        Generation::Gaudi1 => match queue {
            0..=7 => Some(QueueKind::External),
            9..=72 => Some(QueueKind::Internal),
            _ => None,
        },
        Generation::Gaudi2 => match queue {
            // The other PDMA streams belong to the embedded cores.
            0 | 1 | 4 => Some(QueueKind::Hardware),
            2 | 3 | 5 if all_pdma => Some(QueueKind::Hardware),
            8..=155 | 252..=259 => Some(QueueKind::Hardware),
            _ => None,
        },
        Generation::Gaudi3 => None,
    }
}

/// Whether the card can fetch packets from `[addr, addr + size)`, by its address alone.
pub(crate) fn fetchable(profile: &Profile, dram_size: u64, addr: u64, size: u64) -> bool {
    let sram = Span { first: profile.sram_base, last: profile.sram_base + profile.sram_size - 1 };
    let dram = if profile.dram_mmu {
        profile.dram_va
    } else {
        Span { first: profile.dram_base, last: profile.dram_base + dram_size - 1 }
    };
    [Some(sram), Some(dram), Some(profile.host_va), profile.host_huge_va]
        .into_iter()
        .flatten()
        .any(|span| span.contains(addr, size))
}

/// Checks a Gaudi1 buffer for an external queue, as the driver does before it copies it.
pub(crate) fn check_external(bytes: &[u8]) -> Result<(), Errno> {
    let mut at = 0;
    while at < bytes.len() {
        let packet =
            packet::decode(Generation::Gaudi1, &bytes[at..]).map_err(
                |malformed| match malformed {
                    Malformed::Truncated | Malformed::UnknownOpcode(_) => Errno::INVAL,
                },
            )?;
        match packet.command {
            Command::MsgProt { .. }
            | Command::CpDma { .. }
            | Command::Stop
            | Command::WregBulk { .. } => return Err(Errno::PERM),
            Command::LoadAndExe(load) if load.scalars => return Err(Errno::PERM),
            Command::Wait { .. } | Command::CbList { .. } | Command::Other(_) => {
                return Err(Errno::INVAL);
            }
            _ => {}
        }
        at += packet.len as usize;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packets(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|w| w.to_le_bytes()).collect()
    }

    #[test]
    fn gaudi1_refuses_what_its_driver_refuses() {
        let dma = [16, 0xc900_0008, 0, 0x10000, 0x2000_0000, 0];
        assert_eq!(check_external(&packets(&dma)), Ok(()));
        assert_eq!(check_external(&packets(&[0, 0x0a00_0000, 0, 0x0a00_0000])), Ok(()));
        // Truncated LIN_DMA, unknown opcode, WAIT.
        assert_eq!(check_external(&packets(&dma[..4])), Err(Errno::INVAL));
        assert_eq!(check_external(&packets(&[0, 0x1f00_0000])), Err(Errno::INVAL));
        assert_eq!(check_external(&packets(&[0, 0x0d00_0000])), Err(Errno::INVAL));
        // MSG_PROT, CP_DMA, STOP, LOAD_AND_EXE of scalars.
        assert_eq!(check_external(&packets(&[0, 0x0700_0000, 0, 0])), Err(Errno::PERM));
        assert_eq!(check_external(&packets(&[0, 0x0500_0000, 0, 0])), Err(Errno::PERM));
        assert_eq!(check_external(&packets(&[0, 0x0b00_0000])), Err(Errno::PERM));
        assert_eq!(check_external(&packets(&[1, 0x0f00_0000, 0, 0])), Err(Errno::PERM));
    }

    #[test]
    fn gaudi2_users_have_three_pdma_queues() {
        let [gaudi1, gaudi2, gaudi3] =
            [Generation::Gaudi1, Generation::Gaudi2, Generation::Gaudi3].map(Generation::profile);
        let open: Vec<u32> = (0..8).filter(|q| queue_kind(gaudi2, *q, false).is_some()).collect();
        assert_eq!(open, [0, 1, 4]);
        assert_eq!(queue_kind(gaudi2, 260, true), None);
        assert_eq!(queue_kind(gaudi2, 200, true), None);
        assert_eq!(queue_kind(gaudi1, 8, false), None);
        assert_eq!(queue_kind(gaudi3, 0, true), None);
        assert!(queue_kind(gaudi2, 124, false).is_some());
        assert_eq!(queue_kind(Generation::five_hbm(), 124, false), None, "a binned EDMA");
    }

    #[test]
    fn buffers_outside_the_ranges_are_not_fetchable() {
        let gaudi2 = Generation::Gaudi2.profile();
        let dram = gaudi2.dram_size;
        assert!(fetchable(gaudi2, dram, 0xfff0_0001_0020_0000, 24));
        assert!(fetchable(gaudi2, dram, 0x1001_0018_0000_0000, 24));
        assert!(!fetchable(gaudi2, dram, 0x7f00_0000_0000, 24));
        assert!(!fetchable(gaudi2, dram, u64::MAX - 3, 24));
    }
}
