//! Early write response: writes of other devices that the card has acknowledged, but that its engines do not see yet.
//!
//! On with `SOFT_GAUDI_EARLY_WRITES=yes`, and on a Gaudi3. Writes of an HCA, or of a card that imported the memory, go
//! to a second file as large as the card's memory; a log records their offset and length. The engines see the bytes
//! once they are moved to the card's memory: by the driver's flush, before another device reads, and when the log is
//! full. They are never moved after a time, so that a missing flush always shows.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

/// Bytes of a record: offset in the file, length.
const RECORD: usize = 16;
/// Most writes that a card holds back.
const MAX_RECORDS: u64 = 4096;
/// Most bytes moved over at once.
const PART: u64 = 64 << 10;

/// The writes to one card.
#[derive(Debug)]
pub(crate) struct Posted {
    memory: OwnedFd,
    bytes: OwnedFd,
    log: OwnedFd,
    /// Taken before the lock of the log's file, which all threads of the process share.
    one_thread: Mutex<()>,
}

/// Device and inode of a file.
type FileId = (u64, u64);

/// The writes to the card whose memory is this file.
pub(crate) fn of(memory_path: &Path, memory: FileId) -> Result<Arc<Posted>, Errno> {
    static CARDS: Mutex<Vec<(FileId, Arc<Posted>)>> = Mutex::new(Vec::new());
    let mut cards = CARDS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some((_, known)) = cards.iter().find(|(file, _)| *file == memory) {
        return Ok(Arc::clone(known));
    }
    let open = |suffix: &[u8], flags| {
        let path = [memory_path.as_os_str().as_bytes(), suffix].concat();
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | flags;
        rustix::fs::open(&path[..], flags, Mode::RUSR | Mode::WUSR)
    };
    let posted = Posted {
        memory: open(b"", OFlags::empty())?,
        bytes: open(b".posted", OFlags::CREATE)?,
        log: open(b".posted-log", OFlags::CREATE)?,
        one_thread: Mutex::new(()),
    };
    rustix::fs::ftruncate(&posted.bytes, rustix::fs::fstat(&posted.memory)?.st_size as u64)?;
    let posted = Arc::new(posted);
    cards.push((memory, Arc::clone(&posted)));
    Ok(posted)
}

impl Posted {
    /// The file that writes go to.
    pub(crate) fn bytes(&self) -> BorrowedFd<'_> {
        self.bytes.as_fd()
    }

    /// Which file that is.
    pub(crate) fn identity(&self) -> Result<FileId, Errno> {
        rustix::fs::fstat(&self.bytes).map(|stat| (stat.st_dev, stat.st_ino))
    }

    /// Records that `len` bytes at `offset` of [`Posted::bytes`] were written.
    pub(crate) fn add(&self, offset: u64, len: u64) {
        self.locked(|| {
            let mut end = rustix::fs::fstat(&self.log)?.st_size as u64;
            if end >= MAX_RECORDS * RECORD as u64 {
                self.move_over()?;
                end = 0;
            }
            let record = [offset.to_le_bytes(), len.to_le_bytes()].concat();
            rustix::io::pwrite(&self.log, &record, end)?;
            Ok(())
        });
    }

    /// Makes all earlier writes visible to the engines.
    pub(crate) fn flush(&self) {
        self.locked(|| self.move_over());
    }

    /// Drops all pending writes: the card starts anew.
    pub(crate) fn forget(&self) -> Result<(), Errno> {
        let size = rustix::fs::fstat(&self.memory)?.st_size as u64;
        rustix::fs::ftruncate(&self.log, 0)?;
        rustix::fs::ftruncate(&self.bytes, 0)?;
        rustix::fs::ftruncate(&self.bytes, size)
    }

    fn locked(&self, work: impl FnOnce() -> Result<(), Errno>) {
        let _one_thread = self.one_thread.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let done = rustix::fs::flock(&self.log, FlockOperation::LockExclusive).and_then(|()| {
            let done = work();
            rustix::fs::flock(&self.log, FlockOperation::Unlock)?;
            done
        });
        if let Err(error) = done {
            eprintln!("soft-gaudi: writes of other devices are lost: {error}");
        }
    }

    fn move_over(&self) -> Result<(), Errno> {
        let mut log = vec![0; rustix::fs::fstat(&self.log)?.st_size as usize];
        if log.is_empty() {
            return Ok(());
        }
        let read = rustix::io::pread(&self.log, &mut log[..], 0)?;
        let mut buffer = vec![0; PART as usize];
        for record in log[..read].chunks_exact(RECORD) {
            let word = |at: usize| record[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
            let (mut at, mut left) = (word(0), word(8));
            while left > 0 {
                let part = &mut buffer[..left.min(PART) as usize];
                let got = rustix::io::pread(&self.bytes, &mut *part, at)?;
                let put = rustix::io::pwrite(&self.memory, &part[..got], at)?;
                if put == 0 {
                    return Err(Errno::IO);
                }
                (at, left) = (at + put as u64, left - put as u64);
            }
        }
        rustix::fs::ftruncate(&self.log, 0)
    }
}
