//! Queues of events behind a descriptor, and counting those that were not acknowledged yet.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::io::Errno;

/// Locks, whatever a panicking holder left: no invariant spans an unlock in this crate.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Events in order. The descriptor is readable exactly while there are some: a program that polls it
/// finds one, or was overtaken by another reader. Whether reading blocks is up to the flags the
/// program sets on it.
pub(crate) struct EventQueue<T> {
    fd: OwnedFd,
    queue: Mutex<VecDeque<T>>,
}

impl<T> EventQueue<T> {
    /// An empty queue.
    pub(crate) fn new() -> Result<Self, Errno> {
        let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Self { fd, queue: Mutex::default() })
    }

    /// The descriptor to wait on.
    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Adds an event.
    pub(crate) fn push(&self, event: T) {
        self.push_if(event, || true);
    }

    /// Adds an event about an object if it is still `wanted`. That is asked under the queue's lock:
    /// after an object has said no and withdrawn its events there are no more.
    pub(crate) fn push_if(&self, event: T, wanted: impl FnOnce() -> bool) {
        let mut queue = lock(&self.queue);
        if !wanted() {
            return;
        }
        queue.push_back(event);
        if queue.len() == 1 {
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }

    /// The last event has gone. The descriptor is readable, so this does not block.
    fn clear(&self) {
        let mut count = [0u8; 8];
        let _ = rustix::io::read(&self.fd, &mut count);
    }

    /// The next event; waits or gives `EAGAIN` as the descriptor's flags say. `accept` runs under the
    /// queue's lock, so an event is either withdrawn or accepted, never both.
    pub(crate) fn pop<R>(&self, accept: impl Fn(T) -> R) -> Result<R, Errno> {
        loop {
            let mut queue = lock(&self.queue);
            if let Some(event) = queue.pop_front() {
                if queue.is_empty() {
                    self.clear();
                }
                return Ok(accept(event));
            }
            drop(queue);
            if rustix::fs::fcntl_getfl(&self.fd)?.contains(rustix::fs::OFlags::NONBLOCK) {
                return Err(Errno::AGAIN);
            }
            rustix::event::poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], None)?;
        }
    }

    /// Takes back events that nobody has read.
    pub(crate) fn withdraw(&self, remove: impl Fn(&T) -> bool) {
        let mut queue = lock(&self.queue);
        let before = queue.len();
        queue.retain(|event| !remove(event));
        if before > 0 && queue.is_empty() {
            self.clear();
        }
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

    #[test]
    fn the_descriptor_is_readable_exactly_while_there_are_events() {
        let queue = EventQueue::new().unwrap();
        let readable = || {
            let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            let mut fds = [PollFd::new(queue.fd(), PollFlags::IN)];
            rustix::event::poll(&mut fds, Some(&none)).unwrap() == 1
        };
        assert!(!readable());
        [1, 2].into_iter().for_each(|event| queue.push(event));
        assert!(readable());
        assert_eq!(queue.pop(|event| event), Ok(1));
        assert!(readable());
        queue.withdraw(|_| true);
        assert!(!readable());
        queue.push(3);
        assert_eq!(queue.pop(|event| event), Ok(3));
        assert!(!readable());
    }

    #[test]
    fn whether_an_event_is_wanted_is_asked_under_the_lock_that_withdraws_it() {
        let queue = EventQueue::new().unwrap();
        queue.push_if(1, || queue.queue.try_lock().is_ok());
        assert!(lock(&queue.queue).is_empty());
    }
}
