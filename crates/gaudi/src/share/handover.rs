//! How the descriptor of a dma-buf gets here: taken with `pidfd_getfd` where that is permitted, else
//! asked for at the exporter's broker.
//!
//! A key is only a claim. What is fetched must be what the exporter itself says belongs to the token,
//! whichever way it comes.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::Identity;
use super::conversation::{self, Refusal};
use super::export::Exporter;
use super::identity::start_time;
use super::keeper::Peer;
use super::key::{Fields, Line};
use super::ledger::{self, File};
use super::message::Request;
use super::sessions::Offers;
use super::watch;
use crate::{Error, ErrorKind};

pub(super) const OPENING: &str = "opening a peer's memory";

/// Which ways a descriptor may come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Handover {
    /// With `pidfd_getfd` where that is permitted, else from the exporter's broker.
    #[default]
    Try,
    /// With `pidfd_getfd` only.
    Pidfd,
    /// From the exporter's broker only.
    Broker,
}

static ALLOWED: AtomicU8 = AtomicU8::new(Handover::Try as u8);

/// Says which ways this process may fetch descriptors; both, unless told otherwise.
pub fn allow_handover(ways: Handover) {
    ALLOWED.store(ways as u8, Ordering::Relaxed);
}

fn is_switched_off(way: Way) -> bool {
    let allowed = ALLOWED.load(Ordering::Relaxed);
    allowed == Handover::Pidfd as u8 && way == Way::Broker
        || allowed == Handover::Broker as u8 && way == Way::Pidfd
}

/// The way a descriptor came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// It is this process's own.
    Own,
    Pidfd,
    Broker,
}

/// Why nothing was handed over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The exporter has ended.
    Ended,
    /// The exporter says that no such memory is shared: the token is wrong, or the offer was taken
    /// back.
    Withdrawn,
    /// Neither way is open; why.
    NoWay(String),
    /// What came is not what the key says.
    Mismatch(&'static str),
}

impl Failure {
    pub(super) fn error(&self, peer: &Identity) -> Error {
        let (kind, detail, remedy) = match self {
            Failure::Ended => (ErrorKind::ChannelFailed, format!("{peer} has ended"), ""),
            Failure::Withdrawn => (
                ErrorKind::ChannelFailed,
                format!("{peer} does not share this memory (any more)"),
                "use the keys of memory that is still registered there",
            ),
            Failure::NoWay(why) => (
                ErrorKind::PermissionDenied,
                format!("{peer} cannot hand over its dma-buf: {why}"),
                "run both as the same user, with a common network namespace or /dev/shm",
            ),
            Failure::Mismatch(what) => {
                (ErrorKind::ChannelFailed, format!("{peer} sent something else: {what}"), "")
            }
        };
        let mut error = Error::new(kind, OPENING, detail, remedy);
        if *self == Failure::Ended {
            error.set_errno(libc::ESRCH);
        }
        error
    }
}

/// Fetches the dma-buf that a key names, from this process itself or from `peer`.
pub(super) fn fetch(key: &Fields, peer: Option<&Peer>) -> Result<(OwnedFd, Way), Failure> {
    let (dmabuf, file, way) = match peer {
        Some(peer) => fetch_from(peer, key)?,
        None => {
            let exporter = Exporter::if_any().ok_or(Failure::Withdrawn)?;
            let dmabuf = exporter.fetch(&key.offered()).ok_or(Failure::Withdrawn)?;
            looked_at(dmabuf, Way::Own)?
        }
    };
    match file.size() == key.dmabuf_len() {
        true => Ok((dmabuf, way)),
        false => Err(Failure::Mismatch("a file of another length")),
    }
}

fn looked_at(dmabuf: OwnedFd, way: Way) -> Result<(OwnedFd, File, Way), Failure> {
    let file = File::of(dmabuf.as_fd()).map_err(|_| Failure::Mismatch("not a file"))?;
    Ok((dmabuf, file, way))
}

fn fetch_from(peer: &Peer, key: &Fields) -> Result<(OwnedFd, File, Way), Failure> {
    let not_taken = match (key.line, peer.process()) {
        _ if is_switched_off(Way::Pidfd) => "switched off".to_owned(),
        (None, _) => "it has no ledger".to_owned(),
        (_, Err(why)) => why.to_owned(),
        (Some(line), Ok(process)) => match take(key, line, process, peer) {
            Ok((dmabuf, file)) => return Ok((dmabuf, file, Way::Pidfd)),
            Err(NotTaken::Ended) => return Err(Failure::Ended),
            // The broker knows; and its answer may differ, if the ledger is just being written.
            Err(NotTaken::Unconfirmed) => "its ledger does not list it".to_owned(),
            Err(NotTaken::Os(errno)) => errno.to_string(),
        },
    };
    if is_switched_off(Way::Broker) {
        return Err(Failure::NoWay(format!("pidfd_getfd: {not_taken}; broker: switched off")));
    }
    match conversation::ask(&key.peer, Request::Fetch(key.offered()), None) {
        Ok((_, Some(dmabuf))) => looked_at(dmabuf, Way::Broker),
        Ok((_, None)) => Err(Failure::Mismatch("an answer without a descriptor")),
        Err(Refusal::Unknown) => Err(Failure::Withdrawn),
        Err(_) if watch::has_surely_ended(&key.peer) => Err(Failure::Ended),
        Err(refusal) => Err(Failure::NoWay(format!("pidfd_getfd: {not_taken}; broker: {refusal}"))),
    }
}

enum NotTaken {
    Ended,
    /// The ledger does not confirm what the key says.
    Unconfirmed,
    Os(Errno),
}

/// Takes the dma-buf out of the exporter, if the exporter's ledger says so.
fn take(
    key: &Fields,
    line: Line,
    process: BorrowedFd<'_>,
    peer: &Peer,
) -> Result<(OwnedFd, File), NotTaken> {
    let get = |number: i32| {
        pidfd_getfd(process, number, PidfdGetfdFlags::empty()).map_err(|errno| match errno {
            Errno::SRCH => NotTaken::Ended,
            Errno::BADF => NotTaken::Unconfirmed,
            errno => NotTaken::Os(errno),
        })
    };
    let book = peer.ledger(|| {
        let book = get(line.ledger as i32)?;
        ledger::belongs_to(&book, &key.peer).then_some(book).ok_or(NotTaken::Unconfirmed)
    })?;
    let entry = ledger::read(book, line.number).ok_or(NotTaken::Unconfirmed)?;
    if entry.base != key.base || !entry.token.matches(&key.token) {
        return Err(NotTaken::Unconfirmed);
    }
    let dmabuf = get(entry.fd)?;
    // The number may have a new meaning since the line was read.
    let is_it = File::of(dmabuf.as_fd()) == Ok(entry.file);
    is_it.then_some((dmabuf, entry.file)).ok_or(NotTaken::Unconfirmed)
}

/// A handle of exactly this process, not of one that has its number now; `None` if it has ended.
/// Or why there can be none.
pub(super) fn pidfd_of(peer: &Identity) -> Result<Option<OwnedFd>, String> {
    let Some(pid) = i32::try_from(peer.pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
    let process = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process) => process,
        // Nobody, or (as newer and older kernels say it) only a thread has this number.
        Err(Errno::SRCH | Errno::NOENT | Errno::INVAL) => return Ok(None),
        Err(errno) => return Err(format!("pidfd_open: {errno}")),
    };
    // If the number was reused before the handle was opened, the start time differs; if after, the
    // handle is of a process that has ended, and gives nothing.
    if !proc_is_ours() {
        return Err("/proc is another pid namespace's".to_owned());
    }
    match start_time(&peer.pid.to_string()) {
        Some(start) if start as u32 == peer.start => Ok(Some(process)),
        Some(_) => Ok(None),
        None => Err("/proc does not show it".to_owned()),
    }
}

/// Whether `/proc` has the numbers of our own pid namespace.
fn proc_is_ours() -> bool {
    let own = fs::read_link("/proc/self");
    own.is_ok_and(|link| link.to_str().and_then(|pid| pid.parse().ok()) == Some(process::id()))
}
