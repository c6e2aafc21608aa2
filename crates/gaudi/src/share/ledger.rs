//! The exporter's list of what it shares, as a memory file that a permitted peer fetches with
//! `pidfd_getfd`.
//!
//! A peer that may take descriptors from a process could take any of them; a key that only named a
//! number would make it a tool for whoever wrote the key. So the number is not in the key but here,
//! in the line that the key names, and it is used only if the line has the key's token. A line also
//! says what `fstat` must find, because a number may have a new meaning by the time it is fetched.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;

use super::Identity;
use super::key::Token;
use super::sheet::{self, Sheet};

const MAGIC: u64 = u64::from_le_bytes(*b"ucxgshr1");
/// Words of a line.
const WORDS: usize = 8;
/// Shares beyond this go through the broker alone. Line 0 says whose ledger it is.
const LINES: usize = 4096;

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

    fn parse(words: [u64; WORDS]) -> Option<Self> {
        let [token, base, device, inode, size, fd, ..] = words;
        let file = File { device, inode, size };
        let fd = i32::try_from(fd).ok()?;
        let written = size != 0 && token != 0;
        written.then_some(Self { base, token: Token(token.to_le_bytes()), file, fd })
    }
}

fn title(of: &Identity) -> [u64; WORDS] {
    let mut instance = [0; 8];
    instance[..6].copy_from_slice(&of.instance);
    [MAGIC, u64::from_le_bytes(instance), 0, 0, 0, 0, 0, 0]
}

/// This process's ledger.
#[derive(Debug)]
pub(super) struct Ledger {
    sheet: Sheet,
    free: Mutex<Vec<u32>>,
}

impl Ledger {
    pub(super) fn new(owner: &Identity) -> Result<Self, Errno> {
        let sheet = Sheet::new("ucx-gaudi-shares", LINES * WORDS)?;
        sheet.put(0, &title(owner));
        Ok(Self { sheet, free: Mutex::new((1..LINES as u32).rev().collect()) })
    }

    /// Its descriptor number, for keys.
    pub(super) fn number(&self) -> u32 {
        self.sheet.number()
    }

    fn free(&self) -> std::sync::MutexGuard<'_, Vec<u32>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a line; `None` if all are taken. Readers that come in between find parts that do not
    /// fit together, which `fstat` shows.
    pub(super) fn add(&self, entry: Entry) -> Option<u32> {
        let line = self.free().pop()?;
        self.sheet.put(line as usize * WORDS, &entry.words());
        Some(line)
    }

    /// Strikes a line out.
    pub(super) fn strike(&self, line: u32) {
        self.sheet.put(line as usize * WORDS, &[0; WORDS]);
        self.free().push(line);
    }
}

/// Whether this is the ledger of that process.
pub(super) fn belongs_to(ledger: &impl AsFd, owner: &Identity) -> bool {
    sheet::is_sheet(ledger) && read_line(ledger, 0) == Some(title(owner))
}

/// Reads a line of a ledger; `None` if it is empty.
pub(super) fn read(ledger: &impl AsFd, line: u32) -> Option<Entry> {
    let exists = line != 0 && (line as usize) < LINES;
    exists.then(|| read_line(ledger, line)).flatten().and_then(Entry::parse)
}

fn read_line(ledger: &impl AsFd, line: u32) -> Option<[u64; WORDS]> {
    let mut words = [0; WORDS];
    sheet::read(ledger, line as usize * WORDS, &mut words).then_some(words)
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
        assert!(belongs_to(&ledger.sheet, &own));
        let other = Identity { instance: [1; 6], ..own };
        assert!(!belongs_to(&ledger.sheet, &other));
        assert_eq!(read(&ledger.sheet, line), Some(entry));
        for wrong in [0, line + 1, LINES as u32, u32::MAX] {
            assert_eq!(read(&ledger.sheet, wrong), None);
        }
        ledger.strike(line);
        assert_eq!(read(&ledger.sheet, line), None);
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
        let blank = Sheet::new("blank", LINES * WORDS).unwrap();
        assert!(!belongs_to(&blank, &own));
    }
}
