//! Limits the descriptors that sharing keeps (dma-bufs, connections, sockets), and leaves the rest to the application: a
//! process that shares much can still open files.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::process::{Resource, getrlimit};

use crate::process::CloseOnFork;

/// How many files this process may have open.
pub(super) fn limit() -> usize {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX).min(1 << 20) as usize
}

/// How many of them are reserved for the application.
fn reserve(limit: usize) -> usize {
    (limit / 8).min(64)
}

/// Refuses a new descriptor if its number is in the reserve. The kernel chooses the lowest number that is free, so all lower
/// ones are in use.
pub(super) fn check(new: BorrowedFd<'_>) -> Result<(), String> {
    let (limit, number) = (limit(), new.as_raw_fd() as usize);
    let reserve = reserve(limit);
    if number + reserve < limit {
        return Ok(());
    }
    Err(format!("sharing leaves the last {reserve} of {limit} descriptors to the application"))
}

/// Keeps a new descriptor. The error says why not.
pub(super) fn keep(new: OwnedFd) -> Result<CloseOnFork, String> {
    check(new.as_fd())?;
    CloseOnFork::new(new).ok_or_else(|| "too many descriptors are open".to_owned())
}

/// Length of the file behind a descriptor.
pub(super) fn file_len(file: BorrowedFd<'_>) -> Result<u64, rustix::io::Errno> {
    rustix::fs::fstat(file).map(|stat| stat.st_size as u64)
}
