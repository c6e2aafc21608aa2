//! The importer's end of a talk with a broker. It waits, but not for long: the exporter may be
//! stopped, flooded or hostile, and who waits here is a worker that others count on.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::message::{MESSAGE_LEN, Reply, Request};
use super::socket::{Credentials, Unconnected};
use super::{Identity, socket};
use crate::process::PerProcess;

/// How long an exporter may take to answer: longer than a broker's thread waits for its turn on a
/// busy machine, and than it keeps its places for those who say nothing.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long an exporter that did not is not asked again.
const REST: Duration = Duration::from_secs(5);
/// Between two attempts at a queue that is full.
const PAUSE: Duration = Duration::from_millis(2);

/// Why a broker gave nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// No such socket, or not for us.
    NobodyListens(Errno),
    /// The process that listens is not the exporter, or not of our user.
    NotTheExporter,
    /// No answer in time.
    Silent,
    /// It ended, or does not talk to us: it sends other users away without a word.
    HungUp,
    /// Memory that is not shared, or no more.
    Unknown,
    /// An answer we do not understand, or it does not understand us.
    NotUnderstood,
    /// Too many at once.
    Crowded,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::NobodyListens(Errno::CONNREFUSED) => f.write_str("nobody listens"),
            Refusal::NobodyListens(errno) => write!(f, "nobody listens ({errno})"),
            Refusal::NotTheExporter => f.write_str("the listener is not the exporter"),
            Refusal::Silent => write!(f, "no answer in {} s", PATIENCE.as_secs()),
            Refusal::HungUp => f.write_str("it hung up"),
            Refusal::Unknown => f.write_str("this memory is not shared (any more)"),
            Refusal::NotUnderstood => f.write_str("it speaks another version"),
            Refusal::Crowded => f.write_str("too many peers at once"),
        }
    }
}

/// Those who did not answer in time, and until when they are left alone.
static SILENT: PerProcess<Mutex<HashMap<Identity, Instant>>> = PerProcess::new();

/// Whether the peer did not answer a moment ago: it would not now.
fn was_silent(peer: &Identity) -> bool {
    let silent = SILENT.get().map(|silent| silent.lock().unwrap_or_else(PoisonError::into_inner));
    silent.is_some_and(|silent| silent.get(peer).is_some_and(|end| Instant::now() < *end))
}

fn note_silent(peer: &Identity) {
    let Ok(silent) = SILENT.get_or_make(|| Ok::<_, ()>(Mutex::default())) else { return };
    let mut silent = silent.lock().unwrap_or_else(PoisonError::into_inner);
    let now = Instant::now();
    silent.retain(|_, end| now < *end);
    silent.insert(*peer, now + REST);
}

/// Asks the broker of `peer`, and sends a descriptor along; the connection, and the descriptor that
/// came back.
pub(super) fn ask(
    peer: &Identity,
    request: Request,
    enclosed: Option<BorrowedFd<'_>>,
) -> Result<(OwnedFd, Option<OwnedFd>), Refusal> {
    if was_silent(peer) {
        return Err(Refusal::Silent);
    }
    let end = Instant::now() + PATIENCE;
    loop {
        match ask_once(peer, request, enclosed, end) {
            // Its queue is full: others are being served or sent away.
            Err(Refusal::NobodyListens(Errno::AGAIN) | Refusal::Crowded)
                if Instant::now() < end =>
            {
                std::thread::sleep(PAUSE);
            }
            Err(Refusal::Silent) => {
                note_silent(peer);
                return Err(Refusal::Silent);
            }
            answer => return answer,
        }
    }
}

/// Asks the broker of `peer`, and does not wait for the answer, which comes on the connection.
pub(super) fn begin(
    peer: &Identity,
    request: Request,
    enclosed: Option<BorrowedFd<'_>>,
) -> Result<OwnedFd, Refusal> {
    let is_exporter = |listener: Credentials| {
        let is_it = !peer.is_in_our_pid_namespace() || listener.pid == peer.pid;
        is_it && socket::is_same_user(listener)
    };
    let connection = socket::connect(peer, is_exporter).map_err(|why| match why {
        Unconnected::Nobody(errno) => Refusal::NobodyListens(errno),
        Unconnected::Another => Refusal::NotTheExporter,
    })?;
    match socket::send(connection.as_fd(), &request.pack(), enclosed) {
        // It may have said why before it hung up.
        Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => Ok(connection),
        Err(_) => Err(Refusal::HungUp),
    }
}

fn ask_once(
    peer: &Identity,
    request: Request,
    enclosed: Option<BorrowedFd<'_>>,
    end: Instant,
) -> Result<(OwnedFd, Option<OwnedFd>), Refusal> {
    let connection = begin(peer, request, enclosed)?;
    let mut message = [0; MESSAGE_LEN];
    let mut was_reset = false;
    let (len, dmabuf) = loop {
        wait(&connection, end)?;
        match socket::receive(connection.as_fd(), &mut message) {
            Ok((0, _)) => return Err(Refusal::HungUp),
            Ok(received) => break received,
            Err(Errno::AGAIN | Errno::INTR) => {}
            // It hung up without reading what we said; what it said comes after this error.
            Err(Errno::CONNRESET) if !was_reset => was_reset = true,
            Err(Errno::MSGSIZE) => return Err(Refusal::NotUnderstood),
            Err(_) => return Err(Refusal::HungUp),
        }
    };
    match Reply::parse(&message[..len]) {
        Some(Reply::Granted) => Ok((connection, dmabuf)),
        Some(Reply::Unknown) => Err(Refusal::Unknown),
        Some(Reply::Crowded) => Err(Refusal::Crowded),
        Some(Reply::NotUnderstood | Reply::Withdrawn(_)) | None => Err(Refusal::NotUnderstood),
    }
}

fn wait(connection: &OwnedFd, end: Instant) -> Result<(), Refusal> {
    let left = end.saturating_duration_since(Instant::now());
    let timeout = Timespec::try_from(left).map_err(|_| Refusal::Silent)?;
    match poll(&mut [PollFd::new(connection, PollFlags::IN)], Some(&timeout)) {
        Ok(0) => Err(Refusal::Silent),
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(_) => Err(Refusal::HungUp),
    }
}
