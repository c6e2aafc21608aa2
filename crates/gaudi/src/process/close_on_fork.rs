//! Descriptors that forked children do not keep.
//!
//! If a child kept its parent's sockets, peers would not see them hang up when the parent ends, and
//! new peers would connect to a listener that nobody serves. If it kept its parent's card, that would
//! stay busy after the parent has closed it. The fork handler closes them; it may only make system
//! calls, so the numbers are in a fixed table of atomics.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

use super::watch_forks;

/// More than a process ever has of these.
const CAPACITY: usize = 2048;
const FREE: i32 = -1;

static NUMBERS: [AtomicI32; CAPACITY] = [const { AtomicI32::new(FREE) }; CAPACITY];

/// Has a descriptor that somebody else owns closed in every child that `fork` makes. To be dropped
/// before the descriptor is closed; its owner must leave it alone in a child.
#[derive(Debug)]
pub(crate) struct ClosedInChildren {
    index: usize,
    number: RawFd,
}

impl ClosedInChildren {
    /// `None` if there are too many.
    pub(crate) fn new(fd: BorrowedFd<'_>) -> Option<Self> {
        watch_forks();
        let number = fd.as_raw_fd();
        let take = |slot: &AtomicI32| {
            slot.compare_exchange(FREE, number, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let index = NUMBERS.iter().position(take)?;
        Some(Self { index, number })
    }

    /// Takes it off the table; `false` in a forked child, where it is closed and the number not ours.
    fn withdraw(&mut self) -> bool {
        let slot = &NUMBERS[self.index];
        // Once: from then on both slot and number may be somebody else's.
        let number = std::mem::replace(&mut self.number, FREE);
        slot.compare_exchange(number, FREE, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

impl Drop for ClosedInChildren {
    fn drop(&mut self) {
        self.withdraw();
    }
}

/// A descriptor that is closed in every child that `fork` makes.
#[derive(Debug)]
pub(crate) struct CloseOnFork {
    listed: ClosedInChildren,
    fd: Option<OwnedFd>,
}

impl CloseOnFork {
    /// `None` if there are too many.
    pub(crate) fn new(fd: OwnedFd) -> Option<Self> {
        let listed = ClosedInChildren::new(fd.as_fd())?;
        Some(Self { listed, fd: Some(fd) })
    }
}

impl AsFd for CloseOnFork {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("taken only when dropped").as_fd()
    }
}

impl Drop for CloseOnFork {
    fn drop(&mut self) {
        let fd = self.fd.take().expect("taken only here");
        // Off the table before it is closed: the number may be somebody else's right after.
        if !self.listed.withdraw() {
            std::mem::forget(fd);
        }
    }
}

/// In a forked child: closes them all. Their owners notice, and leave the number alone.
pub(super) fn in_child() {
    for slot in &NUMBERS {
        let fd = slot.swap(FREE, Ordering::AcqRel);
        if fd != FREE {
            // SAFETY: a system call on a number.
            unsafe { libc::close(fd) };
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
