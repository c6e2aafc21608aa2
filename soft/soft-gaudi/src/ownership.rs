//! Locks of open file descriptions: which one owns a card, and whether a dma-buf is still open.
//!
//! Linux's open-file-description locks follow the description through dup, SCM_RIGHTS,
//! `pidfd_getfd` and `mmap`, end with its last reference (also by `kill -9`), and, unlike `flock`,
//! can be queried without taking them, so that a query never makes another process's open fail.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

/// The byte that the owner locks.
const OWNER: libc::off_t = 0;
/// The byte that a [`OwnershipLock`] locks.
const DECISION: libc::off_t = 1;

fn byte(at: libc::off_t) -> libc::flock {
    // SAFETY: `flock` is plain data; zero is a valid value of every field.
    let mut lock: libc::flock = unsafe { core::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    (lock.l_start, lock.l_len) = (at, 1);
    lock
}

/// The lock under which an open and a close decide who has the card; held until dropped.
pub(crate) struct OwnershipLock(OwnedFd);

impl OwnershipLock {
    /// Waits for it; `fd` is a description of its own.
    pub(crate) fn wait(fd: OwnedFd) -> Result<Self, Errno> {
        let range = byte(DECISION);
        // SAFETY: the descriptor is open and `range` is a valid `struct flock` for the call.
        while unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLKW, &range) } != 0 {
            match last_errno() {
                Errno::INTR => {}
                other => return Err(other),
            }
        }
        Ok(Self(fd))
    }
}

impl Drop for OwnershipLock {
    fn drop(&mut self) {
        unlock(self.0.as_fd(), DECISION);
    }
}

/// Ends the owner's lock now.
pub(crate) fn release(fd: BorrowedFd<'_>) {
    unlock(fd, OWNER);
}

/// Unlocks explicitly. Closing the descriptor is not enough: a child that was forked meanwhile has a copy of it.
fn unlock(fd: BorrowedFd<'_>, at: libc::off_t) {
    let mut range = byte(at);
    range.l_type = libc::F_UNLCK as libc::c_short;
    // SAFETY: the descriptor is open and `range` is a valid `struct flock` for the call.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &range) };
}

/// Locks the file for this open file description; `EAGAIN` when another one has the lock.
pub(crate) fn lock(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    let range = byte(OWNER);
    // SAFETY: the descriptor is open and `lock` is a valid `struct flock` for the call.
    match unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &range) } {
        0 => Ok(()),
        _ => Err(last_errno()),
    }
}

/// Whether a description other than `fd`'s has the lock.
pub(crate) fn is_locked(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    let mut range = byte(OWNER);
    // SAFETY: the descriptor is open and `lock` is a valid, writable `struct flock`.
    match unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_GETLK, &mut range) } {
        0 => Ok(range.l_type != libc::F_UNLCK as libc::c_short),
        _ => Err(last_errno()),
    }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Mode, OFlags};

    fn open(path: &std::path::Path, flags: OFlags) -> OwnedFd {
        rustix::fs::open(path, flags | OFlags::CREATE | OFlags::CLOEXEC, Mode::RWXU).unwrap()
    }

    #[test]
    fn a_lock_follows_dup_and_ends_with_the_last_copy() {
        let path = std::env::temp_dir().join(format!("soft-gaudi-lock-{}", std::process::id()));
        let owner = open(&path, OFlags::WRONLY);
        let other = open(&path, OFlags::RDWR);
        lock(owner.as_fd()).unwrap();
        assert!(is_locked(other.as_fd()).unwrap());
        assert!(!is_locked(owner.as_fd()).unwrap());
        assert_eq!(lock(other.as_fd()), Err(Errno::AGAIN));
        let copy = owner.try_clone().unwrap();
        drop(owner);
        assert!(is_locked(other.as_fd()).unwrap());
        drop(copy);
        assert!(!is_locked(other.as_fd()).unwrap());
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_decision_and_a_release_end_although_a_copy_of_the_descriptor_lives() {
        let path = std::env::temp_dir().join(format!("soft-gaudi-decision-{}", std::process::id()));
        let (one, two) = (open(&path, OFlags::RDWR), open(&path, OFlags::RDWR));
        let copy = one.try_clone().unwrap();
        lock(one.as_fd()).unwrap();
        release(one.as_fd());
        lock(two.as_fd()).unwrap();
        drop(OwnershipLock::wait(one).unwrap());
        // Would wait for ever.
        drop(OwnershipLock::wait(two).unwrap());
        drop(copy);
        std::fs::remove_file(path).unwrap();
    }
}
