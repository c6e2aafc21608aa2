//! The file `stateN` of a card: what its owner publishes for control nodes of other processes.
//!
//! The file is read and written with system calls, never mapped. So if the file system is full, or the file was
//! truncated, a call fails; with a mapping, the host process would get a SIGBUS.
//!
//! | bytes | what |
//! |---|---|
//! | 0–7 | magic |
//! | 8–15 | version of the layout, of this file and of the machine's other files |
//! | 16–511 | one 64-bit word for each [`Word`] |
//!
//! Only the owner of the card writes, with one exception: a fault on demand sets [`Word::Removed`]. Most values are
//! only for people and monitors. The software card itself uses the number of the context, which only a process that
//! holds the card's lock changes, the words by which an open finds a card that was not closed ([`crate::context`]),
//! [`Word::Removed`], and [`Word::HardResets`], by which importers find that exported memory is gone.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, MutexGuard};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::node::Node;

const MAGIC: u64 = u64::from_le_bytes(*b"softGsta");
/// Changes whenever a file of the machine gets another layout.
const VERSION: u64 = 3;
const WORDS: usize = 64;
const SIZE: usize = WORDS * 8;

/// What a word of the file means; the value is its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// Number of the current context; counts up.
    Context = 2,
    /// Times the card was opened.
    Opens,
    /// CLOCK_BOOTTIME of the last open, in ms.
    OpenedMs,
    /// The same of the last close.
    ClosedMs,
    /// Process that opened it last.
    Pid,
    /// 1 while a closer cleans up.
    InRelease,
    /// Bytes of DRAM, as the owner configured them.
    DramSize,
    /// Of these allocated.
    DramUsed,
    /// 1 after the card was taken out of the machine.
    Removed,
    /// `hl_device_status` of the current context.
    Status,
    /// Resets since the machine was made.
    HardResets,
    /// 1 while submissions are in flight after their calls have returned.
    Busy,
    /// 1 from an open until that context's release has ended.
    InUse,
    /// First of twelve: rejected submissions, as `hl_info_cs_counters` lists them, by cause and in pairs (in
    /// all, in this context).
    Rejected = 16,
    /// First of three words: when (ns, 0 for never), what and which queue.
    CsTimeout = 32,
    /// See `CsTimeout`.
    PageFault = 35,
    /// See `CsTimeout`.
    Razwi = 38,
    /// See `CsTimeout`.
    UndefinedOpcode = 41,
}

/// Why a submission was rejected, in the order of `hl_info_cs_counters`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rejection {
    /// The packets are malformed.
    Parsing = 1,
    /// A queue's ring is full.
    QueueFull = 2,
    /// The card is being reset.
    InReset = 3,
    /// The window of submissions is full.
    InFlight = 4,
    /// A chunk is not allowed.
    Validation = 5,
}

const CAUSES: usize = 6;
const ERRORS: [Word; 4] = [Word::CsTimeout, Word::PageFault, Word::Razwi, Word::UndefinedOpcode];

/// `HL_DEVICE_STATUS_OPERATIONAL`.
pub(crate) const OPERATIONAL: u64 = 0;
/// `HL_DEVICE_STATUS_IN_RESET`.
pub(crate) const IN_RESET: u64 = 1;

/// The content of the file at one time.
#[derive(Clone, Debug)]
pub(crate) struct Snapshot([u64; WORDS]);

impl Snapshot {
    fn new() -> Self {
        let mut words = [0; WORDS];
        [words[0], words[1]] = [MAGIC, VERSION];
        Self(words)
    }

    pub(crate) fn get(&self, word: Word) -> u64 {
        self.0[word as usize]
    }

    fn set(&mut self, word: Word, value: u64) {
        self.0[word as usize] = value;
    }

    /// Rejected submissions of a cause: in all, in this context.
    pub(crate) fn rejected(&self, cause: usize) -> [u64; 2] {
        let at = Word::Rejected as usize + 2 * cause;
        [self.0[at], self.0[at + 1]]
    }

    /// The first error of a kind: when (0 for never), what (an address or a number), which queue.
    pub(crate) fn error(&self, kind: Word) -> [u64; 3] {
        let at = kind as usize;
        [self.0[at], self.0[at + 1], self.0[at + 2]]
    }

    fn to_bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// `None` if it is not a state file of this version.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.get(..SIZE)?.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().ok()?);
        }
        (words[..2] == [MAGIC, VERSION]).then_some(Self(words))
    }
}

/// The state file of one card, open for the life of the process.
#[derive(Debug)]
pub(crate) struct StateFile {
    file: OwnedFd,
    name: String,
    /// What this process, as the owner of the card, has written.
    written: Mutex<Snapshot>,
}

/// The card's state file; made at the first call on the machine.
pub(crate) fn of(node: &Node, device: u32) -> Result<&'static StateFile, Errno> {
    static OPEN: Mutex<[Option<&'static StateFile>; 256]> = Mutex::new([None; 256]);
    let mut open = OPEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let slot = open.get_mut(device as usize).ok_or(Errno::NODEV)?;
    match slot {
        // The machine's folder may have been removed and created again.
        Some(state) if rustix::fs::fstat(&state.file)?.st_nlink > 0 => Ok(state),
        _ => {
            let name = format!("state{device}");
            let file = node.open_or_create(&name, || Snapshot::new().to_bytes())?;
            let name = node.path(&name).display().to_string();
            let written = Mutex::new(Snapshot::new());
            let state = Box::leak(Box::new(StateFile { file, name, written }));
            *slot = Some(state);
            Ok(state)
        }
    }
}

impl StateFile {
    fn written(&self) -> MutexGuard<'_, Snapshot> {
        self.written.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Reads the file; `EIO` if it is damaged or of another version.
    pub(crate) fn read(&self) -> Result<Snapshot, Errno> {
        let mut bytes = [0; SIZE];
        let read = rustix::io::pread(self.file.as_fd(), &mut bytes[..], 0)?;
        Snapshot::from_bytes(&bytes[..read]).ok_or_else(|| {
            complain_once(&self.name);
            Errno::IO
        })
    }

    fn write_at(&self, word: usize, words: &[u64]) -> Result<(), Errno> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let written = rustix::io::pwrite(self.file.as_fd(), &bytes, word as u64 * 8)?;
        if written == bytes.len() { Ok(()) } else { Err(Errno::NOSPC) }
    }

    /// Sets a word that others than the owner may set.
    pub(crate) fn set_unowned(&self, word: Word, value: u64) {
        // If it fails, monitors see the old value, and an open may repeat a release.
        let _ = self.write_at(word as usize, &[value]);
    }

    /// Sets a word, as the card's owner.
    pub(crate) fn set(&self, word: Word, value: u64) {
        self.written().set(word, value);
        self.set_unowned(word, value);
    }

    /// The process has opened the card; returns the number of the new context.
    pub(crate) fn begin(&self, dram_size: u64) -> Result<u64, Errno> {
        let mut state = self.read()?;
        let context = state.get(Word::Context) + 1;
        let values = [
            (Word::Context, context),
            (Word::Opens, state.get(Word::Opens) + 1),
            (Word::OpenedMs, boot_ms()),
            (Word::Pid, std::process::id().into()),
            (Word::InRelease, 0),
            (Word::InUse, 1),
            (Word::DramSize, dram_size),
            (Word::DramUsed, 0),
            (Word::Status, OPERATIONAL),
            (Word::Busy, 0),
        ];
        values.into_iter().for_each(|(word, value)| state.set(word, value));
        for cause in 0..CAUSES {
            state.0[Word::Rejected as usize + 2 * cause + 1] = 0;
        }
        for kind in ERRORS {
            state.0[kind as usize..kind as usize + 3].fill(0);
        }
        self.write_at(0, &state.0)?;
        *self.written() = state;
        Ok(context)
    }

    /// The card is closed; the caller has its lock.
    pub(crate) fn end(&self) {
        let values = [
            (Word::ClosedMs, boot_ms()),
            (Word::InUse, 0),
            (Word::DramUsed, 0),
            (Word::Status, OPERATIONAL),
            (Word::Busy, 0),
        ];
        values.into_iter().for_each(|(word, value)| self.set_unowned(word, value));
    }

    /// Counts a rejected submission.
    pub(crate) fn reject(&self, cause: Rejection) {
        let at = Word::Rejected as usize + 2 * cause as usize;
        let mut state = self.written();
        state.0[at] += 1;
        state.0[at + 1] += 1;
        let _ = self.write_at(at, &state.0[at..at + 2]);
    }

    /// Records an error; only the first of its kind in a context is kept, as in the driver. Returns whether it was the first.
    pub(crate) fn record(&self, kind: Word, now_ns: u64, what: u64, queue: u64) -> bool {
        let at = kind as usize;
        let mut state = self.written();
        let is_first = state.0[at] == 0;
        if is_first {
            state.0[at..at + 3].copy_from_slice(&[now_ns, what, queue]);
            let _ = self.write_at(at, &state.0[at..at + 3]);
        }
        is_first
    }

    /// The card is being reset.
    pub(crate) fn reset(&self) {
        let resets = self.written().get(Word::HardResets) + 1;
        self.set(Word::HardResets, resets);
        self.set(Word::Status, IN_RESET);
    }
}

/// Opens the state file next to a card's memory, for an importer: the card belongs to another process.
pub(crate) fn open_beside(memory: &Path, device: u32) -> Result<OwnedFd, Errno> {
    let path = memory.with_file_name(format!("state{device}"));
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    rustix::fs::open(path, flags, Mode::empty())
}

/// How often the card of a state file was reset.
pub(crate) fn resets(file: &OwnedFd) -> Option<u64> {
    let mut bytes = [0; 8];
    let read = rustix::io::pread(file, &mut bytes, Word::HardResets as u64 * 8).ok()?;
    (read == bytes.len()).then(|| u64::from_le_bytes(bytes))
}

fn complain_once(name: &str) {
    static NAMED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut named = NAMED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if named.insert(name.to_owned()) {
        eprintln!(
            "soft-gaudi: {name} is no state file of version {VERSION}: it is damaged, or another version of \
             soft-gaudi made it; remove its folder when no process uses the machine"
        );
    }
}

/// Nanoseconds since boot, the same clock in every process.
pub(crate) fn boot_ns() -> u64 {
    clock_ns(libc::CLOCK_BOOTTIME)
}

/// Nanoseconds of a clock that always exists.
pub(crate) fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // Use the C library: rustix looks for the vDSO by itself, at an address that valgrind has removed, and crashes.
    // SAFETY: `now` is valid for writing.
    unsafe { libc::clock_gettime(clock, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Milliseconds since boot.
pub(crate) fn boot_ms() -> u64 {
    boot_ns() / 1_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_survives_the_file_and_others_are_refused() {
        let mut state = Snapshot::new();
        state.set(Word::DramSize, 7);
        let bytes = state.to_bytes();
        assert_eq!(bytes.len(), SIZE);
        assert_eq!(Snapshot::from_bytes(&bytes).map(|s| s.get(Word::DramSize)), Some(7));
        assert!(Snapshot::from_bytes(&bytes[..SIZE - 1]).is_none(), "truncated");
        assert!(Snapshot::from_bytes(&[0; SIZE]).is_none(), "no magic");
        let mut newer = bytes;
        newer[8] += 1;
        assert!(Snapshot::from_bytes(&newer).is_none(), "another version");
    }

    #[test]
    fn words_do_not_overlap() {
        assert!((Word::InUse as usize) < Word::Rejected as usize);
        assert_eq!(Word::Rejected as usize + 2 * CAUSES, 28);
        let ends = ERRORS.map(|kind| kind as usize + 3);
        assert!(ERRORS.iter().skip(1).zip(ends).all(|(next, end)| end <= *next as usize));
        assert!(ends[3] <= WORDS);
    }
}
