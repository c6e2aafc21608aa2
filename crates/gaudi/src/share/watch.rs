//! Noticing that a process has ended: through a pidfd, or where its number means nothing, through a
//! connection to its broker that hangs up.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::fork::Private;
use super::message::Request;
use super::{Identity, conversation, handover};
use crate::{Error, ErrorKind};

const WATCHING: &str = "watching a peer";

/// Tells when a process has ended.
///
/// Its descriptor becomes readable (`POLLIN`, or `POLLHUP`) when it has, within moments, however it
/// ended; poll it or put it into an epoll set. It costs nothing meanwhile.
#[derive(Debug)]
pub struct Watch {
    fd: Private,
}

impl Watch {
    /// Whether the process has ended.
    pub fn has_ended(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Identity {
    /// Watches the process. An error if it has ended already, or if there is no way to notice: it is
    /// in another pid namespace and its broker cannot be reached (see [`start_broker`]).
    ///
    /// [`start_broker`]: super::start_broker
    pub fn watch(&self) -> Result<Watch, Error> {
        let why = match self.watch_pid() {
            Ok(watch) => return Ok(watch),
            Err(NotWatched::Ended) => return Err(self.watching_failed("it has ended", "")),
            Err(NotWatched::NoWay(why)) => why,
        };
        let (connection, _) = conversation::ask(self, Request::Stay, None).map_err(|refusal| {
            let remedy = "run both in one pid namespace, network namespace or /dev/shm";
            self.watching_failed(format!("{why}; broker: {refusal}"), remedy)
        })?;
        let fd = Private::new(connection);
        Ok(Watch { fd: fd.ok_or_else(|| self.watching_failed("too many watches", ""))? })
    }

    fn watching_failed(&self, why: impl fmt::Display, remedy: &'static str) -> Error {
        Error::new(ErrorKind::ChannelFailed, WATCHING, format!("{self}: {why}"), remedy)
    }

    /// Watches the process by its number.
    pub(super) fn watch_pid(&self) -> Result<Watch, NotWatched> {
        if !self.is_in_our_pid_namespace() {
            return Err(NotWatched::NoWay("another pid namespace".to_owned()));
        }
        let process = handover::pidfd_of(self).map_err(NotWatched::NoWay)?;
        let process = process.ok_or(NotWatched::Ended)?;
        let fd = Private::new(process);
        let watch = Watch { fd: fd.ok_or(NotWatched::NoWay("too many watches".to_owned()))? };
        if watch.has_ended() { Err(NotWatched::Ended) } else { Ok(watch) }
    }

    /// Whether the process lives; an error if there is no way to know.
    pub fn is_alive(&self) -> Result<bool, Error> {
        if self.is_own() {
            return Ok(true);
        }
        if has_surely_ended(self) {
            return Ok(false);
        }
        self.watch().map(|watch| !watch.has_ended())
    }
}

/// Why a process is not watched by its number.
#[derive(Debug)]
pub(super) enum NotWatched {
    Ended,
    NoWay(String),
}

/// Whether the kernel says that the process has ended. `false` where it cannot be asked.
pub(super) fn has_surely_ended(peer: &Identity) -> bool {
    matches!(peer.watch_pid(), Err(NotWatched::Ended))
}
