//! A sheet of numbers that another process may read: a sealed memory file, written here through a
//! mapping, read there with `pread`. The reader maps nothing, so nothing that the owner does to the
//! file can hurt it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{SealFlags, SeekFrom, fcntl_get_seals, seek};
use rustix::io::{Errno, pread};

use crate::process::MemoryFile;

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// A sheet of this process's.
#[derive(Debug)]
pub(super) struct Sheet {
    file: MemoryFile,
    at: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: the memory is mapped as long as this lives, and changed through atomics only.
unsafe impl Send for Sheet {}
// SAFETY: as above.
unsafe impl Sync for Sheet {}

impl Sheet {
    /// A sheet of zeroes.
    pub(super) fn new(name: &str, words: usize) -> Result<Self, Errno> {
        let file = MemoryFile::new(name, words * 8).map_err(|(_call, errno)| errno)?;
        Ok(Self { at: file.as_ptr().cast(), file, words })
    }

    /// Its descriptor number.
    pub(super) fn number(&self) -> u32 {
        self.file.as_fd().as_raw_fd() as u32
    }

    /// Writes words from `first` on, the first of them last, and zero while the others are written:
    /// whoever reads a first word that is not zero has the others with it, or (if it changed in
    /// between) something that does not fit together.
    pub(super) fn put(&self, first: usize, words: &[u64]) {
        assert!(first + words.len() <= self.words);
        let place = |word: usize| {
            // SAFETY: inside the mapping, aligned, and changed through atomics only.
            unsafe { self.at.add(first + word).as_ref() }
        };
        place(0).store(0, Ordering::SeqCst);
        for (at, word) in words.iter().enumerate().skip(1) {
            place(at).store(word.to_le(), Ordering::SeqCst);
        }
        place(0).store(words[0].to_le(), Ordering::SeqCst);
    }
}

impl AsFd for Sheet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Whether this is a sheet: a file in memory, which can be read without waiting for anybody.
pub(super) fn is_sheet(file: &impl AsFd) -> bool {
    fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SEALS))
}

/// How many bytes of somebody's sheet may have been written to, from its start: the kernel knows the
/// pages that never were. All of them, where it does not say.
pub(super) fn written(sheet: &impl AsFd) -> u64 {
    seek(sheet, SeekFrom::Hole(0)).unwrap_or(u64::MAX)
}

/// Reads words of somebody's sheet into `words`; `false` if there are not so many.
pub(super) fn read(sheet: &impl AsFd, first: usize, words: &mut [u64]) -> bool {
    let mut bytes = vec![0; words.len() * 8];
    if pread(sheet, &mut bytes[..], first as u64 * 8) != Ok(bytes.len()) {
        return false;
    }
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    }
    true
}
