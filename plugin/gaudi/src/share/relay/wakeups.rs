//! One descriptor for a sleeper that waits for cards and for relays: an epoll of a notifier and of sockets.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll;

use super::Relay;
use crate::error::Phase;
use crate::{Error, Notifier};

/// Readable when the notifier is, or when a relay has something to do.
#[derive(Debug)]
pub struct Wakeups(OwnedFd);

impl Wakeups {
    /// For this notifier, and no relay yet.
    pub fn new(notifier: &Notifier) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, notifier, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        Ok(Self(epoll))
    }

    /// Removes a relay that is closed.
    pub fn remove(&self, relay: &Relay) {
        // If it is not in the epoll set, there is nothing to do.
        let _ = epoll::delete(&self.0, relay);
    }

    /// Adds a relay, until its connection is closed.
    pub fn add(&self, relay: &Relay) -> Result<(), Error> {
        epoll::add(&self.0, relay, epoll::EventData::new_u64(0), epoll::EventFlags::IN).map_err(
            |errno| {
                Error::os(Phase::Share, "waiting for a relay", "epoll_ctl", errno.raw_os_error())
            },
        )
    }
}

impl AsFd for Wakeups {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
