//! Descriptors that forked children do not keep.
//!
//! If a child kept its parent's sockets, peers would not see the parent end: their requests would wait for answers as
//! long as the child lives. So the fork handler closes them. It may make only system calls (by rustix: functions of
//! libc may be hooked, and a hook may take locks), so the numbers are in a fixed bitmap.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Descriptors are numbered below this: the usual hard limit of a process.
const NUMBERS: usize = 1 << 20;
/// A bit for each descriptor that children do not keep. Unused pages of it cost nothing.
static LISTED: [AtomicU64; NUMBERS / 64] = [const { AtomicU64::new(0) }; NUMBERS / 64];
/// The words of the bitmap in use end before this one.
static END: AtomicUsize = AtomicUsize::new(0);
/// Counted up in each child.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// The process as `fork` knows it: differs between a process and its children.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Generation(u32);

impl Generation {
    /// The generation of this process.
    pub(crate) fn current() -> Self {
        // Not a `Once`: if the process forks while another thread is inside, the child would wait forever.
        static WATCHED: AtomicBool = AtomicBool::new(false);
        if !WATCHED.load(Ordering::Relaxed) && !WATCHED.swap(true, Ordering::Relaxed) {
            // SAFETY: the handler may run at any time, and the library is never unloaded.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        }
        Self(GENERATION.load(Ordering::Relaxed))
    }
}

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    for (word, listed) in LISTED.iter().enumerate().take(END.load(Ordering::Relaxed)) {
        let mut bits = listed.swap(0, Ordering::Relaxed);
        while bits != 0 {
            let number = word * 64 + bits.trailing_zeros() as usize;
            // SAFETY: a system call on a number; its owner leaves it alone from now on.
            unsafe { rustix::io::close(number as RawFd) };
            bits &= bits - 1;
        }
    }
}

/// A descriptor that is closed in every child that `fork` makes.
#[derive(Debug)]
pub(crate) struct Descriptor {
    fd: ManuallyDrop<OwnedFd>,
    made_by: Generation,
}

/// Where the bit of a descriptor is; `None` if its number is beyond all limits.
fn place(number: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let word = number as usize / 64;
    let listed = LISTED.get(word)?;
    END.fetch_max(word + 1, Ordering::Relaxed);
    Some((listed, 1 << (number % 64)))
}

impl From<OwnedFd> for Descriptor {
    fn from(fd: OwnedFd) -> Self {
        let made_by = Generation::current();
        if let Some((listed, bit)) = place(fd.as_raw_fd()) {
            listed.fetch_or(bit, Ordering::Relaxed);
        }
        Self { fd: ManuallyDrop::new(fd), made_by }
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        if self.made_by == Generation::current() {
            self.fd.as_fd()
        } else {
            // SAFETY: a number that no descriptor has: in a child every call answers `EBADF`.
            unsafe { BorrowedFd::borrow_raw(RawFd::MAX) }
        }
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // In a child it is closed, and the number may be reused.
        if self.made_by == Generation::current() {
            // Remove it from the bitmap before it is closed: the number may be reused right after.
            if let Some((listed, bit)) = place(self.fd.as_raw_fd()) {
                listed.fetch_and(!bit, Ordering::Relaxed);
            }
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.fd) };
        }
    }
}
