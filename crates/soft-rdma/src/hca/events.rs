//! Queues of events behind a descriptor, and counting those that were not acknowledged yet.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rustix::event::EventfdFlags;
use rustix::io::Errno;

/// Locks, whatever a panicking holder left: no invariant spans an unlock in this crate.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Events in order. The descriptor is readable while there are some; whether reading blocks is up
/// to the flags the program sets on it.
pub(crate) struct EventQueue<T> {
    fd: OwnedFd,
    queue: Mutex<VecDeque<T>>,
}

impl<T> EventQueue<T> {
    /// An empty queue.
    pub(crate) fn new() -> Result<Self, Errno> {
        let fd = rustix::event::eventfd(0, EventfdFlags::SEMAPHORE | EventfdFlags::CLOEXEC)?;
        Ok(Self { fd, queue: Mutex::default() })
    }

    /// The descriptor to wait on.
    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Adds an event.
    pub(crate) fn push(&self, event: T) {
        lock(&self.queue).push_back(event);
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    /// The next event; waits or gives `EAGAIN` as the descriptor's flags say. `accept` runs under the
    /// queue's lock, so an event is either withdrawn or accepted, never both.
    pub(crate) fn pop<R>(&self, accept: impl Fn(T) -> R) -> Result<R, Errno> {
        loop {
            let mut count = [0u8; 8];
            rustix::io::read(&self.fd, &mut count)?;
            // Withdrawn events leave the count too high: read on.
            if let Some(event) = lock(&self.queue).pop_front() {
                return Ok(accept(event));
            }
        }
    }

    /// Takes back events that nobody has read.
    pub(crate) fn withdraw(&self, remove: impl Fn(&T) -> bool) {
        lock(&self.queue).retain(|event| !remove(event));
    }
}

/// Events of one object that were read but not acknowledged.
#[derive(Default)]
pub(crate) struct Unacknowledged {
    count: Mutex<u32>,
    none_left: Condvar,
}

impl Unacknowledged {
    /// An event was read.
    pub(crate) fn add(&self) {
        *lock(&self.count) += 1;
    }

    /// Some were acknowledged.
    pub(crate) fn acknowledge(&self, count: u32) {
        let mut left = lock(&self.count);
        *left = left.saturating_sub(count);
        if *left == 0 {
            self.none_left.notify_all();
        }
    }

    /// Waits for the last acknowledgement: an object may not go before.
    pub(crate) fn wait(&self) {
        let mut left = lock(&self.count);
        while *left > 0 {
            left = self.none_left.wait(left).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// An asynchronous event: type, and the C object it is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AsyncEvent {
    pub(crate) kind: i32,
    pub(crate) element: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn withdrawn_events_are_not_delivered() {
        let queue = EventQueue::new().unwrap();
        rustix::io::ioctl_fionbio(queue.fd(), true).unwrap();
        assert_eq!(queue.pop(|event: u32| event), Err(Errno::AGAIN));
        [1, 2, 3].into_iter().for_each(|event| queue.push(event));
        queue.withdraw(|event| *event != 3);
        assert_eq!(queue.pop(|event| event), Ok(3));
        assert_eq!(queue.pop(|event| event), Err(Errno::AGAIN));
    }
}
