//! Descriptors that forked children do not keep.
//!
//! If a child kept its parent's sockets, peers would not see them hang up when the parent ends, and new peers would
//! connect to a listener that is not served. If it kept its parent's card, the card would stay busy after the parent
//! has closed it. The fork handler closes them; it may only make system calls, so their numbers are in a fixed
//! bitmap. (The software HCA has its own copy of this: a crate for both would be longer than either.)

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::{ForkHandlers, Instance, ProcessBound};

/// Descriptors are numbered below this: the usual hard limit of a process.
const NUMBERS: usize = 1 << 20;

/// A bit for each descriptor that children do not keep. Unused pages of it cost nothing.
static LISTED: [AtomicU64; NUMBERS / 64] = [const { AtomicU64::new(0) }; NUMBERS / 64];
/// One past the last word of the bitmap that is in use.
static END: AtomicUsize = AtomicUsize::new(0);

static FORKS: ForkHandlers = ForkHandlers::new(None, in_child);

/// Has a descriptor with another owner closed in every child that `fork` makes. To be dropped before the descriptor
/// is closed. In a child, the owner must not use the descriptor.
#[derive(Debug)]
pub(crate) struct ClosedInChildren {
    number: RawFd,
    made_by: Instance,
}

impl ClosedInChildren {
    /// `None` if the descriptor's number is too large for the bitmap.
    pub(crate) fn new(fd: BorrowedFd<'_>) -> Option<Self> {
        FORKS.register();
        let number = fd.as_raw_fd();
        let (word, bit) = place(number);
        let listed = LISTED.get(word)?;
        END.fetch_max(word + 1, Ordering::Relaxed);
        listed.fetch_or(bit, Ordering::Relaxed);
        Some(Self { number, made_by: Instance::current() })
    }
}

impl Drop for ClosedInChildren {
    fn drop(&mut self) {
        // In a forked child the descriptor is closed, and its number is not ours.
        if self.made_by == Instance::current() {
            let (word, bit) = place(self.number);
            LISTED[word].fetch_and(!bit, Ordering::Relaxed);
        }
    }
}

/// Where the bit of a descriptor is.
fn place(number: RawFd) -> (usize, u64) {
    (number as usize / 64, 1 << (number % 64))
}

/// A descriptor that is closed in every child that `fork` makes.
#[derive(Debug)]
pub(crate) struct CloseOnFork {
    // Unlisted before the descriptor is closed, because its number may be reused right after: fields drop in this
    // order.
    _listed: ClosedInChildren,
    fd: ProcessBound<OwnedFd>,
}

impl CloseOnFork {
    /// `None` if the descriptor's number is too large for the bitmap.
    pub(crate) fn new(fd: OwnedFd) -> Option<Self> {
        let listed = ClosedInChildren::new(fd.as_fd())?;
        Some(Self { _listed: listed, fd: ProcessBound::new(fd) })
    }
}

impl AsFd for CloseOnFork {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// In a forked child: closes all of them. Their owners check for a fork and then leave the numbers alone.
extern "C" fn in_child() {
    for (word, listed) in LISTED.iter().enumerate().take(END.load(Ordering::Relaxed)) {
        let mut bits = listed.swap(0, Ordering::Relaxed);
        while bits != 0 {
            let number = word * 64 + bits.trailing_zeros() as usize;
            // SAFETY: a system call on a number.
            unsafe { rustix::io::close(number as RawFd) };
            bits &= bits - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::{Errno, fcntl_getfd};
    use rustix::pipe::pipe;

    use super::super::fork::tests::holds_in_child;
    use super::*;

    #[test]
    fn a_child_has_the_descriptor_closed_and_its_number_is_free_for_others() {
        let (reading, _writing) = pipe().unwrap();
        let number = reading.as_raw_fd();
        let mut kept = Some(CloseOnFork::new(reading).unwrap());
        assert!(holds_in_child(|| {
            // SAFETY: only asked whether it is open.
            let closed = fcntl_getfd(unsafe { BorrowedFd::borrow_raw(number) }) == Err(Errno::BADF);
            // SAFETY: duplicates an open descriptor to this number; nothing of ours has it.
            let reused = unsafe { libc::dup2(2, number) } == number;
            drop(kept.take());
            // SAFETY: as above.
            closed && reused && fcntl_getfd(unsafe { BorrowedFd::borrow_raw(number) }).is_ok()
        }));
        assert!(fcntl_getfd(kept.as_ref().unwrap()).is_ok());
    }
}
