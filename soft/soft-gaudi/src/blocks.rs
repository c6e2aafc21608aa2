//! Register blocks that a program may map: the globals of the sync managers of dcores 1 to 3 on a
//! Gaudi2, which are on the driver's list.
//!
//! They are pages of the compute node's file, so that a plain `mmap` of the descriptor shows them, as
//! it does on hardware. They keep what is written to them and do nothing; their first registers
//! identify the software card.

use std::os::fd::BorrowedFd;

use rustix::io::Errno;

use crate::asic::{Generation, Profile};

/// Marks a handle as a register block's; also where they begin in the file (below 16 TiB, where files of
/// ext4 end).
const HANDLES: u64 = 8 << 40;
/// Bytes of a block.
const SIZE: u32 = 4096;
/// What the first registers hold.
const WORDS: &[u8; 16] = b"software Gaudi  ";
/// `SYNC_MNGR_GLBL` of dcores 1, 2 and 3, from the start of the configuration space. Dcore 0's is the
/// kernel driver's.
const GAUDI2: [u64; 3] = [0x431_e000, 0x451_e000, 0x471_e000];

fn offsets(generation: Generation) -> &'static [u64] {
    match generation {
        Generation::Gaudi2 => &GAUDI2,
        // None is permitted on a Gaudi1; which ones on a Gaudi3 is not public.
        Generation::Gaudi1 | Generation::Gaudi3 => &[],
    }
}

/// Creates the blocks in the node's file. The file ends with them.
pub(crate) fn prepare(file: BorrowedFd<'_>, profile: &Profile) -> Result<(), Errno> {
    let count = offsets(profile.generation).len() as u64;
    if count > 0 {
        rustix::fs::ftruncate(file, HANDLES + count * u64::from(SIZE))?;
    }
    for block in 0..count {
        rustix::io::pwrite(file, WORDS, HANDLES + block * u64::from(SIZE))?;
    }
    Ok(())
}

/// Size and handle of the block that starts at this address.
pub(crate) fn find(profile: &Profile, address: u64) -> Result<(u32, u64), Errno> {
    let offset = address.checked_sub(profile.cfg.first).ok_or(Errno::INVAL)?;
    let blocks = offsets(profile.generation);
    let at = blocks.iter().position(|block| *block == offset).ok_or(Errno::INVAL)?;
    Ok((SIZE, HANDLES + at as u64 * u64::from(SIZE)))
}
