//! Noticing that a process has ended: through a pidfd, or where its number means nothing, through a
//! connection to its broker that hangs up.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::conversation::Refusal;
use super::message::{MESSAGE_LEN, Reply, Request};
use super::{Identity, conversation, handover, socket};
use crate::process::{CloseOnFork, PerProcess};
use crate::{Error, ErrorKind};

const WATCHING: &str = "watching a peer";

/// Tells when a process has ended.
///
/// Its descriptor becomes readable (`POLLIN`, or `POLLHUP`) when it has, within moments, however it
/// ended; poll it or put it into an epoll set. It costs nothing meanwhile.
#[derive(Debug)]
pub struct Watch {
    fd: CloseOnFork,
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
        let fd = CloseOnFork::new(connection);
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
        let fd = CloseOnFork::new(process);
        let watch = Watch { fd: fd.ok_or(NotWatched::NoWay("too many watches".to_owned()))? };
        if watch.has_ended() { Err(NotWatched::Ended) } else { Ok(watch) }
    }

    /// Whether the process lives; an error if there is no way to know. Never waits.
    ///
    /// Where its number means nothing to us, the first call connects to its broker, and the connection
    /// is kept: the end is known only of a process that was seen alive before.
    pub fn is_alive(&self) -> Result<bool, Error> {
        if self.is_own() {
            return Ok(true);
        }
        let why = match self.watch_pid() {
            Ok(_) => return Ok(true),
            Err(NotWatched::Ended) => return Ok(false),
            Err(NotWatched::NoWay(why)) => why,
        };
        let sights = SIGHTS.get_or_make(|| Ok::<_, Error>(Mutex::default()))?;
        let mut sights = sights.lock().unwrap_or_else(PoisonError::into_inner);
        let sight = sights.remove(self).map_or_else(|| Sight::first(self), Ok);
        let sight = sight
            .and_then(Sight::look)
            .map_err(|refusal| self.watching_failed(format!("{why}; broker: {refusal}"), ""))?;
        let lives = !matches!(sight, Sight::Ended);
        sights.insert(*self, sight);
        Ok(lives)
    }
}

/// Processes that were looked for through their brokers.
static SIGHTS: PerProcess<Mutex<HashMap<Identity, Sight>>> = PerProcess::new();

/// What is seen of a process through its broker.
#[derive(Debug)]
enum Sight {
    /// Somebody has its socket, but has not answered yet.
    Asked(CloseOnFork),
    Seen(Watch),
    Ended,
}

impl Sight {
    fn first(peer: &Identity) -> Result<Self, Refusal> {
        let connection = conversation::begin(peer, Request::Stay, None)?;
        CloseOnFork::new(connection).map(Sight::Asked).ok_or(Refusal::Crowded)
    }

    /// Looks again; an error if nothing is known.
    fn look(self) -> Result<Self, Refusal> {
        let seen = match self {
            Sight::Asked(connection) => {
                let mut message = [0; MESSAGE_LEN];
                match socket::receive_plain(&connection, &mut message) {
                    Err(Errno::AGAIN | Errno::INTR) => return Ok(Sight::Asked(connection)),
                    Ok(0) | Err(_) => return Err(Refusal::HungUp),
                    Ok(len) => match Reply::parse(&message[..len]) {
                        Some(Reply::Granted) => Watch { fd: connection },
                        Some(Reply::Crowded) => return Err(Refusal::Crowded),
                        _ => return Err(Refusal::NotUnderstood),
                    },
                }
            }
            Sight::Seen(watch) => watch,
            Sight::Ended => return Ok(Sight::Ended),
        };
        Ok(if seen.has_ended() { Sight::Ended } else { Sight::Seen(seen) })
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
