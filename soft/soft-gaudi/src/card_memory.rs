//! A card's SRAM and DRAM: one sparse file, mapped once into each process that needs it.
//!
//! The mapping is never undone, so a pointer into it stays valid for the process's life; what lies
//! beyond the end of the file (another process may have given it another size since), or a page
//! that a full tmpfs cannot provide, answers with a fault that [`crate::guarded`] turns into an
//! error.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::node::Node;

/// Bytes for SRAM at the start of the file; the largest of all generations.
const SRAM_BYTES: u64 = 48 << 20;

/// The memory of one card as this process sees it.
#[derive(Debug)]
pub(crate) struct CardMemory {
    file: OwnedFd,
    base: usize,
    len: u64,
}

/// The card's memory; mapped at the first call.
pub(crate) fn of(node: &Node, device: u32) -> Result<&'static CardMemory, Errno> {
    static MAPPED: Mutex<[Option<&'static CardMemory>; 256]> = Mutex::new([None; 256]);
    let mut mapped = MAPPED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let slot = mapped.get_mut(device as usize).ok_or(Errno::NODEV)?;
    match slot {
        Some(memory) if memory.is_current(node, device) => Ok(memory),
        _ => {
            let memory =
                Box::leak(Box::new(map(node.open_memory(device)?, node.config.dram_size)?));
            *slot = Some(memory);
            Ok(memory)
        }
    }
}

fn map(file: OwnedFd, dram_size: u64) -> Result<CardMemory, Errno> {
    let len = SRAM_BYTES + dram_size;
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let base = unsafe {
        rustix::mm::mmap(
            core::ptr::null_mut(),
            len as usize,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED | MapFlags::NORESERVE,
            &file,
            0,
        )
    }?;
    // SAFETY: the range was just mapped; leaving it out of core dumps changes nothing else.
    unsafe { libc::madvise(base, len as usize, libc::MADV_DONTDUMP) };
    crate::ring::serve_at_once(&file);
    Ok(CardMemory { file, base: base as usize, len })
}

impl CardMemory {
    /// False when the machine's folder was removed and created again.
    fn is_current(&self, node: &Node, device: u32) -> bool {
        let here = rustix::fs::fstat(&self.file).map(|s| (s.st_dev, s.st_ino));
        let there = rustix::fs::stat(node.memory_path(device)).map(|s| (s.st_dev, s.st_ino));
        here.is_ok() && here == there
    }

    /// Device and inode of the file, to recognise it in another process.
    pub(crate) fn identity(&self) -> Result<(u64, u64), Errno> {
        rustix::fs::fstat(&self.file).map(|s| (s.st_dev, s.st_ino))
    }

    /// Empties the memory and gives it its size; only for the card's owner.
    pub(crate) fn reset(&self, dram_size: u64) -> Result<(), Errno> {
        rustix::fs::ftruncate(&self.file, 0)?;
        rustix::fs::ftruncate(&self.file, SRAM_BYTES + dram_size)
    }

    /// Returns the pages of a DRAM range to the host; they read as zero afterwards.
    pub(crate) fn discard(&self, offset: u64, len: u64) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // Without hole punching the memory merely stays allocated.
        let _ = rustix::fs::fallocate(&self.file, flags, SRAM_BYTES + offset, len);
    }

    /// Where a DRAM byte is in this process.
    pub(crate) fn dram(&self, offset: u64) -> *mut u8 {
        debug_assert!(offset < self.len - SRAM_BYTES);
        (self.base as u64 + SRAM_BYTES + offset) as *mut u8
    }

    /// Where an SRAM byte is in this process.
    pub(crate) fn sram(&self, offset: u64) -> *mut u8 {
        debug_assert!(offset < SRAM_BYTES);
        (self.base as u64 + offset) as *mut u8
    }

    /// Which part of the file is mapped at this address, if any.
    pub(crate) fn file_range(&self, ptr: *mut u8) -> Option<(BorrowedFd<'_>, u64)> {
        let offset = (ptr as usize).checked_sub(self.base)? as u64;
        (offset < self.len).then_some((self.file.as_fd(), offset))
    }

    /// Offset in the file of a DRAM byte.
    pub(crate) fn file_offset(dram_offset: u64) -> u64 {
        SRAM_BYTES + dram_offset
    }
}
