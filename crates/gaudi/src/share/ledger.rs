//! The exporter's list of what it shares, as a memory file that a permitted peer fetches with
//! `pidfd_getfd`.
//!
//! A peer that may take descriptors from a process could take any of them; a key that only named a
//! number would make it a tool for whoever wrote the key. So the number is not in the key but here,
//! in the line that the key names, and it is used only if the line has the key's token. A line also
//! says what `fstat` must find, because a number may have a new meaning by the time it is fetched.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create,
};
use rustix::io::{Errno, pread};
use rustix::mm::{MapFlags, ProtFlags, mmap};

use super::Identity;
use super::key::Token;

const MAGIC: u64 = u64::from_le_bytes(*b"ucxgshr1");
const LINE_LEN: usize = 64;
const WORDS: usize = LINE_LEN / 8;
/// Shares beyond this go through the broker alone.
const LINES: usize = 4096;
/// Line 0 says whose ledger it is.
const SIZE: usize = LINE_LEN * LINES;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// Which file a descriptor stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct File {
    device: u64,
    inode: u64,
    size: u64,
}

impl File {
    pub(super) fn of(fd: BorrowedFd<'_>) -> Result<Self, Errno> {
        let stat = rustix::fs::fstat(fd)?;
        Ok(Self { device: stat.st_dev, inode: stat.st_ino, size: stat.st_size as u64 })
    }

    pub(super) fn size(self) -> u64 {
        self.size
    }
}

/// What a line says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) base: u64,
    pub(super) token: Token,
    pub(super) file: File,
    /// The dma-buf's descriptor number in the exporter.
    pub(super) fd: i32,
}

impl Entry {
    fn words(self) -> [u64; WORDS] {
        let token = u64::from_le_bytes(self.token.0);
        let File { device, inode, size } = self.file;
        [token, self.base, device, inode, size, self.fd as u64, 0, 0]
    }

    fn parse(bytes: &[u8; LINE_LEN]) -> Option<Self> {
        let [token, base, device, inode, size, fd, ..] = words_of(bytes);
        let file = File { device, inode, size };
        let fd = i32::try_from(fd).ok()?;
        let written = size != 0 && token != 0;
        written.then_some(Self { base, token: Token(token.to_le_bytes()), file, fd })
    }
}

fn words_of(bytes: &[u8; LINE_LEN]) -> [u64; WORDS] {
    let mut words = [0; WORDS];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    }
    words
}

fn title(of: &Identity) -> [u64; WORDS] {
    let mut instance = [0; 8];
    instance[..6].copy_from_slice(&of.instance);
    [MAGIC, u64::from_le_bytes(instance), 0, 0, 0, 0, 0, 0]
}

/// This process's ledger.
#[derive(Debug)]
pub(super) struct Ledger {
    file: OwnedFd,
    at: NonNull<AtomicU64>,
    free: Mutex<Vec<u32>>,
}

// SAFETY: the memory is mapped for ever and changed through atomics only.
unsafe impl Send for Ledger {}
// SAFETY: as above.
unsafe impl Sync for Ledger {}

impl Ledger {
    pub(super) fn new(owner: &Identity) -> Result<Self, Errno> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = match memfd_create("ucx-gaudi-shares", flags | MemfdFlags::NOEXEC_SEAL) {
            Err(Errno::INVAL) => memfd_create("ucx-gaudi-shares", flags)?,
            made => made?,
        };
        ftruncate(&file, SIZE as u64)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping wherever there is room.
        let at = unsafe { mmap(ptr::null_mut(), SIZE, access, MapFlags::SHARED, &file, 0) }?;
        // Nobody who fetches it may write, where the kernel can forbid that (5.1).
        fcntl_add_seals(&file, SEALS | SealFlags::FUTURE_WRITE)
            .or_else(|_| fcntl_add_seals(&file, SEALS))?;
        let at = NonNull::new(at.cast()).expect("mmap gives no null");
        let free = Mutex::new((1..LINES as u32).rev().collect());
        let ledger = Self { file, at, free };
        ledger.put(0, title(owner));
        Ok(ledger)
    }

    /// Its descriptor number, for keys.
    pub(super) fn number(&self) -> u32 {
        self.file.as_raw_fd() as u32
    }

    /// Writes a line; `None` if all are taken.
    pub(super) fn add(&self, entry: Entry) -> Option<u32> {
        let line = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        self.put(line, entry.words());
        Some(line)
    }

    /// Strikes a line out.
    pub(super) fn strike(&self, line: u32) {
        self.put(line, [0; WORDS]);
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    }

    /// Readers see a line without a token, or whole, or (between two) one whose parts do not fit
    /// together, which `fstat` shows.
    fn put(&self, line: u32, words: [u64; WORDS]) {
        let place = |word: usize| {
            // SAFETY: lines are below LINES; mapped for ever, aligned, changed through atomics only.
            unsafe { self.at.add(line as usize * WORDS + word).as_ref() }
        };
        place(0).store(0, Ordering::Release);
        for (at, word) in words.into_iter().enumerate().skip(1) {
            place(at).store(word.to_le(), Ordering::Release);
        }
        place(0).store(words[0].to_le(), Ordering::Release);
    }
}

/// Whether this is the ledger of that process.
pub(super) fn belongs_to(ledger: &impl AsFd, owner: &Identity) -> bool {
    let sealed = fcntl_get_seals(ledger).is_ok_and(|seals| seals.contains(SEALS));
    sealed && read_line(ledger, 0).is_some_and(|line| words_of(&line) == title(owner))
}

/// Reads a line of a ledger; `None` if it is empty.
pub(super) fn read(ledger: &impl AsFd, line: u32) -> Option<Entry> {
    let exists = line != 0 && (line as usize) < LINES;
    exists.then(|| read_line(ledger, line)).flatten().and_then(|line| Entry::parse(&line))
}

fn read_line(ledger: &impl AsFd, line: u32) -> Option<[u8; LINE_LEN]> {
    let mut bytes = [0; LINE_LEN];
    let read = pread(ledger, &mut bytes[..], u64::from(line) * LINE_LEN as u64);
    (read == Ok(LINE_LEN)).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_until_it_is_struck_out() {
        let own = *Identity::own().unwrap();
        let ledger = Ledger::new(&own).unwrap();
        let file = File { device: 1, inode: 2, size: 4096 };
        let entry = Entry { base: 0x1001_0000_0000_0000, token: Token([7; 8]), file, fd: 9 };
        let line = ledger.add(entry).unwrap();
        assert!(belongs_to(&ledger.file, &own));
        let other = Identity { instance: [1; 6], ..own };
        assert!(!belongs_to(&ledger.file, &other));
        assert_eq!(read(&ledger.file, line), Some(entry));
        for wrong in [0, line + 1, LINES as u32, u32::MAX] {
            assert_eq!(read(&ledger.file, wrong), None);
        }
        ledger.strike(line);
        assert_eq!(read(&ledger.file, line), None);
        assert_eq!(ledger.add(entry), Some(line), "used again");
        for _ in 2..LINES {
            ledger.add(entry).unwrap();
        }
        assert_eq!(ledger.add(entry), None, "full");
    }

    #[test]
    fn what_is_no_ledger_is_not_read() {
        let own = *Identity::own().unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(!belongs_to(&null, &own));
        assert_eq!(read(&null, 1), None);
        let plain = memfd_create("plain", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&plain, SIZE as u64).unwrap();
        assert!(!belongs_to(&plain, &own));
    }
}
