//! A card's SRAM and DRAM: one sparse file, mapped once into each process that needs it.
//!
//! The mapping is never removed, so a pointer into it stays valid for the life of the process. An access beyond the end
//! of the file (another process may have resized it), or to a page that a full tmpfs cannot provide, raises a fault
//! that [`crate::guarded`] turns into an error.
//!
//! Memory of a card that was never written is not empty: it reads as noise. A page of the file is filled with noise
//! when an engine first reads it or writes part of it. Memory that is already exported is left out: other processes
//! write there at any time.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, OnceLock};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::config::Config;
use crate::guarded;
use crate::node::Node;

/// Bytes for SRAM at the start of the file; the largest of all generations.
const SRAM_BYTES: u64 = 48 << 20;
/// Unit in which memory is written for the first time.
const PAGE: u64 = 4096;

/// The memory of one card as this process sees it.
#[derive(Debug)]
pub(crate) struct CardMemory {
    file: OwnedFd,
    base: usize,
    len: u64,
    /// Pages of DRAM that were written, one bit each; empty if unwritten memory reads as zeros.
    written: Mutex<Vec<u64>>,
    noise: bool,
}

/// The card's memory; mapped at the first call.
pub(crate) fn of(node: &Node, device: u32) -> Result<&'static CardMemory, Errno> {
    static MAPPED: Mutex<[Option<&'static CardMemory>; 256]> = Mutex::new([None; 256]);
    let mut mapped = MAPPED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let slot = mapped.get_mut(device as usize).ok_or(Errno::NODEV)?;
    match slot {
        Some(memory) if memory.is_current(node, device) => Ok(memory),
        _ => {
            let Config { dram_size, lenient, .. } = node.config;
            let memory = map(node.open_memory(device)?, *dram_size, !lenient.zeroed)?;
            let memory = Box::leak(Box::new(memory));
            *slot = Some(memory);
            Ok(memory)
        }
    }
}

/// Bytes without a pattern, a page and more.
fn noise() -> &'static [u8] {
    static NOISE: OnceLock<Vec<u8>> = OnceLock::new();
    NOISE.get_or_init(|| {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let word = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let words = std::iter::repeat_with(word).take(PAGE as usize / 8 + 64);
        words.flat_map(u64::to_le_bytes).collect()
    })
}

fn map(file: OwnedFd, dram_size: u64, noise: bool) -> Result<CardMemory, Errno> {
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
    Ok(CardMemory { file, base: base as usize, len, written: Mutex::default(), noise })
}

impl CardMemory {
    /// False if the machine's folder was removed and created again.
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
        let bits = if self.noise { dram_size.div_ceil(64 * PAGE) } else { 0 };
        *self.written() = vec![0; bits as usize];
        rustix::fs::ftruncate(&self.file, 0)?;
        rustix::fs::ftruncate(&self.file, SRAM_BYTES + dram_size)
    }

    /// Returns the pages of a DRAM range to the host; their content is lost.
    pub(crate) fn discard(&self, offset: u64, len: u64) {
        self.written_bits(offset, len, |_, word, mask| *word &= !mask);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // Without hole punching the memory merely stays allocated.
        let _ = rustix::fs::fallocate(&self.file, flags, SRAM_BYTES + offset, len);
    }

    fn written(&self) -> MutexGuard<'_, Vec<u64>> {
        self.written.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Calls `change` for each word of `written` that covers pages of a range, with its index and the bits of these pages.
    fn written_bits(&self, offset: u64, len: u64, mut change: impl FnMut(usize, &mut u64, u64)) {
        if len == 0 {
            return;
        }
        let (first, last) = (offset / PAGE, (offset + len - 1) / PAGE);
        let mut written = self.written();
        let words = written.iter_mut().enumerate().skip((first / 64) as usize);
        for (at, word) in words.take((last / 64 - first / 64 + 1) as usize) {
            let from = first.saturating_sub(at as u64 * 64);
            let to = (last - at as u64 * 64).min(63);
            change(at, word, u64::MAX >> (63 - to) & u64::MAX << from);
        }
    }

    /// Marks a range as written: from now on its content is what other processes write to it.
    pub(crate) fn leave_to_others(&self, offset: u64, len: u64) {
        self.written_bits(offset, len, |_, word, mask| *word |= mask);
    }

    /// Called before an engine reads or writes `len` bytes at this address. Unwritten pages get their noise, except
    /// those that the access overwrites as a whole.
    pub(crate) fn before_access(&self, ptr: *mut u8, len: u64, writes: bool) {
        let dram = (ptr as usize).checked_sub(self.base + SRAM_BYTES as usize);
        let inside = |at: &usize| self.noise && (*at as u64) < self.len - SRAM_BYTES;
        let Some(offset) = dram.filter(inside) else { return };
        let (offset, end) = (offset as u64, offset as u64 + len);
        self.written_bits(offset, len, |at, word, mask| {
            let fresh = mask & !*word;
            *word |= mask;
            for page in (0..64).filter(|bit| fresh >> bit & 1 != 0).map(|bit| at as u64 * 64 + bit)
            {
                let start = page * PAGE;
                if !(writes && offset <= start && start + PAGE <= end) {
                    let noise = &noise()[page as usize % 64 * 8..];
                    // SAFETY: a page of the mapping. A full file system comes back as an error; the access that follows
                    // meets it as well.
                    let _ =
                        unsafe { guarded::copy(self.dram(start), noise.as_ptr(), PAGE as usize) };
                }
            }
        });
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
