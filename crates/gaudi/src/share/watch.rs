//! Noticing that a process has ended: through a pidfd, or where its number means nothing, through a
//! connection to its broker that hangs up.

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
        let failed = |detail: String| {
            let remedy = "run both in one pid namespace, network namespace or /dev/shm";
            Error::new(ErrorKind::ChannelFailed, WATCHING, detail, remedy)
        };
        let ended =
            || Error::new(ErrorKind::ChannelFailed, WATCHING, format!("{self} has ended"), "");
        let mut why = "another pid namespace".to_owned();
        if self.is_in_our_pid_namespace() {
            match handover::pidfd_of(self) {
                Ok(Some(process)) => {
                    let fd = Private::new(process).ok_or_else(|| failed("too many".into()))?;
                    let watch = Watch { fd };
                    return if watch.has_ended() { Err(ended()) } else { Ok(watch) };
                }
                Ok(None) => return Err(ended()),
                Err(reason) => why = reason,
            }
        }
        let asked = conversation::ask(self, Request::Watch);
        let (connection, _) =
            asked.map_err(|refusal| failed(format!("{self}: {why}; broker: {refusal}")))?;
        let fd = Private::new(connection).ok_or_else(|| failed("too many".into()))?;
        Ok(Watch { fd })
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

/// Whether the kernel says that the process has ended. `false` where it cannot be asked.
pub(super) fn has_surely_ended(peer: &Identity) -> bool {
    if !peer.is_in_our_pid_namespace() {
        return false;
    }
    match handover::pidfd_of(peer) {
        Ok(None) => true,
        Ok(Some(process)) => Private::new(process).is_some_and(|fd| Watch { fd }.has_ended()),
        Err(_) => false,
    }
}
