//! Threads that wait for peers: one serves peers that connect and release leases on our memory, the other waits for owners
//! that revoke leases on theirs. They sleep until something happens, and never wait for a peer: all sockets are non-blocking.
//! The second is a thread of its own because it waits for cards, which may take long to unmap memory.

use std::collections::HashMap;
use std::fmt::Debug;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::epoll::{self, EventData, EventFlags};

use super::descriptors;
use crate::process::thread::OnDemand;
use crate::process::{CloseOnFork, PerProcess};

/// Pause when the kernel is out of a resource, or a peer asks for too much.
pub(super) const PAUSE: Duration = Duration::from_millis(2);

/// A socket, and what to do when something happens to it.
pub(super) trait Watched: Debug + Send + Sync {
    fn socket(&self) -> BorrowedFd<'_>;

    /// Called on the watcher's thread, without a lock. The event may have been handled already.
    fn ready(&self, watcher: &'static Watcher, number: u64, flags: EventFlags);
}

/// A thread, and the sockets that it polls.
#[derive(Debug)]
pub(super) struct Watcher {
    epoll: CloseOnFork,
    watched: Mutex<HashMap<u64, Arc<dyn Watched>>>,
    last: AtomicU64,
    thread: OnDemand,
}

impl Watcher {
    /// The watcher of peers that use memory of this process; starts its thread. The error says which resource is missing.
    pub(super) fn of_owner() -> Result<&'static Watcher, String> {
        static WATCHER: PerProcess<Watcher> = PerProcess::new();
        Self::started(&WATCHER, "gaudi-peers")
    }

    /// The watcher of peers whose memory this process has imported.
    pub(super) fn of_imports() -> Result<&'static Watcher, String> {
        static WATCHER: PerProcess<Watcher> = PerProcess::new();
        Self::started(&WATCHER, "gaudi-imports")
    }

    fn started(
        watcher: &'static PerProcess<Watcher>,
        name: &str,
    ) -> Result<&'static Watcher, String> {
        let watcher = watcher.get_or_make(|| {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC);
            let epoll = descriptors::keep(epoll.map_err(|errno| format!("epoll: {errno}"))?)?;
            let (watched, last) = (Mutex::default(), AtomicU64::new(0));
            Ok::<_, String>(Self { epoll, watched, last, thread: OnDemand::default() })
        })?;
        let started = watcher.thread.ensure(name, || watcher.run());
        started.map_err(|error| format!("no thread: {error}"))?;
        Ok(watcher)
    }

    fn watched(&self) -> MutexGuard<'_, HashMap<u64, Arc<dyn Watched>>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Polls a socket until [`Watcher::remove`] is called with the returned number. Its end is always polled for.
    pub(super) fn add(&self, what: Arc<dyn Watched>, flags: EventFlags) -> Result<u64, String> {
        let number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        self.watched().insert(number, Arc::clone(&what));
        let data = EventData::new_u64(number);
        epoll::add(&self.epoll, what.socket(), data, flags).map_err(|errno| {
            self.watched().remove(&number);
            format!("epoll: {errno}")
        })?;
        Ok(number)
    }

    /// Polls only for the end of the connection from now on.
    pub(super) fn await_end(&self, number: u64) {
        let watched = self.watched();
        if let Some(what) = watched.get(&number) {
            let data = EventData::new_u64(number);
            let _ = epoll::modify(&self.epoll, what.socket(), data, EventFlags::empty());
        }
    }

    /// Stops polling it, and returns it.
    pub(super) fn remove(&self, number: u64) -> Option<Arc<dyn Watched>> {
        let what = self.watched().remove(&number)?;
        // Explicitly: if a forked child has the socket open, closing it does not remove it from the epoll set.
        let _ = epoll::delete(&self.epoll, what.socket());
        Some(what)
    }

    /// Waits for events and handles them, for ever.
    fn run(&'static self) -> ! {
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            if epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None).is_err()
            {
                // Interrupted by a signal, or out of memory: neither lasts.
                std::thread::sleep(PAUSE);
            }
            for event in &events {
                let what = self.watched().get(&event.data.u64()).cloned();
                if let Some(what) = what {
                    what.ready(self, event.data.u64(), event.flags);
                }
            }
        }
    }
}
