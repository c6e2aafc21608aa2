//! Queues of events behind a descriptor, and counts of events that were not acknowledged yet.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

/// Locks, even if a holder panicked: no invariant spans an unlock in this crate.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Events in order. The descriptor is readable exactly while there are events: a program that polls it finds one, unless another
/// reader was faster. Whether reading blocks depends on the flags that the program sets on the descriptor.
pub(crate) struct EventQueue<T> {
    fd: OwnedFd,
    /// The eventfd that [`Self::pop`] waits for with `read`. Unlike `poll`, `read` continues after a signal whose
    /// handler has `SA_RESTART`, as in rdma-core. While there are events it is readable, or a thread has just read it
    /// and will check the queue.
    wake: OwnedFd,
    queue: Mutex<VecDeque<T>>,
}

impl<T> EventQueue<T> {
    /// An empty queue.
    pub(crate) fn new() -> Result<Self, Errno> {
        let [fd, wake] = [(); 2].map(|()| rustix::event::eventfd(0, EventfdFlags::CLOEXEC));
        Ok(Self { fd: fd?, wake: wake?, queue: Mutex::default() })
    }

    /// The descriptor to wait on.
    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Adds an event.
    pub(crate) fn push(&self, event: T) {
        self.push_if(event, || true);
    }

    /// Adds an event about an object if it is still `wanted`. `wanted` runs under the queue's lock: once an object has
    /// said no and withdrawn its events, there are no more.
    pub(crate) fn push_if(&self, event: T, wanted: impl FnOnce() -> bool) {
        let mut queue = lock(&self.queue);
        if !wanted() {
            return;
        }
        queue.push_back(event);
        if queue.len() == 1 {
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
            self.wake();
        }
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// The last event was removed; the queue's lock is held. The program (or a child that shares the descriptor) may
    /// have read the descriptor already, so this must not block.
    fn clear(&self) {
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        if rustix::event::poll(&mut fds, Some(&Timespec::default())) == Ok(1) {
            let _ = rustix::io::read(&self.fd, &mut [0u8; 8]);
        }
    }

    /// The next event; waits or returns `EAGAIN`, depending on the descriptor's flags. `accept` runs under the queue's
    /// lock, so an event is either withdrawn or accepted, never both.
    pub(crate) fn pop<R>(&self, accept: impl Fn(T) -> R) -> Result<R, Errno> {
        let mut woken = false;
        loop {
            let mut queue = lock(&self.queue);
            if let Some(event) = queue.pop_front() {
                if queue.is_empty() {
                    self.clear();
                } else if woken {
                    self.wake();
                }
                return Ok(accept(event));
            }
            drop(queue);
            if rustix::fs::fcntl_getfl(&self.fd)?.contains(rustix::fs::OFlags::NONBLOCK) {
                return Err(Errno::AGAIN);
            }
            rustix::io::read(&self.wake, &mut [0u8; 8])?;
            woken = true;
        }
    }

    /// Removes events that were not read.
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

    /// Waits for the last acknowledgement; an object must not be destroyed before.
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
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::Sender;

    use rustix::process::Pid;

    use super::*;

    /// Waits until a thread sleeps. It must have nothing to wait for but an event.
    fn until_asleep(thread: Pid) {
        let stat = format!("/proc/self/task/{}/stat", thread.as_raw_nonzero());
        while !std::fs::read_to_string(&stat).unwrap().contains(") S ") {
            std::thread::yield_now();
        }
    }

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
            let mut fds = [PollFd::new(queue.fd(), PollFlags::IN)];
            rustix::event::poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
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
    fn a_descriptor_that_a_child_has_read_blocks_nobody() {
        let queue = EventQueue::new().unwrap();
        queue.push(1);
        rustix::io::read(queue.fd(), &mut [0u8; 8]).unwrap();
        assert_eq!(queue.pop(|event| event), Ok(1));
    }

    #[test]
    fn every_waiting_thread_gets_one_of_as_many_events() {
        let queue = EventQueue::new().unwrap();
        let mut got: Vec<u32> = std::thread::scope(|scope| {
            let (say, threads) = std::sync::mpsc::channel();
            let pop = |say: Sender<Pid>| {
                say.send(rustix::thread::gettid()).unwrap();
                queue.pop(|event| event).unwrap()
            };
            let start = |_| {
                let say = say.clone();
                scope.spawn(move || pop(say))
            };
            let waiting: Vec<_> = (0..4).map(start).collect();
            threads.iter().take(4).for_each(until_asleep);
            // Queue all events before the first woken thread gets the lock.
            let mut events = lock(&queue.queue);
            events.extend(0..4);
            queue.wake();
            drop(events);
            waiting.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        got.sort_unstable();
        assert_eq!(got, [0, 1, 2, 3]);
    }

    #[test]
    fn waiting_goes_on_after_a_signal_whose_handler_restarts_calls() {
        static HANDLED: AtomicBool = AtomicBool::new(false);
        extern "C" fn handler(_: libc::c_int) {
            HANDLED.store(true, Ordering::Release);
        }
        // SAFETY: zero is a value of each field; the handler does nothing but store.
        unsafe {
            let mut action: libc::sigaction = core::mem::zeroed();
            action.sa_sigaction = handler as extern "C" fn(libc::c_int) as usize;
            action.sa_flags = libc::SA_RESTART;
            assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, core::ptr::null_mut()), 0);
        }
        let queue = EventQueue::new().unwrap();
        let (say, thread) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                say.send(rustix::thread::gettid()).unwrap();
                queue.pop(|event: u32| event)
            });
            let thread = thread.recv().unwrap();
            until_asleep(thread);
            let (own, thread) = (rustix::process::getpid(), thread.as_raw_nonzero().get());
            // SAFETY: a signal with a handler, to a thread of ours that lives.
            let sent = unsafe {
                libc::syscall(libc::SYS_tgkill, own.as_raw_nonzero().get(), thread, libc::SIGUSR1)
            };
            assert_eq!(sent, 0);
            while !HANDLED.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            queue.push(1);
            assert_eq!(waiting.join().unwrap(), Ok(1));
        });
    }

    #[test]
    fn whether_an_event_is_wanted_is_asked_under_the_lock_that_withdraws_it() {
        let queue = EventQueue::new().unwrap();
        queue.push_if(1, || queue.queue.try_lock().is_ok());
        assert!(lock(&queue.queue).is_empty());
    }
}
