//! What wakes a thread that sleeps in `poll` or `epoll`: an eventfd.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

/// An eventfd: readable from [`Notifier::notify`] until [`Notifier::clear`].
///
/// [`Transfer::notify_when_done`](crate::Transfer::notify_when_done) and
/// [`Device::notify_on_completion`](crate::Device::notify_on_completion) have the engine notify it.
#[derive(Debug)]
pub struct Notifier {
    fd: OwnedFd,
    /// Whether there may be something to read. Programs that arm and poll in a loop clear all the time: without this
    /// flag, each clear would be a system call.
    written: AtomicBool,
}

impl Notifier {
    /// Not readable yet; an error where the process is out of descriptors.
    pub fn new() -> std::io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { fd, written: AtomicBool::new(false) })
    }

    /// Makes the descriptor readable.
    pub fn notify(&self) {
        // Before the write, for a `clear` by a thread that sees the write: it must read. After it, too: a `clear` in
        // between resets the flag and reads nothing. Without the second store, the next one would skip the read.
        self.written.store(true, Ordering::Release);
        // A full counter means that it is readable already.
        let _ = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
        self.written.store(true, Ordering::Release);
    }

    /// Makes the descriptor unreadable until it is notified again.
    pub fn clear(&self) {
        if self.written.load(Ordering::Relaxed) && self.written.swap(false, Ordering::Acquire) {
            // An empty counter is fine.
            let _ = rustix::io::read(&self.fd, &mut [0; 8]);
        }
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn is_readable(notifier: &Notifier) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(notifier, PollFlags::IN)], Some(&now)).unwrap() > 0
    }

    #[test]
    fn it_is_readable_until_cleared_however_often_it_was_notified() {
        let notifier = Notifier::new().unwrap();
        assert!(!is_readable(&notifier));
        notifier.clear();
        notifier.notify();
        notifier.notify();
        assert!(is_readable(&notifier) && is_readable(&notifier));
        notifier.clear();
        assert!(!is_readable(&notifier));
    }
}
